"""A model of one's own on the command line: `-m FILE.py:FUNCTION --weights FILE` in predict, eval and diagnose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import Run
from safetensors.torch import save_file

import testtime as tt
from testtime.evaluation.predict_files import load_image
from testtime.evaluation.units import open_run
from testtime.networks.sources import open_network

CODE = """
import torch
from torch import nn
import testtime as tt

def plain():
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

def wrapped():
    return tt.wrap(plain(), size=16, mean=(0.5,), std=(0.25,))
"""
UNTRAINED = pytest.mark.filterwarnings("ignore:The self-supervised branch is not trained")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("testtime.networks.wrap._warned", {"normalisation"})
    (tmp_path / "mine.py").write_text(CODE)
    return f"{tmp_path / 'mine.py'}:wrapped"


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    path = tmp_path / "classes.txt"
    path.write_text("\n".join(f"digit {number}" for number in range(10)))
    return path


@pytest.mark.parametrize("spelling", ["-m", "--model", "-c", "--checkpoint"])
def test_predict_takes_a_model(run: Run, model: str, classes: Path, pictures: Path, spelling: str) -> None:
    given = ["--classes", classes, "--method", "tent", "--device", "cpu", "--json"]
    code, out, err = run("predict", pictures, spelling, model, *given)
    assert code == 0, err
    document = json.loads(out)
    assert document["network"] == f"{model},classes={classes}"
    net = open_network(model)
    shown = torch.stack([load_image(net.card, pictures / f"{number}.png", channels=1) for number in range(3)])
    expected = tt.Online(net, method="tent").predict(shown)
    assert [answer["after"] for answer in document["answers"]] == [f"digit {one}" for one in expected.classes.tolist()]
    found = [answer["after_probability"] for answer in document["answers"]]
    assert found == pytest.approx(expected.logits.softmax(1).amax(1).tolist(), rel=1e-6)


def test_predict_takes_weights(run: Run, model: str, pictures: Path, tmp_path: Path) -> None:
    weights, net = tmp_path / "weights.safetensors", open_network(model)
    for name, change in (("same", 0.0), ("other", 0.5)):
        save_file({key: tensor + change for key, tensor in net.state_dict().items()}, weights)
        given = ["--weights", weights, "--method", "lame", "--json"]
        code, out, err = run("predict", pictures, "-m", model, *given)
        assert code == 0, err
        (tmp_path / name).write_text(json.dumps(json.loads(out)["answers"]))
    assert (tmp_path / "same").read_text() != (tmp_path / "other").read_text()


@UNTRAINED
def test_a_method_that_needs_a_branch_gets_one(run: Run, model: str, tmp_path: Path) -> None:
    data = ["--data", "digits", "--limit", "8", "--device", "cpu"]
    plain = model.replace("wrapped", "plain")
    code, out, err = run(
        "eval", "-m", plain, *data, "--methods", "fixed,online", "--copies", "2", "--out", tmp_path / "a"
    )
    assert code == 0, err
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    assert about["files"]["networks"] == {"joint": plain}
    assert about["configuration"]["networks"]["joint"]["fingerprint"] == open_network(plain, True).fingerprint()
    code, out, err = run("diagnose", "-m", plain, "--data", "digits", "--limit", "32", "--trial", "32", "--json")
    assert code == 0, err
    assert json.loads(out)["network"] == plain
    code, _, err = run("eval", "-m", model, *data, "--methods", "fixed,online", "--out", tmp_path / "b")
    assert code == 1
    assert "needs a self-supervised branch" in err
    assert "tent" in err


def test_eval_takes_a_model_and_methods_without_a_branch(run: Run, model: str, tmp_path: Path) -> None:
    data = ["--data", "digits-c/fog/5", "--data", "digits-c/contrast/5", "--limit", "12", "--device", "cpu"]
    for _ in range(2):  # the second time, nothing is left to do
        code, _, err = run("eval", "-m", model, *data, "--methods", "fixed,tent,lame", "--out", tmp_path / "run")
        assert code == 0, err
    units = {(unit.method, unit.set_name): unit for unit in open_run(tmp_path / "run").units}
    assert len(units) == 6
    # The batches of a stream are its own, also where several sets run at once.
    for method in ("tent", "lame"):
        for name in ("digits-c/fog/5", "digits-c/contrast/5"):
            adapter = tt.Online(open_network(model), method=method)
            expected = list(tt.evaluate(adapter, tt.data.open(name), limit=12, batch=12))
            found = units[method, name].columns()["loss_after"].tolist()
            assert found == pytest.approx([record.loss_after for record in expected], rel=1e-5)


@pytest.mark.parametrize("command", ["predict", "eval", "diagnose", "fit-branch"])
def test_pictures_are_not_resized_to_a_size_that_is_unknown(
    run: Run, model: str, pictures: Path, tmp_path: Path, command: str
) -> None:
    given = {"predict": [pictures, "--method", "tent"], "diagnose": ["--data", pictures]}
    words = given.get(command, ["--data", pictures, "--out", tmp_path / "out"])
    code, out, err = run(command, *words, "-m", model.replace("wrapped", "plain"), "--device", "cpu")
    assert code in (1, 2)
    assert (out, len(err.splitlines())) == ("", 1)
    assert "size is unknown" in err
    assert "FUNCTION return tt.wrap(model, size=" in err


DIAGNOSE = ["diagnose", "-c", "digits-resnet8-gn-joint", "--data", "digits"]


@pytest.mark.parametrize("command", [["predict", "."], ["eval", "--data", "digits"], DIAGNOSE])
def test_bad_models_are_one_line(run: Run, command: list[str], model: str, tmp_path: Path, pictures: Path) -> None:
    words = [str(pictures) if word == "." else word for word in command]
    code, _, err = run(*words, "--weights", "w.pth")
    assert code == 2
    assert "--weights needs a model" in err
    code, _, err = run(*words, "-m", model, "--weights", tmp_path / "none.pth")
    assert (code, err.count("\n")) == (1, 1)
    assert "none.pth: no such file" in err
    code, _, err = run(*words, "-m", f"{tmp_path / 'mine.py'}:none")
    assert (code, err.count("\n")) == (1, 1)
    assert "mine.py: has no function 'none'" in err
