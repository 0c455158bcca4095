"""Normalisation layers with one set of parameters per replica, in plain torch (see stacked.py)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime import kernels
from testtime.kernels import NormForm
from testtime.networks.resnet import BatchNormReLU, GroupNormReLU
from testtime.networks.stacking import Stacking


class GroupNorm(nn.Module):
    """GroupNorm, optionally followed by ReLU."""

    def __init__(self, layer: nn.GroupNorm, stack: Stacking) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)
        self.groups, self.eps, self.relu = layer.num_groups, layer.eps, isinstance(layer, GroupNormReLU)

    @property
    def form(self) -> NormForm:
        return NormForm(self.groups, self.weight, self.bias, self.eps, self.relu)

    def forward(self, x: Tensor) -> Tensor:
        y = kernels.take_over("group_norm", x, self.form)
        if y is not None:
            return y
        y = _scale(F.group_norm(x, self.groups, eps=self.eps), self.weight, self.bias)
        return F.relu_(y) if self.relu else y

    def fork(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result and x, so that the backward pass can fuse the sum of both gradients."""
        forked = None if self._forward_hooks else kernels.take_over("fork_group_norm", x, self.form)
        return (self(x), x) if forked is None else forked


class BatchNorm(nn.Module):
    """BatchNorm with separate statistics per replica, optionally followed by ReLU."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layer: nn.BatchNorm2d | nn.BatchNorm1d, stack: Stacking, relu: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)
        for name, buffer in layer.named_buffers():
            self.register_buffer(name, stack(buffer))
        self.eps, self.momentum, self.relu = layer.eps, layer.momentum or 0.0, relu
        self.track_running_stats = True

    def forward(self, x: Tensor) -> Tensor:
        count, rest = len(self.running_mean), (self.training, self.momentum, self.eps)
        mean, variance = None, None
        if self.track_running_stats:
            if self.training:
                self.num_batches_tracked += 1
            statistics = self.running_mean, self.running_var
            y = kernels.take_over("batch_norm", x, *statistics, self.weight, self.bias, *rest, self.relu)
            if y is not None:
                return y
            mean, variance = (tensor.view(-1) for tensor in statistics)  # views, updated in place
        wide = x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1, 2)  # (B, S·C, ...)
        weight, bias = (None if t is None else t.flatten() for t in (self.weight, self.bias))
        wide = F.batch_norm(wide, mean, variance, weight, bias, *rest)
        wide = F.relu_(wide) if self.relu else wide  # here, since changing a view in place makes backward slow
        return wide.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)


class ActiveBatchNorm(nn.Sequential):
    """BatchNorm followed by ReLU, with the parameter names of `BatchNormReLU`."""

    def __init__(self, layer: BatchNormReLU, stack: Stacking) -> None:
        norm = layer[0]
        assert isinstance(norm, nn.BatchNorm2d)
        super().__init__(BatchNorm(norm, stack, relu=True))

    @property
    def form(self) -> NormForm | None:
        """The norm with its running statistics; None if it uses those of the batch, or has hooks."""
        (norm,) = self
        assert isinstance(norm, BatchNorm)
        hooks = [*norm._forward_hooks, *norm._forward_pre_hooks]
        if norm.training or not norm.track_running_stats or hooks:
            return None
        moments = torch.stack([norm.running_mean, (norm.running_var + norm.eps).rsqrt()], dim=-1)
        return NormForm(moments.shape[1], norm.weight, norm.bias, norm.eps, True, moments)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis."""

    def __init__(self, layer: nn.LayerNorm, stack: Stacking) -> None:
        super().__init__()
        self.weight, self.bias = stack(layer.weight), stack(layer.bias)
        self.eps = layer.eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        if self.weight is None:
            return y
        shape = len(self.weight), *[1] * (x.dim() - 1), -1
        y, weight = y.unflatten(0, (len(self.weight), -1)), self.weight.to(x.dtype).view(shape)
        y = y * weight if self.bias is None else torch.addcmul(self.bias.to(x.dtype).view(shape), y, weight)
        return y.flatten(0, 1)


class ChannelNorm(LayerNorm):
    """LayerNorm over the channels of images, of each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


NORMS = (GroupNorm, BatchNorm, LayerNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)
"""Normalisation layers, stacked or not."""


def _scale(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x `(S·B, C, ...)` times weight plus bias, `(S, C)` each."""
    if weight is None:
        return x
    shape = len(weight), 1, -1, *[1] * (x.dim() - 2)
    y = x.unflatten(0, (len(weight), -1)) * weight.to(x.dtype).view(shape)
    y = y if bias is None else y + bias.to(x.dtype).view(shape)
    return y.flatten(0, 1)
