"""The end of an episode in Triton: decide which updates to accept, and restore the other replicas."""

# pyright: reportIndexIssue=false
# (kernels are launched as kernel[grid](...), which cannot be typed without triton installed)

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch, and only there
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


def settle(
    wanted: Tensor,
    logits_before: Tensor,
    loss_before: Tensor,
    logits: Tensor,
    loss_after: Tensor,
    finite: Tensor,
    guard: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `prediction.settle`: logits, loss, and which images are adapted, rolled back, which replicas undone."""
    replicas, images, classes = logits.shape
    given = wanted, logits_before, loss_before, logits, loss_after, finite
    wanted, logits_before, loss_before, logits, loss_after, finite = (tensor.contiguous() for tensor in given)
    answers, loss = torch.empty_like(logits_before), torch.empty_like(loss_before)
    adapted, rolled_back, undone = torch.empty_like(wanted), torch.empty_like(wanted), torch.empty_like(finite)
    _settle[(replicas,)](
        _bytes(wanted), logits_before, loss_before, logits, loss_after, _bytes(finite),
        answers, loss, _bytes(adapted), _bytes(rolled_back), _bytes(undone), images, classes, float(guard),
        IMAGES=triton.next_power_of_2(images), BLOCK=min(1024, triton.next_power_of_2(images * classes)), num_warps=4,
    )  # fmt: skip
    return answers, loss, adapted, rolled_back, undone


def put_rows(numbers: Tensor, old: Tensor, rows: Tensor) -> bool:
    """Restore the rows of `numbers` `(S, ...)` from `old` where `rows`, bool `(S,)`, is true; others are unchanged."""
    assert numbers.is_contiguous()
    width = numbers[0].numel()
    if width == 0:  # e.g. an empty memory
        return True
    block = min(4096, triton.next_power_of_2(width))
    grid = triton.cdiv(width, block), len(numbers)
    _put_back[grid](numbers, old.contiguous(), _bytes(rows.contiguous()), width, BLOCK=block, num_warps=4)
    return True


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)


@triton.jit
def _settle(
    wanted_ptr, logits_before_ptr, loss_before_ptr, logits_ptr, loss_after_ptr, finite_ptr,
    answers_ptr, loss_ptr, adapted_ptr, rolled_back_ptr, undone_ptr, images, classes, guard,
    IMAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One replica."""
    replica = tl.program_id(0)
    image = tl.arange(0, IMAGES)
    inside = image < images
    at = replica * images + image
    wanted = tl.load(wanted_ptr + at, mask=inside, other=0).to(tl.int32)  # flags are 0 or 1
    before = tl.load(loss_before_ptr + at, mask=inside, other=0.0)
    after = tl.load(loss_after_ptr + at, mask=inside, other=0.0)
    count = tl.sum(wanted, axis=0)
    risen = tl.sum(tl.where(wanted == 1, after - before, 0.0), axis=0) / tl.maximum(count, 1)
    finite = tl.load(finite_ptr + replica).to(tl.int32)
    sound = tl.where(risen <= guard, finite, 0)  # false for NaN
    kept = wanted * sound
    tl.store(loss_ptr + at, tl.where(kept == 1, after, before), mask=inside)
    tl.store(adapted_ptr + at, kept.to(tl.uint8), mask=inside)
    tl.store(rolled_back_ptr + at, (wanted - kept).to(tl.uint8), mask=inside)
    tl.store(undone_ptr + replica, (1 - tl.minimum(count, 1) * sound).to(tl.uint8))
    for first in range(0, images * classes, BLOCK):
        place = first + tl.arange(0, BLOCK)
        known = place < images * classes
        taken = tl.load(wanted_ptr + replica * images + place // classes, mask=known, other=0).to(tl.int32) * sound
        place += replica * images * classes
        new = tl.load(logits_ptr + place, mask=known, other=0.0)
        old = tl.load(logits_before_ptr + place, mask=known, other=0.0)
        tl.store(answers_ptr + place, tl.where(taken == 1, new, old), mask=known)


@triton.jit
def _put_back(numbers_ptr, old_ptr, rows_ptr, width, BLOCK: tl.constexpr):
    """A block of one replica's elements."""
    replica = tl.program_id(1)
    if tl.load(rows_ptr + replica) != 0:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at = replica.to(tl.int64) * width + place
        tl.store(numbers_ptr + at, tl.load(old_ptr + at, mask=place < width), mask=place < width)
