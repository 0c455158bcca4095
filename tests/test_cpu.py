"""Compiled convolution and GroupNorm, against torch's own in double precision."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime import cpu
from testtime.cpu import build
from testtime.networks import resnet26
from testtime.networks.replicas import PARTS, Replicas
from testtime.networks.tall import Stacking, heighten
from testtime.randomness import Draws
from testtime.streams import Streams

needs_compiler = pytest.mark.skipif(not cpu.available(), reason="there is no C++ compiler, or it is not to be used")


def numbers(seed: int, *shape: int) -> Tensor:
    return Draws.of(seed, torch.arange(shape[0])).normal(*shape[1:])


def norm_of(count: int, channels: int, relu: bool = True, groups: int = 8) -> cpu.GroupNorm:
    weight, bias = 1 + 0.3 * numbers(3, count, channels), 0.5 * numbers(4, count, channels)
    return cpu.GroupNorm(groups, weight, bias, 1e-5, relu)


def norm_alone(x: Tensor, norm: cpu.GroupNorm, weight: Tensor, bias: Tensor) -> Tensor:
    """GroupNorm of each replica's images by torch."""
    pieces = zip(x.chunk(len(weight)), weight, bias, strict=True)
    y = torch.cat([F.group_norm(piece, norm.groups, w, b, norm.eps) for piece, w, b in pieces])
    return F.relu(y) if norm.relu else y


def convolve_alone(x: Tensor, weight: Tensor, plus: Tensor | None) -> Tensor:
    y = torch.cat([F.conv2d(piece, w, padding=1) for piece, w in zip(x.chunk(len(weight)), weight, strict=True)])
    return y if plus is None else y + plus


def check(ours: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for one, other in zip(ours, exact, strict=True):
        assert one.shape == other.shape
        scale = float(other.detach().abs().max())
        assert torch.allclose(one.double(), other, rtol=0, atol=tolerance * scale)


SIZES = [(1, 1, 1), (1, 2, 3), (3, 5, 4), (2, 8, 8), (5, 4, 4), (2, 7, 16), (7, 9, 10), (32, 16, 16)]


@needs_compiler
@pytest.mark.parametrize("channels", cpu.CHANNELS)
@pytest.mark.parametrize(("images", "height", "width"), SIZES)
@pytest.mark.parametrize("form", ["plain", "plus", "norm", "norm and plus"])
def test_convolution_and_its_gradients(channels: int, images: int, height: int, width: int, form: str) -> None:
    count = 2
    x, plus, grad = (numbers(seed, count * images, channels, height, width) for seed in (0, 1, 2))
    weight, norm = numbers(5, count, channels, channels, 3, 3), norm_of(count, channels)
    tensors = [x, weight, plus, norm.weight, norm.bias]
    used = [True, True, "plus" in form, "norm" in form, "norm" in form]
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    given = cpu.GroupNorm(norm.groups, ours[3], ours[4], norm.eps, norm.relu) if "norm" in form else None
    y = cpu.convolve(ours[0], [cpu.Convolution(ours[1], given)], ours[2] if "plus" in form else None)
    normed = norm_alone(exact[0], norm, exact[3], exact[4]) if "norm" in form else exact[0]
    expected = convolve_alone(normed, exact[1], exact[2] if "plus" in form else None)
    check([y], [expected], 2e-6)
    if "norm" in form and (channels // norm.groups) * height * width < 8:
        return  # a norm of so few numbers amplifies rounding without bound
    wanted = [place for place in range(5) if used[place]]
    gradients = torch.autograd.grad(y, [ours[place] for place in wanted], grad)
    check(list(gradients), list(torch.autograd.grad(expected, [exact[p] for p in wanted], grad.double())), 2e-5)
    with torch.no_grad():
        layer = cpu.Convolution(weight, norm if "norm" in form else None)
        again = cpu.convolve(x, [layer], plus if "plus" in form else None)
    assert torch.equal(again, y)


@needs_compiler
@pytest.mark.parametrize("channels", [16, 64])
@pytest.mark.parametrize(("count", "images"), [(1, 5), (3, 2), (2, 40)])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_chains_and_their_gradients(layers: int, count: int, images: int, channels: int) -> None:
    """Against the same chain, convolution by convolution."""
    x, plus, grad = (numbers(seed, count * images, channels, 5, 6) for seed in (0, 1, 2))
    chain = [
        cpu.Convolution(numbers(9 + place, count, channels, channels, 3, 3) / channels**0.5, norm_of(count, channels))
        for place in range(layers)
    ]
    norms = [layer.norm for layer in chain if layer.norm is not None]
    moving = [x, *(t for one, norm in zip(chain, norms, strict=True) for t in (one.weight, norm.weight, norm.bias))]
    moving += [plus] if layers % 2 else []
    for tensor in moving:
        tensor.requires_grad_()
    ours = cpu.convolve(x, chain, plus if layers % 2 else None)
    expected, rest = x, chain
    if layers % 2:
        expected, rest = cpu.convolve(x, chain[:1], plus), chain[1:]
    for first, second in zip(rest[::2], rest[1::2], strict=True):
        expected = cpu.convolve(cpu.convolve(expected, [first]), [second], expected)
    assert torch.equal(ours, expected)
    gradients, wanted = (torch.autograd.grad(y, moving, grad) for y in (ours, expected))
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    with torch.no_grad():
        assert torch.equal(cpu.convolve(x, chain, plus if layers % 2 else None), ours)


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
        layers = [cpu.Convolution(weight, cpu.GroupNorm(8, *moving[-2:], norm.eps, True)) for weight in moving[1:-2]]
        y = cpu.convolve(moving[0], layers)
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
    y = cpu.convolve_strided(ours[0], ours[1], stride, padding)
    pieces = zip(exact[0].chunk(count), exact[1], strict=True)
    expected = torch.cat([F.conv2d(piece, w, None, stride, padding) for piece, w in pieces])
    assert y.is_contiguous(memory_format=torch.channels_last)
    check([y], [expected], 2e-6)
    grad = numbers(2, *y.shape)
    gradients = torch.autograd.grad(y, ours, grad)
    check(list(gradients), list(torch.autograd.grad(expected, exact, grad.double())), 2e-6)
    (alone,) = torch.autograd.grad(cpu.convolve_strided(x, ours[1], stride, padding), ours[1:], grad)
    assert torch.equal(alone, gradients[1])


@needs_compiler
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("channels", "groups"), [(16, 8), (16, 1), (48, 3), (64, 64), (512, 32)])
@pytest.mark.parametrize(("height", "width"), [(5, 3), (8, 8)])
def test_group_norm_and_its_gradients(channels: int, groups: int, relu: bool, height: int, width: int) -> None:
    count, norm = 3, norm_of(3, channels, relu, groups)
    x, grad = 2 + 3 * numbers(0, 6, channels, height, width), numbers(2, 6, channels, height, width)
    ours = [tensor.clone().requires_grad_() for tensor in (x, norm.weight, norm.bias)]
    exact = [tensor.double().requires_grad_() for tensor in (x, norm.weight, norm.bias)]
    y = cpu.group_norm(ours[0], cpu.GroupNorm(groups, ours[1], ours[2], norm.eps, relu))
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
        y = cpu.convolve(images, [cpu.Convolution(filters)]) if compiled else convolve_alone(images, filters, None)
        results.append([y, *torch.autograd.grad(y, (images, filters), grad.to(dtype))])
    for ours, torchs, exact in zip(*results, strict=True):
        assert (ours - exact).square().mean() < 4**2 * (torchs - exact).square().mean()


@needs_compiler
def test_parameters_may_lie_anywhere() -> None:
    """As rows of a larger tensor, which is how replicas hold them, or in any other order."""
    x, norm = numbers(0, 4, 16, 6, 6), norm_of(2, 16)
    weight = numbers(5, 2, 16, 16, 3, 3)
    expected = cpu.convolve(x, [cpu.Convolution(weight, norm)])
    rows = torch.cat([norm.weight, weight.flatten(1), norm.bias], dim=1)
    inside = cpu.GroupNorm(8, rows[:, :16], rows[:, -16:], norm.eps, True)
    layer = cpu.Convolution(rows[:, 16:-16].unflatten(1, (16, 16, 3, 3)), inside)
    assert torch.equal(cpu.convolve(x, [layer]), expected)
    turned = weight.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
    apart = cpu.GroupNorm(8, norm.weight, rows[:, -16:], norm.eps, True)
    assert torch.equal(cpu.convolve(x.contiguous(), [cpu.Convolution(turned, apart)]), expected)


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 16, 4, 4), (3, 16, 4, 4), (2, 32, 4, 4), (2, 3, 4, 4), (0, 16, 4, 4)])
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    """Fewer than there are replicas, not as many for each, of other channels, or none."""
    x, weight, norm = torch.zeros(shape), torch.zeros(2, 16, 16, 3, 3), norm_of(2, 16)
    for form in (
        lambda: cpu.convolve(x, [cpu.Convolution(weight)]),
        lambda: cpu.convolve(x, [cpu.Convolution(weight, norm)] * 2),
        lambda: cpu.convolve_strided(x, weight, 2, 1),
        lambda: cpu.group_norm(x, norm),
    ):
        with pytest.raises(ValueError, match="do not fit a layer of 2 replicas and 16 channels"):
            form()


@needs_compiler
def test_images_too_large_for_the_kernels_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 2³⁰ numbers; here with a smaller bound, since they fill the memory."""
    x = numbers(0, 1, 16, 8, 8)
    for layer in (nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Conv2d(16, 32, 3, bias=False), nn.GroupNorm(8, 16)):
        tall, channels = heighten(layer, Stacking(1)), 32 if isinstance(layer, nn.Conv2d) else 16
        monkeypatch.setattr(cpu, "LARGEST", channels * 8 * 8 + 1)
        compiled = tall(x)
        monkeypatch.setattr(cpu, "LARGEST", 16 * 8 * 8)
        assert torch.equal(tall(x), layer(x))
        assert not torch.equal(compiled, layer(x))
        assert torch.allclose(compiled, layer(x), atol=1e-5)


@needs_compiler
def test_a_million_and_a_half_images() -> None:
    """More parts than 32 bits can count with."""
    x, weight = numbers(0, 1000, 1500, 16).view(-1, 16, 1, 1), numbers(1, 1, 16, 16, 3, 3)
    y = cpu.convolve(x, [cpu.Convolution(weight)])
    assert torch.allclose(y.flatten(1), x.flatten(1) @ weight[0, :, :, 1, 1].T, atol=1e-4)


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says there how much is used")
def test_too_little_memory_is_an_error() -> None:
    """Not the end of the process; the filters of this convolution take 9 MB when they are transformed."""
    code = """if True:
        import resource, torch
        from testtime import cpu
        torch.set_num_threads(1)
        x, weight = torch.ones(1, 256, 4, 4), torch.ones(1, 256, 256, 3, 3)
        cpu.convolve(x[:, :16], [cpu.Convolution(weight[:, :16, :16])])
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))
        for form in (
            lambda: cpu.convolve(x, [cpu.Convolution(weight)]),
            lambda: cpu.convolve_strided(x, weight, 1, 1),
        ):
            try:
                form()
            except MemoryError as error:
                print(error)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(round(float(cpu.convolve(x, [cpu.Convolution(weight)])[0, 0, 1, 1])))
    """
    # Otherwise the C library may have kept room for it from what was freed before.
    surroundings = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=surroundings)
    message = "there is not enough memory for the kernels of testtime.cpu"
    assert done.stdout.splitlines() == [message, message, "2304"], done.stderr


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
        y = cpu.convolve(cpu.group_norm(x, norm), [cpu.Convolution(weight, norm)] * 5, x)
        y = cpu.convolve_strided(y, weight, 2, 1)
        results.append([y, *torch.autograd.grad(y.square().sum(), moving)])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_compiler
def test_an_image_is_the_same_in_any_company() -> None:
    x, weight, norm = numbers(0, 7, 64, 8, 8), numbers(1, 1, 64, 64, 3, 3), norm_of(1, 64)
    layers = [cpu.Convolution(weight, norm)] * 3
    together = cpu.convolve(x, layers, x)
    for n in range(7):
        assert torch.equal(cpu.convolve(x[n : n + 1], layers, x[n : n + 1]), together[n : n + 1])


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_explodes_shows_and_stays_in_its_replica(bad: float) -> None:
    x, weight, norm = numbers(0, 6, 16, 8, 8), numbers(1, 3, 16, 16, 3, 3), norm_of(3, 16)
    spoiled = x.clone()
    spoiled[2, 3, 4, 4] = bad  # of the second replica
    moving = [tensor.requires_grad_() for tensor in (weight, norm.weight, norm.bias)]
    clean, dirty = (cpu.convolve(images, [cpu.Convolution(weight, norm)] * 2) for images in (x, spoiled))
    assert not dirty[2].isfinite().all()
    pairs = [torch.autograd.grad(y.square().sum(), moving) for y in (clean, dirty)]
    for a, b in ((clean.unflatten(0, (3, 2)), dirty.unflatten(0, (3, 2))), *zip(*pairs, strict=True)):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
        assert not b[1].isfinite().all()


@needs_compiler
def test_there_is_no_second_derivative() -> None:
    weight = numbers(1, 1, 16, 16, 3, 3).requires_grad_()
    y = cpu.convolve(numbers(0, 1, 16, 4, 4), [cpu.Convolution(weight)])
    (gradient,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Compiling
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As if nothing had been compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TESTTIME_COMPILE", raising=False)
    build._loaded.cache_clear()
    yield
    build._loaded.cache_clear()


def answers() -> Tensor:
    net, images = resnet26(depth=8, size=8, seed=1).eval(), Draws.of(0, torch.arange(6)).uniform(3, 8, 8)
    return Replicas(net, 2, PARTS, images)(images.unflatten(0, (2, 3)))


def kept_libraries() -> list[Path]:
    folder = build.cache_folder()
    assert folder is not None
    return sorted(folder.iterdir())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Functions of the kernels' names that do nothing, which compile in no time."""
    source = tmp_path / "nothing.cpp"
    functions = [f'extern "C" bool {name}() {{ return true; }}\n' for name in build._ARGUMENTS]
    source.write_text("".join(functions))
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(build, "_PARTS", (source,))


def works() -> bool:
    layer = cpu.Convolution(torch.zeros(1, 16, 16, 3, 3))
    return cpu.convolve(torch.ones(1, 16, 2, 2), [layer]).shape == (1, 16, 2, 2)


@needs_compiler
@pytest.mark.usefixtures("fresh", "quick")
def test_kernels_are_compiled_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "testtime.cpu"):
        assert cpu.available()
        assert len(caplog.records) == 1
        (kept,) = kept_libraries()
        made = kept.stat().st_mtime_ns
        build._loaded.cache_clear()
        assert cpu.available()
        assert len(caplog.records) == 1
    assert [(path, path.stat().st_mtime_ns) for path in kept_libraries()] == [(kept, made)]


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "one byte": lambda content: content[:1],
    "empty": lambda content: b"",
    "a flipped bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "another library": lambda content: content.replace(b"chain_forward", b"chain_forwarx"),
}


@needs_compiler
@pytest.mark.usefixtures("fresh", "quick")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_never_loaded_and_compiled_again_once(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert cpu.available()
    (kept,) = kept_libraries()
    whole = kept.read_bytes()
    kept.unlink()  # not written over: this process has it in its memory
    kept.write_bytes(DAMAGE[damage](whole))
    kept.chmod(0o700)
    for compilations in (1, 0):
        build._loaded.cache_clear()
        caplog.clear()
        assert cpu.available()
        assert works()
        assert sum(record.message.startswith("compiling") for record in caplog.records) == compilations
    assert [path.read_bytes() for path in kept_libraries()] == [whole]


@needs_compiler
@pytest.mark.usefixtures("fresh", "quick")
@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
@pytest.mark.parametrize("weakness", ["folder", "folder above", "file", "link", "owner", "owner of the file"])
def test_code_that_others_could_have_planted_is_not_loaded(
    weakness: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cpu.available()
    (kept,) = kept_libraries()
    loaded: list[Path] = []
    load = build.load
    monkeypatch.setattr(build, "load", lambda path: (loaded.append(path), load(path))[1])
    if weakness == "folder":  # it is ours, so it is closed again, but a file in it may be anybody's
        kept.parent.chmod(0o777)
        kept.chmod(0o777)
    elif weakness == "folder above":
        kept.parent.parent.parent.chmod(0o777)
    elif weakness == "file":
        kept.chmod(0o722)
    elif weakness == "link":
        kept.rename(tmp_path / "elsewhere.so")
        kept.symlink_to(tmp_path / "elsewhere.so")
    else:
        place = kept.parent if weakness == "owner" else kept
        stat, lstat = Path.stat, Path.lstat

        def foreign(real: Any) -> Any:
            def status(path: Path, **options: Any) -> Any:
                found = real(path, **options)
                return found if path != place else os.stat_result((*found[:4], 12345, *found[5:]))

            return status

        monkeypatch.setattr(Path, "stat", foreign(stat))
        monkeypatch.setattr(Path, "lstat", foreign(lstat))
    build._loaded.cache_clear()
    caplog.clear()
    assert cpu.available()
    assert works()
    (used,) = loaded
    if weakness in ("folder above", "owner"):
        assert kept.parent not in used.parents
        assert str(kept.parent.parent.parent if weakness == "folder above" else kept.parent) in caplog.text
    else:
        assert used == kept
        assert "compiling" in caplog.text  # anew: this is not what lay there
    assert build.cache_folder().stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("fresh")
def test_a_relative_cache_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("cache", "./cache", "../cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert build.cache_folder() == tmp_path / ".cache" / "testtime" / "kernels"


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(os.name != "posix", reason="the compiler is a shell script")
@pytest.mark.parametrize("stage", ["defines", "compiling"])
def test_a_compiler_that_hangs_is_ended_with_its_children(
    stage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, child = tmp_path / "hanging-c++", tmp_path / "child"
    waits = f"sleep 600 & echo $! > {child}; wait"
    hanging.write_text(f'#!/bin/sh\ncase "$*" in *-dM*) {waits if stage == "defines" else "exit 0"};; esac\n{waits}\n')
    hanging.chmod(0o755)
    monkeypatch.setenv("CXX", str(hanging))
    monkeypatch.setattr(build, "_LIMIT", 1.5)
    begin = time.monotonic()
    assert not cpu.available()
    assert time.monotonic() - begin < 20  # of which it waits for 1.5; the rest is for a busy machine
    assert hanging.name in caplog.text
    for _ in range(100):  # until whoever adopts it has noticed
        if not Path(f"/proc/{child.read_text().strip()}").exists():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the compiler's child goes on")


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@needs_compiler
@pytest.mark.usefixtures("fresh", "quick")
@pytest.mark.parametrize("place", ["a file", "a full disk", "nowhere"])
def test_without_a_place_to_keep_them_kernels_are_compiled_all_the_same(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = Path(os.environ["XDG_CACHE_HOME"])
    if place == "a file":
        cache.write_text("a file where a folder should be")
    elif place == "a full disk":
        full = tmp_path / "full-c++"
        excuse = "echo 'ld: final link failed: No space left on device' >&2; exit 1"
        full.write_text(f'#!/bin/sh\ncase "$*" in *"-o {cache}"*) {excuse};; esac\nexec {build.find_compiler()} "$@"\n')
        full.chmod(0o755)
        monkeypatch.setenv("CXX", str(full))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    assert cpu.available()
    assert works()


@needs_compiler
@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are kinds of x86-64")
@pytest.mark.parametrize("kind", ["x86-64-v2", "x86-64-v3"])
def test_processors_of_narrower_vectors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "x86-64-v3" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = [f"-march={kind}" if flag == "-march=native" else flag for flag in build._FLAGS]
    monkeypatch.setattr(build, "_FLAGS", tuple(flags))
    assert cpu.available()
    x, weight, norm = numbers(0, 6, 16, 9, 8), numbers(1, 2, 16, 16, 3, 3), norm_of(2, 16)
    ours = [tensor.clone().requires_grad_() for tensor in (x, weight, norm.weight, norm.bias)]
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, norm.weight, norm.bias)]
    y = cpu.convolve(ours[0], [cpu.Convolution(ours[1], cpu.GroupNorm(8, ours[2], ours[3], norm.eps, True))])
    y = cpu.convolve_strided(y, ours[1], 2, 1)
    expected = convolve_alone(norm_alone(exact[0], norm, exact[2], exact[3]), exact[1], None)
    pieces = zip(expected.chunk(2), exact[1], strict=True)
    expected = torch.cat([F.conv2d(piece, w, None, 2, 1) for piece, w in pieces])
    check([y], [expected], 2e-6)
    grad = numbers(2, *y.shape)
    gradients, wanted = torch.autograd.grad(y, ours, grad), torch.autograd.grad(expected, exact, grad.double())
    check(list(gradients), list(wanted), 2e-5)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("how", ["asked", "no compiler", "failing compiler"])
def test_without_kernels_torch_answers(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers()
    build._loaded.cache_clear()
    if how == "asked":
        monkeypatch.setenv("TESTTIME_COMPILE", "0")
    elif how == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
    else:
        failing = tmp_path / "failing-c++"
        failing.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no such luck' >&2\nexit 1\n")
        failing.chmod(0o755)
        monkeypatch.setenv("CXX", str(failing))
    with caplog.at_level(logging.INFO, "testtime.cpu"):
        caplog.clear()
        assert not cpu.available()
        assert torch.allclose(answers(), expected, atol=1e-5)
    said = [record.message for record in caplog.records]
    if how == "asked":
        assert not said
    else:
        assert ("no C++ compiler" if how == "no compiler" else "no such luck") in said[-1]
        assert all("\n" not in line for line in said)


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_processes_that_begin_at_once_do_not_spoil_each_other(tmp_path: Path) -> None:
    code = "from testtime import cpu; raise SystemExit(not cpu.available())"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert [path.suffix for path in kept_libraries()] == [".so"]


@needs_compiler
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_learned_does_not_depend_on_the_number_of_threads(count: int) -> None:
    """Bit for bit; torch's own gradients by filters do."""
    net, threads = resnet26(depth=14, seed=1), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            streams = Streams(net, count, lr=0.05)
            found.append([streams.predict(numbers(step, count, 3, 32, 32).sigmoid()).logits for step in range(3)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for calls in found[1:] for one, other in zip(found[0], calls, strict=True))
