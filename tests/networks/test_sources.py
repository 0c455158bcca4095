"""Networks opened by text: whose text it is, weights of every form, files that do not fit, code of one's own."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import testtime as tt
from testtime.networks.sources import ModelSource, add_options, open_network, parse_source
from testtime.networks.state_files import read_state
from testtime.storage import FileError

CODE = """
import torch
from torch import nn
import testtime as tt

def plain():
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head)

def wrapped():
    return tt.wrap(plain(), size=16, mean=(0.5,), std=(0.25,))

def split():
    return tt.split(plain(), "2", size=16, mean=(0.5,), std=(0.25,))

def failing():
    raise RuntimeError("two\\nlines")

def leaving():
    raise SystemExit(3)

def text():
    return "resnet50"

number = 7
"""
State = dict[str, Tensor]


def make_model() -> nn.Module:
    """The model of `plain`, with other weights."""
    torch.manual_seed(1)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head).eval()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "my models.py"
    path.write_text(CODE)
    return path


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testtime.networks.wrap._warned", {"normalisation"})


def images() -> Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("timm:resnet50", ModelSource("timm", "resnet50")),
        ("torchvision:vit_b_16,weights=a,b.pth", ModelSource("torchvision", "vit_b_16", "a,b.pth")),
        ("transformers:/x/y z,classes=c.txt", ModelSource("transformers", "/x/y z", classes="c.txt")),
        ("a/b.py:make,at=layer3.0,weights=w", ModelSource("file", "a/b.py:make", "w", at="layer3.0")),
        ("net.safetensors", None),
        ("digits-resnet8-gn-joint", None),
        ("timm:", None),
        ("C:/nets/a.safetensors", None),
        ("", None),
    ],
)
def test_what_a_text_names(text: str, expected: ModelSource | None) -> None:
    assert parse_source(text) == expected
    if expected is not None:
        assert parse_source(str(expected)) == expected


@pytest.mark.parametrize("text", ["a/b.py", "a/b.py:", "b.py,weights=w.pth"])
def test_a_python_file_needs_a_function(text: str) -> None:
    with pytest.raises(ValueError, match=r"b.py.* FILE.py:FUNCTION"):
        parse_source(text)


def test_options_are_added_to_models_alone() -> None:
    assert add_options("timm:a", "w.pth") == "timm:a,weights=w.pth"
    assert add_options("timm:a,weights=w.pth", None, Path("c")) == "timm:a,weights=w.pth,classes=c"
    assert add_options("net.safetensors") == "net.safetensors"
    with pytest.raises(ValueError, match=r"--weights needs a model.*net.safetensors"):
        add_options("net.safetensors", "w.pth")


def test_checkpoints_and_bundled_networks_open_as_ever(tmp_path: Path) -> None:
    net = tt.load("digits-resnet8-gn-joint")
    net.save(tmp_path / "net")
    for text in ("digits-resnet8-gn-joint", str(tmp_path / "net")):
        assert open_network(text).fingerprint() == net.fingerprint()


# ---------------------------------------------------------------------------------------------------------------------
# Code and weights of one's own
# ---------------------------------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[State, Path], Any]] = {
    "safetensors": lambda state, path: save_file(state, path),
    "safetensors of others": lambda state, path: save_file(state, path, metadata={"format": "pt"}),
    "torch": lambda state, path: torch.save(state, path),
    "torch, legacy": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "half precision": lambda state, path: torch.save(
        {n: t.half() if t.is_floating_point() else t for n, t in state.items()}, path
    ),
    "checkpoint": lambda state, path: torch.save({"epoch": 3, "state_dict": state, "lr": 0.1}, path),
    "DataParallel": lambda state, path: torch.save({"model": {f"module.{n}": t for n, t in state.items()}}, path),
    "compiled": lambda state, path: torch.save({f"_orig_mod.{n}": t for n, t in state.items()}, path),
    "before num_batches_tracked": lambda state, path: torch.save(
        {n: t for n, t in state.items() if "tracked" not in n}, path
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("branch", [False, True])
def test_weights_of_every_form_are_the_models(code: Path, tmp_path: Path, form: str, branch: bool) -> None:
    model, weights = make_model(), tmp_path / "weights"
    FORMS[form](model.state_dict(), weights)
    net = open_network(f"{code}:plain,weights={weights}", branch)
    assert net.has_branch == branch
    with torch.no_grad():
        expected = model(images())
        assert torch.allclose(net(images()), expected, atol=1e-2 if form == "half precision" else 1e-6)
        other = open_network(f"{code}:plain")(images())
    assert not torch.allclose(other, expected, atol=1e-2)


def test_a_network_from_code_is_taken_as_it_is(code: Path, tmp_path: Path) -> None:
    net = open_network(f"{code}:wrapped", branch=True)
    assert (net.card.size, net.card.mean, net.has_branch) == (16, (0.5,), False)
    classes = tmp_path / "classes.txt"
    classes.write_text("a\nb c\n\nd\ne\n")
    assert open_network(f"{code}:wrapped,classes={classes}").card.classes == ("a", "b c", "d", "e")
    classes.write_text("a\nb\n")
    with pytest.raises(ValueError, match="4 outputs, got 2 names"):
        open_network(f"{code}:plain,classes={classes}")


def test_a_saved_network_comes_back_with_its_branch(code: Path, tmp_path: Path) -> None:
    net = open_network(f"{code}:split")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1)
    net.describe(record={"branch": {"error": 0.2}}).save(tmp_path / "net")
    for function in ("split", "wrapped", "plain"):
        text = f"{code}:{function},weights={tmp_path / 'net'},at=2"
        if function == "split":
            again = open_network(text)
            assert again.fingerprint() == net.fingerprint()
            assert again.card.record == net.card.record
        else:
            with pytest.raises(FileError, match=f"{tmp_path / 'net'}: "):  # no branch; another normalisation
                open_network(text)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("failing", r"failing\(\) failed \(RuntimeError: two\)"),
        ("leaving", r"leaving\(\) failed \(SystemExit"),
        ("text", r"text\(\) must return a model, it returned str"),
        ("number", "has no function 'number'"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_code_that_gives_no_model_is_named(code: Path, function: str, said: str) -> None:
    with pytest.raises(FileError, match=f"my models.py: .*{said}"):
        open_network(f"{code}:{function}")


def test_files_that_are_no_code_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none.py: no such file"):
        open_network(f"{tmp_path / 'none.py'}:make")
    (tmp_path / "broken.py").write_text("def make(:")
    with pytest.raises(FileError, match=r"broken.py: .*SyntaxError"):
        open_network(f"{tmp_path / 'broken.py'}:make")


# ---------------------------------------------------------------------------------------------------------------------
# Files that do not fit
# ---------------------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[State], Any]:
    return lambda state: {other: tensor for other, tensor in state.items() if other != name}


UNFIT: dict[str, tuple[Callable[[State], Any], str]] = {
    "missing": (without("0.bias"), "missing 0.bias"),
    "unexpected": (lambda state: state | {"extra": torch.zeros(2)}, "unexpected extra"),
    "misshapen": (
        lambda state: state | {"0.weight": torch.zeros(8, 1, 3, 3)},
        r"0.weight \(8, 1, 3, 3\), the model has \(8, 3, 3, 3\)",
    ),
    "another model": (lambda state: nn.Linear(2, 3).state_dict(), r"missing 0.weight.* and \d+ more; unexpected"),
    "not finite": (lambda state: state | {"0.bias": torch.full((8,), float("nan"))}, "not finite: 0.bias"),
    "a list": (lambda state: [1, 2], "not a state"),
    "a number": (lambda state: {"lr": 0.1}, "not a state"),
    "nothing": (lambda state: {}, "not a state"),
}


@pytest.mark.parametrize("fault", UNFIT)
def test_a_state_that_does_not_fit_names_the_file_and_the_first_tensors(code: Path, tmp_path: Path, fault: str) -> None:
    change, said = UNFIT[fault]
    torch.save(change(make_model().state_dict()), tmp_path / "weights.pth")
    with pytest.raises(FileError, match=f"weights.pth: .*{said}"):
        open_network(f"{code}:plain,weights={tmp_path / 'weights.pth'}")


UNUSABLE: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.zeros(1).expand(2 * 10**8, 8),
    "overlapping": lambda: torch.zeros(10).as_strided((5, 5), (1, 1)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "float8": lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
    "complex": lambda: torch.zeros(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_tensors_of_unusual_kinds_are_named(tmp_path: Path, kind: str) -> None:
    torch.save({"state_dict": {"0.weight": torch.zeros(2), "4.weight": UNUSABLE[kind]()}}, tmp_path / "weights.pth")
    with pytest.raises(FileError, match=r"weights.pth: .*'4.weight'") as caught:
        read_state(tmp_path / "weights.pth")
    assert len(str(caught.value)) < 300


def test_a_float8_tensor_of_safetensors_is_named(tmp_path: Path) -> None:
    save_file({"4.weight": UNUSABLE["float8"]()}, tmp_path / "weights")
    with pytest.raises(FileError, match=r"weights: .*'4.weight'"):
        read_state(tmp_path / "weights")


def test_tensors_of_usual_kinds_are_read(tmp_path: Path) -> None:
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    state = {str(dtype): torch.ones(3, dtype=dtype) for dtype in (*integers, *floats)}
    table = torch.arange(12.0).view(3, 4)
    state |= {"row": table[1], "transposed": table.T, "parameter": nn.Parameter(table), "empty": torch.zeros(0, 4)}
    state["positions"] = torch.arange(5).expand((1, -1))
    torch.save(state, tmp_path / "weights")
    found = read_state(tmp_path / "weights")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(100_000)}, tmp_path / "whole")
    with (
        zipfile.ZipFile(tmp_path / "whole") as whole,
        zipfile.ZipFile(tmp_path / "small", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for entry in whole.infolist():
            small.writestr(entry.filename, whole.read(entry))
    with pytest.raises(FileError, match="small: "):
        read_state(tmp_path / "small")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}).encode()
DAMAGED: dict[str, bytes] = {
    "text": b"hello, world",
    "truncated": b"PK\x03\x04" + b"\0" * 100,
    "a pickle's start": b"\x80\x02}q\x00(",
    "a huge tensor": struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 4,
    "a huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "empty": b"",
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "weights"
    path.write_bytes(DAMAGED[fault])
    with pytest.raises(FileError, match=str(path)):
        read_state(path)


def test_no_code_of_a_weights_file_is_run(tmp_path: Path) -> None:
    torch.save({"state_dict": Evil(tmp_path / "written")}, tmp_path / "evil.pth")
    with pytest.raises(FileError, match=r"evil.pth: neither safetensors nor weights"):
        read_state(tmp_path / "evil.pth")
    assert not (tmp_path / "written").exists()


@pytest.mark.filterwarnings("always")
def test_a_pickle_is_refused_without_a_warning(code: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "w.pkl").write_bytes(pickle.dumps({"a": print}, protocol=4))  # torch warns about this protocol
    with pytest.raises(FileError, match=r"w.pkl: neither safetensors nor weights"):
        open_network(f"{code}:plain,weights={tmp_path / 'w.pkl'}")
    assert not recwarn.list


def test_missing_files_and_class_names_are_named(code: Path, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none.pth: no such file"):
        open_network(f"{code}:plain,weights={tmp_path / 'none.pth'}")
    (tmp_path / "classes").write_bytes(b"\xff\xfe\0")
    with pytest.raises(FileError, match="classes: not a text file"):
        open_network(f"{code}:plain,classes={tmp_path / 'classes'}")
    (tmp_path / "classes").write_text("\n \n")
    with pytest.raises(FileError, match="classes: has no class names"):
        open_network(f"{code}:plain,classes={tmp_path / 'classes'}")


# ---------------------------------------------------------------------------------------------------------------------
# Libraries
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_missing_library_is_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("testtime.networks.sources.importlib.import_module", missing)
    torch.save({}, tmp_path / "w")
    with pytest.raises(ModuleNotFoundError, match=f"pip install {library}"):
        open_network(f"{library}:resnet18,weights={tmp_path / 'w'}")


def test_a_folder_of_transformers_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"microsoft/resnet-50/config.json: no such file"):
        open_network("transformers:microsoft/resnet-50")


def test_random_weights_are_refused() -> None:
    for library in ("timm", "torchvision"):
        with pytest.raises(ValueError, match=f"{library}:resnet18 has no weights"):
            open_network(f"{library}:resnet18")
