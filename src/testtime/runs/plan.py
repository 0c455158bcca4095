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
from testtime.corruptions import CORRUPTIONS
from testtime.data.registry import is_folder
from testtime.runs.methods import BASELINE, BEST, JOINT, USUAL, Method, override, read_method
from testtime.runs.units import Unit, read_shift

STUDIES = Path(__file__).parent.parent / "studies"
_STUDY = ("title", "data", "levels", "corruptions", "original", "seeds", "shuffle", "limit", "methods")
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
        for name in ("sources", "methods", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"`{name}` must not be empty.")
            labels = [getattr(value, "name", value) for value in values]
            if len(set(labels)) < len(labels):
                twice = next(label for label in labels if labels.count(label) > 1)
                raise ValueError(f"`{name}` must be different, got {twice} twice.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"`limit` must be at least 1, got {self.limit}.")
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
    return Plan(
        networks={name: file for name, file in files.items() if name in used},
        sources=find_sources(
            wanted,
            levels if levels is not None else found.get("levels"),
            corruptions if corruptions is not None else found.get("corruptions"),
            original if original is not None else found.get("original", True),
        ),
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
        ValueError: There is no such study, or it is not well formed.
    """
    path = Path(study)
    if str(study) in studies() and not path.is_file():
        path = STUDIES / f"{study}.toml"
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Studies need tomli: pip install 'testtime[cli]'", name="tomli") from None
    try:
        found = toml.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"No file and no study is called {str(study)!r} (studies: {', '.join(studies())}).") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a study ({error}).") from None
    kinds: dict[str, type | tuple[type, ...]] = {
        "title": str,
        "data": (str, list),
        "levels": (str, list),
        "corruptions": (str, list),
        "original": bool,
        "seeds": list,
        "shuffle": bool,
        "limit": int,
        "methods": dict,
    }
    for name, value in found.items():
        if name not in kinds:
            raise ValueError(f"{path}: a study has no entry {name!r}; there are {', '.join(_STUDY)}.")
        if not isinstance(value, kinds[name]):
            raise ValueError(f"{path}: {name!r} must not be {value!r}.")
    if isinstance(found.get("data"), str):
        found["data"] = [found["data"]]
    for name in ("data", "corruptions"):
        if not all(isinstance(word, str) for word in found.get(name, ())):
            raise ValueError(f"{path}: `{name}` must be names, got {found[name]}.")
    if not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in found.get("seeds", ())):
        raise ValueError(f"{path}: `seeds` must be integers, got {found['seeds']}.")
    return found


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
    named = None if corruptions is None or corruptions == "all" else _words(corruptions)
    for name in named or ():
        if name not in (*CORRUPTIONS, "original"):
            raise ValueError(f"No corruption is called {name!r}; there are {', '.join(CORRUPTIONS)}.")
    found: dict[str, Source] = {}
    for pattern in patterns:
        family = pattern.split("/", 1)[0]
        if is_folder(pattern):
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
        first, _, last = word.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"`levels` must be such as 1-5 or 1,3,5; got {levels!r}.")
        numbers.extend(range(int(first), int(last or first) + 1))
    if not numbers or min(numbers) < 1 or max(numbers) > 5:
        raise ValueError(f"`levels` must be 1 to 5, got {levels!r}.")
    return tuple(dict.fromkeys(numbers))


def _words(text: str | Sequence[str]) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if isinstance(text, str) else list(text)
