"""A step that is launched: its outputs are computed and copied while others prepare the next one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from testtime.kernels.graphs import HostCopy


class Step:
    """The outputs of a step, on their way to the CPU.

    On a CPU, they are there already.

    Args:
        parts: Packed predictions, see `pack`, `(M, F)` together, on a device.
        order: The row of `parts` of each image of the step.
        fixed: Packed predictions of the original network for the same images, `(M, F)`, in shadow mode.
        begin: When the step was launched.
    """

    def __init__(self, parts: Sequence[Tensor], order: Sequence[int], fixed: Tensor | None, begin: float) -> None:
        self._order, self._has_fixed, self.begin = order, fixed is not None, begin
        given = [*parts] if fixed is None else [*parts, fixed]
        packed = given[0] if len(given) == 1 else torch.cat(given)
        self._outputs = HostCopy(packed)
        self.error: Exception | None = None
        """Why the step failed, once it `is_done`."""

    def __len__(self) -> int:
        return len(self._order)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the outputs are computed after the step is launched."""
        return self._outputs.is_asynchronous

    @property
    def is_done(self) -> bool:
        """Whether the outputs can be read without waiting."""
        try:
            return self._outputs.is_done
        except Exception as error:
            self.error = error
            return True

    def wait(self) -> None:
        """Wait for the outputs."""
        try:
            self._outputs.wait()
        except Exception as error:
            self.error = error

    def take(self, image: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the outputs of an image, `(F,)`, and those of the original network in shadow mode."""
        outputs, row = self._outputs.tensor.numpy(), self._order[image]
        return outputs[row], outputs[len(self._order) + image] if self._has_fixed else None


Output = tuple[Step, int]
"""A step and the number of an image in it."""


def gather(outputs: Sequence[Output]) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of images of steps that are done, `(N, F)`, and those of the original network."""
    rows = [step.take(image) for step, image in outputs]
    fixed = [other for _, other in rows if other is not None]
    return torch.from_numpy(np.stack([row for row, _ in rows])), torch.from_numpy(np.stack(fixed)) if fixed else None
