"""The data sets by name: open one, list what is there, check it.

A name is a set, and for sets with parts the parts after slashes: `cifar10`, `cifar10-c/fog/5`, `cifar10.1/v4`,
`cifar10-gradual/shot_noise`. `expand` turns patterns such as `cifar10-c/*/5` into names.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from testtime.data import cifar, digits, folder, imagenet, vid
from testtime.data.corrupted import Corrupted
from testtime.data.download import ELSEWHERE, REMOTES
from testtime.data.gradual import NOISES, Gradual
from testtime.data.pack import find_damage
from testtime.data.places import data_root
from testtime.data.sets import DataError, OnBad, TestSet

Root = str | os.PathLike[str] | None
State = Literal["built in", "ready", "generated", "incomplete", "missing"]
Progress = Callable[[int, int], None]

SIZED = ("digits", "imagenet", "vid-robust", "folder")
"""How the families begin whose images have the size one asks for."""

WHAT = {
    "digits": "1,797 handwritten digits, 16×16 gray, 10 classes",
    "digits-c": "the digits under the 15 corruptions, 5 levels",
    "digits-gradual": "the digits under growing noise, 3 noises",
    "cifar10": "CIFAR-10: 60,000 images, 32×32, 10 classes",
    "cifar10-c": "CIFAR-10's test set under the 15 corruptions, 5 levels",
    "cifar10-gradual": "CIFAR-10's test set under growing noise, 3 noises",
    "cifar10.1": "CIFAR-10.1: 2,000 new test images for CIFAR-10 (v6; v4 has 2,021)",
    "imagenet": "ImageNet: 1,000 classes",
    "imagenet-c": "ImageNet's validation set under the 15 corruptions, 5 levels",
    "imagenet-gradual": "ImageNet's validation set under growing noise, 3 noises",
    "vid-robust": "VID-Robust: 1,109 video frames, 30 classes, for ImageNet networks",
    "vid-cifar7": "VID-Robust's frames of 7 classes at 32×32, for CIFAR-10 networks",
    "folder": "any folder of pictures, with a folder for each class or without labels",
}
"""Every set that can be opened, and what it is."""


def open(name: str, root: Root = None, split: Literal["train", "test"] = "test", **options: Any) -> TestSet:
    """Open a data set.

    Args:
        name: Such as `digits`, `cifar10-c/fog/5`, `cifar10.1`, `cifar10-gradual/shot_noise`, `vid-robust`, `folder`.
        root: Where data sets are looked for (for `folder`: the folder itself); None takes the environment variable
            `TESTTIME_DATA`, else the user's cache folder.
        split: `train` where the set has one (`digits`, `cifar10`, `imagenet`).
        **options: What that set's own function takes, such as `size` for pictures or `seed` for generated sets.

    Returns:
        The set, read by the chunk.

    Raises:
        ValueError: The name or an option is wrong.
        DataError: The set is not there, or a file of it is damaged.
    """
    family, *parts = name.split("/")
    if family not in WHAT:
        near = difflib.get_close_matches(family, WHAT, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`name` must be one of {', '.join(WHAT)}; got {name!r}.{hint}")
    if split not in ("train", "test"):
        raise ValueError(f"`split` must be 'train' or 'test', got {split!r}.")
    if split == "train" and family not in ("digits", "cifar10", "imagenet"):
        raise ValueError(f"{family} has no training split.")
    try:
        return _open(family, parts, name, root, split, options)
    except TypeError as error:
        # A function that is given an option it does not have says so by TypeError.
        if "unexpected keyword argument" not in str(error):
            raise
        wrong = str(error).rsplit("'", 2)[-2]
        raise ValueError(f"{family} has no option `{wrong}`.") from None


def _open(family: str, parts: list[str], name: str, root: Root, split: Any, options: dict[str, Any]) -> TestSet:
    if family.endswith("-c"):
        corruption, level = _split(name, parts, "CORRUPTION/LEVEL, such as {}/fog/5")
        if not level.isdecimal():
            raise ValueError(f"{name}: the level must be 1 to 5, got {level!r}.")
        if family == "cifar10-c":
            return cifar.load_c(corruption, int(level), root, **options)
        if family == "imagenet-c":
            return imagenet.load_c(corruption, int(level), root, **options)
        own, rest = _share(options, ("seed", "scale", "frost"))
        return Corrupted(digits.load("test", **rest), corruption, int(level), name, **own)
    if family.endswith("-gradual"):
        (noise,) = _split(name, parts, "NOISE, such as {}/gaussian_noise", count=1)
        own, rest = _share(options, ("seed", "scale"))
        base = family.removesuffix("-gradual")
        return Gradual(_open(base, [], base, root, "test", rest), noise, name, **own)
    if family == "cifar10.1":
        version: Any = parts[0] if len(parts) == 1 else "v6"
        if len(parts) > 1:
            raise ValueError(f"`name` must be cifar10.1, cifar10.1/v4 or cifar10.1/v6; got {name!r}.")
        return cifar.load_10_1(root, version, **options)
    if parts:
        raise ValueError(f"{family} has no parts, got {name!r}.")
    if family == "digits":
        return digits.load(split, **options)
    if family == "cifar10":
        return cifar.load(root, split, **options)
    if family == "imagenet":
        return imagenet.load(root, split, **options)
    if family == "vid-robust":
        return vid.load(root, **options)
    if family == "vid-cifar7":
        return vid.load_cifar7(root, **options)
    if root is None:
        raise ValueError("`root` must name the folder of pictures.")
    return folder.load(root, **options)


def _split(name: str, parts: list[str], form: str, count: int = 2) -> list[str]:
    if len(parts) != count:
        family = name.split("/", 1)[0]
        raise ValueError(f"{family} needs {form.format(family)}; got {name!r}.")
    return parts


def _share(options: dict[str, Any], names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options by name, and the others."""
    own = {name: value for name, value in options.items() if name in names}
    return own, {name: value for name, value in options.items() if name not in names}


def names() -> tuple[str, ...]:
    """Every name that `open` takes, with all corruptions, levels and noises, in the order of the paper's tables."""
    from testtime.corruptions import CORRUPTIONS

    found: list[str] = []
    for family in WHAT:
        if family.endswith("-c"):
            found.extend(f"{family}/{corruption}/{level}" for corruption in CORRUPTIONS for level in range(1, 6))
        elif family.endswith("-gradual"):
            found.extend(f"{family}/{noise}" for noise in NOISES)
        elif family == "cifar10.1":
            found.extend((family, f"{family}/v4"))
        elif family != "folder":
            found.append(family)
    return tuple(found)


def is_folder(text: str) -> bool:
    """Whether a text that may name a set or a folder of pictures names a folder; a set's name comes first."""
    return text.split("/", 1)[0] not in WHAT and Path(text).expanduser().is_dir()


def expand(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """The names that some patterns stand for, each once, in the order given.

    Args:
        patterns: Names; names with `*`, such as `cifar10-c/*/5`; or a set with parts alone (`cifar10-c`), for all of
            them.

    Raises:
        ValueError: A pattern fits nothing.
    """
    known = names()
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fits = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not fits and pattern in WHAT and pattern != "folder":
            fits = [name for name in known if name.startswith(f"{pattern}/")]
        # Official files may hold corruptions beyond the fifteen; only opening can tell.
        if not fits and "*" not in pattern and pattern.split("/", 1)[0] in WHAT:
            fits = [pattern]
        if not fits:
            raise ValueError(f"{pattern!r} fits no data set; sets are {', '.join(WHAT)}.")
        found.update(dict.fromkeys(fits))
    return tuple(found)


@dataclass(frozen=True)
class Description:
    """What is known of a set without reading it through.

    Attributes:
        name: The set.
        what: One line on what it is.
        place: Where it is, or where it is looked for; None for a set in the package.
        state: `built in`, `ready`, `generated` (made from another set that is ready), `incomplete` or `missing`.
        detail: What is incomplete, or how to get it.
    """

    name: str
    what: str
    place: Path | None
    state: State
    detail: str = ""


def describe_all(root: Root = None) -> list[Description]:
    """Every known set: what it is, where it is looked for, and whether it is there and complete.

    Args:
        root: The data root; None takes the usual one.
    """
    return [describe(name, root) for name in WHAT if name != "folder"]


def describe(name: str, root: Root = None) -> Description:
    """One set of `describe_all`."""
    if name not in WHAT or name == "folder":
        raise ValueError(
            f"`name` must be one of {', '.join(known for known in WHAT if known != 'folder')}; got {name!r}."
        )
    base = data_root(root)
    if name.startswith("digits"):
        return Description(name, WHAT[name], None, "built in")
    if name.endswith("-gradual"):
        origin = describe(name.removesuffix("-gradual"), root)
        state: State = "generated" if origin.state == "ready" else origin.state
        return Description(name, WHAT[name], origin.place, state, origin.detail)
    place = _find(name, root)
    if place is None:
        usual = {"cifar10": cifar.BINARY, "cifar10-c": cifar.CORRUPTED, "cifar10.1": "CIFAR-10.1"}.get(name, name)
        usual = "imagenet-vid-robust" if name.startswith("vid") else usual
        hint = f"testtime data get {name}" if name in REMOTES else ELSEWHERE[name].format(root=base)
        if name.endswith("-c"):
            origin = describe(name.removesuffix("-c"), root)
            if origin.state == "incomplete":
                return Description(name, WHAT[name], origin.place, "incomplete", origin.detail)
            if origin.state == "ready":
                return Description(name, WHAT[name], base / usual, "generated", hint)
        return Description(name, WHAT[name], base / usual, "missing", hint)
    fault = _shallow_fault(name, root, place)
    return Description(name, WHAT[name], place, "incomplete" if fault else "ready", fault or "")


def _find(name: str, root: Root) -> Path | None:
    finders: dict[str, Callable[[Root], Path | None]] = {
        "cifar10": cifar.find,
        "cifar10-c": cifar.find_c,
        "cifar10.1": cifar.find_10_1,
        "imagenet": imagenet.find,
        "imagenet-c": imagenet.find_c,
        "vid-robust": vid.find,
        "vid-cifar7": vid.find,
    }
    return finders[name](root)


def _shallow_fault(name: str, root: Root, place: Path) -> str | None:
    """What a look at names, lengths and headers shows to be wrong, or None."""
    from testtime.corruptions import CORRUPTIONS

    try:
        if name == "cifar10":
            if place.is_dir():  # an archive is only read when it is used or checked
                cifar.load(root, "train")
                cifar.load(root, "test")
        elif name == "cifar10-c":
            for corruption in CORRUPTIONS:
                cifar.load_c(corruption, 5, root, source="official")
        elif name == "cifar10.1":
            cifar.load_10_1(root)
        elif name == "imagenet":
            test_set = imagenet.load(root, "val")
            if (len(test_set.classes), len(test_set)) != (1000, 50_000):
                return (
                    f"val has {len(test_set):,} pictures of {len(test_set.classes):,} classes; all are 50,000 of 1,000"
                )
        elif name == "imagenet-c":
            for corruption in CORRUPTIONS:
                found = imagenet.find_c(root, corruption)
                missing = [level for level in range(1, 6) if found is None or not (found / str(level)).is_dir()]
                if missing:
                    return f"{place / corruption / str(missing[0])}: no such folder"
        else:
            frames = vid.load(root)
            if len(frames) != vid.ANCHORS:
                return f"has {len(frames):,} anchor frames, all are {vid.ANCHORS:,}"
    except DataError as error:
        return str(error)
    return None


def pack_all(
    patterns: str | Iterable[str],
    root: Root = None,
    *,
    size: int = 224,
    on_bad: OnBad = "fail",
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[TestSet]:
    """Decode or generate sets of photographs once and for all, into `packed` under the data root.

    `open` reads them from there as long as their sources stay as they are.

    Args:
        patterns: As for `expand`: `imagenet`, `imagenet-c/*/5`, ….
        root: The data root, or the folder that holds `train` and `val`.
        size: Height and width of the images, as the network takes them.
        on_bad: What to do about a picture that cannot be read.
        device: Where corrupted images are made.
        progress: Told how many of how many images of all sets together are done.

    Returns:
        The packed sets.

    Raises:
        ValueError: A set is not one of photographs.
        DataError: A set is not there, or a picture cannot be read.
    """
    names = expand(patterns)
    for name in names:
        if name.split("/", 1)[0] not in ("imagenet", "imagenet-c"):
            raise ValueError(f"Only imagenet and imagenet-c are packed, got {name!r}.")
    found: list[TestSet] = []
    for place, name in enumerate(names):

        def advance(done: int, total: int, place: int = place) -> None:
            if progress is not None:
                progress(place * total + done, len(names) * total)

        options: dict[str, Any] = {"device": device} if name != "imagenet" else {}
        found.append(open(name, root, size=size, packed=True, on_bad=on_bad, progress=advance, **options))
    return found


def check(name: str, root: Root = None, progress: Progress | None = None) -> list[str]:
    """Read a set through and list what is wrong with it.

    Args:
        name: A set, such as `cifar10-c`, or one part of it, such as `imagenet-c/fog/5`; `folder`; or `packed`, for
            everything that is packed under the data root.
        root: The data root (for `folder`: the folder itself).
        progress: Told how many of how many samples or files have been read.

    Returns:
        One line a fault, naming the file; empty when the set is sound.

    Raises:
        ValueError: There is no such set.
    """
    from testtime.corruptions import CORRUPTIONS

    family = name.split("/", 1)[0]
    if name == "packed":
        return _check_packed(root, progress)
    if family not in WHAT:
        raise ValueError(f"`name` must be one of {', '.join((*WHAT, 'packed'))}; got {name!r}.")
    if family.endswith("-gradual") or (family.endswith("-c") and family != "digits-c" and _find(family, root) is None):
        family = family.rsplit("-", 1)[0]  # generated: as sound as what it is made from
        name = family
    if family.startswith("digits"):
        tasks: list[Callable[[], list[str]]] = [lambda: _check_digits()]
    elif family == "cifar10":
        tasks = [lambda split=split, count=count: _check_cifar(root, split, count) for split, count in _CIFAR_COUNTS]
    elif family == "cifar10-c":
        wanted = [name.split("/")[1]] if "/" in name else list(CORRUPTIONS)
        tasks = [lambda corruption=corruption: _check_cifar_c(root, corruption) for corruption in wanted]
    elif family == "cifar10.1":
        version = name.partition("/")[2] or "v6"
        tasks = [lambda: _opens(f"cifar10.1/{version}", root)]
    else:
        return _check_pictures(family, name, root, progress)
    faults: list[str] = []
    for done, task in enumerate(tasks, start=1):
        faults.extend(task())
        if progress is not None:
            progress(done, len(tasks))
    return faults


_CIFAR_COUNTS = (("train", 5_000), ("test", 1_000))


def _opens(name: str, root: Root, **options: Any) -> list[str]:
    try:
        open(name, root, **options)
    except DataError as error:
        return [str(error)]
    return []


def _check_digits() -> list[str]:
    sizes = (len(digits.load("train")), len(digits.load("test")))
    return [] if sizes == (1297, 500) else [f"digits.npz: holds {sizes[0]} + {sizes[1]} digits instead of 1297 + 500"]


def _check_cifar(root: Root, split: Any, count: int) -> list[str]:
    try:
        test_set = cifar.load(root, split)
    except DataError as error:
        return [str(error)]
    assert test_set.labels is not None
    counts = test_set.labels.bincount(minlength=10).tolist()
    wrong = [k for k in range(10) if counts[k] != count]
    return [f"{cifar.find(root)}: {split} has {counts[k]:,} of {cifar.CLASSES[k]}, not {count:,}" for k in wrong]


def _check_cifar_c(root: Root, corruption: str) -> list[str]:
    try:
        levels = [cifar.load_c(corruption, level, root, source="official") for level in range(1, 6)]
    except DataError as error:
        return [str(error)]
    first = levels[0].labels
    assert first is not None
    for level, test_set in enumerate(levels, start=1):
        if test_set.labels is None or not first.equal(test_set.labels):
            return [f"{cifar.find_c(root)}: labels.npy has other labels at level {level} than at level 1"]
    return []


def _check_packed(root: Root, progress: Progress | None) -> list[str]:
    """Compare everything packed under the data root with its checksums."""
    places = sorted(path.parent for path in (data_root(root) / "packed").glob("*/index.json"))
    faults: list[str] = []
    for done, place in enumerate(places, start=1):
        faults.extend(find_damage(place))
        if progress is not None:
            progress(done, len(places))
    return faults


def _check_pictures(family: str, name: str, root: Root, progress: Progress | None) -> list[str]:
    """Decode every picture of a set."""
    faults: list[str] = []
    try:
        if family == "imagenet":
            place = imagenet.find(root)
            # A split that is not there at all is a choice, not a fault.
            splits = [s for s in ("val", "train") if place is None or (place / s).is_dir()]
            found: list[TestSet] = [imagenet.list_pictures(root, split) for split in splits]  # type: ignore[arg-type]
        elif family == "imagenet-c":
            found = []
            for part in expand(name):
                corruption, level = part.split("/")[1:]
                try:
                    found.append(imagenet.load_c(corruption, int(level), root, source="official", packed=False))
                except DataError as error:
                    faults.append(str(error))
        else:
            found = [open(name, root)]
    except DataError as error:
        return [str(error)]
    total, before = sum(len(pictures) for pictures in found), 0
    for pictures in found:
        assert isinstance(pictures, folder.PictureSet)
        start = before

        def advance(done: int, _: int, start: int = start) -> None:
            if progress is not None:
                progress(start + done, total)

        faults.extend(str(fault) for fault in pictures.faults(advance))
        before += len(pictures)
    return faults
