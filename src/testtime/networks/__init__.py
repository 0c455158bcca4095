"""Networks with two branches: the Y shape, the paper's ResNets, a model of one's own, many copies of one as one."""

from testtime.networks.builders import BUILDERS, Builder, build
from testtime.networks.card import Card, CheckpointError
from testtime.networks.checkpoint import bundled, load
from testtime.networks.resnet import resnet18, resnet26, resnet50
from testtime.networks.wrap import split
from testtime.networks.ynet import YNet

__all__ = [
    "BUILDERS",
    "Builder",
    "Card",
    "CheckpointError",
    "YNet",
    "build",
    "bundled",
    "load",
    "resnet18",
    "resnet26",
    "resnet50",
    "split",
]
