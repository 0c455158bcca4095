"""The state of an adapter: its counts and what it has learned; how it is reset, saved, loaded and undone."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from testtime.adaptation.learner import Learner
from testtime.adaptation.replica_store import ReplicaStore
from testtime.checks import check_format
from testtime.networks.card import KEY
from testtime.networks.ynet import YNet
from testtime.provenance import format_difference
from testtime.storage import FileError
from testtime.tensorfile import pack_text, read_description, read_tensors, unpack_text, write_tensors

_KEY = "testtime-adapter"
_FORMAT = 1
_LARGEST = 1 << 24  # maximum values per image of a saved state


class _Lock:
    """A lock that is not shared with copies of its owner."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Lock, ()


class Stateful(nn.Module):
    """The state that persists between the calls of an adapter.

    Args:
        net: The network to start from; it is copied.
    """

    def __init__(self, net: YNet) -> None:
        super().__init__()
        self._lock = _Lock()
        with torch.inference_mode(False):
            # In a list, to hide it from nn.Module: train() and to() must not affect it.
            self._networks = [copy.deepcopy(net).eval()]
        self.device = next(self._networks[0].parameters()).device
        self.reset()

    def reset(self) -> None:
        """Reset to the original network: the sample counter, the counts, and everything learned."""
        with self._lock, torch.inference_mode(False):
            self.seen = 0
            # On the network's device, so that counting does not synchronise.
            self._counts = torch.zeros(2, dtype=torch.int64, device=self.device)
            self._learned: Learner | ReplicaStore | None = None
            # What a subclass counts or measures besides, by name, set in its `reset`; never changed in place.
            self._extra: dict[str, Tensor] = {}

    @property
    def adapted(self) -> int:
        """Number of images predicted by a network that adapted to them."""
        return int(self._counts[0])

    @property
    def rolled_back(self) -> int:
        """Number of images whose update was undone by the guard."""
        return int(self._counts[1])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return everything the adapter has learned and counted, as tensors by name."""
        with self._lock:
            counts = [self.seen, self.adapted, self.rolled_back]
            state = {name: tensor.to("cpu", copy=True) for name, tensor in self._extra.items()}
            state |= {key: pack_text(text) for key, text in self.identify().items()}
            state["counts"] = torch.tensor(counts, dtype=torch.int64, device="cpu")
            if self._learned is not None:
                shape = torch.tensor(self._learned.shape, dtype=torch.int64, device="cpu")
                learned = self._learned.state() | {"shape": shape}
                state |= {f"learner/{name}": tensor for name, tensor in learned.items()}
            return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Continue from a state returned by `state_dict`, bit for bit.

        Raises:
            ValueError: The state is of another network, adapter or settings; nothing was changed.
        """
        counts = check_state(state_dict, self.identify(), self._networks[0])
        with self._lock, torch.inference_mode(False), self._all_or_nothing():
            for name, now in self._extra.items():
                found = read_numbers(state_dict, name, len(now), now.dtype)
                self._extra[name] = found.to(now.device, copy=True)
            self._learned = _load_learner(state_dict, self._networks[0], self._make_learner)
            self.seen = counts[0]
            self._counts = torch.tensor(counts[1:], dtype=torch.int64, device=self.device)

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file, atomically."""
        write_tensors(path, self.state_dict(), _KEY, {"format": _FORMAT})

    def load(self, path: str | Path) -> None:
        """Continue from a file written by `save`.

        Raises:
            FileError: The file cannot be read or does not match this adapter; nothing was changed.
        """
        try:
            about, state = read_tensors(path, _KEY)
        except FileError:
            if _is_network(path):
                raise FileError(path, "a network, not the state of an adapter", "tt.load reads it") from None
            raise
        if about is not None:
            check_format(path, about.get("format"), _FORMAT)
        try:
            self.load_state_dict(state)
        except ValueError as error:
            raise FileError(path, str(error).rstrip(".")) from None

    def identify(self) -> dict[str, str]:
        """Return what a state and the adapter that loads it must have in common."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo everything learned and counted inside the context on an error, including Ctrl-C."""
        counts, seen, extra, undo = self._counts, self.seen, dict(self._extra), self._make_undo()
        try:
            yield
        except BaseException:
            undo()
            self._counts, self.seen, self._extra = counts, seen, extra
            raise

    def _make_undo(self) -> Callable[[], None]:
        """Return a function that restores what is learned now."""
        learned = self._learned
        undo = None if learned is None else learned.make_undo()

        def restore() -> None:
            self._learned = learned
            if undo is not None:
                undo()

        return restore

    def _make_learner(self, shape: tuple[int, ...]) -> Learner | ReplicaStore:
        """Return a learner for images of shape (C, H, W)."""
        raise ValueError(f"{type(self).__name__} has no state.")


def _is_network(path: str | Path) -> bool:
    """Whether a file has the description of a network."""
    try:
        return read_description(path, KEY) is not None
    except FileError:
        return False


def _load_learner(
    state: Mapping[str, Tensor], net: YNet, make: Callable[[tuple[int, ...]], Learner | ReplicaStore]
) -> Learner | ReplicaStore | None:
    """Return the learner in an adapter's saved state, which `make` makes for a shape (C, H, W); None if it has none."""
    learned = {name.removeprefix("learner/"): tensor for name, tensor in state.items() if name.startswith("learner/")}
    if not learned:
        return None
    shape = learned.pop("shape", None)
    learner = make(read_shape(shape, net))
    learner.load(learned)
    return learner


def read_shape(shape: Tensor | None, net: YNet) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of images from a saved state.

    Raises:
        ValueError: It is missing or malformed, or the network takes no such images.
    """
    if shape is None or shape.dtype != torch.int64 or shape.shape != (3,):
        raise ValueError("The state does not fit: the shape of its images is missing.")
    channels, height, width = shape.tolist()
    sound = min(channels, height, width) >= 1 and channels * height * width <= _LARGEST
    if not sound or channels != (net.channels or channels):
        raise ValueError(f"The state does not fit: it is for images {(channels, height, width)}.")
    return channels, height, width


def read_numbers(state: Mapping[str, Tensor], name: str, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return some numbers >= 0, `(count,)`, from a saved state.

    Raises:
        ValueError: They are missing or malformed.
    """
    found = state.get(name)
    if found is None or found.dtype != dtype or found.shape != (count,) or (found < 0).any():
        kind = "numbers" if dtype.is_floating_point else "integers"
        raise ValueError(f"not an adapter's state: {name!r} are not {count} {kind} >= 0.")
    return found


def check_state(state: Mapping[str, Tensor], identity: Mapping[str, str], net: YNet) -> list[int]:
    """Check a saved state and return its counts: images seen, adapted to and rolled back.

    Args:
        state: The state.
        identity: Adapter, settings and network, which must match.
        net: The original network; its values that are not finite, e.g. of attention masks, may be so in the state.

    Raises:
        ValueError: The state does not match, or is damaged.
    """
    for key, here in identity.items():
        if key not in state:
            raise ValueError(f"not an adapter's state: {key!r} is missing.")
        there = unpack_text(state[key])
        if there != here:
            raise ValueError(f"the state was saved with another {key}: {format_difference(there, here)}.")
    counts = read_numbers(state, "counts", 3).tolist()
    if counts[1] + counts[2] > counts[0]:
        raise ValueError(f"not an adapter's state: it counts fewer images seen than learned from, {counts}.")
    original = {f"learner/{name}": tensor for name, tensor in (*net.named_parameters(), *net.named_buffers())}
    for name, tensor in state.items():
        sound = tensor.isfinite()
        if name in original and tensor.shape[1:] == original[name].shape:
            sound = sound | ~original[name].isfinite().to(sound.device)
        if tensor.is_floating_point() and not sound.all():
            raise ValueError(f"tensor {name!r} has values that are not finite.")
    return counts
