"""On a GPU: the same answers as on the CPU and without kernels, replayed graphs against eager steps."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import pictures
from testtime import Episodic, Fixed, Guard, Online, Prediction, ResizedCropFlip, Rotation, YNet, kernels, resnet26
from testtime.adaptation.learner import Learner
from testtime.adaptation.streams import Streams
from testtime.kernels.graphs import Captured, Concurrent
from testtime.networks.replicas import Replicas
from testtime.precision import arithmetic, check_precision
from testtime.randomness import Draws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:A stream of single images"),
]
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
TIGHT = Guard(collapse=0.99, distance=0.0018, momentum=0.5)  # falls back within a few images


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full precision by default, since answers are compared with those of the CPU, and bit for bit."""
    monkeypatch.setattr("testtime.adaptation.adapters.choose_precision", lambda device: "fp32")


def network(norm: str = "group", depth: int = 14) -> YNet:
    """As if trained jointly, so that statistics of Batch Normalization move."""
    net = resnet26(depth=depth, norm=norm, seed=1).eval()  # type: ignore[arg-type]
    return net.describe(record={"configuration": {}})


def normals(*shape: int, seed: int = 0) -> Tensor:
    return Draws.of(seed, torch.arange(shape[0])).normal(*shape[1:]).cuda()


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


# Randomness and views


@pytest.mark.parametrize("seed", [0, -7, 2**63 + 5])
def test_integers_and_uniforms_have_the_same_bits(seed: int) -> None:
    samples = torch.tensor([0, 1, -1, 2**62, -(2**63), 12345])
    there, here = (Draws.of(seed, samples.to(device)).fold(3).copies(32).purpose("crop") for device in ("cuda", "cpu"))
    assert torch.equal(there.keys.cpu(), here.keys)
    assert torch.equal(there.integers(9, 100).cpu(), here.integers(9, 100))
    assert torch.equal(there.integers(2**31, 100).cpu(), here.integers(2**31, 100))
    assert torch.equal(there.uniform(100).cpu(), here.uniform(100))
    assert torch.allclose(there.normal(100).cpu(), here.normal(100), atol=1e-5)


@pytest.mark.parametrize("height", [32, 20])
def test_views_are_the_same(height: int) -> None:
    images = Draws.of(0, torch.arange(4)).integers(256, 3, height, 32).to(torch.uint8)
    net = network()
    for augment in (None, ResizedCropFlip(scale=(0.2, 1.0))):
        made = []
        for device in ("cuda", "cpu"):
            draws = Draws.of(2, torch.arange(4, device=device)).copies(8)
            kind = augment or Episodic(net).settings.augment
            assert kind is not None
            views, targets = Rotation().views(kind(images.to(device), draws).flatten(0, 1), draws.flatten())
            made.append((views.float().cpu(), targets.cpu()))
        assert torch.allclose(made[0][0], made[1][0], atol=1e-5)
        assert torch.equal(made[0][1], made[1][1])


# Adapters


def compare(there: Prediction, here: Prediction, tolerance: float) -> None:
    for field in fields(Prediction):
        a, b = getattr(there, field.name).cpu(), getattr(here, field.name).cpu()
        assert torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance), field.name


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("parallel", [1, 4])
def test_episodes_are_those_of_the_cpu(norm: str, parallel: int) -> None:
    net, images = network(norm), pictures(6, size=32)
    given: dict[str, Any] = {"steps": 3, "lr": 0.001, "copies": 8, "parallel": parallel}
    here = Episodic(net, **given).predict(images)
    there = Episodic(copy.deepcopy(net).cuda(), **given).predict(images.cuda())
    assert there.logits.is_cuda
    compare(there, here, 1e-3)


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 0.05), ("bf16", 0.2)])
def test_lower_precision_stays_near(precision: Any, tolerance: float) -> None:
    net, images = network(), pictures(8, size=32)
    given: dict[str, Any] = {"steps": 3, "lr": 0.001, "copies": 8, "parallel": 4}
    here = Episodic(net, **given).predict(images)
    there = Episodic(net.cuda(), precision=precision, **given).predict(images.cuda())
    assert there.logits.dtype == torch.float32
    assert (there.logits.cpu() - here.logits).abs().max() < tolerance
    assert there.adapted.all()


def test_images_of_the_cpu_are_taken_along() -> None:
    net = network().cuda()
    assert torch.equal(Fixed(net)(pictures(2, size=32)), Fixed(net)(pictures(2, size=32).cuda()))


def adapters() -> dict[str, Callable[[YNet], Any]]:
    return {
        "episodic": lambda net: Episodic(net, steps=3, copies=8, parallel=2),
        "episodic, momentum": lambda net: Episodic(net, steps=3, copies=8, parallel=2, optimizer=MOMENTUM),
        "online": lambda net: Online(net, copies=8),
        "online, momentum": lambda net: Online(net, copies=8, optimizer=MOMENTUM),
        "online, gated": lambda net: Online(net, copies=8, threshold=0.3),
        "online, shared": lambda net: Online(net, copies=8, share="batch"),
        "online, guarded": lambda net: Online(net, copies=8, lr=0.02, guard=TIGHT),
        "online, frozen": lambda net: Online(net, copies=8, lr=0.02, guard=replace(TIGHT, fallback="freeze")),
        "online, some": lambda net: Online(net, copies=8, update=["encoder.*.bias"], optimizer=MOMENTUM),
        "online, shot": lambda net: Online(net, method="shot"),
        "online, sar": lambda net: Online(net, method="sar"),
        "online, rehearsal": lambda net: Online(net, method="rehearsal", copies=8, constants={"memory": 5}),
        "streams, rehearsal, shadow": lambda net: Streams(
            net, 4, method="rehearsal", copies=8, lr=0.05, guard=replace(TIGHT, fallback="shadow", shadow=0.5)
        ),
        "streams": lambda net: Streams(net, 4, copies=8),
        "streams, bf16": lambda net: Streams(net, 4, copies=8, precision="bf16"),
        "streams in groups": lambda net: Streams(net, 4, copies=8, together=3, optimizer=MOMENTUM),
    }


def be_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step be taken by itself."""
    monkeypatch.setattr("testtime.adaptation.learner.can_record", lambda device: False)


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("name", list(adapters()))
def test_a_replayed_graph_is_the_eager_step(name: str, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(norm).cuda()
    replayed = adapters()[name](net)
    calls = [replayed.predict(pictures(4, size=32, seed=seed).cuda()) for seed in range(3)]
    be_eager(monkeypatch)
    eager = adapters()[name](net)
    tolerance = 2e-2 if "bf16" in name else 1e-4
    for seed, call in enumerate(calls):
        expected = eager.predict(pictures(4, size=32, seed=seed).cuda())
        compare(call, expected, tolerance)


@pytest.mark.parametrize(("norm", "tolerance"), [("group", 1e-3), ("batch", 1e-2)])
@pytest.mark.parametrize("name", ["episodic, momentum", "online, gated", "online, some", "streams", "streams, bf16"])
def test_kernels_change_no_answer(name: str, norm: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain bodies of everything that is taken over."""
    net = network(norm, depth=8).cuda()
    calls = []
    for switch in ("on", "off"):
        monkeypatch.setenv("TESTTIME_KERNELS", switch)
        adapter = adapters()[name](net)
        calls.append([adapter.predict(pictures(4, size=32, seed=seed).cuda()) for seed in range(3)])
    for one, other in zip(*calls, strict=True):
        compare(one, other, 0.2 if "bf16" in name else tolerance)


def bytes_(count: int, seed: int = 0) -> Tensor:
    return (pictures(count, size=32, seed=seed) * 255).to(torch.uint8).cuda()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("update", ["encoder", "encoder+ssl"])
def test_a_stream_of_many_images_is_one_image_after_another(update: Any, precision: Any) -> None:
    """More of them than a graph takes at a time; bit for bit, whatever the calls."""
    net = network(depth=8).cuda()
    whole, single, parts = (Online(net, copies=4, update=update, precision=precision) for _ in range(3))
    answers = whole.predict(bytes_(70))
    alone = Prediction.join([single.predict(bytes_(70)[[n]]) for n in range(70)])
    pieces = Prediction.join([parts.predict(piece) for piece in bytes_(70).split([3, 60, 7])])
    for field in fields(Prediction):
        assert torch.equal(getattr(answers, field.name), getattr(alone, field.name)), field.name
        assert torch.equal(getattr(answers, field.name), getattr(pieces, field.name)), field.name
    assert (answers.logits - answers.logits_before).abs().max() > 1e-4


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_streams_on_the_gpu_are_onlines(count: int, norm: str) -> None:
    """Twelve streams have their gradients summed in other blocks than a few."""
    net = network(norm, depth=8).cuda()
    together, alone = Streams(net, count, copies=8), [Online(net, copies=8) for _ in range(count)]
    for step in range(10):
        images = bytes_(count, seed=step)
        answers = together.predict(images)
        expected = torch.cat([alone[stream](images[[stream]]) for stream in range(count)])
        assert torch.allclose(answers.logits, expected, atol=1e-4, rtol=1e-4), step
    assert together.adapted == 10 * count


def test_a_stream_gone_wrong_leaves_the_others_bit_for_bit() -> None:
    net = network(depth=8).cuda()
    for precision in ("fp32", "bf16"):
        broken, whole = (Streams(net, 3, copies=8, precision=precision) for _ in range(2))  # type: ignore[arg-type]
        images = pictures(3, size=32).cuda()
        bad = images.clone()
        bad[1] = float("nan")
        answers, expected = broken.predict(bad), whole.predict(images)
        assert answers.rolled_back.tolist() == [False, True, False]
        assert torch.equal(answers.logits[[0, 2]], expected.logits[[0, 2]])
        for _ in range(2):
            answers = broken.predict(images[[0, 2]], streams=torch.tensor([0, 2]))
            expected = whole.predict(images[[0, 2]], streams=torch.tensor([0, 2]))
            assert torch.equal(answers.logits, expected.logits)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_streams_of_bytes_wait_for_nothing() -> None:
    streams, images = Streams(network(depth=8).cuda(), 2, copies=4), bytes_(2)
    streams.predict(images)
    torch.cuda.set_sync_debug_mode("error")
    try:
        streams.predict(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert streams.seen == 4


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(("norm", "count"), [("group", 1), ("group", 3), ("group", 12), ("batch", 2)])
def test_collected_gradients_are_those_of_autograd(norm: str, count: int, precision: Any) -> None:
    with arithmetic(precision, torch.device("cuda")):
        replicas = Replicas(network(norm).cuda(), count, ("encoder", "ssl"), dtype=check_precision(precision))
        for parameter in replicas.parameters(("encoder", "ssl")).values():
            parameter.requires_grad_(True)
        views = pictures(4 * count, size=32).cuda().unflatten(0, (count, 4))

        def loss() -> Tensor:
            return replicas.self_supervise(views).float().square().sum()

        found = [replicas.packed.gradient(loss)[1] for _ in range(2)]
        replicas.packed._buffer = None
        expected = replicas.packed.gradient(loss)[1]
    assert torch.equal(*found)
    assert relative(found[0], expected) < 1e-5
    learning = sum(tensor[0].numel() for tensor in replicas.parameters(("encoder", "ssl")).values())
    assert not found[0][:, learning:].any()


def test_answers_of_a_graph_are_not_overwritten_by_the_next() -> None:
    adapter = Online(network().cuda(), copies=4)
    first = adapter.predict(pictures(1, size=32).cuda())
    copied = first.logits.clone()
    adapter.predict(pictures(1, size=32, seed=5).cuda())
    assert torch.equal(first.logits, copied)


def test_a_recorded_stream_reads_no_memory_that_was_given_away() -> None:
    adapter = Online(network(depth=8).cuda(), copies=4)
    adapter.predict(bytes_(2))
    zeros = [torch.zeros(64, dtype=torch.uint8, device="cuda") for _ in range(2000)]  # takes what is free
    assert adapter.predict(bytes_(2, seed=1)).adapted.all()
    assert not any(zero.any() for zero in zeros)


def test_a_stream_that_is_dropped_gives_its_memory_back_at_once() -> None:
    adapter = Online(network(depth=8).cuda(), copies=4)
    adapter.predict(bytes_(2))
    assert isinstance(adapter._learned, Learner)
    numbers = weakref.ref(adapter._learned.replicas.packed.numbers)
    gc.disable()
    try:
        del adapter
        assert numbers() is None
    finally:
        gc.enable()


def test_a_stream_saved_on_the_gpu_continues_bit_for_bit() -> None:
    net = network().cuda()
    for optimizer in (torch.optim.SGD, MOMENTUM):
        one, other = Online(net, copies=4, optimizer=optimizer), Online(net, copies=4, optimizer=optimizer)
        one.predict(pictures(3, size=32).cuda())
        other.load_state_dict({name: tensor.cpu() for name, tensor in one.state_dict().items()})
        assert torch.equal(one(pictures(3, size=32, seed=1).cuda()), other(pictures(3, size=32, seed=1).cuda()))


def test_a_bad_image_on_the_gpu_leaves_no_trace() -> None:
    net = network().cuda()
    adapter, untouched = Online(net, copies=4), Online(net, copies=4)
    numbers = torch.arange(2)
    for one in (adapter, untouched):
        one.predict(pictures(2, size=32).cuda(), numbers)
    bad = adapter.predict(torch.full((1, 3, 32, 32), float("nan")).cuda(), torch.tensor([7]))
    assert bad.rolled_back.all()
    after, expected = (one.predict(pictures(2, size=32, seed=1).cuda(), numbers + 2) for one in (adapter, untouched))
    assert torch.equal(after.logits, expected.logits)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_streams_in_groups_are_those_computed_at_once(precision: Any) -> None:
    net = network(depth=8).cuda()
    groups, together = (Streams(net, 5, copies=4, precision=precision, together=most) for most in (2, 5))
    for seed in range(3):
        answers, expected = (streams.predict(bytes_(5, seed)) for streams in (groups, together))
        assert torch.allclose(answers.logits, expected.logits, atol=1e-4 if precision == "fp32" else 2e-2)
    state = groups.state_dict()
    together.load_state_dict(state)
    for name, tensor in together.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name].cpu()), name


def test_no_more_are_computed_at_once_than_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CUDA_LARGEST", 3 * 4 * 16 * 32 * 32 + 1)  # three times four views' largest features
    streams, episodes = Streams(network(depth=8).cuda(), 5, copies=4), Episodic(network(depth=8).cuda(), copies=4)
    streams.predict(bytes_(5))
    assert streams.together == 3
    assert episodes._choose_parallel(bytes_(5)) == 3


@pytest.mark.parametrize("kind", ["streams", "episodes"])
def test_what_does_not_fit_into_the_memory_is_run_in_smaller_numbers(kind: str) -> None:
    """With the real memory, cut down so far that not all fit."""
    net, images = network(depth=8).cuda(), bytes_(64)

    def make(most: int) -> Any:
        given: dict[str, Any] = {"copies": 32, "precision": "bf16"}
        return Streams(net, 64, together=most, **given) if kind == "streams" else Episodic(net, parallel=most, **given)

    few = make(8)
    expected = few.predict(images)
    gc.collect()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 200 * 2**20  # all 64 hold more than this for the backward pass
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        many = make(64)
        answers = many.predict(images)
        assert (many.together if kind == "streams" else many.parallel) < 64
        assert torch.allclose(answers.logits, expected.logits, atol=2e-2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("training", [True, False])
def test_replicas_with_batch_norm_are_the_network(training: bool) -> None:
    net = network("batch", depth=8).cuda()
    images = pictures(16, size=32).cuda()
    replicas = Replicas(net, 2, example=images[:2])
    replicas.batch_norms.train(training)
    net.train(training)
    with torch.no_grad():
        found = replicas(images.unflatten(0, (2, 8)))
        for row, piece in enumerate(images.chunk(2)):
            one = copy.deepcopy(net)
            torch.testing.assert_close(found[row], one(piece), rtol=1e-3, atol=1e-3)
            for name, buffer in one.named_buffers():
                if name in replicas.tensors:
                    torch.testing.assert_close(replicas.tensors[name][row], buffer, rtol=1e-3, atol=1e-4)


def test_what_runs_concurrently_is_there_after_waiting() -> None:
    concurrent, x = Concurrent(torch.device("cuda")), normals(2048, 2048)
    for _ in range(3):
        later = concurrent.later(lambda: (x @ x).sum(1))
        meanwhile = (x.T @ x).sum(1)
        torch.testing.assert_close(later.result(), (x @ x).sum(1))
        torch.testing.assert_close(meanwhile, (x.T @ x).sum(1))
    later = concurrent.later(lambda: concurrent.later(torch.add, x, x).result() * 2)  # one within another
    concurrent.wait()
    assert torch.equal(later.result(), 4 * x)


def test_a_captured_function_takes_new_inputs() -> None:
    def double(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x * 2 + y, x - y

    captured = Captured(double, torch.zeros(5, device="cuda"), torch.ones(5, device="cuda"))
    for seed in range(3):
        x, y = normals(5, seed=seed), normals(5, seed=seed + 10)
        assert all(torch.equal(a, b) for a, b in zip(captured(x, y), double(x, y), strict=True))


def test_arithmetic_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with arithmetic("tf32", torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
    with arithmetic("fp32", torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == before
