"""Download public data sets from their official sites, only on request.

A file is transferred to a `.part` file next to its target, which resumes after an interruption, and renamed once its
size and checksum are verified. Archives are extracted to a temporary folder that is renamed when complete. Only one
process at a time can download into a data root.
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
from testtime.data.sets import DataError, convert_file_errors
from testtime.progress import Progress
from testtime.storage import error_text, hold_folder

log = logging.getLogger(__name__)

# Limits of an archive; CIFAR-100-C, the largest, has 20 files and 3 GB.
_MOST_FILES, _MOST_BYTES = 1_000, 8 << 30


def remotes(name: str, root: Root = None) -> tuple[Remote, ...]:
    """Return the files that `get` downloads.

    Raises:
        ValueError: The set is unknown or has no public download; the message says where to get it.
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
    """Download a data set into the data root; existing files are not replaced.

    Args:
        name: `cifar10`, `cifar10-c`, `cifar10.1`, `cifar100` or `cifar100-c`.
        root: The data root; see `paths.data_root`.
        progress: Called with the number of bytes received and their total.

    Returns:
        The folder of the set.

    Raises:
        ValueError: The set is unknown or has no public download; the message says where to get it.
        DataError: The transfer failed, the checksum does not match, or another process is downloading.
    """
    wanted = remotes(name, root)
    root = data_root(root)
    try:
        with convert_file_errors(), hold_folder(root):
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
    """Download one file, resuming from the `.part` file of an earlier transfer; not safe for concurrent processes.

    Args:
        url: Its URL.
        path: The target.
        size: Its size in bytes; no more is read.
        checksum: `md5:` or `sha256:` and the hexadecimal digest.
        progress: As in `get`.
        attempts: Number of connection attempts.
        timeout: Timeout of network operations in seconds.

    Returns:
        `path`.

    Raises:
        DataError: The server cannot be reached or returns an error, or the file is incomplete or has another checksum.
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
            raise DataError(url, f"interrupted after {_length(part):,} bytes ({fault})", "run again to resume")
        raise DataError(url, f"cannot be reached ({fault})", "is this machine online?")
    found = _hash(part, checksum)
    if found != checksum:
        part.unlink()
        remedy = "the cause may be the partial file of an earlier transfer, run again" if resumed else ""
        raise DataError(path, f"has {found} instead of {checksum} and was deleted", remedy)
    os.replace(part, path)
    return path


def _try_transfer(url: str, part: Path, size: int, progress: Progress | None, timeout: float) -> str:
    """Transfer the missing rest of `part`; return a description of a transient fault, or an empty string."""
    try:
        _transfer(url, part, size, progress, timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part is larger than the file
            part.unlink(missing_ok=True)
        elif error.code < 500:
            raise DataError(url, f"the server answers {error.code} {error.reason}") from None
        return f"the server answers {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return error_text(reason) if isinstance(reason, BaseException) else str(reason)
    return "" if _length(part) == size else "the connection closed early"


def _transfer(url: str, part: Path, size: int, progress: Progress | None, timeout: float) -> None:
    """Append the missing rest to `part`, up to `size`."""
    have = _length(part)
    if have == size:
        return
    request = urllib.request.Request(url, headers={"User-Agent": "testtime", "Accept-Encoding": "identity"})
    if 0 < have < size:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        resumes = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if resumes else 0
        length = answer.headers.get("Content-Length", "")
        # The header is optional.
        if length.isdecimal() and have + int(length) != size:
            raise DataError(url, f"offers {have + int(length):,} bytes, the file has {size:,}")
        with open(part, "ab" if resumes else "wb") as file:
            while content := answer.read(1 << 18):
                have += len(content)
                if have > size:
                    file.close()
                    part.unlink()
                    raise DataError(url, f"sends more than {size:,} bytes, the size of the file")
                try:
                    file.write(content)
                    file.flush()
                except OSError as error:
                    raise DataError(part, f"cannot be written ({error_text(error)})", "run again to resume") from None
                if progress is not None:
                    progress(have, size, "")


def extract(archive: Path, target: Path, files: int = _MOST_FILES, size: int = _MOST_BYTES) -> None:
    """Extract the folder `target.name` of an archive to `target`, atomically.

    Args:
        archive: The archive.
        target: The folder to create.
        files: Maximum number of members.
        size: Maximum total size of the members in bytes.

    Raises:
        DataError: The archive is damaged, exceeds the limits, holds anything but files and folders or paths that lead
            out of it, or lacks the folder.
    """
    for left in target.parent.glob(f".{target.name}.*.part"):  # of killed processes
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
    """Return the checksum of a file, of the same kind as another."""
    kind = checksum.partition(":")[0]
    digest = hashlib.new(kind, usedforsecurity=False)
    with open(path, "rb") as file:
        while content := file.read(1 << 20):
            digest.update(content)
    return f"{kind}:{digest.hexdigest()}"
