"""Batch Normalization: replicas with statistics of their own, the ReLU taken in, the kernels against torch.

The kernels run on a GPU or, with TRITON_INTERPRET=1 where Triton is installed, in its interpreter on a CPU.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.networks import resnet26
from testtime.networks.replicas import Replicas
from testtime.networks.resnet import BatchNormReLU
from testtime.networks.tall import Stacking, heighten
from testtime.randomness import Draws

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
on_kernels = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def normals(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return Draws.of(seed, torch.arange(shape[0], device=device)).normal(*shape[1:])


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
def test_replicas_of_the_layer_are_the_layer(count: int, training: bool) -> None:
    layer = BatchNormReLU(4)
    stacked = heighten(copy.deepcopy(layer), Stacking(count))
    x, upstream = (normals(count * 5, 4, 6, 6, seed=seed) for seed in (0, 1))
    x = (x * 2 + 1).requires_grad_(True)
    tall = dict(stacked.named_parameters()) | dict(stacked.named_buffers())
    assert tall.keys() == layer.state_dict().keys()
    for row in range(count):
        tall["0.weight"].data[row] = normals(4, seed=row) + 1
        tall["0.running_mean"][row] = normals(4, seed=row + 9)
    alone = []
    for row in range(count):
        one = copy.deepcopy(layer)
        one.load_state_dict({name: tensor[row] for name, tensor in tall.items()})
        alone.append(one.train(training))
    stacked.train(training)
    y = stacked(x)
    expected = torch.cat([one(piece) for one, piece in zip(alone, x.chunk(count), strict=True)])
    torch.testing.assert_close(y, expected)
    gradients = (torch.autograd.grad(found, x, upstream)[0] for found in (y, expected))
    torch.testing.assert_close(*gradients)
    for name, tensor in stacked.named_buffers():
        torch.testing.assert_close(tensor, torch.stack([one.get_buffer(name) for one in alone]))


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


class TestKernels:
    pytestmark = on_kernels

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("replicas", "images", "channels", "size", "relu", "training"),
        [
            (1, 5, 64, 4, False, True),
            (2, 3, 16, 7, True, True),
            (3, 2, 32, 8, True, False),
            (2, 40, 16, 16, True, True),
            (1, 2, 4, 5, True, True),
            (2, 2, 1024, 2, False, False),
        ],
    )
    def test_batch_norm_is_torchs(
        self, replicas: int, images: int, channels: int, size: int, relu: bool, training: bool, dtype: torch.dtype
    ) -> None:
        from testtime import kernels

        def draw(*shape: int, seed: int) -> Tensor:
            return normals(*shape, seed=seed, device=DEVICE)

        x = (draw(replicas * images, channels, size, size, seed=0) * 2 + 30).to(dtype)  # far from zero
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_(True)
        # As in a network's flat memory, where the rows of a parameter do not follow each other.
        flat = torch.cat([draw(replicas, channels, seed=1) + 1, draw(replicas, channels, seed=2)], 1)
        weight, bias = (piece.detach().requires_grad_(True) for piece in flat.split(channels, 1))
        mean, variance = draw(replicas, channels, seed=3) + 29, draw(replicas, channels, seed=4).square() + 0.5
        tracked = mean.double(), variance.double()
        y = kernels.batch_norm(x, mean, variance, weight, bias, training, 0.1, 1e-5, relu)
        pieces = zip(x.double().chunk(replicas), *tracked, weight.double(), bias.double(), strict=True)
        expected = torch.cat([F.batch_norm(*piece, training, 0.1, 1e-5) for piece in pieces])
        expected = F.relu(expected) if relu else expected
        assert y.dtype == dtype
        bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
        assert relative(y, expected) < bound
        assert relative(mean, tracked[0]) < 1e-6
        assert relative(variance, tracked[1]) < 1e-5
        upstream = draw(*y.shape, seed=5).to(dtype)
        found = torch.autograd.grad(y, (x, weight, bias), upstream)
        references = torch.autograd.grad(expected, (x, weight, bias), upstream.double())
        for gradient, reference in zip(found, references, strict=True):
            assert relative(gradient, reference) < 2 * bound

    def test_only_the_gradient_that_is_asked_for_is_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from testtime import kernels

        x = normals(4, 16, 8, 8, device=DEVICE).contiguous(memory_format=torch.channels_last)
        weight, mean, variance = (torch.ones(2, 16, device=DEVICE) for _ in range(3))
        bias = torch.zeros(2, 16, device=DEVICE)
        weight.requires_grad_(True)
        y = kernels.batch_norm(x, mean.clone(), variance.clone(), weight, bias, True, 0.1, 1e-5, False)
        (gradient,) = torch.autograd.grad(y.square().sum(), weight)  # twice the sum of squares of normalised pixels
        torch.testing.assert_close(gradient, torch.full((2, 16), 2.0 * 2 * 64, device=DEVICE), rtol=1e-4, atol=0)

        def never(*_: Any) -> Tensor:
            raise AssertionError("sums that nobody asked for")

        monkeypatch.setattr(kernels.batch, "gradient_sums", never)
        x.requires_grad_(True)
        y = kernels.batch_norm(x, mean, variance, weight.detach(), bias, False, 0.1, 1e-5, True)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(gradient, (x > 1).float() / (1 + 1e-5) ** 0.5)

    @pytest.mark.parametrize("uses", [1, 3])
    @pytest.mark.parametrize("replicas", [1, 2])
    def test_gathered_gradients_are_those_of_autograd(self, replicas: int, uses: int) -> None:
        from testtime import kernels

        numbers = normals(replicas, 40, device=DEVICE) + 1
        weight, bias = (numbers[:, start : start + 16].requires_grad_(True) for start in (4, 20))
        x = normals(replicas * 3, 16, 6, 6, seed=1, device=DEVICE).contiguous(memory_format=torch.channels_last)

        def loss() -> Tensor:
            y = x
            for _ in range(uses):
                statistics = torch.zeros(replicas, 16, device=DEVICE), torch.ones(replicas, 16, device=DEVICE)
                y = kernels.batch_norm(y, *statistics, weight, bias, True, 0.1, 1e-5, True)
            return y.square().sum()

        expected = torch.autograd.grad(loss(), (weight, bias))
        with kernels.Gathering(numbers) as gathering:
            value = loss()
            gathering.begin()
            given = torch.autograd.grad(value, (weight, bias), allow_unused=True)
            result = gathering.collect()
        assert given == (None, None)
        torch.testing.assert_close(result[:, 4:20], expected[0])
        torch.testing.assert_close(result[:, 20:36], expected[1])
        assert not result[:, :4].any()
        assert not result[:, 36:].any()

    def test_batch_norm_is_the_same_every_time(self) -> None:
        from testtime import kernels

        x = normals(12, 16, 32, 32, device=DEVICE).bfloat16().contiguous(memory_format=torch.channels_last)
        answers = []
        for _ in range(2):
            weight, bias = (torch.ones(3, 16, device=DEVICE, requires_grad=True) for _ in range(2))
            mean, variance = torch.zeros(3, 16, device=DEVICE), torch.ones(3, 16, device=DEVICE)
            y = kernels.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5, True)
            answers.append([y, mean, variance, *torch.autograd.grad(y.float().square().sum(), (weight, bias))])
        assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("training", [True, False])
    def test_a_network_of_replicas_is_the_network(self, training: bool) -> None:
        net: Any = resnet26(norm="batch", depth=8, seed=1).cuda()
        images = Draws.of(0, torch.arange(16, device="cuda")).uniform(3, 32, 32)
        replicas = Replicas(net, 2, example=images[:2])
        replicas.train_norms(training)
        net.train(training)
        with torch.no_grad():
            found = replicas(images.unflatten(0, (2, 8)))
            for row, piece in enumerate(images.chunk(2)):
                one = copy.deepcopy(net)
                torch.testing.assert_close(found[row], one(piece), rtol=1e-3, atol=1e-3)
                for name, buffer in one.named_buffers():
                    if name in replicas.tensors:
                        torch.testing.assert_close(replicas.tensors[name][row], buffer, rtol=1e-3, atol=1e-4)
