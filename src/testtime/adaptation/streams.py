"""Many parallel online streams, each with its own state, e.g. one per camera, user or test set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.adapters import Adapter, copy_network
from testtime.adaptation.batching import find_most, run_fitting
from testtime.adaptation.inputs import check_images, check_streams, send
from testtime.adaptation.methods import Method
from testtime.adaptation.optimizers import has_rows, is_rowwise
from testtime.adaptation.prediction import Prediction
from testtime.adaptation.replica_store import ReplicaStore
from testtime.adaptation.settings import document_settings
from testtime.adaptation.state import read_numbers, read_shape
from testtime.networks.ynet import YNet
from testtime.precision import arithmetic


@document_settings(steps=1)
class Streams(Adapter):
    """S independent online streams computed in parallel; each is equivalent to an `Online` adapter.

    A call takes at most one image per stream. Streams without an image stay unchanged, bit for bit, and cost no time.
    There may be more streams than can be computed at once: an inactive one needs memory for its parameters only, not
    for activations.

    Args:
        net: The network all streams start from; it is copied.
        count: Number of streams, S.
        together: Maximum number of streams computed at once; by default as many as are efficient and fit in memory.
        padded: Compute any number of streams as if they were `together`: slower, but the rounding of a stream's results
            does not depend on how many others share its calls. With 1, they are those of `Online`.
        method: A name from `METHODS`, or a custom `Method`.
        **settings: See below; they override the method's. `share` does not apply.
    """

    def __init__(
        self,
        net: YNet,
        count: int,
        *,
        together: int | None = None,
        padded: bool = False,
        method: str | Method = "ttt",
        **settings: Any,
    ) -> None:
        for name, value in (("count", count), ("together", together)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if padded and together is None:
            raise ValueError("`padded` needs `together`, the number to pad to.")
        self.count, self._limit, self._padded = count, together, padded
        self._streams: Tensor | None = None  # of the current call; None for all
        if settings.setdefault("share", "image") != "image":
            raise ValueError("Streams take one image each, so there is no batch to `share`.")
        super().__init__(net, method, "online", settings)
        if not (is_rowwise(self.settings) and has_rows(self.settings)):
            raise ValueError("This optimizer's steps or memory mix streams; use SGD, with or without momentum.")

    @property
    def together(self) -> int:
        """Number of streams computed at once; an upper bound before the first call."""
        store = self._learned
        return store.together if isinstance(store, ReplicaStore) else min(self.count, self._limit or self.count)

    def reset(self, streams: Tensor | None = None) -> None:
        """Reset everything, or the state and sample counters of the given streams, int `(M,)`."""
        with self._lock, torch.inference_mode(False):
            if streams is None:
                super().reset()
                # On the network's device, like the counts.
                self._extra["numbers"] = torch.zeros(self.count, dtype=torch.int64, device=self.device)
                return
            check_streams(streams, len(streams), self.count)
            chosen = torch.zeros(self.count, dtype=torch.bool, device=self.device)
            chosen[streams.to(self.device)] = True
            self._extra["numbers"] = self._extra["numbers"].masked_fill(chosen, 0)
            if self._learned is not None:
                self._learned.reset(chosen)

    def predict(self, images: Tensor, samples: Tensor | None = None, *, streams: Tensor | None = None) -> Prediction:
        """Adapt each stream to its next image and predict it.

        Args:
            images: `(M, C, H, W)`, uint8 or floats in [0, 1].
            samples: Sample numbers `(M,)` of the images within their streams; counted by default.
            streams: The stream of each image, int `(M,)`, without duplicates; by default all S in order.

        Raises:
            ValueError: Images, sample numbers or streams are invalid; nothing was learned.
        """
        if streams is not None:
            check_streams(streams, len(images), self.count)
        elif isinstance(images, Tensor) and images.dim() == 4 and len(images) != self.count:
            raise ValueError(f"`images` must be one for each of the {self.count} streams, got {len(images)}.")
        with self._lock, torch.inference_mode(False):
            self._streams = None if streams is None else send(streams, self.device)
            return super().predict(images, samples)

    def observe(self, images: Tensor, streams: Tensor) -> Prediction:
        """Predict images with their streams as they are: nothing is learned or counted.

        Args:
            images: `(M, C, H, W)`, uint8 or floats in [0, 1].
            streams: The stream of each image, int `(M,)`, without duplicates.

        Raises:
            ValueError: Images or streams are invalid.
        """
        check_images(self._networks[0], images)
        check_streams(streams, len(images), self.count)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            given = images.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
            with arithmetic(self.settings.precision or "fp32", self.device):
                store = self._learned
                if not isinstance(store, ReplicaStore) or len(images) == 0:
                    return self._unadapted(given, alone=True)
                return store.observe(given, streams.to(self.device))

    def export_streams(self, streams: Tensor) -> dict[str, Tensor]:
        """Return the state of some streams: tensors by name on the CPU, a row for each, e.g. to make room for others.

        Args:
            streams: Int `(M,)`, without duplicates.

        Raises:
            ValueError: There are no such streams.
        """
        check_streams(streams, len(streams), self.count)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            chosen = streams.to(self.device)
            state = {"numbers": self._extra["numbers"][chosen].cpu()}
            if isinstance(self._learned, ReplicaStore) and len(streams):
                learned = self._learned.state(chosen)
                shape = torch.tensor(self._learned.shape, dtype=torch.int64, device="cpu")
                state["learner/shape"] = shape.expand(len(streams), 3).clone()
                state |= {f"learner/{name}": tensor.cpu() for name, tensor in learned.items()}
            return state

    def import_streams(self, streams: Tensor, state: Mapping[str, Tensor]) -> None:
        """Continue some streams, bit for bit, from a state of `export_streams`, also of streams with other numbers.

        Args:
            streams: Int `(M,)`, without duplicates; the other streams stay as they are.
            state: A state of M streams with the same network and settings.

        Raises:
            ValueError: The state does not fit; nothing was changed.
        """
        check_streams(streams, len(streams), self.count)
        numbers = read_numbers(state, "numbers", len(streams))
        learned = {name.removeprefix("learner/"): one for name, one in state.items() if name.startswith("learner/")}
        with self._lock, torch.inference_mode(False), torch.no_grad():
            chosen = streams.to(self.device)
            if learned:
                shapes = learned.pop("shape", None)  # (M, 3)
                shape = read_shape(None if shapes is None else shapes[:1].flatten(), self._networks[0])
                store = self._learned if self._learned is not None else self._make_learner(shape)
                if not isinstance(store, ReplicaStore) or store.shape != shape:
                    raise ValueError(f"The state does not fit: it is for images {shape}.")
                store.load_rows(chosen, learned)
                self._learned = store
            elif self._learned is not None:
                self.reset(streams)
            self._extra["numbers"] = self._extra["numbers"].index_copy(0, chosen, numbers.to(self.device))

    def make_undo(self, streams: Tensor) -> Callable[[Tensor], None]:
        """Return a function that returns some streams to their present state, bit for bit, and leaves the others alone.

        Args:
            streams: Int `(M,)`, without duplicates. The function takes those of them to return, likewise.

        Raises:
            ValueError: There are no such streams.
        """
        check_streams(streams, len(streams), self.count)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            chosen, store = send(streams, self.device), self._learned
            numbers = self._extra["numbers"][chosen]
            saved = store.unload().take(chosen) if isinstance(store, ReplicaStore) else None

        def undo(wanted: Tensor) -> None:
            with self._lock, torch.inference_mode(False), torch.no_grad():
                rows = (chosen[None] == wanted.to(self.device)[:, None]).nonzero()[:, 1]  # of what was saved
                if saved is None:
                    self.reset(chosen[rows])
                elif isinstance(self._learned, ReplicaStore):
                    self._learned.unload().put(chosen[rows], saved.take(rows))
                self._extra["numbers"] = self._extra["numbers"].index_copy(0, chosen[rows], numbers[rows])

        return undo

    def network(self, stream: int) -> YNet:
        """Return an independent copy of the network that a stream learns with, see `Online.network`.

        Raises:
            ValueError: There is no such stream.
        """
        if not 0 <= stream < self.count:
            raise ValueError(f"`stream` must be from 0 to {self.count - 1}, got {stream}.")
        with self._lock, torch.inference_mode(False):
            store = self._learned
            return copy_network(self._networks[0], store.read(stream) if isinstance(store, ReplicaStore) else {})

    def _make_undo(self) -> Callable[[], None]:
        store = self._learned
        undo = store.make_undo(self._streams) if isinstance(store, ReplicaStore) else None

        def restore() -> None:
            self._learned = store
            if undo is not None:
                undo()

        return restore

    def _number(self, images: Tensor) -> Tensor:
        numbers = self._extra["numbers"]
        return numbers if self._streams is None else numbers[self._streams]

    def _is_single(self, images: Tensor) -> bool:
        return len(images) > 0

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        numbers = self._extra["numbers"].clone()
        numbers[slice(None) if self._streams is None else self._streams] += 1
        self._extra["numbers"] = numbers
        if self.settings.steps == 0 or len(images) == 0:
            return self._unadapted(images, alone=True)
        shape = tuple(images.shape[1:])

        def attempt(together: int) -> Prediction:
            store = self._learned
            if not isinstance(store, ReplicaStore) or together < store.together:
                store = self._make_learner(shape, together)
                if self._learned is not None:
                    store.load(self._learned.state())
            prediction = store.predict(images, samples, self._streams)
            self._learned = store  # only now, so that a failed attempt loses nothing
            return prediction

        planned = self._learned if isinstance(self._learned, ReplicaStore) else self._make_learner(shape)
        return run_fitting(planned.together, attempt)

    def _make_learner(self, shape: tuple[int, ...], together: int | None = None) -> ReplicaStore:
        most = together or min(self.count, self._limit or find_most(self._networks[0], self.settings, shape))
        return ReplicaStore(self._networks[0], self.count, most, self.method, self.settings, shape, self._padded)
