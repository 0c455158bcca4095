"""Training at the speed of the replicas: networks that compute as replicas of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from testtime.networks.replicas import Part, Replicas
from testtime.networks.ynet import YNet


class Replicated:
    """Networks of one architecture as replicas (networks/replicas.py), on the kernels made for them.

    It is called like one network, with the S networks' images concatenated, `(S·B, ...)`: the first B go
    through the first network. The networks' own parameters and statistics become views of the replicas': what one
    learns the other has, until `release`.

    Args:
        nets: The networks; one is enough.
        parts: The parts that are trained.
        example: Two images or more of the size to come.
        dtype: What the layers compute in; parameters stay float32.
    """

    def __init__(self, nets: Sequence[YNet], parts: Sequence[Part], example: Tensor, dtype: torch.dtype) -> None:
        self.replicas = Replicas(nets[0], len(nets), parts, example, dtype)
        self.training = False
        self._nets, self._parameters = list(nets), self.replicas.parameters(parts)
        for place, net in enumerate(nets):
            self.replicas.write(place, net.state_dict())
            for name, stacked in self.replicas.tensors.items():
                self._place(net, name, stacked.detach()[place])
        for stacked in self._parameters.values():
            stacked.requires_grad_(True)

    def release(self) -> None:
        """Give the networks memory of their own again."""
        for place, net in enumerate(self._nets):
            for name, stacked in self.replicas.tensors.items():
                self._place(net, name, stacked.detach()[place].clone(memory_format=torch.contiguous_format))

    def _place(self, net: YNet, name: str, tensor: Tensor) -> None:
        if name in self._parameters:
            net.get_parameter(name).data = tensor
        else:
            owner, _, last = name.rpartition(".")
            net.get_submodule(owner)._buffers[last] = tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Class logits `(S·B, K)` of images `(S·B, C, H, W)`."""
        return self.classify(self.encode(images))

    def self_supervise(self, views: Tensor) -> Tensor:
        """The task's outputs of views."""
        return self.supervise(self.encode(views))

    def encode(self, images: Tensor) -> Tensor:
        """Features of images."""
        return self.replicas.encode(self._split(images)).flatten(0, 1)

    def classify(self, features: Tensor) -> Tensor:
        """Class logits of features."""
        return self.replicas.classify(self._split(features)).flatten(0, 1)

    def supervise(self, features: Tensor) -> Tensor:
        """The task's outputs of features."""
        return self.replicas.supervise(self._split(features)).flatten(0, 1)

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (len(self._nets), -1))  # (S·B, ...) → (S, B, ...)

    def train(self, training: bool = True) -> None:
        """Let Batch Normalization use the statistics of the batch, or only the tracked ones."""
        self.training = training
        self.replicas.train_norms(training)

    def eval(self) -> None:
        """Let Batch Normalization use the tracked statistics."""
        self.train(False)

    def parameters(self) -> Iterator[Tensor]:
        """What is trained."""
        yield from self._parameters.values()

    def modules(self) -> Iterator[nn.Module]:
        """A network's layers."""
        yield from self._nets[0].modules()
