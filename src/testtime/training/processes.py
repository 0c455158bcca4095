"""Several processes as one: what `torchrun` starts, seen from inside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import distributed


@contextlib.contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """Join the processes that `torchrun` started, if it did; without it there is one process and nothing happens.

    Args:
        device: "cpu", "cuda" and the like; on CUDA each process gets the GPU of its own number.

    Yields:
        The device for this process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield torch.device(device)
        return
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
        distributed.init_process_group("nccl", device_id=place)
    else:
        distributed.init_process_group("gloo")
    try:
        yield place
    finally:
        distributed.destroy_process_group()


def is_first() -> bool:
    """Whether this is the process that writes files and speaks; without `torchrun` it always is."""
    return rank() == 0


def rank() -> int:
    """This process's number, from 0."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def world() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
