"""The training of a self-supervised branch: its step, its epochs and its state."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime import augment as augmentations
from testtime import tasks
from testtime.augment import Augment
from testtime.networks.card import compare_tensors
from testtime.networks.replicas import Part
from testtime.networks.ynet import YNet
from testtime.precision import arithmetic, check_precision, mixed_precision
from testtime.progress import Progress
from testtime.randomness import Draws
from testtime.tasks import Rotation, Task
from testtime.training.branch_recipe import STATES, BranchRecipe
from testtime.training.losses import first_of_four
from testtime.training.pool import Pool
from testtime.training.replicated import Replicated, is_faster
from testtime.training.training import check_branch, check_pool
from testtime.training.unlabelled import Source


class BranchTraining:
    """Trains the branch of a network, with `joint` also the encoder; everything else stays bit-identical.

    Encoder and classifier are in evaluation mode throughout, so that their Batch Normalization statistics do not
    change; the branch is in training mode. `load` may be called before `begin`, not after it.

    Args:
        net: The network.
        recipe: The hyperparameters.
        source: The training images.
        held_out: Images to measure the task's error on after each epoch.

    Raises:
        ValueError: The network does not accept the images, or has nothing to train.
    """

    def __init__(self, net: YNet, recipe: BranchRecipe, source: Source, held_out: Pool | None) -> None:
        self.net, self.recipe, self.source, self.held_out = net, recipe, source, held_out
        self.parts: tuple[Part, ...] = ("encoder", "ssl") if recipe.joint else ("ssl",)
        self.device = source.example.device
        self.augment = augmentations.make(net.card.augment)
        task = tasks.make(net.card.task)
        self.task: Task = Rotation("all") if isinstance(task, Rotation) else task
        self.shape = _check_images(net, source, self.augment, self.task)
        if held_out is not None:
            check_pool(net, held_out)
        self.parameters = {
            name: parameter
            for name, parameter in net.named_parameters()
            if name.split(".")[0] in self.parts and parameter.requires_grad
        }
        if not any(name.startswith("ssl.") for name in self.parameters):
            raise ValueError("The self-supervised branch has no trainable parameters (requires_grad).")
        self.steps = 0
        """Steps taken."""
        self.best: dict[str, Tensor] = {}
        """What is trained after the best epoch; empty without held-out images."""
        self.model: YNet | Replicated = net
        self._buffers: dict[str, Tensor] = {}
        self._teacher: nn.Module | None = None
        if recipe.joint:
            self._teacher = copy.deepcopy(nn.Sequential(net.encoder, net.classifier)).eval()

    def begin(self) -> None:
        """Make the optimizer; from here on, steps can be taken."""
        count = sum(1 for part in self.parts for _ in getattr(self.net, part).parameters())
        if count == len(self.parameters) and is_faster(self.net, self.device, self.recipe.precision):
            example = Draws.of(0, torch.arange(2, device=self.device)).uniform(*self.shape)
            precision = self.recipe.precision
            with arithmetic(precision, self.device):
                self.model = Replicated([self.net], self.parts, example, check_precision(precision))
        moved: list[Tensor] = list(self.parameters.values())
        if isinstance(self.model, Replicated):
            moved = [self.model.replicas.packed.numbers]
        self.optimizer = self.recipe.make_optimizer(moved)
        loaded, self._buffers = self._buffers, {}
        for key in STATES[self.recipe.optimizer]:
            buffers = [torch.zeros_like(tensor) for tensor in moved]
            for tensor, buffer in zip(moved, buffers, strict=True):
                self.optimizer.state[tensor][key] = buffer
            for name, buffer in zip(self.parameters, self._by_parameter(buffers), strict=True):
                self._buffers[f"{key}/{name}"] = buffer
        for name, value in loaded.items():
            self._buffers[name].copy_(value)
        if self.recipe.optimizer == "adamw":
            for tensor in moved:
                self.optimizer.state[tensor]["step"] = torch.tensor(
                    float(self.steps), dtype=torch.float32, device="cpu"
                )

    def _by_parameter(self, buffers: list[Tensor]) -> Iterator[Tensor]:
        """Yield optimizer buffers, or views of the packed one, in the order of the parameters."""
        if isinstance(self.model, Replicated):
            views = self.model.replicas.packed.unpack(buffers[0])
            yield from (views[name][0] for name in self.parameters)
        else:
            yield from buffers

    def run_epoch(self, epoch: int, progress: Progress | None, text: str) -> dict[str, Any]:
        """Train one epoch, counted from 0; returns its entry of the record."""
        start, known = time.perf_counter(), self.source.steps
        terms = ("task", "distillation") if self.recipe.joint else ("task",)
        sums = torch.zeros(len(terms) + 1, dtype=torch.float32, device=self.device)
        count = 0
        devices = [] if self.device.type == "cpu" else [self.device]
        with (
            torch.random.fork_rng(devices, device_type=self.device.type),
            arithmetic(self.recipe.precision, self.device),
        ):
            torch.manual_seed((self.recipe.seed * 1_000_003 + epoch) % 2**63)  # dropout, and the order of a loader
            self.net.eval()
            if isinstance(self.model, Replicated):
                self.model.train(parts=("ssl",))
            else:
                self.net.get_submodule("ssl").train()
            for numbers, images in self.source.batches(epoch):
                for group in self.optimizer.param_groups:
                    group["lr"] = self.recipe.lr_at(epoch + (count / known if known else 0))
                sums += self._step(numbers, images)
                self.steps, count = self.steps + 1, count + 1
                done, total = epoch * known + count, self.recipe.epochs * max(known, count)
                if progress is not None and done < total:
                    progress(done, total, text)
        if not count:
            raise ValueError("`images` must not be empty.")
        means = [value / count for value in sums.tolist()]
        entry: dict[str, Any] = {"epoch": epoch + 1, "lr": self.recipe.lr_at(epoch), "loss": sum(means[:-1])}
        entry |= dict(zip(terms, means[:-1], strict=True)) | {"train_error": means[-1]}
        if self.held_out is not None:
            entry["held_out_error"], entry["held_out_loss"] = self.measure(self.held_out)
        return entry | {"seconds": round(time.perf_counter() - start, 3)}

    def _step(self, numbers: Tensor, images: Tensor) -> Tensor:
        """Take one optimizer step; returns the terms of the loss and the task's error, `(terms + 1,)`."""
        draws = Draws.of(self.recipe.seed, numbers).purpose("train").fold(self.steps)
        images = self.augment(images, draws.copies(1))[:, 0]
        views, targets = self.task.views(images, draws)
        found: list[Tensor] = []
        leaves: list[Tensor] = []
        mixed = self.recipe.precision == "bf16" and not isinstance(self.model, Replicated)

        def loss() -> Tensor:
            with mixed_precision(self.device, mixed):
                features = self._encode(views, leaves)
                outputs = self.model.supervise(features)
                terms = [self.task.loss(outputs, targets).mean()]
                if self._teacher is not None:
                    terms.append(self.recipe.distillation * self._distil(features, images))
            wrong = self.task.error(outputs.detach(), targets).mean()
            found.extend([*(term.detach() for term in terms), wrong])
            return torch.stack(terms).sum()

        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.model, Replicated):
            _, self.model.replicas.packed.numbers.grad = self.model.replicas.packed.gradient(loss)
        else:
            # The gradient of the leaves is not used, but without it the backward pass of torch's GroupNorm crashes on
            # channels-last features (torch 2.13, CPU).
            parameters, value = list(self.parameters.values()), loss()
            gradients = torch.autograd.grad(value, [*parameters, *leaves], allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=False):
                parameter.grad = gradient
        self.optimizer.step()
        return torch.stack(found)

    def _encode(self, views: Tensor, leaves: list[Tensor]) -> Tensor:
        """Return features of views `(N, C, H, W)`; adds the leaf that they depend on, if it needs a gradient.

        Layers get a copy of the leaf, which must not be modified in place.
        """
        if isinstance(self.model, Replicated):
            with torch.set_grad_enabled(self.recipe.joint):
                return self.model.encode(views)
        pixels = self.net.normalise(views)
        if self.recipe.joint:
            leaves.append(pixels.requires_grad_())
            return self.net.encoder(pixels.clone())
        with torch.no_grad():
            features = self.net.encoder(pixels)
        leaves.append(features.detach().requires_grad_())
        return leaves[0].clone()

    def _distil(self, features: Tensor, images: Tensor) -> Tensor:
        """Return the mean cross-entropy to the original network's class probabilities, of images `(B, C, H, W)`."""
        assert self._teacher is not None
        if first_of_four(self.task, images):  # the images are among the views
            logits = self.model.classify(features[::4])
        else:
            logits = self.model(images)
        with torch.no_grad():
            wanted = self._teacher(self.net.normalise(images)).float().softmax(1)
        return F.cross_entropy(logits.float(), wanted)

    @torch.no_grad()
    def measure(self, pool: Pool, limit: int | None = None) -> tuple[float, float]:
        """Return the task's error and mean loss on images, at most `limit` at even intervals, not augmented."""
        self.net.eval()
        self.model.eval()
        count = min(pool.count, limit or pool.count)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        size = max(16, min(500, 500 * 1024 // (pool.shape[-2] * pool.shape[-1])))
        rows = torch.arange(count, device=self.device) * pool.count // count
        with arithmetic(self.recipe.precision, self.device):
            for numbers in rows.split(size):
                views, targets = self.task.probe(_crop(pool.take(numbers), self.shape))
                outputs = self.model.self_supervise(views).float()
                errors, losses = self.task.error(outputs, targets), self.task.loss(outputs, targets)
                sums += torch.stack([errors.double().sum(), losses.double().sum()]) / (len(views) / len(numbers))
        error, loss = (sums / count).tolist()
        return error, loss

    def remember(self) -> None:
        """Store what is trained as the best so far."""
        self.best = {name: tensor.detach().clone() for name, tensor in self._trained().items()}

    def finish(self) -> None:
        """Give the network its own tensors back, those of the best epoch if there is one, in evaluation mode."""
        if isinstance(self.model, Replicated):
            self.model.release()
        self.model = self.net
        if self.best:
            self.net.load_state_dict(self.best, strict=False)
        self.net.eval()

    def is_finite(self) -> bool:
        """Whether everything that is trained is finite."""
        tensors = [tensor for tensor in self._trained().values() if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def state(self) -> dict[str, Tensor]:
        """Return what is trained, the best so far, the optimizer's state and the number of steps, by name."""
        state = {f"network/{name}": tensor.detach() for name, tensor in self._trained().items()}
        state |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        state |= {f"optimizer/{name}": tensor for name, tensor in self._buffers.items()}
        return state | {"steps": torch.tensor(self.steps, dtype=torch.int64, device="cpu")}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load a state, before `begin`.

        Raises:
            ValueError: A tensor is missing, unknown, not finite, or has another shape or dtype; nothing is modified.
        """
        trained = self._trained()
        keys = STATES[self.recipe.optimizer]
        buffers = {f"{key}/{name}": tensor for key in keys for name, tensor in self.parameters.items()}
        groups = {"network/": trained, "optimizer/": buffers, "best/": {} if self.held_out is None else trained}
        wanted = {prefix + name: tensor for prefix, group in groups.items() for name, tensor in group.items()}
        compare_tensors(state, wanted | {"steps": torch.zeros((), dtype=torch.int64, device="cpu")})
        if not 0 < int(state["steps"]) < 2**53:
            raise ValueError(f"the number of steps is {int(state['steps'])}")

        def pick(prefix: str) -> dict[str, Tensor]:
            return {name: state[prefix + name].to(self.device, tensor.dtype) for name, tensor in groups[prefix].items()}

        self.net.load_state_dict(pick("network/"), strict=False)
        self.best, self._buffers, self.steps = pick("best/"), pick("optimizer/"), int(state["steps"])

    def _trained(self) -> dict[str, Tensor]:
        """Return the tensors of the parts that are trained, by name."""
        return {name: tensor for name, tensor in self.net.state_dict().items() if name.split(".")[0] in self.parts}


@torch.no_grad()
def _check_images(net: YNet, source: Source, augment: Augment, task: Task) -> tuple[int, ...]:
    """Run the network on one image; returns the shape of an augmented image.

    Raises:
        ValueError: The network does not accept the images.
    """
    example = source.example
    if net.channels not in (None, example.shape[1]):  # a single channel would silently be repeated
        raise ValueError(f"`images` must have {net.channels} channels, got {example.shape[1]}.")
    pool = source.pool
    net.check_range("images", example if pool is None or pool.tensor is None else pool.tensor)
    net.eval()
    key = Draws.of(0, torch.zeros(1, dtype=torch.int64, device=example.device))
    try:
        image = augment(example, key.copies(1))[:, 0]
        check_branch(net, task, image, key)
    except RuntimeError as error:
        raise ValueError(f"The network does not accept images of shape {source.shape}: {error}") from None
    return tuple(image.shape[1:])


def _crop(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the centre of images that are larger than the augmentation's crops."""
    height, width = shape[-2:]
    top, left = (max(0, have - want) // 2 for have, want in zip(images.shape[-2:], (height, width), strict=True))
    return images[..., top : top + height, left : left + width]
