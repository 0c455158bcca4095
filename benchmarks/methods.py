"""How fast the methods run, each against the straightforward way to write it: an eager loop over batches.

    python benchmarks/methods.py --quick                                # two CPU cores, small batches
    python benchmarks/methods.py --out results/methods-cpu.json
    python benchmarks/methods.py --device cuda --out results/methods-h200.json

The network is a bundled ResNet-26, by default that with Batch Normalization, the images are coloured patches with
noise, 32×32 pixels, so that some answers are certain and not all alike. A loop takes a batch, makes its update and
predicts the batch with the updated network, all with torch's own modules and optimizers. Views are made by the
package's batched augmentations in both, which favours the loops of methods that are usually written with pictures.
The adapters do more: they observe a batch before the update too, and check and, if need be, undo it. Both take turns;
the speed is the median over the rounds of the loop's time divided by the adapter's. For methods without random views
a row also has the largest difference of their logits after the first batch, relative to the largest logit.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import shlex
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import testtime as tt
from engine import take_time
from testtime.adaptation.objectives.memory import Memory
from testtime.adaptation.selection import select_parameters
from testtime.augment import AugMix, CropFlip
from testtime.networks.task_loss import EASY, read_task_loss
from testtime.provenance import describe_machine
from testtime.randomness import Draws
from testtime.tasks import Rotation

Predict = Callable[[Tensor], Tensor]
MARGIN = 0.4 * math.log(10)
COPIES = {"ttt": 32, "best": 32, "dua": 64, "cotta": 32, "memo": 32, "roid": 1}
SINGLE = ("ttt", "best", "dua", "memo")
"""Methods that learn from one image at a time."""


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets.softmax(1) * logits.log_softmax(1)).sum(1)


def list_norms(net: tt.YNet) -> list[nn.Parameter]:
    parts = [*net.encoder.modules(), *net.classifier.modules()]
    return [p for layer in parts if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm) for p in layer.parameters()]


def list_all(net: tt.YNet) -> list[nn.Parameter]:
    return [*net.encoder.parameters(), *net.classifier.parameters()]


def use_batch_statistics(net: tt.YNet) -> tt.YNet:
    net = copy.deepcopy(net)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.train()
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = None
    return net


def make_views(images: Tensor, copies: int, seed: int) -> Tensor:
    """Crops and flips, `(N·copies, C, H, W)`."""
    draws = Draws.of(seed, torch.arange(len(images), device=images.device)).copies(copies)
    return CropFlip()(images, draws).flatten(0, 1)


def make_images(count: int) -> Tensor:
    """Coloured patches with noise, uint8 `(count, 3, 32, 32)`."""
    draws = Draws.of(0, torch.arange(count))
    patches = F.interpolate(draws.purpose("patches").uniform(3, 4, 4), size=32, mode="bicubic")
    return ((patches + 0.1 * draws.purpose("noise").uniform(3, 32, 32)).clamp(0, 1) * 255).byte()


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def norm(net: tt.YNet) -> Predict:
    return use_batch_statistics(net)


def tent(net: tt.YNet) -> Predict:
    model = use_batch_statistics(net)
    optimizer = torch.optim.Adam(list_norms(model), lr=0.001)

    def predict(images: Tensor) -> Tensor:
        step(optimizer, entropy(model(images)).mean())
        return model(images)

    return predict


def shot(net: tt.YNet) -> Predict:
    model = use_batch_statistics(net)
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.001, momentum=0.9)

    def predict(images: Tensor) -> Tensor:
        logits = model(images)
        mean = logits.softmax(1).mean(0)
        step(optimizer, entropy(logits).mean() + (mean * (mean + 1e-5).log()).sum())
        return model(images)

    return predict


def eta(net: tt.YNet, anchored: bool = False) -> Predict:
    model, mean = use_batch_statistics(net), None
    moving = list_norms(model)
    optimizer = torch.optim.Adam(moving, lr=0.001)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert net.statistics is not None
    fisher = [net.statistics.fisher[names[id(p)]].to(p.device) for p in moving] if anchored else []
    start = [parameter.detach().clone() for parameter in moving]

    def predict(images: Tensor) -> Tensor:
        nonlocal mean
        logits = model(images)
        losses, answers = entropy(logits), logits.detach().softmax(1)
        chosen = losses.detach() < MARGIN
        if mean is not None:
            chosen &= F.cosine_similarity(answers, mean[None]).abs() < 0.4
        if chosen.any():
            found = answers[chosen].mean(0)
            mean = found if mean is None else 0.9 * mean + 0.1 * found
            loss = (losses * (MARGIN - losses.detach()).exp())[chosen].mean()
            for weight, parameter, old in zip(fisher, moving, start, strict=False):
                loss = loss + (weight * (parameter - old) ** 2).sum()
            step(optimizer, loss)
        return model(images)

    return predict


def rdumb(net: tt.YNet, resets: int = 1000) -> Predict:
    learning, steps = eta(net), 0

    def predict(images: Tensor) -> Tensor:
        nonlocal learning, steps
        if steps and steps % resets == 0:
            learning = eta(net)
        steps += 1
        return learning(images)

    return predict


def sar(net: tt.YNet) -> Predict:
    model = use_batch_statistics(net)
    names = select_parameters(net, "norm-early")
    moving = [parameter for name, parameter in model.named_parameters() if name in names]
    optimizer, average = torch.optim.Adam(moving, lr=0.001), None

    def predict(images: Tensor) -> Tensor:
        nonlocal average
        losses = entropy(model(images))
        chosen = losses < MARGIN
        if chosen.any():
            gradients = torch.autograd.grad(losses[chosen].mean(), moving)
            length = torch.stack([gradient.norm() for gradient in gradients]).norm() + 1e-12
            before = [parameter.detach().clone() for parameter in moving]
            with torch.no_grad():
                for parameter, gradient in zip(moving, gradients, strict=True):
                    parameter += 0.05 * gradient / length
            losses = entropy(model(images))
            chosen = chosen & (losses < MARGIN)
            optimizer.zero_grad()
            if chosen.any():
                losses[chosen].mean().backward()
            with torch.no_grad():
                for parameter, old in zip(moving, before, strict=True):
                    parameter.copy_(old)
            if chosen.any():
                optimizer.step()
                now = losses[chosen].mean().item()
                average = now if average is None else 0.9 * average + 0.1 * now
        return model(images)

    return predict


def cotta(net: tt.YNet) -> Predict:
    model, teacher, source = (use_batch_statistics(net) for _ in range(3))
    optimizer, moving = torch.optim.Adam(list_all(model), lr=0.001), list_all(model)

    def predict(images: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(images).softmax(1)
            if source(images).softmax(1).amax(1).mean() < 0.92:
                views = teacher(make_views(images, COPIES["cotta"], 0)).softmax(1)
                target = views.unflatten(0, (len(images), -1)).mean(1)
        step(optimizer, -(target * model(images).log_softmax(1)).sum(1).mean())
        with torch.no_grad():
            for slow, fast, old in zip(list_all(teacher), moving, list_all(source), strict=True):
                slow.lerp_(fast, 0.001)
                fast.copy_(torch.where(torch.rand_like(fast) < 0.01, old, fast))
        return teacher(images)

    return predict


def embed(model: tt.YNet, images: Tensor) -> tuple[Tensor, Tensor]:
    """Features before the last linear layer, and logits."""
    linear = [layer for layer in model.classifier.modules() if isinstance(layer, nn.Linear)][-1]
    seen: list[Tensor] = []
    handle = linear.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    logits = model(images)
    handle.remove()
    return seen[0], logits


@torch.no_grad()
def predict_lame(model: tt.YNet, images: Tensor) -> Tensor:
    features, logits = embed(model, images)
    unit, known = F.normalize(features, dim=1), logits.log_softmax(1)
    similarity = (unit @ unit.T).fill_diagonal_(-math.inf)
    affinity = torch.zeros_like(similarity).scatter_(1, similarity.topk(5, 1).indices, 1.0)
    answers = known.exp()
    for _ in range(100):
        new = (known + affinity @ answers).softmax(1)
        if torch.allclose(new, answers, rtol=0, atol=1e-8):
            break
        answers = new
    return answers.clamp(min=torch.finfo(answers.dtype).tiny).log()


def lame(net: tt.YNet) -> Predict:
    return functools.partial(predict_lame, net)


def t3a(net: tt.YNet) -> Predict:
    linear = [layer for layer in net.classifier.modules() if isinstance(layer, nn.Linear)][-1]
    features = linear.weight.detach()
    logits = linear(features)
    labels, uncertainty = logits.argmax(1), entropy(logits)

    @torch.no_grad()
    def predict(images: Tensor) -> Tensor:
        nonlocal features, labels, uncertainty
        new, logits = embed(net, images)
        features = torch.cat([features, new])
        labels = torch.cat([labels, logits.argmax(1)])
        uncertainty = torch.cat([uncertainty, entropy(logits)])
        held = [(labels == label).nonzero().flatten() for label in range(logits.shape[1])]
        kept = torch.cat([own[uncertainty[own].argsort()[:20]] for own in held])
        features, labels, uncertainty = features[kept], labels[kept], uncertainty[kept]
        targets = F.one_hot(labels, logits.shape[1]).float()
        return new @ F.normalize(targets.T @ F.normalize(features, dim=1), dim=1).T

    return predict


def roid(net: tt.YNet) -> Predict:
    model = use_batch_statistics(net)
    moving = list_norms(model)
    optimizer, source = torch.optim.Adam(moving, lr=0.001), [p.detach().clone() for p in moving]
    mean = torch.full((10,), 0.1, device=moving[0].device)

    def rescale(values: Tensor) -> Tensor:
        return (values - values.min()) / (values.max() - values.min()).clamp(min=1e-12)

    def predict(images: Tensor) -> Tensor:
        nonlocal mean
        logits = model(images)
        answers = logits.detach().softmax(1)
        diversity = rescale(1 - F.cosine_similarity(answers, mean[None]))
        weights = (3 * diversity * rescale(-entropy(logits.detach()))).exp() * (diversity >= diversity.mean())
        mean = 0.9 * mean + 0.1 * answers.mean(0)
        p = logits.softmax(1).clamp(max=0.99)
        ratio = -(p * (p / (1 - p) + 1e-5).log()).sum(1)
        other = model(make_views(images, 1, 0))
        agreement = (cross_entropy(logits, other) + cross_entropy(other, logits)) / 2
        step(optimizer, ((ratio + agreement) * weights).mean())
        with torch.no_grad():
            for parameter, old in zip(moving, source, strict=True):
                parameter.lerp_(old, 0.01)
            logits = model(images).log_softmax(1)
            prior = logits.exp().mean(0)
            smooth = max(1 / len(images), 0.1) / prior.max()
            return (logits + ((prior + smooth) / (1 + 10 * smooth)).log()).log_softmax(1)

    return predict


def rotta(net: tt.YNet) -> Predict:
    """Without its own normalisation, which moves running statistics by 0.05 in training mode instead."""
    model, teacher = copy.deepcopy(net), copy.deepcopy(net)
    for both in (model, teacher):
        for layer in both.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 0.05
    optimizer, held = torch.optim.Adam(list_norms(model), lr=0.001), None

    def predict(images: Tensor) -> Tensor:
        nonlocal held
        with torch.no_grad():
            logits = teacher.eval()(images)
            held = held or Memory.make_empty(1, 64, images.float())
            wanted = torch.ones_like(logits[None, :, 0], dtype=torch.bool)
            held = held.add(images.float()[None] / 255, logits.argmax(1)[None], entropy(logits)[None], wanted, 10)
            target = teacher.train()(held.images[0])
        outputs = model.train()(make_views(held.images[0], 1, 0))
        step(optimizer, (cross_entropy(outputs, target) * torch.sigmoid(-held.age[0] / 64)).mean())
        with torch.no_grad():
            for slow, fast in zip(list_all(teacher), list_all(model), strict=True):
                slow.lerp_(fast, 0.001)
            return teacher.eval()(images)

    return predict


def actmad(net: tt.YNet) -> Predict:
    model, outputs, known = copy.deepcopy(net), {}, net.statistics
    assert known is not None

    def note(name: str) -> Callable[..., None]:
        return lambda layer, inputs, output: outputs.__setitem__(name, output.clone())

    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d) and name in known.means and not name.startswith("ssl"):
            layer.register_forward_hook(note(name))
    options = {"lr": 0.001, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    optimizer = torch.optim.SGD(list_all(model), **options)

    def predict(images: Tensor) -> Tensor:
        model(images)
        losses = []
        for name, output in outputs.items():
            variance, mean = torch.var_mean(output, (0, 2, 3), correction=0)
            losses.append((mean - known.means[name].to(mean.device)).abs().mean() / 2)
            losses.append((variance - known.variances[name].to(mean.device)).abs().mean() / 2)
        step(optimizer, torch.stack(losses).sum())
        return model(images)

    return predict


def one_by_one(predict: Predict) -> Predict:
    return lambda images: torch.cat([predict(image[None]) for image in images])


def measure_rotation(model: tt.YNet, image: Tensor, copies: int) -> Tensor:
    """The loss of predicting the rotations of copies of an image."""
    views = make_views(image, copies, 0)
    turned = torch.cat([torch.rot90(view, turn % 4, (1, 2))[None] for turn, view in enumerate(views)])
    targets = torch.arange(len(views), device=image.device) % 4
    return F.cross_entropy(model.train().self_supervise(turned), targets)


def ttt(net: tt.YNet) -> Predict:
    model = copy.deepcopy(net)
    assert model.ssl is not None
    optimizer = torch.optim.SGD([*model.encoder.parameters(), *model.ssl.parameters()], lr=0.001)

    def predict(image: Tensor) -> Tensor:
        step(optimizer, measure_rotation(model, image, COPIES["ttt"]))
        return model.eval()(image)

    return one_by_one(predict)


def best(net: tt.YNet) -> Predict:
    model, known = copy.deepcopy(net), read_task_loss(net, "copies", seen=True)
    assert known is not None
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.0005)
    limit = average = EASY * known.loss
    memory: list[Tensor] = []
    recent, lasting, classes = torch.zeros(2), torch.zeros(2), torch.zeros(10)

    @torch.no_grad()
    def observe(one: tt.YNet, image: Tensor) -> tuple[Tensor, float]:
        views, targets = Rotation().probe(image)
        loss = F.cross_entropy(one.eval().self_supervise(views), targets)
        return (one(image) + one(image.flip(-1))) / 2, loss.item()

    def predict(image: Tensor) -> Tensor:
        nonlocal average, recent, lasting, classes
        memory.append(image)
        del memory[:-64]
        (theirs, first), (before, second) = observe(net, image), observe(model, image)
        loss = measure_rotation(model, image, COPIES["best"])
        average = 0.99 * average + 0.01 * loss.item()
        if average > limit:
            drawn = torch.randint(len(memory), (COPIES["best"],), device=image.device)
            logits = model.eval()(make_views(torch.cat(memory)[drawn], 1, 0))
            mean = logits.softmax(1).mean(0)
            inform = entropy(logits).mean() + (mean * (mean + 1e-5).log()).sum()
            shares = classes / classes.sum().clamp(min=1e-9)
            diversity = ((torch.special.entr(shares).sum() / math.log(10) - 0.6) / 0.3).clamp(0, 1).item()
            step(optimizer, loss + 2 * len(memory) / 64 * diversity * inform)
        ours, _ = observe(model, image)
        losses = torch.tensor([first, second])
        recent, lasting = 0.9 * recent + 0.1 * losses, 0.98 * lasting + 0.02 * losses
        classes = classes + (before[0].softmax(0).cpu() - classes) / 64
        gaps = [float(torch.diff(-(one + 0.05).log())) for one in (recent, lasting)]
        if gaps[1] < -0.2:
            model.load_state_dict(net.state_dict())
            memory.clear()
            average, recent, lasting, classes = limit, torch.zeros(2), torch.zeros(2), torch.zeros(10)
        return theirs + (ours - theirs) / (1 + math.exp(-40 * (gaps[0] + 0.2)))

    return one_by_one(predict)


def memo(net: tt.YNet) -> Predict:
    model = copy.deepcopy(net)
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(list_all(model), lr=0.005)

    def predict(image: Tensor) -> Tensor:
        model.load_state_dict(start)
        views = make_views(image, COPIES["memo"], 0)
        draws = Draws.of(0, torch.arange(len(views), device=image.device)).copies(1)
        mean = model(AugMix(1.0)(views, draws)[:, 0]).softmax(1).mean(0)
        step(optimizer, -(mean * mean.log()).sum())
        return model(image)

    return one_by_one(predict)


def dua(net: tt.YNet) -> Predict:
    model, rate = copy.deepcopy(net), 0.1

    @torch.no_grad()
    def predict(image: Tensor) -> Tensor:
        nonlocal rate
        rate *= 0.94
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = rate + 0.005
        model.train()(make_views(image, COPIES["dua"], 0))
        return model.eval()(image)

    return one_by_one(predict)


LOOPS: dict[str, Callable[[tt.YNet], Predict]] = {
    "ttt": ttt, "best": best, "norm": norm, "dua": dua, "tent": tent, "shot": shot, "eta": eta,
    "eata": functools.partial(eta, anchored=True), "rdumb": rdumb, "sar": sar, "cotta": cotta, "lame": lame, "t3a": t3a,
    "memo": memo, "roid": roid, "rotta": rotta, "actmad": actmad,
}  # fmt: skip
"""`rehearsal` is `best`; `mirrored` is `ttt` with one more image to predict."""
EXACT = {"norm", "tent", "shot", "eta", "eata", "rdumb", "sar", "lame", "t3a", "actmad"}


def measure(name: str, net: tt.YNet, images: Tensor, rounds: int, device: str) -> dict[str, Any]:
    """Time a method's loop and adapter in turns; both see the same batches."""
    make = tt.Episodic if tt.METHODS[name].mode == "episodic" else tt.Online
    adapter, loop = make(net, method=name), LOOPS[name](net)
    used = images[:, : 8 if name in SINGLE and device == "cpu" else images.shape[1]]
    found, expected = adapter(used[0]), loop(used[0]).detach()  # and warm up
    if device == "cuda":
        for _ in range(2):  # record
            adapter(used[0])
    ours, theirs = [], []
    for number in range(rounds):
        batch = used[number % len(used)]
        theirs.append(take_time(lambda batch=batch: loop(batch), device))
        ours.append(take_time(lambda batch=batch: adapter(batch), device))
    return {
        "method": name,
        "images": used.shape[1],
        "rounds": rounds,
        "ms_per_image": 1000 * statistics.median(ours) / used.shape[1],
        "ms_per_image_loop": 1000 * statistics.median(theirs) / used.shape[1],
        "speed": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
        "difference": float((found - expected).abs().max() / expected.abs().max()) if name in EXACT else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="small batches and few rounds")
    parser.add_argument("--methods", help="names, separated by commas", default=",".join(LOOPS))
    parser.add_argument("--checkpoint", default="cifar10-resnet26-bn-joint", help="a network (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="images per call, of methods that learn from batches")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    options = parser.parse_args()
    batch = options.batch or (32 if options.quick else 200)
    rounds = options.rounds or (3 if options.quick else 7)
    names = options.methods.split(",")
    if unknown := sorted(set(names) - set(LOOPS)):
        parser.error(f"there is no loop for {unknown[0]!r}; there are {', '.join(LOOPS)}")
    warnings.simplefilter("ignore")
    net = tt.load(options.checkpoint).to(options.device).eval()
    images = make_images(4 * batch).unflatten(0, (4, batch)).to(options.device)
    machine = describe_machine(torch.device(options.device))
    document: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/methods.py", *sys.argv[1:]]),
        "machine": machine,
        "threads": torch.get_num_threads(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "rows": [],
    }
    print(f"{'method':8} {'images':>6} {'ms/image':>9} {'loop':>9} {'speed':>6}  difference")
    for name in names:
        row = measure(name, net, images, rounds, options.device)
        document["rows"].append(row)
        difference = "-" if row["difference"] is None else f"{row['difference']:.1e}"
        print(
            f"{name:8} {row['images']:6} {row['ms_per_image']:9.2f} {row['ms_per_image_loop']:9.2f} {row['speed']:6.2f}"
            f"  {difference}",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    mean = math.exp(statistics.fmean(math.log(row["speed"]) for row in document["rows"]))
    print(f"geometric mean of the speeds: {mean:.2f}")


if __name__ == "__main__":
    main()
