"""Learners: what belongs to one replica is read, saved, reset and put back without touching the others."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor

import adapters
from models import VisionTransformer
from testtime import CropFlip, Online, Rotation, resnet26, split
from testtime.adaptation.learner import Learner, Snapshot
from testtime.adaptation.methods import METHODS
from testtime.adaptation.recorder import run
from testtime.networks.ynet import YNet
from testtime.randomness import Draws

COUNT = 4
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
# Fused attention has no batching rule on the CPU, and torch says so once.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def network(name: str) -> YNet:
    torch.manual_seed(4)
    net = (
        resnet26(depth=8, size=16, norm="batch", seed=2) if name == "resnet26" else split(VisionTransformer(), "patch")
    )
    return net.eval()


def make_learner(net: YNet, method: str = "ttt", **given: object) -> Learner:
    own = {"optimizer": MOMENTUM, "lr": 0.05, "copies": 2, "task": Rotation(), "augment": CropFlip()}
    settings = METHODS[method].make_settings("online", own | given)
    return Learner(net, COUNT, METHODS[method], settings, (3, 16, 16))


def learn(learner: Learner, seed: int = 0) -> None:
    images = Draws.of(seed, torch.arange(COUNT)).uniform(1, 3, 16, 16)
    run(learner, images, torch.arange(COUNT)[:, None])


@pytest.fixture(params=["resnet26", "transformer", "resnet26 cotta"])
def learner(request: pytest.FixtureRequest) -> Learner:
    name, _, method = request.param.partition(" ")
    made = make_learner(network(name), method or "ttt", statistics="running")
    learn(made)
    return made


def rows(learner: Learner) -> list[dict[str, Tensor]]:
    """What each replica has learned, its objective's state and its optimizer's memory as well."""
    state = learner.state()
    return [{name: tensor[row] for name, tensor in state.items()} for row in range(COUNT)]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def disturb(learner: Learner) -> None:
    for piece in learner.pieces:
        piece += 1


def test_learning_moves_every_replica_by_itself(learner: Learner) -> None:
    learned = rows(learner)
    assert not any(equal(learned[0], other) for other in learned[1:])
    assert any(name.startswith("optimizer/momentum_buffer/") for name in learned[0])


def test_restore_by_rows_leaves_every_bit_of_the_others(learner: Learner) -> None:
    snapshot, before = learner.snapshot(), rows(learner)
    learn(learner, seed=1)
    disturb(learner)
    with torch.no_grad():
        learner.replicas.packed.numbers[0, 0] = float("nan")  # a bad row must not spoil the others
    disturbed = rows(learner)
    learner.restore(snapshot, torch.tensor([True, False, True, False]))
    after = rows(learner)
    for row, expected in enumerate((before[0], disturbed[1], before[2], disturbed[3])):
        assert equal(after[row], expected), row


def test_reset_is_exact(learner: Learner) -> None:
    untouched = make_learner(learner.net, learner.method.name, statistics="running").state()
    learned = rows(learner)

    def is_fresh(row: dict[str, Tensor], place: int) -> bool:
        memory = [tensor for name, tensor in row.items() if name.startswith("optimizer/")]
        return all(torch.equal(row[name], untouched[name][place]) for name in untouched) and not any(
            tensor.any() for tensor in memory
        )

    assert not is_fresh(learned[1], 1)
    learner.reset(torch.tensor([False, True, False, False]))
    after = rows(learner)
    assert is_fresh(after[1], 1)
    assert all(equal(after[row], learned[row]) for row in (0, 2, 3))
    learner.reset()
    assert all(is_fresh(row, place) for place, row in enumerate(rows(learner)))


def test_what_was_reset_learns_as_it_did_at_first(learner: Learner) -> None:
    learned = learner.state()
    disturb(learner)
    learner.reset()
    learn(learner)
    assert equal(learner.state(), learned)


def test_a_state_continues_in_another_learner(learner: Learner) -> None:
    other = make_learner(learner.net, learner.method.name, statistics="running")
    other.load(learner.state())
    assert equal(other.state(), learner.state())
    for one in (learner, other):
        learn(one, seed=1)
    assert equal(other.state(), learner.state())


def test_a_state_is_a_copy(learner: Learner) -> None:
    state = learner.state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    disturb(learner)
    assert equal(state, before)


def test_a_state_that_does_not_fit_changes_nothing(learner: Learner) -> None:
    before = learner.state()
    state = {name: tensor + 1 for name, tensor in before.items()}
    first, memory = next(iter(state)), next(name for name in state if name.startswith("optimizer/"))
    for wrong in (
        {name: tensor for name, tensor in state.items() if name != first},
        state | {first: torch.zeros(1, 2, 3)},
        state | {first: state[first].double()},
        state | {memory: torch.zeros(1, 2, 3)},
        state | {memory: torch.tensor(1.0)},
        state | {memory: state[memory].long()},
        {name: tensor for name, tensor in state.items() if name != memory},
        state | {"elsewhere": torch.zeros(COUNT)},
        state | {"optimizer/momentum_buffer/elsewhere": torch.zeros(COUNT)},
        state | {memory.replace("momentum_buffer", "exp_avg"): state[memory]},
    ):
        with pytest.raises(ValueError, match="does not fit"):
            learner.load(wrong)
        assert equal(learner.state(), before)


@pytest.mark.parametrize("update", ["norm", "all"])
def test_optimizer_state_that_is_not_complete_is_refused(update: str) -> None:
    learner = make_learner(network("resnet26"), optimizer=torch.optim.Adam, update=update)
    learn(learner)
    state = learner.state()
    for key in ("step", "exp_avg"):
        missing = next(name for name in state if name.startswith(f"optimizer/{key}/"))
        with pytest.raises(ValueError, match="incomplete"):
            learner.load({name: tensor for name, tensor in state.items() if name != missing})
    assert equal(learner.state(), state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_is_asked_of_each_row(learner: Learner, bad: float) -> None:
    assert learner.is_finite().tolist() == [True] * COUNT
    pieces = [piece for piece in learner.pieces if piece.is_floating_point()]
    pieces[0][1].view(-1)[0] = bad
    pieces[-1][3].view(-1)[-1] = bad
    assert learner.is_finite().tolist() == [True, False, True, False]


def test_opposite_infinities_are_not_finite(learner: Learner) -> None:
    learner.replicas.packed.numbers[2, :2] = torch.tensor([float("inf"), float("-inf")])
    assert learner.is_finite().tolist() == [True, True, False, True]


def test_values_that_were_never_finite_do_not_count() -> None:
    net = network("resnet26")
    net.encoder.register_buffer("mask", torch.tensor([[0.0, float("-inf")], [0.0, 0.0]]))
    learner = make_learner(net, statistics="source")
    before = rows(learner)
    learn(learner)
    assert not any(equal(old, new) for old, new in zip(before, rows(learner), strict=True))
    assert learner.is_finite().tolist() == [True] * COUNT
    mask = learner.replicas.tensors["encoder.mask"]
    mask[1, 0, 1] = float("nan")  # was -inf
    mask[2, 1, 1] = float("nan")
    assert learner.is_finite().tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_of_the_lowest_number_are_finite(dtype: torch.dtype) -> None:
    net = network("resnet26")
    lowest = torch.finfo(dtype).min
    net.encoder.register_buffer("mask", torch.tensor([[0.0, lowest], [lowest, lowest]], dtype=dtype))
    learner = make_learner(net, statistics="source")
    assert learner.is_finite().tolist() == [True] * COUNT
    learner.replicas.tensors["encoder.mask"][1, 0, 0] = float("nan")  # was 0
    learner.replicas.packed.numbers[2, 0] = float("inf")
    assert learner.is_finite().tolist() == [True, False, False, True]


def test_a_state_may_be_not_finite_only_where_the_network_is() -> None:
    net = network("resnet26")
    net.encoder.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    stream, other = (Online(net, copies=2, statistics="source") for _ in range(2))
    stream.predict(torch.rand(2, 3, 16, 16))
    state = stream.state_dict()
    other.load_state_dict(state)
    assert other.seen == 2
    name = next(name for name, tensor in state.items() if name.endswith("conv1.weight"))
    with pytest.raises(ValueError, match=name):
        other.load_state_dict(state | {name: state[name] * float("nan")})


def test_a_reset_returns_to_the_original_network_whenever_it_comes(learner: Learner) -> None:
    fresh = Learner(learner.net, COUNT, learner.method, learner.settings, learner.shape)
    learner.reset(torch.tensor([True, False, True, False]))
    same = [equal(one, two) for one, two in zip(without_memory(learner), without_memory(fresh), strict=True)]
    assert same == [True, False, True, False]


def without_memory(learner: Learner) -> list[dict[str, Tensor]]:
    return [{key: value for key, value in row.items() if not key.startswith("optimizer/")} for row in rows(learner)]


def test_a_learner_that_is_dropped_gives_its_memory_back_at_once() -> None:
    learner = make_learner(network("resnet26"))
    learn(learner)
    numbers = weakref.ref(learner.replicas.packed.numbers)
    gc.disable()
    try:
        del learner
        assert numbers() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["restore", "reset"])
def test_an_interrupt_leaves_batch_norm_in_no_other_mode(way: str) -> None:
    learner = make_learner(network("resnet26"))
    images = Draws.of(0, torch.arange(COUNT)).uniform(2, 3, 16, 16)
    with torch.no_grad():
        expected, snapshot = learner.objective.observe(images), learner.snapshot()
        learner.replicas.batch_norms.train(True)  # as where the interrupt came while learning ended
        if way == "restore":
            learner.restore(snapshot, learner.all_rows)
        else:
            learner.reset()
        assert torch.equal(learner.objective.observe(images).logits, expected.logits)


def test_rows_are_put_into_a_snapshot() -> None:
    stored = Snapshot([torch.arange(6.0).view(3, 2)], {"old": torch.ones(3, 1)})
    new = Snapshot([torch.tensor([[6.0, 7.0], [8.0, 9.0], [-1.0, -1.0]])], {"new": torch.full((3, 1), 5.0)})
    stored.put(torch.tensor([2, 0]), new)
    assert stored.pieces[0].tolist() == [[8.0, 9.0], [2.0, 3.0], [6.0, 7.0]]
    assert stored.memory["new"].tolist() == [[5.0], [0.0], [5.0]]
    assert stored.memory["old"].tolist() == [[0.0], [1.0], [0.0]]
    stored.put(torch.tensor([False, True, True]), Snapshot([torch.tensor([[4.0, 4.0]])], {}))  # one row for several
    assert stored.pieces[0].tolist() == [[8.0, 9.0], [4.0, 4.0], [4.0, 4.0]]
    assert stored.memory["new"].tolist() == [[5.0], [0.0], [0.0]]


@pytest.mark.parametrize("method", ["ttt", "tent"])
def test_an_undo_made_before_several_calls_returns_to_its_state(method: str) -> None:
    adapter = Online(adapters.network("batch" if method == "tent" else "group"), method=method, lr=0.05, copies=2)
    adapter.predict(adapters.pictures(3))
    learner = adapter._learned
    assert isinstance(learner, Learner)
    before = learner.pieces[0].clone()
    undo = learner.make_undo()
    undo()  # nothing has changed yet
    assert learner.pieces[0].equal(before)
    for seed in (1, 2):  # calls make an undo of their own
        adapter.predict(adapters.pictures(3, seed=seed))
    assert not learner.pieces[0].equal(before)
    undo()
    assert learner.pieces[0].equal(before)
