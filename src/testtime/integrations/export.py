"""An adapted network as an ONNX file, for runtimes without torch."""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from testtime.adaptation.adapters import Online
from testtime.networks.ynet import YNet
from testtime.randomness import Draws
from testtime.storage import atomic_file

TOLERANCE = 1e-3
"""Largest difference of the logits of ONNX Runtime from those of torch, relative to the largest logit."""


class _Classifier(nn.Module):
    """The network without its self-supervised branch."""

    def __init__(self, net: YNet) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).cpu()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)


def export(net: YNet | Online, path: str | Path, *, shape: Sequence[int] | None = None) -> float:
    """Write the classifier of a network, or of a stream as it is now, to an ONNX file, and compare it with torch.

    The file takes `images`, float32 `(N, C, H, W)` in [0, 1], for any N, and returns `logits`, `(N, K)`; the
    normalisation is part of it. It does not adapt further. ONNX Runtime computes the comparison.

    Args:
        net: A network, or an `Online` adapter, whose `network()` is exported.
        path: The file. It is written only if the comparison succeeds.
        shape: `(C, H, W)` of the images; by default that of the network's card.

    Returns:
        The largest absolute difference of the logits on random images.

    Raises:
        ValueError: `shape` is needed, or the exported network computes something else.
        OSError: The file cannot be written.
    """
    net = net.network() if isinstance(net, Online) else net
    model = _Classifier(net).eval()
    example = _make_images(2, _find_shape(net, shape))
    with atomic_file(path) as temporary, torch.inference_mode(False), torch.no_grad():
        torch.onnx.export(
            model,
            (example,),
            str(temporary),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes={"images": {0: torch.export.Dim("N", min=1)}},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        return _compare(model, temporary, tuple(example.shape[1:]))


def _find_shape(net: YNet, shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is not None:
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"`shape` must be (C, H, W), got {tuple(shape)}.")
        return tuple(shape)
    size: Any = net.card.size
    if net.channels is None or size is None:
        raise ValueError("`shape` must be given: the network's card does not say the size of its images.")
    return (net.channels, size, size) if isinstance(size, int) else (net.channels, *size)


def _make_images(count: int, shape: tuple[int, ...]) -> torch.Tensor:
    return Draws.of(0, torch.arange(count, device="cpu")).uniform(*shape)


def _compare(model: nn.Module, path: Path, shape: tuple[int, ...]) -> float:
    """Return the largest difference on a batch of another size than the exported one."""
    import onnxruntime

    images = _make_images(5, shape)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(["logits"], {"images": images.numpy()})
    expected = model(images).numpy()
    difference = float(np.abs(np.asarray(found) - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise ValueError(f"The exported network computes other logits than torch: they differ by up to {difference:g}.")
    return difference
