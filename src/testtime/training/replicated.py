"""Training several networks as replicas of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from testtime import kernels
from testtime.networks.replicas import PARTS, Part, Replicas
from testtime.networks.stacked_norms import BatchNorm
from testtime.networks.ynet import YNet
from testtime.precision import Precision


class Replicated:
    """Networks of one architecture as replicas (networks/replicas.py), with their kernels.

    It is called like one network, with the images of the S networks concatenated, `(S·B, ...)`: the first B pass
    through the first network. Until `release`, the networks' parameters and statistics are views of the replicas'.

    Args:
        nets: The networks, one or more.
        parts: The parts to train.
        example: Two or more images of the training size.
        dtype: Computation type of the layers; parameters remain float32.
    """

    def __init__(self, nets: Sequence[YNet], parts: Sequence[Part], example: Tensor, dtype: torch.dtype) -> None:
        self.replicas = Replicas(nets[0], len(nets), parts, example, dtype)
        self.training = False
        self._nets, self._parameters = list(nets), self.replicas.parameters(parts)
        for index, net in enumerate(nets):
            self.replicas.write(index, net.state_dict())
            for name, stacked in self.replicas.tensors.items():
                self._assign(net, name, stacked.detach()[index])
        for stacked in self._parameters.values():
            stacked.requires_grad_(True)

    def release(self) -> None:
        """Copy the parameters and statistics back into memory of the networks."""
        for index, net in enumerate(self._nets):
            for name, stacked in self.replicas.tensors.items():
                self._assign(net, name, stacked.detach()[index].clone(memory_format=torch.contiguous_format))

    def _assign(self, net: YNet, name: str, tensor: Tensor) -> None:
        if name in self._parameters:
            net.get_parameter(name).data = tensor
        else:
            owner, _, last = name.rpartition(".")
            net.get_submodule(owner)._buffers[last] = tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Return class logits `(S·B, K)` for images `(S·B, C, H, W)`."""
        return self.classify(self.encode(images))

    def self_supervise(self, views: Tensor) -> Tensor:
        """Return the task's outputs for views."""
        return self.supervise(self.encode(views))

    def encode(self, images: Tensor) -> Tensor:
        """Return features of images."""
        return self.replicas.encode(self._split(images)).flatten(0, 1)

    def classify(self, features: Tensor) -> Tensor:
        """Return class logits for features."""
        return self.replicas.classify(self._split(features)).flatten(0, 1)

    def supervise(self, features: Tensor) -> Tensor:
        """Return the task's outputs for features."""
        return self.replicas.supervise(self._split(features)).flatten(0, 1)

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (len(self._nets), -1))  # (S·B, ...) → (S, B, ...)

    def train(self, training: bool = True, parts: Sequence[Part] = PARTS) -> None:
        """Set whether Batch Normalization uses batch statistics or running statistics; in other parts the latter."""
        self.training = training
        self.replicas.batch_norms.train(False)
        for module in (module for part in parts for module in self.replicas.parts[part].modules()):
            if isinstance(module, (BatchNorm, nn.modules.batchnorm._BatchNorm)):
                module.training = training

    def eval(self) -> None:
        """Use running statistics in Batch Normalization."""
        self.train(False)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the trained parameters."""
        yield from self._parameters.values()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules of the first network."""
        yield from self._nets[0].modules()


def is_faster(net: YNet, device: torch.device, precision: Precision) -> bool:
    """Whether a network built by this package, with convolutions, trains faster as a replica than in plain torch."""
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    channels = max((layer.out_channels for layer in layers), default=0)
    return bool(net.card.architecture and layers) and kernels.trains_faster(device, channels, precision != "bf16")
