"""Networks with two branches: the Y shape, the paper's ResNets, and many copies of one as one."""

from testtime.networks.card import Card, CheckpointError
from testtime.networks.resnet import resnet18, resnet26, resnet50
from testtime.networks.ynet import YNet, load, shipped, split

__all__ = ["Card", "CheckpointError", "YNet", "load", "resnet18", "resnet26", "resnet50", "shipped", "split"]
