"""The statistics that the BatchNorm layers of a network use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal

from torch import nn

from testtime.networks.stacked_norms import BatchNorm

Statistics = Literal["running", "source", "batch"]


class BatchNorms:
    """The BatchNorm layers among some modules.

    Args:
        modules: The modules.

    Attributes:
        statistics: What they use, see `use`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = [m for m in modules if isinstance(m, (BatchNorm, nn.modules.batchnorm._BatchNorm))]
        self.use("running")

    def use(self, statistics: Statistics) -> None:
        """Choose the statistics.

        Args:
            statistics: "running": the running statistics, and inside `learning` those of the batch, which update the
                running ones; "source": always the running ones, unchanged; "batch": always those of the batch.
        """
        self.statistics: Statistics = statistics
        for layer in self._layers:
            layer.training = statistics == "batch"
            layer.track_running_stats = statistics != "batch"

    @property
    def move(self) -> bool:
        """Whether a forward pass inside `learning` changes statistics."""
        return self.statistics == "running" and bool(self._layers)

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Put the layers in training mode if they use running statistics.

        Other layers stay in evaluation mode: the noise of dropout would not be a function of the sample.
        """
        if self.statistics != "running":
            yield
            return
        self.train(True)
        try:
            yield
        finally:
            self.train(False)

    def train(self, training: bool) -> None:
        """Set the layers to training or evaluation mode."""
        for layer in self._layers:
            layer.training = training
