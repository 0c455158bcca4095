"""The unadapted network: its predictions, optionally corrected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from testtime import kernels
from testtime.adaptation.batching import run_fitting
from testtime.adaptation.methods import Method
from testtime.adaptation.prediction import Observation, Prediction
from testtime.adaptation.settings import Settings
from testtime.kernels.graphs import Later
from testtime.networks.replicas import Replicas
from testtime.networks.stacked import Linear
from testtime.networks.ynet import YNet
from testtime.precision import check_precision
from testtime.randomness import Draws


class Source:
    """A network that does not learn, observed by a method's objective.

    Args:
        net: The network.
        method: The method whose objective and correction to use.
        settings: The settings; task and augmentation must be set.
        shape: (C, H, W) of the images.
    """

    def __init__(self, net: YNet, method: Method, settings: Settings, shape: tuple[int, ...]) -> None:
        self._given = net, method, settings, shape
        device = next(net.parameters()).device
        example = Draws.of(0, torch.arange(2, device=device)).uniform(*shape)
        self._replicas = Replicas(net, 1, (), example, check_precision(settings.precision))
        self._replicas.batch_norms.use("batch" if settings.statistics == "batch" else "source")
        self._objective = method.objective(self._replicas, settings, _run_now)
        self._correction = method.correction
        small = kernels.tuning(device).observed  # fewer of large images, whose activations need more memory
        self._most = max(1, min(small, small * 1024 // (shape[-2] * shape[-1])))
        self._whole = settings.statistics == "batch"

    def predict(self, images: Tensor, alone: bool = False) -> Prediction:
        """Predict images `(N, C, H, W)`.

        Args:
            images: The images.
            alone: Whether each image is a batch of its own, for batch statistics and corrections.
        """
        if len(images) == 0:
            return self.predict(images.new_zeros(1, *images.shape[1:]))[:0]
        if alone and len(images) > 1 and (self._whole or self._correction is not None):
            return Prediction.join([self.predict(image[None]) for image in images])
        most = len(images) if self._whole else self._most
        if self._correction is None:
            return run_fitting(most, lambda count: self._observe(images.split(count)))
        prediction, features = run_fitting(most, lambda count: self._embed(images.split(count)))
        return replace(prediction, logits=self._correction(prediction.logits, features))

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, self._given  # a copy makes its own replicas, since CUDA streams cannot be copied

    def _observe(self, chunks: Sequence[Tensor]) -> Prediction:
        return _join([self._objective.observe(chunk[None]) for chunk in chunks])

    def _embed(self, chunks: Sequence[Tensor]) -> tuple[Prediction, Tensor]:
        """Observe, and return the inputs of the linear layer that runs last, `(N, D)`; those of tokens are averaged."""
        modules = [module for name in ("encoder", "classifier") for module in self._replicas.parts[name].modules()]
        layers = [module for module in modules if isinstance(module, (Linear, nn.Linear))]
        if not layers:
            raise ValueError("The network has no linear layer, whose inputs the correction needs.")
        inputs: dict[nn.Module, Tensor] = {}
        observed: list[Observation] = []
        found: list[Tensor] = []

        def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs.setdefault(layer, given[0])  # the first are those of the images, then come their mirror images

        with contextlib.ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(layer.register_forward_pre_hook(note))
            for chunk in chunks:
                inputs.clear()
                observed.append(self._objective.observe(chunk[None]))
                last = list(inputs.values())[-1]
                found.append(last.reshape(len(chunk), -1, last.shape[-1]).mean(1))
        return _join(observed), torch.cat(found)


def _join(observed: Sequence[Observation]) -> Prediction:
    return Prediction.unadapted(*(torch.cat(tensors, dim=1)[0] for tensors in zip(*observed, strict=True)))


def _run_now(function: Callable[..., Any], *arguments: Any) -> Later[Any]:
    return Later(function(*arguments))
