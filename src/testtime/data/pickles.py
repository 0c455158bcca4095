"""Read the python version of CIFAR-10 and CIFAR-100 without `pickle`.

A pickle is a program for a stack machine, and Python's implementation can be made to call any function. CIFAR's batches
need only a few instructions: for dictionaries, lists, strings, small integers, and the two calls with which numpy
describes an array of bytes. This reader implements just those. It never imports, calls or constructs anything that a
file names; names are compared with the few expected ones, and all others are rejected.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from testtime.data.sets import DataError

# The largest, CIFAR-100's train, has 100,000 labels and 50,000 memoised file names: 200,000 steps.
_MOST_STEPS, _MOST_ITEMS, _DEEPEST = 1 << 18, 1 << 16, 4


class _Global:
    """A name in the file; nothing is imported."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Type:
    """The dtype under construction; only bytes are accepted."""


class _Array:
    """The array under construction."""

    value: np.ndarray | None = None


class _Refused(Exception):
    """An unsupported instruction or value."""


def read_batch(buffer: np.ndarray, path: Path) -> dict[bytes, Any]:
    """Parse the dictionary of a CIFAR batch.

    Args:
        buffer: The file's bytes, uint8 `(length,)`.
        path: The file, for error messages.

    Returns:
        Its content; strings are bytes, and the array is a view into the buffer.

    Raises:
        DataError: The file is truncated, or has an instruction or a name that no CIFAR batch needs.
    """
    try:
        found = _Machine(buffer.data).run()
    except _Refused as error:
        raise DataError(path, f"refused: {error}; no CIFAR batch needs that") from None
    except (struct.error, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(path, f"cut short or damaged ({type(error).__name__}: {error})") from None
    if not isinstance(found, dict):
        raise DataError(path, "does not hold a dictionary")
    return {key: value.value if isinstance(value, _Array) else value for key, value in found.items()}


class _Machine:
    """The stack machine: its program, a stack with marks, and a memo."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run the program and return the top of the stack."""
        for _ in range(_MOST_STEPS):
            code = self.take(1)[0]
            if code == _STOP:
                return self.pop()
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise _Refused(f"pickle instruction {bytes([code])!r} at byte {self.at - 1}")
            instruction(self)
            if max(len(self.stack), len(self.marks), len(self.memo)) > _MOST_ITEMS:
                raise _Refused(f"more than {_MOST_ITEMS:,} items at once")
        raise _Refused(f"more than {_MOST_STEPS:,} instructions")

    def take(self, count: int) -> memoryview:
        """Read the next bytes of the program, without a copy."""
        if count < 0 or self.at + count > len(self.data):
            raise IndexError(f"needs {count} bytes at {self.at}, the file has {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        """Read an integer, with `form` as for `struct`."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        """Read a line; names are short, so a newline is searched for in the next 200 bytes only."""
        end = bytes(self.data[self.at : self.at + 200]).index(b"\n")
        return bytes(self.take(end + 1)[:-1]).decode("ascii", "replace")

    def push(self, item: Any) -> None:
        self.stack.append(item)

    def pop(self, count: int = 1) -> Any:
        """Pop the top item, or a list of several; items below the last mark cannot be popped."""
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise IndexError("too few items on the stack")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items[0] if count == 1 else items

    def top(self) -> Any:
        """Return the top item without popping it."""
        self.push(item := self.pop())
        return item

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


class _Tuple(tuple[Any, ...]):
    """A tuple with its nesting depth."""

    depth: int


def _make_tuple(machine: _Machine, items: list[Any]) -> None:
    if any(isinstance(item, list | dict) for item in items):
        raise _Refused("a tuple that holds a list")
    made = _Tuple(items)
    made.depth = 1 + max((item.depth for item in items if type(item) is _Tuple), default=0)
    if made.depth > _DEEPEST:
        raise _Refused(f"tuples more than {_DEEPEST} deep")
    machine.push(made)


def _extend(machine: _Machine, items: list[Any]) -> None:
    if any(isinstance(item, list | dict) for item in items):
        raise _Refused("a list that holds another")
    _expect(machine.top(), list).extend(items)


def _set_items(machine: _Machine, items: list[Any]) -> None:
    target = _expect(machine.top(), dict)
    for key, value in zip(items[::2], items[1::2], strict=True):
        if isinstance(value, dict):
            raise _Refused("a dictionary that holds another")
        target[_expect(key, bytes)] = value


def _check_protocol(machine: _Machine) -> None:
    if machine.number("<B") != 2:
        raise _Refused("a pickle protocol other than 2")


def _remember(machine: _Machine, form: str) -> None:
    slot = machine.number(form)
    machine.memo[slot] = machine.top()


def _call(machine: _Machine) -> None:
    callee, arguments = machine.pop(2)
    machine.push(_describe(callee, arguments))


def _build(machine: _Machine) -> None:
    state = machine.pop()
    _fill(machine.top(), state)


_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _check_protocol,
    ord("}"): lambda machine: machine.push({}),
    ord("]"): lambda machine: machine.push([]),
    ord("("): lambda machine: machine.marks.append(len(machine.stack)),
    ord("K"): lambda machine: machine.push(machine.number("<B")),
    ord("M"): lambda machine: machine.push(machine.number("<H")),
    ord("J"): lambda machine: machine.push(machine.number("<i")),
    ord("N"): lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    ord("U"): lambda machine: machine.push(bytes(machine.take(machine.number("<B")))),  # up to 255 bytes
    ord("T"): lambda machine: machine.push(machine.take(machine.number("<i"))),  # the pixels, not copied
    ord("q"): lambda machine: _remember(machine, "<B"),
    ord("r"): lambda machine: _remember(machine, "<I"),
    ord("h"): lambda machine: machine.push(machine.memo[machine.number("<B")]),
    ord("j"): lambda machine: machine.push(machine.memo[machine.number("<I")]),
    0x85: lambda machine: _make_tuple(machine, [machine.pop()]),
    0x86: lambda machine: _make_tuple(machine, machine.pop(2)),
    0x87: lambda machine: _make_tuple(machine, machine.pop(3)),
    ord("t"): lambda machine: _make_tuple(machine, machine.pop_to_mark()),
    ord("a"): lambda machine: _extend(machine, [machine.pop()]),
    ord("e"): lambda machine: _extend(machine, machine.pop_to_mark()),
    ord("s"): lambda machine: _set_items(machine, machine.pop(2)),
    ord("u"): lambda machine: _set_items(machine, machine.pop_to_mark()),
    ord("c"): lambda machine: machine.push(_named(f"{machine.line()}.{machine.line()}")),
    ord("R"): _call,
    ord("b"): _build,
}


_NAMES = frozenset(
    {
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
    }
)


def _named(name: str) -> _Global:
    if name not in _NAMES:
        raise _Refused(f"it asks for {name!r}")
    return _Global(name)


def _expect(item: Any, kind: type) -> Any:
    if type(item) is not kind:
        raise TypeError(f"{kind.__name__} expected, found {type(item).__name__}")
    return item


def _describe(callee: Any, arguments: Any) -> _Array | _Type:
    """Emulate the two calls with which numpy describes an array of bytes."""
    name = callee.name if isinstance(callee, _Global) else None
    if name is not None and name.endswith("_reconstruct") and len(arguments) == 3:
        first = arguments[0]
        if isinstance(first, _Global) and first.name == "numpy.ndarray":
            return _Array()
    if name == "numpy.dtype" and arguments and arguments[0] == b"u1":
        return _Type()
    raise _Refused(f"a call of {name or type(callee).__name__} with {len(arguments)} arguments")


def _fill(target: Any, state: Any) -> None:
    """Emulate the instruction that sets the shape and bytes of an array."""
    if isinstance(target, _Type):
        return
    if not isinstance(target, _Array):
        raise _Refused(f"a state for {type(target).__name__}")
    _, shape, kind, fortran, pixels = _expect(state, _Tuple)
    if not isinstance(kind, _Type) or fortran is not False:
        raise _Refused("an array that is not of bytes in C order")
    target.value = np.frombuffer(pixels, dtype=np.uint8).reshape(_expect(shape, _Tuple))
