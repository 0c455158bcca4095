"""The settings that a network's card recommends: commands use them, adapters made in Python only if asked to.

The defaults of adapters are the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from testtime.adaptation.methods import ALIASES, Method, Mode
from testtime.evaluation.method_specs import MethodSpec
from testtime.networks.card import CheckpointError
from testtime.networks.checkpoint import find_checkpoint, read_parts
from testtime.networks.sources import parse_source
from testtime.networks.ynet import YNet


def recommend(net: YNet, mode: Mode = "online", method: str = "ttt") -> dict[str, Any]:
    """Return the settings that a network's card recommends, as arguments of an adapter; empty if there are none.

    `tt.Online(net, **tt.recommend(net))` adapts as the commands do.

    Args:
        net: The network.
        mode: `online` or `episodic`.
        method: A name from `METHODS`.

    Raises:
        ValueError: There is no such mode or method, or the card recommends settings that are not valid.
    """
    return MethodSpec(
        method, mode, settings=find_recommended(net.card.settings, method, mode), method=method
    ).make_arguments()


def find_recommended(settings: Mapping[str, dict[str, Any]], method: str, mode: Mode) -> dict[str, Any]:
    """Return the settings that a card recommends for a method in a mode; empty if none.

    Args:
        settings: `Card.settings`. The keys are names of methods, in which `best` is what it stands for in this version;
            `online` and `episodic` are the method `ttt` in that mode, and override the key `ttt`.
        method: A name from `METHODS`.
        mode: The mode; nothing is recommended for `fixed`.
    """
    if mode == "fixed":
        return {}
    own = ALIASES.get(method, method)
    keys = [*(alias for alias, name in ALIASES.items() if name == own), own, *([mode] if own == "ttt" else [])]
    return {name: value for key in keys for name, value in settings.get(key, {}).items()}


def make_recommended(method: Method, settings: Mapping[str, dict[str, Any]]) -> Method:
    """Return a method with the settings that a card recommends for it, in each mode.

    Args:
        method: One of `METHODS`.
        settings: `Card.settings`.

    Raises:
        ValueError: The settings are not valid.
    """
    found: dict[Mode, dict[str, Any]] = {}
    for mode in ("online", "episodic"):
        # As a specification, which checks names and types: a card is not trusted.
        own = find_recommended(settings, method.name, mode)
        found[mode] = MethodSpec(method.name, mode, settings=own, method=method.name).make_arguments()
    # What is recommended for streams only does not apply to episodes.
    alone = method.make_settings("episodic", found["episodic"])
    episodic = {**method.episodic, **found["episodic"], **{name: getattr(alone, name) for name in found["online"]}}
    return replace(method, settings={**method.settings, **found["online"]}, episodic=episodic)


def use_recommended(methods: Sequence[MethodSpec], files: Mapping[str, str]) -> list[MethodSpec]:
    """Return methods with the settings that their networks recommend; settings of their own take precedence.

    Args:
        methods: The methods.
        files: The file of each network by its name. Models of other libraries, file names with placeholders and files
            that do not exist recommend nothing.

    Raises:
        CheckpointError: A network is damaged, or recommends settings that do not exist.
    """
    cards = {name: _read_settings(files[name]) for name in {method.network for method in methods} & files.keys()}
    changed = []
    for method in methods:
        found = find_recommended(cards.get(method.network, {}), method.method, method.mode)
        try:
            changed.append(replace(method, settings={**found, **method.settings}))
        except ValueError as error:
            fault = f"its card recommends settings that are not valid ({str(error).removesuffix('.')})"
            raise CheckpointError(files[method.network], fault) from None
    return changed


def format_settings(settings: Mapping[str, Any]) -> str:
    """Format settings as text, e.g. "steps 2, lr 0.02, task rotation (each all)"."""
    return ", ".join(f"{name} {_format_value(value)}" for name, value in settings.items())


def describe_settings(methods: Sequence[MethodSpec]) -> list[str]:
    """Return a line for each method whose settings are not the defaults."""
    return [f"settings of {one.name}: {format_settings(one.settings)}" for one in methods if one.settings]


def _format_value(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    rest = ", ".join(f"{key} {inner}" for key, inner in value.items() if key != "name")
    name = value.get("name", "" if rest else "default")
    return f"{name} ({rest})".lstrip() if rest else str(name)


def _read_settings(file: str) -> dict[str, dict[str, Any]]:
    path = find_checkpoint(file)
    if parse_source(file) is not None or not path.is_file():
        return {}
    return read_parts(path)[0].settings
