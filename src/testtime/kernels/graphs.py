"""CUDA graphs: a function of tensors, recorded once and replayed without Python.

A step of test-time training is some hundred small kernels; launching them one by one costs more than running them.
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


class Later(Generic[Result]):
    """What a function gives that may still be running; see `Concurrent.later`."""

    def __init__(self, value: Result, side: Concurrent | None = None) -> None:
        self._value, self._side = value, side

    def result(self) -> Result:
        """The value; whatever is launched from now on waits for it."""
        if self._side is not None:
            self._side.wait()
        return self._value


class Concurrent:
    """Functions that run on a second CUDA stream, concurrently with what is launched after them, until `wait`.

    What they read must stay as it is until then: whoever changes it calls `wait` first. On a CPU, and within another
    such function, they run at once.

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if can_record(device) else None
        self._inside = False
        self._kept: list[Any] = []  # what is read or written there must not be given to others before that is done

    def later(self, function: Callable[..., Result], *arguments: Any) -> Later[Result]:
        """Start a function; its `result` is there after waiting for it."""
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
        """Let what is launched from now on wait for everything that runs here."""
        if self._stream is not None and self._kept and not self._inside:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._kept.clear()


def on_side_stream(function: Callable[..., list[Tensor]], device: torch.device) -> Callable[..., list[Tensor]]:
    """A function for another thread that makes tensors without waiting for what is still running on the device."""
    if device.type != "cuda":
        return function
    stream, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(main)  # which may not have the function's inputs yet

    def run(*arguments: Any) -> list[Tensor]:
        with torch.cuda.stream(stream):
            made = function(*arguments)
        stream.synchronize()
        for tensor in made:
            tensor.record_stream(main)  # its memory is not to be used again here while that works on it
        return made

    return run


def can_record(device: torch.device) -> bool:
    """Whether functions of tensors on a device can be recorded as graphs."""
    return device.type == "cuda" and enabled()


def record(make: Callable[[], Result]) -> Result | None:
    """Record a graph with a function that makes it; None, after a warning, where recording fails."""
    try:
        return make()
    except torch.OutOfMemoryError:  # without a graph it would take as much
        raise
    except RuntimeError as error:
        warnings.warn(f"CUDA graph capture failed, continuing without it: {error}", stacklevel=3)
        return None
