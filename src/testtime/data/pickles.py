"""Read the python version of CIFAR-10 without unpickling anything.

A pickle is a program for a small stack machine, and Python's own machine can be told to call any function. The batches
of `cifar-10-batches-py` need very little of it: dictionaries, lists, strings, small integers, and the two steps in
which numpy describes an array of bytes. This reader is a machine with just those instructions. It never imports, calls
or constructs what a file names; the names are compared with the few that are expected, and anything else is refused.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from testtime.data.sets import DataError

_MARK = object()


class _Global:
    """A name that the file mentions; nothing is looked up."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Type:
    """The element type under construction; only bytes are accepted."""


class _Array:
    """The array under construction."""

    value: np.ndarray | None = None


class _Refused(Exception):
    """What the machine does not do."""


def read_batch(buffer: np.ndarray, path: Path) -> dict[bytes, Any]:
    """The dictionary that a CIFAR-10 batch holds.

    Args:
        buffer: The file's bytes, uint8 `(length,)`, memory-mapped or not.
        path: What to call the file in errors.

    Returns:
        Its content; strings are bytes, and the array is a view into the buffer.

    Raises:
        DataError: The file is cut short, or holds an instruction or a name that no CIFAR-10 batch has.
    """
    try:
        found = _run(buffer)
    except _Refused as error:
        raise DataError(path, f"refused: {error}; no CIFAR-10 batch needs that") from None
    except (struct.error, IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(path, f"cut short or damaged ({type(error).__name__}: {error})") from None
    if not isinstance(found, dict):
        raise DataError(path, "does not hold a dictionary")
    return {key: value.value if isinstance(value, _Array) else value for key, value in found.items()}


def _run(buffer: np.ndarray) -> Any:
    data = buffer.data
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    at = 0

    def take(count: int) -> memoryview:
        nonlocal at
        if count < 0 or at + count > len(data):
            raise IndexError(f"needs {count} bytes at {at}, the file has {len(data)}")
        at += count
        return data[at - count : at]

    def number(form: str) -> int:
        return struct.unpack(form, take(struct.calcsize(form)))[0]

    def line() -> bytes:
        # Names are short: a missing line end must not make the search walk through 30 MB.
        end = bytes(data[at : at + 200]).index(b"\n")
        return bytes(take(end + 1)[:-1])

    def pop_to_mark() -> list[Any]:
        start = max(index for index, item in enumerate(stack) if item is _MARK)
        items = stack[start + 1 :]
        del stack[start:]
        return items

    while True:
        code = bytes(take(1))
        if code == b"\x80":  # protocol
            if number("<B") != 2:
                raise _Refused("a pickle protocol other than 2")
        elif code == b"}":
            stack.append({})
        elif code == b"]":
            stack.append([])
        elif code == b"(":
            stack.append(_MARK)
        elif code == b"K":
            stack.append(number("<B"))
        elif code == b"M":
            stack.append(number("<H"))
        elif code == b"J":
            stack.append(number("<i"))
        elif code == b"N":
            stack.append(None)
        elif code == b"\x88":
            stack.append(True)
        elif code == b"\x89":
            stack.append(False)
        elif code == b"U":  # a string of up to 255 bytes
            stack.append(bytes(take(number("<B"))))
        elif code == b"T":  # a long string: the pixels, left where they are
            stack.append(take(number("<i")))
        elif code == b"q":
            memo[number("<B")] = stack[-1]
        elif code == b"r":
            memo[number("<I")] = stack[-1]
        elif code == b"h":
            stack.append(memo[number("<B")])
        elif code == b"j":
            stack.append(memo[number("<I")])
        elif code in (b"\x85", b"\x86", b"\x87"):  # tuples of one, two, three
            count = code[0] - 0x84
            items = stack[-count:]
            if len(items) != count:
                raise IndexError("too little on the stack")
            stack[-count:] = [tuple(items)]
        elif code == b"t":
            stack.append(tuple(pop_to_mark()))
        elif code == b"a":
            item = stack.pop()
            _expect(stack[-1], list).append(item)
        elif code == b"e":
            items = pop_to_mark()
            _expect(stack[-1], list).extend(items)
        elif code == b"s":
            value, key = stack.pop(), stack.pop()
            _expect(stack[-1], dict)[_expect(key, bytes)] = value
        elif code == b"u":
            items = pop_to_mark()
            target = _expect(stack[-1], dict)
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[_expect(key, bytes)] = value
        elif code == b"c":
            module, name = line(), line()
            stack.append(_named(f"{module.decode('ascii', 'replace')}.{name.decode('ascii', 'replace')}"))
        elif code == b"R":
            arguments, callee = stack.pop(), stack.pop()
            stack.append(_describe(callee, arguments))
        elif code == b"b":
            state = stack.pop()
            _fill(stack[-1], state)
        elif code == b".":
            return stack.pop()
        else:
            raise _Refused(f"pickle instruction {code!r} at byte {at - 1}")


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
    """Stand in for the two calls with which numpy announces an array of bytes."""
    name = callee.name if isinstance(callee, _Global) else None
    if name is not None and name.endswith("_reconstruct") and len(arguments) == 3:
        first = arguments[0]
        if isinstance(first, _Global) and first.name == "numpy.ndarray":
            return _Array()
    if name == "numpy.dtype" and arguments and arguments[0] == b"u1":
        return _Type()
    raise _Refused(f"a call of {name or type(callee).__name__} with {len(arguments)} arguments")


def _fill(target: Any, state: Any) -> None:
    """Stand in for the step that hands an array its shape and bytes."""
    if isinstance(target, _Type):
        return
    if not isinstance(target, _Array):
        raise _Refused(f"a state for {type(target).__name__}")
    _, shape, kind, fortran, pixels = _expect(state, tuple)
    if not isinstance(kind, _Type) or fortran is not False:
        raise _Refused("an array that is not of bytes in C order")
    target.value = np.frombuffer(pixels, dtype=np.uint8).reshape(_expect(shape, tuple))
