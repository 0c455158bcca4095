"""Adapters: classifiers that learn from each unlabelled image before they predict it.

They wrap the method (method.py); all are used alike and differ in what they remember:

    Fixed     nothing is learned: the network as it is
    Episodic  every image is its own episode and is forgotten afterwards (the paper's standard version)
    Online    images are a stream: one update each, in the order given, and the state lives on

`Streams` (streams.py) are many online ones, stepped together. What they learn is their `method`, see methods.py.

An image is predicted after the update it caused. No adapter ever sees a label or changes the network it was given.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from testtime import augment as augmentations
from testtime import kernels, tasks
from testtime.adaptation.batching import choose_fastest, find_most, run_fitting
from testtime.adaptation.guard import gate
from testtime.adaptation.inputs import check_images, check_samples
from testtime.adaptation.learner import Learner
from testtime.adaptation.methods import METHODS, Method, Mode, find_method
from testtime.adaptation.optimizers import is_rowwise
from testtime.adaptation.prediction import Prediction
from testtime.adaptation.recorder import run, run_each
from testtime.adaptation.replica_store import ReplicaStore
from testtime.adaptation.source import Source
from testtime.adaptation.state import check_state, load_learner, save_learner
from testtime.checks import check_format
from testtime.networks.ynet import YNet
from testtime.precision import Precision, arithmetic
from testtime.storage import FileError
from testtime.tasks import Task
from testtime.tensorfile import pack_text, read_tensors, write_tensors

log = logging.getLogger(__name__)

_KEY = "testtime-adapter"
_FORMAT = 1


class _Lock:
    """A lock that is not shared with copies: each has its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Lock, ()


class Adapter(nn.Module):
    """What the adapters share: a network, a method, settings, a running sample number, and checks of what comes in.

    An adapter is called like any classifier: `adapter(images)` gives logits, and `predict` tells more. As a module it
    holds no parameters, so `train()`, `eval()` and the like do nothing. It works on a copy of the network: the one it
    was given stays as it is, bit for bit. Threads may share it: their calls wait for each other.

    Args:
        net: The network; it is copied.
        method: What it learns: a name from `METHODS`, or a record of one's own.
        mode: What it remembers.
        settings: Fields of `Settings`; they override the method's.
    """

    def __init__(self, net: YNet, method: str | Method, mode: Mode, settings: Mapping[str, Any]) -> None:
        super().__init__()
        _check_network(net)
        self.method = find_method(method)
        given = self.method.make_settings(mode, settings)
        task = given.task or tasks.make(net.card.task)
        augment = given.augment or augmentations.make(net.card.augment)
        self.settings = replace(given, task=task, augment=augment)
        self._lock = _Lock()
        with torch.inference_mode(False):
            # In a list, which hides it from nn.Module: it is not the adapter's to train or to move.
            self._networks = [copy.deepcopy(net).eval().requires_grad_(False)]
        self.device = next(self._networks[0].parameters()).device
        self._sources: dict[tuple[int, ...], Source] = {}
        self.reset()

    def reset(self) -> None:
        """Forget everything: the sample number, the counts, and whatever was learned."""
        with self._lock, torch.inference_mode(False):
            self.seen = 0
            # On the network's device, so that counting does not make the host wait for it.
            self._counts = torch.zeros(2, dtype=torch.int64, device=self.device)
            self._learned: Learner | ReplicaStore | None = None

    @property
    def adapted(self) -> int:
        """How many images changed the network that predicted them."""
        return int(self._counts[0])

    @property
    def rolled_back(self) -> int:
        """How many images' updates were undone by the guard."""
        return int(self._counts[1])

    def forward(self, images: Tensor) -> Tensor:
        """Class logits `(N, K)` of images `(N, C, H, W)`, after adaptation."""
        return self.predict(images).logits

    def predict(self, images: Tensor, samples: Tensor | None = None) -> Prediction:
        """Adapt to images and predict them.

        Args:
            images: `(N, C, H, W)`, uint8 or floats in [0, 1].
            samples: The images' numbers, integers `(N,)`, which choose their augmentations; counted by default.

        Raises:
            ValueError: The images or their numbers do not fit; nothing was learned.
        """
        check_images(self._networks[0], images)
        if samples is not None:
            check_samples(samples, len(images))
        with self._lock, torch.inference_mode(False), torch.no_grad():
            numbers = self._number(images) if samples is None else samples
            with arithmetic(self.settings.precision, self.device), self._all_or_nothing():
                # Copies: tensors made in inference mode cannot take part in learning.
                copies = (tensor.detach().to(self.device, copy=True) for tensor in (images, numbers))
                answers = self._predict(*copies)
                self._counts = self._counts + torch.stack([answers.adapted.sum(), answers.rolled_back.sum()])
                self.seen += len(images)
        return answers

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Everything the adapter has learned and counted, as tensors by name."""
        with self._lock:
            counts = [self.seen, self.adapted, self.rolled_back]
            return {
                **{key: pack_text(text) for key, text in self._identify().items()},
                "counts": torch.tensor(counts, dtype=torch.int64, device="cpu"),
                **save_learner(self._learned),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Continue from a state that `state_dict` gave, bit for bit.

        Raises:
            ValueError: The state belongs to another network, adapter or settings; nothing was changed.
        """
        counts = check_state(state_dict, self._identify())
        with self._lock, torch.inference_mode(False), self._all_or_nothing():
            self._learned = load_learner(state_dict, self._networks[0], self._make_learner)
            self.seen = counts[0]
            self._counts = torch.tensor(counts[1:], dtype=torch.int64, device=self.device)

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file, whole or not at all."""
        write_tensors(path, self.state_dict(), _KEY, {"format": _FORMAT})

    def load(self, path: str | Path) -> None:
        """Continue from a file that `save` wrote.

        Raises:
            FileError: The file cannot be read or belongs elsewhere; nothing was changed.
        """
        about, state = read_tensors(path, _KEY)
        if about is not None:
            check_format(path, about.get("format"), _FORMAT)
        try:
            self.load_state_dict(state)
        except ValueError as error:
            raise FileError(path, str(error).rstrip(".")) from None

    def describe(self) -> dict[str, Any]:
        """Method and settings as plain text and numbers."""
        # Records of version 0.1 have no method; the settings of its presets were written out.
        named = {} if self.method in (METHODS["ttt"], METHODS["best"]) else {"method": self.method.name}
        return named | self.settings.describe()

    def _identify(self) -> dict[str, str]:
        """What a state must have in common with the adapter that loads it."""
        settings = json.dumps(self.describe(), sort_keys=True)
        return {"adapter": type(self).__name__, "settings": settings, "network": self._networks[0].fingerprint()}

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Within it, images are learned from and counted; an error, Ctrl-C among them, leaves all as it was before."""
        counts, seen, undo = self._counts, self.seen, self._remember()
        try:
            yield
        except BaseException:
            undo()
            self._counts, self.seen = counts, seen
            raise

    def _remember(self) -> Callable[[], None]:
        """A function that brings back what has been learned up to now."""
        learned = self._learned
        undo = None if learned is None else learned.remember()

        def bring_back() -> None:
            self._learned = learned
            if undo is not None:
                undo()

        return bring_back

    def _number(self, images: Tensor) -> Tensor:
        """The sample numbers of the next images."""
        return torch.arange(self.seen, self.seen + len(images), device=self.device)

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        raise TypeError("Adapter is a base class; use Fixed, Episodic or Online.")

    def _make_learner(self, shape: tuple[int, ...]) -> Learner | ReplicaStore:
        """What learns, for images of a shape (C, H, W)."""
        raise ValueError(f"{type(self).__name__} remembers nothing.")

    def _unadapted(self, images: Tensor) -> Prediction:
        """The answers of the network as it was given."""
        shape = tuple(images.shape[1:])
        if shape not in self._sources:
            self._sources.clear()
            self._sources[shape] = Source(self._networks[0], self.method, self.settings, shape)
        return self._sources[shape].predict(images)


def _check_network(net: YNet) -> None:
    if not isinstance(net, YNet):
        raise TypeError(f"`net` must be a YNet, got {type(net).__name__}; testtime.split(model, at=…) makes one.")
    half = {tensor.dtype for tensor in net.parameters()} & {torch.float16, torch.bfloat16}
    if half:
        raise ValueError(
            f"`net` must have float32 parameters, got {half.pop()}: small steps are lost in it. "
            'To compute in bfloat16, give net.float() and precision="bf16".'
        )


def copy_network(net: YNet, learned: Mapping[str, Tensor]) -> YNet:
    """A copy of a network, with other tensors where there are learned ones of a replica."""
    made = copy.deepcopy(net)
    made.load_state_dict({**made.state_dict(), **learned})
    return made.requires_grad_(True)


class Fixed(Adapter):
    """The network as it is, with an adapter's answers: the baseline ("joint training" in the paper).

    Args:
        net: The network.
        task: The self-supervised task to measure; the network's own by default.
        precision: "fp32", "tf32" or "bf16".
        mirrored: Answer with the mean of the logits of the image and of its mirror image.
    """

    def __init__(
        self, net: YNet, *, task: Task | None = None, precision: Precision = "fp32", mirrored: bool = False
    ) -> None:
        super().__init__(net, "ttt", "fixed", {"steps": 0, "task": task, "precision": precision, "mirrored": mirrored})

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        return self._unadapted(images)


class Episodic(Adapter):
    """Every image is its own episode: learn from it, predict it, forget it (the paper's standard version).

    An image's answer depends on the network, the settings, the image and its sample number, and on nothing else: not on
    the other images of the batch, their order, or, but for rounding, how many episodes run in parallel. Only where the
    images of a call share their updates (`share="batch"`), they are one episode.

    Args:
        net: The network; it is copied.
        method: What it learns: a name from `METHODS`, or a record of one's own.
        parallel: How many episodes run in parallel; "auto" tries out a few counts once there are images enough. Where
            the memory of a GPU is too small for them, it becomes what fits.
        **settings: Fields of `Settings`; they override the method's. By default 10 steps on each image.
    """

    def __init__(
        self,
        net: YNet,
        *,
        method: str | Method = "ttt",
        parallel: int | Literal["auto"] = "auto",
        **settings: Any,
    ) -> None:
        if parallel != "auto" and (isinstance(parallel, str) or parallel < 1):
            raise ValueError(f'`parallel` must be "auto" or at least 1, got {parallel!r}.')
        self.parallel: int | Literal["auto"] = parallel
        self._learners: dict[int, Learner] = {}
        super().__init__(net, method, "episodic", settings)
        if parallel != 1 and not is_rowwise(self.settings):
            log.info("this optimizer's step mixes parameters, so episodes run one after another")
            self.parallel = 1

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        answers = self._unadapted(images)
        wanted = gate(answers.confidence, self.settings.threshold).nonzero().flatten()
        if self.settings.steps == 0 or len(wanted) == 0:
            return answers

        def learn_from(chunk: Tensor) -> None:
            learner = self._learner(len(chunk), tuple(images.shape[1:]))
            learner.reset()
            learned = run(learner, images[chunk], samples[chunk])
            for f in fields(Prediction):
                getattr(answers, f.name)[chunk] = getattr(learned, f.name)

        def attempt(count: int) -> None:
            if count < most:  # more at once were too many, for the images to come as well
                self.parallel = count
                self._learners.clear()
            for chunk in wanted.split(count):
                learn_from(chunk[:, None])  # (S, 1)

        if self.settings.share == "batch":
            learn_from(wanted[None])  # one episode that all of them share
        else:
            most = self._choose_parallel(images[wanted])
            run_fitting(most, attempt)
        return answers

    def _learner(self, count: int, shape: tuple[int, ...]) -> Learner:
        if count not in self._learners:
            while len(self._learners) > 1:  # the full size and one remainder are enough to keep
                self._learners.pop(min(self._learners))
            self._learners[count] = Learner(self._networks[0], count, self.method, self.settings, shape)
        return self._learners[count]

    def _choose_parallel(self, images: Tensor) -> int:
        """How many episodes to run at once for these images."""
        if self.parallel != "auto":
            return self.parallel
        shape, tuning = tuple(images.shape[1:]), kernels.tuning(self.device)
        most = find_most(self._networks[0], self.settings, shape)
        counts = [count for count in tuning.parallel if count <= most]
        if not tuning.waits:  # few images are worth no larger count
            counts = [count for count in counts if count <= len(images) // 2]
        if len(counts) < 2 or len(images) < 2 * counts[-1]:  # nothing to choose, or too few images
            return min(len(images), most, tuning.untried)

        def trial(count: int) -> float:
            learner = Learner(self._networks[0], count, self.method, replace(self.settings, steps=1), shape)
            arguments = images[:count, None], torch.arange(count, device=images.device)[:, None]
            run(learner, *arguments)  # warms up
            begin = time.perf_counter()
            run(learner, *arguments).logits.cpu()
            return time.perf_counter() - begin

        described = json.dumps(self.describe(), sort_keys=True)
        return choose_fastest((self._networks[0].fingerprint(), shape, images.device, described), counts, trial)


class Online(Adapter):
    """Images are a stream: one update each in the order given, each predicted after its update; the state lives on.

    A stream saved half-way and loaded elsewhere continues bit for bit. With Batch Normalization the statistics of
    single images add up and ruin the stream, as the paper found: use Group Normalization.

    Args:
        net: The network; it is copied.
        method: What it learns: a name from `METHODS`, or a record of one's own.
        **settings: Fields of `Settings`; they override the method's.
    """

    def __init__(self, net: YNet, *, method: str | Method = "ttt", **settings: Any) -> None:
        super().__init__(net, method, "online", settings)

    def network(self) -> YNet:
        """A network with what has been learned so far, to save or to use as it is. The stream continues without it."""
        with self._lock, torch.inference_mode(False):
            learned = self._learned
            return copy_network(self._networks[0], learned.replicas.read(0) if isinstance(learned, Learner) else {})

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        if self.settings.steps == 0 or len(images) == 0:
            return self._unadapted(images)
        learner = self._learned or self._make_learner(tuple(images.shape[1:]))
        assert isinstance(learner, Learner)
        self._learned = learner
        if self.settings.share == "image":
            return run_each(learner, images, samples)
        return run(learner, images[None], samples[None])[0]

    def _make_learner(self, shape: tuple[int, ...]) -> Learner:
        return Learner(self._networks[0], 1, self.method, self.settings, shape)
