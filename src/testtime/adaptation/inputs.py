"""Checks of arguments: images, sample numbers and streams."""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.networks.ynet import YNet

_STAGED = 4 << 20  # bytes


def check_images(net: YNet, images: Tensor) -> None:
    """Check images for a network.

    Raises:
        TypeError: They are not a tensor.
        ValueError: Their shape, channels, dtype or range is invalid.
    """
    if not isinstance(images, Tensor):
        raise TypeError(f"`images` must be a tensor, got {type(images).__name__}.")
    if images.dim() != 4 or 0 in images.shape[1:]:
        hint = "; for one image add an axis: images[None]" if images.dim() == 3 else ""
        raise ValueError(f"`images` must be (N, C, H, W), got {tuple(images.shape)}{hint}.")
    if net.channels is not None and images.shape[1] != net.channels:
        raise ValueError(f"`images` must have {net.channels} channels, got {images.shape[1]}.")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"`images` must be uint8, or floats in [0, 1], got {images.dtype}.")
    if images.is_meta:
        raise ValueError("`images` must have values, got meta tensors.")
    net.check_range("images", images)


def check_size(images: Tensor, shape: tuple[int, ...]) -> None:
    """Check images of a stream that stores images of shape (C, H, W).

    Raises:
        ValueError: They have another shape.
    """
    if len(images) and images.shape[1:] != shape:
        stored = ", ".join(map(str, shape))
        raise ValueError(f"`images` must be (N, {stored}), as those that the stream stores, got {tuple(images.shape)}.")


def check_samples(samples: Tensor, count: int) -> None:
    """Check the sample numbers of `count` images.

    Raises:
        TypeError: They are not a tensor.
        ValueError: They are not `count` integers.
    """
    if not isinstance(samples, Tensor):
        raise TypeError(f"`samples` must be a tensor of integers, got {type(samples).__name__}.")
    if samples.dtype not in (torch.int64, torch.int32) or samples.shape != (count,):
        raise ValueError(f"`samples` must be {count} integers, got {samples.dtype} {tuple(samples.shape)}.")


def check_streams(streams: Tensor, images: int, count: int) -> None:
    """Check which of `count` streams the given number of images belong to.

    Raises:
        ValueError: They are not different integers from 0 to count - 1, one for each image.
    """
    if streams.shape != (images,) or streams.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`streams` must be {images} integers, got {streams.dtype} {tuple(streams.shape)}.")
    numbers = streams.tolist()
    if len(set(numbers)) < images or min(numbers, default=0) < 0 or max(numbers, default=0) >= count:
        raise ValueError(f"`streams` must be different numbers from 0 to {count - 1}, got {numbers}.")


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy on a device; a small one does not wait for what the device is computing."""
    tensor = tensor.detach()
    from_cpu = device.type == "cuda" and tensor.device.type == "cpu"
    if from_cpu and 0 < tensor.nbytes <= _STAGED and not tensor.is_pinned():
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        # By numpy, in this thread: waking torch's threads takes milliseconds.
        staged.flatten().view(torch.uint8).numpy()[:] = tensor.contiguous().flatten().view(torch.uint8).numpy()
        return staged.to(device, non_blocking=True)
    # A pinned tensor is the caller's, who may change it as soon as the call returns.
    return tensor.to(device, copy=True, memory_format=torch.contiguous_format)
