"""Networks with two branches: `YNet`, the paper's ResNets, wrapped models, and replicas run as one network."""

from testtime.networks.builders import BUILDERS, Builder, build
from testtime.networks.card import Card, CheckpointError, Statistics
from testtime.networks.checkpoint import bundled, load
from testtime.networks.resnet import resnet18, resnet26, resnet50
from testtime.networks.statistics import collect
from testtime.networks.vit import vit
from testtime.networks.wrap import split
from testtime.networks.ynet import YNet

__all__ = [
    "BUILDERS",
    "Builder",
    "Card",
    "CheckpointError",
    "Statistics",
    "YNet",
    "build",
    "bundled",
    "collect",
    "load",
    "resnet18",
    "resnet26",
    "resnet50",
    "split",
    "vit",
]
