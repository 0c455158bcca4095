"""Data sets by name: open, list and check them.

A name is a family, followed by the part for sets with parts: `cifar10`, `cifar10-c/fog/5`, `cifar10.1/v4`,
`cifar10-gradual/shot_noise`. `expand` expands patterns like `cifar10-c/*/5` to names.

To add a set, define a `Family` and add it to `FAMILIES`.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from testtime.data import cifar, cifar100, digits, folder, imagenet, imagenet_variants, vid
from testtime.data.corrupted import make_corrupted
from testtime.data.family import Family, Root, collect_faults
from testtime.data.gradual import make_gradual
from testtime.data.held_out import make_held_out
from testtime.data.packing import find_damage
from testtime.data.paths import data_root
from testtime.data.sets import DataError, OnBad, TestSet
from testtime.progress import Progress

State = Literal["built in", "ready", "generated", "incomplete", "missing"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        digits.DIGITS,
        make_corrupted(digits.DIGITS, "the digits"),
        make_gradual(digits.DIGITS, "the digits"),
        *make_held_out(digits.DIGITS, "the digits' training set"),
        cifar.CIFAR10,
        cifar.CIFAR10_C,
        make_gradual(cifar.CIFAR10, "CIFAR-10's test set"),
        *make_held_out(cifar.CIFAR10, "CIFAR-10's training set"),
        cifar.CIFAR10_1,
        cifar100.CIFAR100,
        cifar100.CIFAR100_C,
        *make_held_out(cifar100.CIFAR100, "CIFAR-100's training set"),
        imagenet.IMAGENET,
        imagenet.IMAGENET_C,
        make_gradual(imagenet.IMAGENET, "ImageNet's validation set"),
        imagenet_variants.IMAGENET_V2,
        imagenet_variants.IMAGENET_R,
        imagenet_variants.IMAGENET_A,
        vid.VID_ROBUST,
        vid.VID_CIFAR7,
        folder.FOLDER,
    )
}
"""Name → family."""


def find(name: str, *also: str) -> Family:
    """Return the family of a set.

    Args:
        name: The set's name, for example `cifar10-c/fog/5`.
        *also: Other valid names, for the error message.

    Raises:
        ValueError: The family is unknown.
    """
    family = name.split("/", 1)[0]
    if family not in FAMILIES:
        known = (*FAMILIES, *also)
        near = difflib.get_close_matches(family, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`name` must be one of {', '.join(known)}; got {name!r}.{hint}")
    return FAMILIES[family]


def _resolve(name: str, *also: str) -> tuple[Family, str]:
    """Return the family and the part of a set."""
    family = find(name, *also)
    if "/" in name and not any(family.parts):
        raise ValueError(f"{family.name} has no parts, got {name!r}.")
    return family, name.partition("/")[2]


def open(name: str, root: Root = None, split: Literal["train", "test"] = "test", **options: Any) -> TestSet:
    """Open a data set.

    Args:
        name: For example `digits`, `cifar10-c/fog/5`, `cifar10.1`, `cifar10-gradual/shot_noise`, `vid-robust` or
            `folder`.
        root: The data root (for `folder`: the folder itself); None: the environment variable `TESTTIME_DATA`, else the
            user's cache folder.
        split: `train` is available for `digits`, `cifar10`, `cifar100` and `imagenet`.
        **options: Options of the set, for example `size` for pictures or `seed` for generated sets.

    Returns:
        The set, which is read in chunks.

    Raises:
        ValueError: The name or an option is unknown.
        DataError: The set is missing, or one of its files is damaged.
    """
    family, part = _resolve(name)
    if split not in ("train", "test"):
        raise ValueError(f"`split` must be 'train' or 'test', got {split!r}.")
    if split == "train" and not family.has_train:
        raise ValueError(f"{family.name} has no training split.")
    try:
        return family.open(part, root, split, **options)
    except TypeError as error:
        # Python raises TypeError for an unknown argument.
        if "unexpected keyword argument" not in str(error):
            raise
        wrong = str(error).rsplit("'", 2)[-2]
        raise ValueError(f"{family.name} has no option `{wrong}`.") from None


def names() -> tuple[str, ...]:
    """Return all names that `open` accepts, including all parts, in the order of the paper's tables."""
    return tuple(name for family in FAMILIES.values() for name in family.names)


def is_folder(text: str) -> bool:
    """Whether a text names a folder of pictures rather than a set; names of sets take precedence."""
    return text.split("/", 1)[0] not in FAMILIES and Path(text).expanduser().is_dir()


def expand(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Expand patterns to names, without duplicates, in the order given.

    Args:
        patterns: Names; names with `*`, like `cifar10-c/*/5`; or prefixes of names with parts (`cifar10-c`,
            `cifar10-c/fog`), for all parts.

    Raises:
        ValueError: A pattern matches nothing.
    """
    known = names()
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fits = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        fits = fits or [name for name in known if name.startswith(f"{pattern}/")]
        # Official files may contain more than the fifteen corruptions; only `open` can tell.
        if not fits and "*" not in pattern and pattern.split("/", 1)[0] in FAMILIES:
            fits = [pattern]
        if not fits:
            raise ValueError(_describe_unknown(pattern))
        found.update(dict.fromkeys(fits))
    return tuple(found)


def _describe_unknown(pattern: str) -> str:
    """Say that a text names neither a set nor a folder, and what it may have meant."""
    path = Path(pattern.rstrip("/") or "/")
    looks_like_folder = pattern.endswith("/") or pattern.startswith((".", "/", "~")) or len(path.parts) > 1
    near = difflib.get_close_matches(pattern.split("/", 1)[0], FAMILIES, n=1)
    if looks_like_folder and not near:
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # no such user; a null character
            folders = [inner.name for inner in path.expanduser().parent.iterdir() if inner.is_dir()]
            near = [str(path.parent / name) for name in difflib.get_close_matches(path.name, folders, n=1)]
        return f"{pattern}: no such folder" + (f"; did you mean {near[0]}/?" if near else ".")
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{pattern!r} matches no data set; sets are {', '.join(FAMILIES)}, or a folder of images.{hint}"


@dataclass(frozen=True)
class Description:
    """The state of a set on disk.

    Attributes:
        name: The set.
        what: One-line description.
        path: Its actual or expected path; None for a bundled set.
        state: `built in`, `ready`, `generated` (from another set that is ready), `incomplete` or `missing`.
        detail: What is incomplete, or how to get it.
    """

    name: str
    what: str
    path: Path | None
    state: State
    detail: str = ""


def describe_all(root: Root = None) -> list[Description]:
    """Describe all known sets.

    Args:
        root: The data root; None: the default.
    """
    return [describe(family.name, root) for family in FAMILIES.values() if family.parts]


def describe(name: str, root: Root = None) -> Description:
    """Describe one set."""
    known = [family.name for family in FAMILIES.values() if family.parts]
    if name not in known:
        raise ValueError(f"`name` must be one of {', '.join(known)}; got {name!r}.")
    family = FAMILIES[name]
    if family.is_bundled:
        return Description(name, family.what, None, "built in")
    path = None if family.find is None else family.find(root)
    if path is not None:
        fault = _find_fault(family, root, path)
        return Description(name, family.what, path, "incomplete" if fault else "ready", fault or "")
    base = None if family.base is None else describe(family.base.name, root)
    if base is not None and (family.find is None or base.state == "incomplete"):
        state: State = "generated" if base.state == "ready" else base.state
        return Description(name, family.what, base.path, state, base.detail)
    usual = data_root(root)
    hint = f"testtime data get {name}" if family.remotes else family.elsewhere.format(root=usual)
    state = "generated" if base is not None and base.state == "ready" else "missing"
    return Description(name, family.what, usual / family.folder, state, hint)


def _find_fault(family: Family, root: Root, path: Path) -> str | None:
    try:
        return family.find_fault(root, path)
    except DataError as error:
        return str(error)


def pack_all(
    patterns: str | Iterable[str],
    root: Root = None,
    *,
    size: int = 224,
    on_bad: OnBad = "fail",
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[TestSet]:
    """Decode or generate sets of photographs once, and store them in `packed` under the data root.

    `open` reads them from there as long as their sources are unchanged.

    Args:
        patterns: As for `expand`: `imagenet`, `imagenet-c/*/5`, ….
        root: The data root, or the folder with `train` and `val`.
        size: Height and width of the images.
        on_bad: What to do with unreadable pictures.
        device: Device to generate corrupted images on.
        progress: Called with the number of images done and their total, over all sets.

    Returns:
        The packed sets.

    Raises:
        ValueError: A set cannot be packed.
        DataError: A set is missing, or a picture cannot be read.
    """
    names = expand(patterns)
    for name in names:
        if not find(name).packs:
            packable = " and ".join(family.name for family in FAMILIES.values() if family.packs)
            raise ValueError(f"Only {packable} can be packed, got {name!r}.")
    found: list[TestSet] = []
    for number, name in enumerate(names):

        def advance(done: int, total: int, word: str, number: int = number) -> None:
            if progress is not None:
                progress(number * total + done, len(names) * total, word)

        options: dict[str, Any] = {"device": device} if find(name).base is not None else {}
        found.append(open(name, root, size=size, packed=True, on_bad=on_bad, progress=advance, **options))
    return found


def check(name: str, root: Root = None, progress: Progress | None = None) -> list[str]:
    """Read a whole set and list its faults.

    Args:
        name: A set (`cifar10-c`), a part of one (`imagenet-c/fog/5`), `folder`, or `packed` for all packed sets under
            the data root.
        root: The data root (for `folder`: the folder itself).
        progress: Called with the number of samples or files read and their total.

    Returns:
        One line per fault, with the name of the file; empty if there are none.

    Raises:
        ValueError: The set is unknown.
    """
    if name == "packed":
        packed = sorted(path.parent for path in (data_root(root) / "packed").glob("*/index.json"))
        return collect_faults(packed, find_damage, progress)
    family, _ = _resolve(name, "packed")
    parts = [known.partition("/")[2] for known in expand(name)]
    while family.base is not None and (family.find is None or family.find(root) is None):
        family, parts = family.base, [""]  # generated: check its source
    return family.check(parts, root, progress)
