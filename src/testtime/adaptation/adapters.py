"""Adapters: classifiers that learn from each unlabelled image before they predict it.

They wrap the method (adapt.py), alike in use and told apart by what they remember:

    Fixed     nothing is learned: the network as it is
    Episodic  every image is its own episode and is forgotten afterwards (the paper's standard version)
    Online    images are a stream: one update each, in the order given, and the state lives on

`Streams` (streams.py) are many online ones, stepped together.

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
from testtime import tasks
from testtime.adapt import gate, look, run, run_each
from testtime.calibrate import fastest, fit, most_together
from testtime.capture import Precision, arithmetic, check_precision
from testtime.learner import (
    Learner,
    Preset,
    Settings,
    find_preset,
    is_rowwise,
    load_learner,
    read_counts,
    save_learner,
)
from testtime.networks.replicas import Replicas
from testtime.networks.ynet import YNet
from testtime.prediction import Prediction
from testtime.randomness import Draws
from testtime.storage import FileError
from testtime.tasks import Task
from testtime.tensorfile import pack_text, read_tensors, unpack_text, write_tensors

log = logging.getLogger(__name__)

_KEY = "testtime-adapter"
_FORMAT = 1


class Turn:
    """A lock that is not shared with copies: each has its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, ()


class Adapter(nn.Module):
    """What the adapters share: a network, settings, a running sample number, and checks of what comes in.

    An adapter is called like any classifier: `adapter(images)` gives logits, and `predict` tells more. As a module it
    holds no parameters, so `train()`, `eval()` and the like do nothing. It works on a copy of the network: the one it
    was given stays as it is, bit for bit. Threads may share it: their calls wait for each other.
    """

    def __init__(self, net: YNet, settings: Settings) -> None:
        super().__init__()
        if not isinstance(net, YNet):
            raise TypeError(f"`net` must be a YNet, got {type(net).__name__}; testtime.split(model, at=…) makes one.")
        half = {tensor.dtype for tensor in net.parameters()} & {torch.float16, torch.bfloat16}
        if half:
            raise ValueError(
                f"`net` must have float32 parameters, got {half.pop()}: small steps are lost in it. "
                'To compute in bfloat16, give net.float() and precision="bf16".'
            )
        self._turn = Turn()
        task = settings.task or tasks.make(net.card.task)
        augment = settings.augment or augmentations.make(net.card.augment)
        self.settings = replace(settings, task=task, augment=augment)
        with torch.inference_mode(False):
            # In a list, which hides it from nn.Module: it is not the adapter's to train or to move.
            self._networks = [copy.deepcopy(net).eval().requires_grad_(False)]
        self._base: Replicas | None = None
        self._most_by_shape: dict[tuple[int, ...], int] = {}
        self.reset()

    def reset(self) -> None:
        """Forget everything: the sample number, the counts, and whatever was learned."""
        with self._turn, torch.inference_mode(False):
            self.seen = 0
            # On the network's device, so that counting does not make the host wait for it.
            self._counts = torch.zeros(2, dtype=torch.int64, device=self._device)

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
        with self._turn:
            samples = self._check(images, samples)
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                arithmetic(self.settings.precision, self._device),
                self._all_or_nothing(),
            ):
                # Copies: tensors made in inference mode cannot take part in learning.
                copies = (tensor.detach().to(self._device, copy=True) for tensor in (images, samples))
                answers = self._predict(*copies)
                self._counts = self._counts + torch.stack([answers.adapted.sum(), answers.rolled_back.sum()])
                self.seen += len(images)
        return answers

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
        return lambda: None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Everything the adapter has learned and counted, as tensors by name."""
        with self._turn:
            return {
                "adapter": pack_text(type(self).__name__),
                "settings": pack_text(json.dumps(self.settings.describe(), sort_keys=True)),
                "network": pack_text(self._networks[0].fingerprint()),
                "counts": _integers([self.seen, self.adapted, self.rolled_back]),
                **self._learned(),
            }

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Continue from a state that `state_dict` gave, bit for bit.

        Raises:
            ValueError: The state belongs to another network, adapter or settings; nothing was changed.
        """
        own = self.state_dict()
        counts = read_counts(state_dict, "counts", 3)
        for key in ("adapter", "network", "settings"):
            if key not in state_dict:
                raise ValueError(f"not an adapter's state: {key!r} is missing.")
            there, here = unpack_text(state_dict[key]), unpack_text(own[key])
            if there != here:
                raise ValueError(f"the state was saved with another {key}: {there}, here {here}.")
        if counts[1] + counts[2] > counts[0]:
            raise ValueError(
                f"not an adapter's state: of {counts[0]} images {counts[1] + counts[2]} were learned from."
            )
        for name, tensor in state_dict.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(f"tensor {name!r} has values that are not finite.")
        with self._turn, torch.inference_mode(False), self._all_or_nothing():
            self._load(state_dict)
            self.seen = counts[0]
            self._counts = _integers(counts[1:]).to(self._device)

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file, whole or not at all."""
        write_tensors(path, self.state_dict(), _KEY, {"format": _FORMAT})

    def load(self, path: str | Path) -> None:
        """Continue from a file that `save` wrote.

        Raises:
            FileError: The file cannot be read or belongs elsewhere; nothing was changed.
        """
        about, state = read_tensors(path, _KEY)
        if about is not None and about.get("format") != _FORMAT:
            raise FileError(path, f"a state of format {about.get('format')!r}, not {_FORMAT}", "update testtime")
        try:
            self.load_state_dict(state)
        except ValueError as error:
            raise FileError(path, str(error).rstrip(".")) from None

    @property
    def _device(self) -> torch.device:
        return next(self._networks[0].parameters()).device

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        raise TypeError("Adapter is a base class; use Fixed, Episodic or Online.")

    def _learned(self) -> dict[str, Tensor]:
        """What was learned, for `state_dict`."""
        return {}

    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `_learned` gave."""

    def _network(self, learned: Mapping[str, Tensor]) -> YNet:
        """A copy of the network, with other tensors where there are learned ones of a replica."""
        net = copy.deepcopy(self._networks[0])
        net.load_state_dict({**net.state_dict(), **learned})
        return net.requires_grad_(True)

    def _most(self, shape: tuple[int, ...]) -> int:
        """How many episodes or streams to compute side by side, if the memory is large enough."""
        if shape not in self._most_by_shape:
            self._most_by_shape[shape] = most_together(self._networks[0], self.settings, shape)
        return self._most_by_shape[shape]

    def _unadapted(self, images: Tensor) -> Prediction:
        """The answers of the network as it was given."""
        if len(images) == 0:
            return self._unadapted(images.new_zeros(1, *images.shape[1:]))[:0]
        if self._base is None:
            example = Draws.of(0, torch.arange(2, device=images.device)).uniform(*images.shape[1:])
            dtype = check_precision(self.settings.precision)
            self._base = Replicas(self._networks[0], 1, (), example, dtype)
        most = 2048 if images.is_cuda else 256  # at a time, and fewer of large images: their features fill the memory
        most = max(1, min(most, most * 1024 // (images.shape[-2] * images.shape[-1])))
        base = self._base
        parts = fit(most, lambda count: [look(base, chunk[None], self.settings) for chunk in images.split(count)])
        logits, loss, confidence = (torch.cat(tensors, dim=1)[0] for tensors in zip(*parts, strict=True))
        no = torch.zeros_like(loss, dtype=torch.bool)
        return Prediction(logits, logits.clone(), loss, loss.clone(), confidence, no, no.clone())

    def _check(self, images: Tensor, samples: Tensor | None) -> Tensor:
        if not isinstance(images, Tensor):
            raise TypeError(f"`images` must be a tensor, got {type(images).__name__}.")
        if images.dim() != 4 or 0 in images.shape[1:]:
            hint = "; for one image add an axis: images[None]" if images.dim() == 3 else ""
            raise ValueError(f"`images` must be (N, C, H, W), got {tuple(images.shape)}{hint}.")
        card, channels = self._networks[0].card, self._networks[0].channels
        if channels is not None and images.shape[1] != channels:
            raise ValueError(f"`images` must have {channels} channels, got {images.shape[1]}.")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise ValueError(f"`images` must be uint8, or floats in [0, 1], got {images.dtype}.")
        normalises = any(card.mean) or any(value != 1 for value in card.std)
        if images.is_floating_point() and normalises and images.numel():
            # What is not a finite number is for the guard, image by image: it must not reject the others.
            low, high = (float(value) for value in images.detach().nan_to_num(0.5, 0.5, 0.5).aminmax())
            if low < 0 or high > 1:
                raise ValueError(
                    f"Float `images` must lie in [0, 1], got {low:.3g} to {high:.3g}: "
                    "give plain pixels, the network normalises them itself."
                )
        if samples is None:
            return torch.arange(self.seen, self.seen + len(images), device=self._device)
        if not isinstance(samples, Tensor):
            raise TypeError(f"`samples` must be a tensor of integers, got {type(samples).__name__}.")
        if samples.dtype not in (torch.int64, torch.int32) or samples.shape != images.shape[:1]:
            raise ValueError(f"`samples` must be {len(images)} integers, got {samples.dtype} {tuple(samples.shape)}.")
        return samples


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
        super().__init__(net, Settings(steps=0, task=task, precision=precision, mirrored=mirrored))

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        return self._unadapted(images)


class Episodic(Adapter):
    """Every image is its own episode: learn from it, predict it, forget it (the paper's standard version).

    An image's answer depends on the network, the settings, the image and its sample number, and on nothing else: not on
    the other images of the batch, their order, or, but for rounding, how many episodes run side by side.

    Args:
        net: The network; it is copied.
        steps: Gradient steps on each image.
        parallel: How many episodes run side by side; "auto" tries out a few counts once there are images enough. Where
            the memory of a GPU is too small for them, it becomes what fits.
        **settings: Further fields of `Settings`.
    """

    def __init__(
        self, net: YNet, *, steps: int = 10, parallel: int | Literal["auto"] = "auto", **settings: Any
    ) -> None:
        if parallel != "auto" and (isinstance(parallel, str) or parallel < 1):
            raise ValueError(f'`parallel` must be "auto" or at least 1, got {parallel!r}.')
        self.parallel: int | Literal["auto"] = parallel
        self._learners: dict[int, Learner] = {}
        super().__init__(net, Settings(steps=steps, **settings))
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
            learned = run(learner, images[chunk], samples[chunk], learner.everyone)
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
            most = self._side_by_side(images[wanted])
            fit(most, attempt)
        return answers

    def _learner(self, count: int, shape: tuple[int, ...]) -> Learner:
        if count not in self._learners:
            while len(self._learners) > 1:  # the full size and one remainder are enough to keep
                self._learners.pop(min(self._learners))
            self._learners[count] = Learner(self._networks[0], count, self.settings, shape)
        return self._learners[count]

    def _side_by_side(self, images: Tensor) -> int:
        """How many episodes to run at once for these images."""
        if self.parallel != "auto":
            return self.parallel
        most = self._most(tuple(images.shape[1:]))
        if images.is_cuda:
            counts = [count for count in (16, 64, 256) if count <= most]
            if len(counts) < 2 or len(images) < 2 * counts[-1]:  # nothing to choose, or too few images
                return min(len(images), most, 64)
        else:
            counts = [count for count in (1, 4, 16, 64) if count <= min(most, len(images) // 2)]
            if len(counts) < 2:
                return 1

        def trial(count: int) -> float:
            learner = Learner(self._networks[0], count, replace(self.settings, steps=1), tuple(images.shape[1:]))
            arguments = images[:count, None], torch.arange(count, device=images.device)[:, None]
            run(learner, *arguments, learner.everyone)  # warms up
            begin = time.perf_counter()
            run(learner, *arguments, learner.everyone).logits.cpu()
            return time.perf_counter() - begin

        described = json.dumps(self.settings.describe(), sort_keys=True)
        return fastest((self._networks[0].fingerprint(), images.shape[1:], images.device, described), counts, trial)


class Online(Adapter):
    """Images are a stream: one update each in the order given, each predicted after its update; the state lives on.

    A stream saved half-way and loaded elsewhere continues bit for bit. With Batch Normalization the statistics of
    single images add up and ruin the stream, as the paper found: use Group Normalization.

    Args:
        net: The network; it is copied.
        preset: "paper", one gradient step on each image and the defaults of `Settings`, or "best", this package's own
            choice; `learner.PRESETS` has both.
        **settings: Fields of `Settings`; they go before the preset's.
    """

    def __init__(self, net: YNet, *, preset: Preset = "paper", **settings: Any) -> None:
        super().__init__(net, Settings(**{**find_preset(preset), **settings}))

    def reset(self) -> None:
        with self._turn:
            super().reset()
            self._learner: Learner | None = None

    def network(self) -> YNet:
        """A network with what has been learned so far, to save or to use as it is. The stream goes on without it."""
        with self._turn, torch.inference_mode(False):
            return self._network(self._learner.replicas.read(0) if self._learner else {})

    def _remember(self) -> Callable[[], None]:
        learner = self._learner
        good = None if learner is None else learner.snapshot()

        def undo() -> None:
            self._learner = learner
            if learner is not None and good is not None:
                learner.restore(good, learner.everyone)

        return undo

    def _predict(self, images: Tensor, samples: Tensor) -> Prediction:
        if self.settings.steps == 0 or len(images) == 0:
            return self._unadapted(images)
        if self._learner is None:
            self._learner = Learner(self._networks[0], 1, self.settings, tuple(images.shape[1:]))
        if self.settings.share == "image":
            return run_each(self._learner, images, samples)
        return run(self._learner, images[None], samples[None], self._learner.everyone)[0]

    def _learned(self) -> dict[str, Tensor]:
        return save_learner(self._learner)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        self._learner = load_learner(
            state, self._networks[0], lambda shape: Learner(self._networks[0], 1, self.settings, shape)
        )


def _integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
