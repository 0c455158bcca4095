"""CUDA graphs: functions of tensors, captured once and replayed without Python.

A step of test-time training is about a hundred small kernels; launching them one by one costs more than running them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from testtime.kernels import enabled

Result = TypeVar("Result")


class Captured:
    """A function captured as a CUDA graph.

    The function must not branch on a tensor's value or have shapes that depend on one. It runs twice before it is
    captured; the caller undoes the effects of these runs. The caller must keep every other tensor that it reads alive:
    the graph reads its memory directly.

    Args:
        function: Maps tensors to a tuple of tensors, all on one CUDA device.
        inputs: Examples with the shapes and dtypes of the inputs.
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
        # "thread_local": another thread may copy the next batch to the device meanwhile.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = function(*self._inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the function on new inputs; the outputs are copies."""
        for static, tensor in zip(self._inputs, inputs, strict=True):
            static.copy_(tensor)
        self._graph.replay()
        return tuple(tensor.clone() for tensor in self._outputs)


@functools.cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """Return a stream of high priority, which the graph inherits: concurrent work yields to it."""
    return torch.cuda.Stream(device, priority=-1)


class Series:
    """A function captured as a CUDA graph that iterates over a series of inputs.

    Each replay reads the next inputs and writes the next outputs, so that nothing is launched in between.

    Args:
        function: As for `Captured`.
        length: Maximum number of inputs per pass, at least 2.
        inputs: Examples with the shapes and dtypes of the inputs.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], length: int, *inputs: Tensor) -> None:
        assert length >= 2  # Captured runs the function twice first
        self._length = length
        self._inputs = [tensor.unsqueeze(0).repeat(length, *[1] * tensor.dim()) for tensor in inputs]
        self._outputs = self._inputs[0]  # replaced once the sizes are known
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._next = torch.zeros(1, dtype=torch.int64, device=inputs[0].device)

        def advance() -> tuple[Tensor, ...]:
            outputs = function(*(tensor.index_select(0, self._next)[0] for tensor in self._inputs))
            row = torch.cat([output.flatten().view(torch.uint8) for output in outputs])  # bytes: one launch for all
            if not self._forms:
                self._outputs = row.new_empty(length, len(row))
                self._forms = [(output.shape, output.dtype) for output in outputs]
            self._outputs.index_copy_(0, self._next, row[None])
            self._next += 1
            return ()

        self._captured = Captured(advance)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the function on each of N inputs, `(N, ...)` each; the outputs are copies."""
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


class Later(Generic[Result]):
    """The result of a function that may still be running; see `Concurrent.later`."""

    def __init__(self, value: Result, side: Concurrent | None = None) -> None:
        self._value, self._side = value, side

    def result(self) -> Result:
        """Return the value; work launched after this call waits for it."""
        if self._side is not None:
            self._side.wait()
        return self._value


class Concurrent:
    """Runs functions on a second CUDA stream, concurrently with work launched after them, until `wait`.

    Their inputs must not change until then. On a CPU, and when nested, functions run immediately.

    Args:
        device: The device to run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if can_record(device) else None
        self._inside = False
        self._kept: list[Any] = []  # tensors in use on the stream, whose memory must not be reused before `wait`

    def later(self, function: Callable[..., Result], *arguments: Any) -> Later[Result]:
        """Start a function and return a handle to its result."""
        if self._stream is None or self._inside:
            return Later(function(*arguments))
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._inside = True
        try:
            with torch.cuda.stream(self._stream):
                value = function(*arguments)
        finally:
            self._inside = False
            self._kept.append(arguments)
        return Later(value, self)

    def wait(self) -> None:
        """Make work launched after this call wait for all functions started so far."""
        if self._stream is not None and self._kept and not self._inside:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._kept.clear()


class HostCopy:
    """A copy of a tensor on the CPU, which need not be there yet; on a CPU it is.

    Args:
        tensor: The tensor; it may still be computed.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.to("cpu", non_blocking=True)  # from CUDA into pinned memory
        """The copy, to be read once it `is_done`."""
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_asynchronous(self) -> bool:
        """Whether it was not there from the start."""
        return self._copied is not None

    @property
    def is_done(self) -> bool:
        """Whether the copy can be read without waiting; raises what the device reports."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Wait for the copy; raises what the device reports."""
        if self._copied is not None:
            self._copied.synchronize()


def on_side_stream(function: Callable[..., list[Tensor]], device: torch.device) -> Callable[..., list[Tensor]]:
    """Wrap a function for another thread so that it does not wait for work still running on the device."""
    if device.type != "cuda":
        return function
    stream, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(main)  # the function's inputs may still be being computed

    def run(*arguments: Any) -> list[Tensor]:
        with torch.cuda.stream(stream):
            made = function(*arguments)
        stream.synchronize()
        for tensor in made:
            tensor.record_stream(main)  # its memory must not be reused here while the main stream uses it
        return made

    return run


def can_record(device: torch.device) -> bool:
    """Whether functions can be captured as graphs on a device."""
    return device.type == "cuda" and enabled()


def record(make: Callable[[], Result]) -> Result | None:
    """Call a function that captures a graph; None, with a warning, if that fails."""
    try:
        return make()
    except torch.OutOfMemoryError:  # without a graph, it would need as much
        raise
    except RuntimeError as error:
        warnings.warn(f"CUDA graph capture failed, continuing without it: {error}", stacklevel=3)
        return None
