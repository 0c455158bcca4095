"""Dispatch of accelerated kernels: which operation is replaced, on which device, under which condition.

Every operation listed here has a reference implementation in plain torch where it is used. That code first calls
`take_over`, which runs the first kernel in `TABLE` that accepts the arguments; if there is none, the plain
implementation runs. Nothing outside this folder depends on CUDA, Triton or a compiler, and nothing inside it imports
the rest of the package: without `cpu` or `cuda` and their rows everything works, only slower. `TESTTIME_KERNELS=off`
disables all kernels for one process.

    cuda/        Triton, and CUDA C++ compiled by NVRTC, which comes with torch
    cpu/         C++, compiled once by the system compiler
    forms.py     alternatives to the plain implementations, in torch, faster on one kind of device
    graphs.py    CUDA graphs, and work on a side stream
    halves.py    a batch as two halves in two threads, on a CPU
    pointers.py  validation of every tensor that is passed to compiled code

All tuned constants are defined here; `benchmarks/kernels.py` measures the gain of each kernel.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

CUDA_LARGEST = 2**30
"""CUDA kernels accept tensors of fewer elements."""
CPU_LARGEST = 2**30
"""C++ kernels accept and return images of fewer elements, which they index with 32 bits."""
CPU_CHANNELS = (16, 32, 64, 128, 256)
"""Channel counts that the C++ convolutions of stride 1 are compiled for."""

_CUDA_CHANNELS = 64  # most channels for which the CUDA convolutions are faster
_GROUPED_CHANNELS, _GROUPED_NUMBERS = 64, 2**20  # replicas too small to fill a GPU run as cuDNN groups
_UNFOLDED_IMAGES, _UNFOLDED_NUMBERS = 3, 16_384  # per replica: few and small enough for one matrix product
# Winograd takes a third of torch's time up to this many channels, for any image. With more, the filter transforms are
# large: it takes half of torch's time from this many pixels per replica, and is no faster below.
_WINOGRAD_CHANNELS, _WINOGRAD_PIXELS = 128, 1024
# With more inputs, the strided C++ kernel is used only where replicas share their filters: otherwise torch is up to
# three times as fast (256 to 512 channels on 8×8).
_STRIDED_INPUTS = 64
# Two halves of a batch are known to be faster on two intra-op threads, and from so many images and values on.
_HALVED_THREADS, _HALVED_IMAGES, _HALVED_NUMBERS = (2,), 8, 2**17
_TRAINED_CHANNELS = 128  # up to which training on a CPU is known to be faster with the C++ kernels


@dataclass(frozen=True)
class Tuning:
    """The fastest settings for a kind of device.

    Attributes:
        waits: Whether reading a value synchronises the host with the device.
        observed: Images of 32×32 pixels per forward pass.
        parallel: Candidate numbers of concurrent episodes.
        default_parallel: Number of concurrent episodes where there are too few images to time the candidates.
        most_pixels: Pixels of views above which more concurrency is no faster; None: the limit of the kernels.
        batch: Images per call of an adapter, up to 64×64 pixels and above.
        block: Images of each stream that are read at once.
        memory: Bytes for all streams together; None: half of the free memory.
        saved_values: Values saved for the backward pass of a step, per value of a view.
    """

    waits: bool
    observed: int
    parallel: tuple[int, ...]
    default_parallel: int
    most_pixels: int | None
    batch: tuple[int, int]
    block: int
    memory: int | None
    saved_values: int


_TUNING = {
    "cuda": Tuning(True, 2048, (16, 64, 256), 64, None, (2560, 512), 64, None, 400),
    "cpu": Tuning(False, 256, (1, 4, 16, 64), 1, 2**17, (32, 32), 64, 4 * 2**30, 250),
}


def tuning(device: torch.device) -> Tuning:
    """Return the settings for a device."""
    return _TUNING["cuda" if device.type == "cuda" else "cpu"]


class ConvolutionForm(NamedTuple):
    """The geometry of a convolution: arguments of `torch.nn.functional.conv2d`."""

    stride: tuple[int, int]
    padding: Any  # a pair, or "same"
    dilation: tuple[int, int]
    groups: int


class NormForm(NamedTuple):
    """GroupNorm with parameters `(S, C)`, optionally followed by ReLU; or BatchNorm that uses its running statistics.

    The latter is a GroupNorm of single channels whose moments are given.
    """

    groups: int
    weight: Any  # None without scale and shift
    bias: Any
    eps: float
    relu: bool
    moments: Any = None  # mean and reciprocal standard deviation of each group, (S, groups, 2)


class Convolution(NamedTuple):
    """A convolution of replicas with filters `(S, O, I, k, k)`, and the norm before it, if any."""

    weight: Tensor
    norm: NormForm | None = None
    form: ConvolutionForm = ConvolutionForm((1, 1), (1, 1), (1, 1), 1)


class Kernel(NamedTuple):
    """An accelerated implementation of an operation.

    Attributes:
        code: Module and function below this package.
        fits: Whether it can compute the operation, and is faster, for these arguments.
        works: Whether it can be used on this machine; called last, since the first call may compile.
    """

    code: str
    fits: Callable[..., bool]
    works: Callable[[], bool]


def take_over(operation: str, *arguments: Any) -> Any:
    """Compute an operation with a kernel for the device of the first argument; None if there is no suitable one."""
    kernel = find(operation, *arguments)
    return None if kernel is None else kernel(*arguments)


def find(operation: str, *arguments: Any) -> Callable[..., Any] | None:
    """Return the kernel that computes an operation for these arguments, or None."""
    for kernel in TABLE.get((operation, arguments[0].device.type), ()):
        if kernel.fits(*arguments) and enabled() and kernel.works():
            return _load(kernel.code)
    return None


def has_any(operation: str, device: torch.device) -> bool:
    """Whether there may be a kernel for an operation on a device."""
    return (operation, device.type) in TABLE


def enabled() -> bool:
    """Whether kernels are enabled."""
    return os.environ.get("TESTTIME_KERNELS", "").lower() not in ("off", "0", "false", "no")


def describe(device: torch.device) -> dict[str, str]:
    """Say which kernels are used on a device, and why not; on a CPU this may compile them."""
    compiler = importlib.import_module("testtime.kernels.cpu.build").find_compiler()
    found = {"compiler": "none found (c++, g++, clang++ or $CXX)" if compiler is None else os.path.basename(compiler)}
    if not enabled():
        return found | {"kernels": "off: TESTTIME_KERNELS is set to off"}
    if device.type == "cuda":
        return found | {"kernels": "Triton and CUDA" if _has_triton() else "plain torch: Triton is not installed"}
    if device.type != "cpu":
        return found | {"kernels": f"plain torch: none for {device.type}"}
    reason = "plain torch: " + ("they cannot be compiled" if compiler else "without a compiler they cannot be made")
    return found | {"kernels": "C++, compiled on this machine" if _has_compiler() else reason}


@functools.cache
def _load(code: str) -> Callable[..., Any]:
    module, _, function = code.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), function)


@functools.cache
def _has_triton() -> bool:
    """Triton comes with CUDA builds of torch."""
    return importlib.util.find_spec("triton") is not None


def _has_compiler() -> bool:
    return _load("cpu.build:available")()


def _always(*_: Any) -> bool:
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Conditions, called with the arguments of their operation
# ---------------------------------------------------------------------------------------------------------------------


def _is_3x3(weight: Tensor, bias: Tensor | None, form: ConvolutionForm) -> bool:
    """Whether it is a plain 3×3 convolution, symmetric in rows and columns."""
    return (
        weight.shape[3:] == (3, 3)
        and bias is None
        and form.groups == 1
        and form.dilation == (1, 1)
        and not isinstance(form.padding, str)
        and form.stride[0] == form.stride[1]
        and form.padding[0] == form.padding[1]
        and weight.dtype == torch.float32
    )


def _cuda_convolves(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, *_: Any) -> bool:
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    narrow = max(weight.shape[1:3]) <= _CUDA_CHANNELS
    return not exact and narrow and x.numel() < CUDA_LARGEST and _is_3x3(weight, bias, form)


def _groups_are_faster(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, *_: Any) -> bool:
    count, outputs, inputs = weight.shape[:3]
    pixels = len(x) // count * (x.shape[2] // form.stride[0]) * (x.shape[3] // form.stride[1])
    return count > 1 and max(outputs, inputs) <= _GROUPED_CHANNELS and pixels * outputs < _GROUPED_NUMBERS


def _is_pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, *_: Any) -> bool:
    return len(weight) > 1 and weight.shape[3:] == (1, 1) and form.groups == 1 and form.padding in ((0, 0), "valid")


def _cpu_takes(x: Tensor, channels: int) -> bool:
    """Whether the C++ kernels accept images x, with at most `channels` channels in any layer."""
    fits = x.dtype == torch.float32 and x.dim() == 4 and x.numel() > 0
    return fits and channels * x.shape[2] * x.shape[3] < CPU_LARGEST


def _winograd_fits(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, *_: Any) -> bool:
    count, outputs, inputs = weight.shape[:3]
    if not (inputs == outputs and inputs in CPU_CHANNELS and _is_3x3(weight, bias, form) and _cpu_takes(x, inputs)):
        return False
    enough = inputs <= _WINOGRAD_CHANNELS or len(x) // count * x.shape[2] * x.shape[3] >= _WINOGRAD_PIXELS
    return enough and form.stride == form.padding == (1, 1)


def _strided_fits(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, *_: Any) -> bool:
    outputs, inputs = weight.shape[1:3]
    if outputs % 16 or not (_is_3x3(weight, bias, form) and _cpu_takes(x, max(outputs, inputs))):
        return False
    narrow = inputs <= _STRIDED_INPUTS or weight.stride(0) == 0
    return narrow and min(x.shape[2:]) + 2 * int(form.padding[0]) >= 3


def _unfolding_is_faster(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm, *_: Any) -> bool:
    count = len(weight)
    patch = x.shape[1] * x.shape[2] * x.shape[3] * weight.shape[-2] * weight.shape[-1]
    few = count > 1 and 0 < len(x) <= _UNFOLDED_IMAGES * count and patch <= _UNFOLDED_NUMBERS
    return few and form.groups == 1 and not isinstance(form.padding, str)


def _rows_are_faster(x: Tensor, weight: Tensor, *_: Any) -> bool:
    return weight.shape[2] > _WINOGRAD_CHANNELS and weight.numel() > x.numel()


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0


def _cuda_norms(x: Tensor, norm: NormForm) -> bool:
    channels = x.shape[1]
    return norm.weight is not None and channels <= 1024 and _is_power_of_2(channels) and x.numel() < CUDA_LARGEST


def _cpu_norms(x: Tensor, norm: NormForm) -> bool:
    known = norm.weight is not None and norm.weight.dtype == torch.float32 and x.shape[1] % 16 == 0
    return known and _cpu_takes(x, x.shape[1])


def _is_affine(x: Tensor, norm: NormForm) -> bool:
    return norm.weight is not None


def _cpu_chains(x: Tensor, layers: Sequence[Convolution], *_: Any) -> bool:
    def fits(weight: Tensor, norm: NormForm | None, form: ConvolutionForm) -> bool:
        channels = weight.shape[1]
        return (
            channels <= _WINOGRAD_CHANNELS  # with more, the transformed filters of a chain take too much memory
            and channels == weight.shape[2]
            and channels in CPU_CHANNELS
            and form.stride == form.padding == (1, 1)
            and _is_3x3(weight, None, form)
            and norm is not None
            and norm.weight is not None
            and norm.weight.dtype == torch.float32
            and _cpu_takes(x, channels)
        )

    return all(fits(*layer) for layer in layers) and len({layer.norm and layer.norm.groups for layer in layers}) == 1


def _cuda_batch_norms(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, *_: Any) -> bool:
    if weight is None or x.dim() != 4 or weight.dtype != torch.float32:
        return False
    count, channels = mean.shape
    # torch rejects channels of a single value with an error
    return channels <= 1024 and _is_power_of_2(channels) and count * channels < x.numel() < count * CUDA_LARGEST


def _cuda_pools(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if bias is None or x.dim() != 4 or x.numel() == 0 or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    outputs, channels = weight.shape[1:]
    return (
        _is_power_of_2(channels) and channels <= 1024 and outputs * channels <= 16_384 and weight.dtype == torch.float32
    )


def _is_even(x: Tensor, *_: Any) -> bool:
    return x.shape[-2] % 2 == x.shape[-1] % 2 == 0


def _cuda_halves(x: Tensor, extra: int) -> bool:
    return _is_even(x) and x.dtype in (torch.float32, torch.bfloat16)


def _halves_are_faster(batch: Tensor, bind: Callable[..., Any], tensors: Sequence[Tensor]) -> bool:
    in_float32 = all(tensor.dtype == torch.float32 for tensor in (batch, *tensors) if tensor.is_floating_point())
    large = len(batch) >= _HALVED_IMAGES and batch.numel() >= _HALVED_NUMBERS
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (batch, *tensors))
    return learns and large and in_float32 and torch.get_num_threads() in _HALVED_THREADS


def _has_plain_state() -> bool:
    return _load("halves:has_plain_state")()


def _needs_no_gradient(images: Tensor, *_: Any) -> bool:
    return not images.requires_grad


def _cuda_normalises(images: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> bool:
    channels = images.shape[1]
    known = images.dtype in (torch.uint8, torch.float32) and mean.dtype == std.dtype == torch.float32
    return known and not images.requires_grad and len(mean) in (1, channels) and len(std) in (1, channels)


def _cuda_puts_rows(piece: Tensor, *_: Any) -> bool:
    return piece.dtype in (torch.float32, torch.int64)


TABLE: dict[tuple[str, str], tuple[Kernel, ...]] = {
    # operation, device
    ("mix", "cuda"): (Kernel("cuda.hash:mix", _always, _has_triton),),
    ("make_views", "cuda"): (Kernel("cuda.views:make_views", _needs_no_gradient, _has_triton),),
    ("rotate", "cuda"): (Kernel("cuda.views:rotate", _needs_no_gradient, _has_triton),),
    ("normalise", "cuda"): (Kernel("cuda.views:normalise", _cuda_normalises, _has_triton),),
    ("convolve", "cuda"): (
        Kernel("cuda.convolution:convolve", _cuda_convolves, _has_triton),
        Kernel("forms:convolve_pointwise", _is_pointwise, _always),
        Kernel("forms:convolve_grouped", _groups_are_faster, _always),
    ),
    ("convolve", "cpu"): (
        Kernel("cpu:convolve", _winograd_fits, _has_compiler),
        Kernel("cpu:convolve_strided", _strided_fits, _has_compiler),
        Kernel("forms:convolve_unfolded", _unfolding_is_faster, _always),
        Kernel("forms:convolve_in_rows", _rows_are_faster, _always),
    ),
    ("convolve_chain", "cpu"): (Kernel("cpu:convolve_chain", _cpu_chains, _has_compiler),),
    ("group_norm", "cuda"): (Kernel("cuda.groupnorm:group_norm", _cuda_norms, _has_triton),),
    ("group_norm", "cpu"): (
        Kernel("cpu:group_norm", _cpu_norms, _has_compiler),
        Kernel("forms:group_norm_by_replica", _is_affine, _always),
    ),
    ("fork_group_norm", "cuda"): (Kernel("cuda.groupnorm:fork_group_norm", _cuda_norms, _has_triton),),
    ("batch_norm", "cuda"): (Kernel("cuda.batchnorm:batch_norm", _cuda_batch_norms, _has_triton),),
    ("pool_linear", "cuda"): (Kernel("cuda.pooling:pool_linear", _cuda_pools, _has_triton),),
    ("halve", "cuda"): (
        Kernel("cuda.pooling:halve", _cuda_halves, _has_triton),
        Kernel("forms:halve_pairs", _is_even, _always),
    ),
    ("halves", "cpu"): (Kernel("halves:compute", _halves_are_faster, _has_plain_state),),
    ("settle", "cuda"): (Kernel("cuda.settle:settle", _always, _has_triton),),
    ("put_rows", "cuda"): (Kernel("cuda.settle:put_rows", _cuda_puts_rows, _has_triton),),
    ("gradient_buffer", "cuda"): (Kernel("cuda.gradient_buffer:GradientBuffer", _always, _has_triton),),
}
"""(operation, device) → kernels, in order of preference."""


# ---------------------------------------------------------------------------------------------------------------------
# Queries for the rest of the package
# ---------------------------------------------------------------------------------------------------------------------


def has_filters_innermost(stacked: Tensor) -> bool:
    """Whether stacked filters `(S, O, I, k, k)` are best stored as `(S, k, k, I, O)`, as the CUDA kernels read them."""
    return stacked.device.type == "cuda" and stacked.dim() == 5 and enabled()


def accelerates(x: Tensor, weight: Tensor, bias: Tensor | None, form: ConvolutionForm) -> bool:
    """Whether kernels compute a convolution of one replica, with a filter `(O, I, k, k)`, faster than torch."""
    stacked = weight[None]
    if x.device.type == "cuda":  # whatever the precision, which may not be set yet
        return max(weight.shape[:2]) <= _CUDA_CHANNELS and _is_3x3(stacked, bias, form) and enabled()
    fits = _winograd_fits(x, stacked, bias, form) or _strided_fits(x, stacked, bias, form)
    return fits and enabled() and _has_compiler()


def prefers_channels_last(device: torch.device, groups: int) -> bool:
    """Whether torch computes a convolution with this many groups faster on images with channels last.

    On a CPU it takes about 0.7 of the time with groups, and up to 1.3 of it for wide filters without.
    """
    return device.type == "cpu" and groups > 1


def trains_faster(device: torch.device, channels: int, in_float32: bool) -> bool:
    """Whether a network of at most `channels` channels trains faster as a single replica than in plain torch."""
    if device.type == "cuda":
        return enabled()
    return channels <= _TRAINED_CHANNELS and in_float32 and enabled() and _has_compiler()


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device with its own memory; 0 for one that shares the host's."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def possibly_any(flags: Tensor) -> bool:
    """Whether any flag is true; also true on devices where reading the flags would synchronise."""
    return tuning(flags.device).waits or bool(flags.any())
