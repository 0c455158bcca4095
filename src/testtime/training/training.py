"""One training: a network, its recipe, its data and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from testtime import augment as augmentations
from testtime import tasks
from testtime.networks.card import compare_tensors
from testtime.networks.ynet import YNet, check_task
from testtime.randomness import Draws
from testtime.tasks import Rotation, Task
from testtime.training.losses import LOSSES
from testtime.training.pool import Pool, hash_tensors, shuffle
from testtime.training.processes import world
from testtime.training.recipe import Recipe


class Training:
    """The state of one training; `Trainer` performs the steps of one or several.

    Args:
        net: The network.
        recipe: Method and hyperparameters.
        source: The labelled training images.
        target: The unlabelled target images, for "uda".

    Raises:
        ValueError: The arguments are inconsistent.
    """

    def __init__(self, net: YNet, recipe: Recipe, source: Pool, target: Pool | None = None) -> None:
        if (recipe.method == "uda") != (target is not None):
            raise ValueError('`target` images are required by the method "uda", and only by it.')
        if target is not None and target.shape != source.shape:
            raise ValueError(f"`target` images must have shape {source.shape}, like `images`, got {target.shape}.")
        self.net, self.recipe, self.method = net, recipe, LOSSES[recipe.method]
        self.pools = [source] if target is None else [source, target]
        self.device = source.device
        self.augment = augmentations.make(net.card.augment)
        self.task: Task = recipe.task or tasks.make(net.card.task)
        if recipe.task is None and isinstance(self.task, Rotation):
            self.task = Rotation(each=recipe.views)
        self.batch = min(recipe.batch, source.count)
        self.steps = source.count // self.batch
        if self.batch % world():
            raise ValueError(f"`batch` ({self.batch}) must be a multiple of the {world()} processes.")
        self.outputs, self.shape = self._check_forward()
        self.parameters = {
            name: parameter
            for name, parameter in net.named_parameters()
            if name.split(".")[0] in self.method.parts and parameter.requires_grad
        }
        if not self.parameters:
            raise ValueError("The network has no trainable parameters (requires_grad).")
        self.memory: dict[str, Tensor] = {}
        """What the optimizer stores, as `momentum/PARAMETER`; empty before the first step, and without momentum."""

    def order(self, epoch: int) -> Tensor:
        """Return the training samples of an epoch, int64 `(steps, batch)`."""
        order = shuffle(self.pools[0].count, self.recipe.seed, epoch, self.device)
        return order[: self.steps * self.batch].view(self.steps, self.batch)

    def target_order(self, epoch: int) -> Tensor:
        """Return the target samples of an epoch, int64 `(steps, batch)`; a pass may span several epochs."""
        count, length = self.pools[1].count, self.steps * self.batch
        first, last = epoch * length // count, ((epoch + 1) * length - 1) // count
        passes = [shuffle(count, self.recipe.seed, number, self.device, "target") for number in range(first, last + 1)]
        start = epoch * length - first * count
        return torch.cat(passes)[start : start + length].view(self.steps, self.batch)

    def orders(self, epoch: int) -> Tensor:
        """Return the samples of each pool in an epoch, int64 `(steps, pools, batch)`."""
        rows = [self.order(epoch)] if len(self.pools) == 1 else [self.order(epoch), self.target_order(epoch)]
        return torch.stack(rows, dim=1)

    def is_replicable(self) -> bool:
        """Whether the network can be trained as a replica: built by this package, and all parameters trainable."""
        parts = [getattr(self.net, part) for part in self.method.parts]
        wanted = sum(1 for part in parts for _ in part.parameters())
        return bool(self.net.card.architecture) and wanted == len(self.parameters)

    def is_finite(self) -> bool:
        """Whether all parameters and buffers of the network are finite."""
        tensors = [tensor for tensor in self.net.state_dict().values() if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def state(self) -> dict[str, Tensor]:
        """Return the network's state and what the optimizer stores, by name."""
        return {f"network/{name}": tensor.detach() for name, tensor in self.net.state_dict().items()} | self.memory

    def load(self, state: dict[str, Tensor]) -> None:
        """Load a state, before a `Trainer` is made.

        Raises:
            ValueError: A tensor is missing, unknown, not finite, or has another shape or dtype; nothing is modified.
        """
        kinds, parameters = self.recipe.memory, self.parameters
        memory = {f"{kind}/{name}": tensor for kind in kinds for name, tensor in parameters.items()}
        wanted = {f"network/{name}": tensor for name, tensor in self.net.state_dict().items()}
        compare_tensors(state, wanted | memory)
        self.net.load_state_dict({name.removeprefix("network/"): state[name] for name in wanted})
        self.memory = {name: state[name].to(self.device, tensor.dtype) for name, tensor in memory.items()}

    def describe(self, test: Pool | None) -> dict[str, Any]:
        """Return everything that determines the result; trainings that differ here cannot share a folder."""
        return {
            "recipe": self.recipe.describe(),
            "network": describe_network(self.net),
            **{name: pool.description for name, pool in zip(("data", "target"), self.pools, strict=False)},
            "test": None if test is None else test.description,
        }

    @torch.no_grad()
    def _check_forward(self) -> tuple[int, tuple[int, ...]]:
        """Run the network on one image; returns the number of classes and the shape of an augmented image."""
        example = self.pools[0].take(torch.zeros(1, dtype=torch.int64, device=self.device))
        for pool in self.pools:
            check_pool(self.net, pool)
        self.net.eval()
        key = Draws.of(0, torch.zeros(1, dtype=torch.int64, device=self.device))
        try:
            example = self.augment(example, key.copies(1))[:, 0]
            classes = self.net(example).shape[-1]
            if self.net.ssl is not None or "ssl" in self.method.parts:
                check_branch(self.net, self.task, example, key)
        except RuntimeError as error:
            raise ValueError(f"The network does not accept images of shape {self.pools[0].shape}: {error}") from None
        return classes, tuple(example.shape[1:])


def check_pool(net: YNet, pool: Pool) -> None:
    """Check that images have the network's channels and are raw pixels.

    Raises:
        ValueError: They have not, or are not.
    """
    if net.channels not in (None, pool.shape[0]):  # a single channel would silently be repeated
        raise ValueError(f"`{pool.name}` must have {net.channels} channels, got {pool.shape[0]}.")
    if pool.tensor is not None:
        net.check_range(pool.name, pool.tensor)


def check_branch(net: YNet, task: Task, image: Tensor, draws: Draws) -> None:
    """Run the self-supervised branch on a view of one image `(1, C, H, W)`.

    Raises:
        ValueError: Its outputs are not what the task needs.
    """
    check_task(net, task)
    views, targets = task.views(image, draws)
    outputs = net.self_supervise(views)
    if task.outputs is not None and outputs.shape != (len(views), task.outputs):
        raise ValueError(
            f"The network's self-supervised branch has {outputs.shape[-1]} outputs, "
            f"the task {task.name!r} needs {task.outputs}."
        )
    task.loss(outputs, targets)


def check_networks(nets: Sequence[YNet]) -> torch.device:
    """Check the networks to train and return their device.

    Raises:
        ValueError: There is none, one is given twice, they are on several devices, or one cannot be trained.
    """
    if not nets:
        raise ValueError("`nets` must not be empty.")
    if len({id(net) for net in nets}) < len(nets):
        raise ValueError("`nets` must be distinct objects.")
    if any(tensor.is_inference() for net in nets for tensor in (*net.parameters(), *net.buffers())):
        raise ValueError("`nets` must not be created in torch.inference_mode(): inference tensors cannot be trained.")
    devices = {next(net.parameters()).device for net in nets}
    if len(devices) > 1:
        raise ValueError(f"`nets` must be on one device, got {', '.join(sorted(map(str, devices)))}.")
    return devices.pop()


def describe_network(net: YNet) -> dict[str, Any]:
    """Return what determines the training of a network: its card, and a hash of its weights."""
    card = net.card
    return {
        "architecture": card.architecture or type(net.encoder).__name__,
        "classes": list(card.classes),
        "mean": list(card.mean),
        "std": list(card.std),
        "augment": card.augment,
        "start": hash_tensors(net.state_dict().values()),
    }
