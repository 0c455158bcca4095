"""A function of a batch, computed in two halves by two threads, each with half of the intra-op threads.

Within a layer, threads wait for each other, and where the cores are shared with other processes they wait long. The two
halves of a batch wait for each other only at the end of a pass. Their gradients are added as they come: the sum of two
numbers does not depend on their order.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Bind = Callable[[Sequence[Tensor]], AbstractContextManager[Function]]


def compute(batch: Tensor, bind: Bind, tensors: Sequence[Tensor]) -> Tensor:
    """Compute a function of a batch in two halves, with gradients.

    Args:
        batch: `(N, ...)`, at least two images.
        bind: Called with tensors like `tensors`, returns a context in which a function of a batch uses these. The
            function must treat images independently and be safe to call from two threads at once.
        tensors: What the function depends on besides the batch.

    Returns:
        The function's outputs `(N, ...)`.
    """
    return _Halves.apply(batch, bind, *tensors)  # type: ignore[no-any-return]


def has_plain_state() -> bool:
    """Whether nothing applies to this thread alone that another thread would have to follow."""
    return (
        torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_inference_mode_enabled()
        and not torch._C._is_tracing()
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None  # type: ignore[attr-defined]
    )


class _Halves(torch.autograd.Function):
    """Both halves have graphs of their own, which begin at the same leaves: `tensors`, detached."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, bind: Bind, *tensors: Tensor) -> Tensor:
        ctx.bind = bind
        ctx.save_for_backward(batch, *tensors)
        ctx.leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        pieces = batch.detach().tensor_split(2)
        ctx.pieces = [piece.requires_grad_(batch.requires_grad) for piece in pieces]
        with bind(ctx.leaves) as function:
            ctx.outputs = _run_both(function, *((piece,) for piece in ctx.pieces))
        return torch.cat([output.detach() for output in ctx.outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted, which two graphs cannot give
            return _differentiate(ctx.bind, gradient, *ctx.saved_tensors)
        if ctx.outputs is None:
            raise RuntimeError(
                "The halves were computed once: a second backward pass needs `retain_graph=True` before."
            )
        wanted = [tensor for tensor in ctx.leaves if tensor.requires_grad]
        is_needed = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]

        def descend(output: Tensor, gradient: Tensor, piece: Tensor) -> None:
            inputs = [*wanted, piece] if piece.requires_grad else wanted
            if output.requires_grad:
                torch.autograd.backward(output, gradient, retain_graph=is_needed, inputs=inputs)

        parts = gradient.split([len(piece) for piece in ctx.pieces])
        try:
            _run_both(descend, *zip(ctx.outputs, parts, ctx.pieces, strict=True))
            found = [leaf.grad for leaf in ctx.leaves]
            needs = ctx.pieces[0].requires_grad
            pixels = torch.cat([_read_gradient(piece) for piece in ctx.pieces]) if needs else None
        finally:
            for tensor in [*ctx.leaves, *ctx.pieces]:
                tensor.grad = None
            if not is_needed:
                ctx.outputs = ctx.leaves = ctx.pieces = None
        return pixels, None, *found


def _read_gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _differentiate(bind: Bind, gradient: Tensor, batch: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of `_Halves.forward` as functions of its inputs, by computing the whole batch again."""
    inputs = [tensor for tensor in (batch, *tensors) if tensor.requires_grad]
    with bind(tensors) as function:
        found = torch.autograd.grad(function(batch), inputs, gradient, create_graph=True, allow_unused=True)
    known = {id(tensor): one for tensor, one in zip(inputs, found, strict=True)}
    return known.get(id(batch)), None, *(known.get(id(tensor)) for tensor in tensors)


def _run_both(function: Callable[..., Any], first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, Any]:
    """Call a function twice at once, here and in the worker; returns or raises when both are done."""
    threads, context = torch.get_num_threads(), contextvars.copy_context()
    each, flushes = max(1, threads // 2), _flushes()  # another thread that computes halves may just have set it to 1
    other = _worker().submit(lambda: context.run(_call, function, second, each, flushes))
    try:
        one = _call(function, first, each, flushes)
    finally:
        try:
            _wait(other)
        finally:
            torch.set_num_threads(threads)  # last, since threads that start later take over the number set last
    return one, other.result()


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], threads: int, flushes: bool) -> Any:
    torch.set_num_threads(threads)
    if flushes != _flushes():
        torch.set_flush_denormal(flushes)
    with torch.enable_grad():
        return function(*arguments)


def _flushes() -> bool:
    """Whether this thread rounds denormal numbers to zero."""
    return sys.float_info.min / 2 == 0


def _wait(future: concurrent.futures.Future[Any]) -> None:
    """Wait for a call even if interrupted: it uses what the caller takes back afterwards."""
    interrupt: BaseException | None = None
    while not future.done():
        try:
            concurrent.futures.wait([future])
        except BaseException as error:  # noqa: PERF203 (Ctrl-C, or what a signal handler raises)
            interrupt = error
    if interrupt is not None:
        raise interrupt


class _Worker:
    """A thread that runs calls, one after another, for the life of the process without prolonging it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="testtime-halves", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Start a call and return a handle to its result."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((call, future))
        return future

    def _run(self) -> None:
        while True:
            self._run_next()  # a function of its own: while it waits, nothing refers to the last call's tensors

    def _run_next(self) -> None:
        call, future = self._calls.get()
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            del call, future  # otherwise an error's traceback refers to them, and the call's tensors stay in memory


@functools.cache
def _worker() -> _Worker:
    return _Worker()


with contextlib.suppress(AttributeError):  # not on Windows
    os.register_at_fork(after_in_child=_worker.cache_clear)  # a fork has no threads but the one that made it
