"""On a GPU: the same numbers as on the CPU, the kernels against torch, replayed graphs against eager steps."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from testtime import Episodic, Fixed, Online, Prediction, ResizedCropFlip, Rotation, YNet, calibrate, resnet26
from testtime.capture import Captured, arithmetic, check_precision
from testtime.data import TensorSet
from testtime.networks.replicas import Replicas
from testtime.randomness import Draws
from testtime.streams import Streams
from testtime.training import Recipe, Trainer, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


def pictures(count: int, size: int = 32, seed: int = 0) -> Tensor:
    return Draws.of(seed, torch.arange(count)).uniform(3, size, size)


def network(norm: str = "group", depth: int = 14) -> YNet:
    return resnet26(depth=depth, norm=norm, seed=1).eval()  # type: ignore[arg-type]


def normals(*shape: int, seed: int = 0) -> Tensor:
    return Draws.of(seed, torch.arange(shape[0])).normal(*shape[1:]).cuda()


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
        a, b = getattr(there, field.name).cpu(), getattr(here, field.name)
        assert torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance), field.name


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("parallel", [1, 4])
def test_episodes_are_those_of_the_cpu(norm: str, parallel: int) -> None:
    net, images = network(norm), pictures(6)
    given: dict[str, Any] = {"steps": 3, "lr": 0.001, "copies": 8, "parallel": parallel}
    here = Episodic(net, **given).predict(images)
    there = Episodic(copy.deepcopy(net).cuda(), **given).predict(images.cuda())
    assert there.logits.is_cuda
    compare(there, here, 1e-3)


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 0.05), ("bf16", 0.2)])
def test_lower_precision_stays_near(precision: Any, tolerance: float) -> None:
    net, images = network(), pictures(8)
    given: dict[str, Any] = {"steps": 3, "lr": 0.001, "copies": 8, "parallel": 4}
    here = Episodic(net, **given).predict(images)
    there = Episodic(net.cuda(), precision=precision, **given).predict(images.cuda())
    assert there.logits.dtype == torch.float32
    assert (there.logits.cpu() - here.logits).abs().max() < tolerance
    assert there.adapted.all()


def test_images_of_the_cpu_are_taken_along() -> None:
    net = network().cuda()
    assert torch.equal(Fixed(net)(pictures(2)), Fixed(net)(pictures(2).cuda()))


def adapters() -> dict[str, Callable[[YNet], Any]]:
    return {
        "episodic": lambda net: Episodic(net, steps=3, copies=8, parallel=2),
        "episodic, momentum": lambda net: Episodic(net, steps=3, copies=8, parallel=2, optimizer=MOMENTUM),
        "online": lambda net: Online(net, copies=8),
        "online, momentum": lambda net: Online(net, copies=8, optimizer=MOMENTUM),
        "online, gated": lambda net: Online(net, copies=8, threshold=0.3),
        "online, shared": lambda net: Online(net, copies=8, share="batch"),
        "streams": lambda net: Streams(net, 4, copies=8),
        "streams, bf16": lambda net: Streams(net, 4, copies=8, precision="bf16"),
        "streams that take turns": lambda net: Streams(net, 4, copies=8, together=3, optimizer=MOMENTUM),
    }


def be_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step be taken by itself."""
    import testtime.adapt

    for name in ("replay", "replay_each"):
        monkeypatch.setattr(testtime.adapt, name, lambda *given: None)


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("name", list(adapters()))
def test_a_replayed_graph_is_the_eager_step(name: str, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(norm).cuda()
    replayed = adapters()[name](net)
    calls = [replayed.predict(pictures(4, seed=seed).cuda()) for seed in range(3)]
    be_eager(monkeypatch)
    eager = adapters()[name](net)
    tolerance = 2e-2 if "bf16" in name else 1e-4
    for seed, call in enumerate(calls):
        expected = eager.predict(pictures(4, seed=seed).cuda())
        for field in fields(Prediction):
            a, b = getattr(call, field.name).float(), getattr(expected, field.name).float()
            assert torch.allclose(a, b, atol=tolerance, rtol=tolerance), (seed, field.name)


def bytes_(count: int, seed: int = 0) -> Tensor:
    return (pictures(count, seed=seed) * 255).to(torch.uint8).cuda()


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
        images = pictures(3).cuda()
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
def test_gathered_gradients_are_those_of_autograd(norm: str, count: int, precision: Any) -> None:
    with arithmetic(precision, torch.device("cuda")):
        replicas = Replicas(network(norm).cuda(), count, ("encoder", "ssl"), dtype=check_precision(precision))
        for parameter in replicas.parameters(("encoder", "ssl")).values():
            parameter.requires_grad_(True)
        views = pictures(4 * count).cuda().unflatten(0, (count, 4))

        def loss() -> Tensor:
            return replicas.self_supervise(views).float().square().sum()

        found = [replicas.gradient(loss)[1] for _ in range(2)]
        replicas._gathering = None
        expected = replicas.gradient(loss)[1]
    assert torch.equal(*found)
    assert relative(found[0], expected) < 1e-5
    learning = sum(tensor[0].numel() for tensor in replicas.parameters(("encoder", "ssl")).values())
    assert not found[0][:, learning:].any()


def test_answers_of_a_graph_are_not_overwritten_by_the_next() -> None:
    adapter = Online(network().cuda(), copies=4)
    first = adapter.predict(pictures(1).cuda())
    kept = first.logits.clone()
    adapter.predict(pictures(1, seed=5).cuda())
    assert torch.equal(first.logits, kept)


def test_a_recorded_stream_reads_no_memory_that_was_given_away() -> None:
    adapter = Online(network(depth=8).cuda(), copies=4)
    adapter.predict(bytes_(2))
    zeros = [torch.zeros(64, dtype=torch.uint8, device="cuda") for _ in range(2000)]  # takes what is free
    assert adapter.predict(bytes_(2, seed=1)).adapted.all()
    assert not any(zero.any() for zero in zeros)


def test_a_stream_that_is_dropped_gives_its_memory_back_at_once() -> None:
    adapter = Online(network(depth=8).cuda(), copies=4)
    adapter.predict(bytes_(2))
    assert adapter._learner is not None
    numbers = weakref.ref(adapter._learner.replicas.numbers)
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
        one.predict(pictures(3).cuda())
        other.load_state_dict({name: tensor.cpu() for name, tensor in one.state_dict().items()})
        assert torch.equal(one(pictures(3, seed=1).cuda()), other(pictures(3, seed=1).cuda()))


def test_a_bad_image_on_the_gpu_leaves_no_trace() -> None:
    net = network().cuda()
    adapter, untouched = Online(net, copies=4), Online(net, copies=4)
    numbers = torch.arange(2)
    for one in (adapter, untouched):
        one.predict(pictures(2).cuda(), numbers)
    bad = adapter.predict(torch.full((1, 3, 32, 32), float("nan")).cuda(), torch.tensor([7]))
    assert bad.rolled_back.all()
    after, expected = (one.predict(pictures(2, seed=1).cuda(), numbers + 2) for one in (adapter, untouched))
    assert torch.equal(after.logits, expected.logits)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_streams_that_take_turns_are_those_side_by_side(precision: Any) -> None:
    net = network(depth=8).cuda()
    turns, together = (Streams(net, 5, copies=4, precision=precision, together=most) for most in (2, 5))
    for seed in range(3):
        answers, expected = (streams.predict(bytes_(5, seed)) for streams in (turns, together))
        assert torch.allclose(answers.logits, expected.logits, atol=1e-4 if precision == "fp32" else 2e-2)
    state = turns.state_dict()
    together.load_state_dict(state)
    for name, tensor in together.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name].cpu()), name


def test_no_more_go_side_by_side_than_our_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LARGEST", 3 * 4 * 16 * 32 * 32 + 1)  # three times four views' largest features
    streams, episodes = Streams(network(depth=8).cuda(), 5, copies=4), Episodic(network(depth=8).cuda(), copies=4)
    streams.predict(bytes_(5))
    assert streams.together == 3
    assert episodes._side_by_side(bytes_(5).cuda()) == 3


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
    room = torch.cuda.memory_reserved() + 200 * 2**20  # all 64 keep more than this for the way back
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        many = make(64)
        answers = many.predict(images)
        assert (many.together if kind == "streams" else many.parallel) < 64
        assert torch.allclose(answers.logits, expected.logits, atol=2e-2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


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


# Training


def learn_some(norm: Any, recipe: Recipe, folder: Path | None = None, progress: Any = None, **given: Any) -> YNet:
    labels = torch.arange(64) % 10
    images = Draws.of(0, torch.arange(64)).integers(100, 3, 32, 32)
    images += (
        150 * (torch.arange(32) // 3 == labels[:, None])[:, None, :, None]
    )  # a bright bar, whose height is the class
    net = resnet26(depth=8, norm=norm, seed=1).cuda()
    return train(net, images.to(torch.uint8).cuda(), labels.cuda(), recipe, folder=folder, progress=progress, **given)


SHORT = Recipe(epochs=3, batch=16, lr=0.01, drops=(2,), attack_steps=2)


def test_images_that_are_read_on_the_way_train_as_those_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come by a stream of their own, while the step before is still running; bit for bit."""
    images = Draws.of(0, torch.arange(512)).integers(256, 3, 32, 32).to(torch.uint8)
    source = TensorSet("pictures", images, torch.arange(512) % 10, tuple("abcdefghij"))
    recipe = replace(SHORT, batch=32, precision="bf16")
    held = train(resnet26(depth=14, seed=1).cuda(), source, recipe=recipe)
    monkeypatch.setattr("testtime.training.pool._resident_bytes", lambda device: 0)
    read = train(resnet26(depth=14, seed=1).cuda(), source, recipe=recipe)
    assert all(map(torch.equal, held.state_dict().values(), read.state_dict().values()))


@pytest.mark.parametrize("method", ["plain", "joint", "alp", "uda"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_training_from_a_graph_is_training_step_by_step(
    norm: Any, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(SHORT, method=method)
    target: dict[str, Any] = {"target": pictures(40).cuda()} if method == "uda" else {}
    replayed = learn_some(norm, recipe, **target)
    monkeypatch.setattr(Trainer, "_replica_fits", lambda self: False)
    monkeypatch.setattr(Trainer, "_record", lambda self, inputs: None)
    plain = learn_some(norm, recipe, **target)
    # With Batch Normalization, weights changed by a millionth at the start end up to 0.08 of the way apart.
    bound = 0.05 if norm == "group" else 0.1
    start = resnet26(depth=8, norm=norm, seed=1).state_dict()
    for (name, one), other in zip(replayed.state_dict().items(), plain.state_dict().values(), strict=True):
        moved = float((other.cpu() - start[name]).abs().max())
        assert float((one - other).abs().max()) <= bound * moved + 1e-6, name


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_training_stopped_on_the_gpu_goes_on_bit_for_bit(norm: Any, precision: Any, tmp_path: Path) -> None:
    def stop(done: int, total: int, text: str) -> None:
        if done == 9:
            raise KeyboardInterrupt

    recipe = replace(SHORT, precision=precision)
    whole = learn_some(norm, recipe).state_dict()
    with pytest.raises(KeyboardInterrupt):
        learn_some(norm, recipe, tmp_path, stop)
    resumed = learn_some(norm, recipe, tmp_path).state_dict()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name


def test_training_in_less_than_float32_learns_what_it_does() -> None:
    exact, *others = (
        [entry["loss"] for entry in net.card.record["epochs"]]
        for net in (
            learn_some("group", replace(SHORT, epochs=30, lr=0.05, drops=(), precision=precision))
            for precision in ("fp32", "tf32", "bf16")
        )
    )
    assert exact[-1] < 0.8 * exact[0]
    for losses in others:
        assert losses != exact
        assert abs(losses[0] - exact[0]) < 0.05
        assert abs(losses[-1] - exact[-1]) < 0.3


# Kernels


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("inputs", "outputs", "size"),
    [(3, 16, 32), (16, 16, 32), (16, 16, 16), (32, 32, 16), (32, 32, 8), (16, 32, 17), (64, 64, 8)],
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_convolve_is_torchs_convolution(
    inputs: int, outputs: int, size: int, stride: int, replicas: int, dtype: torch.dtype
) -> None:
    kernels = pytest.importorskip("testtime.kernels")
    images = 40 if inputs == 64 else 4  # enough for the kernel of many tiles with three replicas, not with one
    x = normals(replicas * images, inputs, size, size).to(dtype).contiguous(memory_format=torch.channels_last)
    weight = normals(replicas, outputs, inputs, 3, 3, seed=1) / (3 * inputs**0.5)
    x.requires_grad_(True)
    weight.requires_grad_(True)
    y = kernels.convolve(x, weight, stride, 1)
    pieces = zip(x.double().chunk(replicas), weight.double(), strict=True)
    expected = torch.cat([F.conv2d(piece, w, None, stride, 1) for piece, w in pieces])
    assert y.shape == expected.shape
    assert y.dtype == dtype
    bound = 1e-2 if dtype == torch.bfloat16 else 2e-3  # bfloat16 has 8 bits, TF32 11
    assert relative(y, expected) < bound
    upstream = normals(*y.shape, seed=2)
    gradients = torch.autograd.grad(y, (x, weight), upstream.to(dtype))
    references = torch.autograd.grad(expected, (x, weight), upstream.to(dtype).double())
    for gradient, reference in zip(gradients, references, strict=True):
        assert gradient.shape == reference.shape
        assert relative(gradient, reference) < bound


def test_convolve_is_the_same_every_time() -> None:
    kernels = pytest.importorskip("testtime.kernels")
    x = normals(12, 16, 32, 32).bfloat16().contiguous(memory_format=torch.channels_last)
    weight = normals(3, 32, 16, 3, 3, seed=1).requires_grad_(True)
    first, second = (
        torch.autograd.grad(kernels.convolve(x, weight, 1, 1).float().square().sum(), weight)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_convolve_adds_a_shortcut() -> None:
    kernels = pytest.importorskip("testtime.kernels")
    x = normals(6, 16, 16, 16).bfloat16().contiguous(memory_format=torch.channels_last).requires_grad_(True)
    shortcut = normals(6, 32, 16, 16, seed=3).bfloat16().contiguous(memory_format=torch.channels_last)
    shortcut.requires_grad_(True)
    weight = (normals(2, 32, 16, 3, 3, seed=1) / 12).requires_grad_(True)
    y = kernels.convolve(x, weight, 1, 1, shortcut)
    expected = kernels.convolve(x, weight, 1, 1).float() + shortcut.float()
    assert relative(y, expected) < 1e-2
    gradients = torch.autograd.grad(y.float().square().sum(), (x, weight, shortcut))
    references = torch.autograd.grad(expected.square().sum(), (x, weight, shortcut))
    for gradient, reference in zip(gradients, references, strict=True):
        assert relative(gradient, reference) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("channels", "groups", "size"), [(16, 8, 32), (32, 8, 17), (64, 8, 8), (64, 32, 16)])
@pytest.mark.parametrize("replicas", [1, 3])
def test_group_norm_is_torchs(
    channels: int, groups: int, size: int, replicas: int, relu: bool, dtype: torch.dtype
) -> None:
    kernels = pytest.importorskip("testtime.kernels")
    x = (normals(replicas * 4, channels, size, size) + 0.5).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = normals(replicas, channels, seed=1) + 1, normals(replicas, channels, seed=2)
    tensors = [tensor.requires_grad_(True) for tensor in (x, weight, bias)]
    y = kernels.group_norm(x, groups, weight, bias, 1e-5, relu)
    pieces = zip(x.double().chunk(replicas), weight.double(), bias.double(), strict=True)
    expected = torch.cat([F.group_norm(piece, groups, w, b, 1e-5) for piece, w, b in pieces])
    expected = F.relu(expected) if relu else expected
    assert y.dtype == dtype
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert relative(y, expected) < bound
    upstream = normals(*y.shape, seed=3)
    gradients = torch.autograd.grad(y, tensors, upstream.to(dtype))
    references = torch.autograd.grad(expected, tensors, upstream.to(dtype).double())
    for gradient, reference in zip(gradients, references, strict=True):
        assert relative(gradient, reference) < 2 * bound
