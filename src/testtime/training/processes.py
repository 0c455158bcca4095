"""Distributed training: the processes started by `torchrun`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, distributed


@contextlib.contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """Initialise the process group if started by `torchrun`; a no-op for a single process.

    Args:
        device: "cpu", "cuda" and so on; on CUDA each process uses the GPU of its local rank.

    Yields:
        The device for this process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield torch.device(device)
        return
    own = torch.device(device)
    if own.type == "cuda":
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own)
        distributed.init_process_group("nccl", device_id=own)
    else:
        distributed.init_process_group("gloo")
    try:
        yield own
    finally:
        distributed.destroy_process_group()


def is_first() -> bool:
    """Whether this process writes files and reports progress."""
    return rank() == 0


def rank() -> int:
    """Return the rank of this process."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def world() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with those of the first process."""
    if world() == 1:
        return
    for tensor in tensors:
        whole = tensor.contiguous()  # replicas store filters in another memory format
        distributed.broadcast(whole, 0)
        tensor.copy_(whole)


def average(tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with their mean over the processes."""
    if world() == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors]) / world()
    distributed.all_reduce(flat)
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))
