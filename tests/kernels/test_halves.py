"""A batch in two halves: the same as the whole, whatever happens in either thread."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from testtime import kernels
from testtime.kernels import halves

Function = halves.Function


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def make(count: int, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A batch, and filters, scales and weights of a small network; the last two tensors are fixed, and not used."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (8, 3, 3, 3), (8,), (10, 8), (10,), (3, 3), (5,)
    tensors = [torch.randn(shape, generator=generator) * 0.3 for shape in shapes]
    for tensor in tensors[:3] + tensors[5:]:
        tensor.requires_grad_(True)
    return torch.rand(count, 3, 12, 12, generator=generator), tensors


@contextlib.contextmanager
def bind(tensors: Sequence[Tensor]) -> Iterator[Function]:
    """Convolution, normalisation with given statistics, attention between positions, a linear layer."""
    filters, scale, weight, bias, mix, _ = tensors

    def run(batch: Tensor) -> Tensor:
        x = F.conv2d(batch @ torch.eye(12) + (mix @ batch.mean((2, 3)).T).T[:, :, None, None], filters, padding=1)
        x = F.batch_norm(x, torch.full((8,), 0.1), torch.full((8,), 2.0), scale).relu().flatten(2).mT  # (N, 144, 8)
        x = F.scaled_dot_product_attention(x, x, x)
        return F.linear(x.mean(1), weight, bias)

    yield run


def whole(batch: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    with bind(tensors) as function:
        return function(batch)


def differentiate(outputs: Tensor, inputs: Sequence[Tensor], **options: Any) -> list[Tensor | None]:
    loss = (outputs.softmax(1) * torch.linspace(0, 1, outputs.shape[1])).sum()
    return list(torch.autograd.grad(loss, inputs, allow_unused=True, **options))


def raising(error: BaseException, *, first: bool) -> Any:
    """A binding of a function that fails in the first or in the second half, after 0.1 s in the other."""

    @contextlib.contextmanager
    def bind_failing(tensors: Sequence[Tensor]) -> Iterator[Function]:
        done: list[bool] = []

        def run(batch: Tensor) -> Tensor:
            if (threading.current_thread() is threading.main_thread()) == first:
                raise error
            time.sleep(0.1)
            done.append(True)
            return batch * tensors[0]

        try:
            yield run
        finally:
            assert done  # what is bound is in use until both are done

    return bind_failing


@pytest.mark.parametrize("count", [2, 7, 8, 33])
@pytest.mark.parametrize("needs_pixels", [False, True])
def test_outputs_and_gradients_are_those_of_the_whole_batch(count: int, needs_pixels: bool) -> None:
    batch, tensors = make(count)
    batch.requires_grad_(needs_pixels)
    inputs = [tensor for tensor in (batch, *tensors) if tensor.requires_grad]
    outputs, expected = halves.compute(batch, bind, tensors), whole(batch, tensors)
    torch.testing.assert_close(outputs, expected)
    found = differentiate(outputs, inputs)
    for one, other in zip(found, differentiate(expected, inputs), strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other)
    assert all(tensor.grad is None for tensor in tensors)


def test_repeated_it_gives_the_same_bits() -> None:
    batch, tensors = make(33)
    moving = tensors[:3]
    first = differentiate(halves.compute(batch, bind, tensors), moving)
    for _ in range(30):  # the halves finish in either order
        again = differentiate(halves.compute(batch, bind, tensors), moving)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None and b is not None)


def test_gradients_can_be_taken_twice_and_of_gradients() -> None:
    batch, tensors = make(8)
    moving = tensors[:3]
    outputs, expected = halves.compute(batch, bind, tensors), whole(batch, tensors)
    first = differentiate(outputs, moving, retain_graph=True)
    assert all(map(torch.equal, first, differentiate(outputs, moving, retain_graph=True)))  # type: ignore[arg-type]
    lengths = []
    for result in (outputs, expected):
        gradients = differentiate(result, moving, create_graph=True)
        length = sum((g**2).sum() for g in gradients if g is not None)
        assert isinstance(length, Tensor)
        lengths.append(torch.autograd.grad(length, moving))
    torch.testing.assert_close(lengths[0], lengths[1])
    outputs = halves.compute(batch, bind, tensors)
    differentiate(outputs, moving)
    with pytest.raises(RuntimeError, match="retain_graph"):  # as of any graph, after its memory is freed
        differentiate(outputs, moving)


def test_each_half_takes_half_of_the_threads_and_the_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("ours")
    seen: list[tuple[int, int, bool, str]] = []

    @contextlib.contextmanager
    def bind_noting(tensors: Sequence[Tensor]) -> Iterator[Function]:
        def run(batch: Tensor) -> Tensor:
            seen.append((threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled(), variable.get()))
            return batch * tensors[0]

        yield run

    weight = torch.ones(1, requires_grad=True)
    halves.compute(torch.ones(4, 1), bind_noting, [weight]).sum().backward()
    assert len({ident for ident, *_ in seen}) == 2
    assert [rest for _, *rest in seen] == [[1, True, "ours"]] * 2
    assert weight.grad == 4
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2  # threads that start later are as before


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("error", [ValueError("inside"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_in_one_half_is_raised_when_both_are_done(error: BaseException, first: bool) -> None:
    weight = torch.ones(1, requires_grad=True)
    with pytest.raises(type(error)):
        halves.compute(torch.ones(4, 1), raising(error, first=first), [weight])
    assert torch.get_num_threads() == 2
    assert halves.compute(*make_ones(weight)).sum() == 4  # and the next call works


def make_ones(weight: Tensor) -> tuple[Tensor, Any, list[Tensor]]:
    @contextlib.contextmanager
    def bind_product(tensors: Sequence[Tensor]) -> Iterator[Function]:
        yield lambda batch: batch * tensors[0]

    return torch.ones(4, 1), bind_product, [weight]


def test_an_error_in_the_backward_pass_is_raised() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ValueError("inside")

    @contextlib.contextmanager
    def bind_failing(tensors: Sequence[Tensor]) -> Iterator[Function]:
        yield lambda batch: Failing.apply(batch * tensors[0])  # type: ignore[return-value]

    outputs = halves.compute(torch.ones(4, 1), bind_failing, [torch.ones(1, requires_grad=True)])
    with pytest.raises(ValueError, match="inside"):
        outputs.sum().backward()
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")
def test_an_interrupt_while_it_waits_is_raised_when_the_other_half_is_done() -> None:
    done: list[bool] = []

    @contextlib.contextmanager
    def bind_slow(tensors: Sequence[Tensor]) -> Iterator[Function]:
        def run(batch: Tensor) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.4)
                done.append(True)
            return batch * tensors[0]

        yield run

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            halves.compute(torch.ones(4, 1), bind_slow, [torch.ones(1, requires_grad=True)])
        assert done
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_two_callers_at_once_get_what_they_get_one_after_the_other() -> None:
    def learn(seed: int) -> list[Tensor]:
        torch.get_num_threads()  # a new thread takes over the number set last, when it first asks
        torch.set_num_threads(2)
        batch, tensors = make(16, seed)
        found: list[Tensor] = []
        for _ in range(10):
            found += [g for g in differentiate(halves.compute(batch, bind, tensors), tensors[:3]) if g is not None]
        return found

    expected = [learn(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(learn, (1, 2)))
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_nothing_stays_in_memory() -> None:
    batch, tensors = make(8)
    outputs = halves.compute(batch, bind, tensors)
    known = weakref.ref(outputs.grad_fn.outputs[1])  # type: ignore[union-attr]
    gc.disable()  # without reference cycles either
    try:
        differentiate(outputs, tensors[:3])
        assert known() is None
        gone = weakref.ref(halves.compute(batch, bind, tensors).grad_fn.outputs[1])  # type: ignore[union-attr]
        assert gone() is None
    finally:
        gc.enable()


PROGRAM = """
import contextlib, os, torch
from testtime.kernels import halves
torch.set_num_threads(2)

@contextlib.contextmanager
def bind(tensors):
    yield lambda batch: batch * tensors[0]

def run():
    weight = torch.ones(1, requires_grad=True)
    halves.compute(torch.ones(4, 1), bind, [weight]).sum().backward()
    return int(weight.grad)

assert run() == 4
for _ in range(2):
    child = os.fork()
    if child == 0:
        os._exit(run())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
assert run() == 4
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_it_works_after_a_fork_and_does_not_hold_up_the_end_of_the_process() -> None:
    own = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, env=own)
    assert (done.returncode, done.stderr) == (0, "")


def test_denormal_numbers_are_treated_as_by_the_caller() -> None:
    tiny = torch.full((4, 1), 1e-39)
    weight = torch.ones(1, requires_grad=True)
    given = tiny, make_ones(weight)[1], [weight]
    assert (halves.compute(*given) > 0).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("not on this processor")
    try:
        assert (halves.compute(*given) == 0).all()
    finally:
        torch.set_flush_denormal(False)
    assert (halves.compute(*given) > 0).all()


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return function(*arguments, **(options or {}))


def test_it_takes_over_large_float32_batches_that_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTTIME_KERNELS", raising=False)
    batch, weight = torch.zeros(32, 3, 64, 64), torch.ones(3, requires_grad=True)

    def is_found(batch: Tensor = batch, weight: Tensor = weight) -> bool:
        return kernels.find("halves", batch, bind, [weight]) is halves.compute

    assert is_found()
    assert not is_found(batch[:2])  # too few images
    assert not is_found(batch[..., :2, :2])  # too little work
    assert not is_found(batch.double())
    assert not is_found(weight=torch.ones(3, dtype=torch.bfloat16, requires_grad=True))
    assert not is_found(weight=torch.ones(3))  # nothing learns
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), Mode()):
        with context:
            assert not is_found()
    for count in (1, 3):
        torch.set_num_threads(count)
        assert not is_found()
    torch.set_num_threads(2)
    monkeypatch.setenv("TESTTIME_KERNELS", "off")
    assert not is_found()
