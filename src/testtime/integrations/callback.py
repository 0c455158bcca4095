"""A callback of Lightning that adapts during `Trainer.test`."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
from torch import nn

from testtime.adaptation.adapters import Adapter


class AdaptDuringTest(lightning.Callback):
    """Replaces the classifier of a `LightningModule` by an adapter for the time of `Trainer.test`.

    The module's `test_step` stays as it is: where it calls the classifier, the adapter learns and predicts. The
    classifier itself does not change, and is back afterwards, also after an error. The adapter is made when the test
    begins, so that it starts from the weights of that moment, and remains as `adapter`.

    Args:
        make: Makes the adapter of the classifier, e.g. `lambda model: tt.Online(tt.wrap(model), method="tent")`.
        attribute: Where the module has its classifier. It must take raw pixels unless `make` says how they were
            normalised.
        log: Whether to log the fractions of images that were learned from (`adapted`) and whose update the guard undid
            (`rolled_back`).
    """

    def __init__(self, make: Callable[[Any], Adapter], attribute: str = "model", log: bool = True) -> None:
        self.make, self.attribute, self.log = make, attribute, log
        self.adapter: Adapter | None = None
        self._model: nn.Module | None = None

    def on_test_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        model = getattr(pl_module, self.attribute, None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"`attribute` must name a module of {type(pl_module).__name__}, got {self.attribute!r}: {model!r}."
            )
        adapter = self.make(model)
        if not isinstance(adapter, Adapter):
            raise TypeError(f"`make` must return an adapter, got {type(adapter).__name__}.")
        self.adapter, self._model = adapter, model
        setattr(pl_module, self.attribute, adapter)

    def on_test_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self.log and self.adapter is not None and self.adapter.seen:
            for name in ("adapted", "rolled_back"):
                pl_module.log(name, getattr(self.adapter, name) / self.adapter.seen)

    def on_test_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._restore(pl_module)

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self._restore(pl_module)

    def _restore(self, pl_module: lightning.LightningModule) -> None:
        if self._model is not None:
            setattr(pl_module, self.attribute, self._model)
            self._model = None
