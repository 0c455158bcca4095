"""The kernels of convolution.cu: compiled on first use, launched on the current stream."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from testtime.kernels.pointers import pointer

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = ("instructions.cu", "convolution.cu")
_THREADS = 128
_NUMBERS = {torch.bfloat16: "unsigned short", torch.float32: "float"}
# Concurrent blocks per multiprocessor, by dtype and channels; limited by registers.
_CONVOLVE = {(torch.bfloat16, 16): 4, (torch.bfloat16, 32): 3, (torch.bfloat16, 64): 2}
_CONVOLVE |= {(torch.float32, 16): 3, (torch.float32, 32): 2}
_GRADIENT = 3


def convolves(x: Tensor, weight: Tensor, stride: int, padding: int) -> bool:
    """Whether `convolve` supports images x `(S·B, C, H, W)`, bfloat16 or float32, and weights `(S, C, C, 3, 3)`."""
    kind = x.dtype, x.shape[1]
    if kind not in _CONVOLVE or not _fits(x, weight, stride, padding, _convolve_pixels(*kind)):
        return False
    # Each block reads all filters, which is too expensive for 64 channels and few tiles.
    tiles = len(x) * x.shape[2] * x.shape[3] // _convolve_pixels(*kind)
    return x.shape[1] < 64 or 2 * tiles > _chip(x.device)


def gives_gradient(x: Tensor, weight: Tensor, stride: int, padding: int) -> bool:
    """Whether `filter_gradient` supports them."""
    kind = x.dtype, x.shape[1]
    known = x.dtype in _NUMBERS and x.shape[1] in (16, 32, 64)
    return known and _fits(x, weight, stride, padding, _gradient_pixels(*kind))


def _fits(x: Tensor, weight: Tensor, stride: int, padding: int, pixels: int) -> bool:
    channels, (height, width) = x.shape[1], x.shape[2:]
    return (
        stride == padding == 1
        and weight.shape[1] == weight.shape[2] == channels
        and width in (8, 16, 32)
        and height % (pixels // width) == 0
        and x.numel() < 2**31
        and _works()
    )


def convolve(
    x: Tensor, weight: Tensor, y: Tensor, stride: int, padding: int, plus: Tensor | None, transposed: bool
) -> None:
    """Write the convolution of x (+ plus) to y; transposed, x and y are the gradients w.r.t. output and input."""
    replicas, channels, images = len(weight), x.shape[1], len(x) // len(weight)
    height, width = x.shape[2:]
    form = f"{_NUMBERS[x.dtype]}, {channels}, {width}, {_word(transposed)}, {_word(plus is not None)}"
    kernel = _kernel(f"convolve<{form}>", x.device.index)
    tiles = images * height * width // _convolve_pixels(x.dtype, channels)
    blocks = _share(_CONVOLVE[x.dtype, channels], replicas, tiles, x.device)
    filters = pointer(weight.permute(0, 3, 4, 2, 1), (replicas, 3, 3, channels, channels), "rows", device=x.device)
    addresses = _images(x, x), filters, _images(x if plus is None else plus, x), _images(y, x)
    kernel((blocks, replicas, 1), addresses, images, height, weight.stride(0))


def gradient_rows(x: Tensor, y: Tensor, weight: Tensor) -> int:
    """Return the number of partial sums that `filter_gradient` writes."""
    channels = x.shape[1]
    tiles = len(x) // len(weight) * x.shape[2] * x.shape[3] // _gradient_pixels(x.dtype, channels)
    # Several tiles per block: partial sums must be read again, and other kernels run concurrently.
    return _share(_GRADIENT, len(weight) * (channels // 16), max(1, tiles // 4), x.device)


def filter_gradient(x: Tensor, grad: Tensor, weight: Tensor, stride: int, padding: int, parts: Tensor) -> None:
    """Write partial sums of the gradient w.r.t. the filters, `(rows, S, 3, 3, C, C)` in memory."""
    replicas, channels, images = len(weight), x.shape[1], len(x) // len(weight)
    height, width = x.shape[2:]
    kernel = _kernel(f"filter_gradient<{_NUMBERS[x.dtype]}, {channels}, {width}>", x.device.index)
    sums = pointer(parts.flatten(2), (len(parts), replicas, 9 * channels * channels), device=x.device)
    kernel((len(parts), replicas, channels // 16), (_images(x, x), _images(grad, x), sums), images, height)


def _images(tensor: Tensor, like: Tensor) -> int:
    return pointer(tensor, like.shape, "channels_last", like.dtype, like.device)


def _convolve_pixels(dtype: torch.dtype, channels: int) -> int:
    """Return the pixels per tile of `convolve`."""
    return (64 if dtype == torch.bfloat16 else 32) * (4 // (channels // 16))


def _gradient_pixels(dtype: torch.dtype, channels: int) -> int:
    """Return the pixels per tile of `filter_gradient`."""
    return (128 if channels == 64 else 256) // dtype.itemsize


def _share(concurrent: int, rows: int, tiles: int, device: torch.device) -> int:
    """Return the number of blocks to divide a row's tiles among, so that the blocks of all rows fill the GPU once."""
    return max(1, min(tiles, concurrent * _chip(device) // rows))


def _chip(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _word(value: bool) -> str:
    return "true" if value else "false"


@functools.cache
def _works() -> bool:
    """Whether the kernels can be compiled on this machine; otherwise Triton's are used."""
    if torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        _kernel("convolve<unsigned short, 16, 32, false, false>", torch.cuda.current_device())
    except (RuntimeError, OSError) as error:
        log.warning("cannot compile convolution.cu, using Triton's kernels: %s", error)
        return False
    return True


@functools.cache
def _kernel(name: str, device: int) -> Callable[..., None]:
    """Return a launcher of the kernel of that name, with template arguments; it takes grid, addresses and integers."""
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # creates the device's context, if there is none
        binary, symbol = compile_kernel(name, "sm_{}{}".format(*torch.cuda.get_device_capability()))
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), binary), "loading", name)
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, symbol), "finding", name)

    def launch(grid: tuple[int, int, int], addresses: Sequence[int], *numbers: int) -> None:
        values = [*map(ctypes.c_void_p, addresses), *map(ctypes.c_int, numbers)]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        _check(driver.cuLaunchKernel(function, *grid, _THREADS, 1, 1, 0, stream, places, None), "launching", name)

    return launch


def compile_kernel(name: str, architecture: str) -> tuple[bytes, bytes]:
    """Compile one kernel of convolution.cu.

    Args:
        name: Its name with template arguments.
        architecture: For example "sm_90".

    Returns:
        The machine code, and the kernel's symbol in it.

    Raises:
        RuntimeError: Compilation failed.
        OSError: NVRTC is not installed.
    """
    nvrtc = _find_nvrtc()
    program, size, symbol = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_char_p()
    source = b"\n".join((_FOLDER / file).read_bytes() for file in _SOURCES)
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"", 0, None, None), "reading", name)
    nvrtc.nvrtcAddNameExpression(program, name.encode())
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, text)
        raise RuntimeError(text.value.decode(errors="replace"))
    _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "assembling", name)
    binary = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetCUBIN(program, binary), "assembling", name)
    _check(nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(symbol)), "naming", name)
    found = symbol.value or b""  # a copy: the program is destroyed
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw, found


def _find_nvrtc() -> ctypes.CDLL:
    version = (torch.version.cuda or "12").split(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{version}")  # already loaded by torch
    except OSError:
        return ctypes.CDLL("libnvrtc.so")


def _check(code: int, what: str, name: str) -> None:
    if code:
        raise RuntimeError(f"{what} {name} failed with code {code}")
