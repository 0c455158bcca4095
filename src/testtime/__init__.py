"""Test-Time Training for PyTorch: a vision model that learns, without labels, from each image it is about to classify.

The way through the package, which is also the way its modules import each other:

    import testtime as tt

    train_set, test_set = tt.data.open("digits", split="train"), tt.data.open("digits")
    net = tt.resnet26(depth=8, channels=1, size=16)      # one encoder, two branches; or tt.split(model, at=…)
    net.describe(augment={"name": "crop-flip", "padding": 2, "flip": False})  # digits are not to be mirrored
    tt.train(net, train_set, recipe=tt.Recipe.digits())  # classes and rotations together
    adapter = tt.Online(net, lr=0.01)                    # or Fixed, or Episodic
    records = list(tt.evaluate(adapter, test_set))       # one record for each image
    print(f"{tt.error(records):.1%}")

The names below are the public ones.
"""

from importlib.metadata import PackageNotFoundError, version

from testtime import augment, corruptions, data, networks, tasks
from testtime.adapters import Adapter, Episodic, Fixed, Online, Prediction, Settings
from testtime.analysis import Correlation, gradient_correlation
from testtime.augment import CropFlip, ResizedCropFlip
from testtime.diagnose import Diagnosis, diagnose, find_reference
from testtime.evaluate import Flips, Record, error, evaluate, flips, running_error
from testtime.networks import Card, CheckpointError, YNet, load, resnet18, resnet26, resnet50, shipped, split
from testtime.randomness import Draws
from testtime.streams import Streams
from testtime.tasks import Rotation, Task
from testtime.training import Recipe, TrainingError, train

try:
    __version__ = version("testtime")
except PackageNotFoundError:  # run from a folder of sources
    __version__ = "unknown"

__all__ = [
    "Adapter",
    "Card",
    "CheckpointError",
    "Correlation",
    "CropFlip",
    "Diagnosis",
    "Draws",
    "Episodic",
    "Fixed",
    "Flips",
    "Online",
    "Prediction",
    "Recipe",
    "Record",
    "ResizedCropFlip",
    "Rotation",
    "Settings",
    "Streams",
    "Task",
    "TrainingError",
    "YNet",
    "__version__",
    "augment",
    "corruptions",
    "data",
    "diagnose",
    "error",
    "evaluate",
    "find_reference",
    "flips",
    "gradient_correlation",
    "load",
    "networks",
    "resnet18",
    "resnet26",
    "resnet50",
    "running_error",
    "shipped",
    "split",
    "tasks",
    "train",
]
