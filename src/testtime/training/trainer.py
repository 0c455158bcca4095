"""One step of training: a network, its optimizer and its data."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, distributed

from testtime import augment as augmentations
from testtime import tasks
from testtime.capture import Captured, Precision, arithmetic, check_precision
from testtime.networks.ynet import YNet
from testtime.randomness import Draws
from testtime.tasks import Rotation, Task
from testtime.training.methods import METHODS, Batch
from testtime.training.pool import Pool, shuffle
from testtime.training.processes import rank, world
from testtime.training.recipe import Recipe
from testtime.training.replica import Replica

log = logging.getLogger(__name__)


class Trainer:
    """A network, its optimizer and its data: what one step of training works on.

    `step` is the whole of training that happens on the device. It reads nothing back, and its shapes and its course do
    not depend on the numbers: on CUDA it is recorded as a graph and replayed. A network that this package built
    computes there as a replica of itself, on our kernels.

    Args:
        net: The network.
        recipe: How to train it.
        source: The labelled training images.
        target: The unlabelled images of "uda".
    """

    def __init__(self, net: YNet, recipe: Recipe, source: Pool, target: Pool | None) -> None:
        if (recipe.method == "uda") != (target is not None):
            raise ValueError('`target` images are for the method "uda", which needs them.')
        if target is not None and target.shape != source.shape:
            raise ValueError(f"`target` images are {target.shape}, training images {source.shape}; they must agree.")
        self.net, self.recipe, self.method = net, recipe, METHODS[recipe.method]
        self.pools = [source] if target is None else [source, target]
        self.device = source.device
        self.augment = augmentations.make(net.card.augment)
        self.task: Task = recipe.task or tasks.make(net.card.task)
        if recipe.task is None and isinstance(self.task, Rotation):
            self.task = Rotation(each=recipe.rotations)
        self.batch = min(recipe.batch, source.count)
        self.steps = source.count // self.batch
        if self.batch % world():
            raise ValueError(f"`batch` ({self.batch}) must be a multiple of the {world()} processes.")
        self.outputs, self.shape = self._try()
        self.parameters = {
            name: parameter
            for name, parameter in net.named_parameters()
            if name.split(".")[0] in self.method.parts and parameter.requires_grad
        }
        if not self.parameters:
            raise ValueError("The network has no parameter that may be trained (requires_grad).")
        self.precision: Precision = "bf16" if recipe.bf16 else "fp32"
        self.model: YNet | Replica = net
        if self._replica_fits():
            example = Draws.of(0, torch.arange(2, device=self.device)).uniform(*self.shape)
            with arithmetic(self.precision, self.device):
                self.model = Replica(net, self.method.parts, example, check_precision(self.precision))
        self.optimizer = torch.optim.SGD(
            list(self._moved().values()), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
        # Of every step: each term of the loss, and the share of wrong predictions.
        self.sums = torch.zeros(len(self.method.terms) + 1, device=self.device)
        self.graph: Captured | None = None
        # Processes wait for each other in every step, which a graph cannot hold.
        self.eager = self.device.type != "cuda" or world() > 1

    def _replica_fits(self) -> bool:
        """Whether the network is one whose replicas we know to be the network itself, in training as well."""
        parts = [getattr(self.net, part) for part in self.method.parts]
        wanted = sum(1 for part in parts for _ in part.parameters())
        return self.device.type == "cuda" and bool(self.net.card.architecture) and wanted == len(self.parameters)

    def _moved(self) -> dict[str, Tensor]:
        """What the optimizer moves, by name."""
        return {"numbers": self.model.replicas.numbers} if isinstance(self.model, Replica) else dict(self.parameters)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor, list[Tensor] | None]]:
        """This process's share of an epoch's batches: for each step what `step` takes."""
        share = self.batch // world()
        rows = [self.order(epoch)]
        if len(self.pools) > 1:
            rows.append(self.target_order(epoch))
        shares = torch.stack(rows, dim=1)[..., rank() * share : (rank() + 1) * share]  # (steps, pools, b)
        numbers = torch.arange(epoch * self.steps, (epoch + 1) * self.steps, device=self.device)
        if all(pool.tensor is not None for pool in self.pools):
            for indices, number in zip(shares, numbers, strict=True):
                yield indices, number, None
            return
        with ThreadPoolExecutor(1) as ahead:  # reads the next batch from disk while this one is trained on
            waiting = ahead.submit(self.read_pixels, shares[0])
            for step, (indices, number) in enumerate(zip(shares, numbers, strict=True)):
                pixels = waiting.result()
                if step + 1 < self.steps:
                    waiting = ahead.submit(self.read_pixels, shares[step + 1])
                yield indices, number, pixels

    def order(self, epoch: int) -> Tensor:
        """The training samples of an epoch by step, int64 `(steps, batch)`."""
        order = shuffle(self.pools[0].count, self.recipe.seed, epoch, self.device)
        return order[: self.steps * self.batch].view(self.steps, self.batch)

    def target_order(self, epoch: int) -> Tensor:
        """The target samples of an epoch by step, int64 `(steps, batch)`: pass after pass, whatever an epoch's end."""
        count, length = self.pools[1].count, self.steps * self.batch
        first, last = epoch * length // count, ((epoch + 1) * length - 1) // count
        passes = [shuffle(count, self.recipe.seed, turn, self.device, "target") for turn in range(first, last + 1)]
        start = epoch * length - first * count
        return torch.cat(passes)[start : start + length].view(self.steps, self.batch)

    def read_pixels(self, indices: Tensor) -> list[Tensor]:
        """The images `(b, C, H, W)` of each pool for indices `(pools, b)`."""
        return [pool.take(row) for pool, row in zip(self.pools, indices, strict=True)]

    def step(self, indices: Tensor, number: Tensor, pixels: list[Tensor] | None = None) -> None:
        """One step of gradient descent; adds the losses and the wrong predictions to `sums`.

        Args:
            indices: Sample numbers `(pools, b)`: of the training set and, for "uda", of the target set.
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
        if self.recipe.momentum:
            for tensor in self._moved().values():  # zeros are what it starts from anyway
                self.optimizer.state[tensor].setdefault("momentum_buffer", torch.zeros_like(tensor))
        changing = [*self.net.state_dict().values(), *self._momentum().values(), self.sums]
        before = [tensor.clone() for tensor in changing]
        try:
            self.graph = Captured(self._advance, *inputs)
        except RuntimeError as error:
            self.eager = True
            warnings.warn(f"CUDA graph capture failed, going on without it: {error}", stacklevel=2)
        for tensor, old in zip(changing, before, strict=True):
            tensor.copy_(old)

    def _advance(self, indices: Tensor, number: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        pixels = list(given) or self.read_pixels(indices)
        views, keys = [], []
        for row, images, purpose in zip(indices, pixels, ("train", "target"), strict=False):
            draws = Draws.of(self.recipe.seed, row).purpose(purpose).fold(number)
            views.append(self.augment(images, draws.copies(1))[:, 0])
            keys.append(draws)
        labels = self.pools[0].labels
        assert labels is not None
        batch = Batch(views[0], labels[indices[0]], keys[0], *views[1:], *keys[1:])
        mixed = self.recipe.bf16 and self.model is self.net  # a replica has its own dtype
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            terms, logits = self.method.loss(self.model, batch, self.recipe, self.task)
        self._descend(torch.stack(list(terms.values())).sum())
        with torch.no_grad():
            wrong = (logits.argmax(1) != batch.labels).float().mean()
            self.sums += torch.stack([*(terms[name].detach().float() for name in self.method.terms), wrong])
        return ()

    def _descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.model, Replica):
            parameters = self.model.replicas.parameters(self.method.parts)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            self.model.replicas.numbers.grad = self.model.replicas.pack(dict(zip(parameters, gradients, strict=True)))
        else:
            loss.backward()
        self._average_gradients()
        self.optimizer.step()

    def read(self) -> dict[str, float]:
        """Loss, its terms and the error, averaged over the steps since `sums` was zero and over the processes."""
        sums = self.sums.clone()
        if world() > 1:
            distributed.all_reduce(sums)
        *losses, error = (sums / (self.steps * world())).tolist()
        return {"loss": sum(losses), **dict(zip(self.method.terms, losses, strict=True)), "train_error": error}

    def set_lr(self, lr: float) -> None:
        """Change the learning rate."""
        for group in self.optimizer.param_groups:
            if group["lr"] != lr:
                self.graph = None  # it has the old one in it
            group["lr"] = lr

    def finish(self) -> None:
        """Leave the network in evaluation mode, its memory its own."""
        self.graph = None
        if isinstance(self.model, Replica):
            self.model.release()
        self.net.eval()

    def is_finite(self) -> bool:
        """Whether all of the network's numbers are."""
        tensors = [tensor for tensor in self.net.state_dict().values() if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def share(self) -> None:
        """Give all processes the first one's network."""
        if world() > 1:
            for tensor in self.net.state_dict().values():
                distributed.broadcast(tensor, 0)

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, by name."""
        state = {f"network/{name}": tensor.detach() for name, tensor in self.net.state_dict().items()}
        return state | {f"momentum/{name}": tensor for name, tensor in self._momentum().items()}

    def _momentum(self) -> dict[str, Tensor]:
        """The optimizer's memory by the parameters' names; empty before the first step."""
        memory = {name: self.optimizer.state[tensor].get("momentum_buffer") for name, tensor in self._moved().items()}
        found = {name: tensor for name, tensor in memory.items() if tensor is not None}
        if not isinstance(self.model, Replica) or not found:
            return found
        return {name: stacked[0] for name, stacked in self.model.replicas.unpack(found["numbers"]).items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from a state.

        Raises:
            ValueError: A tensor is missing, unknown or has another shape; nothing was changed.
        """
        network, momentum = (
            {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
            for prefix in ("network/", "momentum/")
        )
        own = self.net.state_dict()
        for found, wanted in ((network, own), (momentum, self.parameters if momentum else {})):
            for name in found.keys() | wanted.keys():
                if name not in found or name not in wanted or found[name].shape != wanted[name].shape:
                    raise ValueError(f"tensor {name!r} is missing, unknown or of another shape")
        self.net.load_state_dict(network)
        if momentum:
            for tensor in self._moved().values():
                self.optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
            for name, buffer in self._momentum().items():
                buffer.copy_(momentum[name])

    def _average_gradients(self) -> None:
        if world() == 1:
            return
        gradients = [tensor.grad for tensor in self._moved().values() if tensor.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / world()
        distributed.all_reduce(flat)
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    @torch.no_grad()
    def _try(self) -> tuple[int, tuple[int, ...]]:
        """How many classes the network tells apart, and the shape of what it sees; finds out early whether all fits."""
        example = self.pools[0].take(torch.zeros(1, dtype=torch.int64, device=self.device))
        self.net.eval()
        key = Draws.of(0, torch.zeros(1, dtype=torch.int64, device=self.device))
        try:
            example = self.augment(example, key.copies(1))[:, 0]
            classes = self.net(example).shape[-1]
            views, _ = self.task.views(example, key)
            outputs = self.net.self_supervise(views).shape[-1]
        except RuntimeError as error:
            raise ValueError(f"The network does not take images of {self.pools[0].shape}: {error}") from None
        if outputs != self.task.outputs:
            raise ValueError(
                f"The network's self-supervised branch has {outputs} outputs, "
                f"the task {self.task.name!r} needs {self.task.outputs}."
            )
        return classes, tuple(example.shape[1:])
