"""Fetch public data sets from their official places, when asked to and never otherwise.

A transfer goes into a `.part` file beside its target and goes on from there after an interruption; the file gets its
name only once its checksum is right. Archives are extracted into a folder that gets its name only when complete.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from testtime.data import cifar
from testtime.data.places import data_root
from testtime.data.sets import DataError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Remote:
    """A file to fetch.

    Attributes:
        url: Where it is.
        md5: The publisher's checksum; None where none is published, and the file is checked by reading it.
        folder: What an archive extracts to, or the folder that a plain file belongs in.
        archive: Whether it is an archive.
    """

    url: str
    md5: str | None
    folder: str
    archive: bool = True


_CIFAR10_1 = "https://raw.githubusercontent.com/modestyachts/CIFAR-10.1/master/datasets"
REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", cifar.BINARY
        ),
    ),
    "cifar10-c": (
        Remote(
            "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
            "56bf5dcef84df0e2308c6dcbcbbd8499",
            cifar.CORRUPTED,
        ),
    ),
    "cifar10.1": tuple(
        Remote(f"{_CIFAR10_1}/cifar10.1_{version}_{part}.npy", None, "CIFAR-10.1", archive=False)
        for version in ("v4", "v6")
        for part in ("data", "labels")
    ),
}

ELSEWHERE = {
    "imagenet": "ImageNet needs an account at https://image-net.org; put its train and val folders, with a folder for "
    "each WordNet id, into {root}/imagenet",
    "imagenet-c": "ImageNet-C is at https://zenodo.org/records/2235448 (about 70 GB); extract its archives into "
    "{root}/imagenet-c. Without it, it is generated from ImageNet",
    "vid-robust": "VID-Robust is at https://modestyachts.github.io/natural-perturbations-website; extract it to "
    "{root}/imagenet-vid-robust",
}
ELSEWHERE["vid-cifar7"] = ELSEWHERE["vid-robust"]


def remotes(name: str, root: str | os.PathLike[str] | None = None) -> tuple[Remote, ...]:
    """The files that `get` would fetch; nothing is transferred.

    Raises:
        ValueError: There is no such set, or it has no public download; says where to get it.
    """
    if name in ELSEWHERE:
        raise ValueError(f"{name} cannot be downloaded directly. {ELSEWHERE[name].format(root=data_root(root))}.")
    if name.startswith("digits"):
        raise ValueError(f"{name} ships with the package; there is nothing to download.")
    if name not in REMOTES:
        raise ValueError(f"`name` must be one of {', '.join(REMOTES)}; got {name!r}.")
    return REMOTES[name]


def get(name: str, root: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Download a data set into the data root; what is there already is left alone.

    Args:
        name: `cifar10`, `cifar10-c` or `cifar10.1`.
        root: The data root; see `places.data_root`.
        progress: Told how many bytes of how many have arrived, where the server says how many there are.

    Returns:
        The folder in which the set now is.

    Raises:
        ValueError: There is no such set, or it has no public download; says where to get it.
        DataError: The transfer failed, or what arrived is not what it should be.
    """
    root = data_root(root)
    for remote in remotes(name, root):
        target = root / remote.folder
        file = remote.url.rsplit("/", 1)[-1]
        if remote.archive:
            if not target.is_dir():
                archive = fetch(remote.url, root / file, remote.md5, progress)
                extract(archive, target)
                archive.unlink()
        elif not (target / file).is_file():
            fetch(remote.url, target / file, remote.md5, progress)
    if name == "cifar10.1":
        for version in cifar.SIZES_10_1:
            _read_through(root, version)
    return root / REMOTES[name][0].folder


def _read_through(root: Path, version: Literal["v4", "v6"]) -> None:
    """Open CIFAR-10.1, whose files have no published checksum; what cannot be read must not stay and look complete."""
    try:
        cifar.load_10_1(root, version)
    except DataError:
        for path in (root / "CIFAR-10.1").glob(f"cifar10.1_{version}_*.npy"):
            path.unlink()
        raise


def fetch(
    url: str,
    path: Path,
    md5: str | None = None,
    progress: Progress | None = None,
    attempts: int = 3,
    timeout: float = 30.0,
) -> Path:
    """Download one file, going on with a `.part` file that an earlier transfer left.

    Args:
        url: Where it is.
        path: What it becomes.
        md5: Its checksum; None does not check.
        progress: As in `get`.
        attempts: How often to connect before giving up.
        timeout: Seconds to wait for the server at any point.

    Returns:
        `path`.

    Raises:
        DataError: The server cannot be reached or refuses, the transfer broke off, or the checksum is wrong.
    """
    if path.is_file() and (md5 is None or _md5(path) == md5):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    resumed = part.exists() and part.stat().st_size > 0
    fault = ""
    for _ in range(attempts):
        try:
            if _transfer(url, part, progress, timeout):
                break
            fault = "the connection closed early"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and part.exists():
                # Nothing is left to send: the part is whole, or it is not a part of this file at all.
                if md5 is not None and _md5(part) == md5:
                    break
                part.unlink()
                resumed = False
                fault = "the part on disk did not fit"
                continue
            if error.code < 500:
                raise DataError(url, f"the server answers {error.code} {error.reason}") from None
            fault = f"the server answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            fault = str(reason) or type(reason).__name__
        log.info("%s: %s", url, fault)
    else:
        if part.exists() and part.stat().st_size:
            raise DataError(url, f"broke off after {part.stat().st_size:,} bytes ({fault}); run again to go on")
        raise DataError(url, f"cannot be reached ({fault}); is this machine online?")
    found = _md5(part) if md5 is not None else None
    if found != md5:
        part.unlink()
        again = "; the part from an earlier transfer may be to blame, run again" if resumed else ""
        raise DataError(path, f"has md5 {found} instead of {md5} and was deleted{again}")
    os.replace(part, path)
    return path


def _transfer(url: str, part: Path, progress: Progress | None, timeout: float) -> bool:
    """Append what is missing to `part`; whether it is now as long as the server says the file is."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "testtime", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        goes_on = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if goes_on else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length and length.isdecimal() else None
        with open(part, "ab" if goes_on else "wb") as file:
            while content := answer.read(1 << 18):
                file.write(content)
                have += len(content)
                if progress is not None and total is not None:
                    progress(have, total)
    return total is None or have == total


def extract(archive: Path, target: Path) -> None:
    """Extract the folder `target.name` of an archive to `target`, whole or not at all.

    Raises:
        DataError: The archive is damaged, holds links or paths that lead out of it, or lacks the folder.
    """
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        try:
            with tarfile.open(archive, "r:*") as tar:
                for member in tar:
                    if member.issym() or member.islnk():
                        raise DataError(archive, f"holds the link {member.name!r}")
                    tar.extract(member, temporary, filter="data")
        except DataError:
            raise
        except OSError as error:
            if error.errno is not None:  # the disk, not the archive
                raise
            raise DataError(archive, f"not a readable archive ({error})") from None
        except Exception as error:  # tarfile, gzip, zlib and lzma each have their own errors for damage
            raise DataError(archive, f"not a readable archive ({error})") from None
        folder = Path(temporary) / target.name
        if not folder.is_dir():
            raise DataError(archive, f"does not hold the folder {target.name}")
        shutil.move(folder, target)


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while content := file.read(1 << 20):
            digest.update(content)
    return digest.hexdigest()
