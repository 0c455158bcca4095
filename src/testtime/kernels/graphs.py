"""CUDA graphs: a function of tensors, recorded once and replayed without Python.

A step of test-time training is some hundred small kernels; launching them one by one costs more than running them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Precision = Literal["fp32", "tf32", "bf16"]


class Captured:
    """A function recorded as a CUDA graph.

    The function must do the same whatever the numbers are: no branch on a tensor's value, no shape that depends on one.
    It is run twice for real before it is recorded; the caller undoes what those runs changed. Every tensor that it
    reads besides its inputs must be kept by the caller: the graph reads its memory, whatever is there by then.

    Args:
        function: Takes tensors, gives a tuple of tensors; everything on one CUDA device.
        inputs: Tensors of the shapes and dtypes to come.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        stream = _recording_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": another thread may read the next batch to the device meanwhile.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = function(*self._inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the function gives for new inputs, in tensors of their own."""
        for static, tensor in zip(self._inputs, inputs, strict=True):
            static.copy_(tensor)
        self._graph.replay()
        return tuple(tensor.clone() for tensor in self._outputs)


@functools.cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """Of a high priority, which the graph remembers: what runs beside stands back."""
    return torch.cuda.Stream(device, priority=-1)


class Series:
    """A function recorded as a CUDA graph that goes through a series of inputs by itself.

    A replay takes the next inputs and writes the next outputs, so that nothing needs to be launched in between.

    Args:
        function: As for `Captured`.
        length: The most inputs that it takes at a time, at least 2.
        inputs: Tensors of the shapes and dtypes to come.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], length: int, *inputs: Tensor) -> None:
        assert length >= 2  # Captured tries the function twice
        self._length = length
        self._inputs = [tensor.unsqueeze(0).repeat(length, *[1] * tensor.dim()) for tensor in inputs]
        self._outputs = self._inputs[0]  # replaced when the sizes are known
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._next = torch.zeros(1, dtype=torch.int64, device=inputs[0].device)

        def advance() -> tuple[Tensor, ...]:
            outputs = function(*(tensor.index_select(0, self._next)[0] for tensor in self._inputs))
            row = torch.cat([output.flatten().view(torch.uint8) for output in outputs])  # of bytes: one launch for all
            if not self._forms:
                self._outputs = row.new_empty(length, len(row))
                self._forms = [(output.shape, output.dtype) for output in outputs]
            self._outputs.index_copy_(0, self._next, row[None])
            self._next += 1
            return ()

        self._captured = Captured(advance)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the function gives for one after another of the inputs, `(N, ...)` each, in tensors of their own."""
        stretches = []
        for given in zip(*(tensor.split(self._length) for tensor in inputs), strict=True):
            self._next.zero_()
            for stretch, tensor in zip(self._inputs, given, strict=True):
                stretch[: len(tensor)] = tensor
            for _ in range(len(given[0])):
                self._captured()
            stretches.append(self._outputs[: len(given[0])].clone())
        rows = torch.cat(stretches)
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self._forms]
        pieces = zip(rows.split(sizes, dim=1), self._forms, strict=True)
        copies = ((piece.clone(memory_format=torch.contiguous_format), *form) for piece, form in pieces)
        return tuple(piece.view(dtype).view(-1, *shape) for piece, shape, dtype in copies)


class Beside:
    """A second CUDA stream: what is launched within `with beside:` runs beside what is launched after it, until `join`.

    What it reads must be kept as it is until then. On a CPU things are done in the order they are written.

    Args:
        device: Of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._within = contextlib.ExitStack()
        self._runs = False

    def __enter__(self) -> Beside:
        if self._stream is not None:
            self._runs = True
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._within.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(self, *error: object) -> None:
        self._within.close()

    def join(self) -> None:
        """Let what is launched from now on wait for what runs beside, if anything does."""
        if self._stream is not None and self._runs:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._runs = False


def check_precision(precision: str) -> torch.dtype:
    """The dtype that layers compute in; an unknown precision is an error."""
    if precision not in get_args(Precision):
        raise ValueError(f"`precision` must be one of {', '.join(get_args(Precision))}, got {precision!r}.")
    return torch.bfloat16 if precision == "bf16" else torch.float32


@contextlib.contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within it, numbers are computed as `precision` says, whatever the caller has set; outside nothing changes.

    Float32 products on CUDA are exact ("fp32") or take TF32. cuDNN is held to its deterministic algorithms: a stream
    that is resumed must go on bit for bit. The caller's autocast does not reach in.
    """
    if device.type != "cuda":
        with torch.autocast(device.type, enabled=False):
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    try:
        with (
            torch.autocast("cuda", enabled=False),
            torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=precision != "fp32"),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
