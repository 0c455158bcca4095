"""Wrapping: any classifier as a network without a branch, its preprocessing, and models that are refused."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from adapters import pictures
from models import Residual, VisionTransformer, sequential
from testtime import YNet, load, split, wrap
from testtime.networks.outputs import pick_logits
from testtime.networks.preprocessing import read_preprocessing

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class Answer(NamedTuple):
    aux: Tensor
    logits: Tensor


class Returning(Residual):
    """Returns its logits in something."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, images: Tensor) -> Any:  # type: ignore[override]
        return self.pack(super().forward(images))


PACKED: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda logits: logits,
    "tuple": lambda logits: (logits, logits * 2),
    "list, features first": lambda logits: [logits[:, None, :], logits],
    "dictionary": lambda logits: {"loss": None, "logits": logits, "features": logits * 2},
    "dictionary of another name": lambda logits: OrderedDict(scores=logits, maps=logits[..., None]),
    "object": lambda logits: SimpleNamespace(logits=logits),
    "named tuple": lambda logits: Answer(logits * 2, logits),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("training", [True, False])
def test_a_wrapped_model_gives_the_models_logits(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Returning(PACKED[name]).train(training)
    before, attributes = bits(model), set(vars(model))
    net = wrap(model, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    by_hand = (pictures(4) - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    expected = Residual.forward(model, by_hand)
    assert torch.allclose(net(pictures(4)), expected, atol=1e-5)
    assert net.training == training
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.zero_()
    after = bits(model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert set(vars(model)) == attributes


def test_a_wrapped_model_has_no_branch(tmp_path: Path) -> None:
    net = wrap(sequential(), classes="abcdefghij", size=16, std=(0.5,)).eval()
    assert not net.has_branch
    assert split(sequential(), "3").has_branch
    with pytest.raises(ValueError, match="no self-supervised branch"):
        net.self_supervise(pictures(4))
    with pytest.raises(ValueError, match="no self-supervised branch"):
        net.supervise(net.encode(pictures(4)))
    net.save(tmp_path / "net")
    again = load(tmp_path / "net", wrap(sequential(), std=(0.5,)))
    assert torch.equal(again(pictures(4)), net(pictures(4)))
    assert again.card == net.card
    assert torch.equal(copy.deepcopy(net)(pictures(4)), net(pictures(4)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own
def test_wrappers_of_torch_are_taken_off() -> None:
    model = sequential().eval()
    for wrapped in (nn.DataParallel(model), torch.compile(model), nn.DataParallel(nn.DataParallel(model))):
        net = wrap(wrapped, size=16)
        assert torch.equal(net(pictures(4)), model(pictures(4)))
        assert net.encoder.state_dict().keys() == model.state_dict().keys()


def test_parameters_and_buffers_stay_what_they_were() -> None:
    model = Residual()
    model.stem.requires_grad_(False)
    model.register_buffer("scale", torch.tensor(2.0), persistent=False)
    net = wrap(model, size=16)
    assert {name for name, one in net.named_parameters() if not one.requires_grad} == {
        "encoder.stem.weight",
        "encoder.stem.bias",
    }
    assert float(net.encoder.get_buffer("scale")) == 2
    assert "encoder.scale" not in net.state_dict()


class Counting(Residual):
    """Changes buffers in evaluation mode too; one of them is a cache, filled by the first pass."""

    count: Tensor
    mean: Tensor
    ramp: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("ramp", torch.zeros(1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        self.count = self.count + 1
        if not torch.jit.is_tracing() and len(self.ramp) != images.shape[-1]:
            self.ramp = torch.linspace(0, 1, images.shape[-1])
        x = self.norm(self.stem(images * self.ramp))
        self.mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
        return self.head(self.top(x - self.mean[:, None, None]).mean((2, 3)))


@pytest.mark.parametrize(("make", "branch"), [(wrap, None), (split, "copy"), (split, "head")])
def test_trying_a_model_leaves_its_buffers_as_they_were(make: Any, branch: str | None) -> None:
    given = {} if branch is None else {"at": "norm", "branch": branch}
    net = make(Counting(), size=16, **given)
    expected = {"count": torch.tensor(0), "mean": torch.zeros(8), "ramp": torch.linspace(0, 1, 16)}
    parts = nn.ModuleList(part for part in (net.encoder, net.classifier, net.ssl) if part is not None)
    found = [(name.rpartition(".")[2], buffer) for name, buffer in parts.named_buffers()]
    assert expected.keys() <= {last for last, _ in found}
    assert all(torch.equal(buffer, expected[last]) for last, buffer in found if last in expected)


@pytest.mark.parametrize("make", [wrap, split])
def test_integer_parameters_become_buffers(make: Any) -> None:
    class Permuted(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.arange(7, -1, -1), requires_grad=False)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.top(self.norm(self.stem(images))[:, self.order]).mean((2, 3)))

    model = Permuted().eval()
    net = make(model, size=16)
    assert torch.equal(net(pictures(4)), model(pictures(4)))
    assert all(parameter.is_floating_point() for parameter in net.parameters())
    assert {name.rpartition(".")[2] for name in net.state_dict()} >= {"order"}


# Models that are refused


@pytest.mark.parametrize("make", [wrap, split])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Residual().double(), r"float64.*model\.float\(\)"),
        (lambda: Residual().to("meta"), "meta"),
        (lambda: nn.Conv2d(3, 10, 3, dtype=torch.complex64), "view_as_real"),
        (lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten()), "lazy"),
        (lambda: nn.Sequential(nn.Conv2d(3, 10, 3)), r"logits \(N, K\), got torch.float32 of shape \(3, 10, 62, 62\)"),
        (
            lambda: Returning(lambda logits: {"a": logits, "b": logits}),
            r"logits \(N, K\), got a dictionary with 'a', 'b'",
        ),
        (lambda: Returning(lambda logits: logits.argmax(1)), r"logits \(N, K\), got torch.int64 of shape \(3,\)"),
        (lambda: Returning(lambda logits: None), r"logits \(N, K\), got NoneType"),
        (lambda: Returning(lambda logits: (logits[0], "text")), r"logits \(N, K\), got a tuple"),
    ],
)
def test_models_that_are_no_classifiers_are_refused(make: Any, model: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(model())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("make", [wrap, split])
def test_torchscript_models_are_refused(make: Any) -> None:
    scripted, traced = torch.jit.script(sequential()), torch.jit.trace(nn.Flatten(), pictures(2))
    for model in (scripted, traced, nn.DataParallel(scripted)):
        with pytest.raises(ValueError, match=r"`model`.* TorchScript"):
            make(model)


def test_a_size_that_the_model_refuses_is_named_with_one_that_it_accepts() -> None:
    for make in (wrap, split):
        with pytest.raises(ValueError, match=r"\(3, 24, 24\).* It accepts 16×16: size=16"):
            make(VisionTransformer(), size=24)
    assert wrap(VisionTransformer())(pictures(4)).shape == (4, 10)  # found by trying
    with pytest.raises(ValueError, match="size="):
        wrap(nn.Linear(7, 3))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`model`.* got str"):
        wrap("resnet18")  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [wrap, split])
def test_arguments_must_fit_the_model(make: Any) -> None:
    with pytest.raises(ValueError, match="class"):
        make(Residual(), classes=("a", "b"))
    with pytest.raises(ValueError, match="`mean` must have a number for each of 3 channels"):
        make(Residual(), mean=(0.5, 0.5))
    with pytest.raises(ValueError, match="`size`"):
        make(Residual(), size=-3)


# Preprocessing


class Transforms:
    """Like torchvision's preset for classification."""

    def __init__(self) -> None:
        self.crop_size, self.resize_size = [224], [256]
        self.mean, self.std = map(list, IMAGENET.values())
        self.interpolation = SimpleNamespace(value="bicubic")


class Resize:
    size, interpolation = 256, SimpleNamespace(value="bilinear")


class CenterCrop:
    size = (224, 224)


class Normalize:
    mean, std = torch.tensor([0.5, 0.5, 0.5]), [0.25, 0.25, 0.25]


PROCESSOR = {
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25], "size": {"shortest_edge": 256}, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 224, "width": 224}, "do_normalize": True, "do_rescale": True,
    "rescale_factor": 1 / 255,
}  # fmt: skip
GIVEN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "torchvision": (Transforms(), (*IMAGENET.values(), 224, 256, "bicubic")),
    "timm": (
        {**IMAGENET, "input_size": (3, 240, 240), "crop_pct": 0.9375, "interpolation": "bicubic"},
        (*IMAGENET.values(), 240, 256, "bicubic"),
    ),
    "transformers": (SimpleNamespace(**PROCESSOR), ((0.5,) * 3, (0.25,) * 3, 224, 256, "bicubic")),
    "transformers, pixels from -1 to 1": (
        SimpleNamespace(**{**PROCESSOR, "rescale_factor": 2 / 255, "do_center_crop": False, "size": {"height": 96}}),
        ((0.25,) * 3, (0.125,) * 3, 96, None, "bicubic"),
    ),
    "transformers, not normalised": (
        SimpleNamespace(**{**PROCESSOR, "do_normalize": False}),
        ((0.0,), (1.0,), 224, 256, "bicubic"),
    ),
    "a composition": (
        SimpleNamespace(transforms=[Resize(), CenterCrop(), object(), Normalize()]),
        ((0.5,) * 3, (0.25,) * 3, 224, 256, "bilinear"),
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_preprocessing_is_read_from_what_libraries_give(name: str) -> None:
    given, (mean, std, size, resize, interpolation) = GIVEN[name]
    found = read_preprocessing(Residual(), given)
    assert found.mean == pytest.approx(mean)
    assert found.std == pytest.approx(std)
    assert (found.size, found.resize, found.interpolation) == (size, resize, interpolation)
    net = wrap(Residual(), preprocessing=given)
    assert (net.card.mean, net.card.std, net.card.size) == (found.mean, found.std, size)
    assert net.card.record["preprocessing"]["interpolation"] == interpolation


def test_preprocessing_is_read_from_the_model_itself() -> None:
    model: Any = Residual()
    model.pretrained_cfg = {**IMAGENET, "input_size": (3, 64, 64), "crop_pct": 0.9, "interpolation": "bicubic"}
    for make in (wrap, split):
        card = make(model).card
        assert (card.mean, card.std, card.size) == (*IMAGENET.values(), 64)
        card = make(model, mean=(0.5,), std=(0.5,), size=32).card  # what is given wins
        assert (card.mean, card.std, card.size) == ((0.5,), (0.5,), 32)
        assert "resize" not in card.record["preprocessing"]  # it belongs to the other size
    model.patch_embed = SimpleNamespace(img_size=(48, 48))  # built for another size than its weights
    assert wrap(model).card.size == 48
    del model.pretrained_cfg, model.patch_embed
    model.config = SimpleNamespace(image_size=[40, 40])
    assert wrap(model).card.size == 40


def test_preprocessing_of_an_unknown_kind_is_refused() -> None:
    for given in (object(), "imagenet", {}, SimpleNamespace(transforms=[object()])):
        with pytest.raises(ValueError, match="`preprocessing`"):
            wrap(Residual(), preprocessing=given)


@pytest.mark.parametrize(
    ("size", "augment"),
    [
        (224, {"name": "resized-crop-flip", "size": 224, "scale": [0.25, 1.0]}),
        (96, {"name": "resized-crop-flip", "size": 96, "scale": [0.25, 1.0]}),
        (64, {"name": "crop-flip", "padding": 8}),
        (32, {"name": "crop-flip", "padding": 4}),
    ],
)
def test_the_augmentation_follows_the_size(size: int, augment: dict[str, Any]) -> None:
    assert wrap(Residual(), size=size).card.augment == augment
    own = {"name": "crop-flip", "padding": 1}
    assert wrap(Residual(), size=size, augment=own).card.augment == own


def test_an_unknown_normalisation_is_named_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr("testtime.networks.wrap._warned", set())
    with caplog.at_level(logging.WARNING):
        wrap(Residual(), mean=(0.0,), std=(1.0,))
        assert not caplog.records
        for _ in range(2):
            wrap(Residual())
            split(Residual())
    (record,) = caplog.records
    assert "mean=" in record.getMessage()
    assert "FUNCTION" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_logits_are_picked_from_tensors_of_any_shape() -> None:
    table = torch.zeros(2, 3)
    assert pick_logits((torch.zeros(2), [table], table)) is table
    with pytest.raises(ValueError, match="nothing"):
        pick_logits(())
    assert isinstance(wrap(Residual()), YNet)
