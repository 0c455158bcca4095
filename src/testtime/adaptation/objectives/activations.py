"""The layers of replicas: which there are, and what goes in and out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from testtime.networks.replicas import Replicas
from testtime.networks.resnet import GroupNormReLU
from testtime.networks.stacked_norms import LayerNorm


def list_layers(replicas: Replicas, kinds: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """Return the layers of some kinds in encoder and classifier, by their names in the network.

    Raises:
        ValueError: There are such layers in a part whose replicas run in `vmap`, where they cannot be observed.
    """
    found: dict[str, nn.Module] = {}
    for name in ("encoder", "classifier"):
        part = replicas.parts[name]
        layers = {f"{name}.{key}": layer for key, layer in part.inner.named_modules() if isinstance(layer, kinds)}
        if layers and hasattr(part, "template"):
            raise ValueError(
                f"The layers of the {name} can be observed in only one replica at a time: use Online, "
                "Streams(…, together=1) or Episodic(…, parallel=1)."
            )
        found |= layers
    return found


@contextlib.contextmanager
def watch(layers: Mapping[str, nn.Module], see: Callable[[str, Any, Tensor, Tensor], Tensor | None]) -> Iterator[None]:
    """Call `see` with name, layer, input and output of every layer that runs; a tensor it returns is the new output."""

    def make_hook(name: str) -> Callable[..., Tensor | None]:
        return lambda layer, inputs, output: see(name, layer, inputs[0], output)

    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(make_hook(name)).remove)
        yield


def compute_norm(layer: Any, x: Tensor, output: Tensor) -> Tensor:
    """Return the output of a normalisation layer without the ReLU that may be fused with it."""
    if isinstance(layer, GroupNormReLU):
        return nn.GroupNorm.forward(layer, x)
    if not getattr(layer, "relu", False):
        return output.clone()  # a ReLU may overwrite it
    layer.relu = False
    try:
        return layer.forward(x)
    finally:
        layer.relu = True


def find_channels(layer: nn.Module) -> int:
    """Return the axis of the channels in the output of a normalisation layer."""
    if isinstance(layer, nn.LayerNorm):
        return -len(layer.normalized_shape)
    return -1 if isinstance(layer, LayerNorm) else 1
