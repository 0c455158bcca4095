"""Class logits in the outputs of other people's models, and images to try such a model on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SIZES = (64, 224, 32, 28, 16, 96, 128, 160, 192, 256, 299, 384, 448, 8)
"""Sides of the images that a model is tried on if its own size is unknown."""


class Logits(nn.Module):
    """A model whose output is reduced to the logits.

    Args:
        model: Returns logits `(N, K)`, alone or in a tuple, a dictionary or an object with `logits`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return pick_logits(self.model(images))


def pick_logits(output: Any) -> Tensor:
    """Return the logits in a model's output.

    These are the output itself, its `logits`, the first tensor `(N, K)` of a tuple or list, or the only one of a
    dictionary.

    Raises:
        ValueError: There are none.
    """
    if isinstance(output, Tensor):
        return output
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    tables = [value for value in values if isinstance(value, Tensor) and value.dim() == 2]
    if not tables or (isinstance(output, Mapping) and len(tables) > 1):
        raise ValueError(f"`model` must return class logits (N, K), got {_describe(output)}.")
    return tables[0]


class Refused(ValueError):
    """A model does not accept images of a size."""


def run(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits `(N, K)` of images `(N, C, H, W)`, checked.

    Raises:
        ValueError: The model's output is something else.
        Refused: The model does not accept the images.
    """
    try:
        output = model(images)
    except Exception as error:  # of code that is not ours
        raise Refused(f"The model does not accept images {tuple(images.shape[1:])}: {shorten(error)}") from None
    logits = pick_logits(output)
    if logits.dim() != 2 or len(logits) != len(images) or not logits.is_floating_point():
        raise ValueError(f"`model` must return class logits (N, K), got {_describe(output)}.")
    return logits


@torch.no_grad()
def find_images(model: nn.Module, size: int | None) -> Tensor:
    """Return three random images `(3, C, size, size)` that a model accepts.

    Args:
        model: In evaluation mode.
        size: Side of its images; None: the first of `SIZES` that it accepts.

    Raises:
        ValueError: It accepts none, or its output is not logits.
    """
    refused = None
    first = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    for side in SIZES if size is None else (size, *SIZES):
        for channels in dict.fromkeys((first, 3)):  # a model may rearrange the pixels before its first convolution
            images = make_images(model, 3, channels, side)
            try:
                run(model, images)
            except Refused as error:
                refused = refused or error
                continue
            if size not in (None, side):
                raise ValueError(f"{refused}. It accepts {side}×{side}: size={side}.")
            return images
    raise ValueError(f"{refused}. Give the side of its images: size=….")


def make_images(model: nn.Module, count: int, channels: int, side: int, seed: int = 0) -> Tensor:
    """Return random images `(count, channels, side, side)` of a model's device and dtype."""
    like = next((tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()), None)
    generator = torch.Generator("cpu").manual_seed(seed)
    images = torch.randn(count, channels, side, side, generator=generator, dtype=torch.float32, device="cpu")
    return images if like is None else images.to(like.device, like.dtype)


def shorten(error: BaseException) -> str:
    """Return the message of an error in one line of limited length, or its type."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"{output.dtype} of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a dictionary with {', '.join(map(repr, output)) or 'nothing'}"
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {', '.join(_describe(value) for value in output[:4]) or 'nothing'}"
    return type(output).__name__
