"""Stacked layers against the layers themselves, one replica after another."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from testtime.kernels.cpu import build
from testtime.networks import resnet26
from testtime.networks.resnet import BatchNormReLU
from testtime.networks.stacked import is_accelerated, stack_layers
from testtime.networks.stacking import Stacking
from testtime.randomness import Draws


def normals(*shape: int, seed: int = 0) -> Tensor:
    return Draws.of(seed, torch.arange(shape[0])).normal(*shape[1:])


def test_the_layer_is_batch_norm_and_relu_under_their_old_names() -> None:
    """Checkpoints have the names of a Sequential of both."""
    layer, old = BatchNormReLU(4), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    old[0].weight.data = normals(4) + 1
    layer.load_state_dict(old.state_dict())
    assert list(layer.state_dict()) == list(old.state_dict())
    x = normals(6, 4, 5, 5)
    assert torch.equal(layer(x), old(x))
    assert torch.equal(layer.eval()(x), old.eval()(x))
    names = resnet26(norm="batch", depth=8).state_dict()
    assert {"encoder.1.0.norm1.0.weight", "encoder.1.0.norm2.0.running_var", "classifier.1.0.bias"} <= names.keys()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_stacked_batch_norm_is_the_layer(count: int, training: bool) -> None:
    layer = BatchNormReLU(4)
    stacked = stack_layers(copy.deepcopy(layer), Stacking(count))
    x, upstream = (normals(count * 5, 4, 6, 6, seed=seed) for seed in (0, 1))
    x = (x * 2 + 1).requires_grad_(True)
    tensors = dict(stacked.named_parameters()) | dict(stacked.named_buffers())
    assert tensors.keys() == layer.state_dict().keys()
    for row in range(count):
        tensors["0.weight"].data[row] = normals(4, seed=row) + 1
        tensors["0.running_mean"][row] = normals(4, seed=row + 9)
    alone = []
    for row in range(count):
        one = copy.deepcopy(layer)
        one.load_state_dict({name: tensor[row] for name, tensor in tensors.items()})
        alone.append(one.train(training))
    stacked.train(training)
    y = stacked(x)
    expected = torch.cat([one(piece) for one, piece in zip(alone, x.chunk(count), strict=True)])
    torch.testing.assert_close(y, expected)
    gradients = (torch.autograd.grad(found, x, upstream)[0] for found in (y, expected))
    torch.testing.assert_close(*gradients)
    for name, tensor in stacked.named_buffers():
        torch.testing.assert_close(tensor, torch.stack([one.get_buffer(name) for one in alone]))


def convolutions(channels: int, groups: int = 1) -> nn.Module:
    """Layers of torch alone; most multiplications are in the second."""
    second = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
    return nn.Sequential(nn.Conv2d(3, channels, 1), second, nn.Flatten())


@pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")
def test_kernels_pay_for_one_replica_where_they_do_most_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.zeros(2, 3, 16, 16)
    own = resnet26(depth=8).encoder
    assert is_accelerated(own, None)
    assert is_accelerated(convolutions(64), images)
    assert not is_accelerated(convolutions(64), None)  # nobody knows the sizes
    assert not is_accelerated(convolutions(64, groups=64), images)
    assert not is_accelerated(convolutions(24), images)
    small_part = nn.Sequential(convolutions(16), nn.Linear(16 * 256, 1024))
    assert not is_accelerated(small_part, images)
    assert not is_accelerated(nn.Identity(), images)
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    assert is_accelerated(own, None)  # the plain form of the same layers, as a reference
    assert not is_accelerated(convolutions(64), images)
