"""Integrations without their libraries: what is imported when, and metrics against the records."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import testtime as tt
from testtime.integrations.metrics import measure

LIBRARIES = {"callback": "lightning", "board": "tensorboard", "hub": "huggingface_hub"}


def test_importing_the_room_imports_no_library_and_not_torch() -> None:
    code = "import sys, testtime.integrations; print([n for n in ('torch', *{}) if n in sys.modules])"
    names = (*LIBRARIES.values(), "torchmetrics", "onnx", "onnxruntime")
    command = [sys.executable, "-c", code.format(names)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("module", LIBRARIES)
def test_a_missing_library_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == LIBRARIES[module]]:
        monkeypatch.delitem(sys.modules, name)
    for name in (LIBRARIES[module], "torch.utils.tensorboard", f"testtime.integrations.{module}"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, LIBRARIES[module], None)
    with pytest.raises(ModuleNotFoundError, match=LIBRARIES[module]):
        importlib.import_module(f"testtime.integrations.{module}")


class Errors:
    """What `measure` needs of a metric: counts wrong predictions."""

    def __init__(self) -> None:
        self.wrong = self.images = 0

    def clone(self) -> Errors:
        return copy.deepcopy(self)

    def to(self, device: Any) -> Errors:
        return self

    def reset(self) -> None:
        self.wrong = self.images = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.wrong += int((logits.argmax(1) != labels).sum())
        self.images += len(labels)

    def compute(self) -> float:
        return self.wrong / self.images


def test_metrics_need_labels() -> None:
    net, images = tt.load("digits-resnet8-gn-joint"), tt.data.open("digits").images(range(4))
    for batch in (images, (images,), (images, None)):
        with pytest.raises(ValueError, match="no labels"):
            measure(tt.Fixed(net), [batch], Errors())  # type: ignore


@pytest.mark.parametrize("kind", ["set", "batches"])
def test_metrics_before_and_after_are_those_of_the_records(kind: str) -> None:
    net, shifted = tt.load("digits-resnet8-gn-joint"), tt.data.open("digits-c/contrast/5", scale="imagenet")
    assert shifted.labels is not None
    batches = zip(shifted.images(range(60)).split(7), shifted.labels[:60].split(7), strict=True)
    used = Errors()
    used.update(torch.eye(2), torch.tensor([1, 1]))  # must not count
    given: Any = shifted if kind == "set" else batches
    found = measure(tt.Episodic(net, steps=1, copies=1, lr=0.02), given, used, batch=7, limit=30)  # type: ignore
    records = list(tt.evaluate(tt.Episodic(net, steps=1, copies=1, lr=0.02), shifted, limit=30))
    assert found["after"] == pytest.approx(tt.error(records))
    assert found["before"] == pytest.approx(sum(not record.was_right for record in records) / 30)
    assert (used.wrong, used.images) == (1, 2)
