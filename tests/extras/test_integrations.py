"""Integrations with the real libraries; docs/integrations.md runs."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import testtime as tt
from testtime.evaluation import make_plan, run_plan

pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")
pytest.importorskip("huggingface_hub")
pytest.importorskip("onnxruntime")
import lightning
import onnxruntime
import torchmetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from testtime.integrations.board import follow, write_run
from testtime.integrations.callback import AdaptDuringTest
from testtime.integrations.export import export
from testtime.integrations.hub import HubNet
from testtime.integrations.metrics import measure

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore::DeprecationWarning")  # the libraries' own
PAGE = (Path(__file__).parents[2] / "docs/integrations.md").read_text(encoding="utf-8")
LEARN = {"steps": 2, "lr": 0.02, "copies": 1, "augment": tt.CropFlip(padding=0, flip=False)}


@pytest.fixture(scope="module")
def net() -> tt.YNet:
    return tt.load("digits-resnet8-gn-joint")


@pytest.fixture(scope="module")
def shifted() -> tt.data.TestSet:
    return tt.data.open("digits-c/contrast/5", scale="imagenet")


def learn(net: tt.YNet) -> tt.Online:
    return tt.Online(net, task=tt.Rotation("all"), **LEARN)


def test_nothing_of_them_is_imported_with_testtime() -> None:
    code = (
        "import sys, testtime as tt; tt.load; tt.Online; tt.evaluate; tt.train; tt.diagnose\n"
        "names = 'lightning torchmetrics tensorboard huggingface_hub onnx onnxruntime'.split()\n"
        "print([name for name in names if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("kind", ["set", "loader"])
def test_metrics_are_those_of_the_records(kind: str, net: tt.YNet, shifted: tt.data.TestSet) -> None:
    metric = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.Accuracy("multiclass", num_classes=10, average="micro"),
            "confusion": torchmetrics.ConfusionMatrix("multiclass", num_classes=10),
        }
    )
    labels = shifted.labels
    assert labels is not None
    given = shifted if kind == "set" else DataLoader(TensorDataset(shifted.images(range(100)), labels[:100]), 32)
    found = measure(learn(net), given, metric, limit=70)
    records = list(tt.evaluate(learn(net), shifted, limit=70))
    for when, classes in (("before", "prediction_before"), ("after", "prediction")):
        predicted = [getattr(record, classes) for record in records]
        right = sum(one == record.label for one, record in zip(predicted, records, strict=True))
        assert float(found[when]["accuracy"]) == pytest.approx(right / 70)
        expected = np.zeros((10, 10), int)
        for one, record in zip(predicted, records, strict=True):
            expected[record.label, one] += 1
        assert np.array_equal(found[when]["confusion"], expected)
    fixed = measure(tt.Fixed(net), given, metric, limit=70)
    assert torch.equal(fixed["before"]["accuracy"], fixed["after"]["accuracy"])
    assert float(found["after"]["accuracy"]) > float(fixed["after"]["accuracy"])
    assert metric["accuracy"].update_count == 0  # the given one stays unchanged


def test_metrics_need_labels_and_sensible_numbers(net: tt.YNet, shifted: tt.data.TestSet) -> None:
    metric = torchmetrics.Accuracy("multiclass", num_classes=10)
    with pytest.raises(ValueError, match="no labels"):
        measure(tt.Fixed(net), tt.data.TensorSet("bare", shifted.images([0])), metric)
    for wrong in ({"batch": 0}, {"limit": -1}):
        with pytest.raises(ValueError, match="must be at least"):
            measure(tt.Fixed(net), shifted, metric, **wrong)


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.answers: list[torch.Tensor] = []

    def test_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.answers.append(self.model(batch[0]))
        if number == 99:
            raise RuntimeError("stop")

    def find_answers(self) -> torch.Tensor:
        return torch.cat(self.answers)


def make_trainer(*callbacks: lightning.Callback) -> lightning.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **quiet)


def test_lightning_adapts_during_test_and_only_then(net: tt.YNet, shifted: tt.data.TestSet) -> None:
    images = shifted.images(range(60))
    loader = DataLoader(TensorDataset(images), 20)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    module, callback = Module(net), AdaptDuringTest(learn)
    (logged,) = make_trainer(callback).test(module, loader, verbose=False)
    expected = torch.cat([learner(part) for learner in [learn(net)] for part in images.split(20)])
    assert torch.equal(module.find_answers(), expected)
    assert not torch.allclose(expected, net(images))
    assert logged == {"adapted": 1.0, "rolled_back": 0.0}
    assert callback.adapter is not None
    assert callback.adapter.seen == 60
    assert module.model is net
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    plain = Module(net)
    make_trainer().test(plain, loader, verbose=False)
    assert torch.equal(plain.find_answers(), torch.cat([net(part) for part in images.split(20)]))


def test_lightning_gets_its_classifier_back_after_an_error(net: tt.YNet, shifted: tt.data.TestSet) -> None:
    module = Module(net)
    loader = DataLoader(TensorDataset(shifted.images([0]).expand(100, -1, -1, -1)), 1)
    with pytest.raises(RuntimeError, match="stop"):
        make_trainer(AdaptDuringTest(tt.Fixed)).test(module, loader, verbose=False)
    assert module.model is net
    for callback, error in (
        (AdaptDuringTest(learn, "network"), pytest.raises(ValueError, match="must name a module of Module")),
        (AdaptDuringTest(lambda model: model), pytest.raises(TypeError, match="must return an adapter")),  # type: ignore
    ):
        with error:
            make_trainer(callback).test(module, loader, verbose=False)


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_stream_in_tensorboard(net: tt.YNet, shifted: tt.data.TestSet, tmp_path: Path) -> None:
    expected = list(tt.evaluate(learn(net), shifted, limit=50))
    with SummaryWriter(str(tmp_path)) as writer:
        assert list(follow(tt.evaluate(learn(net), shifted, limit=50), writer, "contrast", every=20)) == expected
        bare = tt.data.TensorSet("bare", shifted.images(range(20)))
        list(follow(tt.evaluate(tt.Fixed(net), bare), writer, "bare", every=20))
        with pytest.raises(ValueError, match="`every` must be at least 1"):
            follow([], writer, every=0)
    found = read_scalars(tmp_path)
    assert [step for step, _ in found["contrast/error"]] == [20, 40, 50]
    for tag, of in (("error", lambda r: not r.is_right), ("loss after", lambda r: r.loss_after)):
        means = [np.mean([of(record) for record in expected[at : at + 20]]) for at in (0, 20, 40)]
        assert [value for _, value in found[f"contrast/{tag}"]] == pytest.approx(means)
    assert {tag for tag in found if tag.startswith("bare")} == {
        "bare/loss before", "bare/loss after", "bare/adapted", "bare/rolled back",
    }  # fmt: skip


def test_a_run_in_tensorboard(tmp_path: Path) -> None:
    for folder in ("labelled/cat", "bare"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / folder / "1.png")
    data = [f"{tmp_path / name}" for name in ("labelled", "bare")]
    plan = make_plan(networks={"joint": "cifar10-resnet26-gn-joint"}, data=data, methods="fixed")
    run = run_plan(plan, tmp_path / "run")
    assert write_run(tmp_path / "run", tmp_path / "board") == 1
    right = next(unit.verdicts().right for unit in run.units if unit.set_name == "folder/labelled")
    scalars = read_scalars(tmp_path / "board/run/fixed-0")
    assert scalars == {"error/folder/labelled": [(1, pytest.approx(1 - right.mean()))]}


def test_the_hubs_folder_is_a_checkpoint_too(net: tt.YNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    images = tt.data.open("digits").images(range(4))
    adapter = learn(net)
    adapter.predict(images)
    adapted = adapter.network()
    HubNet.of(adapted).save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".safetensors", ".md", ".json"}
    for loaded in (HubNet.from_pretrained(tmp_path), tt.load(tmp_path / "model.safetensors")):
        assert loaded.fingerprint() == adapted.fingerprint() != net.fingerprint()
        assert loaded.card == adapted.card
        assert torch.equal(loaded(images), adapted(images))
    assert torch.equal(learn(HubNet.from_pretrained(tmp_path))(images), learn(adapted)(images))  # adapts like any other


def test_the_hub_and_custom_models(tmp_path: Path) -> None:
    def make() -> tt.YNet:
        return tt.wrap(nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)))

    custom = make()
    HubNet.of(custom).save_pretrained(tmp_path)
    with pytest.raises(tt.CheckpointError, match="custom model"):
        HubNet.from_pretrained(tmp_path)
    assert HubNet.from_pretrained(tmp_path, net=make()).fingerprint() == custom.fingerprint()
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04.")  # a pickle
    with pytest.raises(tt.CheckpointError):
        HubNet.from_pretrained(tmp_path, net=make())


@pytest.mark.parametrize("name", ["digits-resnet8-gn-joint", "cifar10-resnet26-bn-joint"])
def test_onnx_runtime_computes_what_torch_computes(name: str, tmp_path: Path) -> None:
    net = tt.load(name)
    images = tt.Draws.of(0, torch.arange(7)).uniform(net.channels or 1, net.card.size or 1, net.card.size or 1)
    adapter = tt.Online(net, lr=0.005, copies=2, statistics="source", guard=math.inf)
    adapter.predict(images)
    difference = export(adapter, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    (logits,) = session.run(None, {"images": images.numpy()})
    adapted = adapter.network().eval()(images).detach().numpy()
    np.testing.assert_allclose(logits, adapted, atol=2e-4, rtol=1e-3)
    assert np.abs(logits - net(images).detach().numpy()).max() > 0.01  # the adapted one, not the original
    assert difference < 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


def test_onnx_writes_no_file_that_is_wrong(net: tt.YNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="`shape` must be"):
        export(net, tmp_path / "net.onnx", shape=(16, 16))
    monkeypatch.setattr("testtime.integrations.export.TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="differ by up to"):
        export(net, tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
def test_the_pages_code_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "integrations.md", "exec"), {})
