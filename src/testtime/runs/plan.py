"""What a run is to do: networks, test sets, methods with their settings, seeds.

A `Plan` comes from the command line's arguments, from a study (a TOML file, or one that ships with the package by its
name), or from both, where arguments go before the study. It is plain text and numbers, so that it can be sent to other
processes; nothing is opened before `run.py` does.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from testtime import augment as augmentations
from testtime import data as datasets
from testtime.adapt import Adapter, Episodic, Fixed, Online
from testtime.corruptions import CORRUPTIONS
from testtime.data.registry import WHAT
from testtime.learner import Settings
from testtime.networks.ynet import YNet
from testtime.runs.units import Unit
from testtime.streams import Streams
from testtime.tasks import Rotation

Mode = Literal["fixed", "episodic", "online"]
Role = Literal["joint", "baseline"]

STUDIES = Path(__file__).parent.parent / "studies"
_SETTINGS = ("steps", "lr", "copies", "threshold", "update", "guard", "precision", "augment", "turns")
_STUDY = ("title", "data", "levels", "corruptions", "original", "seeds", "shuffle", "limit", "methods")
_STEPS: dict[Mode, int] = {"fixed": 0, "episodic": 10, "online": 1}
_LOOK = 4  # views of an image in one look at it: its four turns


@dataclass(frozen=True)
class Method:
    """A way to predict a test set, by a name of its own.

    Attributes:
        name: What it is called in the run.
        mode: `fixed`, `episodic` or `online`.
        network: Which network it starts from: `joint`, or the `baseline` that was trained on classes only.
        settings: Fields of `Settings` that differ from the defaults: steps, lr, copies, threshold, update, guard,
            precision; `augment` as a network's card has it; `turns`, "random" or "all", for the rotation task.
    """

    name: str
    mode: Mode
    network: Role = "joint"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choices in (("mode", get_args(Mode)), ("network", get_args(Role))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{self.name}: `{name}` must be one of {', '.join(choices)}, got {getattr(self, name)!r}."
                )
        for name in self.settings:
            if name not in _SETTINGS:
                raise ValueError(f"{self.name}: no setting is called {name!r}; there are {', '.join(_SETTINGS)}.")
        if self.mode == "fixed" and self.settings:
            raise ValueError(f"{self.name} learns nothing, so it takes no settings, got {', '.join(self.settings)}.")
        try:
            Settings(**self._arguments(0))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from None

    def make(self, net: YNet, seed: int, parallel: int | Literal["auto"] = "auto") -> Adapter:
        """The adapter."""
        if self.mode == "fixed":
            return Fixed(net)
        if self.mode == "episodic":
            return Episodic(net, parallel=parallel, **self._arguments(seed))
        return Online(net, **self._arguments(seed))

    def make_streams(self, net: YNet, seed: int, count: int) -> Streams:
        """The same for `count` streams that advance together; for an online method."""
        return Streams(net, count, **self._arguments(seed))

    def describe(self, net: YNet) -> dict[str, Any]:
        """What decides its answers on a network, defaults written out, as JSON could hold it."""
        settings = self.make(net, 0, 1).settings.describe() if self.mode != "fixed" else {}
        settings.pop("seed", None)  # it belongs to the unit
        return {"mode": self.mode, "network": self.network, "settings": settings}

    @property
    def copies(self) -> int:
        """Augmented copies in one step."""
        return int(self.settings.get("copies", 32))

    @property
    def cost(self) -> int:
        """Views that the network sees for one image, a step's counted three times since it goes back as well."""
        if self.mode == "fixed":
            return _LOOK
        steps = int(self.settings.get("steps", _STEPS[self.mode]))
        return 2 * _LOOK + 3 * steps * self.copies * (4 if self.settings.get("turns") == "all" else 1)

    def _arguments(self, seed: int) -> dict[str, Any]:
        given = {"steps": _STEPS[self.mode], "seed": seed, **self.settings}
        turns, augment = given.pop("turns", None), given.pop("augment", None)
        if turns is not None:
            given["task"] = Rotation(turns)
        if augment is not None:
            given["augment"] = augmentations.make(augment)
        return given


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
        networks: File, or a shipped network's name, for each role that the methods use.
        sources: The test sets.
        methods: The methods.
        seeds: Seeds; each is a run of everything with other augmentations, and another order if shuffled.
        shuffle: Whether to shuffle each set once by the seed, as the paper does; a set that tests its order never is.
        limit: Only the first so many images of each order.
        data_root: Where data sets are looked for.
        title: What it is, for readers.
    """

    networks: Mapping[Role, str]
    sources: tuple[Source, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...] = (0,)
    shuffle: bool = False
    limit: int | None = None
    data_root: str | None = None
    title: str = ""

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
                option = "--checkpoint" if method.network == "joint" else "--baseline"
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


# What the four usual names stand for.
USUAL: dict[str, Method] = {
    "plain": Method("plain", "fixed", "baseline"),
    "fixed": Method("fixed", "fixed"),
    "episodic": Method("episodic", "episodic"),
    "online": Method("online", "online"),
}


def make_plan(
    study: str | Path | None = None,
    *,
    checkpoint: str | Path | None = None,
    baseline: str | Path | None = None,
    data: Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    levels: str | Sequence[int] | None = None,
    corruptions: str | Sequence[str] | None = None,
    original: bool | None = None,
    seeds: Sequence[int] | None = None,
    shuffle: bool | None = None,
    limit: int | None = None,
    data_root: str | Path | None = None,
    **overrides: Sequence[str] | None,
) -> Plan:
    """A plan from arguments, and from a study where they are None.

    Args:
        study: A TOML file, or the name of a study that ships.
        checkpoint: The jointly trained network.
        baseline: The network trained on classes only.
        data: Sets: names, patterns such as `cifar10-c/*/5`, or folders of pictures.
        methods: Names: of `plain`, `fixed`, `episodic`, `online`, or those of the study; in a text separated by commas.
        levels: Levels of corrupted sets, such as "1-5" or "1,3,5".
        corruptions: Names separated by commas, or "all".
        original: Whether the set without corruption comes along where a corrupted set is named as a whole.
        seeds: Seeds.
        shuffle: Whether to shuffle each set once by the seed.
        limit: Only the first so many images of each set.
        data_root: Where data sets are looked for.
        **overrides: For `steps`, `lr`, `copies` and `threshold`: texts such as "0.01" (every method that learns) or
            "online=0.01" (one of them).

    Raises:
        ValueError: Something does not exist, does not fit or is out of range.
    """
    found = read_study(study) if study is not None else {}
    wanted = [data] if isinstance(data, str) else data or found.get("data")
    if not wanted:
        raise ValueError("Which test sets? Give --data, such as --data cifar10-c, or a study with --matrix.")
    if "methods" in found:
        known = {name: _read_method(name, about) for name, about in found["methods"].items()}
        usual = list(known)
    else:
        known = USUAL
        usual = [name for name in known if name != "plain" or baseline is not None]
    names = list(dict.fromkeys(_words(methods))) if methods is not None else usual
    for name in names:
        if name not in known:
            raise ValueError(f"No method is called {name!r}; there are {', '.join(known)}.")
    chosen = override([known[name] for name in names], overrides)
    files: dict[Role, str] = {}
    if checkpoint is not None:
        files["joint"] = str(checkpoint)
    if baseline is not None:
        files["baseline"] = str(baseline)
    roles = {method.network for method in chosen}
    return Plan(
        networks={role: file for role, file in files.items() if role in roles},
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
    )


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
        network = "joint"                  # or "baseline"
        steps = 1                          # any setting of `Method`
        lr = 0.01

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
    if not all(isinstance(seed, int) for seed in found.get("seeds", ())):
        raise ValueError(f"{path}: `seeds` must be integers, got {found['seeds']}.")
    return found


def _read_method(name: str, about: Any) -> Method:
    if not isinstance(about, dict) or "mode" not in about:
        raise ValueError(f"The method {name} must be a table with a mode.")
    settings = {key: value for key, value in about.items() if key not in ("mode", "network")}
    return Method(name, about["mode"], about.get("network", "joint"), settings)


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
        if family not in WHAT and Path(pattern).expanduser().is_dir():
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


def override(methods: Sequence[Method], overrides: Mapping[str, Sequence[str] | None]) -> list[Method]:
    """Methods with other settings.

    Args:
        methods: The methods.
        overrides: For each setting texts such as "0.01" or "online=0.01"; a named one goes before an unnamed.

    Raises:
        ValueError: A method or a number does not exist.
    """
    kinds = {f.name: int if f.type == "int" else float for f in fields(Settings)}
    changed = {method.name: method for method in methods}
    learning = [method.name for method in methods if method.mode != "fixed"]
    for setting, texts in overrides.items():
        # The unnamed come first: "0.1" and "online=0.2" mean the same in either order.
        for text in sorted(texts or (), key=lambda text: "=" in text):
            name, _, number = text.rpartition("=")
            if name and name not in learning:
                raise ValueError(f"--{setting}: no method that learns is called {name!r} ({', '.join(learning)}).")
            try:
                value = kinds[setting](number)
                if not math.isfinite(value):
                    raise ValueError
            except ValueError:
                raise ValueError(f"--{setting} must be a number or METHOD=NUMBER, got {text!r}.") from None
            for one in [name] if name else learning:
                changed[one] = replace(changed[one], settings={**changed[one].settings, setting: value})
    return list(changed.values())


def _words(text: str | Sequence[str]) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if isinstance(text, str) else list(text)
