"""Training on a GPU at the speed of the replicas: a network that computes as the only replica of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from testtime.networks.replicas import Part, Replicas
from testtime.networks.ynet import YNet


class Replica:
    """A network as the only one of its replicas (networks/replicas.py), on the kernels made for them.

    The network's own parameters and statistics become views of the replica's: what one learns the other has, until
    `release`.

    Args:
        net: The network.
        parts: The parts that are trained.
        example: Two images or more of the size to come.
        dtype: What the layers compute in; parameters stay float32.
    """

    def __init__(self, net: YNet, parts: Sequence[Part], example: Tensor, dtype: torch.dtype) -> None:
        self.replicas = Replicas(net, 1, parts, example, dtype)
        self.training = False
        self._net, self._parameters = net, self.replicas.parameters(parts)
        for name, stacked in self.replicas.tensors.items():
            self._place(name, stacked.detach()[0])
        for stacked in self._parameters.values():
            stacked.requires_grad_(True)

    def release(self) -> None:
        """Give the network memory of its own again."""
        for name, stacked in self.replicas.tensors.items():
            self._place(name, stacked.detach()[0].clone(memory_format=torch.contiguous_format))

    def _place(self, name: str, tensor: Tensor) -> None:
        if name in self._parameters:
            self._net.get_parameter(name).data = tensor
        else:
            owner, _, last = name.rpartition(".")
            self._net.get_submodule(owner)._buffers[last] = tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Class logits `(N, K)` of images `(N, C, H, W)`."""
        return self.classify(self.encode(images))

    def self_supervise(self, views: Tensor) -> Tensor:
        """The task's outputs of views."""
        return self.supervise(self.encode(views))

    def encode(self, images: Tensor) -> Tensor:
        """Features of images."""
        return self.replicas.encode(images[None])[0]

    def classify(self, features: Tensor) -> Tensor:
        """Class logits of features."""
        return self.replicas.classify(features[None])[0]

    def supervise(self, features: Tensor) -> Tensor:
        """The task's outputs of features."""
        return self.replicas.supervise(features[None])[0]

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
        """The network's layers."""
        yield from self._net.modules()
