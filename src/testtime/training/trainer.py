"""The step of training, of one network or of several together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, distributed, nn

from testtime import kernels
from testtime.kernels.graphs import Captured, can_record, on_side_stream, record
from testtime.networks.ynet import YNet
from testtime.precision import Precision, arithmetic, check_precision
from testtime.progress import read_ahead
from testtime.randomness import Draws
from testtime.training.losses import Batch
from testtime.training.processes import average, broadcast, rank, world
from testtime.training.replicated import Replicated
from testtime.training.training import Training


class Trainer:
    """Takes the steps of S trainings at once: one optimizer, one loss, to which each adds its own.

    `step` is the whole of training that happens on the device. It reads nothing back, and its shapes and its course do
    not depend on the numbers: on CUDA it is recorded as a graph and replayed. A network that this package built
    computes as a replica of itself where kernels make that faster.
    Several trainings are always replicas of one network; no number of one enters another, so each goes as it would
    alone, up to rounding.

    Args:
        trainings: One or more. Several must `fit_together`.
    """

    def __init__(self, trainings: Sequence[Training]) -> None:
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
        lr, momentum, weight_decay = self.recipe.lr, self.recipe.momentum, self.recipe.weight_decay
        self.optimizer = torch.optim.SGD(self._moved(), lr=lr, momentum=momentum, weight_decay=weight_decay)
        if momentum:
            self._start_momentum()
        # Of every step: each term of the loss, and the share of wrong predictions; of each training.
        self.sums = torch.zeros(len(self.method.terms) + 1, self.count, dtype=torch.float32, device=self.device)
        self.graph: Captured | None = None
        # Processes wait for each other in every step, which a graph cannot hold.
        self.eager = not can_record(self.device) or world() > 1

    def _replica_fits(self) -> bool:
        """Whether to compute as replicas: several trainings must, one does so where that is faster."""
        if self.count > 1:
            return True
        layers = [layer for layer in self.trainings[0].net.modules() if isinstance(layer, nn.Conv2d)]
        channels = max((layer.out_channels for layer in layers), default=0)
        faster = kernels.trains_faster(self.device, channels, self.precision != "bf16")
        return faster and self.trainings[0].is_replicable()

    def _moved(self) -> list[Tensor]:
        """What the optimizer moves."""
        if isinstance(self.model, Replicated):
            return [self.model.replicas.packed.numbers]
        return list(self.trainings[0].parameters.values())

    def _start_momentum(self) -> None:
        """Give the optimizer the trainings' memory, zeros where there is none yet, and them a view of its own."""
        buffers = [torch.zeros_like(tensor) for tensor in self._moved()]
        for tensor, buffer in zip(self._moved(), buffers, strict=True):
            self.optimizer.state[tensor]["momentum_buffer"] = buffer
        for place, training in enumerate(self.trainings):
            if isinstance(self.model, Replicated):
                stacked = self.model.replicas.packed.unpack(buffers[0])
                own = {name: tensor[place] for name, tensor in stacked.items()}
            else:
                own = dict(zip(training.parameters, buffers, strict=True))
            for name, old in training.momentum.items():
                own[name].copy_(old)
            training.momentum = own

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, list[Tensor] | None]]:
        """This process's share of an epoch's batches: for each step what `step` takes."""
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
        """One step of gradient descent; adds the losses and the wrong predictions to `sums`.

        Args:
            indices: Sample numbers `(S, pools, b)`: of the training set and, for "uda", of the target set.
            number: The step's number in the whole training, an int64 scalar on the device.
            pixels: Those samples' images where they are not on the device yet.
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
        """Record the step as a graph; what trying it out changed is put back."""
        changing = [tensor for training in self.trainings for tensor in training.state().values()]
        changing.append(self.sums)
        before = [tensor.clone() for tensor in changing]
        self.graph = record(lambda: Captured(self._advance, *inputs))
        self.eager = self.graph is None
        for tensor, old in zip(changing, before, strict=True):
            tensor.copy_(old)

    def _advance(self, indices: Tensor, number: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        pixels = list(given) or _read_images(self.trainings, indices)
        views, keys = [], []
        for place, (images, purpose) in enumerate(zip(pixels, ("train", "target"), strict=False)):
            draws = _draw(self.trainings, indices[:, place]).purpose(purpose).fold(number)
            views.append(self.trainings[0].augment(images, draws.copies(1))[:, 0])
            keys.append(draws)
        labels = self.trainings[0].pools[0].labels
        assert labels is not None
        batch = Batch(views[0], labels[indices[:, 0].flatten()], keys[0], *views[1:], *keys[1:])
        found: dict[str, Tensor] = {}
        mixed = self.precision == "bf16" and not isinstance(self.model, Replicated)  # replicas have their own dtype

        def loss() -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
                terms, logits = self.method.loss(self.model, batch, self.recipe, self.trainings[0].task)
            means = torch.stack([_average(terms[name], self.count) for name in self.method.terms])  # (terms, S)
            found.update(means=means.detach(), logits=logits.detach())
            return means.sum()

        self._descend(loss)
        wrong = _average(found["logits"].argmax(1) != batch.labels, self.count)
        self.sums += torch.cat([found["means"], wrong.unsqueeze(0)])
        return ()

    def _descend(self, loss: Callable[[], Tensor]) -> None:
        """One step of the optimizer down a loss, as a function that computes it."""
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.model, Replicated):
            _, self.model.replicas.packed.numbers.grad = self.model.replicas.packed.gradient(loss)
        else:
            loss().backward()
        average([tensor.grad for tensor in self._moved() if tensor.grad is not None])
        self.optimizer.step()

    def read(self) -> list[dict[str, float]]:
        """Of each training: loss, its terms and the error, averaged over the steps since `sums` was zero and over the
        processes."""
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
            if group["lr"] != lr:
                self.graph = None  # it has the old one in it
            group["lr"] = lr

    def finish(self) -> None:
        """Leave the networks in evaluation mode, their memory their own."""
        self.graph = None
        if isinstance(self.model, Replicated):
            self.model.release()
        for training in self.trainings:
            training.net.eval()

    def share(self) -> None:
        """Give all processes the first one's networks."""
        broadcast([tensor for training in self.trainings for tensor in training.net.state_dict().values()])


def _read_images(trainings: Sequence[Training], indices: Tensor) -> list[Tensor]:
    """The images `(S·b, C, H, W)` of each kind of pool for indices `(S, pools, b)`."""
    source = trainings[0].pools[0]  # the same for all
    images = [source.take(indices[:, 0].flatten())]
    if indices.shape[1] > 1:
        rows = zip(trainings, indices[:, 1], strict=True)
        images.append(torch.cat([training.pools[1].take(row) for training, row in rows]))
    return images


def _draw(trainings: Sequence[Training], samples: Tensor) -> Draws:
    """The keys `(S·b,)` of sample numbers `(S, b)`, each row's under its training's seed."""
    rows = zip(trainings, samples, strict=True)
    return Draws(torch.cat([Draws.of(training.recipe.seed, row).keys for training, row in rows]))


def _average(values: Tensor, count: int) -> Tensor:
    """The mean of each training's part of some values: `(S·n,)` → `(S,)`."""
    return values.float().unflatten(0, (count, -1)).mean(1)


def fit_together(trainings: Sequence[Training]) -> bool:
    """Whether trainings can run as replicas of one network.

    Their networks are of one architecture, and one that this package built; their recipes differ in the seed alone;
    they see the same training set, each its own target set.
    """
    first = trainings[0]
    # What the arithmetic depends on.
    cards = [replace(training.net.card, classes=(), size=None, record={}) for training in trainings]
    recipes = [replace(training.recipe, seed=0) for training in trainings]
    return (
        all(training.is_replicable() and training.pools[0] is first.pools[0] for training in trainings)
        and all(card == cards[0] for card in cards)
        and all(recipe == recipes[0] for recipe in recipes)
    )
