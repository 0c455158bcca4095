"""The training step, of one network or of several together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from testtime.kernels.graphs import Captured, can_record, on_side_stream, record
from testtime.networks.ynet import YNet
from testtime.precision import Precision, arithmetic, check_precision, mixed_precision
from testtime.progress import read_ahead
from testtime.randomness import Draws
from testtime.training.losses import Batch
from testtime.training.processes import average, broadcast, rank, world
from testtime.training.replicated import Replicated, is_faster
from testtime.training.training import Training


class Trainer:
    """Runs the steps of S trainings together, with one optimizer and the sum of their losses.

    `step` has no synchronisation and no data-dependent shapes or control flow: on CUDA it is recorded as a graph. A
    network built by this package trains as a single replica where the kernels make that faster. Several trainings are
    always replicas of one network; they are independent, so each gives the same result as alone, up to rounding.

    Args:
        trainings: The trainings; several must satisfy `fit_together`.
        epochs: Epochs that they have done.
    """

    def __init__(self, trainings: Sequence[Training], epochs: int = 0) -> None:
        if len(trainings) > 1 and not fit_together(trainings):
            raise ValueError("These trainings cannot run together; train them one after the other.")
        first = trainings[0]
        self.trainings, self.count = list(trainings), len(trainings)
        self.recipe, self.method, self.device = first.recipe, first.method, first.device
        self.steps = first.steps
        self.precision: Precision = self.recipe.precision
        self.model: YNet | Replicated = first.net
        if self._replica_fits():
            example = Draws.of(0, torch.arange(2, device=self.device)).uniform(*first.shape)
            nets = [training.net for training in trainings]
            with arithmetic(self.precision, self.device):
                self.model = Replicated(nets, self.method.parts, example, check_precision(self.precision))
        # Collective operations of several processes are not recorded.
        self.eager = not can_record(self.device) or world() > 1
        self.optimizer = self._make_optimizer()
        self._counts: list[Tensor] = []  # of steps, by AdamW
        self._load_memory(epochs * self.steps)
        # (terms + 1, S): sums over steps of the terms of the loss and of the training error.
        self.sums = torch.zeros(len(self.method.terms) + 1, self.count, dtype=torch.float32, device=self.device)
        self.graph: Captured | None = None

    def _replica_fits(self) -> bool:
        """Return whether to train as replicas: always for several trainings, for one where that is faster."""
        if self.count > 1:
            return True
        first = self.trainings[0]
        return is_faster(first.net, self.device, self.precision) and first.is_replicable()

    def _moved(self) -> list[Tensor]:
        """Return the tensors that the optimizer updates."""
        if isinstance(self.model, Replicated):
            return [self.model.replicas.packed.numbers]
        return list(self.trainings[0].parameters.values())

    def _make_optimizer(self) -> torch.optim.Optimizer:
        recipe, lr = self.recipe, self.recipe.lr
        settings: dict[str, Any] = {"weight_decay": recipe.weight_decay}
        if not self.eager:  # a tensor, so that a recorded step reads the current learning rate
            settings["fused"], lr = True, torch.tensor(lr, dtype=torch.float32, device=self.device)
        if recipe.optimizer == "adamw":
            return torch.optim.AdamW(self._moved(), lr=lr, capturable=not self.eager, **settings)
        return torch.optim.SGD(self._moved(), lr=lr, momentum=recipe.momentum, **settings)

    def _load_memory(self, steps: int) -> None:
        """Move what the trainings' optimizers stored, zeros if nothing yet, to this one; they get views of it.

        Args:
            steps: Steps taken.
        """
        moved, made = self._moved(), [dict[str, Tensor]() for _ in self.trainings]
        for kind, key in self.recipe.memory.items():
            buffers = [torch.zeros_like(tensor) for tensor in moved]
            for tensor, buffer in zip(moved, buffers, strict=True):
                self.optimizer.state[tensor][key] = buffer
            for index, training in enumerate(self.trainings):
                if isinstance(self.model, Replicated):
                    stacked = self.model.replicas.packed.unpack(buffers[0])
                    named = {name: tensor[index] for name, tensor in stacked.items()}
                else:
                    named = dict(zip(training.parameters, buffers, strict=True))
                made[index] |= {f"{kind}/{name}": tensor for name, tensor in named.items()}
        for training, own in zip(self.trainings, made, strict=True):
            for name, old in training.memory.items():
                own[name].copy_(old)
            training.memory = own
        if self.recipe.optimizer == "adamw":
            place = "cpu" if self.eager else self.device
            self._counts = [torch.tensor(float(steps), dtype=torch.float32, device=place) for _ in moved]
            for tensor, count in zip(moved, self._counts, strict=True):
                self.optimizer.state[tensor]["step"] = count

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, list[Tensor] | None]]:
        """Yield the arguments of `step` for each step of an epoch: this process's part of the batches."""
        share = self.trainings[0].batch // world()
        orders = torch.stack([training.orders(epoch) for training in self.trainings], dim=1)  # (steps, S, pools, batch)
        shares = orders[..., rank() * share : (rank() + 1) * share]
        numbers = torch.arange(epoch * self.steps, (epoch + 1) * self.steps, device=self.device)
        if all(pool.tensor is not None for training in self.trainings for pool in training.pools):
            for indices, number in zip(shares, numbers, strict=True):
                yield indices, number, None
            return
        read = on_side_stream(functools.partial(_read_images, self.trainings), self.device)
        for indices, number, pixels in zip(shares, numbers, read_ahead(map(read, shares)), strict=True):
            yield indices, number, pixels

    def step(self, indices: Tensor, number: Tensor, pixels: list[Tensor] | None = None) -> None:
        """Take one optimizer step; adds the losses and the training error to `sums`.

        Args:
            indices: Sample numbers `(S, pools, b)`: of the training set and, for "uda", of the target set.
            number: The number of the step in the whole training, an int64 scalar on the device.
            pixels: The images of these samples, unless the pools are on the device.
        """
        inputs = (indices, number, *(pixels or ()))
        with arithmetic(self.precision, self.device):
            if not self.eager and self.graph is None:
                self._record(inputs)
            if self.graph is not None:
                self.graph(*inputs)
            else:
                self._advance(*inputs)

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        """Record the step as a CUDA graph, if possible; the state is unchanged."""
        changing = [tensor for training in self.trainings for tensor in training.state().values()]
        changing += [self.sums, *self._counts]
        before = [tensor.clone() for tensor in changing]
        self.graph = record(lambda: Captured(self._advance, *inputs))
        self.eager = self.graph is None
        for tensor, old in zip(changing, before, strict=True):
            tensor.copy_(old)

    def _advance(self, indices: Tensor, number: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        pixels = list(given) or _read_images(self.trainings, indices)
        views, keys = [], []
        for pool, (images, purpose) in enumerate(zip(pixels, ("train", "target"), strict=False)):
            draws = _draw(self.trainings, indices[:, pool]).purpose(purpose).fold(number)
            views.append(self.trainings[0].augment(images, draws.copies(1))[:, 0])
            keys.append(draws)
        labels = self.trainings[0].pools[0].labels
        assert labels is not None
        batch = Batch(views[0], labels[indices[:, 0].flatten()], keys[0], *views[1:], *keys[1:])
        found: dict[str, Tensor] = {}
        mixed = self.precision == "bf16" and not isinstance(self.model, Replicated)  # replicas need no autocast

        def loss() -> Tensor:
            with mixed_precision(self.device, mixed):
                terms, logits = self.method.loss(self.model, batch, self.recipe, self.trainings[0].task)
            means = torch.stack([_average(terms[name], self.count) for name in self.method.terms])  # (terms, S)
            found.update(means=means.detach(), logits=logits.detach())
            return means.sum()

        self._descend(loss)
        wrong = _average(found["logits"].argmax(1) != batch.labels, self.count)
        self.sums += torch.cat([found["means"], wrong.unsqueeze(0)])
        return ()

    def _descend(self, loss: Callable[[], Tensor]) -> None:
        """Take one optimizer step on the loss that the given function computes."""
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.model, Replicated):
            _, self.model.replicas.packed.numbers.grad = self.model.replicas.packed.gradient(loss)
        else:
            loss().backward()
        average([tensor.grad for tensor in self._moved() if tensor.grad is not None])
        self.optimizer.step()

    def read(self) -> list[dict[str, float]]:
        """Return the loss, its terms and the error of each training, averaged over the epoch and the processes."""
        sums = self.sums.clone()
        if world() > 1:
            distributed.all_reduce(sums)
        entries = []
        for *losses, error in (sums / (self.steps * world())).T.tolist():
            named = dict(zip(self.method.terms, losses, strict=True))
            entries.append({"loss": sum(losses), **named, "train_error": error})
        return entries

    def set_lr(self, lr: float) -> None:
        """Change the learning rate."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def finish(self) -> None:
        """Give the networks their own parameters back, and put them in evaluation mode."""
        self.graph = None
        if isinstance(self.model, Replicated):
            self.model.release()
        for training in self.trainings:
            training.net.eval()

    def share(self) -> None:
        """Broadcast the networks of the first process to all."""
        broadcast([tensor for training in self.trainings for tensor in training.net.state_dict().values()])


def _read_images(trainings: Sequence[Training], indices: Tensor) -> list[Tensor]:
    """Return the images `(S·b, C, H, W)` of each pool, for indices `(S, pools, b)`."""
    source = trainings[0].pools[0]  # shared by all
    images = [source.take(indices[:, 0].flatten())]
    if indices.shape[1] > 1:
        rows = zip(trainings, indices[:, 1], strict=True)
        images.append(torch.cat([training.pools[1].take(row) for training, row in rows]))
    return images


def _draw(trainings: Sequence[Training], samples: Tensor) -> Draws:
    """Return keys `(S·b,)` of sample numbers `(S, b)`, each row with the seed of its training."""
    rows = zip(trainings, samples, strict=True)
    return Draws(torch.cat([Draws.of(training.recipe.seed, row).keys for training, row in rows]))


def _average(values: Tensor, count: int) -> Tensor:
    """Return the mean per training: `(S·n,)` → `(S,)`."""
    return values.float().unflatten(0, (count, -1)).mean(1)


def fit_together(trainings: Sequence[Training]) -> bool:
    """Return whether trainings can run as replicas of one network.

    The networks must have the same architecture, built by this package; the recipes may differ in the seed only; the
    training set must be shared, the target sets may differ.
    """
    first = trainings[0]
    # Only the fields that determine the computation.
    cards = [replace(training.net.card, classes=(), size=None, record={}, settings={}) for training in trainings]
    recipes = [replace(training.recipe, seed=0) for training in trainings]
    return (
        all(training.is_replicable() and training.pools[0] is first.pools[0] for training in trainings)
        and all(card == cards[0] for card in cards)
        and all(recipe == recipes[0] for recipe in recipes)
    )
