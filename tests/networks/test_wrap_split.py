"""Splitting: a model in two parts, traced or recorded, answers as before; what cannot be split says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adapters import pictures
from models import Flattening, Residual, VisionTransformer, sequential
from testtime import CropFlip, Online, Rotation, YNet, load, split
from testtime.networks.parts import Back, Front
from testtime.networks.replicas import Replicas
from testtime.networks.traced import Trace
from testtime.networks.ynet import check_task
from torch_defaults import DEFAULTS


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sequential": (sequential, "3"),
    "sequential behind its norm": (sequential, "1"),
    "residual": (Residual, "norm"),
    "flattening": (Flattening, "first"),
    "transformer behind its patches": (VisionTransformer, "patch"),
    "transformer": (VisionTransformer, "block1"),
}


@pytest.fixture(params=list(MODELS))
def model_and_cut(request: pytest.FixtureRequest) -> tuple[nn.Module, str]:
    make, at = MODELS[request.param]
    torch.manual_seed(3)
    return make(), at


@pytest.mark.parametrize("training", [True, False])
def test_a_split_model_answers_as_the_model(model_and_cut: tuple[nn.Module, str], training: bool) -> None:
    model, at = model_and_cut
    net = split(model.train(training), at)
    assert net.training == training
    assert all(module.training == training for module in net.modules())
    images = pictures(4)
    assert torch.allclose(net(images), copy.deepcopy(model)(images), atol=1e-6)


def test_a_split_model_has_the_models_gradients(model_and_cut: tuple[nn.Module, str]) -> None:
    model, at = model_and_cut
    net = split(model.eval(), at)
    net(pictures(4)).square().sum().backward()
    model(pictures(4)).square().sum().backward()
    split_gradients = sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)
    gradients = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    assert torch.allclose(torch.as_tensor(split_gradients), torch.as_tensor(gradients), rtol=1e-4)


def test_splitting_leaves_the_model_as_it_was(model_and_cut: tuple[nn.Module, str]) -> None:
    model, at = model_and_cut
    before, pointers = bits(model), [p.data_ptr() for p in model.parameters()]
    torch.manual_seed(8)
    state = torch.get_rng_state()
    net = split(model, at)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.zero_()  # if any of it were the model's, the model would change
    assert same_bits(bits(model), before)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_splitting_keeps_the_mode_of_every_layer() -> None:
    model = sequential().train()
    model[1].eval()  # type: ignore[index]  # a frozen BatchNorm
    modes = [module.training for module in model.modules()]
    split(model, "3")
    assert [module.training for module in model.modules()] == modes


def test_the_ssl_branch_is_a_copy_with_a_new_last_layer(model_and_cut: tuple[nn.Module, str]) -> None:
    model, at = model_and_cut
    net = split(model, at)
    last = [name for name, module in net.classifier.named_modules() if isinstance(module, nn.Linear)][-1]
    assert net.ssl.get_submodule(last).out_features == 4
    assert net.classifier.get_submodule(last).out_features == 10
    assert net.self_supervise(pictures(4)).shape == (4, 4)
    new = {f"{last}.weight", f"{last}.bias"}
    classifier, ssl = bits(net.classifier), bits(net.ssl)
    assert classifier.keys() == ssl.keys()
    assert same_bits(*({k: v for k, v in branch.items() if k not in new} for branch in (classifier, ssl)))
    pointers = [tensor.untyped_storage().data_ptr() for tensor in [*net.parameters(), *net.buffers()]]
    assert len(set(pointers)) == len(pointers)


def test_outputs_seed_and_card_of_a_split() -> None:
    torch.manual_seed(0)
    model = Residual()
    nets = [split(model, "norm", 7, seed=seed, classes="abcdefghij", size=16) for seed in (0, 0, 1)]
    assert nets[0].self_supervise(pictures(4)).shape == (4, 7)
    assert same_bits(bits(nets[0]), bits(nets[1]))
    assert not same_bits(bits(nets[0]), bits(nets[2]))
    assert nets[0].card.classes == tuple("abcdefghij")
    assert nets[0].card.size == 16
    normalised = split(model, "norm", mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    by_hand = (pictures(4) - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    assert torch.allclose(normalised(pictures(4)), model(by_hand), atol=1e-5)


def test_a_normalisation_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`mean` must have a number for each of 3 channels, got 2"):
        split(Residual(), "norm", mean=(0.5, 0.5))
    with pytest.raises(ValueError, match=r"`std` must have a number for each of 3 channels, got 4"):
        split(Residual(), "norm", std=(0.5,) * 4)
    for std in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="`std`"):
            split(Residual(), "norm", std=(0.5, 0.5, std))


def test_a_layer_on_one_side_of_a_shortcut_is_no_cut_and_the_cuts_are_named() -> None:
    with pytest.raises(ValueError, match=r"cannot be split after 'left'. It can be split at: stem, norm, top"):
        split(Residual(), "left")
    with pytest.raises(ValueError, match=r"has no layer 'layer9'. It can be split at: stem, norm, top"):
        split(Residual(), "layer9")
    with pytest.raises(ValueError, match=r"It can be split at: patch, .*block1, .*block2"):
        split(VisionTransformer(), "block1.qkv")


def test_every_cut_that_is_named_is_possible() -> None:
    for model in (sequential(), Residual(), VisionTransformer()):
        model.eval()
        with pytest.raises(ValueError, match="It can be split at") as error:
            split(model, "nowhere")
        for at in str(error.value).split("It can be split at: ")[1].rstrip(".").split(", "):
            assert torch.allclose(split(model, at)(pictures(4)), model(pictures(4)), atol=1e-6)


def test_a_model_with_lazy_layers_is_to_be_called_before_it_is_split() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))
    with pytest.raises(ValueError, match="call it on an image first"):
        split(model, "0")
    model(torch.zeros(1, 3, 8, 8))
    assert split(model, "0").self_supervise(torch.zeros(1, 3, 8, 8)).shape == (1, 4)


def test_tracing_leaves_no_attributes_on_the_model() -> None:
    class Constant(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images * self.scale.reshape(1, 1, 1, 1))  # a constant of the graph

    model = Constant().eval()
    attributes = set(vars(model))
    net = split(model, "norm")
    assert set(vars(model)) == attributes
    assert torch.allclose(net(pictures(4)), model(pictures(4)), atol=1e-6)


# Models that cannot be traced


class Block(nn.Module):
    """Takes an optional argument and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        x = x + F.relu(self.norm(self.conv(x)))
        return (x if mask is None else x * mask), None


class Awkward(nn.Module):
    """Control flow, optional arguments, a dictionary as output, a buffer without dimensions that is not saved."""

    scale: Tensor

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.shift = nn.Parameter(torch.randn(1, 8, 1, 1))
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.gain = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Any]:
        if images.shape[-1] < 4:  # a branch that cannot be traced
            raise ValueError("too small")
        x = self.stem(images) + self.shift
        for block in self.blocks:
            x, _ = block(x, mask)
        features = x.mean((2, 3)) * self.gain
        return {"logits": self.head(features) * self.scale, "loss": None if labels is None else 0.0}


@pytest.fixture
def awkward() -> Awkward:
    torch.manual_seed(2)
    return Awkward().eval()


@pytest.mark.parametrize("at", [None, "stem", "blocks.0", "blocks.3"])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_cannot_be_traced_is_split(awkward: Awkward, at: str | None, training: bool) -> None:
    before, attributes = bits(awkward), set(vars(awkward))
    net = split(awkward.train(training), at, size=16)
    assert isinstance(net.encoder, Front)
    assert net.cut == (at or "blocks.2")  # of four, at two thirds
    assert net.training == training
    for images in (pictures(4), pictures(4)[:1], pictures(4).tile(1, 1, 2, 2)):  # of another size too
        assert torch.allclose(net(images), awkward(images)["logits"], atol=1e-6)
    assert net.self_supervise(pictures(4)).shape == (4, 4)
    assert same_bits(bits(awkward), before)
    assert set(vars(awkward)) == attributes


class InPlace(nn.Module):
    """Changes the output of its first layer in place, by a layer or a function."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem, self.relu = nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.1, inplace=True)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        if self.how == "not traced" and images.shape[-1] < 4:
            raise ValueError("too small")
        x = self.stem(images)
        x = F.leaky_relu(x, 0.1, inplace=True) if self.how == "function" else self.relu(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("how", ["layer", "function", "not traced"])
def test_no_branch_changes_the_features_that_the_other_one_reads(how: str) -> None:
    model = InPlace(how).eval()
    net = split(model, "stem", size=16)
    assert isinstance(net.encoder, Front) == (how == "not traced")
    with torch.no_grad():
        features = net.encode(pictures(4))
        given = features.clone()
        assert torch.allclose(net.classify(features), model(pictures(4)), atol=1e-6)
        net.supervise(features)
    assert (given < 0).any()
    assert torch.equal(features, given)


def test_every_parameter_that_is_used_belongs_to_one_part(awkward: Awkward) -> None:
    net = split(awkward, "blocks.1", size=16)
    parts = [
        {name.removeprefix("model.") for name, _ in one.named_parameters()} for one in (net.encoder, net.classifier)
    ]
    expected = {"shift", *(n for n, _ in awkward.named_parameters() if n.startswith(("stem", "blocks.0", "blocks.1")))}
    assert parts[0] == expected
    assert parts[1] == {n for n, _ in awkward.named_parameters() if not n.startswith("unused")} - expected


def test_the_gradients_of_a_recorded_split_are_the_models(awkward: Awkward) -> None:
    net = split(awkward, "blocks.1", size=16)
    net(pictures(4)).square().sum().backward()
    awkward(pictures(4))["logits"].square().sum().backward()
    expected = {name: one.grad for name, one in awkward.named_parameters() if one.grad is not None}
    named = [*net.encoder.named_parameters(), *net.classifier.named_parameters()]
    found = {name.removeprefix("model."): one.grad for name, one in named}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-6), name  # type: ignore[arg-type]


def test_frozen_parameters_stay_frozen(awkward: Awkward) -> None:
    awkward.blocks[0].requires_grad_(False)
    net = split(awkward, "blocks.1", size=16)
    frozen = {name for name, one in net.named_parameters() if not one.requires_grad}
    assert frozen == {f"encoder.model.{name}" for name, _ in awkward.named_parameters() if "blocks.0." in name}


def test_a_recorded_split_can_be_copied_saved_and_replicated(awkward: Awkward, tmp_path: Path) -> None:
    net = split(awkward, size=16).eval()
    expected = net(pictures(4))
    assert torch.equal(copy.deepcopy(net)(pictures(4)), expected)
    net.save(tmp_path / "net")
    torch.manual_seed(9)
    assert torch.equal(load(tmp_path / "net", split(Awkward(), size=16))(pictures(4)), expected)
    for count in (1, 2):
        replicas = Replicas(net, count, example=pictures(4))
        found = replicas(pictures(4).expand(count, -1, -1, -1, -1))
        assert torch.allclose(found, expected.expand(count, -1, -1), atol=1e-5)


@pytest.mark.filterwarnings("ignore:The self-supervised branch is not trained")
def test_a_recorded_split_learns_from_an_image(awkward: Awkward) -> None:
    net = split(awkward, size=16).eval()
    adapter = Online(net, lr=0.01, copies=2, task=Rotation("all"), augment=CropFlip(padding=0, flip=False))
    prediction = adapter.predict(pictures(4)[:1])
    assert prediction.loss_after < prediction.loss_before
    learned = bits(adapter.network())
    moved = {name for name, tensor in bits(net).items() if not torch.equal(tensor, learned[name])}
    free = {name for name, _ in net.named_parameters() if not name.startswith("classifier.")}
    assert moved <= free
    assert {name for name in free if name.startswith("encoder.")} <= moved


def test_a_layer_that_something_else_crosses_is_no_cut(awkward: Awkward) -> None:
    with pytest.raises(ValueError, match=r"cannot be split after 'blocks.1.conv'. It can be split at: stem, blocks.0"):
        split(awkward, "blocks.1.conv", size=16)
    with pytest.raises(ValueError, match=r"has no layer 'blocks.9'"):
        split(awkward, "blocks.9", size=16)


def test_what_crosses_is_seen_where_it_does_not_matter_yet() -> None:
    """A gain of zero, as residual branches start with, hides one side of a sum from every comparison of logits."""

    class Parallel(Awkward):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
            self.zero = nn.Parameter(torch.zeros(1))

        def forward(self, images: Tensor, *_: Any) -> dict[str, Any]:  # type: ignore[override]
            left, right = self.left(images if images.sum() > 0 else -images), self.right(images)
            return {"logits": self.head((right + self.zero * left).mean((2, 3)))}

    with pytest.raises(ValueError, match="cannot be split after 'right'"):
        split(Parallel(), "right", size=16)


def test_a_layer_that_is_called_twice_is_no_cut() -> None:
    class Twice(Awkward):
        def forward(self, images: Tensor, *_: Any) -> dict[str, Any]:  # type: ignore[override]
            x = self.stem(images if images.sum() > 0 else -images)
            for _ in range(2):
                x, _ = self.blocks[0](x)
            return {"logits": self.head(x.mean((2, 3)))}

    with pytest.raises(ValueError, match=r"cannot be split after 'blocks.0'. It can be split at: stem"):
        split(Twice(), "blocks.0", size=16)


class Sized(Awkward):
    """Reads the size of its input, so that zeros of another size would not do."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 8, 4, 4))

    def forward(self, images: Tensor, *_: Any) -> dict[str, Any]:  # type: ignore[override]
        x, side = self.stem(images if images.sum() > 0 else -images), images.shape[-1]
        x, _ = self.blocks[0](x)
        return {"logits": self.head(self.blocks[1](x + F.interpolate(self.position, (side, side)))[0].mean((2, 3)))}


def test_features_of_another_size_are_refused_where_the_size_matters() -> None:
    model = Sized().eval()
    net = split(model, "blocks.0", size=16)
    assert torch.allclose(net(pictures(4)), model(pictures(4))["logits"], atol=1e-6)
    with pytest.raises(ValueError, match=r"split for images of 16×16.* size="):
        net(pictures(4).tile(1, 1, 2, 2))
    with pytest.raises(ValueError, match="`size` must be given"):
        split(model, "blocks.0")


def test_a_model_may_compute_differently_in_training_mode() -> None:
    class Moody(Residual):
        def forward(self, images: Tensor) -> Tensor:
            logits = super().forward(images)
            return logits if self.training else logits.softmax(1)

    model = Moody()
    for training in (True, False):
        net = split(model.train(training), "norm", size=16)
        assert torch.allclose(net(pictures(4)), model(pictures(4)), atol=1e-6)


# The branch


class Convolutional(nn.Module):
    """Ends with a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 10, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.relu(self.features(images))).mean((2, 3))


class TwoHeads(Residual):
    """The sum of two linear layers: another number of outputs for one of them does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.stem(images))
        return self.other(x.mean((2, 3))) + self.head(self.top(x).mean((2, 3)))


def test_the_last_layer_may_be_a_convolution() -> None:
    net = split(Convolutional(), "features", 7)
    assert net.self_supervise(pictures(4)).shape == (4, 7)
    assert net.ssl is not None
    assert net.ssl.get_submodule("head").out_channels == 7


def test_a_classifier_that_cannot_be_copied_gets_a_fresh_head() -> None:
    torch.manual_seed(0)
    model = TwoHeads().eval()
    with pytest.raises(ValueError, match="head"):
        split(model, "norm", branch="copy")
    nets = [split(model, "norm", 6, seed=seed) for seed in (0, 0, 1)]
    assert torch.allclose(nets[0](pictures(4)), model(pictures(4)), atol=1e-6)
    assert nets[0].self_supervise(pictures(4)).shape == (4, 6)
    assert same_bits(bits(nets[0]), bits(nets[1]))
    assert not same_bits(bits(nets[0]), bits(nets[2]))


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("branch", ["copy", "head"])
def test_a_split_does_not_depend_on_the_defaults_of_torch(awkward: Awkward, branch: Any, default: str) -> None:
    expected = split(awkward, size=16, branch=branch)
    with DEFAULTS[default]():
        net = split(awkward, size=16, branch=branch)
    assert same_bits(bits(net), bits(expected))
    assert {tensor.dtype for tensor in (*net.parameters(), *net.buffers())} == {torch.float32}
    assert torch.equal(net(pictures(4)), expected(pictures(4)))


class Layout(nn.Module):
    """Features of any shape that has 12 channels."""

    def __init__(self, arrange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.arrange, self.stem, self.cut, self.head = arrange, nn.Conv2d(3, 12, 4, 4), nn.Identity(), nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(self.arrange(self.stem(images)))
        while x.dim() > 2:
            x = x.mean(-1) if x.shape[1] == 12 else x.mean(1)
        return self.head(x)


@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x,
        lambda x: x.permute(0, 2, 3, 1),
        lambda x: x.flatten(2).transpose(1, 2),
        lambda x: x.mean((2, 3)),
    ],
)
def test_a_fresh_head_takes_the_mean_over_all_but_the_channels(arrange: Callable[[Tensor], Tensor]) -> None:
    net = split(Layout(arrange).eval(), "cut", branch="head", size=16).eval()
    features = net.encode(pictures(4))
    means = features
    while means.dim() > 2:
        means = means.mean(-1) if means.shape[1] == 12 else means.mean(1)
    pooled = nn.Sequential(*[layer for layer in net.ssl if "Pool" not in type(layer).__name__])  # type: ignore[union-attr]
    assert torch.allclose(net.supervise(features), pooled(means), atol=1e-5)


@pytest.mark.parametrize("branch", ["copy", "head", None])
def test_a_norm_in_the_branch_survives_features_that_need_no_gradient(branch: Any) -> None:
    """GroupNorm of torch 2.13 crashes in backward on channels-last input without gradient."""
    net = split(sequential(), "3", branch=branch, size=16).eval()
    assert net.ssl is not None
    gradients = []
    for layout in (torch.channels_last, torch.contiguous_format):
        with torch.no_grad():
            features = net.encode(pictures(4)).contiguous(memory_format=layout)
        net.ssl.zero_grad()
        net.supervise(features).square().sum().backward()
        gradients.append([one.grad.clone() for one in net.ssl.parameters() if one.grad is not None])
    for found, expected in zip(*gradients, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_arguments_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`branch`.* got 'tail'"):
        split(Residual(), "norm", branch="tail")  # type: ignore[arg-type]
    for outputs in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="`outputs`"):
            split(Residual(), "norm", outputs)  # type: ignore[arg-type]


def test_a_branch_must_have_the_tasks_outputs(awkward: Awkward) -> None:
    for model, at in ((Residual(), "norm"), (awkward, "blocks.1"), (TwoHeads(), "norm")):
        check_task(split(model, at, size=16), Rotation())
        with pytest.raises(ValueError, match=r"'rotation' needs 4 outputs, .* has 3"):
            check_task(split(model, at, 3, size=16), Rotation())


def test_the_cut_is_chosen_at_two_thirds() -> None:
    blocks = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(9)])
    model = nn.Sequential(nn.Conv2d(3, 8, 3), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).eval()
    net = split(model)
    assert net.cut == "1.5"  # 7 of 11 layers come before the cut
    assert torch.allclose(net(pictures(4)), model(pictures(4)), atol=1e-6)


def test_a_model_that_cannot_be_split_says_so() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10)).eval()
    with pytest.raises(ValueError, match="no layer whose output alone feeds the rest"):
        split(model, size=16)
    with pytest.raises(ValueError, match="does not accept"):
        split(nn.Linear(3, 10), "features")


def test_traced_parts_accept_any_size() -> None:
    model = Residual().eval()
    net = split(model, size=16)
    assert not isinstance(net.classifier, Back)
    assert net.cut in Trace(model).cuts
    larger = pictures(4).tile(1, 1, 3, 3)
    assert torch.allclose(net(larger), model(larger), atol=1e-6)
    assert isinstance(net, YNet)
