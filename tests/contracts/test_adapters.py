"""The contract of all adapters: what holds for each of them, whatever it learns."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import testtime.tensorfile
from adapters import (
    ADAPTERS,
    CERTAIN,
    COUNT,
    DEVICE,
    INF,
    LEARNING,
    MEASURING,
    MOMENTUM,
    NAN,
    OPTIMIZERS,
    REMEMBERING,
    SELF_SUPERVISED,
    adapter_for,
    close,
    network,
    network_for,
    pictures,
    same,
    samples,
)
from models import sequential
from testtime import (
    Adapter,
    CropFlip,
    Episodic,
    Fixed,
    Masked,
    Online,
    Prediction,
    Rotation,
    YNet,
    load,
    resnet26,
    split,
)
from testtime.adaptation.settings import Settings
from testtime.adaptation.streams import Streams
from testtime.randomness import Draws
from testtime.storage import FileError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The self-supervised branch is not trained"),
    pytest.mark.filterwarnings("ignore:The method .* needs several images"),
]

# ---------------------------------------------------------------------------------------------------------------------
# The contract
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(ADAPTERS))
def test_the_users_network_stays_as_it_is(name: str, training: bool) -> None:
    net = network_for(name).train(training)
    first, second, *_ = net.encoder.children()
    second.eval()  # a mixed mode is the user's own business
    first.get_parameter("weight").requires_grad_(False)
    tensors = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    learning = [parameter.requires_grad for parameter in net.parameters()]
    hooks = [len(module._forward_hooks) for module in net.modules()]
    adapter = adapter_for(name, net)
    adapter.predict(pictures())
    adapter.train()
    adapter(pictures())
    adapter.reset()
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert [parameter.requires_grad for parameter in net.parameters()] == learning
    assert all(parameter.grad is None for parameter in net.parameters())
    assert [len(module._forward_hooks) for module in net.modules()] == hooks


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_the_mode_and_later_changes_of_the_users_network_do_not_matter(name: str) -> None:
    net = network_for(name)
    expected = adapter_for(name, net).predict(pictures())
    assert same(adapter_for(name, net.train()).predict(pictures()), expected)
    adapter = adapter_for(name, net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert same(adapter.predict(pictures()), expected)


@pytest.mark.parametrize("name", MEASURING)
def test_predictions_have_all_their_fields_and_no_graph(name: str) -> None:
    answers = adapter_for(name).predict(pictures())
    assert answers.logits.shape == answers.logits_before.shape == (COUNT, 10)
    for field in ("loss_before", "loss_after", "confidence"):
        assert getattr(answers, field).shape == (COUNT,)
        assert getattr(answers, field).dtype == torch.float32
    assert answers.adapted.dtype == answers.rolled_back.dtype == torch.bool
    assert answers.adapted.tolist() == [name in LEARNING] * COUNT
    assert answers.rolled_back.tolist() == [False] * COUNT
    assert ((answers.confidence >= 0) & (answers.confidence <= 1)).all()
    assert torch.equal(answers.classes, answers.logits.argmax(1))
    assert len(answers) == COUNT
    for field in fields(Prediction):
        tensor = getattr(answers, field.name)
        assert not tensor.requires_grad
        assert tensor.grad_fn is None
        assert not tensor.is_inference()


@pytest.mark.parametrize("name", SELF_SUPERVISED)
def test_before_learning_an_adapter_says_what_the_network_says(name: str) -> None:
    net = network_for(name)
    where = {"streams": samples(0, 1)} if "streams" in name else {}
    answers = adapter_for(name, net).predict(pictures(1), **where)
    image = pictures(1)
    with torch.no_grad():
        assert torch.allclose(answers.logits_before, net(image), atol=1e-5)
        if "vit" in name:
            views, targets = Masked().probe(image)
            losses = Masked().loss(net.self_supervise(views), targets)
            confidence = torch.exp(-losses.mean()[None])
        else:
            turned = torch.cat([torch.rot90(image, turn, (2, 3)) for turn in range(4)])
            losses = F.cross_entropy(net.self_supervise(turned), samples(0, 4), reduction="none")
            confidence = torch.exp(-losses[:1])
    assert torch.allclose(answers.loss_before, losses.mean()[None], atol=1e-5)
    assert torch.allclose(answers.confidence, confidence, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in LEARNING if name in SELF_SUPERVISED])
def test_no_steps_are_no_adaptation(name: str) -> None:
    net = network_for(name)
    adapter = adapter_for(name, net, steps=0)
    assert same(adapter.predict(pictures()), Fixed(net).predict(pictures()))
    assert same(adapter.predict(pictures()), Fixed(net).predict(pictures()))
    assert (adapter.seen, adapter.adapted) == (2 * COUNT, 0)


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_the_same_seed_gives_the_same_and_another_another(name: str) -> None:
    one, again, other = (adapter_for(name, seed=seed) for seed in (3, 3, 4))
    for call in range(2):
        expected = one.predict(pictures(seed=call))
        assert same(again.predict(pictures(seed=call)), expected)
        assert torch.equal(other.predict(pictures(seed=call)).logits, expected.logits) == (name in CERTAIN)


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_a_sample_number_decides_the_augmentations(name: str) -> None:
    counted, numbered, other = adapter_for(name), adapter_for(name), adapter_for(name)
    numbers = samples() if "streams" not in name else torch.zeros(COUNT, dtype=torch.int64)
    expected = counted.predict(pictures())
    assert same(numbered.predict(pictures(), numbers.to(torch.int32)), expected)
    assert torch.equal(other.predict(pictures(), numbers + 7).logits, expected.logits) == (name in CERTAIN)


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_reset_is_exact(name: str) -> None:
    adapter = adapter_for(name)
    first = [adapter.predict(pictures(seed=call)) for call in range(2)]
    adapter.reset()
    assert (adapter.seen, adapter.adapted, adapter.rolled_back) == (0, 0, 0)
    again = [adapter.predict(pictures(seed=call)) for call in range(2)]
    assert all(same(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", REMEMBERING)
def test_what_was_learned_lives_on(name: str) -> None:
    adapter = adapter_for(name)
    first, second = (adapter.predict(pictures(), samples()) for _ in range(2))
    assert not torch.equal(first.logits_before, second.logits_before)


@pytest.mark.parametrize("kind", [Fixed, Episodic, Online])
def test_a_mirrored_answer_is_the_mean_of_both_and_changes_no_learning(kind: Callable[..., Adapter]) -> None:
    net, images = network(), pictures()
    plain = kind(net).predict(images)
    mirrored = kind(net, mirrored=True).predict(images)
    with torch.no_grad():
        both = (net(images) + net(images.flip(-1))) / 2
    fresh = 1 if kind is Online else len(images)  # a stream has learned when its second image comes
    assert torch.allclose(mirrored.logits_before[:fresh], both[:fresh], atol=1e-5)
    assert torch.equal(mirrored.loss_after, plain.loss_after)
    assert not torch.allclose(mirrored.logits, plain.logits)


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_gradient_modes_of_the_caller_do_not_matter(name: str) -> None:
    net = network_for(name)
    expected = adapter_for(name, net).predict(pictures())
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        adapter = adapter_for(name, net)
        with mode():
            assert same(adapter.predict(pictures()), expected)


def test_images_that_want_a_gradient_are_taken_without_one() -> None:
    watched = pictures().requires_grad_(True)
    assert same(Online(network(), copies=4).predict(watched), Online(network(), copies=4).predict(pictures()))
    assert watched.grad is None


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_everything_may_be_born_in_inference_mode(name: str) -> None:
    expected = [adapter_for(name).predict(pictures(), samples(call)) for call in range(1)]
    with torch.inference_mode():
        net = network_for(name)
        adapter, images, numbers = adapter_for(name, net), pictures(), samples()
        if "vit" not in name:  # builders make ordinary tensors
            assert net.encoder[0].weight.is_inference()  # type: ignore[index]
    assert same(adapter.predict(images, numbers), expected[0])  # used outside
    with torch.inference_mode():
        adapter.reset()
        assert same(adapter.predict(images, numbers), expected[0])  # and inside


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_calling_gives_the_logits(name: str) -> None:
    one, other = adapter_for(name), adapter_for(name)
    assert torch.equal(one(pictures()), other.predict(pictures()).logits)
    assert isinstance(one, nn.Module)
    assert list(one.parameters()) == []


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_how_images_lie_in_memory_does_not_matter(name: str) -> None:
    expected = adapter_for(name).predict(pictures())
    strange = pictures().contiguous(memory_format=torch.channels_last)
    assert same(adapter_for(name).predict(strange), expected)
    strided = pictures().new_zeros(COUNT, 3, 16, 32)[..., ::2].copy_(pictures())
    assert same(adapter_for(name).predict(strided), expected)


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_bytes_are_the_floats_they_stand_for(name: str) -> None:
    whole = (pictures() * 255).round().to(torch.uint8)
    assert close(adapter_for(name).predict(whole), adapter_for(name).predict(whole.float() / 255), 1e-4)


@pytest.mark.parametrize("name", SELF_SUPERVISED)
def test_oblong_images_are_taken(name: str) -> None:
    oblong = Draws.of(0, samples()).uniform(3, 16, 24)
    net = network_for(name)
    if "vit" in name:
        with pytest.raises(ValueError, match="for images of 16×16, got 16×24"):
            adapter_for(name, net).predict(oblong, samples())
        return
    answers = adapter_for(name, net).predict(oblong, samples())
    with torch.no_grad():
        expected = net(oblong[:1])
    assert torch.allclose(answers.logits_before[:1], expected, atol=1e-5)
    assert answers.loss_before.isfinite().all()


def test_there_is_no_place_for_labels() -> None:
    for kind in (Fixed, Episodic, Online, Streams):
        accepted = set(inspect.signature(kind.predict).parameters) | set(inspect.signature(kind.forward).parameters)
        assert accepted <= {"self", "images", "samples", "streams"}
        with pytest.raises(TypeError, match="labels"):
            kind.predict(None, pictures(), labels=torch.zeros(3))  # type: ignore[call-arg]


# ---------------------------------------------------------------------------------------------------------------------
# Input that is wrong
# ---------------------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Tensor, str]] = {
    "one image": (pictures()[0], r"`images` must be \(N, C, H, W\), got \(3, 16, 16\); for one image add an axis"),
    "two axes": (torch.zeros(COUNT, 5), r"`images` must be \(N, C, H, W\), got \(3, 5\)"),
    "no pixels": (torch.zeros(COUNT, 3, 0, 16), r"`images` must be \(N, C, H, W\)"),
    "channels": (torch.zeros(COUNT, 4, 16, 16), "`images` must have 3 channels, got 4"),
    "integers": (torch.zeros(COUNT, 3, 16, 16, dtype=torch.int64), r"floats in \[0, 1\], got torch.int64"),
    "booleans": (torch.zeros(COUNT, 3, 16, 16, dtype=torch.bool), "got torch.bool"),
    "normalised": (pictures() * 2 - 1, r"must be in \[0, 1\], got -0.9.* the network normalises them itself"),
    "bytes as floats": (pictures() * 255, r"must be in \[0, 1\]"),
}


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_wrong_images_are_refused_and_leave_no_trace(name: str) -> None:
    adapter, untouched = adapter_for(name), adapter_for(name)
    for one in (adapter, untouched):
        one.predict(pictures())
    for what, (images, said) in WRONG.items():
        with pytest.raises(ValueError, match=said):
            adapter.predict(images)
        assert (adapter.seen, adapter.adapted) == (untouched.seen, untouched.adapted), what
    assert same(adapter.predict(pictures(seed=1)), untouched.predict(pictures(seed=1)))


@pytest.mark.parametrize("name", ["fixed", "episodic", "online", "streams"])
def test_what_is_no_tensor_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="`images` must be a tensor, got list"):
        adapter_for(name).predict([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`images` must be a tensor, got ndarray"):
        adapter_for(name).predict(pictures(2).cpu().numpy())  # type: ignore[arg-type]


def test_one_image_for_streams_is_told_to_be_one() -> None:
    with pytest.raises(ValueError, match="for one image add an axis"):
        Streams(network(), 5).predict(pictures()[0])


@pytest.mark.parametrize(
    "numbers", [torch.arange(2), torch.zeros(COUNT), torch.arange(3)[:, None], torch.zeros(COUNT, dtype=torch.bool)]
)
@pytest.mark.parametrize("name", ["fixed", "episodic", "online", "streams"])
def test_wrong_sample_numbers_are_refused_and_leave_no_trace(name: str, numbers: Tensor) -> None:
    adapter, untouched = adapter_for(name), adapter_for(name)
    with pytest.raises(ValueError, match="`samples` must be 3 integers, got torch"):
        adapter.predict(pictures(), numbers)
    assert same(adapter.predict(pictures()), untouched.predict(pictures()))


def test_sample_numbers_that_are_no_tensor_are_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="`samples` must be"):
        Online(network()).predict(pictures(), [0, 1, 2])  # type: ignore[arg-type]


def test_colour_images_for_a_grey_network_are_refused() -> None:
    adapter = Fixed(resnet26(depth=8, channels=1, size=16))
    with pytest.raises(ValueError, match="`images` must have 1 channels, got 3"):
        adapter.predict(pictures())


@pytest.mark.parametrize("name", ["fixed", "episodic", "online", "streams"])
def test_no_images_have_no_answers(name: str) -> None:
    adapter, untouched = adapter_for(name), adapter_for(name)
    nothing = {"streams": samples(0, 0)} if name == "streams" else {}
    answers = adapter.predict(pictures(0), **nothing)
    assert answers.logits.shape == (0, 10)
    assert len(answers) == 0
    assert same(adapter.predict(pictures()), untouched.predict(pictures()))


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_a_picture_of_nans_is_guarded_and_leaves_no_trace(name: str) -> None:
    adapter, untouched = adapter_for(name), adapter_for(name)
    for one in (adapter, untouched):
        one.predict(pictures(), samples())
    bad = pictures()
    bad[:, 1, 4, 4] = NAN
    answers = adapter.predict(bad, samples(3))
    assert answers.rolled_back.tolist() == [name in LEARNING] * COUNT
    assert answers.adapted.tolist() == [False] * COUNT
    assert adapter.rolled_back == (COUNT if name in LEARNING else 0)
    for call in (6, 9):
        after = adapter.predict(pictures(seed=call), samples(call))
        assert same(after, untouched.predict(pictures(seed=call), samples(call)))
        assert after.logits.isfinite().all()


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "name", ["episodic", "episodic, batch norm, in parallel", "online", "streams", "streams, two at a time"]
)
def test_one_bad_picture_spoils_no_other(name: str, bad: float, normalises: bool) -> None:
    torch.manual_seed(0)
    net = split(sequential(), "3", size=16, **({"mean": (0.5,), "std": (0.5,)} if normalises else {})).eval()
    adapter, untouched = adapter_for(name, net), adapter_for(name, net)
    images = pictures()
    images[1] = bad
    answers = adapter.predict(images, samples())
    assert answers.rolled_back.tolist() == [False, True, False]
    good = torch.tensor([0, 2])
    where = {"streams": good} if "streams" in name else {}
    expected = untouched.predict(pictures()[good], good, **where)
    assert close(answers[good], expected)


@pytest.mark.filterwarnings("ignore:A stream of single images moves the running statistics")
def test_an_interrupted_step_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stops an adapter in the middle of a step, e.g. control-C, its state is the one before the call."""

    class Stopping(Rotation):
        calls = -1

        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            Stopping.calls -= 1
            if Stopping.calls == 0:
                raise KeyboardInterrupt
            return super().loss(outputs, targets)

    if DEVICE != "cpu":
        monkeypatch.setenv("TESTTIME_KERNELS", "off")  # a recorded step runs no Python
    net = network("batch")
    adapter, untouched = (Online(net, steps=2, lr=0.01, copies=4, task=Stopping()) for _ in range(2))
    for one in (adapter, untouched):
        one.predict(pictures(1), samples(0, 1))
    Stopping.calls = 3  # an observation, a step, and in the middle of the second step
    with pytest.raises(KeyboardInterrupt):
        adapter.predict(pictures(1, seed=1), samples(1, 1))
    assert adapter.seen == 1
    after, expected = (one.predict(pictures(1, seed=2), samples(2, 1)) for one in (adapter, untouched))
    assert same(after, expected)


# ---------------------------------------------------------------------------------------------------------------------
# State
# ---------------------------------------------------------------------------------------------------------------------

RESUMED = {
    "online": "tt.Online(net, lr=0.01, copies=4)",
    "steps": "tt.Online(net, lr=0.01, copies=4, steps=2, update='encoder', seed=5, threshold=0.9)",
    "shared": "tt.Online(net, lr=0.01, copies=4, share='batch')",
    "momentum": "tt.Online(net, lr=0.01, copies=4, optimizer=functools.partial(torch.optim.SGD, momentum=0.9))",
    "adam": "tt.Online(net, lr=0.001, copies=4, optimizer=torch.optim.Adam)",
    "streams": "Streams(net, 3, lr=0.01, copies=4)",
    "streams with momentum": "Streams(net, 3, copies=4, optimizer=functools.partial(torch.optim.SGD, momentum=0.9))",
    "episodic": "tt.Episodic(net, steps=2, copies=4)",
    "fixed": "tt.Fixed(net)",
}
CONTINUE = """
import functools, json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
import testtime as tt
from testtime.adaptation.streams import Streams

torch.set_num_threads(1)
folder = Path(sys.argv[1])
net = tt.load(folder / "net")
images = load_file(folder / "images")["images"]
logits, counts = {}, {}
for number, text in enumerate(json.loads((folder / "resumed.json").read_text())):
    adapter = eval(text)
    adapter.load(folder / f"state{number}")
    logits[str(number)] = torch.cat([adapter(images[:3]), adapter(images[3:])])
    counts[number] = [adapter.seen, adapter.adapted, adapter.rolled_back]
save_file(logits, folder / "logits")
(folder / "counts.json").write_text(json.dumps(list(counts.values())))
"""


def test_a_saved_stream_continues_bit_for_bit_in_a_new_process(tmp_path: Path) -> None:
    names = {"tt": testtime, "torch": torch, "functools": functools, "Streams": Streams}
    images = pictures(9, seed=3)
    network("resnet").save(tmp_path / "net")
    save_file({"images": images[3:]}, tmp_path / "images")
    (tmp_path / "resumed.json").write_text(json.dumps(list(RESUMED.values())))
    expected, counts = [], []
    for number, text in enumerate(RESUMED.values()):
        adapter = eval(text, names | {"net": load(tmp_path / "net")})
        adapter(images[:3])
        adapter.save(tmp_path / f"state{number}")
        expected.append(torch.cat([adapter(images[3:6]), adapter(images[6:])]))
        counts.append([adapter.seen, adapter.adapted, adapter.rolled_back])
    subprocess.run([sys.executable, "-W", "error", "-c", CONTINUE, str(tmp_path)], check=True, timeout=120)
    continued = load_file(tmp_path / "logits")
    for number, name in enumerate(RESUMED):
        assert torch.equal(continued[str(number)], expected[number]), name
    assert json.loads((tmp_path / "counts.json").read_text()) == counts


def test_a_stream_whose_optimizer_keeps_more_than_tensors_is_not_saved_in_part() -> None:
    adapter = Online(network(), copies=4, lr=0.02, optimizer=OPTIMIZERS["lbfgs"])
    adapter(pictures())
    with pytest.raises(ValueError, match=r"The optimizer's '.*' is not a tensor, so this state cannot be saved"):
        adapter.state_dict()


def test_a_stream_of_a_users_model_can_be_resumed() -> None:
    torch.manual_seed(0)
    net = split(sequential(), "3").eval()
    one, other = Online(net, copies=4, lr=0.01), Online(net, copies=4, lr=0.01)
    one(pictures())
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(pictures(seed=1)), other(pictures(seed=1)))


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_state_is_a_copy(name: str) -> None:
    adapter = adapter_for(name)
    adapter.predict(pictures())
    state = adapter.state_dict()
    before = {key: tensor.clone() for key, tensor in state.items()}
    expected = adapter.predict(pictures(seed=1))
    assert all(torch.equal(tensor, before[key]) for key, tensor in state.items())
    other = adapter_for(name)
    other.predict(pictures(seed=7))
    other.load_state_dict(state)
    assert same(other.predict(pictures(seed=1)), expected)
    assert all(torch.equal(tensor, before[key]) for key, tensor in state.items())


@pytest.mark.filterwarnings("ignore:A stream of single images moves the running statistics")
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_what_online_has_learned_is_a_network(norm: Any) -> None:
    adapter = Online(network(norm), copies=4, lr=0.05)
    untouched = adapter.network()
    assert all(torch.equal(tensor, network(norm).state_dict()[name]) for name, tensor in untouched.state_dict().items())
    with torch.inference_mode():
        adapter(pictures(seed=0))
        net = adapter.network()
    assert all(parameter.requires_grad for parameter in net.parameters())
    net(pictures(seed=1)).sum().backward()  # it can be trained on
    answers = adapter.predict(pictures(seed=1)[:1])
    assert torch.allclose(answers.logits_before, Fixed(net)(pictures(seed=1)[:1]), atol=1e-5)
    assert not torch.allclose(Fixed(net)(pictures(seed=1)), Fixed(untouched)(pictures(seed=1)), atol=1e-3)


def test_an_untouched_stream_can_be_saved_and_loaded(tmp_path: Path) -> None:
    Online(network(), copies=4).save(tmp_path / "state")
    adapter = Online(network(), copies=4)
    adapter(pictures())
    adapter.load(tmp_path / "state")
    assert adapter.seen == 0
    assert same(adapter.predict(pictures()), Online(network(), copies=4).predict(pictures()))


@functools.cache
def foreign_states() -> dict[str, tuple[dict[str, Tensor], str]]:
    given: dict[str, Any] = {"copies": 4, "lr": 0.01}

    def state(adapter: Adapter, **changes: Tensor | None) -> dict[str, Tensor]:
        adapter.predict(pictures())
        changed = adapter.state_dict() | changes
        return {key: tensor for key, tensor in changed.items() if tensor is not None}

    own = Online(network(), **given)
    weight = "learner/encoder.0.weight"
    return {
        "another kind": (state(Streams(network(), COUNT, **given)), "another adapter: Streams, here Online"),
        "another network": (state(Online(network(seed=2), **given)), "another network: "),
        "another lr": (state(Online(network(), copies=4, lr=0.02)), r"another settings: lr: 0.02 there, 0.01 now\.$"),
        "another seed": (state(Online(network(), seed=1, **given)), r"another settings: seed: 1 there, 0 now\.$"),
        "another optimizer": (state(Online(network(), optimizer=MOMENTUM, **given)), "another settings: .*momentum"),
        "no state": ({"weight": torch.zeros(3)}, "not an adapter's state"),
        "no counts": (state(own, counts=None), "'counts'"),
        "a missing tensor": (state(own, **{weight: None}), "tensor 'encoder.0.weight' is missing"),
        "another shape": (state(own, **{weight: torch.zeros(1, 2)}), "another shape"),
        "a foreign memory": (
            state(own, **{"learner/optimizer/momentum_buffer/nobody": torch.zeros(1)}),
            "The state does not fit: .*'nobody'",
        ),
        "a foreign tensor": (state(own, **{"learner/extra": torch.zeros(1)}), "The state does not fit: .*extra"),
        "counts of another shape": (state(own, counts=torch.zeros(2, dtype=torch.int64)), "counts"),
    }


@pytest.mark.parametrize("what", list(foreign_states()))
def test_a_state_that_belongs_elsewhere_is_refused_and_changes_nothing(what: str) -> None:
    state, said = foreign_states()[what]
    adapter, untouched = (Online(network(), copies=4, lr=0.01) for _ in range(2))
    for one in (adapter, untouched):
        one.predict(pictures(seed=5))
    with pytest.raises(ValueError, match=said):
        adapter.load_state_dict(state)
    assert adapter.seen == COUNT
    assert same(adapter.predict(pictures(seed=6)), untouched.predict(pictures(seed=6)))


def test_a_corrupted_state_file_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    adapter, untouched = (Online(network(), copies=4) for _ in range(2))
    for one in (adapter, untouched):
        one.predict(pictures())
    adapter.save(tmp_path / "state")
    content = (tmp_path / "state").read_bytes()
    bad = {f"cut at {n}/8": content[: len(content) * n // 8] for n in range(8)}
    bad |= {"text": b"not a state", "header": b"\xff" * 64 + content[64:], "longer": content + b"\0"}
    for what, data in bad.items():
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(FileError, match="bad: "):
            adapter.load(tmp_path / "bad")
        assert adapter.seen == COUNT, what
    with pytest.raises(FileError, match="missing: "):
        adapter.load(tmp_path / "missing")
    with pytest.raises(FileError, match="folder"):
        adapter.load(tmp_path)
    assert same(adapter.predict(pictures(seed=6)), untouched.predict(pictures(seed=6)))


def test_a_failing_save_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = Online(network(), copies=4)
    adapter.save(tmp_path / "state")
    before = (tmp_path / "state").read_bytes()
    adapter(pictures())

    def write_half(tensors: dict[str, Tensor], path: Path, **metadata: Any) -> None:
        Path(path).write_bytes(before[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr(testtime.tensorfile, "save_file", write_half)
    with pytest.raises(OSError, match="No space left"):
        adapter.save(tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["fixed", "episodic", *REMEMBERING])
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda adapter: pickle.loads(pickle.dumps(adapter))])
def test_a_copy_goes_on_as_the_original_and_goes_its_own_way(name: str, twin: Callable[[Adapter], Adapter]) -> None:
    """Also one that was pickled, as other processes get it."""
    adapter = adapter_for(name)
    adapter.predict(pictures())
    other = twin(adapter)
    expected = other.predict(pictures(seed=1))
    other.predict(pictures(seed=2))
    assert same(adapter.predict(pictures(seed=1)), expected)


@pytest.mark.parametrize("name", ["episodic", "streams"])
def test_threads_that_share_an_adapter_wait_for_each_other(name: str) -> None:
    adapter, found = adapter_for(name), {}
    if name == "streams":
        work = {n: {"images": pictures(1, seed=n), "streams": torch.tensor([n])} for n in range(COUNT)}
    else:
        work = {n: {"images": pictures(seed=n), "samples": samples()} for n in range(4)}
    expected = {n: adapter_for(name).predict(**given) for n, given in work.items()}

    def go(n: int) -> None:
        found[n] = adapter.predict(**work[n])

    threads = [threading.Thread(target=go, args=(n,)) for n in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found[n], expected[n]) for n in work)
    assert adapter.seen == sum(len(given["images"]) for given in work.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_networks_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"`net` must have float32 parameters, got {dtype}"):
        Online(network().to(dtype))


def test_a_deep_copy_is_guarded_as_well() -> None:
    adapter = Online(network(), copies=4, lr=0.01)
    adapter.predict(pictures(), samples())
    other = copy.deepcopy(adapter)
    for one in (adapter, other):
        assert one.predict(torch.full((1, 3, 16, 16), NAN), samples(9, 1)).rolled_back.all()
    assert same(other.predict(pictures(), samples()), adapter.predict(pictures(), samples()))


def test_settings_describe_themselves_the_same_everywhere() -> None:
    described = Settings(steps=1, optimizer=MOMENTUM, task=Rotation(), augment=CropFlip(2)).describe()
    assert json.loads(json.dumps(described)) == described
    assert "0x" not in json.dumps(described)
    assert (
        described
        == Settings(
            steps=1, optimizer=functools.partial(torch.optim.SGD, momentum=0.9), task=Rotation(), augment=CropFlip(2)
        ).describe()
    )


def test_settings_with_an_augmentation_of_ones_own_describe_themselves_the_same_everywhere() -> None:
    def mirror(images: Tensor, draws: Draws) -> Tensor:
        return images.flip(-1)[:, None].expand(-1, draws.keys.shape[1], -1, -1, -1)

    assert "0x" not in json.dumps(Settings(steps=1, augment=mirror).describe())


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def tiny_network() -> YNet:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    return split(model, "2", size=8)


def count_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))


@pytest.mark.parametrize(
    "build",
    [
        lambda net: Online(net, copies=2),
        lambda net: Online(net, copies=2, optimizer=MOMENTUM, threshold=0.3),
        lambda net: Episodic(net, copies=2, steps=1, parallel=2),
        lambda net: Streams(net, 2, copies=2),
    ],
    ids=["online", "online with momentum", "episodic", "streams"],
)
def test_a_stream_leaves_nothing_behind(build: Callable[[YNet], Adapter]) -> None:
    adapter, images = build(tiny_network()), Draws.of(0, torch.arange(2)).uniform(1, 8, 8)
    for _ in range(20):
        adapter.predict(images)
    tensors, objects = count_tensors(), len(gc.get_objects())
    for _ in range(180):
        adapter.predict(images)
    assert count_tensors() == tensors
    assert len(gc.get_objects()) - objects < 100


def megabytes() -> float:
    """The memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


@needs_proc
def test_the_process_does_not_grow_along_a_stream() -> None:
    adapter, image = Online(tiny_network(), copies=2), Draws.of(0, torch.arange(1)).uniform(1, 8, 8)
    for _ in range(300):
        adapter.predict(image)
    before = megabytes()
    for _ in range(1000):
        adapter.predict(image)
    assert adapter.seen == 1300
    assert megabytes() - before < 2  # 2 kB an image would be too much


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda net: Online(net, copies=2, share="batch"),
        lambda net: Episodic(net, copies=2, steps=1, share="batch"),
        lambda net: Streams(net, 100, copies=2),
    ],
    ids=["online", "episodic", "streams"],
)
def test_a_hundred_thousand_images_leave_the_memory_of_the_first_hundred(build: Callable[[YNet], Adapter]) -> None:
    adapter, images = build(tiny_network()), Draws.of(0, torch.arange(100)).uniform(1, 8, 8)
    adapter.predict(images)
    before = megabytes()
    for _ in range(999):
        adapter.predict(images)
    assert adapter.seen == 100_000
    assert megabytes() - before < 4  # 40 bytes an image would be too much


def test_gated_episodes_with_batch_statistics_are_as_if_alone() -> None:
    net, images = network("batch"), pictures(4)
    given: dict[str, Any] = {"steps": 1, "copies": 2, "lr": 0.01, "statistics": "batch"}

    def predict_alone(threshold: float) -> Prediction:
        adapter = Episodic(net, threshold=threshold, **given)
        return Prediction.join([adapter.predict(images[n : n + 1], samples(n, 1)) for n in range(4)])

    threshold = float(predict_alone(0.0).confidence.sort().values[1:3].mean())
    alone = predict_alone(threshold)
    assert alone.adapted.sum() == 2
    assert close(Episodic(net, threshold=threshold, **given).predict(images), alone)


def test_predictions_are_joined_and_indexed() -> None:
    adapter = Episodic(network(), steps=1, copies=2)
    parts = [adapter.predict(pictures(2), samples(0, 2)), adapter.predict(pictures(3), samples(0, 3))]
    whole = Prediction.join(parts)
    assert len(whole) == 5
    assert same(whole[:2], parts[0])
    assert same(whole[2:], parts[1])
    assert same(whole[torch.tensor([4, 0])], Prediction.join([parts[1][[2]], parts[0][[0]]]))
