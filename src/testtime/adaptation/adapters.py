"""Adapters: classifiers that learn from each unlabelled image before they predict it.

They wrap the method (method.py) behind one interface and differ in the state that persists between images:

    Fixed     no learning: the unadapted network
    Episodic  every image is a separate episode, starting from the original network (the paper's standard version)
    Online    images are a stream: one update per image, in order; the state persists

`Streams` (streams.py) runs many online streams in parallel. The objective is chosen by `method`, see methods.py.

An image is predicted after the update on it. Adapters never see labels and never change the network they are given.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from testtime import augment as augmentations
from testtime import kernels, tasks
from testtime.adaptation.batching import choose_fastest, find_most, run_fitting
from testtime.adaptation.guard import gate
from testtime.adaptation.inputs import check_images, check_samples, check_size, send
from testtime.adaptation.learner import Learner
from testtime.adaptation.methods import ALIASES, METHODS, Method, Mode, find_method
from testtime.adaptation.objectives import Entropy
from testtime.adaptation.optimizers import is_rowwise
from testtime.adaptation.prediction import Prediction
from testtime.adaptation.recorder import run, run_each
from testtime.adaptation.selection import (
    choose_statistics,
    select_parameters,
    warn_about_batch,
    warn_about_batch_norm,
    warn_about_branch,
    warn_about_statistics,
)
from testtime.adaptation.settings import document_settings
from testtime.adaptation.source import Source
from testtime.adaptation.state import Stateful
from testtime.networks.replica_parts import ReplicaError
from testtime.networks.ynet import YNet, check_task
from testtime.precision import Precision, arithmetic, choose_precision
from testtime.tasks import Task

log = logging.getLogger(__name__)


class Adapter(Stateful):
    """Base class of the adapters: network, method, settings, sample counter, and input checks.

    An adapter is called like any classifier: `adapter(images)` returns logits, `predict` returns more. As a module it
    has no parameters, so `train()` and `eval()` have no effect. It works on a copy of the network, which itself stays
    unchanged. It is thread-safe: concurrent calls are serialised.

    Args:
        net: The network; it is copied.
        method: A name from `METHODS`, or a custom `Method`.
        mode: Whether and how state persists between images.
        settings: Fields of `Settings`; they override the method's.
    """

    def __init__(self, net: YNet, method: str | Method, mode: Mode, settings: Mapping[str, Any]) -> None:
        _check_network(net)
        method = find_method(method)
        _check_needs(net, method)
        given = method.make_settings(mode, settings)
        task = given.task or tasks.make(net.card.task)
        if method.needs_branch:
            check_task(net, task)
        super().__init__(net)
        self.method = method
        self.settings = replace(
            given,
            statistics=given.statistics or choose_statistics(net, given),
            precision=given.precision or choose_precision(self.device),
            task=task,
            augment=given.augment or augmentations.make(net.card.augment),
        )
        self._sources: dict[tuple[int, ...], Source] = {}
        self._warned = False  # about batches of one image
        if "batchnorm" in method.needs:
            warn_about_batch_norm(net, method.name)
        if given.steps:
            if given.update == "none" and method.settings.get("update") != "none":
                raise ValueError(f'`update` must select parameters for the method {method.name!r}, got "none".')
            select_parameters(net, given.update)  # raises if there are none
            if method.needs_branch:
                warn_about_branch(net)
            if mode == "online" and method.settings.get("statistics") != "running":
                warn_about_statistics(net, self.settings)

    @property
    def holds_images(self) -> bool:
        """Whether the state contains recent images."""
        return self.method.holds_images and self.settings.constants.get("memory") != 0

    def forward(self, images: Tensor) -> Tensor:
        """Return class logits `(N, K)` of images `(N, C, H, W)`, after adaptation."""
        return self.predict(images).logits

    def predict(self, images: Tensor, samples: Tensor | None = None) -> Prediction:
        """Adapt to images and predict them.

        Args:
            images: `(N, C, H, W)`, uint8 or floats in [0, 1].
            samples: Sample numbers, integers `(N,)`, which seed the augmentations; counted by default.

        Raises:
            ValueError: Images or sample numbers are invalid; nothing was learned.
        """
        check_images(self._networks[0], images)
        if samples is not None:
            check_samples(samples, len(images))
        if "batch" in self.method.needs and not self._warned and self._is_single(images):
            self._warned = True
            warn_about_batch(self.method.name)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self.holds_images and self._learned is not None:
                check_size(images, self._learned.shape)
            numbers = self._number(images) if samples is None else samples
            with arithmetic(self.settings.precision or "fp32", self.device), self._all_or_nothing():
                # Copies, since autograd cannot save tensors made in inference mode; contiguous, since the memory format
                # decides how products are rounded.
                prediction = self._predict(*(send(tensor, self.device) for tensor in (images, numbers)))
                self._counts = self._counts + torch.stack([prediction.adapted.sum(), prediction.rolled_back.sum()])
                self.seen += len(images)
        return prediction

    def describe(self) -> dict[str, Any]:
        """Return method and settings, JSON-serializable."""
        # Records of version 0.1 have no method, only the settings of its presets; its `best` is `mirrored`.
        known, name = (METHODS["ttt"], METHODS["mirrored"]), self.method.name
        named: dict[str, Any] = {} if self.method in known else {"method": ALIASES.get(name, name)}
        statistics = self._networks[0].statistics
        compares = "statistics" in self.method.needs or getattr(self.method.objective, "compares", False)
        if compares and statistics is not None:
            named["collected"] = statistics.about.get("hash")  # of the images
        return named | self.settings.describe()

    def identify(self) -> dict[str, str]:
        settings = json.dumps(self.describe(), sort_keys=True)
        return {"adapter": type(self).__name__, "settings": settings, "network": self._networks[0].fingerprint()}

    def _number(self, images: Tensor) -> Tensor:
        """Return the sample numbers of the next images."""
        return torch.arange(self.seen, self.seen + len(images), device=self.device)

    def _is_single(self, images: Tensor) -> bool:
        """Return whether images of a call are learned from or predicted one by one."""
        return len(images) == 1 or (self.settings.steps > 0 and self.settings.share == "image")

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        raise TypeError("Adapter is a base class; use Fixed, Episodic or Online.")

    def _unadapted(self, images: Tensor, alone: bool = False) -> Prediction:
        """Return the predictions of the unadapted network; `alone`: of each image as a batch of its own."""
        shape = tuple(images.shape[1:])
        if shape not in self._sources:
            self._sources.clear()
            self._sources[shape] = Source(self._networks[0], self.method, self.settings, shape)
        return self._sources[shape].predict(images, alone)


def _check_network(net: YNet) -> None:
    if not isinstance(net, YNet):
        raise TypeError(f"`net` must be a YNet, got {type(net).__name__}; testtime.split(model) makes one.")
    half = {tensor.dtype for tensor in net.parameters()} & {torch.float16, torch.bfloat16}
    if half:
        raise ValueError(
            f"`net` must have float32 parameters, got {half.pop()}, which rounds small updates away. "
            'To compute in bfloat16, pass net.float() and precision="bf16".'
        )


def _check_needs(net: YNet, method: Method) -> None:
    if "statistics" in method.needs and net.statistics is None:
        raise ValueError(
            f"`method` {method.name!r} needs statistics of training images, which the network does not have: "
            "tt.collect(net, images) adds them."
        )
    if method.needs_branch and net.ssl is None:
        others = ", ".join(name for name, one in METHODS.items() if not one.needs_branch)
        raise ValueError(
            f"`method` {method.name!r} needs a self-supervised branch, which the network does not have: add one with "
            f"testtime.split and testtime.fit_branch, or choose a method that needs none ({others})."
        )


def copy_network(net: YNet, learned: Mapping[str, Tensor]) -> YNet:
    """Return a copy of a network with the learned tensors of a replica."""
    made = copy.deepcopy(net)
    own = {**dict(made.named_parameters()), **dict(made.named_buffers())}  # not `state_dict`: all buffers
    with torch.no_grad():
        for name, tensor in learned.items():
            own[name].copy_(tensor)
    return made


_FIXED = Method("fixed", "predicts without learning", "", Entropy)


class Fixed(Adapter):
    """The unadapted network as an adapter: the baseline ("joint training" in the paper).

    Args:
        net: The network; it is copied.
        task: The self-supervised task to measure; the network's own by default. For a network without a
            self-supervised branch, loss and confidence are those of the predicted classes: entropy and probability.
        precision: "fp32", "tf32" or "bf16"; None: "tf32" on CUDA, else "fp32".
        mirrored: Average the logits of the image and its mirror image.
    """

    def __init__(
        self, net: YNet, *, task: Task | None = None, precision: Precision | None = None, mirrored: bool = False
    ) -> None:
        method = _FIXED if getattr(net, "ssl", None) is None else "ttt"
        super().__init__(net, method, "fixed", {"steps": 0, "task": task, "precision": precision, "mirrored": mirrored})

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        return self._unadapted(images)


@document_settings(steps=10)
class Episodic(Adapter):
    """Every image is a separate episode: learn from it, predict it, reset (the paper's standard version).

    A prediction depends only on the network, the settings, the image and its sample number: not on the other images of
    the batch, their order, or, up to rounding, the number of parallel episodes. With `share="batch"` the images of a
    call form one episode.

    Args:
        net: The network; it is copied.
        method: A name from `METHODS`, or a custom `Method`.
        parallel: Number of parallel episodes; "auto" times a few candidates once there are enough images. It is
            reduced if the GPU runs out of memory.
        **settings: See below; they override the method's.
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
            log.info("this optimizer mixes replicas, so episodes run one after another")
            self.parallel = 1

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        # With threshold 1, everything measured here is overwritten.
        alone = self.settings.threshold < 1 and self._is_single(images)
        prediction = self._unadapted(images, alone)
        wanted = gate(prediction.confidence, self.settings.threshold).nonzero().flatten()
        if self.settings.steps == 0 or len(wanted) == 0:
            return prediction

        def learn_from(chunk: Tensor) -> None:
            learner = self._learner(len(chunk), tuple(images.shape[1:]))
            learner.reset()
            learned = run(learner, images[chunk], samples[chunk])
            for f in fields(Prediction):
                getattr(prediction, f.name)[chunk] = getattr(learned, f.name)

        def attempt(count: int) -> None:
            if count < most:  # out of memory, which applies to later images too
                self.parallel = count
                self._learners.clear()
            for chunk in wanted.split(count):
                learn_from(chunk[:, None])  # (S, 1)

        if self.settings.share == "batch":
            learn_from(wanted[None])  # (1, B): one shared episode
        else:
            try:
                most = self._choose_parallel(images[wanted])
                run_fitting(most, attempt)
            except ReplicaError as error:
                if self.parallel != "auto":
                    raise
                log.info("episodes run one after another: %s", error)
                self.parallel = most = 1
                run_fitting(most, attempt)
        return prediction

    def _learner(self, count: int, shape: tuple[int, ...]) -> Learner:
        if self.holds_images and any(learner.shape != shape for learner in self._learners.values()):
            self._learners.clear()  # their memories are of another shape
        if count not in self._learners:
            while len(self._learners) > 1:  # cache the full size and one remainder
                self._learners.pop(min(self._learners))
            self._learners[count] = Learner(self._networks[0], count, self.method, self.settings, shape)
        return self._learners[count]

    def _choose_parallel(self, images: Tensor) -> int:
        """Return the number of parallel episodes for these images."""
        if self.parallel != "auto":
            return self.parallel
        shape, tuning = tuple(images.shape[1:]), kernels.tuning(self.device)
        most = find_most(self._networks[0], self.settings, shape)
        counts = [count for count in tuning.parallel if count <= most]
        if not tuning.waits:  # larger counts do not pay off for few images
            counts = [count for count in counts if count <= len(images) // 2]
        if len(counts) < 2 or len(images) < 2 * counts[-1]:  # no choice, or too few images
            return min(len(images), most, tuning.default_parallel)

        def trial(count: int) -> float:
            learner = Learner(self._networks[0], count, self.method, replace(self.settings, steps=1), shape)
            arguments = images[:count, None], torch.arange(count, device=images.device)[:, None]
            run(learner, *arguments)  # warm-up
            begin = time.perf_counter()
            run(learner, *arguments).logits.cpu()
            return time.perf_counter() - begin

        return choose_fastest((*self.identify().values(), shape, images.device), counts, trial)


@document_settings(steps=1)
class Online(Adapter):
    """Images are a stream: each is predicted after an update on it, in order, and the state persists.

    A stream that is saved and loaded elsewhere continues bit for bit. Running statistics of Batch Normalization would
    degrade it, as the paper found; see `statistics`.

    Args:
        net: The network; it is copied.
        method: A name from `METHODS`, or a custom `Method`.
        **settings: See below; they override the method's.
    """

    def __init__(self, net: YNet, *, method: str | Method = "ttt", **settings: Any) -> None:
        super().__init__(net, method, "online", settings)

    def reset(self) -> None:
        with self._lock, torch.inference_mode(False):
            learned = getattr(self, "_learned", None)
            super().reset()
            # Kept for the sake of its recordings, which take long to make again.
            self._spare = learned if isinstance(learned, Learner) and learned.recordings else None

    def network(self) -> YNet:
        """Return an independent copy of the network that learns; some methods answer with a teacher or prototypes."""
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
        spare, self._spare = self._spare, None
        if spare is None or spare.shape != shape:
            return Learner(self._networks[0], 1, self.method, self.settings, shape)
        spare.reset()
        return spare
