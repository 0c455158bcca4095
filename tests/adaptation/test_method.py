"""The method against a loop written by hand; gate and guard."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import testtime.tensorfile
from adapters import (
    COUNT,
    INF,
    LEARNING,
    MEASURING,
    MOMENTUM,
    NAN,
    OPTIMIZERS,
    SELF_SUPERVISED,
    adapter_for,
    close,
    network,
    network_for,
    pictures,
    same,
    samples,
)
from models import Flattening, LayersOfTorch, VisionTransformer, sequential
from testtime import (
    Adapter,
    CropFlip,
    Episodic,
    Fixed,
    Online,
    Prediction,
    ResizedCropFlip,
    Rotation,
    YNet,
    split,
)
from testtime.adaptation.objectives import SelfSupervision
from testtime.adaptation.streams import Streams
from testtime.randomness import Draws

pytestmark = pytest.mark.filterwarnings("ignore:The self-supervised branch is not trained")

# ---------------------------------------------------------------------------------------------------------------------
# The method
# ---------------------------------------------------------------------------------------------------------------------


def by_hand(
    net: YNet,
    groups: list[tuple[Tensor, Tensor]],
    *,
    keep: bool,
    steps: int,
    lr: float = 0.01,
    copies: int = 4,
    seed: int = 0,
    update: str = "encoder+ssl",
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    augment: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Test-Time Training as the paper writes it: groups of images and numbers that share their updates → logits."""
    logits = []
    augment = augment or CropFlip(2)
    learned, learner = None, None
    for images, numbers in groups:
        if learned is None or not keep:
            learned = copy.deepcopy(net)
            learning = [*learned.encoder.parameters(), *(learned.ssl.parameters() if "ssl" in update else [])]
            learner = optimizer(learning, lr=lr)
        assert learner is not None
        for step in range(steps):
            draws = Draws.of(seed, numbers).fold(step).copies(copies)
            views, targets = Rotation().views(augment(images, draws).flatten(0, 1), draws.flatten())

            def loss(net: YNet = learned, views: Tensor = views, targets: Tensor = targets) -> Tensor:
                net.zero_grad()
                value = F.cross_entropy(net.self_supervise(views), targets)
                value.backward()
                return value

            learned.train()
            learner.step(loss)  # type: ignore[arg-type]
            learned.eval()
        with torch.no_grad():
            logits.append(learned(images))
    return torch.cat(logits)


def one_by_one(images: Tensor, numbers: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(images.split(1), numbers.split(1), strict=True))


@pytest.mark.parametrize(
    ("norm", "update", "parallel"),
    [
        (norm, update, parallel)
        for norm in ("group", "batch", "resnet")
        for update in ("encoder", "encoder+ssl")
        for parallel in (1, 2, 5)
    ],
)
def test_episodic_is_the_loop_by_hand(norm: str, update: str, parallel: int) -> None:
    net, images, numbers = network(norm), pictures(5), torch.tensor([4, 0, 9, 2, 7])
    expected = by_hand(net, one_by_one(images, numbers), keep=False, steps=3, lr=0.003, update=update, seed=8)
    adapter = Episodic(net, steps=3, lr=0.003, copies=4, update=update, parallel=parallel, seed=8)
    logits = adapter.predict(images, numbers).logits
    assert torch.allclose(logits, expected, atol=1e-5)
    assert (logits - net(images)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("norm", "update", "steps"),
    [("group", "encoder", 1), ("group", "encoder+ssl", 2), ("resnet", "encoder", 2), ("resnet", "encoder+ssl", 1)],
)
def test_online_is_the_loop_by_hand(norm: str, update: str, steps: int) -> None:
    net, images, numbers = network(norm), pictures(6), torch.arange(6)
    expected = by_hand(net, one_by_one(images, numbers), keep=True, steps=steps, lr=0.003, update=update)
    adapter = Online(net, steps=steps, lr=0.003, copies=4, update=update)
    logits = torch.cat([adapter(images[:4]), adapter(images[4:])])
    assert torch.allclose(logits, expected, atol=1e-5)
    assert (logits - net(images)).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:A stream of single images moves the running statistics")
@pytest.mark.parametrize("kind", [Episodic, Online])
def test_statistics_of_the_branch_that_does_not_learn_are_forgotten_too(kind: Callable[..., Adapter]) -> None:
    adapter, untouched = (kind(network("batch"), steps=2, copies=4, update="encoder") for _ in range(2))
    adapter.predict(torch.full((1, 3, 16, 16), NAN))
    assert same(adapter.predict(pictures(), samples()), untouched.predict(pictures(), samples()))


@pytest.mark.filterwarnings("ignore:A stream of single images moves the running statistics")
def test_online_with_batch_norm_is_the_loop_by_hand() -> None:
    net, images, numbers = network("batch"), pictures(3), torch.arange(3)
    expected = by_hand(net, one_by_one(images, numbers), keep=True, steps=1, lr=0.001)
    assert torch.allclose(Online(net, lr=0.001, copies=4)(images), expected, atol=1e-4)


@pytest.mark.parametrize("kind", [Episodic, Online])
def test_a_shared_update_is_one_step_on_the_views_of_all(kind: Callable[..., Adapter]) -> None:
    net, images, numbers = network(), pictures(6), torch.arange(6)
    groups = [(images[:4], numbers[:4]), (images[4:], numbers[4:])]
    expected = by_hand(net, groups, keep=kind is Online, steps=2, lr=0.003)
    adapter = kind(net, steps=2, lr=0.003, copies=4, share="batch")
    logits = torch.cat([adapter(images[:4]), adapter(images[4:])])
    assert torch.allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("kind", [Episodic, Online])
def test_any_optimizer_is_the_loop_by_hand(name: str, kind: Callable[..., Adapter]) -> None:
    net, images, numbers = network(), pictures(3), torch.arange(3)
    lr = 0.02 if name == "lbfgs" else 0.001
    given = {"steps": 2, "lr": lr, "optimizer": OPTIMIZERS[name]}
    expected = by_hand(net, one_by_one(images, numbers), keep=kind is Online, **given)
    adapter = kind(net, copies=4, **given)
    assert torch.allclose(adapter(images), expected, atol=1e-3 if name == "lbfgs" else 1e-4)
    assert (expected - net(images)).abs().max() > 1e-3


def test_an_optimizer_that_mixes_parameters_runs_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    net = network()
    with caplog.at_level(logging.INFO):
        adapter = Episodic(net, steps=1, copies=4, parallel=3, optimizer=OPTIMIZERS["lbfgs"])
    assert adapter.parallel == 1
    assert "episodes run one after another" in caplog.text
    alone = Episodic(net, steps=1, copies=4, optimizer=OPTIMIZERS["lbfgs"])
    assert same(adapter.predict(pictures()), alone.predict(pictures()))
    with pytest.raises(ValueError, match="This optimizer's steps or memory mix streams"):
        Streams(net, 3, optimizer=OPTIMIZERS["lbfgs"])


def test_task_and_augmentation_of_ones_own_are_used() -> None:
    net, images, numbers = network(), pictures(2), torch.arange(2)
    augment = ResizedCropFlip(scale=(0.5, 1.0))
    expected = by_hand(net, one_by_one(images, numbers), keep=False, steps=2, lr=0.003, augment=augment)
    adapter = Episodic(net, steps=2, lr=0.003, copies=4, augment=augment)
    assert torch.allclose(adapter(images), expected, atol=1e-5)
    every = Episodic(net, steps=2, lr=0.003, copies=4, augment=augment, task=Rotation("all"))
    assert not torch.allclose(every(images), expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("model", "at"),
    [
        (sequential, "3"),
        (VisionTransformer, "patch"),
        (VisionTransformer, "block1"),
        (LayersOfTorch, "first"),
        (Flattening, "first"),
    ],
)
def test_models_of_the_users_own_adapt_as_by_hand(model: Callable[[], nn.Module], at: str) -> None:
    torch.manual_seed(2)
    net = split(model(), at, size=16, augment={"name": "crop-flip", "padding": 2}).eval()
    images, numbers = pictures(4), torch.arange(4)
    expected = by_hand(net, one_by_one(images, numbers), keep=False, steps=2)
    adapter = Episodic(net, steps=2, lr=0.01, copies=4, parallel=2, statistics="running")
    assert torch.allclose(adapter(images), expected, atol=1e-4)


def test_a_model_that_begins_with_group_norm_can_learn() -> None:
    """torch 2.13 crashes in the backward pass of GroupNorm where channels-last images want no gradient."""
    torch.manual_seed(0)
    layers = nn.GroupNorm(1, 3), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    net = split(nn.Sequential(*layers), "2", size=16).eval()
    before = net.encoder.get_parameter("0.weight").clone()
    adapter = Online(net, lr=0.1, copies=4)
    assert adapter.predict(pictures()).adapted.all()
    assert not torch.equal(adapter.network().encoder.get_parameter("0.weight"), before)


def test_weights_the_network_never_uses_do_not_matter() -> None:
    class Wasteful(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.unused = inner, nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    net = network()
    expected = Episodic(net, steps=1, copies=4)(pictures())
    wasteful = YNet(Wasteful(net.encoder), net.classifier, net.ssl, net.card)
    assert torch.allclose(Episodic(wasteful, steps=1, copies=4)(pictures()), expected, atol=1e-5)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_an_episode_depends_on_its_image_and_number_alone(norm: str) -> None:
    net, images, numbers = network(norm), pictures(6), torch.tensor([3, 1, 4, 15, 9, 26])
    given: dict[str, Any] = {"steps": 2, "lr": 0.003, "copies": 4}
    expected = Episodic(net, **given).predict(images, numbers)
    alone = Episodic(net, **given)
    for place in (5, 0, 3):
        assert close(alone.predict(images[[place]], numbers[[place]]), expected[[place]])
    for parallel in (1, 2, 4, 6, 50):
        adapter = Episodic(net, parallel=parallel, **given)
        for order in ([5, 2, 0, 1, 4, 3], [2, 2, 0], [1]):
            assert close(adapter.predict(images[order], numbers[order]), expected[order], 1e-4)


def test_an_episode_is_bit_for_bit_the_same_whatever_came_before() -> None:
    for optimizer in (torch.optim.SGD, MOMENTUM, torch.optim.Adam):
        adapter = Episodic(network(), steps=2, lr=0.01, copies=4, optimizer=optimizer)
        expected = adapter.predict(pictures(), samples())
        adapter.predict(pictures(5, seed=4))
        assert same(adapter.predict(pictures(), samples()), expected)


@pytest.mark.parametrize("parallel", [5, "auto"])
def test_episodes_that_do_not_fit_into_the_memory_are_run_in_smaller_numbers(
    parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, images, tried = network(), pictures(5), []
    expected = Episodic(net, steps=2, copies=4, lr=0.01, parallel=2).predict(images)
    run = testtime.adaptation.adapters.run

    def run_or_fail(learner: Any, *given: Any) -> Prediction:
        tried.append(len(learner.all_rows))
        if len(learner.all_rows) > 2:
            raise torch.OutOfMemoryError
        return run(learner, *given)

    monkeypatch.setattr(testtime.adaptation.adapters, "run", run_or_fail)
    monkeypatch.setattr(Episodic, "_choose_parallel", lambda self, _: 5 if self.parallel == "auto" else self.parallel)
    adapter = Episodic(net, steps=2, copies=4, lr=0.01, parallel=parallel)
    assert same(adapter.predict(images), expected)
    assert (tried, adapter.parallel, adapter.adapted) == ([5, 3, 2, 2, 1], 2, 5)
    tried.clear()
    assert same(adapter.predict(images, samples(count=5)), expected)  # what did not fit is not tried again
    assert tried == [2, 2, 1]


def test_images_that_do_not_fit_into_the_memory_are_observed_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, images = network(), pictures(6)
    expected, observe = Fixed(net).predict(images), SelfSupervision.observe

    def observe_or_fail(self: Any, images: Tensor) -> Any:
        if images.shape[1] > 3:
            raise torch.OutOfMemoryError
        return observe(self, images)

    monkeypatch.setattr(SelfSupervision, "observe", observe_or_fail)
    assert close(Fixed(net).predict(images), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Gate and guard
# ---------------------------------------------------------------------------------------------------------------------


def middle_threshold(net: YNet, images: Tensor) -> tuple[float, list[bool]]:
    """A threshold between the confidences of the images, and which of them lie below it."""
    confidence = Fixed(net).predict(images).confidence
    ordered = confidence.sort().values
    threshold = float(ordered[len(ordered) // 2 - 1 : len(ordered) // 2 + 1].mean())
    return threshold, (confidence < threshold).tolist()


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_gate_is_for_each_image(parallel: int) -> None:
    net, images = network(), pictures(6)
    threshold, below = middle_threshold(net, images)
    assert sum(below) == 3
    adapter = Episodic(net, steps=2, copies=4, lr=0.01, threshold=threshold, parallel=parallel)
    answers, unchanged = adapter.predict(images), Fixed(net).predict(images)
    always = Episodic(net, steps=2, copies=4, lr=0.01).predict(images)
    assert answers.adapted.tolist() == below
    assert adapter.adapted == 3
    for place, adapted in enumerate(below):
        assert close(answers[[place]], (always if adapted else unchanged)[[place]])
        assert torch.equal(answers.logits[place], unchanged.logits[place]) != adapted


def test_a_gated_stream_learns_only_from_what_passes() -> None:
    net, images = network(), pictures(6)
    threshold, _ = middle_threshold(net, images)
    gated, free = Online(net, copies=4, threshold=threshold), Online(net, copies=4)
    for place in range(6):
        answers = gated.predict(images[[place]], torch.tensor([place]))
        assert answers.adapted.item() == (answers.confidence.item() < threshold)
        if answers.adapted:
            assert same(free.predict(images[[place]], torch.tensor([place])), answers)
        else:
            assert torch.equal(answers.logits, answers.logits_before)
            assert torch.equal(answers.loss_after, answers.loss_before)
    assert 0 < gated.adapted < 6
    assert gated.adapted == free.adapted


@pytest.mark.filterwarnings("ignore:The method .* needs several images")
@pytest.mark.parametrize("name", [name for name in LEARNING if name in MEASURING])
def test_the_ends_of_the_threshold(name: str) -> None:
    net = network_for(name)
    assert adapter_for(name, net, threshold=1.0).predict(pictures()).adapted.all()
    answers = adapter_for(name, net, threshold=0.0).predict(pictures())
    assert not answers.adapted.any()
    assert torch.equal(answers.logits, answers.logits_before)
    if name in SELF_SUPERVISED:
        assert close(answers, Fixed(net).predict(pictures()))


def test_a_shared_episode_leaves_the_sure_images_alone() -> None:
    net, images = network(), pictures(6)
    threshold, below = middle_threshold(net, images)
    answers = Episodic(net, steps=2, copies=4, lr=0.01, share="batch", threshold=threshold).predict(images)
    wanted = torch.tensor(below)
    expected = by_hand(net, [(images[wanted], torch.arange(6)[wanted])], keep=False, steps=2)
    assert answers.adapted.tolist() == below
    assert torch.allclose(answers.logits[wanted], expected, atol=1e-5)
    assert torch.equal(answers.logits[~wanted], Fixed(net).predict(images).logits[~wanted])


def test_a_shared_online_step_reports_only_the_images_it_learned_from() -> None:
    net, images = network(), pictures(6)
    threshold, below = middle_threshold(net, images)
    adapter = Online(net, copies=4, lr=0.01, share="batch", threshold=threshold)
    assert adapter.predict(images).adapted.tolist() == below
    assert adapter.adapted == 3


@pytest.mark.filterwarnings("ignore:The method .* needs several images")
@pytest.mark.parametrize(
    ("name", "lr"),
    [
        *((name, 1e30) for name in LEARNING if name != "tent, online, batch norm"),
        ("episodic", 100.0),
        ("online", 100.0),
        ("streams", 100.0),
    ],
)
def test_an_explosion_is_undone_counted_and_reported(name: str, lr: float) -> None:
    net = network_for(name)
    adapter, unchanged = adapter_for(name, net, lr=lr, steps=3), Fixed(net)
    for call in range(2):
        answers = adapter.predict(pictures(seed=call))
        assert answers.rolled_back.all()
        assert not answers.adapted.any()
        if name in SELF_SUPERVISED:  # others may normalise with the statistics of the batch
            expected = unchanged.predict(pictures(seed=call))
            assert torch.allclose(answers.logits, expected.logits, atol=1e-5)
        assert torch.equal(answers.logits, answers.logits_before)
        assert torch.allclose(answers.loss_after, answers.loss_before, rtol=0, atol=0, equal_nan=True)
    assert (adapter.seen, adapter.adapted, adapter.rolled_back) == (2 * COUNT, 0, 2 * COUNT)


def test_the_guard_allows_a_rise_up_to_its_bound() -> None:
    net, image = network(), pictures(1)
    free = Online(net, copies=1, lr=0.5, guard=INF, seed=1).predict(image)
    rise = float(free.loss_after - free.loss_before)
    assert rise > 0
    assert free.adapted.all()
    assert same(Online(net, copies=1, lr=0.5, guard=rise * 1.01, seed=1).predict(image), free)
    assert Online(net, copies=1, lr=0.5, guard=rise * 0.99, seed=1).predict(image).rolled_back.all()


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "lbfgs"])
def test_the_memory_of_an_optimizer_is_rolled_back_too(optimizer: str) -> None:
    given: dict[str, Any] = {"copies": 4, "lr": 0.005, "optimizer": OPTIMIZERS[optimizer]}
    for seen in (0, 2):  # before the optimizer has any memory, and after
        adapter, untouched = Online(network(), **given), Online(network(), **given)
        for one in (adapter, untouched):
            if seen:
                one.predict(pictures(seen), samples(0, seen))
        assert adapter.predict(torch.full((1, 3, 16, 16), NAN), samples(50, 1)).rolled_back.all()
        for call in (3, 6):
            expected = untouched.predict(pictures(seed=call), samples(call))
            assert same(adapter.predict(pictures(seed=call), samples(call)), expected)


def test_the_first_memory_of_a_dampened_momentum_is_rolled_back() -> None:
    given: dict[str, Any] = {"copies": 4, "optimizer": functools.partial(MOMENTUM, dampening=0.5)}
    adapter, untouched = Online(network(), **given), Online(network(), **given)
    adapter.predict(torch.full((1, 3, 16, 16), NAN))
    assert same(adapter.predict(pictures(), samples()), untouched.predict(pictures(), samples()))


# ---------------------------------------------------------------------------------------------------------------------
# Answers alone
# ---------------------------------------------------------------------------------------------------------------------


UNHEDGED = {"method": "best", "constants": {"memory": 4, "sharpness": 0}}


@pytest.mark.parametrize("given", [{}, {"mirrored": True}, UNHEDGED])
@pytest.mark.parametrize("kind", [Online, Episodic, functools.partial(Streams, count=COUNT)])
@pytest.mark.parametrize("norm", ["group", "batch", "vit"])
def test_answers_are_the_same_if_the_loss_is_not_measured(
    norm: str, kind: Callable[..., Adapter], given: dict[str, Any]
) -> None:
    net, images = network(norm), pictures()
    given = {"lr": 0.01, "copies": 4, "statistics": "source", **given}
    measured, bare = kind(net, **given), kind(net, **given, measure_loss=False)
    for call in range(2):
        expected, found = (adapter.predict(images, samples(call)) for adapter in (measured, bare))
        assert torch.allclose(found.logits, expected.logits, atol=1e-5)
        assert torch.allclose(found.logits_before, expected.logits_before, atol=1e-5)
        assert found.adapted.equal(expected.adapted)
        for values in (found.loss_before, found.loss_after, found.confidence):
            assert values.isnan().all()
            assert values.shape == (COUNT,)
    assert bare.describe() == {**measured.describe(), "measure_loss": False}


@pytest.mark.parametrize("given", [{"method": "tent"}, {"method": "best", "statistics": "source"}])
def test_a_loss_that_belongs_to_the_answer_is_measured_in_any_case(given: dict[str, Any]) -> None:
    net, images = network("batch"), pictures()
    given = {"lr": 0.01, "guard": 1e-9, **given}
    assert same(Online(net, **given, measure_loss=False).predict(images), Online(net, **given).predict(images))


def test_answers_that_are_not_finite_are_undone_without_a_loss() -> None:
    net, images = network(), pictures(1)
    with torch.no_grad():
        net.classifier[0].weight.fill_(1e30)  # finite weights, whose products are not once the encoder's are large
    found = Online(net, lr=1e12, copies=4, update="encoder", measure_loss=False).predict(images)
    assert found.rolled_back.all()
    assert torch.allclose(found.logits, Fixed(net).predict(images).logits, atol=1e-5)
