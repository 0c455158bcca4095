"""Predictions for image files, and summaries of checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testtime.adaptation.adapters import Adapter, Episodic, Online
from testtime.adaptation.objectives import SelfSupervision
from testtime.adaptation.prediction import Prediction
from testtime.checks import is_number
from testtime.data.held_out import find_source
from testtime.data.pictures import fit_picture, to_gray
from testtime.data.sets import DataError
from testtime.evaluation.method_specs import MethodSpec
from testtime.evaluation.recommended import find_recommended
from testtime.networks import checkpoint
from testtime.networks.card import Card, CheckpointError
from testtime.networks.ynet import YNet
from testtime.storage import printable

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_SHOWN = 20  # classes that are listed


@dataclass(frozen=True)
class Answer:
    """An adapter's prediction for one image.

    Attributes:
        image: The file.
        before: The predicted class before adaptation.
        before_probability: Its probability before adaptation.
        after: The predicted class after adaptation.
        after_probability: Its probability after adaptation.
        change: Change of the probability of the class `after`.
        confidence: The self-supervised task's confidence on the plain image before adaptation.
        task_loss_before: The task's loss on the image before adaptation.
        task_loss_after: The task's loss after adaptation.
        adapted: Whether the network learned from the image.
        rolled_back: Whether the update was rolled back.
        familiar: Whether the image resembles the training images, by its energy and the loss of
            the network's self-supervised task before adaptation; None if the network has no statistics.
    """

    image: str
    before: str
    before_probability: float
    after: str
    after_probability: float
    change: float
    confidence: float
    task_loss_before: float
    task_loss_after: float
    adapted: bool
    rolled_back: bool
    familiar: bool | None = None


def default_network() -> str:
    """Return the default bundled network: the joint CIFAR-10 one if available, else the first.

    Raises:
        CheckpointError: None is bundled.
    """
    names = checkpoint.bundled()
    if not names:
        remedy = "train one (testtime train --data digits --out RUN) and pass its file (RUN/network.safetensors)"
        raise CheckpointError(checkpoint.WEIGHTS, "no trained network is bundled with this version", remedy)
    return "cifar10-resnet26-gn-joint" if "cifar10-resnet26-gn-joint" in names else names[0]


def load_image(card: Card, picture: str | Path, channels: int | None = None) -> Tensor:
    """Load an image file for a network: centre-cropped, resized to its input size, grey if it takes one channel.

    Args:
        card: The network's card.
        picture: The file.
        channels: The network's channels, 1 or 3; None: as in the card's architecture, else 3.

    Returns:
        uint8 `(C, size, size)`.

    Raises:
        ValueError: The card has no image size.
        DataError: The file is not an image, damaged or too large.
    """
    size = card.require_size()
    image = fit_picture(picture, size, resize=size)
    if (channels or card.architecture.get("channels", 3)) == 1:
        image = to_gray(image)
    return image


def predict(
    adapter: Adapter,
    card: Card,
    pictures: Sequence[Path],
    together: int = 1,
    skip: Callable[[DataError], None] | None = None,
    channels: int | None = None,
    usual: Mapping[str, Any] | None = None,
) -> Iterator[Answer]:
    """Load image files, adapt to each and predict.

    Augmentations are seeded by the content of an image, so that its answer does not depend on its position.

    Args:
        adapter: The adapter.
        card: The card of its network.
        pictures: Image files, in order.
        together: Images per call of the adapter.
        skip: Called with the error of each unreadable image, which is skipped; None raises it.
        channels: As for `load_image`.
        usual: What images like the training images have, `about` of `Statistics`; to tell which images are familiar.

    Yields:
        One answer per image, in order.

    Raises:
        DataError: An image cannot be read and `skip` is None.
    """
    for start in range(0, len(pictures), together):
        read = [(file, _try_to_fit(card, file, skip, channels)) for file in pictures[start : start + together]]
        shown = [(file, image) for file, image in read if image is not None]
        if not shown:
            continue
        images = torch.stack([image for _, image in shown])
        prediction = adapter.predict(
            images, torch.tensor([hash_content(image) for image in images], dtype=torch.int64, device="cpu")
        )
        familiar = find_familiar(adapter, prediction, usual or {})
        before, after = prediction.logits_before.softmax(-1).cpu(), prediction.logits.softmax(-1).cpu()
        names = card.classes or tuple(str(number) for number in range(after.shape[1]))
        if len(names) != after.shape[1]:
            raise ValueError(f"The network has {after.shape[1]} classes, its card names {len(names)}.")
        for row, (file, _) in enumerate(shown):
            old, new = int(before[row].argmax()), int(after[row].argmax())
            yield Answer(
                image=str(file),
                before=names[old],
                before_probability=float(before[row, old]),
                after=names[new],
                after_probability=float(after[row, new]),
                change=float(after[row, new] - before[row, new]),
                confidence=float(prediction.confidence[row]),
                task_loss_before=float(prediction.loss_before[row]),
                task_loss_after=float(prediction.loss_after[row]),
                adapted=bool(prediction.adapted[row]),
                rolled_back=bool(prediction.rolled_back[row]),
                familiar=None if familiar is None else bool(familiar[row]),
            )


def hash_content(image: Tensor) -> int:
    """Return a sample number that depends on the pixels of an image alone."""
    return int.from_bytes(hashlib.sha256(image.numpy().tobytes()).digest()[:7], "big")


def find_familiar(adapter: Adapter, prediction: Prediction, usual: Mapping[str, Any]) -> Tensor | None:
    """Return which images `(N,)` resemble those that the network was trained on; None if it is not known."""
    energy: Any = usual.get("energy")
    loss: Any = usual.get("task_loss")
    if not is_number(energy):
        return None
    familiar = prediction.logits_before.float().logsumexp(-1) >= energy
    if adapter.method.objective is SelfSupervision and is_number(loss):
        familiar &= prediction.loss_before <= loss
    return familiar


def _try_to_fit(
    card: Card, picture: Path, skip: Callable[[DataError], None] | None, channels: int | None
) -> Tensor | None:
    try:
        return load_image(card, picture, channels)
    except DataError as fault:
        if skip is None:
            raise
        skip(fault)
        return None


def format_answer(answer: Answer) -> str:
    """Format an answer as one line."""
    notes = [] if answer.adapted else ["rolled back" if answer.rolled_back else "not adapted"]
    notes += ["unlike the training images"] if answer.familiar is False else []
    image, before, after = map(printable, (answer.image, answer.before, answer.after))
    text = f"{image}  {before} {answer.before_probability:.1%} → {after} {answer.after_probability:.1%}"
    return f"{text}  {format_points(answer.change)}" + (f"  ({', '.join(notes)})" if notes else "")


def format_points(change: float) -> str:
    """Format a difference of probabilities in percentage points; zero is positive."""
    return f"{round(100 * change, 1) + 0.0:+.1f} points"


def format_classes(name: str, classes: Sequence[str]) -> str:
    """Say in one line which network answers, and which classes it knows."""
    if not classes:
        return f"network: {printable(name)}; its classes have no names"
    shown = ", ".join(map(printable, classes[:_SHOWN]))
    more = f", … ({len(classes)} in all)" if len(classes) > _SHOWN else ""
    return f"network: {printable(name)}; whatever an image shows, the answer is one of its classes: {shown}{more}"


def summarise(source: str | Path) -> dict[str, Any]:
    """Summarise a checkpoint as JSON-serializable data, also that of a custom model.

    Args:
        source: A file written by `YNet.save`, or the name of a bundled network.

    Raises:
        CheckpointError: The file is missing, truncated or not a checkpoint.
    """
    # Not `load`, which cannot build a custom model.
    path = checkpoint.find_checkpoint(source)
    card, tensors = checkpoint.read_checkpoint(path)
    counts = {
        part: sum(
            tensor.numel()
            for name, tensor in tensors.items()
            if name.startswith(f"{part}.") and not name.endswith(_BUFFERS)
        )
        for part in ("encoder", "classifier", "ssl")
    }
    summary: dict[str, Any] = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "architecture": card.architecture,
        "classes": list(card.classes),
        "size": card.size,
        "mean": list(card.mean),
        "std": list(card.std),
        "task": card.task,
        "augment": card.augment,
        "parameters": counts | {"total": sum(counts.values())},
        "training": None,
    }
    epochs = card.record.get("epochs")
    if isinstance(epochs, list) and epochs:
        configuration = _table(card.record.get("configuration"))
        seconds = card.record.get("seconds")
        summary["training"] = {
            "recipe": _table(configuration.get("recipe")),
            "data": _table(configuration.get("data")),
            "test": _table(configuration.get("test")),
            "epochs": len(epochs),
            "last": _table(epochs[-1]),
            "seconds": seconds if is_number(seconds) else None,
            "versions": _table(card.record.get("versions")),
            "hardware": _table(card.record.get("hardware")),
        }
    return summary


def _table(value: Any) -> dict[str, Any]:
    """Return a part of a training record; empty if it is not a table."""
    return value if isinstance(value, dict) else {}


def prepare_adapter(net: YNet, online: bool = False, parallel: int = 1, **settings: Any) -> Adapter:
    """Return an `Episodic` or `Online` adapter.

    Settings that are None are those that the network's card recommends, or else the method's.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    name, mode = given.pop("method", "ttt"), "online" if online else "episodic"
    # As a specification, which checks names and types: a card is not trusted.
    spec = MethodSpec(name, mode, settings=find_recommended(net.card.settings, name, mode), method=name)
    own = {"method": name, **spec.make_arguments(), **given}
    return Online(net, **own) if online else Episodic(net, parallel=parallel, **own)


def format_summary(summary: dict[str, Any]) -> str:
    """Format the result of `summarise` as lines."""
    architecture = dict(summary["architecture"])
    name = architecture.pop("name", "custom (its builder is not part of testtime)")
    arguments = ", ".join(f"{key} {value}" for key, value in architecture.items())
    counts = summary["parameters"]
    lines = {
        "file": f"{summary['file']} ({summary['bytes'] / 1e6:.2f} MB)",
        "network": f"{name}: {arguments}" if arguments else name,
        "classes": f"{len(summary['classes'])}: {', '.join(summary['classes'])}" if summary["classes"] else "not named",
        "images": f"{summary['size'] or 'any'} pixels; mean {_list(summary['mean'])}, std {_list(summary['std'])}",
        "task": summary["task"] if isinstance(summary["task"], str) else _format_named(summary["task"]),
        "augment": _format_named(summary["augment"]),
        "parameters": f"{counts['total']:,}: encoder {counts['encoder']:,}, classifier {counts['classifier']:,}, "
        f"ssl {counts['ssl']:,}",
    }
    training = summary["training"]
    if training is None:
        lines["training"] = "no record"
    else:
        recipe, data, last = (training[key] for key in ("recipe", "data", "last"))
        label = "test" if find_source(str(training["test"].get("name"))) is None else "held out"
        test = f", {label} {_number(last, 'test_error', '.2%')}" if "test_error" in last else ""
        lines["training"] = (
            f"{recipe.get('method', '?')}, {training['epochs']} epochs, batch {recipe.get('batch', '?')}, "
            f"lr {recipe.get('lr', '?')}, seed {recipe.get('seed', '?')}"
        )
        lines["data"] = f"{data.get('name', 'tensors')}, {_number(data, 'count', ',')} images"
        lines["result"] = f"loss {_number(last, 'loss', '.4f')}, error {_number(last, 'train_error', '.2%')}{test}"
        lines["cost"] = f"{_number(training, 'seconds', '.0f')} s on {training['hardware'].get('device', '?')}"
    return "\n".join(f"{key:<11}{printable(str(value))}" for key, value in lines.items())


def _format_named(table: Mapping[str, Any]) -> str:
    """Format a name and its arguments."""
    arguments = ", ".join(f"{key} {value}" for key, value in table.items() if key != "name")
    return f"{table.get('name', '')} {arguments}"


def _number(table: Mapping[str, Any], key: str, form: str) -> str:
    value = table.get(key)
    return format(value, form) if is_number(value) else "?"


def _list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
