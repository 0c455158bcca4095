"""The CUDA kernels of convolution.cu on a CPU, block by block, against torch; emulated/cuda.h plays the GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from testtime.randomness import Draws

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

HERE = Path(__file__).parent / "emulated"
SOURCES = Path(__file__).parent.parent.parent / "src" / "testtime" / "kernels" / "cuda"
SHAPES = [(16, 32), (16, 16), (32, 16), (64, 8)]
KINDS = {"bf16": torch.bfloat16, "tf32": torch.float32}
CASES = [(kind, *shape) for kind in KINDS for shape in SHAPES]
CONVOLVE = [case for case in CASES if case != ("tf32", 64, 8)]  # there the filters do not fit into the registers


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiles the kernels for a kind of number, channels and width; each once."""
    folder, made = tmp_path_factory.mktemp("kernels"), {}

    def make(kind: str, channels: int, width: int) -> ctypes.CDLL:
        key = kind, channels, width
        if key not in made:
            number = "unsigned short" if kind == "bf16" else "float"
            library = folder / f"{kind}-{channels}-{width}.so"
            flags = [f"-DTEST_NUMBER={number}", f"-DTEST_CHANNELS={channels}", f"-DTEST_WIDTH={width}"]
            flags += ["-DTEST_CONVOLVE"] if key in CONVOLVE else []
            command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{SOURCES}", *flags]
            subprocess.run([*command, str(HERE / "convolution.cpp"), "-o", str(library)], check=True)
            made[key] = ctypes.CDLL(str(library))
        return made[key]

    return make


def normals(*shape: int, seed: int) -> Tensor:
    return Draws.of(seed, torch.arange(shape[0])).normal(*shape[1:])


def setting(kind: str, channels: int, width: int, images: int = 3, replicas: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Images and gradients `(S·B, H, W, C)`, filters `(S, 3, 3, C, C)` with a gap between the replicas."""
    x, gradient = (normals(replicas * images, width, width, channels, seed=seed).to(KINDS[kind]) for seed in (0, 1))
    rows = torch.zeros(replicas, 9 * channels * channels + 64)
    rows[:, : 9 * channels * channels] = normals(replicas, 9 * channels * channels, seed=2) / (3 * channels**0.5)
    return x, gradient, rows


def filters(rows: Tensor, channels: int) -> Tensor:
    """`(S, 3, 3, C, C)` as torch's convolution wants them, `(S, O, I, 3, 3)`, in double precision."""
    return rows[:, : 9 * channels**2].reshape(-1, 3, 3, channels, channels).permute(0, 4, 3, 1, 2).double()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("form", ["forward", "backward", "plus"])
@pytest.mark.parametrize(("kind", "channels", "width"), CONVOLVE)
def test_convolve_is_torchs(kind: str, channels: int, width: int, form: str, blocks: int, build: Any) -> None:
    x, other, rows = setting(kind, channels, width)
    y = torch.zeros_like(x)
    plus = other if form == "plus" else None
    build(kind, channels, width).run_convolve(
        blocks, 2, pointer(x), pointer(rows), pointer(plus), pointer(y), 3, width, rows.stride(0), form == "backward"
    )
    function = F.conv_transpose2d if form == "backward" else F.conv2d
    pieces = zip(x.double().permute(0, 3, 1, 2).chunk(2), filters(rows, channels), strict=True)
    expected = torch.cat([function(piece, w, padding=1) for piece, w in pieces]).permute(0, 2, 3, 1)
    if plus is not None:
        expected = expected + plus.double()
    assert relative(y, expected) < (5e-3 if kind == "bf16" else 5e-4)  # 8 and 11 bits


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(("kind", "channels", "width"), CASES)
def test_the_filters_gradient_is_torchs(kind: str, channels: int, width: int, blocks: int, build: Any) -> None:
    x, gradient, rows = setting(kind, channels, width)
    partial = torch.full((blocks, 2, 3, 3, channels, channels), float("nan"))
    build(kind, channels, width).run_filter_gradient(
        blocks, 2, pointer(x), pointer(gradient), pointer(partial), 3, width
    )
    found = partial.sum(0).permute(0, 4, 3, 1, 2)
    images, gradients = (tensor.double().permute(0, 3, 1, 2).chunk(2) for tensor in (x, gradient))
    expected = torch.stack(
        [
            torch.nn.grad.conv2d_weight(one, w.shape, grad, padding=1)
            for one, grad, w in zip(images, gradients, filters(rows, channels), strict=True)
        ]
    )
    assert relative(found, expected) < (1e-5 if kind == "bf16" else 5e-4)  # products of bfloat16 are exact in float32
