"""What learns: chosen and frozen parameters, the statistics of Batch Normalization; networks without a branch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import COUNT, close, network, pictures, same, samples
from models import sequential
from testtime import METHODS, Adapter, Card, Episodic, Fixed, Method, Online, Settings, Streams, YNet, split, wrap
from testtime.adaptation import adapters
from testtime.adaptation.objectives import Entropy
from testtime.evaluation.method_specs import MethodSpec
from testtime.precision import choose_precision
from testtime.tensorfile import unpack_text

LR: dict[str, Any] = {"lr": 0.05, "copies": 2}


def moved(net: YNet, adapter: Online) -> set[str]:
    """The parameters that a stream has changed."""
    adapter.predict(pictures())
    learned = dict(adapter.network().named_parameters())
    return {name for name, parameter in net.named_parameters() if not torch.equal(parameter, learned[name])}


def names(net: YNet, *starts: str) -> set[str]:
    return {name for name, _ in net.named_parameters() if name.startswith(starts)}


# ---------------------------------------------------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------------------------------------------------


def biases(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 1 and name.endswith("bias")


def test_each_choice_moves_what_it_says() -> None:
    net = network()
    expected: dict[Any, set[str]] = {
        "encoder": names(net, "encoder"),
        "encoder+ssl": names(net, "encoder", "ssl"),
        ("encoder.0.*", "ssl.2.bias"): {"encoder.0.weight", "encoder.0.bias", "ssl.2.bias"},
        ("*.weight",): {name for name in names(net, "encoder", "ssl") if name.endswith("weight")},
        biases: {name for name in names(net, "encoder", "ssl") if name.endswith("bias")},
    }
    for update, which in expected.items():
        given = list(update) if isinstance(update, tuple) else update
        assert moved(net, Online(net, update=given, **LR)) == which, update
    assert moved(net, Online(net, method="tent", lr=0.05)) == {
        f"{layer}.{name}" for layer in ("encoder.1", "classifier.0") for name in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("kind", "update"),
    [(Online, "encoder+ssl"), (Online, ["encoder*"]), (Online, biases), (Episodic, "all"), (Streams, "encoder")],
)
def test_frozen_parameters_never_move(kind: Any, update: Any) -> None:
    net = network()
    net.encoder[0].requires_grad_(False)  # type: ignore[index]
    more = {"count": COUNT} if kind is Streams else {}
    adapter = kind(net, update=update, **more, **LR)
    free = kind(network(), update=update, **more, **LR)
    assert not close(adapter.predict(pictures()), free.predict(pictures()))
    if kind is not Episodic:
        learned = adapter.network(1) if kind is Streams else adapter.network()
        assert torch.equal(learned.encoder[0].weight, net.encoder[0].weight)
        assert not learned.encoder[0].weight.requires_grad
        assert not torch.equal(learned.encoder[3].bias, net.encoder[3].bias)


def test_a_selection_of_everything_is_the_named_choice_bit_for_bit() -> None:
    net = network()
    one, other = Online(net, **LR), Online(net, update=["encoder.*", "ssl.*"], **LR)
    for seed in (0, 1):
        assert same(one.predict(pictures(seed=seed)), other.predict(pictures(seed=seed)))


@pytest.mark.parametrize("kind", [Online, Episodic])
def test_a_selection_of_nothing_is_refused_with_names(kind: Any) -> None:
    net = network()
    with pytest.raises(ValueError, match=r"`update` selects no parameters.*head\.\*.*encoder\.0\.weight"):
        kind(net, update=["head.*"])
    with pytest.raises(ValueError, match="`update` selects no parameters"):
        kind(net, update=lambda name, parameter: False)
    with pytest.raises(ValueError, match=r"none has `requires_grad`.*requires_grad_\(True\)"):
        kind(network().requires_grad_(False))
    Fixed(network().requires_grad_(False)).predict(pictures())


@pytest.mark.parametrize("update", ["norm", "norm-early"])
def test_a_model_without_normalisation_layers_is_named_with_a_choice_that_works(update: Any) -> None:
    net = wrap(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)))
    with pytest.raises(ValueError, match=r"`update`.*no normalisation layers.*update=\"encoder\""):
        Online(net, method="tent", update=update)
    assert moved(net, Online(net, method="tent", update="encoder", lr=0.05)) == names(net, "encoder")


@pytest.mark.parametrize("wrong", [[], [""], [3], "encoder.*", 7, None])
def test_what_is_no_choice_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"`update` must be one of norm, .*patterns"):
        Settings(steps=1, update=wrong)


def test_the_choice_is_part_of_a_state() -> None:
    net = network()
    adapter = Online(net, update=["encoder.0.*"], **LR)
    adapter.predict(pictures())
    state = adapter.state_dict()
    again = Online(net, update=("encoder.0.*",), **LR)
    again.load_state_dict(state)
    assert same(again.predict(pictures(seed=1)), adapter.predict(pictures(seed=1)))
    for other in (["encoder.1.*"], biases, "encoder"):
        with pytest.raises(ValueError, match="another settings"):
            Online(net, update=other, **LR).load_state_dict(state)
    assert Online(net, update=biases).describe()["update"] == "biases"
    json.dumps(adapter.describe())


def test_a_study_takes_patterns() -> None:
    spec = MethodSpec("one", "online", settings={"update": ["encoder.0.*"]})
    assert spec.describe(network())["settings"]["update"] == ["encoder.0.*"]
    with pytest.raises(ValueError, match="`update` must be a string or a list of strings"):
        MethodSpec("one", "online", settings={"update": [1]})


# ---------------------------------------------------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------------------------------------------------


def foreign() -> YNet:
    """A network with Batch Normalization that was not trained here."""
    return network("batch").describe(record={})


def statistics(net: YNet) -> list[Tensor]:
    return [tensor for name, tensor in net.named_buffers() if "running" in name]


@pytest.mark.parametrize("kind", [Online, Episodic, lambda net, **given: Streams(net, COUNT, **given)])
def test_single_images_do_not_move_the_statistics_of_a_foreign_network(kind: Callable[..., Adapter]) -> None:
    net = foreign()
    adapter, chosen = kind(net, **LR), kind(net, statistics="source", **LR)
    assert adapter.settings.statistics == "source"
    assert same(adapter.predict(pictures(), samples()), chosen.predict(pictures(), samples()))
    if isinstance(adapter, Online):
        assert all(map(torch.equal, statistics(adapter.network()), statistics(net)))


def test_the_statistics_of_others_stay_as_they_were_in_version_0_1() -> None:
    jointly = network("batch")
    assert Episodic(jointly).settings.statistics == "running"
    assert Online(foreign(), share="batch").settings.statistics == "running"
    assert Online(foreign(), method="tent").settings.statistics == "batch"
    assert Online(network()).settings.statistics == Fixed(foreign()).settings.statistics == "running"
    branch_only = network("batch").describe(record={"configuration": {}, "branch": {}})
    assert Episodic(branch_only).settings.statistics == "source"


@pytest.mark.parametrize("kind", [Online, lambda net, **given: Streams(net, COUNT, **given)])
def test_a_stream_of_single_images_that_moves_statistics_warns(kind: Callable[..., Adapter]) -> None:
    for net, given in ((network("batch"), {}), (foreign(), {"statistics": "running"})):
        with pytest.warns(UserWarning, match='statistics="source"') as caught:
            kind(net, **given)
        assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for net, given in ((network(), {}), (foreign(), {}), (network("batch"), {"steps": 0})):
            kind(net, **given)
        Online(network("batch"), share="batch")
        Episodic(network("batch"))


def test_statistics_of_a_branch_that_only_observes_do_not_leak_between_streams() -> None:
    with pytest.warns(UserWarning, match="statistics"):
        streams, alone = Streams(network("batch"), 2, update="all", **LR), Online(network("batch"), update="all", **LR)
    for seed in range(3):
        images = pictures(2, seed=seed)
        expected = alone.predict(images[:1], samples(seed, 1))
        assert close(streams.predict(images, samples(seed, 1).expand(2))[:1], expected)


# ---------------------------------------------------------------------------------------------------------------------
# Precision, and states of version 0.1
# ---------------------------------------------------------------------------------------------------------------------


def test_the_default_precision_is_that_of_the_device_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [choose_precision(torch.device(name)) for name in ("cuda", "cuda:1", "cpu")] == ["tf32", "tf32", "fp32"]
    net = network()
    assert Online(net).describe()["precision"] == Fixed(net).describe()["precision"] == "fp32"
    assert MethodSpec("fixed", "fixed").describe(net)["settings"] == {}
    monkeypatch.setattr(adapters, "choose_precision", lambda device: "tf32")
    monkeypatch.setattr("testtime.evaluation.method_specs.choose_precision", lambda device: "tf32")
    assert Online(net).describe()["precision"] == "tf32"
    assert Online(net, precision="fp32").describe()["precision"] == "fp32"
    assert MethodSpec("fixed", "fixed").describe(net)["settings"] == {"precision": "tf32"}
    assert MethodSpec("fixed", "fixed", settings={"precision": "fp32"}).describe(net)["settings"] == {
        "precision": "fp32"
    }


# What version 0.1 wrote on a CPU.
WRITTEN = (
    '{"augment": "CropFlip(padding=2, flip=True)", "copies": 32, "guard": 3.0, "lr": 0.001, "mirrored": false, '
    '"optimizer": "SGD", "precision": "fp32", "seed": 0, "share": "image", "steps": 1, "task": "Rotation()", '
    '"threshold": 1.0, "update": "encoder+ssl"}'
)


@pytest.mark.filterwarnings("ignore:A stream of single images")
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_states_of_version_0_1_still_load(norm: str) -> None:
    adapter = Online(network(norm))
    found, written = json.loads(unpack_text(adapter.state_dict()["settings"])), json.loads(WRITTEN)
    for name in ("task", "augment"):
        assert found.pop(name).startswith(written.pop(name).split("(")[0])
    assert found == written


# ---------------------------------------------------------------------------------------------------------------------
# Networks without a branch, and with an untrained one
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ttt", "best", Method("own", "own", "own")])
def test_a_method_that_needs_a_branch_refuses_a_network_without_one(method: Any) -> None:
    net = network("no branch")
    for kind in (Online, Episodic, lambda net, **given: Streams(net, COUNT, **given)):
        with pytest.raises(ValueError, match=r"needs a self-supervised branch.*\(norm, dua, tent, "):
            kind(net, method=method)


@pytest.mark.filterwarnings("ignore:The method .* needs several images")
@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if set(one.needs) <= {"batch"}])
def test_the_other_methods_do_not_need_it(method: str) -> None:
    """The same layers, with and without a branch, predict the same."""
    whole = network()
    encoder, bare = whole.encoder, network("no branch")
    assert isinstance(encoder, nn.Sequential)
    bare.encoder = nn.Sequential(*encoder, whole.classifier)
    # Others learn in one part only, or draw by the order of the weights.
    equal = METHODS[method].settings.get("update", "norm") == "norm"
    for kind in (Online, Episodic, lambda net, **given: Streams(net, COUNT, **given)):
        one, other = (kind(net, method=method, optimizer=torch.optim.SGD, **LR) for net in (whole, bare))
        for seed in (0, 1) if equal else (0,):
            found, expected = other.predict(pictures(seed=seed)), one.predict(pictures(seed=seed))
            assert torch.allclose(found.logits_before[:1], expected.logits_before[:1], atol=1e-4)
            if equal:
                assert close(found, expected, 1e-4)


def test_fixed_predicts_with_any_network() -> None:
    net = network("no branch")
    answers = Fixed(net).predict(pictures())
    with torch.no_grad():
        logits = net(pictures())
    assert torch.allclose(answers.logits, logits, atol=1e-5)
    assert torch.allclose(answers.confidence, logits.softmax(1).amax(1), atol=1e-5)


def test_a_method_of_ones_own_moves_what_there_is() -> None:
    own = Method("own", "own", "own", Entropy, settings={"share": "batch"})  # update is "encoder+ssl"
    net = network("no branch")
    assert moved(net, Online(net, method=own, lr=0.05)) == names(net, "encoder")


def test_buffers_that_are_not_saved_survive() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.register_buffer("scale", torch.tensor(2.0), persistent=False)

        def forward(self, images: Tensor) -> Tensor:
            return self.conv(images) * self.scale

    torch.manual_seed(0)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    net = YNet(Scaled(), pool, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), Card(size=16))
    adapter, streams = Online(net, **LR), Streams(net, COUNT, **LR)
    for learned in (adapter, streams):
        learned.predict(pictures())
    for made in (adapter.network(), streams.network(1)):
        assert made.encoder.scale == 2  # type: ignore[comparison-overlap]
        assert not torch.equal(made.encoder.conv.weight, net.encoder.conv.weight)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("kind", [Fixed, Episodic, Online, lambda net: Streams(net, 2)])
def test_a_branch_that_does_not_fit_the_task_is_refused_when_an_adapter_is_made(kind: Callable[..., Adapter]) -> None:
    net = split(sequential().eval(), "3", 3, mean=(0.5,), std=(0.2,))
    with pytest.raises(ValueError, match=r"'rotation' needs 4 outputs, .* has 3"):
        kind(net)
    Online(net, method="tent")  # does not use the branch


def test_an_untrained_branch_warns_unless_nothing_learns_from_it() -> None:
    net = split(sequential(), "3", size=16, mean=(0.5,), std=(0.25,)).eval()
    for kind in (Online, Episodic):
        with pytest.warns(UserWarning, match="branch is not trained.*fit_branch") as caught:
            kind(net)
        assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fixed(net)
        Online(net, steps=0)
        Online(net, method="tent")
        Online(YNet(net.encoder, net.classifier, net.ssl, net.card))  # trained elsewhere, for all that is known
        Online(net.describe(record={"branch": {"error": 0.1}}))


@pytest.mark.parametrize("method", ["plain", "alp"])
def test_a_branch_that_the_training_did_not_include_warns(method: str) -> None:
    record: dict[str, Any] = {"configuration": {"recipe": {"method": method}}}
    net = network().describe(record=record)
    with pytest.warns(UserWarning, match="branch is not trained"):
        Online(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fixed(net)
        Online(net, steps=0)
        Episodic(net, method="memo")
        Online(net.describe(record=record | {"branch": {"error": 0.1}}))
        Online(net.describe(record={"configuration": {"recipe": {"method": "joint"}}}))
