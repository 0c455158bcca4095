"""Test-Time Training for PyTorch: a vision model learns, without labels, from each image it is about to classify.

The workflow, which is also the order of the modules:

    import testtime as tt

    train_set, test_set = tt.data.open("digits", split="train"), tt.data.open("digits")
    net = tt.resnet26(depth=8, channels=1, size=16)      # one encoder, two branches; or tt.split(model, at=…)
    net.describe(augment={"name": "crop-flip", "padding": 2, "flip": False})  # mirrored digits are not digits
    tt.train(net, train_set, recipe=tt.Recipe.digits())  # classification and rotation jointly
    adapter = tt.Online(net, lr=0.01)                    # or Fixed, or Episodic
    records = list(tt.evaluate(adapter, test_set))       # one record per image
    print(f"{tt.error(records):.1%}")

Public names are loaded on first use, so importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from testtime import threads as _threads

if TYPE_CHECKING:
    from testtime import augment, corruptions, data, networks, tasks
    from testtime.adaptation.adapters import Adapter, Episodic, Fixed, Online
    from testtime.adaptation.auto import Auto, Calibration
    from testtime.adaptation.guard import Guard
    from testtime.adaptation.methods import METHODS, Method
    from testtime.adaptation.prediction import Prediction
    from testtime.adaptation.settings import Settings
    from testtime.adaptation.streams import Streams
    from testtime.augment import CropFlip, ResizedCropFlip
    from testtime.diagnosis.correlation import Correlation, gradient_correlation
    from testtime.diagnosis.measure import diagnose, find_reference
    from testtime.diagnosis.result import Diagnosis
    from testtime.evaluation.recommended import recommend
    from testtime.evaluation.records import Flips, Record, error, evaluate, flips, running_error
    from testtime.networks.card import Card, CheckpointError
    from testtime.networks.checkpoint import bundled, load
    from testtime.networks.resnet import resnet18, resnet26, resnet50
    from testtime.networks.statistics import collect
    from testtime.networks.vit import vit
    from testtime.networks.wrap import split, wrap
    from testtime.networks.ynet import YNet
    from testtime.randomness import Draws
    from testtime.serve.client import Client, ServiceError
    from testtime.storage import FileError
    from testtime.tasks import Jigsaw, Masked, Rotation, Task
    from testtime.training.branch import fit_branch
    from testtime.training.loop import train
    from testtime.training.recipe import Recipe, TrainingError

    __version__: str

_threads.prepare()  # before torch is imported

_NAMES = {
    "adaptation.adapters": ("Adapter", "Episodic", "Fixed", "Online"),
    "adaptation.auto": ("Auto", "Calibration"),
    "adaptation.guard": ("Guard",),
    "adaptation.settings": ("Settings",),
    "adaptation.methods": ("METHODS", "Method"),
    "adaptation.prediction": ("Prediction",),
    "adaptation.streams": ("Streams",),
    "augment": ("CropFlip", "ResizedCropFlip"),
    "diagnosis.correlation": ("Correlation", "gradient_correlation"),
    "diagnosis.measure": ("diagnose", "find_reference"),
    "diagnosis.result": ("Diagnosis",),
    "evaluation.recommended": ("recommend",),
    "evaluation.records": ("Flips", "Record", "error", "evaluate", "flips", "running_error"),
    "networks.card": ("Card", "CheckpointError"),
    "networks.checkpoint": ("bundled", "load"),
    "networks.resnet": ("resnet18", "resnet26", "resnet50"),
    "networks.statistics": ("collect",),
    "networks.vit": ("vit",),
    "networks.wrap": ("split", "wrap"),
    "networks.ynet": ("YNet",),
    "randomness": ("Draws",),
    "serve.client": ("Client", "ServiceError"),
    "storage": ("FileError",),
    "tasks": ("Jigsaw", "Masked", "Rotation", "Task"),
    "training.branch": ("fit_branch",),
    "training.loop": ("train",),
    "training.recipe": ("Recipe", "TrainingError"),
}
"""Module → the public names it defines."""

_MODULES = ("augment", "corruptions", "data", "networks", "tasks")
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "METHODS",
    "Adapter",
    "Auto",
    "Calibration",
    "Card",
    "CheckpointError",
    "Client",
    "Correlation",
    "CropFlip",
    "Diagnosis",
    "Draws",
    "Episodic",
    "FileError",
    "Fixed",
    "Flips",
    "Guard",
    "Jigsaw",
    "Masked",
    "Method",
    "Online",
    "Prediction",
    "Recipe",
    "Record",
    "ResizedCropFlip",
    "Rotation",
    "ServiceError",
    "Settings",
    "Streams",
    "Task",
    "TrainingError",
    "YNet",
    "__version__",
    "augment",
    "bundled",
    "collect",
    "corruptions",
    "data",
    "diagnose",
    "error",
    "evaluate",
    "find_reference",
    "fit_branch",
    "flips",
    "gradient_correlation",
    "load",
    "networks",
    "recommend",
    "resnet18",
    "resnet26",
    "resnet50",
    "running_error",
    "split",
    "tasks",
    "train",
    "vit",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name == "__version__":
        value = _find_version()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _find_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("testtime")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
