"""Files of runs that somebody else wrote, damaged or made up: each is refused in one line that names it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from report_runs import make_columns, make_run
from testtime import cli
from testtime.evaluation import RunError, make_plan, open_run, open_runs, write_summary
from testtime.evaluation.units import COLUMNS, read_unit
from testtime.storage import FileError

Columns = dict[str, np.ndarray]
DEEP = "[" * 100_000 + "]" * 100_000
LONG = "n" * 300
EVIL = "a\nerror: b\x1b[31m"


def assert_names(text: str, path: Path) -> None:
    """A message is one printable line that names the file."""
    assert path.name in text
    assert text.isprintable()
    assert len(text) < 1000


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_dangling(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


PLACES = {"a pipe": make_fifo, "a folder": make_folder, "a loop": make_loop, "a link to nothing": make_dangling}
"""What can stand in the place of a file."""

# ---------------------------------------------------------------------------------------------------------------------
# Units
# ---------------------------------------------------------------------------------------------------------------------


def seal(about: dict[str, Any], columns: Columns) -> bytes:
    """A unit's file as the first version wrote it, whatever its content."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in COLUMNS:
        if name in columns:
            digest.update(f"\n{name} {columns[name].dtype} {columns[name].shape}\n".encode())
            digest.update(columns[name].tobytes())
    return save(columns, {"testtime-unit": json.dumps(about | {"sha256": digest.hexdigest()})})


def describe(columns: Columns) -> dict[str, Any]:
    counted = {name: int(columns[name].sum()) for name in ("is_right", "was_right", "adapted", "rolled_back")}
    return {
        "format": 1,
        "method": "fixed",
        "set": "digits",
        "corruption": None,
        "level": None,
        "seed": 0,
        "seconds": 2.0,
        "images_per_second": 3.0,
        "counts": {"images": len(columns["sample"]), "labelled": int((columns["label"] >= 0).sum()), **counted},
    }


WHOLE = make_columns([True, False, True, True, False, True])


def described(**changes: Any) -> bytes:
    """A sealed unit that says something else of itself; `...` leaves an entry out."""
    about = describe(WHOLE) | changes
    return seal({key: value for key, value in about.items() if value is not ...}, WHOLE)


def counted(**changes: Any) -> bytes:
    return described(counts=describe(WHOLE)["counts"] | changes)


def filled(change: Callable[[Columns], Any], recount: bool = True) -> bytes:
    """A sealed unit with other columns."""
    columns = {name: column.copy() for name, column in WHOLE.items()}
    change(columns)
    complete = recount and columns.keys() == WHOLE.keys()
    return seal(describe(columns if complete else WHOLE), columns)


def headed(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


def labelled(text: str) -> bytes:
    """A file with all columns under any description."""
    return save(WHOLE, {"testtime-unit": text})


def flip(content: bytes, place: int) -> bytes:
    place %= len(content)
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def shorten(*names: str) -> Callable[[Columns], None]:
    return lambda columns: columns.update({name: columns[name][:-1] for name in names})


def put(name: str, value: int) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[name][1] = value

    return change


GOOD = seal(describe(WHOLE), WHOLE)
UNITS: dict[str, bytes | Callable[[Path], None]] = {
    **PLACES,
    # Cut short, or with something else in it.
    "empty": b"",
    "a byte": b"x",
    "seven bytes": GOOD[:7],
    "only a length": GOOD[:8],
    "half a header": GOOD[:200],
    "half": GOOD[: len(GOOD) // 2],
    "less a byte": GOOD[:-1],
    "a byte more": GOOD + b"x",
    "text": b"I am a text\nof two lines",
    "a pickle": b"\x80\x04\x95cos\nsystem\n.",
    "an endless header": headed(b"{}", 2**62),
    "a header of nothing": headed(b""),
    "a header that is no JSON": headed(b"{{{{"),
    "a header nested deeply": headed(DEEP.encode()),
    # Bits that turned over.
    "a bit of the length": flip(GOOD, 0),
    "a bit of the header": flip(GOOD, 100),
    "a bit of a number": flip(GOOD, -1),
    "another bit of a number": flip(GOOD, -100),
    # Descriptions that are none.
    "no description": save(WHOLE),
    "another description": save(WHOLE, {"testtime": "{}"}),
    "a description that is no JSON": labelled("{"),
    "a description that is a list": labelled("[]"),
    "a description that is a number": labelled("1"),
    "a description nested deeply": labelled(DEEP),
    "a description with NaN": labelled('{"seconds": NaN}'),
    "an empty description": labelled("{}"),
    "no seal": labelled(json.dumps(describe(WHOLE))),
    "a seal that is a number": labelled(json.dumps(describe(WHOLE) | {"sha256": 1})),
    "another unit's seal": labelled(json.dumps(describe(WHOLE) | {"sha256": "0" * 64})),
    # Formats.
    "format 2": described(format=2),
    "format '1'": described(format="1"),
    "format 1.0": described(format=1.0),
    "format true": described(format=True),
    "no format": described(format=...),
    # Names.
    "no method": described(method=...),
    "a method that is a number": described(method=3),
    "a method without a name": described(method=""),
    "a method that leads out": described(method="../../evil"),
    "a method of 300 letters": described(method=LONG),
    "a method of control characters": described(method=EVIL),
    "half a character": described(method="\ud800"),
    "a set that is a list": described(set=["digits"]),
    "a set that leads out": described(set="digits/../.."),
    "a set of 300 letters": described(set=f"folder/{LONG}"),
    "a set with a null": described(set="folder/\0"),
    "a set elsewhere": described(set="cifar10"),
    "a corruption of no set": described(corruption="fog"),
    "a level of no set": described(level=5),
    "a level that is a list": described(level=[5]),
    # Numbers.
    "a seed that is text": described(seed="0"),
    "a seed that is true": described(seed=False),
    "a seed with a fraction": described(seed=0.0),
    "no seconds": described(seconds=...),
    "seconds that are text": described(seconds="2"),
    "seconds below zero": described(seconds=-1.0),
    "seconds without end": described(seconds=10**400),
    "seconds that are true": described(seconds=True),
    "nested deeply": described(device=json.loads("[" * 500 + "]" * 500)),
    # Counts that are not those of the columns.
    "no counts": described(counts=...),
    "counts that are a list": described(counts=[6]),
    "one image more": counted(images=7),
    "one right more": counted(is_right=5),
    "no labels": counted(labelled=0),
    "a count that is text": counted(adapted="6"),
    "a count without end": counted(rolled_back=10**400),
    # Columns that do not fit each other, or hold what they cannot.
    "a shortened column": filled(shorten("is_right")),
    "another shortened column": filled(shorten("loss_after"), recount=False),
    "all columns shortened": filled(shorten(*COLUMNS), recount=False),
    "no samples": filled(shorten("sample")),
    "a missing column": filled(lambda columns: columns.pop("confidence")),
    "a column of another type": filled(lambda columns: columns.update(label=columns["label"].astype(np.int64))),
    "a column of two axes": filled(lambda columns: columns.update(adapted=columns["adapted"][:, None])),
    "a verdict of seven": filled(put("is_right", 7)),
    "adapted twice": filled(put("adapted", 2)),
    "a sample twice": filled(put("sample", 0)),
    "a sample below zero": filled(put("sample", -1)),
    "a label below none": filled(put("label", -2)),
}
assert len(UNITS) >= 40


def place(path: Path, content: bytes | Callable[[Path], None]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    return path


def test_the_unit_that_they_are_made_of_is_read(tmp_path: Path) -> None:
    _, columns = read_unit(place(tmp_path / "seed-0.safetensors", GOOD))
    assert {name: column.tolist() for name, column in columns.items()} == {
        name: column.tolist() for name, column in WHOLE.items()
    }


@pytest.mark.parametrize("name", UNITS)
def test_malformed_units(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path / "run", {("fixed", "digits", seed): WHOLE for seed in (0, 1)})
    path = place(tmp_path / "run/units/fixed/digits/seed-0.safetensors", UNITS[name])
    run = open_run(tmp_path / "run")
    assert [unit.seed for unit in run.units] == [1]
    (said,) = run.damaged
    assert_names(said, path)
    assert said in caplog.text
    if name != "a set elsewhere":
        with pytest.raises(RunError) as caught:
            read_unit(path)
        assert str(caught.value) == said
        assert isinstance(caught.value, FileError)
    assert sorted(file.name for file in path.parent.iterdir()) == ["seed-0.safetensors", "seed-1.safetensors"]


# ---------------------------------------------------------------------------------------------------------------------
# Studies
# ---------------------------------------------------------------------------------------------------------------------


def method(*lines: str, name: str = "a", mode: str = "online") -> str:
    """A study of one method."""
    return "\n".join([f"[methods.{json.dumps(name)}]", f'mode = "{mode}"', *lines])


def rest(text: str) -> str:
    """A study of a usual method, and something else."""
    return f"{text}\n{method()}"


STUDIES: dict[str, str | bytes | Callable[[Path], None]] = {
    **PLACES,
    # Not TOML.
    "empty": "",
    "cut short": "data = [",
    "no TOML": "I am a text\nof two lines",
    "JSON": '{"data": ["digits"]}',
    "not UTF-8": b'title = "\xff\xfe"',
    "UTF-16": "limit = 1".encode("utf-16"),
    "a null": b"limit = 1\0",
    "a picture": b"\x89PNG\r\n\x1a\n",
    "an entry twice": "limit = 1\nlimit = 2",
    "nested deeply": f"data = {DEEP}",
    "tables nested deeply": "[" + ".".join("a" * 5000) + "]",
    "a table nested deeply": 'title = {a = "x"}\n[methods.a.' + ".".join("b" * 5000) + "]",
    "gigantic": "# " + "x" * 2_000_000,
    "a number of 5,000 digits": f"limit = {'9' * 5000}",
    "a number of 20,000 hexadecimal digits": f"limit = 0x{'f' * 20_000}",
    "control characters": 'title = "\x1b[31m"',
    # Names of entries and of methods.
    "an unknown entry": "nonsense = 1",
    "an entry of control characters": '"a\\u001b[31m\\nerror: b" = 1',
    "a name that leads out": method(name="../../evil"),
    "a name with a slash": method(name="a/b"),
    "a name with a backslash": method(name="a\\b"),
    "a name of dots": method(name=".."),
    "a hidden name": method(name=".hidden"),
    "no name": method(name=""),
    "a name of 300 letters": method(name=LONG),
    "a name of 90 letters of three bytes": method(name="名" * 90),
    "a name of two lines": method(name="a\nb"),
    "a name of control characters": method(name=EVIL),
    "a name that turns text around": method(name="a\u202eb"),
    "a name with a null": method(name="a\0"),
    "names that differ in case": method(name="a") + "\n" + method(name="A"),
    "a network that leads out": method('network = "../evil"'),
    "a network of 300 letters": method(f'network = "{LONG}"'),
    "a network that is a list": method('network = ["joint"]'),
    # Entries of other types.
    "limit true": rest("limit = true"),
    "limit text": rest('limit = "1"'),
    "limit zero": rest("limit = 0"),
    "limit below zero": rest("limit = -1"),
    "limit with a fraction": rest("limit = 1.0"),
    "limit NaN": rest("limit = nan"),
    "limit a date": rest("limit = 2020-01-01"),
    "limit beyond any set": rest("limit = 99999999999999999999"),
    "shuffle a number": rest("shuffle = 1"),
    "original text": rest('original = "yes"'),
    "title a list": rest('title = ["x"]'),
    "seeds a number": rest("seeds = 1"),
    "seeds of true": rest("seeds = [true]"),
    "seeds of text": rest('seeds = ["a"]'),
    "seeds below zero": rest("seeds = [-1]"),
    "seeds beyond 64 bits": rest("seeds = [0, 99999999999999999999]"),
    "seeds of infinity": rest("seeds = [inf]"),
    "seeds of lists": rest("seeds = [[0]]"),
    "seeds twice": rest("seeds = [1, 1]"),
    "no seeds": rest("seeds = []"),
    "levels of true": rest("levels = [true]"),
    "levels of text": rest('levels = ["1-"]'),
    "level 6": rest("levels = [6]"),
    "level 1.5": rest("levels = [1.5]"),
    "levels without end": rest('levels = "1-99999999999"'),
    "no levels": rest("levels = []"),
    "corruptions of numbers": rest("corruptions = [1]"),
    "an unknown corruption": rest('corruptions = ["rain"]'),
    "no corruptions": rest("corruptions = []"),
    "data of numbers": rest("data = [1]"),
    "data of lists": rest('data = [["digits"]]'),
    "data of nothing": rest('data = [""]'),
    "no data": rest("data = []"),
    "unknown data": rest('data = ["nonsense"]'),
    "data in the home of nobody": rest('data = ["~nobody-of-this-name/x"]'),
    "data with a null": rest('data = ["a\\u0000b"]'),
    "data of 300 letters": rest(f'data = ["{LONG}"]'),
    # Methods of another shape.
    "methods a list": 'methods = ["online"]',
    "methods a list of tables": '[[methods]]\nmode = "online"',
    "methods text": 'methods = "online"',
    "no methods": "[methods]",
    "a method that is a number": "[methods]\nonline = 3",
    "a method without a mode": "[methods.a]\nlr = 1.0",
    "a method nested too deeply": '[methods.a.b]\nmode = "online"',
    "an unknown mode": method(mode="magic"),
    "a mode that is a list": '[methods.a]\nmode = ["online"]',
    "an unknown setting": method("speed = 3"),
    "an unknown method": method('method = "fast"'),
    "a method that is a list": method("method = []"),
    # Settings of other types, and numbers that are none.
    "mirrored text": method('mirrored = "x"'),
    "mirrored a number": method("mirrored = 1", mode="fixed"),
    "steps true": method("steps = true"),
    "steps below zero": method("steps = -1"),
    "steps beyond 64 bits": method("steps = 99999999999999999999"),
    "copies text": method('copies = "x"'),
    "no copies": method("copies = 0"),
    "lr NaN": method("lr = nan"),
    "lr infinite": method("lr = inf"),
    "lr beyond floats": method(f"lr = {'9' * 400}"),
    "lr a list": method("lr = [0.1]"),
    "guard NaN": method("guard = nan"),
    "guard true": method("guard = true"),
    "threshold true": method("threshold = true"),
    "threshold NaN": method("threshold = nan"),
    "threshold NaN percent": method('threshold = "nan%"'),
    "threshold a list": method("threshold = []"),
    "precision a number": method("precision = 32"),
    "update a list": method("update = []"),
    "a task with a number": method('task = { name = "rotation", each = 4 }'),
    "a task with a list": method('task = { name = "rotation", each = [] }'),
    "augment text": method('augment = "crop-flip"'),
    "augment without a name": method("augment = {padding = 1}"),
    "augment with a list for a name": method("augment = {name = []}"),
    "augment with something unknown": method('augment = {name = "crop-flip", colour = 1}'),
    "augment with text": method('augment = {name = "crop-flip", padding = "x"}'),
    "augment with true": method('augment = {name = "crop-flip", padding = true}'),
    "augment with a number": method('augment = {name = "crop-flip", flip = 1}'),
    "augment with one number of two": method('augment = {name = "resized-crop-flip", scale = [0.5]}'),
    "augment with NaN": method('augment = {name = "resized-crop-flip", ratio = [nan, nan]}'),
}
assert len(STUDIES) >= 40


@pytest.mark.parametrize("name", STUDIES)
def test_malformed_studies(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = STUDIES[name]
    path = place(tmp_path / "study.toml", content.encode() if isinstance(content, str) else content)
    given = {} if b"\ndata" in b"\n" + (content.encode() if isinstance(content, str) else b"") else {"data": ["digits"]}
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is looked at)
        make_plan(path, checkpoint="x", baseline="y", **given)
    assert_names(str(caught.value), path)
    options = [word for value in given.values() for word in ("--data", *value)]
    out = tmp_path / "run"
    assert cli.run(["eval", "-c", "x", "--matrix", str(path), "--out", str(out), "--device", "cpu", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert_names(said.err.rstrip("\n"), path)
    assert [file.name for file in tmp_path.iterdir()] == ["study.toml"]


# ---------------------------------------------------------------------------------------------------------------------
# run.json and summary.json
# ---------------------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def entry(*keys: Any, value: Any = ...) -> Change:
    """Put a value into a document, or leave an entry out."""

    def change(held: Any) -> None:
        for key in keys[:-1]:
            held = held[key]
        if value is ...:
            del held[keys[-1]]
        else:
            held[keys[-1]] = value

    return change


DOCUMENTS: dict[str, bytes | Callable[[Path], None]] = {
    **{name: made for name, made in PLACES.items() if name not in ("a folder", "a link to nothing")},
    "empty": b"",
    "cut short": b'{"format": 1, "configur',
    "not JSON": b"I am a text\nof two lines",
    "not UTF-8": b'{"format": 1, "configuration": {"\xff": 1}}',
    "a list": b"[]",
    "a number": b"1",
    "nothing": b"null",
    "nested deeply": DEEP.encode(),
    "NaN": b'{"format": 1, "kind": "testtime-summary", "configuration": NaN}',
    "only a format": b'{"format": 1}',
}
"""What neither a run.json nor a summary.json can be."""

DEEP_TABLE: Any = {}
for _ in range(400):
    DEEP_TABLE = {"a": DEEP_TABLE}

RUNS: dict[str, bytes | Callable[[Path], None] | Change] = {
    **DOCUMENTS,
    "no format": entry("format"),
    "format 2": entry("format", value=2),
    "format '1'": entry("format", value="1"),
    "format true": entry("format", value=True),
    "configuration a list": entry("configuration", value=[]),
    "configuration nested deeply": entry("configuration", "x", value=DEEP_TABLE),
    "methods a number": entry("configuration", "methods", value=3),
    "methods a list of lists": entry("configuration", "methods", value=[[1]]),
    "a method that is text": entry("configuration", "methods", "fixed", value="x"),
    "sets a number": entry("configuration", "sets", value=1.5),
    "networks text": entry("configuration", "networks", value="joint"),
    "limit true": entry("configuration", "limit", value=True),
    "limit below zero": entry("configuration", "limit", value=-1),
    "shuffle text": entry("configuration", "shuffle", value="no"),
    "seeds text": entry("configuration", "seeds", value="0"),
    "hardware text": entry("hardware", value="fast"),
    "versions a list": entry("versions", value=[1]),
    "remarks a list": entry("remarks", value=["x"]),
    "a command of numbers": entry("command", value=[1]),
}


@pytest.mark.parametrize("name", RUNS)
def test_malformed_runs(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", {("fixed", "digits", 0): WHOLE})
    path = tmp_path / "run" / "run.json"
    alter(path, RUNS, name)
    with pytest.raises(RunError) as caught:
        open_run(tmp_path / "run")
    assert_names(str(caught.value), path)
    assert_refused_report(tmp_path / "run", path, tmp_path / "out", capsys)


UNIT = ("runs", 0, "units", 0)
BOMB = base64.b64encode(zlib.compress(bytes(1 << 24))).decode()
SUMMARIES: dict[str, bytes | Callable[[Path], None] | Change] = {
    **DOCUMENTS,
    "another kind": entry("kind", value="shopping list"),
    "no kind": entry("kind"),
    "format 9": entry("format", value=9),
    "format '1'": entry("format", value="1"),
    "format true": entry("format", value=True),
    "runs a table": entry("runs", value={}),
    "runs a number": entry("runs", value=1),
    "no runs": entry("runs", value=[]),
    "a run that is a number": entry("runs", 0, value=1),
    "a run without a name": entry("runs", 0, "name"),
    "a run whose name is a list": entry("runs", 0, "name", value=["x"]),
    "a run whose name leads out": entry("runs", 0, "name", value="../x"),
    "a run whose name has a null": entry("runs", 0, "name", value="a\0"),
    "configuration a list": entry("runs", 0, "configuration", value=[["a", 1]]),
    "configuration nested deeply": entry("runs", 0, "configuration", "x", value=DEEP_TABLE),
    "methods a number": entry("runs", 0, "configuration", "methods", value=1),
    "about text": entry("runs", 0, "about", value="x"),
    "hardware text": entry("runs", 0, "about", "hardware", value="x"),
    "sets a list": entry("runs", 0, "sets", value=[]),
    "no sets": entry("runs", 0, "sets", value={}),
    "units text": entry("runs", 0, "units", value="xy"),
    "a unit that is a list": entry(*UNIT, value=[]),
    "no method": entry(*UNIT, "method"),
    "a method that is a number": entry(*UNIT, "method", value=1),
    "a method that leads out": entry(*UNIT, "method", value="../.."),
    "a method of 300 letters": entry(*UNIT, "method", value=LONG),
    "a method of control characters": entry(*UNIT, "method", value=EVIL),
    "half a character": entry(*UNIT, "method", value="\ud800"),
    "a set that is a table": entry(*UNIT, "set", value={}),
    "a seed that is text": entry(*UNIT, "seed", value="0"),
    "a level that is text": entry(*UNIT, "level", value="5"),
    "a corruption of no set": entry(*UNIT, "corruption", value="fog"),
    "seconds that are text": entry(*UNIT, "seconds", value="x"),
    "seconds without end": entry(*UNIT, "seconds", value=10**400),
    "no seconds": entry(*UNIT, "seconds"),
    "a threshold that is text": entry(*UNIT, "threshold", value="x"),
    "counts a list": entry(*UNIT, "counts", value=[]),
    "one right more": entry(*UNIT, "counts", "is_right", value=5),
    "one image more": entry(*UNIT, "counts", "images", value=7),
    "another number of labels": entry(*UNIT, "counts", "labelled", value=5),
    "no count of what adapted": entry(*UNIT, "counts", "adapted"),
    "a count that is text": entry(*UNIT, "counts", "rolled_back", value="0"),
    "verdicts that are a number": entry(*UNIT, "right", value=1),
    "verdicts that are no base64": entry(*UNIT, "right", value="%%%%"),
    "verdicts that are no zlib": entry(*UNIT, "right", value="AAAA"),
    "verdicts cut short": entry(*UNIT, "right", value="eNo="),
    "images that are text": entry(*UNIT, "images", value="x"),
    "arrays a list": entry("arrays", value=[]),
    "no arrays": entry("arrays", value={}),
    "arrays that unpack to gigabytes": lambda held: held["arrays"].update(dict.fromkeys(map(str, range(200)), BOMB)),
    "units of more images than there can be": entry(*UNIT, "counts", "images", value=2**40),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_malformed_summaries(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, [make_run(tmp_path / "run", {("fixed", "digits", 0): WHOLE})])
    alter(path, SUMMARIES, name)
    with pytest.raises(RunError) as caught:
        open_runs(path)
    assert_names(str(caught.value), path)
    assert_refused_report(path, path, tmp_path / "out", capsys)


def alter(path: Path, cases: dict[str, Any], name: str) -> None:
    """Put the case of a name into the place of a file, or change what the file holds."""
    case = cases[name]
    if isinstance(case, bytes) or name in PLACES:
        place(path, case)
        return
    held = json.loads(path.read_text())
    case(held)
    path.write_text(json.dumps(held))


def assert_refused_report(run: Path, file: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.run(["report", str(run), "--out", str(out), "--format", "md,json"]) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert_names(said.rstrip("\n"), file)
    assert not out.exists()
