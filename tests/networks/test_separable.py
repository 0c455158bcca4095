"""Which networks learn from two halves of a batch at once, and that it changes nothing but rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import close, pictures, same
from models import LayersOfTorch, VisionTransformer
from testtime import Card, Guard, Online, Prediction, YNet, split
from testtime.adaptation.objectives.activations import watch
from testtime.adaptation.objectives.self_supervision import SelfSupervision
from testtime.kernels import _load, halves
from testtime.networks.replicas import Replicas
from testtime.networks.separable import is_separable


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two threads, and no batch is too small; the sizes of the batches that are computed in halves."""
    found: list[int] = []
    compute = halves.compute

    def note(batch: Tensor, *rest: Any) -> Tensor:
        found.append(len(batch))
        return compute(batch, *rest)

    _load.cache_clear()
    monkeypatch.setattr(halves, "compute", note)
    monkeypatch.setattr("testtime.kernels._HALVED_NUMBERS", 0)
    monkeypatch.setattr("testtime.threads.SMALL", 0)
    monkeypatch.delenv("TESTTIME_KERNELS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield found
    torch.set_num_threads(before)
    _load.cache_clear()


class Layer(nn.Module):
    """A linear map of the channels of `(N, C, H, W)`; the base of layers that do more."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.movedim(1, -1)).movedim(-1, 1)


class Coupling(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.1 * x.mean(0, keepdim=True))


class Remembering(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Caching(Layer):
    """Computes the transposed weight once in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Caching:
        self.cache.clear()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if "weight" not in self.cache:
            self.cache["weight"] = self.linear.weight.T * 1
        return x + (x.movedim(1, -1) @ self.cache["weight"]).movedim(-1, 1)


class Noisy(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-9 * torch.randn(())


class Demanding(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError("too few images")
        return super().forward(x)


class Scaling(Layer):
    """Sets an attribute to the same value in each pass, as harmless code does."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.shape[1] ** -0.5
        return super().forward(x * self.scale)


def network(layer: Callable[[], nn.Module] = Layer, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> YNet:
    """A network that no kernel accelerates, with a branch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Conv2d(3, 8, 5, 2, 2), norm(8), nn.GELU(), layer(), nn.Conv2d(8, 8, 3, 2, 1))

        def branch(outputs: int) -> nn.Module:
            return nn.Sequential(nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, outputs))

        net = YNet(encoder, branch(10), branch(4), Card(size=16, mean=(0.5,) * 3, std=(0.25,) * 3)).eval()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                module.running_mean.uniform_(-0.1, 0.1)
    return net


def transformer(model: Callable[[], nn.Module] = VisionTransformer) -> YNet:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return split(model().eval(), size=16, mean=(0.5,), std=(0.25,))


NETWORKS = {
    "batch norm": network,
    "layer norm": lambda: network(Layer, lambda channels: nn.GroupNorm(1, channels)),
    "sets a constant": lambda: network(Scaling),
    "transformer": transformer,
    "torch's transformer": lambda: transformer(LayersOfTorch),
}


def online(net: YNet, **settings: Any) -> Online:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the branch is not trained
        return Online(net, **{"lr": 0.01, "copies": 9, "statistics": "source", **settings})


def replicas(layer: Callable[[], nn.Module] = Layer) -> Replicas:
    made = Replicas(network(layer), 1, example=pictures(2))
    for parameter in made.packed.parameters.values():
        parameter.requires_grad_(True)
    return made


@pytest.mark.parametrize("name", NETWORKS)
def test_a_stream_is_that_of_whole_batches(name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = NETWORKS[name](), pictures(4)
    adapter = online(net)
    found = adapter.predict(images)
    assert calls == [9] * 4
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    other = online(net)
    expected = other.predict(images)
    assert len(calls) == 4
    assert close(found, expected)
    assert not torch.equal(found.logits, found.logits_before)
    pairs = zip(adapter.network().parameters(), other.network().parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("name", NETWORKS)
def test_repeated_saved_and_resumed_a_stream_has_the_same_bits(name: str, tmp_path: Path, calls: list[int]) -> None:
    net, images = NETWORKS[name](), pictures(6)
    expected = online(net).predict(images)
    first = online(net)
    start = first.predict(images[:3])
    first.save(tmp_path / "state")
    second = online(net)
    second.load(tmp_path / "state")
    assert same(Prediction.join([start, second.predict(images[3:])]), expected)
    assert len(calls) == 12


@pytest.mark.parametrize("method", ["tent", "memo", "eata", "sar", "cotta"])
def test_other_methods_learn_in_halves_too(method: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = transformer(), pictures(8)
    settings: dict[str, Any] = {"method": method, "share": "image" if method == "memo" else "batch"}
    if method == "eata":
        settings["method"] = "eta"
    found = online(net, **settings).predict(images)
    assert calls
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    assert close(found, online(net, **settings).predict(images), 1e-4)


def test_moving_statistics_and_those_of_the_batch_need_the_whole_batch(calls: list[int]) -> None:
    for statistics in ("running", "batch"):
        online(network(), statistics=statistics).predict(pictures(2))
    assert not calls
    online(network(), statistics="source").predict(pictures(2))
    assert calls


@pytest.mark.parametrize("layer", [Coupling, Remembering, Counting, Caching, Noisy, Demanding])
def test_a_layer_that_couples_images_or_changes_needs_the_whole_batch(layer: type[Layer], calls: list[int]) -> None:
    made = replicas(layer)
    assert not is_separable(made.parts["encoder"], made._prepare(pictures(2)[None]))
    made.self_supervise(pictures(8)[None]).sum().backward()
    assert not calls
    plain = replicas()
    plain.self_supervise(pictures(8)[None]).sum().backward()
    assert calls


def test_grouped_convolutions_are_computed_whole(calls: list[int]) -> None:
    made = replicas(lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8))
    made.self_supervise(pictures(8)[None]).sum().backward()
    assert not calls


def test_several_replicas_and_passes_without_gradient_are_computed_whole(calls: list[int]) -> None:
    Replicas(network(), 2, example=pictures(2)).self_supervise(pictures(8).expand(2, -1, -1, -1, -1))
    with torch.no_grad():
        replicas().self_supervise(pictures(8)[None])
    assert not calls


def test_layers_that_are_observed_are_computed_whole(calls: list[int]) -> None:
    made = replicas()
    layers = {"linear": next(layer for layer in made.parts["encoder"].modules() if isinstance(layer, nn.Linear))}
    seen: list[int] = []
    with watch(layers, lambda name, layer, given, output: seen.append(len(output))):
        made.self_supervise(pictures(8)[None])
    assert (seen, calls) == ([8], [])
    made.self_supervise(pictures(8)[None])
    assert (seen, calls) == ([8], [8])


def test_hooks_of_the_user_need_the_whole_batch(calls: list[int]) -> None:
    net, seen = network(), []
    net.encoder[0].register_forward_hook(lambda layer, given, output: seen.append(len(output)))  # type: ignore[operator]
    online(net).predict(pictures(1))
    assert 9 in seen
    assert not calls


def test_parameters_are_put_back_after_an_error_in_one_half(calls: list[int]) -> None:
    made = replicas()
    before = {name: tensor.shape for name, tensor in made.parts["encoder"].inner.named_parameters()}
    with pytest.raises(RuntimeError):
        made.self_supervise(torch.rand(1, 8, 4, 16, 16))  # four channels
    assert {name: tensor.shape for name, tensor in made.parts["encoder"].inner.named_parameters()} == before
    assert torch.get_num_threads() == 2
    made.self_supervise(pictures(8)[None])
    assert calls[-1] == 8


def test_adapters_in_two_threads_do_not_meet(calls: list[int]) -> None:
    nets, images = [transformer(), network()], pictures(6)

    def run(net: YNet) -> Prediction:
        torch.get_num_threads()  # a new thread takes over the number set last, when it first asks
        torch.set_num_threads(2)
        return online(net).predict(images)

    expected = [run(net) for net in nets]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, nets))
    assert all(map(same, found, expected))
    assert len(calls) == 24


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_mode_of_the_caller_does_not_matter(context: Callable[[], Any], calls: list[int]) -> None:
    net, images = transformer(), pictures(3)
    expected = online(net).predict(images)
    with context():
        assert same(online(net).predict(images), expected)
    assert len(calls) == 6


def test_classes_before_and_after_a_step_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = network(), pictures(3)
    adapter = online(net)
    adapter.predict(images[:1])
    sizes: list[int] = []
    classify = Replicas.classify

    def note(self: Replicas, features: Tensor) -> Tensor:
        sizes.append(features.shape[1])
        return classify(self, features)

    monkeypatch.setattr(Replicas, "classify", note)
    found = online(net).predict(images)
    assert sizes == [2] * 3
    sizes.clear()
    # What learning changes, what depends on the batch, and a second forward pass are not left for later.
    for settings in ({"update": "all"}, {"statistics": "batch"}, {"mirrored": True}):
        online(net, **settings).predict(images[:1])
        assert 2 not in sizes
    monkeypatch.setattr(SelfSupervision, "_may_defer", False)
    assert close(found, online(net).predict(images), 1e-6)


def test_an_image_is_observed_after_a_step_together_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = network(), pictures(3)
    sizes: list[int] = []
    encode = Replicas.encode

    def note(self: Replicas, views: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            sizes.append(views.shape[1])
        return encode(self, views)

    monkeypatch.setattr(Replicas, "encode", note)
    together, alone = online(net), online(net)
    found = together.predict(images)
    assert sizes == [4, 8, 8, 4]
    sizes.clear()
    assert close(found, Prediction.join([alone.predict(image[None]) for image in images]), 1e-6)
    assert sizes == [4] * 6
    learned = alone.network().state_dict()
    assert all(torch.equal(tensor, learned[name]) for name, tensor in together.network().state_dict().items())
    # After an update that is undone or a reset, what was observed ahead does not hold.
    for settings in ({"lr": 1e30}, {"resets": 1}):
        together, alone = online(net, **settings), online(net, **settings)
        sizes.clear()
        found = together.predict(images)
        assert sizes == [4, 8, 4, 8, 4, 4]
        assert close(found, Prediction.join([alone.predict(image[None]) for image in images]), 1e-6)
    # What depends on the batch, what learning changes, and a second forward pass are not joined.
    for settings in ({"statistics": "batch"}, {"update": "all"}, {"mirrored": True}):
        sizes.clear()
        online(net, **settings).predict(images)
        assert 8 not in sizes


def test_an_update_that_is_undone_answers_as_before_it() -> None:
    net, images = network(), pictures(3)
    with torch.no_grad():
        expected = net(images)
    found = online(net, lr=1e30, guard=Guard()).predict(images)
    assert found.rolled_back.all()
    assert torch.equal(found.logits, found.logits_before)
    torch.testing.assert_close(found.logits, expected)
    gated = online(net, threshold=0.0).predict(images)
    assert not gated.adapted.any()
    torch.testing.assert_close(gated.logits, expected)
