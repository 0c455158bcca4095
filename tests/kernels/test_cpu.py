"""The C++ convolutions and GroupNorm, against torch's own in double precision."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime import kernels
from testtime.adaptation.streams import Streams
from testtime.kernels import CPU_CHANNELS, Convolution, ConvolutionForm, NormForm, cpu
from testtime.kernels.cpu import build
from testtime.networks import resnet26
from testtime.networks.replicas import PARTS, Replicas
from testtime.networks.stacked import stack_layers
from testtime.networks.stacking import Stacking
from testtime.randomness import Draws

needs_compiler = pytest.mark.skipif(not build.available(), reason="needs a C++ compiler")


def numbers(seed: int, *shape: int) -> Tensor:
    return Draws.of(seed, torch.arange(shape[0])).normal(*shape[1:])


def norm_of(count: int, channels: int, relu: bool = True, groups: int = 8) -> NormForm:
    weight, bias = 1 + 0.3 * numbers(3, count, channels), 0.5 * numbers(4, count, channels)
    return NormForm(groups, weight, bias, 1e-5, relu)


def norm_alone(x: Tensor, norm: NormForm, weight: Tensor, bias: Tensor) -> Tensor:
    """GroupNorm of each replica's images by torch."""
    pieces = zip(x.chunk(len(weight)), weight, bias, strict=True)
    y = torch.cat([F.group_norm(piece, norm.groups, w, b, norm.eps) for piece, w, b in pieces])
    return F.relu(y) if norm.relu else y


def convolve_alone(x: Tensor, weight: Tensor, plus: Tensor | None) -> Tensor:
    y = torch.cat([F.conv2d(piece, w, padding=1) for piece, w in zip(x.chunk(len(weight)), weight, strict=True)])
    return y if plus is None else y + plus


def convolve_strided(x: Tensor, weight: Tensor, stride: int, padding: int, plus: Tensor | None = None) -> Tensor:
    form = ConvolutionForm((stride, stride), (padding, padding), (1, 1), 1)
    return cpu.convolve_strided(x, weight, None, form, plus)


def check(ours: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for one, other in zip(ours, exact, strict=True):
        assert one.shape == other.shape
        scale = float(other.detach().abs().max())
        assert torch.allclose(one.double(), other, rtol=0, atol=tolerance * scale)


_DTYPES = torch.float32, torch.float64
SIZES = [(1, 1, 1), (1, 2, 3), (3, 5, 4), (2, 8, 8), (5, 4, 4), (2, 7, 16), (7, 9, 10), (32, 16, 16)]
SHAPES = [
    pytest.param(channels, *size, marks=pytest.mark.slow if channels * math.prod(size) > 10**6 else ())
    for channels in CPU_CHANNELS
    for size in SIZES
]


@needs_compiler
@pytest.mark.parametrize(("channels", "images", "height", "width"), SHAPES)
@pytest.mark.parametrize("form", ["plain", "plus", "norm", "norm and plus"])
def test_convolution_and_its_gradients(channels: int, images: int, height: int, width: int, form: str) -> None:
    count = 2
    x, plus, grad = (numbers(seed, count * images, channels, height, width) for seed in (0, 1, 2))
    weight, norm = numbers(5, count, channels, channels, 3, 3), norm_of(count, channels)
    tensors = [x, weight, plus, norm.weight, norm.bias]
    used = [True, True, "plus" in form, "norm" in form, "norm" in form]
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    given = NormForm(norm.groups, ours[3], ours[4], norm.eps, norm.relu) if "norm" in form else None
    y = cpu.convolve_chain(ours[0], [Convolution(ours[1], given)], ours[2] if "plus" in form else None)
    normed = norm_alone(exact[0], norm, exact[3], exact[4]) if "norm" in form else exact[0]
    expected = convolve_alone(normed, exact[1], exact[2] if "plus" in form else None)
    check([y], [expected], 2e-6)
    if "norm" in form and (channels // norm.groups) * height * width < 8:
        return  # a norm of so few numbers amplifies rounding without bound
    wanted = [place for place in range(5) if used[place]]
    gradients = torch.autograd.grad(y, [ours[place] for place in wanted], grad)
    check(list(gradients), list(torch.autograd.grad(expected, [exact[p] for p in wanted], grad.double())), 2e-5)
    with torch.no_grad():
        layer = Convolution(weight, norm if "norm" in form else None)
        again = cpu.convolve_chain(x, [layer], plus if "plus" in form else None)
    assert torch.equal(again, y)


@needs_compiler
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("count", "images", "channels"), [(1, 1, 16), (2, 3, 32), (3, 2, 64)])
def test_batch_norm_before_a_convolution_and_its_gradients(count: int, images: int, channels: int, relu: bool) -> None:
    """With running statistics, which are constants."""
    x, grad = (numbers(seed, count * images, channels, 5, 6) for seed in (0, 1))
    norm, mean, variance = norm_of(count, channels), numbers(5, count, channels), 0.5 + numbers(6, count, channels) ** 2
    tensors = [x, numbers(7, count, channels, channels, 3, 3), norm.weight, norm.bias]
    ours, exact = ([tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors] for dtype in _DTYPES)
    moments = torch.stack([mean, (variance + 1e-5).rsqrt()], dim=-1)
    y = cpu.convolve_chain(ours[0], [Convolution(ours[1], NormForm(channels, *ours[2:], 1e-5, relu, moments))])
    rows = zip(exact[0].chunk(count), mean.double(), variance.double(), *exact[2:], strict=True)
    normed = torch.cat([F.batch_norm(*given, training=False, eps=1e-5) for given in rows])
    expected = convolve_alone(F.relu(normed) if relu else normed, exact[1], None)
    check([y], [expected], 2e-6)
    gradients = torch.autograd.grad(y, ours, grad), torch.autograd.grad(expected, exact, grad.double())
    check(*map(list, gradients), 2e-5)


@needs_compiler
@pytest.mark.parametrize("count", [1, 2])
def test_blocks_with_batch_norm_are_one_chain(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = resnet26(4, depth=14, norm="batch", seed=0)
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.5 * numbers(7, 1, *buffer.shape)[0].abs())
    images, calls = numbers(0, count, 3, 3, 16, 16).abs().clamp(max=1), 0
    chained = cpu.convolve_chain

    def count_calls(*given: Any) -> Tensor:
        nonlocal calls
        calls += len(given[1]) > 1
        return chained(*given)

    kernels._load.cache_clear()
    monkeypatch.setattr(cpu, "convolve_chain", count_calls)
    found = []
    for on in (True, False):
        monkeypatch.setenv("TESTTIME_KERNELS", "on" if on else "off")
        replicas = Replicas(net, count)
        moving = list(replicas.parameters(PARTS).values())
        for tensor in moving:
            tensor.requires_grad_()
        y = replicas.self_supervise(images)
        found.append(
            [y.detach(), *torch.autograd.grad(y.square().sum(), moving, allow_unused=True, materialize_grads=True)]
        )
        assert calls == 3
    kernels._load.cache_clear()
    for ours, plain in zip(*found, strict=True):
        assert torch.allclose(ours, plain, rtol=0, atol=2e-5 * float(plain.abs().max()) + 1e-12)


@needs_compiler
@pytest.mark.parametrize("channels", [16, 64])
@pytest.mark.parametrize(("count", "images"), [(1, 5), (3, 2), (2, 40)])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_chains_and_their_gradients(layers: int, count: int, images: int, channels: int) -> None:
    """Against the same chain, convolution by convolution."""
    x, plus, grad = (numbers(seed, count * images, channels, 5, 6) for seed in (0, 1, 2))
    chain = [
        Convolution(numbers(9 + place, count, channels, channels, 3, 3) / channels**0.5, norm_of(count, channels))
        for place in range(layers)
    ]
    norms = [layer.norm for layer in chain if layer.norm is not None]
    moving = [x, *(t for one, norm in zip(chain, norms, strict=True) for t in (one.weight, norm.weight, norm.bias))]
    moving += [plus] if layers % 2 else []
    for tensor in moving:
        tensor.requires_grad_()
    ours = cpu.convolve_chain(x, chain, plus if layers % 2 else None)
    expected, rest = x, chain
    if layers % 2:
        expected, rest = cpu.convolve_chain(x, chain[:1], plus), chain[1:]
    for first, second in zip(rest[::2], rest[1::2], strict=True):
        expected = cpu.convolve_chain(cpu.convolve_chain(expected, [first]), [second], expected)
    assert torch.equal(ours, expected)
    gradients, wanted = (torch.autograd.grad(y, moving, grad) for y in (ours, expected))
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    with torch.no_grad():
        assert torch.equal(cpu.convolve_chain(x, chain, plus if layers % 2 else None), ours)


@needs_compiler
@pytest.mark.parametrize("images", [1, 3])
def test_a_chain_of_replicas_that_are_alike_is_that_of_any(images: int) -> None:
    x, grad = (numbers(seed, 5 * images, 16, 6, 7) for seed in (0, 1))
    one, norm = [numbers(2 + place, 1, 16, 16, 3, 3) / 4 for place in range(4)], norm_of(1, 16)
    found = []
    for alike in (True, False):
        stacked = [tensor.expand(5, *tensor.shape[1:]) for tensor in (*one, norm.weight, norm.bias)]
        stacked = stacked if alike else [tensor.contiguous() for tensor in stacked]
        moving = [tensor.requires_grad_() for tensor in (x.clone(), *stacked)]
        layers = [Convolution(weight, NormForm(8, *moving[-2:], norm.eps, True)) for weight in moving[1:-2]]
        y = cpu.convolve_chain(moving[0], layers)
        found.append([y, *torch.autograd.grad(y, moving, grad)])
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


@needs_compiler
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (1, 0), (3, 2), (4, 3)])
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 16), (16, 32), (5, 48), (34, 64)])
@pytest.mark.parametrize(
    ("count", "images", "height", "width"), [(4, 1, 9, 6), (3, 3, 5, 8), (1, 2, 3, 3), (1, 1, 4, 21)]
)
def test_strided_convolution_and_its_gradients(
    alike: bool, stride: int, padding: int, inputs: int, outputs: int, count: int, images: int, height: int, width: int
) -> None:
    x, weight = numbers(0, count * images, inputs, height, width), numbers(1, count, outputs, inputs, 3, 3)
    weight = weight[:1].expand_as(weight) if alike else weight
    ours = [x.clone().requires_grad_(), weight.detach().requires_grad_()]
    exact = [x.double().requires_grad_(), weight.double().contiguous().requires_grad_()]
    y = convolve_strided(ours[0], ours[1], stride, padding)
    pieces = zip(exact[0].chunk(count), exact[1], strict=True)
    expected = torch.cat([F.conv2d(piece, w, None, stride, padding) for piece, w in pieces])
    assert y.is_contiguous(memory_format=torch.channels_last)
    check([y], [expected], 2e-6)
    grad = numbers(2, *y.shape)
    gradients = torch.autograd.grad(y, ours, grad)
    check(list(gradients), list(torch.autograd.grad(expected, exact, grad.double())), 2e-6)
    (alone,) = torch.autograd.grad(convolve_strided(x, ours[1], stride, padding), ours[1:], grad)
    assert torch.equal(alone, gradients[1])
    assert torch.equal(convolve_strided(x, weight, stride, padding, grad), y + grad)


@needs_compiler
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("channels", "groups"), [(16, 8), (16, 1), (48, 3), (64, 64), (512, 32)])
@pytest.mark.parametrize(("height", "width"), [(5, 3), (8, 8)])
def test_group_norm_and_its_gradients(channels: int, groups: int, relu: bool, height: int, width: int) -> None:
    count, norm = 3, norm_of(3, channels, relu, groups)
    x, grad = 2 + 3 * numbers(0, 6, channels, height, width), numbers(2, 6, channels, height, width)
    ours = [tensor.clone().requires_grad_() for tensor in (x, norm.weight, norm.bias)]
    exact = [tensor.double().requires_grad_() for tensor in (x, norm.weight, norm.bias)]
    y = cpu.group_norm(ours[0], NormForm(groups, ours[1], ours[2], norm.eps, relu))
    expected = norm_alone(exact[0], norm, exact[1], exact[2])
    check([y], [expected], 2e-6)
    assert len(ours[1]) == count
    check(list(torch.autograd.grad(y, ours, grad)), list(torch.autograd.grad(expected, exact, grad.double())), 2e-5)


@needs_compiler
@pytest.mark.parametrize(("channels", "size"), [(16, 32), (32, 16), (64, 8), (128, 7), (256, 7), (64, 2)])
def test_rounding_is_a_few_times_torchs(channels: int, size: int) -> None:
    x, weight = numbers(0, 8, channels, size, size).relu(), numbers(1, 1, channels, channels, 3, 3)
    grad, results = numbers(2, *x.shape), []
    for dtype, compiled in ((torch.float32, True), (torch.float32, False), (torch.float64, False)):
        images, filters = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, weight))
        y = cpu.convolve_chain(images, [Convolution(filters)]) if compiled else convolve_alone(images, filters, None)
        results.append([y, *torch.autograd.grad(y, (images, filters), grad.to(dtype))])
    for ours, torchs, exact in zip(*results, strict=True):
        assert (ours - exact).square().mean() < 4**2 * (torchs - exact).square().mean()


@needs_compiler
def test_parameters_may_lie_anywhere() -> None:
    """As rows of a larger tensor, which is how replicas hold them, or in any other order."""
    x, norm = numbers(0, 4, 16, 6, 6), norm_of(2, 16)
    weight = numbers(5, 2, 16, 16, 3, 3)
    expected = cpu.convolve_chain(x, [Convolution(weight, norm)])
    rows = torch.cat([norm.weight, weight.flatten(1), norm.bias], dim=1)
    inside = NormForm(8, rows[:, :16], rows[:, -16:], norm.eps, True)
    layer = Convolution(rows[:, 16:-16].unflatten(1, (16, 16, 3, 3)), inside)
    assert torch.equal(cpu.convolve_chain(x, [layer]), expected)
    turned = weight.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    apart = NormForm(8, norm.weight, rows[:, -16:], norm.eps, True)
    assert torch.equal(cpu.convolve_chain(x.contiguous(), [Convolution(turned, apart)]), expected)


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 16, 4, 4), (3, 16, 4, 4), (2, 32, 4, 4), (2, 3, 4, 4), (0, 16, 4, 4)])
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    """Fewer than there are replicas, not as many for each, of other channels, or none."""
    x, weight, norm = torch.zeros(shape), torch.zeros(2, 16, 16, 3, 3), norm_of(2, 16)
    for form in (
        lambda: cpu.convolve_chain(x, [Convolution(weight)]),
        lambda: cpu.convolve_chain(x, [Convolution(weight, norm)] * 2),
        lambda: convolve_strided(x, weight, 2, 1),
        lambda: cpu.group_norm(x, norm),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            form()


@needs_compiler
def test_images_too_large_for_the_kernels_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 2³⁰ numbers; here with a smaller bound, since they fill the memory."""
    x = numbers(0, 1, 16, 8, 8)
    for layer in (nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Conv2d(16, 32, 3, bias=False), nn.GroupNorm(8, 16)):
        stacked, channels = stack_layers(layer, Stacking(1)), 32 if isinstance(layer, nn.Conv2d) else 16
        monkeypatch.setattr(kernels, "CPU_LARGEST", channels * 8 * 8 + 1)
        compiled = stacked(x)
        monkeypatch.setattr(kernels, "CPU_LARGEST", 16 * 8 * 8)
        assert torch.equal(stacked(x), layer(x))
        assert not torch.equal(compiled, layer(x))
        assert torch.allclose(compiled, layer(x), atol=1e-5)


@needs_compiler
def test_a_million_and_a_half_images() -> None:
    """More parts than 32 bits can count with."""
    x, weight = numbers(0, 1000, 1500, 16).view(-1, 16, 1, 1), numbers(1, 1, 16, 16, 3, 3)
    y = cpu.convolve_chain(x, [Convolution(weight)])
    assert torch.allclose(y.flatten(1), x.flatten(1) @ weight[0, :, :, 1, 1].T, atol=1e-4)


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says there how much is used")
def test_too_little_memory_is_an_error() -> None:
    """Not the end of the process; the filters of this convolution take 9 MB when they are transformed."""
    code = """if True:
        import resource, torch
        from testtime.kernels import ConvolutionForm, cpu
        torch.set_num_threads(1)
        x, weight = torch.ones(1, 256, 4, 4), torch.ones(1, 256, 256, 3, 3)
        form = ConvolutionForm((1, 1), (1, 1), (1, 1), 1)
        cpu.convolve(x[:, :16], weight[:, :16, :16], None, form, None)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))
        for function in (cpu.convolve, cpu.convolve_strided):
            try:
                function(x, weight, None, form, None)
            except MemoryError as error:
                print("testtime.kernels.cpu" in str(error))
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(round(float(cpu.convolve(x, weight, None, form, None)[0, 0, 1, 1])))
    """
    # Otherwise the C library may have kept room for it from what was freed before.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["True", "True", "2304"], done.stderr


@needs_compiler
def test_no_images_have_no_answers() -> None:
    net = resnet26(depth=8, size=8, seed=1).eval()
    assert Replicas(net, 2, PARTS)(torch.zeros(2, 0, 3, 8, 8)).shape == (2, 0, 10)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_no_bit() -> None:
    x, weight, norm = numbers(0, 24, 32, 9, 8).requires_grad_(), numbers(1, 2, 32, 32, 3, 3), norm_of(2, 32)
    moving = [x, weight.requires_grad_(), norm.weight.requires_grad_(), norm.bias.requires_grad_()]
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        y = cpu.convolve_chain(cpu.group_norm(x, norm), [Convolution(weight, norm)] * 5, x)
        y = convolve_strided(y, weight, 2, 1)
        results.append([y, *torch.autograd.grad(y.square().sum(), moving)])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_compiler
def test_an_image_is_the_same_in_any_company() -> None:
    x, weight, norm = numbers(0, 7, 64, 8, 8), numbers(1, 1, 64, 64, 3, 3), norm_of(1, 64)
    layers = [Convolution(weight, norm)] * 3
    together = cpu.convolve_chain(x, layers, x)
    for n in range(7):
        assert torch.equal(cpu.convolve_chain(x[n : n + 1], layers, x[n : n + 1]), together[n : n + 1])


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_explodes_shows_and_stays_in_its_replica(bad: float) -> None:
    x, weight, norm = numbers(0, 6, 16, 8, 8), numbers(1, 3, 16, 16, 3, 3), norm_of(3, 16)
    spoiled = x.clone()
    spoiled[2, 3, 4, 4] = bad  # of the second replica
    moving = [tensor.requires_grad_() for tensor in (weight, norm.weight, norm.bias)]
    clean, dirty = (cpu.convolve_chain(images, [Convolution(weight, norm)] * 2) for images in (x, spoiled))
    assert not dirty[2].isfinite().all()
    pairs = [torch.autograd.grad(y.square().sum(), moving) for y in (clean, dirty)]
    for a, b in ((clean.unflatten(0, (3, 2)), dirty.unflatten(0, (3, 2))), *zip(*pairs, strict=True)):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
        assert not b[1].isfinite().all()


@needs_compiler
def test_there_is_no_second_derivative() -> None:
    weight = numbers(1, 1, 16, 16, 3, 3).requires_grad_()
    y = cpu.convolve_chain(numbers(0, 1, 16, 4, 4), [Convolution(weight)])
    (gradient,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@needs_compiler
@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are kinds of x86-64")
@pytest.mark.parametrize("kind", ["x86-64-v2", "x86-64-v3"])
@pytest.mark.slow
def test_processors_of_narrower_vectors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "x86-64-v3" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = [f"-march={kind}" if flag == "-march=native" else flag for flag in build._FLAGS]
    monkeypatch.setattr(build, "_FLAGS", tuple(flags))
    assert build.available()
    x, weight, norm = numbers(0, 6, 16, 9, 8), numbers(1, 2, 16, 16, 3, 3), norm_of(2, 16)
    ours = [tensor.clone().requires_grad_() for tensor in (x, weight, norm.weight, norm.bias)]
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, norm.weight, norm.bias)]
    y = cpu.convolve_chain(ours[0], [Convolution(ours[1], NormForm(8, ours[2], ours[3], norm.eps, True))])
    y = convolve_strided(y, ours[1], 2, 1)
    expected = convolve_alone(norm_alone(exact[0], norm, exact[2], exact[3]), exact[1], None)
    pieces = zip(expected.chunk(2), exact[1], strict=True)
    expected = torch.cat([F.conv2d(piece, w, None, 2, 1) for piece, w in pieces])
    check([y], [expected], 2e-6)
    grad = numbers(2, *y.shape)
    gradients, wanted = torch.autograd.grad(y, ours, grad), torch.autograd.grad(expected, exact, grad.double())
    check(list(gradients), list(wanted), 2e-5)


@needs_compiler
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_learned_does_not_depend_on_the_number_of_threads(count: int) -> None:
    """Bit for bit; torch's own gradients by filters do."""
    net, found = resnet26(depth=14, seed=1), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        streams = Streams(net, count, lr=0.05)
        found.append([streams.predict(numbers(step, count, 3, 32, 32).sigmoid()).logits for step in range(3)])
    assert all(torch.equal(one, other) for calls in found[1:] for one, other in zip(found[0], calls, strict=True))
