"""Malformed network files and training checkpoints: one line that names the file, and nothing has changed."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from testtime import Card, CheckpointError, YNet, load, resnet26
from testtime.storage import FileError
from testtime.training import Recipe, train

Damage = Callable[[Path], None]
"""Makes a malformed file of a whole one, in its place."""

INFINITY = float("inf")
RECIPE = Recipe(epochs=2, batch=4, lr=0.01, drops=())


# Ways to damage a file -----------------------------------------------------------------------------------------------


def content(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: void(path.write_bytes(change(path.read_bytes())))


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """The safetensors header, as a table or as bytes."""

    def rewrite(whole: bytes) -> bytes:
        length = struct.unpack("<Q", whole[:8])[0]
        changed = change(json.loads(whole[8 : 8 + length]))
        text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    return content(rewrite)


def about(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """The description, as a table or as text; the file then has no checksum, as those of version 0.1."""

    def rewrite(path: Path) -> None:
        key, fields = description(path)
        changed = change({name: value for name, value in fields.items() if name != "sha256"})
        text = changed if isinstance(changed, str) else json.dumps(changed)
        save_file(load_file(path), path, metadata={key: text})

    return rewrite


def description(path: Path) -> tuple[str, dict[str, Any]]:
    whole = path.read_bytes()
    metadata = json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])["__metadata__"]
    key = next(key for key in metadata if key.startswith("testtime"))
    return key, json.loads(metadata[key])


def fields(**changes: Any) -> Damage:
    return about(lambda found: found | changes)


def without(name: str) -> Damage:
    return about(lambda found: {key: value for key, value in found.items() if key != name})


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    def rewrite(path: Path) -> None:
        key, found = description(path)
        save_file(change(load_file(path)), path, metadata={key: json.dumps(found)})

    return rewrite


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return tensors(lambda found: found | {name: change(found[name]).contiguous()})


def replaced_by(make: Callable[[Path], object]) -> Damage:
    return lambda path: void(path.unlink(), make(path))


def void(*_: object) -> None:
    return None


def flip(whole: bytes, place: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]


def spoil(value: float) -> Callable[[Tensor], Tensor]:
    return lambda old: torch.cat([torch.tensor([value], dtype=old.dtype), old.flatten()[1:]]).view(old.shape)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


FILES: dict[str, Damage] = {
    **{f"cut at {n}/7": content(lambda whole, n=n: whole[: len(whole) * n // 7]) for n in range(7)},
    "cut by a byte": content(lambda whole: whole[:-1]),
    "cut in its length": content(lambda whole: whole[:5]),
    "only its length": content(lambda whole: whole[:8]),
    "a byte longer": content(lambda whole: whole + b"\0"),
    **{f"a bit flipped at {n}/7": content(lambda whole, n=n: flip(whole, len(whole) * n // 7)) for n in range(1, 7)},
    "a bit of the length": content(lambda whole: flip(whole, 1)),
    **{f"a bit of the header at {n}": content(lambda whole, n=n: flip(whole, n)) for n in (20, 60, 100, 400)},
    "a bit of the last number": content(lambda whole: flip(whole, len(whole) - 1)),
    "zeros": content(lambda whole: bytes(len(whole))),
    "ones": content(lambda whole: b"\xff" * len(whole)),
    "text": content(lambda whole: b"These are not the weights you are looking for.\n" * 20),
    "a zip": content(lambda whole: b"PK\x03\x04" + whole[4:]),
    "a pickle": replaced_by(lambda path: torch.save({"weight": torch.zeros(3)}, path)),
    "an endless header": content(lambda whole: struct.pack("<Q", 1 << 62) + whole[8:]),
    "a header that is a list": header(lambda found: [found]),
    "a header nested 100,000 deep": header(lambda found: nested(100_000).encode()),
    "a header that is not UTF-8": header(lambda found: b"\xff" * 100),
    "a header of control characters": header(lambda found: b'{"\\u001b[31m\\n": 3}'),
    "metadata that is a number": header(lambda found: found | {"__metadata__": 3}),
    "metadata of numbers": header(lambda found: found | {"__metadata__": {"testtime": 3, "testtime-training": 3}}),
    "no metadata": header(lambda found: {key: value for key, value in found.items() if key != "__metadata__"}),
    "a checksum of zeros": about(lambda found: found | {"sha256": "0" * 64}),
    "an empty folder": replaced_by(Path.mkdir),
    "a pipe": replaced_by(lambda path: os.mkfifo(path)),
    "a description that is not JSON": about(lambda found: "{not json"),
    "no description": about(lambda found: ""),
    "a description that is a list": about(lambda found: [found]),
    "a description that is a number": about(lambda found: 3),
    "a description that is null": about(lambda found: None),
    "a description that is a text": about(lambda found: '"\\u001b[31mformat"'),
    "a description nested 100,000 deep": about(lambda found: nested(100_000)),
    "a description with NaN": about(lambda found: json.dumps(found | {"record": {"loss": float("nan")}})),
    "a description with -Infinity": about(lambda found: json.dumps(found | {"record": -INFINITY})),
    "a number of 10,000 digits": about(lambda found: json.dumps(found)[:-1] + ', "size": ' + "9" * 10_000 + "}"),
    "no format": without("format"),
    **{
        f"format {value!r}": fields(format=value)
        for value in (0, 2, -1, "1", 1.0, True, None, [1], {"1": 1}, 10**30, "\x1b[31m")
    },
}
if sys.platform == "win32":
    del FILES["a pipe"]


def architecture(**changes: Any) -> Damage:
    return about(lambda found: found | {"architecture": found["architecture"] | changes})


def augment(**changes: Any) -> Damage:
    return about(lambda found: found | {"augment": found["augment"] | changes})


LAST = "classifier.4.weight"
TRACKED = "encoder.1.0.norm1.0.num_batches_tracked"
HUGE = (10**6, 10**9, 10**30)
WRONG: dict[str, tuple[Any, ...]] = {
    "architecture": (None, 3, "resnet26", ["resnet26"], {"name": None}, {"name": ["resnet26"]}, {"name": "resnet99"}),
    "classes": (
        None, 3, "0123456789", {"0": "zero"}, list("abc"), list("0123456789a"), list(range(10)), [None] * 10,
        [["a"]] * 10, ["\x1b[31m", *"123456789"], ["a\nb", *"123456789"], ["\ud800", *"123456789"],
        ["a" * 10**6, *"123456789"],
    ),
    "size": ("16", 0, -5, 1.5, True, [16], {}, 10**6, 10**30),
    "mean": (
        None, 0.5, "0.5", [], {}, [0.5] * 2, ["0.5"] * 3, [True] * 3, [None] * 3, [1e300] * 3, [10**400] * 3,
        [0.5] * 10**5,
    ),
    "std": (None, 0.5, [], [0.5] * 4, [0] * 3, [-1] * 3, [1e-300] * 3, [1e300] * 3, [[0.5]] * 3),
    "task": (None, 3, [], {}, "rotation\x1b[31m", "r" * 10**6),
    "augment": (None, 3, "crop-flip", ["crop-flip"], {"name": 3}, {"name": "resized-crop-flip", "scale": 0.5}),
    "record": (None, 3, "epochs", ["epochs"], {"deep": json.loads(nested(500))}),
    "settings": (None, 3, ["ttt"], {"ttt": 3}, {"a\nb": {}}, {"ttt": {"note": "a" * 10**5}}, {"a" * 2000: {}}),
    "nonsense": (1,),
    "\x1b[31m": (1,),
}  # fmt: skip

EXTREME: tuple[dict[str, Any], ...] = (
    *({"copies": value} for value in (30_000_000, 10**30, -1, "8")),
    *({"steps": value} for value in (10**9, 10**30, -1, 1.5)),
    *({"constants": value} for value in ({"memory": 10**9}, {"memory": "8"}, 3)),
    {"augment": {"name": "resized-crop-flip", "size": 6000}},
)
NETWORKS: dict[str, Damage] = {
    **{f"{name} {str(value)[:40]!r}": fields(**{name: value}) for name, values in WRONG.items() for value in values},
    **{
        f"architecture: {name} {value!r}": architecture(**{name: value})
        for name in ("classes", "width", "channels", "depth", "size", "outputs")
        for value in ("8", 8.0, True, None, [8], -8, 0, *HUGE)
    },
    "architecture: depth 1,000,002": architecture(depth=1_000_002),
    "architecture: depth 602": architecture(depth=602),
    **{f"architecture: norm {value!r}": architecture(norm=value) for value in (3, None, ["batch"], "layer", "group")},
    "architecture: a seed": architecture(seed=10**30),
    "architecture: another argument": architecture(colour=3),
    "architecture: none": fields(architecture={}),
    "architecture: another": fields(architecture={"name": "resnet18", "classes": 10}),
    **{f"augment: padding {value!r}": augment(padding=value) for value in ("4", -1, 65, 10**9, [1], None)},
    "augment: another argument": augment(colour=3),
    "augment: a size of 6,000": fields(augment={"name": "resized-crop-flip", "size": 6000}),
    **{f"settings: {table}": fields(settings={"episodic": table}) for table in EXTREME},
    "record: infinite": about(lambda found: json.dumps(found).replace('"record": {}', '"record": {"loss": 1e999}')),
    **{f"no {name}": without(name) for name in ("classes", "mean", "std")},
    "a tensor missing": tensors(lambda found: {name: found[name] for name in found if name != LAST}),
    "a tensor too many": tensors(lambda found: found | {"extra": torch.zeros(1)}),
    "a tensor of a strange name": tensors(lambda found: found | {"\x1b[31m\n" + "a" * 10**5: torch.zeros(1)}),
    "a tensor renamed": tensors(lambda found: {name.replace("classifier.4", "head"): found[name] for name in found}),
    "no tensors": tensors(lambda found: {}),
    "fewer rows": tensor(LAST, lambda old: old[:9]),
    "no rows": tensor(LAST, lambda old: old[:0]),
    "transposed": tensor(LAST, lambda old: old.T),
    "a scalar": tensor(LAST, lambda old: old[0, 0]),
    "another axis": tensor(LAST, lambda old: old[None]),
    **{
        f"weights of {dtype}": tensor(LAST, lambda old, dtype=dtype: old.to(dtype))
        for dtype in (torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    },
    "a counter of floats": tensor(TRACKED, lambda old: old.float()),
    "a counter of int32": tensor(TRACKED, lambda old: old.int()),
    **{f"a weight of {value}": tensor(LAST, spoil(value)) for value in (float("nan"), INFINITY, -INFINITY)},
    "a weight too large for float32": tensor(LAST, lambda old: spoil(1e300)(old.double())),
}


# Networks ------------------------------------------------------------------------------------------------------------


def network(seed: int = 5) -> YNet:
    return resnet26(depth=8, norm="batch", size=16, seed=seed)


@pytest.fixture(scope="module")
def network_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("network") / "net.safetensors"
    network().save(path)
    return path


def state(net: YNet) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_refused(path: Path, use: Callable[[], object]) -> None:
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        use()
    assert time.process_time() - start < 2
    text = str(caught.value)
    assert str(path) in text
    assert text.isprintable()
    assert len(text) < 1000
    raw = ("recursion", "out of range", "KeyError", "Error(", "unexpected keyword", "NoneType", "object is not")
    assert not any(words in text for words in raw), text


@pytest.mark.parametrize("damage", [*FILES, *NETWORKS])
def test_a_malformed_network_is_refused(damage: str, network_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    shutil.copy(network_file, path)
    (FILES | NETWORKS)[damage](path)
    check_refused(path, lambda: load(path))


FOR_BUILDING = [name for name in NETWORKS if name.startswith("architecture: ") and name.split()[1] in ("none", "size")]
FOR_BUILDING += ["architecture: depth 8.0", "architecture: width True"]
"""What matters only where the card is all there is to build a network by."""


@pytest.mark.parametrize("damage", [*FILES, *(name for name in NETWORKS if name not in FOR_BUILDING)])
def test_a_network_to_read_into_stays_as_it_is(damage: str, network_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    shutil.copy(network_file, path)
    (FILES | NETWORKS)[damage](path)
    net = network(seed=9)
    before, card = state(net), net.card
    check_refused(path, lambda: load(path, net))
    assert same(state(net), before)
    assert net.card is card
    assert net.training


@pytest.mark.parametrize("name", ["net.safetensors", "a\nb\x1b[31m", "n" * 5000, "a\0b", "cifar10-resnet26-gn-jont"])
def test_a_missing_network_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert isinstance(caught.value, FileError)


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are made, but for those on the meta device."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.device.type != "meta":
                self.total += one.nbytes
        return made


@pytest.mark.parametrize("name", ["classes", "width", "channels", "outputs"])
@pytest.mark.parametrize("value", [100, 1000, 10**6])
def test_a_card_cannot_make_memory_be_used(name: str, value: int, network_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    shutil.copy(network_file, path)
    changes: dict[str, Any] = {name: value}
    architecture(**changes)(path)
    with Allocations() as allocations:
        check_refused(path, lambda: load(path))
    assert allocations.total < 20 * path.stat().st_size


def test_a_whole_network_takes_a_few_times_its_file(network_file: Path) -> None:
    with Allocations() as allocations:
        load(network_file)
    assert allocations.total < 20 * network_file.stat().st_size


# Training checkpoints ------------------------------------------------------------------------------------------------


def small_network() -> YNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
        heads = [nn.Linear(32, outputs) for outputs in (3, 4)]
    return YNet(encoder, *heads, Card(augment={"name": "crop-flip", "padding": 1}))


def train_in(folder: Path, net: YNet) -> YNet:
    images = (torch.arange(8 * 16) * 7 % 256).to(torch.uint8).view(8, 1, 4, 4)
    return train(net, images, torch.arange(8) % 3, RECIPE, folder=folder)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_in(folder, small_network())
    return folder


def epoch(number: int, **changes: Any) -> Damage:
    """Other entries of an epoch; None takes one out."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        entry = found["history"][number] | changes
        found["history"][number] = {key: value for key, value in entry.items() if value is not None}
        return found

    return about(change)


WEIGHT, MEMORY, TRACK = "network/classifier.weight", "momentum/classifier.weight", "network/encoder.1.running_mean"

CHECKPOINTS: dict[str, Damage] = {
    **{f"no {name}": without(name) for name in ("configuration", "history")},
    **{f"configuration {value!r}": fields(configuration=value) for value in (None, 3, "text", [], {}, {"recipe": 1})},
    "a configuration nested 500 deep": fields(configuration={"recipe": json.loads('{"a":' * 500 + "1" + "}" * 500)}),
    "a configuration of many names": fields(configuration={f"name {n}": "a" * 100 for n in range(10_000)}),
    "a configuration that steers the terminal": fields(configuration={"\x1b[31m": "\x1b[31m"}),
    **{f"history {value!r}": fields(history=value) for value in (None, 3, "text", {}, [], [1, 2], [[], []], [{}, {}])},
    "a history of too many epochs": about(lambda found: found | {"history": found["history"] * 2}),
    "a history of the same epoch": about(lambda found: found | {"history": found["history"][:1] * 2}),
    "a history of the second epoch": about(lambda found: found | {"history": found["history"][1:]}),
    **{f"an epoch without {name}": epoch(1, **{name: None}) for name in ("epoch", "loss", "train_error", "seconds")},
    **{f"an epoch of the number {value!r}": epoch(0, epoch=value) for value in (0, "1", 1.0, True, 2, 10**30)},
    **{f"a loss of {value!r}": epoch(1, loss=value) for value in ("0.5", True, [0.5], {}, 10**400)},
    "a test error of text": epoch(1, test_error="0.5"),
    "an infinite loss": about(lambda found: json.dumps(found).replace('"loss": ', '"loss": 1e999, "old": ', 1)),
    "a tensor missing": tensors(lambda found: {name: found[name] for name in found if name != WEIGHT}),
    "a momentum missing": tensors(lambda found: {name: found[name] for name in found if name != MEMORY}),
    "no momentum": tensors(lambda found: {name: found[name] for name in found if name.startswith("network/")}),
    "no network": tensors(lambda found: {name: found[name] for name in found if name.startswith("momentum/")}),
    "no tensors": tensors(lambda found: {}),
    "a tensor too many": tensors(lambda found: found | {"network/extra": torch.zeros(1)}),
    "a momentum too many": tensors(lambda found: found | {"momentum/extra": torch.zeros(1)}),
    "a momentum of statistics": tensors(lambda found: found | {f"momentum/{TRACK[8:]}": found[TRACK] + 1}),
    "an unknown kind of tensor": tensors(lambda found: found | {"optimizer/extra": torch.zeros(1)}),
    "a tensor of a strange name": tensors(lambda found: found | {"\x1b[31m\n" + "a" * 10**5: torch.zeros(1)}),
    "a tensor renamed": tensors(lambda found: {name.replace("classifier", "head"): found[name] for name in found}),
    "transposed": tensor(WEIGHT, lambda old: old.T),
    "fewer rows": tensor(MEMORY, lambda old: old[:2]),
    **{
        f"{name.split('/')[0]} of {dtype}": tensor(name, lambda old, dtype=dtype: old.to(dtype))
        for name in (WEIGHT, MEMORY)
        for dtype in (torch.int64, torch.bool, torch.complex64)
    },
    **{
        f"{name} of {value}": tensor(name, spoil(value))
        for name in (WEIGHT, MEMORY, TRACK)
        for value in (float("nan"), INFINITY)
    },
}


@pytest.mark.parametrize("damage", [*FILES, *CHECKPOINTS])
def test_a_malformed_training_checkpoint_is_refused(damage: str, run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    path = folder / "checkpoint.safetensors"
    (FILES | CHECKPOINTS)[damage](path)
    files = {one: one.read_bytes() for one in folder.iterdir() if one.is_file()}
    net = small_network()
    before = state(net)
    check_refused(path, lambda: train_in(folder, net))
    assert same(state(net), before)
    assert files == {one: one.read_bytes() for one in folder.iterdir() if one.is_file()}


RECORDS: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[1, 2]",
    "null": b"null",
    "no configuration": b"{}",
    "a configuration of text": b'{"configuration": "text"}',
    "a configuration of a list": b'{"configuration": [1]}',
    "another configuration": b'{"configuration": {"recipe": {"lr": "\\u001b[31m"}}}',
    "not JSON": b"{not json",
    "not UTF-8": b"\xff\xfe\xfd",
    "NaN": b'{"configuration": {"lr": NaN}}',
    "nested 100,000 deep": nested(100_000).encode(),
    "a configuration nested 500 deep": b'{"configuration": ' + b'{"a": ' * 500 + b"1" + b"}" * 501,
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_malformed_record_is_refused(record: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(RECORDS[record])
    check_refused(path, lambda: train_in(tmp_path, small_network()))
    assert [one.name for one in tmp_path.iterdir()] == ["record.json"]
    assert path.read_bytes() == RECORDS[record]
