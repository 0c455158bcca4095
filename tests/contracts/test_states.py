"""States of adapters: what is not one is refused with the file's name, and changes nothing; others travel."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import testtime as tt
from testtime.storage import FileError
from testtime.tensorfile import pack_text, write_tensors

MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
NET = tt.load("digits-resnet8-gn-joint")
IMAGES = tt.data.open("digits").images(torch.arange(3))
SETTINGS: dict[str, Any] = {"copies": 2, "lr": 0.05, "optimizer": MOMENTUM}
ADAPTERS: dict[str, Callable[[], tt.Adapter]] = {
    "online": lambda: tt.Online(NET, **SETTINGS),
    "streams": lambda: tt.Streams(NET, 3, **SETTINGS),
}
WEIGHT, BIAS = "learner/encoder.0.weight", "learner/ssl.4.bias"
State = dict[str, Tensor]


def used(name: str) -> tt.Adapter:
    adapter = ADAPTERS[name]()
    adapter.predict(IMAGES)
    return adapter


# ---------------------------------------------------------------------------------------------------------------------
# Malformed
# ---------------------------------------------------------------------------------------------------------------------


def put(**changes: Tensor | None) -> Callable[[State], State]:
    """The state with other tensors under some names ("/" and "." are written as "__" and "_DOT_"), or without them."""
    named = {name.replace("__", "/").replace("_DOT_", "."): tensor for name, tensor in changes.items()}

    def change(state: State) -> State:
        return {name: tensor for name, tensor in (state | named).items() if tensor is not None}

    return change


def alter(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    return lambda state: state | {name: function(state[name]).contiguous()}


def spoil(value: float) -> Callable[[Tensor], Tensor]:
    def spoilt(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return spoilt


def integers(*values: int) -> Tensor:
    return torch.tensor(values)


TENSORS: dict[str, Callable[[State], State]] = {
    "no counts": put(counts=None),
    "no adapter": put(adapter=None),
    "no settings": put(settings=None),
    "no network": put(network=None),
    "another adapter": put(adapter=pack_text("Fixed")),
    "an adapter that is no text": put(adapter=torch.zeros(3)),
    "a text of two axes": put(network=torch.zeros(2, 8, dtype=torch.uint8)),
    "a text that steers the terminal": put(adapter=pack_text("\x1b[31merror: Online\n")),
    "another network": put(network=pack_text("0" * 16)),
    "other settings": put(settings=pack_text("{}")),
    "two counts": put(counts=integers(3, 3)),
    "counts of floats": put(counts=torch.tensor([3.0, 3.0, 0.0])),
    "counts that are no numbers": put(counts=torch.tensor([float("nan")] * 3)),
    "negative counts": put(counts=integers(3, -1, 0)),
    "more adapted than seen": put(counts=integers(3, 4, 0)),
    "more rolled back than seen": put(counts=integers(3, 2, 2)),
    "counts as a table": put(counts=torch.ones(3, 1, dtype=torch.int64)),
    "a missing weight": put(**{WEIGHT.replace("/", "__").replace(".", "_DOT_"): None}),
    "NaN": alter(WEIGHT, spoil(float("nan"))),
    "infinity": alter(BIAS, spoil(float("inf"))),
    "a memory of NaN": alter(f"learner/optimizer/momentum_buffer/{WEIGHT[8:]}", spoil(float("nan"))),
    "half precision": alter(WEIGHT, lambda tensor: tensor.half()),
    "double precision": alter(WEIGHT, lambda tensor: tensor.double()),
    "integers": alter(WEIGHT, lambda tensor: tensor.int()),
    "booleans": alter(WEIGHT, lambda tensor: tensor > 0),
    "complex numbers": alter(WEIGHT, lambda tensor: tensor.to(torch.complex64)),
    "another shape": alter(WEIGHT, lambda tensor: tensor[:, :1]),
    "no numbers": alter(WEIGHT, lambda tensor: tensor[:0]),
    "a transposed weight": alter(WEIGHT, lambda tensor: tensor.transpose(1, 2)),
    "a memory of another shape": alter(
        f"learner/optimizer/momentum_buffer/{WEIGHT[8:]}", lambda tensor: tensor[..., :1]
    ),
    "a memory of nobody": put(learner__optimizer__momentum_buffer__nobody=torch.zeros(1)),
    "an unknown memory": put(learner__optimizer__evil__numbers=torch.zeros(1)),
    "an unknown tensor": put(learner__extra=torch.zeros(1)),
    "no shape": put(learner__shape=None),
    "a shape of floats": put(learner__shape=torch.tensor([1.0, 16.0, 16.0])),
    "a shape of two": put(learner__shape=integers(1, 16)),
    "a shape of nothing": put(learner__shape=integers(1, 0, 16)),
    "a negative shape": put(learner__shape=integers(1, -16, -16)),
    "a huge shape": put(learner__shape=integers(1, 1 << 20, 1 << 20)),
    "an overflowing shape": put(learner__shape=integers(1, 1 << 62, 4)),
    "other channels": put(learner__shape=integers(3, 16, 16)),
    "nothing": lambda state: {},
}


def rewrite_header(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    header = change(json.loads(content[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


BYTES: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut at {n}/7": lambda content, n=n: content[: len(content) * n // 7] for n in range(7)},
    **{f"a bit flipped at {n}/7": lambda content, n=n: flip(content, len(content) * n // 7) for n in range(1, 7)},
    "a bit of the length": lambda content: flip(content, 1),
    "a bit of the header": lambda content: flip(content, 40),
    "longer": lambda content: content + b"\0",
    "text": lambda content: b"not a state",
    "zeros": lambda content: bytes(len(content)),
    "ones": lambda content: b"\xff" * len(content),
    "an endless header": lambda content: struct.pack("<Q", 1 << 62) + content[8:],
    "a header that is a list": lambda content: rewrite_header(content, lambda header: [header]),
    "a header nested deeply": lambda content: rewrite_header(content, lambda header: b"[" * 100_000),
    "an unknown type": lambda content: rewrite_header(content, lambda header: header | retype(header)),
    "a checksum of zeros": lambda content: rewrite_header(content, lambda header: header | resum(header, "0" * 64)),
    "another format": lambda content: rewrite_header(content, lambda header: header | reformat(header)),
    "a zip": lambda content: b"PK\x03\x04" + content[4:],
}


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


def retype(header: dict[str, Any]) -> dict[str, Any]:
    return {WEIGHT: header[WEIGHT] | {"dtype": "F13"}}


def resum(header: dict[str, Any], value: str) -> dict[str, Any]:
    about = json.loads(header["__metadata__"]["testtime-adapter"])
    return {"__metadata__": {"testtime-adapter": json.dumps(about | {"sha256": value})}}


def reformat(header: dict[str, Any]) -> dict[str, Any]:
    return {"__metadata__": {"testtime-adapter": '{"format": 99}'}}


def check_refused(name: str, path: Path) -> None:
    adapter, untouched = used(name), used(name)
    with pytest.raises(FileError) as caught:
        adapter.load(path)
    text = str(caught.value)
    assert str(path) in text
    assert text.isprintable()
    assert len(text) < 2000
    assert adapter.state_dict().keys() == untouched.state_dict().keys()
    assert all(torch.equal(tensor, untouched.state_dict()[key]) for key, tensor in adapter.state_dict().items())
    assert torch.equal(adapter.predict(IMAGES.flip(0)).logits, untouched.predict(IMAGES.flip(0)).logits)


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("damage", TENSORS)
def test_a_state_of_other_tensors_is_refused(damage: str, name: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / "state", TENSORS[damage](used(name).state_dict()), "testtime-adapter", {"format": 1})
    check_refused(name, tmp_path / "state")


@pytest.mark.parametrize("damage", BYTES)
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    used("online").save(tmp_path / "state")
    content = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(BYTES[damage](content))
    check_refused("online", tmp_path / "state")


@pytest.mark.parametrize("what", ["missing", "a folder", "a pipe", "a null byte"])
def test_what_is_no_file_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    if what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    with pytest.raises(FileError, match="state"):
        used("online").load(f"{path}\0" if what == "a null byte" else path)


def test_a_network_is_refused_by_name(tmp_path: Path) -> None:
    NET.save(tmp_path / "net")
    with pytest.raises(FileError, match=r"net: a network, .*tt\.load"):
        used("online").load(tmp_path / "net")


@pytest.mark.parametrize("count", [-1, None])
def test_a_count_of_updates_that_is_none_is_refused(count: int | None, tmp_path: Path) -> None:
    def make() -> tt.Adapter:
        return tt.Online(NET, method="tent", resets=5)

    adapter = make()
    adapter.predict(IMAGES)
    state = adapter.state_dict()
    assert state["learner/updates"].tolist() == [1]
    changed = state | {"learner/updates": torch.tensor([count or 0])}
    if count is None:
        del changed["learner/updates"]
    write_tensors(tmp_path / "state", changed, "testtime-adapter", {"format": 1})
    with pytest.raises(FileError, match="updates"):
        make().load(tmp_path / "state")


def test_streams_of_another_number_are_refused(tmp_path: Path) -> None:
    used("streams").save(tmp_path / "state")
    with pytest.raises(FileError, match="state"):
        tt.Streams(NET, 4, **SETTINGS).load(tmp_path / "state")


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_state_without_a_checksum_is_read(name: str, tmp_path: Path) -> None:
    """Those of version 0.1 have none."""
    adapter = used(name)
    save_file(adapter.state_dict(), tmp_path / "state")
    other = ADAPTERS[name]()
    other.load(tmp_path / "state")
    assert torch.equal(other.predict(IMAGES).logits, adapter.predict(IMAGES).logits)
    other.save(tmp_path / "new")
    assert load_file(tmp_path / "new").keys() == load_file(tmp_path / "state").keys()


# ---------------------------------------------------------------------------------------------------------------------
# Travelling
# ---------------------------------------------------------------------------------------------------------------------


def answer(adapter: tt.Adapter, connection: Any) -> None:
    torch.set_num_threads(1)
    connection.send(adapter.predict(IMAGES).logits.tolist())
    connection.close()


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_used_adapter_can_be_sent_to_a_spawned_process(name: str) -> None:
    adapter = used(name)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(adapter, there))
    process.start()
    there.close()
    assert here.recv() == adapter.predict(IMAGES).logits.tolist()
    process.join(60)
    assert process.exitcode == 0
