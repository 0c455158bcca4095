"""Download public data sets from their official sites, when asked to and never otherwise.

A transfer goes into a `.part` file next to its target and goes on from there after an interruption; the file gets its
name only once its length and its checksum are right. Archives are extracted into a folder that gets its name only when
complete. One process at a time downloads into a data root; a second one is refused.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from testtime.data.archives import read_archive
from testtime.data.families import FAMILIES
from testtime.data.family import Remote, Root
from testtime.data.paths import data_root
from testtime.data.sets import DataError, as_data_errors
from testtime.progress import Progress
from testtime.storage import error_text, hold_folder

log = logging.getLogger(__name__)

# Of an extracted archive; CIFAR-10-C, the largest here, has 20 files and 3 GB.
_MOST_FILES, _MOST_BYTES = 1_000, 8 << 30


def remotes(name: str, root: Root = None) -> tuple[Remote, ...]:
    """The files that `get` would fetch; nothing is transferred.

    Raises:
        ValueError: There is no such set, or it has no public download; says where to get it.
    """
    family = FAMILIES.get(name)
    if family is not None and family.remotes:
        return family.remotes
    if family is not None and family.elsewhere:
        raise ValueError(f"{name} cannot be downloaded directly. {family.elsewhere.format(root=data_root(root))}.")
    if family is not None and family.is_bundled:
        raise ValueError(f"{name} is bundled with the package; there is nothing to download.")
    known = ", ".join(family.name for family in FAMILIES.values() if family.remotes)
    raise ValueError(f"`name` must be one of {known}; got {name!r}.")


def get(name: str, root: Root = None, progress: Progress | None = None) -> Path:
    """Download a data set into the data root; what is there already is left alone.

    Args:
        name: `cifar10`, `cifar10-c` or `cifar10.1`.
        root: The data root; see `paths.data_root`.
        progress: Called with how many of how many bytes have arrived.

    Returns:
        The folder in which the set now is.

    Raises:
        ValueError: There is no such set, or it has no public download; says where to get it.
        DataError: The transfer failed, what arrived is not what it should be, or another process is downloading.
    """
    wanted = remotes(name, root)
    root = data_root(root)
    try:
        with as_data_errors(), hold_folder(root):
            for remote in wanted:
                target = root / remote.folder
                file = remote.url.rsplit("/", 1)[-1]
                if not remote.archive and not (target / file).is_file():
                    fetch(remote.url, target / file, remote.size, remote.checksum, progress)
                elif remote.archive and not target.is_dir():
                    archive = fetch(remote.url, root / file, remote.size, remote.checksum, progress)
                    extract(archive, target)
                    archive.unlink()
    except OSError as error:
        raise DataError(error.filename or root, f"cannot be written ({error_text(error)})") from None
    return root / wanted[0].folder


def fetch(
    url: str,
    path: Path,
    size: int,
    checksum: str,
    progress: Progress | None = None,
    attempts: int = 3,
    timeout: float = 30.0,
) -> Path:
    """Download one file, going on with a `.part` file that an earlier transfer left; one process at a time.

    Args:
        url: Where it is.
        path: What it becomes.
        size: Its length; nothing shorter is accepted, and nothing beyond it is read.
        checksum: `md5:` or `sha256:` and the digits.
        progress: As in `get`.
        attempts: How often to connect before giving up.
        timeout: Seconds to wait for the server at any point.

    Returns:
        `path`.

    Raises:
        DataError: The server cannot be reached or refuses, the transfer broke off, or what came is something else.
    """
    if path.is_file() and path.stat().st_size == size and _hash(path, checksum) == checksum:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    resumed = _length(part) > 0
    fault = ""
    for _ in range(attempts):
        fault = _try_transfer(url, part, size, progress, timeout)
        if not fault:
            break
        log.info("%s: %s", url, fault)
    else:
        if _length(part):
            raise DataError(url, f"broke off after {_length(part):,} bytes ({fault})", "run again to go on")
        raise DataError(url, f"cannot be reached ({fault})", "is this machine online?")
    found = _hash(part, checksum)
    if found != checksum:
        part.unlink()
        remedy = "the part from an earlier transfer may be to blame, run again" if resumed else ""
        raise DataError(path, f"has {found} instead of {checksum} and was deleted", remedy)
    os.replace(part, path)
    return path


def _try_transfer(url: str, part: Path, size: int, progress: Progress | None, timeout: float) -> str:
    """Transfer what is missing of `part`; what went wrong if that may be otherwise next time, else nothing."""
    try:
        _transfer(url, part, size, progress, timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part goes beyond what the server has
            part.unlink(missing_ok=True)
        elif error.code < 500:
            raise DataError(url, f"the server answers {error.code} {error.reason}") from None
        return f"the server answers {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return error_text(reason) if isinstance(reason, BaseException) else str(reason)
    return "" if _length(part) == size else "the connection closed early"


def _transfer(url: str, part: Path, size: int, progress: Progress | None, timeout: float) -> None:
    """Append what is missing to `part`, and nothing beyond `size`."""
    have = _length(part)
    if have == size:
        return
    request = urllib.request.Request(url, headers={"User-Agent": "testtime", "Accept-Encoding": "identity"})
    if 0 < have < size:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        goes_on = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if goes_on else 0
        length = answer.headers.get("Content-Length", "")
        # A server need not say how long its answer is; then only the answer itself shows it.
        if length.isdecimal() and have + int(length) != size:
            raise DataError(url, f"offers {have + int(length):,} bytes, the file has {size:,}")
        with open(part, "ab" if goes_on else "wb") as file:
            while content := answer.read(1 << 18):
                have += len(content)
                if have > size:
                    file.close()
                    part.unlink()
                    raise DataError(url, f"sends more than the {size:,} bytes that the file has")
                try:
                    file.write(content)
                    file.flush()
                except OSError as error:
                    raise DataError(part, f"cannot be written ({error_text(error)})", "run again to go on") from None
                if progress is not None:
                    progress(have, size, "")


def extract(archive: Path, target: Path, files: int = _MOST_FILES, size: int = _MOST_BYTES) -> None:
    """Extract the folder `target.name` of an archive to `target`, whole or not at all.

    Args:
        archive: The archive.
        target: The folder to make.
        files: The most members to accept.
        size: The most bytes to accept in all of them together.

    Raises:
        DataError: The archive is damaged, beyond the limits, holds something else than files and folders or paths that
            lead out of it, or lacks the folder.
    """
    for left in target.parent.glob(f".{target.name}.*.part"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".part", dir=target.parent) as temporary:
        folder = Path(temporary, target.name)
        for name, start, content in read_archive(archive, files, size):
            if not name.startswith(f"{target.name}/"):
                continue
            path = Path(temporary, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab" if start else "xb") as file:
                file.write(content)
        if not folder.is_dir():
            raise DataError(archive, f"does not hold the folder {target.name}")
        os.replace(folder, target)


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _hash(path: Path, checksum: str) -> str:
    """A file's checksum of the same kind as another."""
    kind = checksum.partition(":")[0]
    digest = hashlib.new(kind, usedforsecurity=False)
    with open(path, "rb") as file:
        while content := file.read(1 << 20):
            digest.update(content)
    return f"{kind}:{digest.hexdigest()}"
