"""The end of an episode on CUDA: the same bits as the plain body gives."""

from __future__ import annotations

import pytest
import torch

from testtime.adaptation import guard
from triton_device import DEVICE, MARKS, normals

pytestmark = MARKS


@pytest.mark.parametrize(("images", "classes"), [(1, 10), (3, 10), (5, 700)])
def test_an_episode_is_settled_as_torch_does(images: int, classes: int) -> None:
    """Of nine replicas: some want nothing, some have got worse, some are no numbers."""
    from testtime.kernels.cuda.settle import settle

    before, after = (normals(9, images, classes, seed=seed) for seed in (0, 1))
    loss_before, loss_after = (normals(9, images, seed=seed).abs() for seed in (2, 3))
    wanted = normals(9, images, seed=4) > -0.5
    wanted[0], loss_after[1], loss_after[2], before[3] = False, float("nan"), float("inf"), float("nan")
    loss_after[4], after[5], wanted[7], loss_after[7] = loss_before[4] + 3.5, float("nan"), True, 0
    finite = torch.tensor([True] * 6 + [False] + [True] * 2, device=DEVICE)
    before = before.mT.contiguous().mT  # of another order in memory
    for bound in (0.3, 3.0, float("inf")):
        given = wanted, before, loss_before, after, loss_after, finite, bound
        expected = guard._settle(*given)
        assert expected[-1].any()
        assert not expected[-1].all()
        for found, reference in zip(settle(*given), expected, strict=True):
            assert found.dtype == reference.dtype
            assert torch.equal(found.nan_to_num(7.0), reference.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (70, 91)])
def test_only_chosen_rows_are_put_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from testtime.kernels.cuda.settle import put_rows

    now, old = ((normals(4, *shape, seed=seed) * 100).to(dtype) for seed in (0, 1))
    now[2], old[0] = -1, 8
    rows = torch.tensor([True, False, False, True], device=DEVICE)
    expected = torch.stack([old[0], now[1], now[2], old[3]])
    assert put_rows(now, old, rows)
    assert torch.equal(now, expected)
