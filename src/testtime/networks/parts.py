"""The two parts of a model that is cut after one of its layers, without tracing its code.

Both parts run the model's own code. In `Front` the layer raises an exception that carries its output, so that nothing
after it runs. In `Back` the layer returns the features that are given, and the layers before it return zeros of the
right shape: optional arguments, control flow and outputs of any structure stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from testtime.networks.bare import CONSTANTS
from testtime.networks.outputs import pick_logits

_FEATURES: ContextVar[Tensor] = ContextVar("features")
"""The input of the `Back` that is running."""


_PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)
"""Types of values that a stub may return again."""


class _Reached(BaseException):  # not an Exception, which a model may catch
    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


def _stop(layer: nn.Module, inputs: Any, output: Any) -> None:
    raise _Reached(next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)))


@dataclass(frozen=True)
class Template:
    """The output of a layer, without its values.

    Attributes:
        pattern: The output with a `Shape` in place of each tensor; everything else is as it was.
    """

    pattern: Any

    @classmethod
    def read(cls, two: Any, three: Any) -> Template | None:
        """Return the template of an output that was recorded for 2 and for 3 images; None if it follows no rule."""
        try:
            pattern = pytree.tree_map(_compare, two, three)
        except ValueError:  # of another structure
            return None
        return None if any(leaf is NotImplemented for leaf in pytree.tree_leaves(pattern)) else cls(pattern)

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the tensors."""
        return [leaf for leaf in pytree.tree_leaves(self.pattern) if isinstance(leaf, Shape)]

    def fill(self, features: Tensor, is_cut: bool) -> Any:
        """Return an output with the features, or with zeros for as many images."""

        def fill_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Shape):
                return leaf
            return features if is_cut else leaf.make_zeros(features)

        return pytree.tree_map(fill_leaf, self.pattern)


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor for any number of images.

    Attributes:
        sides: Length of each dimension.
        follows: Whether each dimension is to be multiplied by the number of images.
        dtype: None: that of the features.
    """

    sides: tuple[int, ...]
    follows: tuple[bool, ...]
    dtype: Any

    def make_zeros(self, features: Tensor) -> Tensor:
        """Return zeros that take no memory."""
        sides = [
            side * len(features) if follows else side for side, follows in zip(self.sides, self.follows, strict=True)
        ]
        return features.new_zeros((), dtype=self.dtype).expand(sides)


def _compare(two: Any, three: Any) -> Any:
    if not isinstance(two, Tensor) or not isinstance(three, Tensor):
        # Other objects might hold tensors.
        is_plain = isinstance(two, _PLAIN) and type(two) is type(three)
        return two if is_plain and two == three else NotImplemented
    pairs = list(zip(two.shape, three.shape, strict=False))
    if two.dim() != three.dim() or any(a != b and 3 * a != 2 * b for a, b in pairs):
        return NotImplemented
    follows = tuple(a != b for a, b in pairs)
    sides = tuple(a // 2 if a != b else a for a, b in pairs)
    return Shape(sides, follows, None if two.is_floating_point() else two.dtype)


class Stub(nn.Module):
    """Stands for a layer that a part does not run; attributes are still read from the layer, without its values.

    Args:
        layer: The layer.
        template: What it returns; None: it is never called.
        is_cut: Whether it returns the features rather than zeros.
    """

    def __init__(self, layer: nn.Module, template: Template | None = None, is_cut: bool = False) -> None:
        super().__init__()
        self.template, self.is_cut = template, is_cut
        self.layer = [copy.deepcopy(layer).to("meta")]  # in a list, to hide it from nn.Module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self.template is None:
            raise RuntimeError(f"{type(self.layer[0]).__name__} does not belong to this part of the model.")
        return self.template.fill(_FEATURES.get(), self.is_cut)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "layer" not in self.__dict__:
                raise
        return getattr(self.__dict__["layer"][0], name)


class Front(nn.Module):
    """A model up to the output of one of its layers.

    Args:
        model: The model, which is changed.
        at: Name of the layer.
    """

    def __init__(self, model: nn.Module, at: str) -> None:
        super().__init__()
        self.model = model
        model.get_submodule(at).register_forward_hook(_stop)

    def forward(self, images: Tensor) -> Tensor:
        try:
            self.model(images)
        except _Reached as reached:
            return reached.features
        raise RuntimeError("The model did not run the layer that it was split at.")


class Back(nn.Module):
    """A model from the output of one of its layers to the logits.

    Args:
        model: The model, in which the layer and those before it are stubs.
        image: Shape of the recorded images, `(C, H, W)`.
        shape: Shape of the recorded features, without N.
        out_features: Number of logits.
    """

    def __init__(self, model: nn.Module, image: tuple[int, ...], shape: tuple[int, ...], out_features: int) -> None:
        super().__init__()
        self.model, self.image, self.shape, self.out_features = model, image, shape, out_features
        self.fixed = False
        """Whether features of other shapes are refused."""

    def forward(self, features: Tensor) -> Tensor:
        if self.fixed and features.shape[1:] != self.shape:
            raise ValueError(
                f"This model was split for images of {self.image[1]}×{self.image[2]}, with features {self.shape}; "
                f"got features {tuple(features.shape[1:])}. Split it with the size of your images: size=…."
            )
        token = _FEATURES.set(features)
        try:
            return pick_logits(self.model(features.new_zeros(()).expand(len(features), *self.image)))
        finally:
            _FEATURES.reset(token)


def replace_layers(model: nn.Module, others: Mapping[str, nn.Module]) -> None:
    """Replace layers of a model, given by name, wherever they are registered."""
    wanted = {id(model.get_submodule(name)): other for name, other in others.items()}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child) in wanted:
                module._modules[name] = wanted[id(child)]


def disable_inplace(part: nn.Module) -> None:
    """Make the layers of a part return new tensors, since other parts read the same features."""
    for module in part.modules():
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # type: ignore[assignment]


def make_constants(model: nn.Module, used: Iterable[str]) -> None:
    """Make the parameters that a part does not depend on non-persistent buffers, so that only the others are its own.

    Args:
        model: The model of the part.
        used: Names of the parameters that it depends on.
    """
    wanted = set(used)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and f"{prefix}.{name}".lstrip(".") not in wanted:
                del module._parameters[name]
                module.register_buffer(name, parameter.detach().clone(), persistent=False)
                setattr(module, CONSTANTS, getattr(module, CONSTANTS, frozenset()) | {name})
