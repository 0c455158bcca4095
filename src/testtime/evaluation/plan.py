"""What a run is to do: networks, test sets, methods with their settings, seeds.

A `Plan` comes from arguments, from a study (study.py), or from both, where arguments override the study. It is plain
text and numbers, so that it can be sent to other processes; nothing is opened before run.py does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testtime import data as datasets
from testtime.checks import Kind, check_entries, check_name, is_integer
from testtime.data.families import is_folder
from testtime.evaluation.descriptions import read_shift
from testtime.evaluation.method_specs import BASELINE, BEST, JOINT, USUAL, MethodSpec, override, read_method
from testtime.evaluation.study import (
    FLAG,
    LIMIT,
    check_different,
    parse_corruptions,
    parse_levels,
    read_study,
    split_words,
)
from testtime.evaluation.units import Unit
from testtime.storage import FileError

_SEEDS: Kind = ("integers from 0 to 2**63 - 1", lambda value: all(is_integer(seed, 0) for seed in value))
_OPTIONS = {JOINT: "--checkpoint", BASELINE: "--baseline"}


@dataclass(frozen=True)
class SetSpec:
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
        networks: For each network's name its file, or a bundled network's name. A file that holds `{set}`,
            `{corruption}` or `{level}` is another one for every test set, see `fill`.
        sets: The test sets.
        methods: The methods.
        seeds: Seeds; each is a run of everything with other augmentations, and another order if shuffled.
        shuffle: Whether to shuffle each set once by the seed, as the paper does; a set that tests its order never is.
        limit: Only the first so many images of each order.
        data_root: Where data sets are looked for.
        title: What it is, for readers.
        on_bad_image: What to do about a picture that cannot be read: "fail" before the run starts, or "skip" it.
    """

    networks: Mapping[str, str]
    sets: tuple[SetSpec, ...]
    methods: tuple[MethodSpec, ...]
    seeds: tuple[int, ...] = (0,)
    shuffle: bool = False
    limit: int | None = None
    data_root: str | None = None
    title: str = ""
    on_bad_image: datasets.OnBad = "fail"

    def __post_init__(self) -> None:
        for name in self.networks:
            check_name("The name of a network", name)
        for one in self.sets:
            for part in one.name.split("/"):
                check_name("Each part of a test set's name", part, 255)
        check_entries(vars(self), {"seeds": _SEEDS, "limit": LIMIT, "shuffle": FLAG})
        for name, values in (("sets", self.sets), ("methods", self.methods)):
            check_different(name, [value.name for value in values])
        check_different("seeds", self.seeds)
        for method in self.methods:
            if method.network not in self.networks:
                option = _OPTIONS.get(method.network, f"--network {method.network}=FILE")
                raise ValueError(f"The method {method.name} needs the {method.network} network: give {option}.")

    def units(self) -> list[Unit]:
        """Every unit: seed by seed, method by method."""
        return [
            Unit.of(method.name, one.name, seed) for seed in self.seeds for method in self.methods for one in self.sets
        ]

    def method(self, name: str) -> MethodSpec:
        """A method by its name."""
        return next(method for method in self.methods if method.name == name)

    def find_set(self, name: str) -> SetSpec:
        """A test set by its name."""
        return next(one for one in self.sets if one.name == name)

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
        held["sets"] = tuple(SetSpec(**one) for one in held["sets"])
        held["methods"] = tuple(MethodSpec(**method) for method in held["methods"])
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
        study: A TOML file, or the name of a bundled study.
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
    chosen = override(_choose_methods(found.get("methods"), files, list(networks or ()), methods), overrides)
    used = {method.network for method in chosen}
    try:
        sets = find_sets(
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
        sets=sets,
        methods=tuple(chosen),
        seeds=tuple(seeds or found.get("seeds", (0,))),
        shuffle=shuffle if shuffle is not None else found.get("shuffle", False),
        limit=limit if limit is not None else found.get("limit"),
        data_root=None if data_root is None else str(data_root),
        title=found.get("title", ""),
        on_bad_image=on_bad_image,
    )


def _choose_methods(
    study: Mapping[str, Any] | None,
    files: Mapping[str, str],
    networks: Sequence[str],
    methods: str | Sequence[str] | None,
) -> list[MethodSpec]:
    """The methods to run: those named, else all of the study, else the usual ones that have a network.

    Args:
        study: The methods of the study, if there is one that has some.
        files: The files of all networks by name.
        networks: Those of the networks that some method must use.
        methods: Names.
    """
    if study is not None:
        known = {name: read_method(name, about) for name, about in study.items()}
        usual = list(known)
    else:
        for name in USUAL.keys() & files.keys():
            raise ValueError(f"A network cannot be called {name!r}: that is a method of another network.")
        known = USUAL | {name: MethodSpec(name, "fixed", name) for name in files if name not in _OPTIONS}
        usual = [name for name, method in known.items() if method.network in files and name != BEST] or ["fixed"]
    for name in networks:
        if all(method.network != name for method in known.values()):
            raise ValueError(f"No method uses the network {name!r}; there are {', '.join(known)}.")
    names = list(dict.fromkeys(split_words(methods))) if methods is not None else usual
    for name in names:
        if name not in known:
            raise ValueError(f"No method is called {name!r}; there are {', '.join(known)}.")
    return [known[name] for name in names]


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


def find_sets(
    patterns: Iterable[str],
    levels: str | Sequence[int] | None = None,
    corruptions: str | Sequence[str] | None = None,
    original: bool = True,
) -> tuple[SetSpec, ...]:
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
    named = None if corruptions is None else parse_corruptions(corruptions)
    found: dict[str, SetSpec] = {}
    for pattern in patterns:
        if not pattern:
            raise ValueError("The name of a test set must not be empty.")
        family = pattern.split("/", 1)[0]
        if _is_folder(pattern):
            place = Path(pattern).expanduser().resolve()
            folder = SetSpec(f"folder/{place.name}", str(place))
            if found.setdefault(folder.name, folder) != folder:
                raise ValueError(f"Two folders are called {place.name!r}; give each a run of its own.")
            continue
        if pattern == "folder":
            raise ValueError("Name the folder of pictures itself, such as --data photos/.")
        whole = family.endswith("-c") and pattern == family
        if whole and original:
            base = family.removesuffix("-c")
            found[base] = SetSpec(base)
        for name in datasets.expand(pattern):
            unit = Unit.of("any", name, 0)
            if unit.level is not None and wanted is not None and unit.level not in wanted:
                continue
            if unit.corruption is not None and named is not None and unit.corruption not in named:
                continue
            found[name] = SetSpec(name)
    if not found:
        raise ValueError("No test set has one of these levels and corruptions.")
    return tuple(found.values())


def _is_folder(pattern: str) -> bool:
    try:
        return is_folder(pattern)
    except (OSError, RuntimeError):  # too long for a file's name, or in the home of nobody
        return False
