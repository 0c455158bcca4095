"""The plan of a run: networks, test sets, methods with their settings, seeds.

A `Plan` is made from arguments, a study (study.py), or both, in which case arguments override the study. It consists of
strings and numbers, so that it can be sent to other processes; networks and sets are opened in worker.py.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from testtime import data as datasets
from testtime.checks import Kind, check_entries, check_name, is_integer
from testtime.corruptions import SEVERITIES
from testtime.data.families import is_folder
from testtime.data.held_out import COUNTS, find_source
from testtime.evaluation.descriptions import read_shift
from testtime.evaluation.method_specs import (
    BASELINE,
    DEFAULT_METHODS,
    JOINT,
    USUAL_METHODS,
    MethodSpec,
    find_spec,
    override,
    read_method,
)
from testtime.evaluation.protocols import Protocol, name_streams, read_protocol
from testtime.evaluation.recommended import use_recommended
from testtime.evaluation.study import (
    FLAG,
    LIMIT,
    check_unique,
    parse_corruptions,
    parse_levels,
    read_study,
    split_words,
)
from testtime.evaluation.units import Unit
from testtime.storage import FileError

_SEEDS: Kind = ("integers from 0 to 2**63 - 1", lambda value: all(is_integer(seed, 0) for seed in value))
_EVERY: Kind = ("positive integers", lambda value: all(is_integer(number, 1) for number in value.values()))
_OPTIONS = {JOINT: "--checkpoint", BASELINE: "--baseline"}


@dataclass(frozen=True)
class SetSpec:
    """A test set to open.

    Attributes:
        name: Its name in the run.
        folder: The image folder; None for a set registered in `testtime.data`.
    """

    name: str
    folder: str | None = None


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        networks: A checkpoint file, the name of a bundled network, or a model such as `timm:resnet50,weights=FILE`
            (see networks/sources.py), by network name. `{set}`, `{corruption}` and `{level}` in a file name are
            replaced for each test set, see `fill`.
        sets: The test sets.
        methods: The methods.
        seeds: Seeds of the augmentations and, if shuffled, of the order; everything is run once per seed.
        shuffle: Whether to shuffle each set, as the paper does; sets with a fixed order are never shuffled.
        limit: Maximum number of images per set.
        data_root: Root folder of the data sets.
        title: A title for reports.
        on_bad_image: What to do about an unreadable image: "fail" before the run starts, or "skip" it.
        selection: Whether the run is for choosing settings, for which only held-out sets are accepted.
        protocol: In what order, and in which calls, images are presented.
        every: With a `rate`, method → k: it learns only from every k-th call. Measured for methods that are missing.
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
    selection: bool = False
    protocol: Protocol = field(default_factory=Protocol)
    every: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.networks:
            check_name("The name of a network", name)
        for one in self.sets:
            for part in one.name.split("/"):
                check_name("Each part of a test set's name", part, 255)
        check_entries(vars(self), {"seeds": _SEEDS, "limit": LIMIT, "shuffle": FLAG, "selection": FLAG})
        check_entries(vars(self), {"every": _EVERY})
        for name, values in (("sets", self.sets), ("methods", self.methods)):
            check_unique(name, [value.name for value in values])
        check_unique("seeds", self.seeds)
        for one in self.sets:
            if self.selection and (one.folder is not None or find_source(one.name) is None):
                raise ValueError(
                    f"{one.name} is not held out: settings must be chosen on held-out training images, "
                    f"{', '.join(f'{name}-held-out' for name in COUNTS)} and their corruptions."
                )
        for method in self.methods:
            if method.network not in self.networks:
                option = _OPTIONS.get(method.network, f"--network {method.network}=FILE")
                raise ValueError(f"The method {method.name} needs the {method.network} network: pass {option}.")
        self._check_protocol()

    def _check_protocol(self) -> None:
        names = [one.name for one in self.sets]
        for stream in name_streams(self.protocol, names):
            for part in stream.split("/"):
                check_name("Each part of a stream's name", part, 255)
        for network, file in self.networks.items():
            if self.protocol.joins and fill(file, names[0]) != file:
                raise ValueError(
                    f"The protocol {self.protocol.name} joins the test sets to a stream, which takes one network: "
                    f"{network} must not contain placeholders, got {file}."
                )
        for name in self.every:
            if self.protocol.rate is None or all(method.name != name for method in self.methods):
                raise ValueError(f"`every` needs a protocol with a `rate` and methods of the plan, got {name!r}.")

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams of images that methods are run on: the sets, unless the protocol joins them."""
        return name_streams(self.protocol, [one.name for one in self.sets])

    def units(self) -> list[Unit]:
        """Return all units, ordered by seed, method and stream."""
        return [
            Unit.of(method.name, name, seed) for seed in self.seeds for method in self.methods for name in self.streams
        ]

    def method(self, name: str) -> MethodSpec:
        """Return a method by name."""
        return next(method for method in self.methods if method.name == name)

    def find_set(self, name: str) -> SetSpec:
        """Return a test set by name."""
        return next(one for one in self.sets if one.name == name)

    def needs_branch(self, network: str) -> bool:
        """Return whether a method needs the self-supervised branch of a network."""
        return any(method.needs_branch for method in self.methods if method.network == network)

    def file(self, network: str, set_name: str) -> str:
        """Return the checkpoint file of a network for a test set."""
        return fill(self.networks[network], set_name)

    def to_json(self) -> str:
        """Serialize the plan for `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that `to_json` serialized."""
        held = json.loads(text)
        held["sets"] = tuple(SetSpec(**one) for one in held["sets"])
        held["methods"] = tuple(MethodSpec(**method) for method in held["methods"])
        held["protocol"] = Protocol(**held["protocol"])
        return Plan(**held | {"seeds": tuple(held["seeds"])})


def fill(pattern: str, set_name: str) -> str:
    """Fill in the placeholders of a file name for a test set.

    `{set}` is the set's name, whose slashes separate folders; `{corruption}` is "original" for a set without one,
    `{level}` is "0".
    """
    corruption, level = read_shift(set_name)
    words = {"{set}": set_name, "{corruption}": corruption or "original", "{level}": str(level or 0)}
    for placeholder, word in words.items():
        pattern = pattern.replace(placeholder, word)
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
    protocol: str | Mapping[str, Any] | None = None,
    recommended: bool = False,
    **overrides: Sequence[str] | None,
) -> Plan:
    """Make a plan from arguments; those that are None are taken from the study.

    Args:
        study: A TOML file, or the name of a bundled study.
        checkpoint: The jointly trained network, or a model, as for `Plan.networks`.
        baseline: The network trained on class labels only.
        networks: Other networks by name, as methods of the study refer to them; without a study each becomes a fixed
            method of that name. A file name may contain `{set}`, `{corruption}` and `{level}`.
        data: Test sets: names, patterns such as `cifar10-c/*/5`, or image folders.
        methods: Names, as a list or separated by commas: `plain`, `fixed`, `episodic`, `online`, one of `METHODS` in
            its own mode, e.g. `tent`, or in another, e.g. `tent/episodic`, or those of the study. Those of `METHODS`
            only run when named.
        levels: Corruption levels, e.g. "1-5" or "1,3,5".
        corruptions: Names, as a list or separated by commas, or "all".
        original: Whether naming a whole corrupted set, e.g. `cifar10-c`, includes the uncorrupted set; by default only
            where the protocol has a use for it (`reset`, `correlated`, `clean`).
        seeds: Seeds.
        shuffle: Whether to shuffle each set.
        limit: Maximum number of images per set.
        data_root: Root folder of the data sets.
        on_bad_image: What to do about an unreadable image: "fail" or "skip".
        protocol: A name, or a table such as `{"name": "continual", "order": 3, "batch": 64}`, see `Protocol`; without a
            name, arguments for the study's protocol.
        recommended: Whether methods that are not a study's use the settings that the network's card recommends.
        **overrides: For `steps`, `lr`, `copies`, `threshold` and `precision`, strings such as "0.01" (every method that
            learns) or "online=0.01" (one method).

    Raises:
        ValueError: A name is unknown, or a value is invalid or out of range.
    """
    found = read_study(study) if study is not None else {}
    given = {"levels": levels, "corruptions": corruptions, "original": original, "shuffle": shuffle, "limit": limit}
    found |= {name: value for name, value in given.items() if value is not None}
    wanted = [data] if isinstance(data, str) else data or found.get("data")
    if not wanted:
        raise ValueError("No test sets: pass --data, e.g. --data cifar10-c, or a study with --matrix.")
    files = _name_files(checkpoint, baseline, networks or {})
    chosen = _choose_methods(found.get("methods"), files, list(networks or ()), methods)
    if recommended and "methods" not in found:
        chosen = use_recommended(chosen, files)
    chosen = override(chosen, overrides)
    used = {method.network for method in chosen}
    presented = read_protocol(protocol, found.get("protocol"))
    usual = not presented.joins or presented.name == "clean"
    try:
        sets = find_sets(wanted, found.get("levels"), found.get("corruptions"), found.get("original", usual))
    except ValueError as error:
        if data or study is None:
            raise
        raise FileError(study, str(error).removesuffix(".")) from None
    return Plan(
        networks={name: file for name, file in files.items() if name in used},
        sets=sets,
        methods=tuple(chosen),
        seeds=tuple(seeds or found.get("seeds", (0,))),
        data_root=None if data_root is None else str(data_root),
        on_bad_image=on_bad_image,
        protocol=presented,
        **{name: found[name] for name in ("shuffle", "limit", "title", "selection") if name in found},
    )


def _choose_methods(
    study: Mapping[str, Any] | None,
    files: Mapping[str, str],
    networks: Sequence[str],
    methods: str | Sequence[str] | None,
) -> list[MethodSpec]:
    """Return the methods to run: those named, else all of the study, else the usual ones whose network is given.

    Args:
        study: The methods of the study, if any.
        files: The files of all networks by name.
        networks: Networks that at least one method must use.
        methods: Names.
    """
    if study is not None:
        known = {name: read_method(name, about) for name, about in study.items()}
        usual = list(known)
    else:
        for name in DEFAULT_METHODS.keys() & files.keys():
            raise ValueError(f"A network cannot be called {name!r}: that is the name of a method.")
        known = DEFAULT_METHODS | {name: MethodSpec(name, "fixed", name) for name in files if name not in _OPTIONS}
        named = DEFAULT_METHODS.keys() - set(USUAL_METHODS)
        usual = [name for name, method in known.items() if method.network in files and name not in named] or ["fixed"]
    for name in networks:
        if all(method.network != name for method in known.values()):
            raise ValueError(f"No method uses the network {name!r}; available methods: {', '.join(known)}.")
    names = list(dict.fromkeys(split_words(methods))) if methods is not None else usual
    chosen = []
    for name in names:
        spec = known.get(name) or (find_spec(name) if study is None else None)
        if spec is None:
            raise ValueError(f"No method is called {name!r}; available: {', '.join(known)}.")
        chosen.append(spec)
    return chosen


def _name_files(
    checkpoint: str | Path | None, baseline: str | Path | None, networks: Mapping[str, str | Path]
) -> dict[str, str]:
    """Return the files of all networks by name."""
    files = {name: str(file) for name, file in ((JOINT, checkpoint), (BASELINE, baseline)) if file is not None}
    for name, file in networks.items():
        check_name("The name of a network", name)
        if not str(file):
            raise ValueError(f"--network {name}: the file is missing.")
        if files.setdefault(name, str(file)) != str(file):
            raise ValueError(f"The network {name!r} was given twice: {files[name]} and {file}.")
    return files


def find_sets(
    patterns: Iterable[str],
    levels: str | Sequence[int] | None = None,
    corruptions: str | Sequence[str] | None = None,
    original: bool = True,
) -> tuple[SetSpec, ...]:
    """Return the sets that match some patterns, without duplicates.

    Args:
        patterns: Names, patterns, or image folders.
        levels: Levels of corrupted sets; None for all.
        corruptions: Corruptions; None or "all" for all.
        original: Whether a whole corrupted set, e.g. `cifar10-c`, is preceded by the uncorrupted set.

    Raises:
        ValueError: A pattern matches nothing, or a level or corruption does not exist.
    """
    wanted = parse_levels(levels) if levels is not None else None
    named = None if corruptions is None else parse_corruptions(corruptions)
    found: dict[str, SetSpec] = {}
    for pattern in patterns:
        if not pattern:
            raise ValueError("The name of a test set must not be empty.")
        family = pattern.split("/", 1)[0]
        if _is_folder(pattern):
            path = Path(pattern).expanduser().resolve()
            folder = SetSpec(f"folder/{path.name}", str(path))
            if found.setdefault(folder.name, folder) != folder:
                raise ValueError(f"Two folders are called {path.name!r}; evaluate them in separate runs.")
            continue
        if pattern == "folder":
            raise ValueError("Pass the image folder itself, e.g. --data photos/.")
        whole = family.endswith("-c") and pattern == family
        if whole and original:
            base = family.removesuffix("-c")
            found[base] = SetSpec(base)
        listed = datasets.expand(pattern)
        # Sets have more corruptions than they list, or say why not when they are opened.
        more = [f"{family}/{name}/{level}" for name in named or () if name != "original" for level in SEVERITIES]
        units = [Unit.of("any", name, 0) for name in dict.fromkeys((*listed, *more) if whole else listed)]
        matching = [unit.set_name for unit in units if _matches(unit, wanted, named)]
        if not (matching or (whole and original)):
            raise ValueError(f"No set of {pattern!r} has these levels and corruptions.")
        found |= {name: SetSpec(name) for name in matching}
    return tuple(found.values())


def _matches(unit: Unit, levels: Container[int] | None, corruptions: Container[str] | None) -> bool:
    """Whether a set is uncorrupted, or has one of the levels and one of the corruptions; None for any."""
    if unit.level is not None and levels is not None and unit.level not in levels:
        return False
    return unit.corruption is None or corruptions is None or unit.corruption in corruptions


def _is_folder(pattern: str) -> bool:
    try:
        return is_folder(pattern)
    except (OSError, RuntimeError):  # too long for a file name, or ~ of an unknown user
        return False
