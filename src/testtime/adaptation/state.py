"""The saved state of an adapter: what it belongs to, its counts, and its learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from testtime.networks.ynet import YNet
from testtime.tensorfile import unpack_text

_LARGEST = 1 << 24  # maximum values per image of a saved state


class Stateful(Protocol):
    """The state that persists between images: a learner or a `ReplicaStore`."""

    shape: tuple[int, ...]

    def state(self) -> dict[str, Tensor]: ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...


Held = TypeVar("Held", bound=Stateful)


def save_learner(learner: Stateful | None) -> dict[str, Tensor]:
    """Return the tensors of a learner for an adapter's state; read by `load_learner`."""
    if learner is None:
        return {}
    state = learner.state() | {"shape": torch.tensor(learner.shape, dtype=torch.int64, device="cpu")}
    return {f"learner/{name}": tensor for name, tensor in state.items()}


def load_learner(state: Mapping[str, Tensor], net: YNet, make: Callable[[tuple[int, ...]], Held]) -> Held | None:
    """Return the learner in an adapter's saved state, or None if there was none yet.

    Args:
        state: The adapter's state; the names of the learner's tensors begin with `learner/`.
        net: The network to start from.
        make: Makes a learner for images of shape (C, H, W).

    Raises:
        ValueError: The state does not match.
    """
    learned = {name.removeprefix("learner/"): tensor for name, tensor in state.items() if name.startswith("learner/")}
    if not learned:
        return None
    shape = learned.pop("shape", None)
    if shape is None or shape.dtype != torch.int64 or shape.shape != (3,):
        raise ValueError("The state does not fit: the shape of its images is missing.")
    channels, height, width = shape.tolist()
    sound = min(channels, height, width) >= 1 and channels * height * width <= _LARGEST
    if not sound or channels != (net.channels or channels):
        raise ValueError(f"The state does not fit: it is for images {(channels, height, width)}.")
    with torch.inference_mode(False):
        learner = make((channels, height, width))
        learner.load(learned)
    return learner


def read_counts(state: Mapping[str, Tensor], name: str, number: int) -> list[int]:
    """Return `number` counts from a saved state.

    Raises:
        ValueError: They are missing or malformed.
    """
    counts = state.get(name)
    if counts is None or counts.dtype != torch.int64 or counts.shape != (number,) or (counts < 0).any():
        raise ValueError(f"not an adapter's state: {name!r} are not {number} integers >= 0.")
    return counts.tolist()


def check_state(state: Mapping[str, Tensor], identity: Mapping[str, str]) -> list[int]:
    """Check a saved state and return its counts: images seen, adapted to and rolled back.

    Args:
        state: The state.
        identity: Adapter, settings and network, which must match.

    Raises:
        ValueError: The state does not match, or is damaged.
    """
    for key, here in identity.items():
        if key not in state:
            raise ValueError(f"not an adapter's state: {key!r} is missing.")
        there = unpack_text(state[key])
        if there != here:
            raise ValueError(f"the state was saved with another {key}: {there}, here {here}.")
    counts = read_counts(state, "counts", 3)
    if counts[1] + counts[2] > counts[0]:
        raise ValueError(f"not an adapter's state: it counts fewer images seen than learned from, {counts}.")
    for name, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"tensor {name!r} has values that are not finite.")
    return counts
