"""What a run is to do: networks, test sets, methods with their settings, seeds.

A `Plan` comes from the command line's arguments, from a study (a TOML file, or one that ships with the package by its
name), or from both, where arguments go before the study. It is plain text and numbers, so that it can be sent to other
processes; nothing is opened before `run.py` does.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testtime import data as datasets
from testtime.checks import (
    Kind,
    check_entries,
    check_name,
    fold_name,
    is_flag,
    is_integer,
    is_list_of,
    is_table,
    is_text,
    show,
)
from testtime.corruptions import CORRUPTIONS
from testtime.data.registry import is_folder
from testtime.runs.descriptions import read_shift
from testtime.runs.methods import BASELINE, BEST, JOINT, USUAL, Method, override, read_method
from testtime.runs.units import Unit
from testtime.storage import FileError, check_file, error_text

STUDIES = Path(__file__).parent.parent / "studies"
_LARGEST = 1 << 15  # bytes of a study; reading TOML can take time that grows with their square
_FLAG: Kind = ("true or false", is_flag)
_LIMIT: Kind = ("an integer from 1 to 2**63 - 1", lambda value: value is None or is_integer(value, 1))
_WORDS: Kind = ("names", lambda value: is_list_of(_is_word)([value] if is_text(value) else value))
_SEEDS: Kind = ("integers from 0 to 2**63 - 1", lambda value: all(is_integer(seed, 0) for seed in value))
_STUDY: dict[str, Kind] = {
    "title": ("a text", is_text),
    "data": _WORDS,
    "levels": ("such as 1-5, or a list of integers", lambda value: is_text(value) or is_list_of(is_integer)(value)),
    "corruptions": _WORDS,
    "original": _FLAG,
    "seeds": ("integers from 0 to 2**63 - 1", is_list_of(lambda seed: is_integer(seed, 0))),
    "shuffle": _FLAG,
    "limit": _LIMIT,
    "methods": ("tables", is_table),
}
_OPTIONS = {JOINT: "--checkpoint", BASELINE: "--baseline"}


@dataclass(frozen=True)
class Source:
    """A test set to open.

    Attributes:
        name: What it is called in the run.
        folder: The folder of pictures it is; None for a set that `testtime.data` knows by its name.
    """

    name: str
    folder: str | None = None


@dataclass(frozen=True)
class Plan:
    """Everything a run is to do.

    Attributes:
        networks: For each network's name its file, or a shipped network's name. A file that holds `{set}`,
            `{corruption}` or `{level}` is another one for every test set, see `fill`.
        sources: The test sets.
        methods: The methods.
        seeds: Seeds; each is a run of everything with other augmentations, and another order if shuffled.
        shuffle: Whether to shuffle each set once by the seed, as the paper does; a set that tests its order never is.
        limit: Only the first so many images of each order.
        data_root: Where data sets are looked for.
        title: What it is, for readers.
        on_bad_image: What to do about a picture that cannot be read: "fail" before the run starts, or "skip" it.
    """

    networks: Mapping[str, str]
    sources: tuple[Source, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...] = (0,)
    shuffle: bool = False
    limit: int | None = None
    data_root: str | None = None
    title: str = ""
    on_bad_image: datasets.OnBad = "fail"

    def __post_init__(self) -> None:
        for name in self.networks:
            check_name("The name of a network", name)
        for source in self.sources:
            for part in source.name.split("/"):
                check_name("Each part of a test set's name", part, 255)
        check_entries(vars(self), {"seeds": _SEEDS, "limit": _LIMIT, "shuffle": _FLAG})
        for name, values in (("sources", self.sources), ("methods", self.methods)):
            _check_different(name, [value.name for value in values])
        _check_different("seeds", self.seeds)
        for method in self.methods:
            if method.network not in self.networks:
                option = _OPTIONS.get(method.network, f"--network {method.network}=FILE")
                raise ValueError(f"The method {method.name} needs the {method.network} network: give {option}.")

    def units(self) -> list[Unit]:
        """Every unit: seed by seed, method by method."""
        return [
            Unit.of(method.name, source.name, seed)
            for seed in self.seeds
            for method in self.methods
            for source in self.sources
        ]

    def method(self, name: str) -> Method:
        """A method by its name."""
        return next(method for method in self.methods if method.name == name)

    def source(self, name: str) -> Source:
        """A test set by its name."""
        return next(source for source in self.sources if source.name == name)

    def file(self, network: str, set_name: str) -> str:
        """The file of a network by its name, for a test set."""
        return fill(self.networks[network], set_name)

    def to_json(self) -> str:
        """The plan as text, for `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote."""
        held = json.loads(text)
        held["sources"] = tuple(Source(**source) for source in held["sources"])
        held["methods"] = tuple(Method(**method) for method in held["methods"])
        return Plan(**held | {"seeds": tuple(held["seeds"])})


def fill(pattern: str, set_name: str) -> str:
    """The file that a pattern stands for on a test set.

    `{set}` is the set's name (its slashes lead into folders), `{corruption}` and `{level}` are read from it; a set
    without a corruption has "original" there, one without a level "0".
    """
    corruption, level = read_shift(set_name)
    words = {"{set}": set_name, "{corruption}": corruption or "original", "{level}": str(level or 0)}
    for field, word in words.items():
        pattern = pattern.replace(field, word)
    return pattern


def make_plan(
    study: str | Path | None = None,
    *,
    checkpoint: str | Path | None = None,
    baseline: str | Path | None = None,
    networks: Mapping[str, str | Path] | None = None,
    data: Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    levels: str | Sequence[int] | None = None,
    corruptions: str | Sequence[str] | None = None,
    original: bool | None = None,
    seeds: Sequence[int] | None = None,
    shuffle: bool | None = None,
    limit: int | None = None,
    data_root: str | Path | None = None,
    on_bad_image: datasets.OnBad = "fail",
    **overrides: Sequence[str] | None,
) -> Plan:
    """A plan from arguments, and from a study where they are None.

    Args:
        study: A TOML file, or the name of a study that ships.
        checkpoint: The jointly trained network.
        baseline: The network trained on classes only.
        networks: Further networks by name, which methods of the study ask for; without a study each is a method of its
            own name, which predicts with the network as it is. A file may hold `{set}`, `{corruption}` and `{level}`.
        data: Sets: names, patterns such as `cifar10-c/*/5`, or folders of pictures.
        methods: Names: of `plain`, `fixed`, `episodic`, `online`, `best`, or those of the study; in a text separated by
            commas. `best` is run only if it is named.
        levels: Levels of corrupted sets, such as "1-5" or "1,3,5".
        corruptions: Names separated by commas, or "all".
        original: Whether the set without corruption comes along where a corrupted set is named as a whole.
        seeds: Seeds.
        shuffle: Whether to shuffle each set once by the seed.
        limit: Only the first so many images of each set.
        data_root: Where data sets are looked for.
        on_bad_image: What to do about a picture that cannot be read: "fail" or "skip".
        **overrides: For `steps`, `lr`, `copies`, `threshold` and `precision`: texts such as "0.01" (every method that
            learns) or "online=0.01" (one of them).

    Raises:
        ValueError: Something does not exist, does not fit or is out of range.
    """
    found = read_study(study) if study is not None else {}
    wanted = [data] if isinstance(data, str) else data or found.get("data")
    if not wanted:
        raise ValueError("Which test sets? Give --data, such as --data cifar10-c, or a study with --matrix.")
    files = _name_files(checkpoint, baseline, networks or {})
    if "methods" in found:
        known = {name: read_method(name, about) for name, about in found["methods"].items()}
        usual = list(known)
    else:
        for name in USUAL.keys() & files.keys():
            raise ValueError(f"A network cannot be called {name!r}: that is a method of another network.")
        known = USUAL | {name: Method(name, "fixed", name) for name in files if name not in _OPTIONS}
        usual = [name for name, method in known.items() if method.network in files and name != BEST] or ["fixed"]
    for name in networks or ():
        if all(method.network != name for method in known.values()):
            raise ValueError(f"No method uses the network {name!r}; there are {', '.join(known)}.")
    names = list(dict.fromkeys(_words(methods))) if methods is not None else usual
    for name in names:
        if name not in known:
            raise ValueError(f"No method is called {name!r}; there are {', '.join(known)}.")
    chosen = override([known[name] for name in names], overrides)
    used = {method.network for method in chosen}
    try:
        sources = find_sources(
            wanted,
            levels if levels is not None else found.get("levels"),
            corruptions if corruptions is not None else found.get("corruptions"),
            original if original is not None else found.get("original", True),
        )
    except ValueError as error:
        if data or study is None:
            raise
        raise FileError(study, str(error).removesuffix(".")) from None
    return Plan(
        networks={name: file for name, file in files.items() if name in used},
        sources=sources,
        methods=tuple(chosen),
        seeds=tuple(seeds or found.get("seeds", (0,))),
        shuffle=shuffle if shuffle is not None else found.get("shuffle", False),
        limit=limit if limit is not None else found.get("limit"),
        data_root=None if data_root is None else str(data_root),
        title=found.get("title", ""),
        on_bad_image=on_bad_image,
    )


def _name_files(
    checkpoint: str | Path | None, baseline: str | Path | None, networks: Mapping[str, str | Path]
) -> dict[str, str]:
    """The files of all networks by name."""
    files = {name: str(file) for name, file in ((JOINT, checkpoint), (BASELINE, baseline)) if file is not None}
    for name, file in networks.items():
        check_name("The name of a network", name)
        if not str(file):
            raise ValueError(f"--network {name}: which file?")
        if files.setdefault(name, str(file)) != str(file):
            raise ValueError(f"The network {name!r} was given twice: {files[name]} and {file}.")
    return files


def studies() -> tuple[str, ...]:
    """Names of the studies that ship with the package."""
    return tuple(sorted(path.stem for path in STUDIES.glob("*.toml")))


def read_study(study: str | Path) -> dict[str, Any]:
    """A study's entries, their names and types checked.

    Every entry may be missing, except a method's mode; the command line's arguments go before them:

        title = "Fog, two ways"
        data = ["cifar10-c"]               # names, patterns, folders
        levels = "1-5"
        corruptions = ["fog", "frost"]
        original = true                    # the set without corruption as well
        seeds = [0, 1]
        shuffle = true
        limit = 1000

        [methods.fast]                     # any name
        mode = "episodic"                  # or "fixed", "online"
        network = "joint"                  # or "baseline", or what --network NAME=FILE names
        steps = 1                          # any setting of `Method`
        lr = 0.01

        [methods.wide]
        mode = "online"
        preset = "best"                    # or "paper"; for online methods, and other settings go before it
        copies = 64

    Args:
        study: A TOML file, or the name of a study that ships.

    Raises:
        FileError: There is no such study, or it is not well formed.
    """
    path = Path(study)
    if str(study) in studies() and not path.is_file():
        path = STUDIES / f"{study}.toml"
    found = _load(path)
    try:
        _check_study(found)
    except ValueError as error:
        raise FileError(path, str(error).removesuffix(".")) from None
    return found | ({"data": [found["data"]]} if isinstance(found.get("data"), str) else {})


def _load(path: Path) -> dict[str, Any]:
    """What a TOML file holds."""
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Studies need tomli: pip install 'testtime[cli]'", name="tomli") from None
    try:
        check_file(path)
    except FileError as error:
        raise FileError(path, error.fault, f"the bundled studies are {', '.join(studies())}") from None
    if path.stat().st_size > _LARGEST:
        raise FileError(path, f"larger than {_LARGEST:,} bytes, which no study is")
    try:
        return toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(path, f"not a TOML file ({error_text(error)})") from None


def _check_study(found: Mapping[str, Any]) -> None:
    """Check the entries of a study, but for its sets, which need not be on this machine."""
    for name in found:
        if name not in _STUDY:
            raise ValueError(f"a study has no entry {show(name)}; there are {', '.join(_STUDY)}.")
    check_entries(found, _STUDY)
    for name in ("data", "levels", "corruptions", "seeds", "methods"):
        if name in found and not found[name]:
            raise ValueError(f"`{name}` must not be empty.")
    if "levels" in found:
        parse_levels(found["levels"])
    if "corruptions" in found:
        _parse_corruptions(found["corruptions"])
    _check_different("seeds", found.get("seeds", [0]))
    _check_different("methods", list(found.get("methods", ["fixed"])))
    for name, about in found.get("methods", {}).items():
        read_method(name, about)


def _check_different(what: str, values: Sequence[Any]) -> None:
    """Check that there are some, and none twice; names not even if they differ only in case."""
    if not values:
        raise ValueError(f"`{what}` must not be empty.")
    places: dict[Any, int] = {}
    for place, value in enumerate(values):
        first = places.setdefault(fold_name(value) if isinstance(value, str) else value, place)
        if first != place:
            both = f"{value} twice" if values[first] == value else f"{values[first]} and {value}"
            raise ValueError(f"`{what}` must be different, got {both}.")


def find_sources(
    patterns: Iterable[str],
    levels: str | Sequence[int] | None = None,
    corruptions: str | Sequence[str] | None = None,
    original: bool = True,
) -> tuple[Source, ...]:
    """The sets that some patterns stand for, each once.

    Args:
        patterns: Names, patterns, or folders of pictures.
        levels: Which levels of corrupted sets; None is all.
        corruptions: Which corruptions; None or "all" is all.
        original: Whether the set without corruption comes first where a corrupted set is named as a whole.

    Raises:
        ValueError: A pattern fits nothing, or a level or corruption does not exist.
    """
    wanted = parse_levels(levels) if levels is not None else None
    named = None if corruptions is None else _parse_corruptions(corruptions)
    found: dict[str, Source] = {}
    for pattern in patterns:
        if not pattern:
            raise ValueError("The name of a test set must not be empty.")
        family = pattern.split("/", 1)[0]
        if _is_folder(pattern):
            place = Path(pattern).expanduser().resolve()
            folder = Source(f"folder/{place.name}", str(place))
            if found.setdefault(folder.name, folder) != folder:
                raise ValueError(f"Two folders are called {place.name!r}; give each a run of its own.")
            continue
        if pattern == "folder":
            raise ValueError("Name the folder of pictures itself, such as --data photos/.")
        whole = family.endswith("-c") and pattern == family
        if whole and original:
            base = family.removesuffix("-c")
            found[base] = Source(base)
        for name in datasets.expand(pattern):
            unit = Unit.of("any", name, 0)
            if unit.level is not None and wanted is not None and unit.level not in wanted:
                continue
            if unit.corruption is not None and named is not None and unit.corruption not in named:
                continue
            found[name] = Source(name)
    if not found:
        raise ValueError("No test set has one of these levels and corruptions.")
    return tuple(found.values())


def parse_levels(levels: str | Sequence[int]) -> tuple[int, ...]:
    """Levels from a text such as "1-5" or "1,3,5"."""
    numbers: list[int] = []
    for word in _words(levels) if isinstance(levels, str) else map(str, levels):
        first, dash, last = word.partition("-")
        ends = [first, last] if dash else [first]
        if not all(end.isdecimal() and len(end) < 10 for end in ends):
            raise ValueError(f"`levels` must be such as 1-5 or 1,3,5; got {show(levels)}.")
        if not 1 <= int(ends[0]) <= int(ends[-1]) <= 5:
            raise ValueError(f"`levels` must be 1 to 5, got {show(levels)}.")
        numbers.extend(range(int(ends[0]), int(ends[-1]) + 1))
    if not numbers:
        raise ValueError(f"`levels` must be 1 to 5, got {show(levels)}.")
    return tuple(dict.fromkeys(numbers))


def _parse_corruptions(corruptions: str | Sequence[str]) -> list[str] | None:
    """Corruptions by name; None for all."""
    if corruptions == "all":
        return None
    names = _words(corruptions)
    for name in names:
        if name not in (*CORRUPTIONS, "original"):
            raise ValueError(f"No corruption is called {show(name)}; there are {', '.join(CORRUPTIONS)}.")
    return names


def _is_folder(pattern: str) -> bool:
    try:
        return is_folder(pattern)
    except (OSError, RuntimeError):  # too long for a file's name, or in the home of nobody
        return False


def _is_word(value: Any) -> bool:
    return is_text(value) and 0 < len(value) < 1000


def _words(text: str | Sequence[str]) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if isinstance(text, str) else list(text)
