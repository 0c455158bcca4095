"""benchmarks/models.py: both contestants do the same work, and the table says what was measured."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import testtime as tt
from scripts import ROOT, load_script

TINY = "plain torch ConvNet"


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = load_script("benchmarks/models.py")
    monkeypatch.setattr(module, "COPIES", 2)
    monkeypatch.setattr(module, "THREADS", 1)
    return module


def test_both_learn_from_as_many_copies_and_answer_once(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    net, pool = models.make_network(TINY, "cpu")
    sizes: list[tuple[bool, int]] = []

    class Watched(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append((torch.is_grad_enabled(), len(x)))
            return self.inner(x)

    watched = tt.YNet(Watched(net.encoder), net.classifier, net.ssl, net.card).eval()
    answers = {kind: make(watched) for kind, make in models.CONTESTANTS.items()}
    learned, observed = {}, {}
    for kind, answer in answers.items():
        answer(pool[:1])
        sizes.clear()
        answer(pool[:2])
        learned[kind] = [size for learns, size in sizes if learns]
        observed[kind] = sum(size for learns, size in sizes if not learns)
    assert learned == {"naive": [2, 2], "online": [2, 2], "bare": [2, 2]}
    assert observed == {"naive": 2, "online": 16, "bare": 4}


def test_the_table_and_the_file(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> nn.Module:
        raise ImportError("No module named 'nowhere'")

    def compare_memory(name: str, parameters: int, device: str) -> dict[str, Any]:
        return {"naive_mib": 3, "online_mib": 4, "several_mib": 5, "copies": 0.5, "copies_of_several": 1.0}

    out = tmp_path / "models.json"
    names = ["testtime resnet26", TINY]
    monkeypatch.setattr(models, "OTHERS", {"nowhere model": absent})
    monkeypatch.setattr(models, "compare_memory", compare_memory)
    arguments = ["--only", *names, "nowhere model", "--seconds", "0.01", "--images", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["models.py", *arguments])
    models.main()
    document = json.loads(out.read_text())
    speeds = [row["speed"] for row in document["rows"]]
    assert [row["model"] for row in document["rows"]] == names
    assert list(document["skipped"]) == ["nowhere model"]
    assert document["geometric_mean"] == pytest.approx(math.sqrt(speeds[0] * speeds[1]), abs=1e-3)
    assert document["slowest"] == min(speeds)
    assert document["bare_slowest"] == min(row["bare_speed"] for row in document["rows"])
    assert document["most_copies"] == 0.5
    assert {"command", "hardware", "versions", "load_average_before"} <= document.keys()
    assert all(row["rounds"] >= 5 and row["range"][0] <= row["speed"] <= row["range"][1] for row in document["rows"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*names, "nowhere model"))


def test_finished_rows_of_the_same_code_are_kept(models: ModuleType, tmp_path: Path) -> None:
    out, rows = tmp_path / "models.json", [{"model": TINY, "speed": 1.0}]
    head = {"hardware": "two cores", "versions": {"torch": "2"}, "code": "a"}
    assert models.read_finished(out, head) == []
    out.write_text(json.dumps(head | {"rows": rows}))
    assert models.read_finished(out, head) == rows
    assert models.read_finished(out, head | {"versions": {"torch": "3"}}) == []
    assert models.read_finished(out, head | {"code": "b"}) == []


def test_a_resumed_run_measures_only_what_is_missing(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[str] = []

    def compare(name: str, options: Any) -> dict[str, Any]:
        measured.append(name)
        return {"model": name, "speed": 1.0, "bare_speed": 1.0, "parameters": 1, "naive_ms": 1.0, "online_ms": 1.0}

    monkeypatch.setattr(models, "compare", compare)
    monkeypatch.setattr(models, "compare_memory", lambda *_: {})
    out, names = tmp_path / "models.json", ["testtime resnet26", TINY]
    for only in (names[:1], names):
        monkeypatch.setattr(sys, "argv", ["models.py", "--only", *only, "--out", str(out), "--resume"])
        models.main()
    assert measured == names
    assert [row["model"] for row in json.loads(out.read_text())["rows"]] == names


def test_scales_of_zero_are_filled_and_others_are_not(models: ModuleType) -> None:
    layers = nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.LayerNorm(2)
    nn.init.zeros_(layers[0].weight)
    nn.init.zeros_(layers[2].weight)
    assert models.fill_zero_scales(nn.Sequential(*layers)) == 1
    assert [layer.weight.tolist() for layer in layers] == [[0.5, 0.5], [1, 1], [0, 0]]


def test_the_full_run_has_the_models_of_three_libraries(models: ModuleType) -> None:
    libraries = [name.split()[0] for name in models.OTHERS]
    assert {library: libraries.count(library) for library in libraries} == {
        "torchvision": 8,
        "timm": 9,
        "transformers": 4,
    }


def test_streams_are_compared_with_the_naive_loop_of_the_same_round(models: ModuleType) -> None:
    assert models.summarise_speed([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == {"speed": 2.0, "range": [1.0, 3.0]}


def test_peak_memory_grows_with_what_is_done(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    megabytes = 64

    def fill(_: tt.YNet) -> Any:
        return lambda images: torch.ones(megabytes, 2**18)  # 4 bytes each; freed at once

    monkeypatch.setitem(models.CONTESTANTS, "filling", fill)
    monkeypatch.setitem(models.MEMORY, "filling", ("filling", 1))
    grown = models.measure_memory(TINY, "filling", "cpu")
    if grown is None:
        pytest.skip("the system does not say")
    assert 0.5 * megabytes < grown / 2**20 < 4 * megabytes


def test_large_models_are_compared_with_plain_training(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large, out = models.large_models, tmp_path / "large.json"
    monkeypatch.setattr(large, "STREAMS", 2)
    arguments = ["--large", "--tiny", "--precision", "fp32", "--seconds", "0.01", "--images", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["models.py", *arguments])
    models.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["model"] for row in rows] == ["testtime vit", "plain torch ConvNet"]
    for row in rows:
        assert (row["streams"], row["copies"]) == (2, 2)
        for kind in ("online_over_naive", "streams_over_training", "norm_streams_over_streams"):
            assert row[f"{kind}_rounds"] == 5
            assert row[f"{kind}_range"][0] <= row[kind] <= row[f"{kind}_range"][1]


def test_plain_training_moves_encoder_and_branch(models: ModuleType) -> None:
    net = models.large_models.make_tiny()["testtime vit"]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    models.large_models.make_training(net, 16, 4, "fp32", "cpu")()
    changed = {name.split(".")[0] for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"encoder", "ssl"}
