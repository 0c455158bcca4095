"""Statistics of a network: what they are, that collecting them changes nothing else, and how they are stored."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from adapters import pictures
from models import LayersOfTorch, Residual, VisionTransformer, sequential
from testtime import CheckpointError, YNet, collect, data, load, resnet18, resnet26, split
from testtime.data.sets import TensorSet
from testtime.networks.card import Statistics
from testtime.networks.task_loss import read_task_loss
from torch_defaults import DEFAULTS

NETWORKS: dict[str, Callable[[], YNet]] = {
    "group": lambda: resnet26(depth=8, size=16, seed=5),
    "batch": lambda: resnet26(depth=8, size=16, norm="batch", seed=5),
    "post-activation": lambda: resnet18(10, norm="batch", seed=5),
    "sequential": lambda: split(sequential(), "3", mean=(0.5,), std=(0.25,)),
    "residual": lambda: split(Residual(), "norm"),
    "transformer": lambda: split(VisionTransformer(), "block1"),
    "torch's transformer": lambda: split(LayersOfTorch(), "first"),
}


def make(name: str) -> YNet:
    torch.manual_seed(4)
    net = NETWORKS[name]().eval()
    for buffer in net.buffers():
        if buffer.is_floating_point() and buffer.dim() == 1:
            buffer += 0.25  # statistics that are not the initial ones
    return net


def statistics(net: YNet) -> Statistics:
    assert net.statistics is not None
    return net.statistics


def bits(net: YNet) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# What they are


@pytest.mark.parametrize("name", list(NETWORKS))
def test_the_fisher_information_is_the_mean_of_each_images_squared_gradient(name: str) -> None:
    net, images = make(name), pictures(5)
    wanted = {key: torch.zeros_like(p) for key, p in net.named_parameters() if not key.startswith("ssl.")}
    for image in images:
        net.zero_grad()
        logits = net(image[None])
        F.cross_entropy(logits, logits.argmax(1)).backward()
        for key, total in wanted.items():
            total += net.get_parameter(key).grad.square() / len(images)  # type: ignore[union-attr]
    net.zero_grad()
    found = statistics(collect(net, images)).fisher
    assert found.keys() == wanted.keys()
    assert max(float(tensor.max()) for tensor in wanted.values()) > 1e-4
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4 * float(tensor.max()))


@pytest.mark.parametrize("count", [1, 70])  # of several chunks
def test_the_moments_are_those_of_the_norms_before_relu_and_of_the_features(count: int) -> None:
    images = pictures(count)
    for name, layer in (("group", "encoder.1.0.norm1"), ("batch", "encoder.1.0.norm1.0")):
        net = make(name)
        found = statistics(collect(net, images))
        stem = net.encoder[0](net.normalise(images))  # type: ignore[index, operator]
        norm = net.get_submodule(layer)
        if name == "group":
            values = F.group_norm(stem, 8, norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]
        else:
            values = norm(stem)
        features = net.classifier[:-1](net.encode(images))  # type: ignore[index]
        for key, axes, wanted in ((layer, (0, 2, 3), values), ("features", (0,), features)):
            torch.testing.assert_close(found.means[key], wanted.mean(axes), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.variances[key], wanted.var(axes, correction=0), rtol=1e-3, atol=1e-5)
        assert float(values.detach().min()) < 0
        norms = [m for part in (net.encoder, net.classifier) for m in part.modules()]
        assert len(found.means) == 1 + sum(isinstance(m, (nn.GroupNorm, nn.BatchNorm2d)) for m in norms)


def test_the_channels_of_a_layer_norm_are_its_last_axis() -> None:
    net, images = make("transformer"), pictures(6)
    found = statistics(collect(net, images))
    tokens = net.encode(images)
    wanted = net.get_submodule("classifier.block2.norm1")(tokens)  # (N, T, width)
    torch.testing.assert_close(found.means["classifier.block2.norm1"], wanted.mean((0, 1)), rtol=1e-4, atol=1e-5)
    assert found.means["features"].shape == (12,)


def test_the_images_are_a_seeded_choice_that_the_record_names() -> None:
    pixels = (pictures(40) * 255).to(torch.uint8)
    net = make("sequential")
    whole, some = (statistics(collect(net, pixels, count=count)) for count in (2000, 10))
    assert whole.about["images"] == 40
    assert some.about["images"] == 10
    assert whole.about["hash"] != some.about["hash"]
    assert not torch.equal(some.means["features"], statistics(collect(net, pixels[:10])).means["features"])
    from_set = statistics(collect(net, TensorSet("mine", pixels), count=10))
    assert from_set.about == some.about | {"set": "mine"}
    assert same(from_set.fisher, some.fisher)
    assert same(from_set.means, some.means)


def test_the_task_is_measured_on_unseen_images_too() -> None:
    net, images, unseen = make("group"), pictures(6), pictures(9, seed=1)
    alone, both = statistics(collect(net, images)), statistics(collect(net, images, unseen=unseen, count=7))
    other = statistics(collect(net, unseen, count=7)).about
    assert both.about == {**alone.about, "unseen": {name: other[name] for name in ("images", "set", "task")}}
    assert same(both.fisher, alone.fisher)
    assert same(both.means, alone.means)
    collect(net, images, unseen=unseen)
    known, trained = read_task_loss(net), read_task_loss(net, seen=True)
    assert known is not None
    assert trained is not None
    assert (known.source, trained.source) == ("the statistics, 9 unseen images", "the statistics, 6 images")
    assert trained.loss == alone.about["task"]["plain"]
    for others, said in ((unseen[:0], "`unseen` must not be empty"), (torch.zeros(2, 3, 0, 16), "shape")):
        with pytest.raises(ValueError, match=said):
            collect(net, images, unseen=others)


def test_images_in_double_precision_have_the_statistics_of_those_in_single() -> None:
    net, images, unseen = make("group"), pictures(6), pictures(9, seed=1)
    single = statistics(collect(net, images, unseen=unseen))
    double = statistics(collect(net, images.double(), unseen=unseen.double()))
    assert double.about == single.about
    assert same(double.fisher, single.fisher)
    assert same(double.variances, single.variances)


def test_as_many_unseen_images_are_sure_as_are_right() -> None:
    net, unseen = make("group"), (pictures(40, seed=1) * 255).byte()
    probability, predicted = net(unseen).softmax(1).max(1)
    labels = torch.where(torch.arange(40) < 28, predicted, (predicted + 1) % 3)
    right = float((predicted == labels).double().mean())
    assert 0.7 <= right < 1
    about = statistics(collect(net, pictures(6), unseen=TensorSet("others", unseen, labels))).about["unseen"]
    assert about["accuracy"] == right
    assert float((probability > about["confidence"]).double().mean()) == pytest.approx(right, abs=1 / 40)


def test_progress_counts_the_images() -> None:
    seen: list[tuple[int, int]] = []
    collect(make("sequential"), pictures(70), progress=lambda done, total, _: seen.append((done, total)))
    assert seen == [(64, 70), (70, 70)]
    seen.clear()
    collect(
        make("sequential"), pictures(3), unseen=pictures(70), progress=lambda done, total, _: seen.append((done, total))
    )
    assert seen == [(3, 73), (67, 73), (73, 73)]


# What does not change


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["group", "batch", "residual"])
def test_collecting_leaves_the_network_as_it_was(name: str, training: bool) -> None:
    net = make(name).train(training)
    before, mark, hooks = bits(net), net.fingerprint(), list_hooks(net)
    assert collect(net, pictures(3)) is net
    assert same(bits(net), before)
    assert net.fingerprint() == mark
    assert all(module.training == training for module in net.modules())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert list_hooks(net) == hooks


def list_hooks(net: YNet) -> list[Any]:
    hooks = [(module._forward_hooks, module._forward_pre_hooks) for module in net.modules()]
    return [[*own.items()] for pair in hooks for own in pair]


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_collecting_does_not_depend_on_torchs_defaults(name: str) -> None:
    plain, images = statistics(collect(make("batch"), pictures(3))), pictures(3)
    net = make("batch")
    with DEFAULTS[name]():
        collect(net, images)
    assert same(statistics(net).fisher, plain.fisher)
    assert same(statistics(net).means, plain.means)
    assert same(statistics(net).variances, plain.variances)


def test_copies_have_their_own_statistics() -> None:
    net = collect(make("sequential"), pictures(3))
    other = copy.deepcopy(net)
    assert same(statistics(other).fisher, statistics(net).fisher)
    statistics(other).fisher["classifier.9.bias"].zero_()
    assert statistics(net).fisher["classifier.9.bias"].any()
    assert resnet26(depth=8).statistics is None


@pytest.mark.parametrize(
    ("images", "count", "said"),
    [
        ([1, 2], 10, "`images`"),
        (torch.zeros(3, 16, 16), 10, "`images`"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.int64), 10, "`images`"),
        (torch.zeros(0, 3, 16, 16), 10, "`images`"),
        (torch.zeros(2, 1, 16, 16), 10, "channels"),
        (torch.full((2, 3, 16, 16), float("nan")), 10, "finite"),
        (torch.full((2, 3, 16, 16), 2.0), 10, r"\[0, 1\]"),
        (torch.zeros(2, 3, 0, 16), 10, "shape"),
        (torch.zeros(2, 3, 16, 16), 0, "`count`.*0"),
        (torch.zeros(2, 3, 16, 16), 1.5, "`count`.*1.5"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(images: Any, count: Any, said: str) -> None:
    net = make("group")
    with pytest.raises((TypeError, ValueError), match=said):
        collect(net, images, count=count)
    assert net.statistics is None


# Files


@pytest.mark.parametrize("name", ["group", "batch"])
def test_statistics_are_saved_and_loaded_with_the_network(name: str, tmp_path: Path) -> None:
    net = make(name)
    mark = net.fingerprint()
    collect(net, TensorSet("mine", (pictures(4) * 255).to(torch.uint8))).save(tmp_path / "net")
    again = load(tmp_path / "net")
    assert again.fingerprint() == mark
    found, wanted = statistics(again), statistics(net)
    assert found.about == wanted.about
    assert same(found.means, wanted.means)
    assert same(found.variances, wanted.variances)
    assert same(found.fisher, {key: tensor.bfloat16().float() for key, tensor in wanted.fisher.items()})
    again.save(tmp_path / "twice")
    assert (tmp_path / "twice").read_bytes() == (tmp_path / "net").read_bytes()


def test_loading_replaces_the_statistics_of_the_old_weights(tmp_path: Path) -> None:
    make("group").save(tmp_path / "net")
    assert load(tmp_path / "net", collect(make("group"), pictures(2))).statistics is None


def test_a_custom_network_has_statistics_too(tmp_path: Path) -> None:
    net = collect(make("transformer"), pictures(4))
    net.save(tmp_path / "net")
    again = load(tmp_path / "net", make("transformer"))
    assert same(statistics(again).means, statistics(net).means)


def test_half_precision_halves_the_weights_and_loads_as_float32(tmp_path: Path) -> None:
    net = make("batch")
    net.save(tmp_path / "whole")
    net.save(tmp_path / "half", dtype=torch.float16)
    assert (tmp_path / "half").stat().st_size < 0.6 * (tmp_path / "whole").stat().st_size
    names = {name for name, _ in net.named_parameters()}
    wanted = {name: tensor.half().float() if name in names else tensor for name, tensor in bits(net).items()}
    assert same(bits(load(tmp_path / "half")), wanted)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_a_precision_that_cannot_represent_the_weights_is_refused(tmp_path: Path) -> None:
    net = make("batch")
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="`dtype`"):
            net.save(tmp_path / "net", dtype=dtype)
    with torch.no_grad():
        net.classifier[-1].bias[0] = 1e6  # type: ignore[index]
    with pytest.raises(ValueError, match=r"classifier\.4\.bias"):
        net.save(tmp_path / "net", dtype=torch.float16)
    assert not list(tmp_path.iterdir())


def test_a_wide_network_with_statistics_stays_below_16_mb(tmp_path: Path) -> None:
    collect(resnet26(width=2), pictures(1)).save(tmp_path / "net", dtype=torch.float16)
    assert (tmp_path / "net").stat().st_size < 16e6


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("collected") / "net"
    collect(make("batch"), pictures(4)).save(path)
    return path


BIAS, NORM = "statistics/fisher/classifier.4.bias", "encoder.1.0.norm1.0"
Tensors = dict[str, Tensor]
DAMAGES: dict[str, Callable[[Tensors], Tensors]] = {
    "a tensor missing": lambda found: {name: found[name] for name in found if name != BIAS},
    "no tensors": lambda found: {name: found[name] for name in found if "/" not in name},
    "a parameter of the ssl branch": lambda found: found | {"statistics/fisher/ssl.4.bias": torch.zeros(4)},
    "another group": lambda found: found | {"statistics/modes/features": torch.zeros(4)},
    "no group": lambda found: found | {"statistics/": torch.zeros(4)},
    "no name": lambda found: found | {"statistics/fisher/": torch.zeros(4)},
    "another layer": lambda found: found | dict.fromkeys(("statistics/means/x", "statistics/variances/x"), found[BIAS]),
    "a mean without a variance": lambda found: found | {"statistics/means/x": torch.zeros(4)},
    "another shape": lambda found: found | {BIAS: found[BIAS][:-1].clone()},
    "other channels": lambda found: found | {f"statistics/{g}/{NORM}": torch.zeros(9) for g in ("means", "variances")},
    "means of two axes": lambda found: (
        found | {f"statistics/{g}/{NORM}": torch.zeros(4, 4) for g in ("means", "variances")}
    ),
    "NaN": lambda found: found | {BIAS: found[BIAS] * float("nan")},
    "infinite": lambda found: found | {f"statistics/means/{NORM}": torch.full((16,), float("inf"))},
    "a negative Fisher information": lambda found: found | {BIAS: found[BIAS] - 1},
    "a negative variance": lambda found: found | {f"statistics/variances/{NORM}": -torch.ones(16)},
    "integers": lambda found: found | {BIAS: torch.zeros(10, dtype=torch.int64)},
}


def rewrite(path: Path, out: Path, tensors: Tensors, **changes: Any) -> Path:
    """A copy of a file with other tensors and fields of its description, without its checksum."""
    whole = path.read_bytes()
    fields = json.loads(json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])["__metadata__"]["testtime"])
    del fields["sha256"]
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, out, metadata={"testtime": json.dumps(fields | changes)})
    return out


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_malformed_statistics_are_refused_and_the_network_stays(damage: str, collected: Path, tmp_path: Path) -> None:
    assert load(rewrite(collected, tmp_path / "same", load_file(collected))).statistics is not None
    path = rewrite(collected, tmp_path / "net", DAMAGES[damage](load_file(collected)))
    net = resnet26(depth=8, size=16, norm="batch", seed=9)
    before = bits(net)
    for given in (None, net):
        with pytest.raises(CheckpointError, match="net: "):
            load(path, given)
    assert same(bits(net), before)
    assert net.statistics is None
    assert net.training


RECORDS = [3, "text", [], {"x": "a" * 30_000}, {"x": float("inf")}, {"x": json.loads("[" * 99 + "]" * 99)}]


@pytest.mark.parametrize("about", RECORDS)
def test_a_malformed_record_of_statistics_is_refused(about: Any, collected: Path, tmp_path: Path) -> None:
    path = rewrite(collected, tmp_path / "net", load_file(collected), statistics=about)
    with pytest.raises(CheckpointError, match="net: "):
        load(path)


def test_tensors_without_a_record_do_not_belong_to_the_network(collected: Path, tmp_path: Path) -> None:
    make("batch").save(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="statistics/fisher"):
        load(rewrite(tmp_path / "plain", tmp_path / "net", load_file(collected)))


def test_statistics_of_a_set_of_testtime() -> None:
    digits = data.open("digits")
    found = statistics(collect(resnet26(depth=8, channels=1, size=16), digits, count=4))
    assert found.about["set"] == digits.name


# Recommended settings

SETTINGS = {"ttt": {"lr": 0.001, "steps": 1, "copies": 32}, "tent/episodic": {"parts": ["encoder"], "gate": None}}


def test_settings_are_saved_and_loaded_with_the_card(tmp_path: Path) -> None:
    net = make("group").describe(settings=SETTINGS)
    net.save(tmp_path / "net")
    assert load(tmp_path / "net").card == net.card
    assert load(tmp_path / "net").card.settings == SETTINGS


def test_settings_are_a_copy_of_what_was_given() -> None:
    given = {"ttt": {"lr": 0.001}}
    net = make("group").describe(settings=given)
    given["ttt"]["lr"] = 1.0
    assert net.card.settings == {"ttt": {"lr": 0.001}}


WRONG = [
    None, 3, ["ttt"], {"ttt": 3}, {3: {"lr": 1}}, {"ttt": {3: 1}}, {"a\nb": {}}, {"a" * 2000: {}},
    {"ttt": {"lr": float("nan")}}, {"ttt": {"lr": object()}}, {"ttt": {"lr": torch.zeros(1)}},
    {"ttt": {"note": "a" * 30_000}}, {"ttt": {"deep": json.loads("[" * 99 + "]" * 99)}},
]  # fmt: skip


@pytest.mark.parametrize("settings", WRONG)
def test_settings_that_are_not_plain_tables_are_refused(settings: Any) -> None:
    net = make("group")
    with pytest.raises(ValueError, match="`settings`"):
        net.describe(settings=settings)
    assert net.card.settings == {}


def test_a_file_without_settings_loads(tmp_path: Path) -> None:
    make("group").save(tmp_path / "net")
    whole = (tmp_path / "net").read_bytes()
    about = json.loads(json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])["__metadata__"]["testtime"])
    del about["sha256"], about["settings"]
    save_file(load_file(tmp_path / "net"), tmp_path / "old", metadata={"testtime": json.dumps(about)})
    assert load(tmp_path / "old").card.settings == {}
