"""Replicas: S networks as one, against S networks one after another."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adapters import pictures
from models import Flattening, Residual, VisionTransformer, sequential
from testtime import Episodic, Fixed, Online, YNet, resnet18, resnet26, split
from testtime.networks.batch_norms import Statistics
from testtime.networks.replicas import PARTS, Replicas, compute_both, put_rows
from testtime.randomness import Draws


class Rectified(Residual):
    """Layers that replicas do not know, and weights that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU(8)
        self.scale = nn.Parameter(torch.ones(16, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.act(self.stem(images)) + 1)
        return self.head((F.relu(self.top(x)) * self.scale).mean((2, 3)))


class Reflecting(nn.Module):
    """A convolution whose padding replicas leave to vmap, and BatchNorm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(images))).mean((2, 3)))


class Folding(nn.Module):
    """Code that mixes the batch: images of one replica must not meet those of another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images)
        return self.head(F.relu(x - x.mean(0, keepdim=True)).mean((2, 3)))


class ClassToken(nn.Module):
    """Parameters outside of layers: a class token, positions and layer scales; and torch's attention."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.scale = nn.Parameter(torch.rand(width, 1, 1))
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.1)
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 3, batch_first=True)
        self.gain = nn.Parameter(torch.rand(width))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = (self.patch(images) * self.scale).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), tokens], dim=1) + self.position
        given = self.norm(tokens)
        tokens = tokens + self.attention(given, given, given, need_weights=False)[0] * self.gain
        return self.head(tokens[:, 0])


class Embedding(nn.Module):
    """Tokens of an image, with a parameter that is not used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.token, self.mask = (nn.Parameter(torch.randn(*shape, width)) for shape in ((1, 1), (1,)))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch(images).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(images), -1, -1), tokens], dim=1)


class MaskToken(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.norm = Embedding(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(images)).mean(1))


class ChannelNorm(nn.LayerNorm):
    """As in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class TokenNorm(nn.LayerNorm):
    """A LayerNorm of a name of its own, as in timm."""


class Patches(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.patch, self.pixels = nn.Conv2d(3, width, 4, stride=4), ChannelNorm(width)
        self.tokens, self.head = TokenNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pixels(self.patch(images)).relu()
        return self.head(self.tokens(x.flatten(2).transpose(1, 2)).tanh().mean(1))


def token_network() -> YNet:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ClassToken()
            self.inner.head = nn.Linear(12, 12)

        def forward(self, images: Tensor) -> Tensor:
            return self.inner(images)

    return YNet(Outer(), nn.Linear(12, 10), nn.Linear(12, 4))


class Odd(nn.Module):
    """Buffers of every kind, one of them assigned anew in every pass, and values cached in evaluation mode."""

    steps: Tensor
    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, groups=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.GroupNorm(2, 8)
        self.bias = nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 10)
        self.register_buffer("gain", torch.tensor(1.5), persistent=False)
        self.register_buffer("steps", torch.tensor(0))
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Odd:
        if mode:
            self.cache.clear()
        return super().train(mode)

    def forward(self, images: Tensor) -> Tensor:
        self.steps = self.steps + 1
        if "bias" not in self.cache:
            self.cache["bias"] = self.bias.tanh()
        x = self.norm(self.depthwise(F.relu(self.conv(images)))) * self.gain
        return x + self.cache["bias"][:, None, None]


def odd() -> YNet:
    def branch(outputs: int) -> nn.Module:
        return nn.Sequential(nn.PReLU(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs))

    torch.manual_seed(3)
    return YNet(Odd(), branch(10), branch(4)).eval()


def net_of(name: str) -> YNet:
    torch.manual_seed(4)
    nets: dict[str, Callable[[], YNet]] = {
        "resnet26 group": lambda: resnet26(depth=8, size=8, seed=2),
        "resnet26 batch": lambda: resnet26(depth=8, size=8, norm="batch", seed=2),
        "resnet26 real": lambda: resnet26(seed=2),
        "resnet18 group": lambda: resnet18(10, size=32, seed=2),
        "resnet18 batch": lambda: resnet18(10, size=32, norm="batch", seed=2),
        "sequential": lambda: split(sequential(), "3"),
        "residual": lambda: split(Residual(), "norm"),
        "flattening": lambda: split(Flattening(), "first"),
        "transformer, patches": lambda: split(VisionTransformer(), "patch"),
        "transformer": lambda: split(VisionTransformer(), "block1"),
        "class token": token_network,
        "mask token": lambda: split(MaskToken(), "embed"),
        "patches": lambda: split(Patches(), "patch"),
        "rectified": lambda: split(Rectified(), "norm"),
        "reflecting": lambda: split(Reflecting(), "norm"),
        "folding": lambda: split(Folding(), "conv"),
    }
    return nets[name]().eval()


def size_of(name: str) -> int:
    if name.startswith("resnet26"):
        return 16 if "real" in name else 8
    return 32 if name.startswith("resnet18") else 16


# Fused attention has no batching rule on the CPU, and torch says so once.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
PAPERS = ["resnet26 real", "resnet18 group", "resnet18 batch"]
PLAIN = [
    "resnet26 group",
    "resnet26 batch",
    "sequential",
    "residual",
    "transformer, patches",
    "class token",
    "patches",
    "rectified",
    "reflecting",
]
FOLDING, TRANSFORMER = "folding", "transformer"
ANSWERING = [*PAPERS, *PLAIN, "flattening", FOLDING, TRANSFORMER]
LEARNING = [*PLAIN, "transformer", "flattening"]


def different_replicas(net: YNet, count: int, size: int) -> tuple[Replicas, list[YNet]]:
    """Replicas with weights of their own, and the same networks one by one."""
    replicas = Replicas(net, count, PARTS, pictures(2, size=size, seed=9))
    nets = [copy.deepcopy(net) for _ in range(count)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in replicas.tensors.values():
            if tensor.is_floating_point():  # factors are positive, as variances must stay
                tensor *= 0.8 + 0.4 * torch.rand(tensor.shape, generator=generator)
    for index, one in enumerate(nets):
        one.load_state_dict(one.state_dict() | replicas.read(index))
    return replicas, nets


@pytest.mark.parametrize("name", ANSWERING)
def test_replicas_answer_as_separate_networks(name: str) -> None:
    count, size = 2 if "resnet18" in name else 3, size_of(name)
    replicas, nets = different_replicas(net_of(name), count, size)
    images = pictures(count * 4, size=size).view(count, 4, 3, size, size)
    with torch.no_grad():
        logits, outputs = replicas(images), replicas.self_supervise(images)
        for s, one in enumerate(nets):
            assert torch.allclose(logits[s], one(images[s]), atol=1e-5, rtol=1e-4)
            assert torch.allclose(outputs[s], one.self_supervise(images[s]), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(logits[0], nets[1](images[0]), atol=1e-3)  # they do differ


@pytest.mark.parametrize("name", ["resnet26 group", "resnet26 batch", "sequential", FOLDING])
@pytest.mark.parametrize("statistics", ["source", "batch"])
@pytest.mark.parametrize("side", [16, 12])
def test_both_branches_answer_as_each_alone(name: str, statistics: Statistics, side: int) -> None:
    replicas, _ = different_replicas(net_of(name), 2, 16)
    replicas.batch_norms.use(statistics)
    views = pictures(8, size=side).view(2, 4, 3, side, side)
    images = (pictures(6, seed=5) * 255).byte().view(2, 3, 3, 16, 16)
    with torch.no_grad():
        found, expected = compute_both(replicas, views, images), (replicas.self_supervise(views), replicas(images))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def gradients_alone(net: YNet, images: Tensor) -> dict[str, Tensor]:
    """The gradients of some function of both answers, in float64."""
    (net(images).square().sum() + net.self_supervise(images).sin().sum()).backward()
    return {key: parameter.grad.double() for key, parameter in net.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ANSWERING)
def test_replicas_have_the_gradients_and_statistics_of_separate_networks(name: str, training: bool) -> None:
    count, size = 2, size_of(name)
    replicas, nets = different_replicas(net_of(name), count, size)
    # Of these images, none puts a ReLU so close to its edge that rounding decides on which side it is.
    images = pictures(count * 4, size=size, seed=1).view(count, 4, 3, size, size)
    replicas.batch_norms.train(training)
    parameters = replicas.parameters(PARTS)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    total = replicas(images).square().sum() + replicas.self_supervise(images).sin().sum()
    gradients = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values() if gradient.numel() > 100)
    for s, one in enumerate(nets):
        one.train(training)
        exact, rounded = (
            gradients_alone(copy.deepcopy(one).to(d), images[s].to(d)) for d in (torch.float64, torch.float32)
        )
        one(images[s]), one.self_supervise(images[s])  # for its statistics
        scale = max(float(gradient.abs().max()) for gradient in exact.values())
        # Few images make Batch Normalization amplify rounding: what the network alone suffers is allowed here too.
        noise = max(float((rounded[key] - exact[key]).abs().max()) for key in exact)
        for key, gradient in gradients.items():
            assert torch.allclose(gradient[s].double(), exact[key], atol=1e-4 * scale + 2 * noise, rtol=1e-3), key
        for key, buffer in one.named_buffers():
            if key in replicas.tensors:
                assert torch.allclose(replicas.tensors[key][s], buffer, atol=1e-5, rtol=1e-4), key


def learn_together(
    net: YNet, images: Tensor, targets: Tensor, steps: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> Replicas:
    replicas = Replicas(net, len(images), ("encoder", "ssl"), images[0], images.dtype)
    moving = [parameter.requires_grad_(True) for parameter in replicas.parameters(("encoder", "ssl")).values()]
    mover = optimizer(moving)
    replicas.batch_norms.train(True)
    for _ in range(steps):
        mover.zero_grad()
        outputs = replicas.self_supervise(images)
        (F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / images.shape[1]).backward()
        mover.step()
    replicas.batch_norms.train(False)
    return replicas


def learn_alone(
    net: YNet, images: Tensor, targets: Tensor, steps: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> YNet:
    one = copy.deepcopy(net)
    assert one.ssl is not None
    mover = optimizer([*one.encoder.parameters(), *one.ssl.parameters()])
    one.train()
    for _ in range(steps):
        mover.zero_grad()
        F.cross_entropy(one.self_supervise(images), targets).backward()
        mover.step()
    return one.eval()


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001)


def check_steps(
    name: str,
    count: int,
    steps: int = 10,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-4,
) -> None:
    size, net = size_of(name), net_of(name).to(dtype)
    images = pictures(count * 4, size=size).view(count, 4, 3, size, size).to(dtype)
    targets = Draws.of(1, torch.arange(count)).integers(4, 4)
    order = Draws.of(2, torch.arange(count)).uniform().argsort()
    together = learn_together(net, images, targets, steps, optimizer)
    shuffled = learn_together(net, images[order], targets[order], steps, optimizer)
    with torch.no_grad():
        logits, again = together(images), shuffled(images[order])
    assert torch.allclose(again, logits[order], atol=tolerance, rtol=0)
    far = 0
    for s in range(count):
        alone = learn_alone(net, images[s], targets[s], steps, optimizer)(images[s])
        far += not torch.allclose(logits[s], alone, atol=tolerance, rtol=0)
        least = tolerance / 2 if name == "flattening" else 10 * tolerance  # that one's features are small
        assert (alone - net(images[s])).abs().max() > least  # something was learned
    assert far <= count // 50  # one in fifty may meet the corner of a ReLU so closely that rounding decides


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("name", LEARNING)
def test_ten_steps_together_are_ten_steps_alone(name: str, count: int) -> None:
    check_steps(name, count)


@pytest.mark.parametrize("name", [*LEARNING, "folding"])
def test_great_steps_in_double_precision(name: str) -> None:
    """Without the noise of rounding, which great steps amplify."""
    check_steps(name, 2, 10, functools.partial(torch.optim.SGD, lr=0.05), torch.float64, 1e-8)


def test_ten_steps_of_sixty_four_replicas() -> None:
    check_steps("resnet26 group", 64)


def test_steps_of_the_papers_networks() -> None:
    check_steps("resnet26 real", 2)
    check_steps("resnet18 group", 2, 1)


def test_ten_steps_with_momentum_decay_and_adam() -> None:
    def momentum(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.01)

    def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.001)

    check_steps("resnet26 batch", 3, 10, momentum, torch.float64, 1e-8)
    check_steps("resnet26 group", 3, 10, adam, torch.float64, 1e-7)


@pytest.mark.parametrize("name", ["transformer", "class token", "mask token", "patches"])
def test_transformers_are_stacked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "testtime.networks.replica_parts"):
        replicas = Replicas(net_of(name), 3, PARTS, pictures(2))
    assert caplog.messages == []
    norms = {layer for layer, module in replicas.net.named_modules() if isinstance(module, nn.LayerNorm)}
    few = Replicas(net_of(name), 3, PARTS, pictures(2), layers=norms)
    assert few.tensors.keys() == {f"{layer}.{kind}" for layer in norms for kind in ("weight", "bias")}
    images = pictures(6).unflatten(0, (3, 2))
    with torch.no_grad():
        assert torch.allclose(few(images), replicas(images), atol=1e-5)
        assert torch.allclose(replicas(images)[1], replicas.net(images[1]), atol=1e-5)


@pytest.mark.parametrize(("name", "reason"), [("rectified", "it fails with"), ("reflecting", "'reflect'")])
def test_what_cannot_be_stacked_is_mapped_and_logged(name: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "testtime"):
        Replicas(net_of(name), 2, PARTS, pictures(2))
    assert any("encoder go through vmap" in message and reason in message for message in caplog.messages)


def test_code_that_mixes_the_batch_is_found_by_trying(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "testtime"):
        Replicas(net_of("folding"), 2, PARTS, pictures(2))
    assert any("go through vmap: concatenated" in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["resnet26 group", "resnet26 batch", "resnet18 group", "residual"])
def test_known_layers_are_not_mapped(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "testtime"):
        Replicas(net_of(name), 2, PARTS, pictures(2, size=32))
    assert not any("vmap" in message for message in caplog.messages)


# One replica


FOREIGN = ["sequential", "residual", "transformer", "transformer, patches", "rectified", "reflecting", "folding"]


@pytest.mark.parametrize("name", FOREIGN)
def test_one_replica_is_called_directly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("one replica went through vmap or through plain attention")

    monkeypatch.setattr("testtime.networks.replica_parts.vmap", refuse)
    monkeypatch.setattr("testtime.networks.replica_parts.plain_attention", refuse)
    net = net_of(name)
    replicas = Replicas(net, 1, PARTS, pictures(2))
    images = pictures(3).view(1, 3, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(replicas(images)[0], net(images[0]), atol=1e-5)
        assert torch.allclose(replicas.self_supervise(images)[0], net.self_supervise(images[0]), atol=1e-5)


@pytest.mark.parametrize("name", [*FOREIGN, "flattening"])
def test_one_replica_has_the_gradients_and_statistics_of_its_network(name: str) -> None:
    replicas, (one,) = different_replicas(net_of(name), 1, size_of(name))
    images = pictures(4, size=size_of(name), seed=1)
    replicas.batch_norms.train(True)
    parameters = replicas.parameters(PARTS)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    total = replicas(images[None]).square().sum() + replicas.self_supervise(images[None]).sin().sum()
    gradients = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))
    one.train()
    expected = gradients_alone(one, images)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in gradients.items():
        assert torch.allclose(gradient[0].double(), expected[key], atol=1e-4 * scale, rtol=1e-3), key
    for key, buffer in one.named_buffers():
        if key in replicas.tensors:
            assert torch.allclose(replicas.tensors[key][0], buffer, atol=1e-5), key


@pytest.mark.parametrize("count", [1, 2])
def test_batch_statistics_leave_the_running_ones_alone(count: int) -> None:
    net = net_of("reflecting")
    replicas = Replicas(net, count, PARTS, pictures(2))
    replicas.batch_norms.use("batch")
    images = pictures(4).expand(count, 4, 3, 16, 16)
    with torch.no_grad():
        answers = replicas(images)
    assert all(torch.equal(tensor[0], net.state_dict()[key]) for key, tensor in replicas.tensors.items())
    with torch.no_grad():
        assert torch.allclose(answers[0], net.train()(images[0]), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_replica_computes_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    net = net_of("reflecting")
    replicas = Replicas(net, 1, PARTS, pictures(2), dtype)
    with torch.no_grad():
        logits = replicas(pictures(3)[None])
        assert logits.dtype == dtype
        assert torch.allclose(logits[0].float(), net(pictures(3)), atol=0.1 if dtype == torch.bfloat16 else 1e-5)
    assert all(tensor.dtype == torch.float32 for tensor in replicas.parameters(PARTS).values())


def test_buffers_of_every_kind_and_caches() -> None:
    net = odd()
    replicas = Replicas(net, 1, PARTS, pictures(2))
    assert replicas.tensors["encoder.gain"].shape == (1,)
    parameters = replicas.parameters(PARTS)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    assert int(replicas.tensors["encoder.steps"]) == int(net.encoder.get_buffer("steps")) == 0
    for passed in (1, 2):  # a second pass would meet what the first has cached
        loss = replicas.self_supervise(pictures(2)[None]).square().sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        assert int(replicas.tensors["encoder.steps"]) == passed
        bias = dict(zip(parameters, gradients, strict=True))["encoder.bias"]
        assert bias is not None
        assert bias.abs().sum() > 0
    with torch.no_grad():
        replicas.tensors["encoder.bias"] += 1
        replicas.tensors["encoder.gain"] *= 2
    state = replicas.read(0)
    assert state["encoder.gain"] == 3
    other = odd()
    for name, tensor in [*other.named_parameters(), *other.named_buffers()]:
        if name in state:
            tensor.data.copy_(state[name])
    other.train().eval()  # no caches
    with torch.no_grad():
        assert torch.allclose(replicas(pictures(2)[None])[0], other(pictures(2)), atol=1e-5)


def test_what_no_state_has_stays_when_it_is_written() -> None:
    net = odd()
    replicas = Replicas(net, 2, PARTS)
    replicas.tensors["encoder.gain"] += 1
    replicas.write(1, {name: tensor + 1 for name, tensor in net.state_dict().items()})
    assert replicas.tensors["encoder.gain"].tolist() == [2.5, 2.5]
    assert torch.equal(replicas.tensors["encoder.bias"][1], net.state_dict()["encoder.bias"] + 1)
    with pytest.raises(KeyError):
        replicas.write(0, {})


def test_rows_of_scalars_are_put_back() -> None:
    piece, old = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    put_rows(piece, old, torch.tensor([True, False]))
    assert piece.tolist() == [3.0, 2.0]


@pytest.mark.parametrize("count", [1, 3])
def test_a_network_without_a_branch(count: int) -> None:
    torch.manual_seed(0)
    net = YNet(Residual(), nn.Identity(), None).eval()
    replicas = Replicas(net, count, ("encoder", "classifier"), pictures(2))
    images = pictures(4).expand(count, 4, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(replicas(images)[count - 1], net(images[0]), atol=1e-5)
    with pytest.raises(ValueError, match="no self-supervised branch"):
        replicas.self_supervise(images)


def test_norms_of_a_frozen_part_survive_channels_last() -> None:
    """torch crashes in the backward pass of GroupNorm on channels-last input that needs no gradient."""
    replicas = Replicas(odd(), 1, PARTS, pictures(2))
    weight = replicas.tensors["encoder.norm.weight"].requires_grad_(True)
    (gradient,) = torch.autograd.grad(replicas(pictures(2)[None]).square().sum(), weight)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def test_packed_gradients_are_those_of_autograd() -> None:
    replicas, _ = different_replicas(net_of("transformer"), 2, 16)
    parameters = replicas.parameters(PARTS)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    images = pictures(4).view(2, 2, 3, 16, 16)
    for _ in range(2):  # the second does not add to the first

        def loss() -> Tensor:
            return replicas.self_supervise(images).square().sum()  # not of the classifier

        value, packed = replicas.packed.gradient(loss)
        expected = torch.autograd.grad(loss(), list(parameters.values()), materialize_grads=True)
        assert torch.allclose(value, loss())
        for (name, found), gradient in zip(replicas.packed.unpack(packed).items(), expected, strict=True):
            assert torch.allclose(found, gradient, atol=1e-6), name
    assert all(parameter.grad is None for parameter in parameters.values())


def test_tied_weights_stay_tied() -> None:
    class Tied(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.right = nn.Conv2d(8, 8, 3, padding=1)
            self.right.weight = self.left.weight

    torch.manual_seed(0)
    net = split(Tied(), "norm").eval()
    replicas, nets = different_replicas(net, 2, 16)
    images = Draws.of(0, torch.arange(2)).uniform(4, 3, 16, 16)
    assert torch.allclose(replicas(images)[1], nets[1](images[1]), atol=1e-5)


# Single replicas


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["resnet26 batch", "transformer, patches"])
def test_read_and_write_are_exact_and_touch_one_replica(name: str) -> None:
    replicas, _ = different_replicas(net_of(name), 4, size_of(name))
    before = [replicas.read(index) for index in range(4)]
    assert not equal(before[0], before[1])
    replicas.write(2, before[0])
    after = [replicas.read(index) for index in range(4)]
    assert all(equal(after[index], before[source]) for index, source in enumerate((0, 1, 0, 3)))
    replicas.packed.numbers.add_(1)
    assert equal(after[1], before[1])  # what was read is a copy


@pytest.mark.parametrize("name", ["resnet26 batch", "transformer"])
def test_every_replica_starts_as_the_network(name: str) -> None:
    net = net_of(name)
    replicas = Replicas(net, 3, PARTS, pictures(2, size=size_of(name)))
    own = net.state_dict()
    assert all(torch.equal(row, own[key]) for key, tensor in replicas.tensors.items() if key in own for row in tensor)
    assert replicas.tensors.keys() >= dict(net.encoder.named_parameters(prefix="encoder")).keys()


@pytest.mark.parametrize("name", ["resnet26 batch", "transformer, patches"])
def test_packed_tensors_are_those_that_were_packed(name: str) -> None:
    replicas, _ = different_replicas(net_of(name), 2, size_of(name))
    parameters = replicas.parameters(PARTS)
    assert equal(replicas.packed.unpack(replicas.packed.pack(parameters)), parameters)
    assert torch.equal(replicas.packed.pack(parameters), replicas.packed.numbers)
    replicas.packed.numbers.fill_(3)
    assert all(bool((tensor == 3).all()) for tensor in parameters.values())  # they are views of it


def test_parts_that_are_not_asked_for_are_held_once() -> None:
    net = net_of("resnet26 group")
    replicas = Replicas(net, 5, ("encoder",), pictures(2, size=8))
    assert {name.split(".")[0] for name in replicas.tensors} == {"encoder"}
    assert sum(t.numel() for t in replicas.tensors.values()) == 5 * sum(p.numel() for p in net.encoder.parameters())
    images = Draws.of(0, torch.arange(5)).uniform(2, 3, 8, 8)
    assert torch.allclose(replicas(images).flatten(0, 1), net(images.flatten(0, 1)), atol=1e-5)


def test_the_network_is_not_changed_and_shares_no_memory() -> None:
    net = net_of("resnet26 batch").train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    replicas = Replicas(net, 2, PARTS, pictures(2, size=8))
    replicas.batch_norms.train(True)
    replicas(Draws.of(0, torch.arange(2)).uniform(4, 3, 8, 8))
    for piece in replicas.pieces:
        piece += 1
    assert equal(dict(net.state_dict()), before)
    assert all(module.training for module in net.modules())
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_dropout_stays_off() -> None:
    net = split(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 36, 10)), "1")
    replicas = Replicas(net.train(), 2, PARTS, pictures(2, size=8))
    replicas.batch_norms.train(True)
    images = Draws.of(0, torch.arange(2)).uniform(4, 3, 8, 8)
    assert torch.equal(replicas(images), replicas(images))
    assert torch.allclose(replicas(images)[1], net.eval()(images[1]), atol=1e-5)


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_a_part_that_is_not_replicated_takes_no_memory(name: str) -> None:
    net = net_of(name).train()
    replicas = Replicas(net, 1, ("encoder",), pictures(2))
    shared = {parameter.data_ptr() for parameter in net.classifier.parameters()}
    assert {parameter.data_ptr() for parameter in replicas.parts["classifier"].parameters()} == shared
    assert all(parameter.requires_grad for parameter in net.parameters())
    own = {parameter.data_ptr() for parameter in net.encoder.parameters()}
    assert not own & {tensor.data_ptr() for tensor in replicas.tensors.values()}


class Halving(nn.Module):
    """Code that depends on the values of a tensor."""

    def forward(self, images: Tensor) -> Tensor:
        return images * 0.5 if images.sum() > 0 else images


def test_code_that_branches_on_values_is_refused_for_several_replicas() -> None:
    torch.manual_seed(0)
    made = split(Rectified(), "norm")
    net = YNet(nn.Sequential(Halving(), made.encoder), made.classifier, made.ssl).eval()
    with pytest.raises(ValueError, match=r"(?s)encoder.*parallel=1.*together=1"):
        Replicas(net, 2, PARTS, pictures(2))
    images = pictures(3)
    with torch.no_grad():
        assert torch.allclose(Replicas(net, 1, PARTS, pictures(2))(images[None])[0], net(images), atol=1e-5)
    assert Episodic(net, steps=1, copies=2).predict(images).adapted.all()  # one after another
    with pytest.raises(ValueError, match="parallel=1"):
        Episodic(net, steps=1, copies=2, parallel=3).predict(images)


def test_images_of_another_size_than_the_encoder_takes_are_refused() -> None:
    net = split(VisionTransformer(), "block1").describe(record={"branch": {}})
    for adapter in (Fixed(net), Online(net, copies=2)):
        with pytest.raises(ValueError, match=r"\(3, 24, 24\)"):
            adapter.predict(torch.rand(2, 3, 24, 24))


def test_there_is_at_least_one_replica() -> None:
    with pytest.raises(ValueError, match=r"`count`.*got 0"):
        Replicas(net_of("resnet26 group"), 0)
