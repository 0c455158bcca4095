"""Methods as configured in a run, from a study or from arguments: a name, a mode, a network and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from testtime import augment as augmentations
from testtime import tasks
from testtime.adaptation.adapters import Adapter, Episodic, Fixed, Online
from testtime.adaptation.auto import Auto, Calibration
from testtime.adaptation.guard import Guard
from testtime.adaptation.methods import METHODS, Method, Mode, find_method
from testtime.adaptation.settings import Settings
from testtime.adaptation.streams import Streams
from testtime.checks import (
    Kind,
    check_entries,
    check_name,
    format_value,
    is_flag,
    is_integer,
    is_list_of,
    is_number,
    is_table,
    is_table_of,
    is_text,
)
from testtime.networks.card import Card
from testtime.networks.ynet import YNet
from testtime.precision import Precision, choose_precision

JOINT, BASELINE = "joint", "baseline"
"""The networks given by `--checkpoint` and `--baseline`."""

_SETTINGS: dict[str, Kind] = {
    "steps": ("an integer", is_integer),
    "lr": ("a number", is_number),
    "copies": ("an integer", is_integer),
    "threshold": ("a number or a percentage", lambda value: is_number(value) or is_text(value)),
    "update": ("a string or a list of strings", lambda value: is_text(value) or is_list_of(is_text)(value)),
    "guard": ("a number or a table", lambda value: is_number(value) or value == math.inf or is_table(value)),
    "precision": ("a string", is_text),
    "mirrored": ("true or false", is_flag),
    "augment": ("a table", is_table),
    "task": ("a string or a table", lambda value: is_text(value) or is_table(value)),
    "share": ("a string", is_text),
    "statistics": ("a string", is_text),
    "constants": ("a table of numbers", is_table_of(is_number)),
    "resets": ('an integer or "never"', lambda value: is_integer(value) or value == "never"),
    "calibration": ("a table", is_table),
}
_AUGMENT: dict[str, Kind] = {
    "name": ("a string", is_text),
    "padding": ("an integer", lambda value: is_integer(value, 0, 2**15)),
    "size": ("an integer", lambda value: is_integer(value, 1, 2**15)),
    "scale": ("two numbers", lambda value: _is_pair(value)),
    "ratio": ("two numbers", lambda value: _is_pair(value)),
    "flip": ("true or false", is_flag),
}
_GUARD: dict[str, Kind] = {
    f.name: ("a string", is_text) if f.name == "fallback" else ("a number", is_number) for f in fields(Guard)
}
_CALIBRATION: dict[str, Kind] = {
    f.name: ('a number or "never"', lambda value: is_number(value) or value == "never") for f in fields(Calibration)
}
_INFERENCE = ("precision", "mirrored")  # the settings of fixed methods


@dataclass(frozen=True)
class MethodSpec:
    """A method as configured in a run.

    Attributes:
        name: Its name in the run.
        mode: `fixed`, `episodic` or `online`.
        network: Name of the network it starts from: `joint`, `baseline` (trained on class labels only), or any other
            network of the plan.
        settings: Fields of `Settings` that differ from the method's defaults: steps, lr, copies, threshold, update,
            share, statistics, guard, precision, mirrored, resets, constants; `augment` and `task` as name and
            arguments, `guard` as a number or the fields of a `Guard`; `calibration`, fields of a `Calibration` or none
            for those of the network's card, makes an online method an `Auto`. A fixed method accepts only precision
            and mirrored. A `threshold` may be a percentage, e.g. "20%": on each test set it becomes that quantile of
            the unadapted network's confidences, which takes one pass over the unlabelled set beforehand.
        method: A name from `METHODS`.
    """

    name: str
    mode: Mode
    network: str = JOINT
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: str = "ttt"

    def __post_init__(self) -> None:
        check_name("The name of a method", self.name)
        try:
            _check(self)
            self.make_settings()
            if self.decides:
                _make_calibration(self.settings["calibration"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from None

    @property
    def fraction(self) -> float | None:
        """The fraction of the images to learn from, in (0, 1], if the threshold is a percentage."""
        threshold = self.settings.get("threshold")
        return parse_fraction(threshold) if isinstance(threshold, str) else None

    def resolve(self, threshold: float) -> MethodSpec:
        """Return a copy with a numeric threshold."""
        return replace(self, settings={**self.settings, "threshold": threshold})

    def observe_only(self, net: YNet) -> Adapter:
        """Return an adapter that observes as this method does, without learning."""
        settings = {**self.settings, "threshold": 1.0, "steps": 0}
        settings.pop("calibration", None)  # decides what to learn from
        return replace(self, mode="episodic", settings=settings).make(net, 0, 1)

    def make(self, net: YNet, seed: int, parallel: int | Literal["auto"] = "auto") -> Adapter:
        """Return the adapter; the threshold must be a number."""
        if self.fraction is not None:
            raise ValueError(f"{self.name}: a percentage threshold must first be resolved on a test set.")
        if self.mode == "fixed":
            return Fixed(net, **self.settings)
        given: dict[str, Any] = {"method": self.method, "seed": seed, **self.make_arguments()}
        if self.decides:
            return Auto(net, calibration=_make_calibration(self.settings["calibration"]), **given)
        return Episodic(net, parallel=parallel, **given) if self.mode == "episodic" else Online(net, **given)

    def make_streams(self, net: YNet, seed: int, count: int) -> Streams:
        """Return `count` parallel streams of an online method; the threshold must be a number."""
        return Streams(net, count, method=self.method, seed=seed, **self.make_arguments())

    def describe(self, net: YNet) -> dict[str, Any]:
        """Return everything that determines its predictions on a network, defaults included, JSON-serializable."""
        if self.fraction is not None:
            described = self.resolve(1.0).describe(net)
            described["settings"]["threshold"] = self.settings["threshold"]
            return described
        if self.mode == "fixed":
            usual = choose_precision(next(net.parameters()).device)
            # Records of version 0.1 do not have the default, which was fp32.
            settings = dict(self.settings) if usual == "fp32" else {"precision": usual, **self.settings}
        else:
            settings = self.make(net, 0, 1).describe()
        settings.pop("seed", None)  # belongs to the unit
        return {"mode": self.mode, "network": self.network, "settings": settings}

    @property
    def decides(self) -> bool:
        """Whether it decides for every image whether to learn from it, as `Auto`."""
        return "calibration" in self.settings

    @property
    def needs_branch(self) -> bool:
        """Whether the network must have a self-supervised branch."""
        return self.mode != "fixed" and find_method(self.method).needs_branch

    @property
    def needs_batch(self) -> bool:
        """Whether predictions depend on the other images of a call, so that streams cannot share calls."""
        return "batch" in find_method(self.method).needs or self.make_settings().share == "batch"

    @property
    def views(self) -> int:
        """Images that a step learns from, for each image of the stream."""
        settings, method = self.make_settings(), find_method(self.method)
        if not getattr(method.objective, "augments", True):
            return 1
        both = 2 if method.holds_images else 1  # as many of the images it holds
        return both * settings.copies * _count_views(method, settings)[0]

    @property
    def cost(self) -> int:
        """Forward passes per image; a view in a training step counts three times for its backward pass."""
        settings = self.make_settings()
        observed = _count_views(find_method(self.method), settings)[1]
        if self.mode == "fixed":
            return observed
        return 2 * observed + round(3 * settings.steps * self.views * (self.fraction or 1))

    def make_settings(self) -> Settings:
        """Return the settings of the method in its mode, with threshold 1 if it is still a percentage."""
        spec = self if self.fraction is None else self.resolve(1.0)
        given = {"steps": 0, **self.settings} if self.mode == "fixed" else spec.make_arguments()
        return find_method(self.method).make_settings(self.mode, given)

    def make_arguments(self) -> dict[str, Any]:
        """Return the settings as arguments of an adapter; a calibration is not among them."""
        given = {name: value for name, value in self.settings.items() if name != "calibration"}
        for name, make in (("task", tasks.make), ("augment", augmentations.make)):
            if name in given:
                given[name] = make(given[name])
        if is_table(given.get("guard")):
            given["guard"] = Guard(**given["guard"])
        return given


def _check(spec: MethodSpec) -> None:
    """Check names and types, before values: a card or a study is not trusted."""
    if spec.mode not in get_args(Mode):
        raise ValueError(f"`mode` must be one of {', '.join(get_args(Mode))}, got {format_value(spec.mode)}.")
    check_name("`network`", spec.network)
    if "=" in spec.network:
        raise ValueError(f"`network` must not contain `=`, got {spec.network!r}.")
    if not isinstance(spec.method, str) or spec.method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {format_value(spec.method)}.")
    for name in spec.settings:
        if name not in _SETTINGS:
            raise ValueError(f"unknown setting {format_value(name)}; available: {', '.join(_SETTINGS)}.")
    check_entries(spec.settings, _SETTINGS)
    check_entries(spec.settings.get("augment", {}), _AUGMENT)
    if is_table(spec.settings.get("guard")):
        check_entries(spec.settings["guard"], _GUARD)
    check_entries(spec.settings.get("calibration", {}), _CALIBRATION)
    if spec.decides and spec.mode != "online":
        raise ValueError("`calibration` is for online methods.")
    idle = [name for name in spec.settings if spec.mode == "fixed" and name not in _INFERENCE]
    if idle:
        raise ValueError(f"a fixed method has no setting {', '.join(idle)}.")


def _make_calibration(about: Mapping[str, Any]) -> Calibration | None:
    """Return the calibration that a method's table describes; None, for that of the network's card, if it is empty."""
    given: dict[str, Any] = {name: None if value == "never" else value for name, value in about.items()}
    return Calibration(**given) if given else None


def _count_views(method: Method, settings: Settings) -> tuple[int, int]:
    """Return the views that the task makes of a copy to learn from, and of a plain image to observe.

    A method without a task makes one of each. If the task is the network's, which is not known here, it is assumed to
    be the default of a `Card`.
    """
    if "branch" not in method.needs:
        return 1, 1
    return tasks.count_views(settings.task or tasks.make(Card().task))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))


def parse_fraction(text: str) -> float:
    """Parse a percentage, e.g. "20%", as a fraction in (0, 1].

    Raises:
        ValueError: It is not a percentage in (0, 100].
    """
    try:
        percent = float(text.removesuffix("%")) if text.endswith("%") else math.nan
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise ValueError(
            f'`threshold` must be in [0, 1] or a percentage of the images, e.g. "20%", got {format_value(text)}.'
        )
    return percent / 100


DEFAULT_METHODS: dict[str, MethodSpec] = {
    "plain": MethodSpec("plain", "fixed", BASELINE),
    "fixed": MethodSpec("fixed", "fixed"),
    "episodic": MethodSpec("episodic", "episodic"),
    "online": MethodSpec("online", "online"),
    "auto": MethodSpec("auto", "online", settings={"calibration": {}}),
    **{name: MethodSpec(name, METHODS[name].mode, method=name) for name in METHODS if name != "ttt"},
}
"""The methods that need no study, by name."""

USUAL_METHODS = ("plain", "fixed", "episodic", "online")
"""Those that run if none is named."""


def find_spec(name: str) -> MethodSpec | None:
    """Return the method that a name stands for without a study, or None.

    A name of `METHODS` stands for the method in its own mode, `tent/episodic` for it in another; the latter is called
    `tent-episodic` in the run.
    """
    method, slash, mode = name.partition("/")
    if name in DEFAULT_METHODS:
        return DEFAULT_METHODS[name]
    if method not in METHODS:
        return None
    if not slash:  # added to the table by somebody else
        return MethodSpec(name, METHODS[name].mode, method=name)
    if mode not in ("episodic", "online"):
        return None
    return MethodSpec(f"{method}-{mode}", mode, method=method)


def read_method(name: str, about: Any) -> MethodSpec:
    """Return the method that a study's table describes; the mode is the method's own if only the method is given.

    Raises:
        ValueError: Both mode and method are missing, or an entry is unknown or invalid.
    """
    check_name("The name of a method", name)
    if not isinstance(about, dict) or not about.keys() & {"mode", "method"}:
        raise ValueError(f"The method {name} must be a table with a `mode` or a `method`.")
    settings = {key: value for key, value in about.items() if key not in ("mode", "network", "method")}
    method = about.get("method", "ttt")
    own = METHODS[method].mode if isinstance(method, str) and method in METHODS else "online"
    return MethodSpec(name, about.get("mode", own), about.get("network", JOINT), settings, method)


def override(methods: Sequence[MethodSpec], overrides: Mapping[str, Sequence[str] | None]) -> list[MethodSpec]:
    """Return the methods with some settings overridden.

    Args:
        methods: The methods.
        overrides: For each setting, strings such as "0.01" or "online=0.01". One without a name applies to every method
            that learns, or, if none does, to every method that accepts it; one with a name takes precedence.

    Raises:
        ValueError: A method is unknown, a value is invalid, or no method has the setting.
    """
    changed = {method.name: method for method in methods}
    learning = [method.name for method in methods if method.mode != "fixed"]
    for setting, texts in overrides.items():
        # Values without a name first, so that the order of "0.1" and "online=0.2" does not matter.
        for text in sorted(texts or (), key=lambda text: "=" in text):
            name, _, word = text.rpartition("=")
            known = list(changed) if setting in _INFERENCE else learning
            if name and name not in known:
                raise ValueError(f"--{setting}: no applicable method is called {name!r} ({', '.join(known)}).")
            if not known:
                raise ValueError(f"--{setting}: none of the methods learns ({', '.join(changed)}).")
            value = _read_value(setting, word, text)
            for one in [name] if name else learning or known:
                changed[one] = replace(changed[one], settings={**changed[one].settings, setting: value})
    return list(changed.values())


def _read_value(setting: str, word: str, text: str) -> int | float | str:
    """Parse the value of a setting; `text` is the user's input, for messages."""
    if setting == "precision":
        if word not in get_args(Precision):
            raise ValueError(f"--precision must be one of {', '.join(get_args(Precision))}, got {text!r}.")
        return word
    if setting == "threshold" and word.endswith("%"):
        parse_fraction(word)
        return word
    kinds = {f.name: int if f.type == "int" else float for f in fields(Settings)}
    try:
        value = kinds[setting](word)
        if not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise ValueError(f"--{setting} must be a number or METHOD=NUMBER, got {format_value(text)}.") from None
    return value
