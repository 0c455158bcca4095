"""Forms of replicas: the test on an example that chooses them, and tensors of other types than floating point."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adapters import pictures
from testtime import wrap
from testtime.networks.replica_parts import PlainPart
from testtime.networks.replicas import Replicas


class Unlisted(nn.Module):
    """Calls its convolutions in a plain list, where they are not replaced by stacked ones."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), norm, nn.Linear(8, 10)
        self.layers = [self.conv]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.layers[0](images)).relu().mean((2, 3)))


class Tokens(Unlisted):
    """The same, before a LayerNorm."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(8))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.layers[0](images).flatten(2).mT).relu().mean(1))


class Gated(nn.Module):
    """A gain of zero that does not broadcast over images: with twice two, it broadcasts over the channels instead."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 10)
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images)
        return self.head((x + self.gain * x.tanh()).mean((2, 3)))


class Spectrum(nn.Module):
    """Multiplies the spectrum by a complex buffer."""

    filter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 10)
        self.register_buffer("filter", torch.randn(4, 16, 9, dtype=torch.complex64))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.fft.irfft2(torch.fft.rfft2(self.conv(images)) * self.filter).relu().mean((2, 3)))


class Permuted(nn.Module):
    """Reorders its channels by an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 10)
        self.order = nn.Parameter(torch.tensor([2, 0, 3, 1]), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(images)[:, self.order].relu().mean((2, 3)))


def normalised(normalise: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Layers whose weights are computed, one of them before a norm."""
    first, second = normalise(nn.Conv2d(3, 8, 3, bias=False)), normalise(nn.Conv2d(8, 8, 3))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(first, nn.GroupNorm(2, 8), nn.ReLU(), second, pool, normalise(nn.Linear(8, 10)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unlisted, GroupNorm": lambda: Unlisted(nn.GroupNorm(2, 8)),
    "unlisted, LayerNorm": Tokens,
    "gain of zero": Gated,
    "complex buffer": Spectrum,
    "integer parameter": Permuted,
    "spectral norm": lambda: normalised(nn.utils.parametrizations.spectral_norm),
    "spectral norm by a hook": lambda: normalised(nn.utils.spectral_norm),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch's own older functions
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_replicas_of_uncommon_layers_have_the_logits_and_gradients_of_the_model(name: str, count: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    replicas = Replicas(wrap(model, mean=(0.0,), std=(1.0,), size=16), count, ("encoder",), pictures(2))
    with torch.no_grad():
        for tensor in replicas.tensors.values():
            if tensor.is_floating_point() and isinstance(tensor, nn.Parameter):
                tensor += 0.1 * torch.randn(tensor.shape)
    parameters = {key: tensor.requires_grad_(True) for key, tensor in replicas.parameters(("encoder",)).items()}
    images = pictures(count * 4).unflatten(0, (count, 4))
    logits = replicas(images)
    gradients = torch.autograd.grad(logits.square().sum(), list(parameters.values()))
    for row in range(count):
        one = copy.deepcopy(model)
        one.load_state_dict({key.removeprefix("encoder."): tensor for key, tensor in replicas.read(row).items()})
        expected = one(images[row])
        assert torch.allclose(logits[row], expected, atol=1e-5, rtol=1e-4)
        expected.square().sum().backward()
        own = {f"encoder.{key}": parameter.grad for key, parameter in one.named_parameters()}
        scale = max(float(gradient.abs().max()) for gradient in own.values() if gradient is not None)
        for key, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(gradient[row], own[key], atol=1e-4 * scale, rtol=1e-3)


def test_a_shared_part_casts_what_is_floating_point_only() -> None:
    model = Spectrum().eval()
    part = PlainPart(copy.deepcopy(model).requires_grad_(False), torch.float32)
    assert torch.equal(part(pictures(2)[None])[0], model(pictures(2)))
    cast = PlainPart(copy.deepcopy(model), torch.bfloat16).inner
    assert cast.get_parameter("head.weight").dtype == torch.bfloat16
    assert cast.get_buffer("filter").dtype == torch.complex64


class Placed(nn.Module):
    """Adds a table of positions and filters by a buffer; counts its calls."""

    positions: Tensor
    filters: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 10)
        self.register_buffer("positions", torch.randn(8, 14, 14))
        self.register_buffer("filters", torch.randn(8, 1, 3, 3))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        if not torch._C._functorch.maybe_current_level():
            self.calls += 1
        x = self.norm(self.conv(images)) + self.positions
        return self.head(nn.functional.conv2d(x, self.filters, groups=8).relu().mean((2, 3)))


@pytest.mark.parametrize("count", [1, 3])
def test_buffers_are_computed_with_in_lower_precision_and_stay_in_full(count: int) -> None:
    torch.manual_seed(0)
    net, images = wrap(Placed().eval(), mean=(0.0,), std=(1.0,), size=16), pictures(2)
    replicas = Replicas(net, count, ("encoder",), images, torch.bfloat16)
    before = {key: tensor.clone() for key, tensor in replicas.tensors.items()}
    found = replicas(images.expand(count, *images.shape))
    assert torch.allclose(found.float(), net(images).expand(count, -1, -1), atol=0.05)
    for key, tensor in replicas.tensors.items():
        change = 1.0 if count == 1 and key.endswith("calls") else 0.0
        assert torch.equal(tensor, before[key] + change), key
