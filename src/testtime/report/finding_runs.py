"""What was run, in the document of results: networks, settings, hardware, times and commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testtime.report.committed import GRADIENTS, LEVELS, PART, STANDARD, TRAINING, Findings
from testtime.report.documents import bullets, fold, link, table, wrap
from testtime.report.paper import PAPER_NAMES
from testtime.report.results import BASELINE, method_title
from testtime.runs import Run


def tell_runs(found: Findings) -> str:
    """Network, settings, hardware, software, seeds, images and time of everything that was run."""
    recipe, network = found.training["configuration"]["recipe"], found.training["configuration"]["network"]
    epochs = found.training["epochs"]
    lowest = min(epochs, key=lambda epoch: epoch["test_error"])
    shape = network["architecture"]
    first = found.results.runs[0]
    versions, hardware = first.about["versions"], first.about["hardware"]
    settings = {name: run.configuration["methods"][name]["settings"] for run in found.runs for name in _adapting(run)}
    undone = sum(unit.about["counts"]["rolled_back"] for run in found.runs for unit in run.units)
    arithmetic = "bfloat16" if recipe["bf16"] else "float32"
    texts = [
        f"**Network**: ResNet-{shape['depth']}, {shape['norm'].capitalize()} Normalization, trained jointly on the "
        f"{found.training['configuration']['data']['count']:,} training images: {recipe['epochs']} epochs, batches of "
        f"{recipe['batch']}, learning rate {recipe['lr']:g}, a tenth after epochs "
        f"{' and '.join(map(str, recipe['drops']))}, momentum {recipe['momentum']:g}, weight decay "
        f"{recipe['weight_decay']:g}, {arithmetic}, seed {recipe['seed']}. It ships as `cifar10-resnet26-gn-joint` "
        f"(fingerprint {first.configuration['networks']['joint']['fingerprint']}).",
        *(_tell_settings(name, held) for name, held in settings.items()),
        f"The guard, which the paper does not have, undid {undone or 'none'} of their updates.",
        f"**`fixed`** was run once, on all images; in {link(STANDARD)} and {link(PART)} its answers are those of "
        f"{link(LEVELS)} on the same images.",
        "**No choice on the test set**: the settings are those of the paper and of its authors' program, which updates "
        "the rotation branch as well, but for the arithmetic. The test error was recorded after each epoch of training "
        f"and used for nothing: it was lowest after epoch {lowest['epoch']} ({100 * lowest['test_error']:.2f}%), and "
        f"the network that ships is that of the last epoch ({100 * epochs[-1]['test_error']:.2f}%).",
        f"**Order**: every set is shuffled once by the seed, {first.about['seeds'][0]}.",
        f"**Hardware and software**: one {hardware['device']}, {hardware['processor']}, torch {versions['torch']}, "
        f"numpy {versions['numpy']}, Python {versions['python']}, testtime {versions['testtime']}.",
    ]
    count = sum(one["images"] for one in found.study["sets"].values())
    seconds = sum(one["seconds"] for one in found.study["sets"].values())
    rows = [
        ["joint training, with a test after each epoch", link(TRAINING), "", f"{found.training['seconds']:.0f}", ""],
        *(
            _tell_time(name, path, run)
            for path, run in zip((LEVELS, STANDARD, PART), found.runs, strict=True)
            for name in (("fixed", "online") if path == LEVELS else ("episodic",))
        ),
        ["gradients of both tasks", link(GRADIENTS), f"{count:,}", f"{seconds:.0f}", f"{count / seconds:,.0f}"],
    ]
    notes = (
        "`online` ran all its streams side by side, `episodic` many images: the rates are those of all together, and a "
        "single stream is slower than its share. Every time is of one run."
    )
    timed = table(["what", "file", "images", "seconds", "images/s"], rows)
    return f"{bullets(texts)}\n\n{timed}\n\n{wrap(notes)}"


def _tell_settings(name: str, held: Mapping[str, Any]) -> str:
    parts = {"encoder+ssl": "the encoder and the rotation branch", "encoder": "the encoder"}
    steps = f"{held['steps']} step{'' if held['steps'] == 1 else 's'}"
    gate = "no threshold" if held["threshold"] == 1 else f"threshold {held['threshold']:g}"
    return (
        f"**`{name}`** ({PAPER_NAMES[name]}): {steps} of {held['optimizer']} an image, learning rate {held['lr']:g}, "
        f"{held['copies']} copies, `{held['augment']}`, `{held['task']}`; updates "
        f"{parts.get(held['update'], held['update'])}; {gate}; computed in {held['precision']}."
    )


def _tell_time(name: str, path: Path, run: Run) -> list[str]:
    units = [unit for unit in run.units if unit.method == name]
    count = sum(unit.about["counts"]["images"] for unit in units)
    seconds = sum(unit.about["seconds"] for unit in units)
    title = f"{method_title(name)}, {len(units)} sets"
    return [title, link(path), f"{count:,}", f"{seconds:.0f}", f"{count / seconds:,.0f}"]


def tell_commands(found: Findings) -> str:
    """The commands that repeat it."""
    recipe = found.training["configuration"]["recipe"]
    bf16 = " --bf16" if recipe["bf16"] else ""
    folders = [run.about["command"].split(" --out ")[1] for run in found.runs]
    lines = [
        'testtime corrupt "$TESTTIME_DATA" "$TESTTIME_DATA/CIFAR-10-C" --all --seed 0 --frost frost/',
        f"testtime train --data cifar10 --method {recipe['method']} --seed {recipe['seed']}{bf16} --out runs/joint",
        *(run.about["command"] for run in found.runs),
        "python -m testtime.analysis --checkpoint cifar10-resnet26-gn-joint --data cifar10-c --device cuda "
        "--out correlations.json",
        f"testtime correlate correlations.json {folders[0]} --out correlation/online",
        f"testtime correlate correlations.json {folders[1]} {folders[2]} --out correlation/standard",
        f"testtime report {folders[0]} {folders[1]} --paper --out report",
    ]
    return "```sh\n" + "\n".join(fold(line) for line in lines) + "\n```"


def _adapting(run: Run) -> list[str]:
    return [name for name in run.configuration["methods"] if name != BASELINE]
