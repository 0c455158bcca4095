"""What was run, in the document of results: networks, settings, hardware, times and commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testtime.report.committed import GRADIENTS, LEVELS, PART, ROWS, STANDARD, TRAINING, Findings, by_level
from testtime.report.documents import bullets, commands, link, table, wrap
from testtime.report.finding_trainings import tell_arithmetic, training_command
from testtime.report.further import FOLDER, SHARED
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
    every = (*found.runs, *found.more)
    methods = {name: held for run in every for name, held in run.configuration["methods"].items() if name != BASELINE}
    undone = sum(unit.about["counts"]["rolled_back"] for run in every for unit in run.units)
    chosen = f"; for those of `best` see below{_tell_chosen(found)}" if "best" in methods else ""
    arithmetic = tell_arithmetic(recipe)
    texts = [
        f"**Network**: ResNet-{shape['depth']}, {shape['norm'].capitalize()} Normalization, trained jointly on the "
        f"{found.training['configuration']['data']['count']:,} training images: {recipe['epochs']} epochs, batches of "
        f"{recipe['batch']}, learning rate {recipe['lr']:g}, a tenth after epochs "
        f"{' and '.join(map(str, recipe['drops']))}, momentum {recipe['momentum']:g}, weight decay "
        f"{recipe['weight_decay']:g}, {arithmetic}, seed {recipe['seed']}. It ships as `cifar10-resnet26-gn-joint` "
        f"(fingerprint {first.configuration['networks']['joint']['fingerprint']}).",
        *(tell_settings(name, held["settings"]) for name, held in methods.items() if held["mode"] != "fixed"),
        f"The guard, which the paper does not have, undid {undone or 'none'} of their updates.",
        *(_tell_network(name, methods[name], found) for name in ("plain", "alp", "uda") if name in methods),
        f"**`fixed`** was run once, on all images; in {link(STANDARD)} and {link(PART)} its answers are those of "
        f"{link(LEVELS)} on the same images.",
        "**No choice on the test set**: the settings are those of the paper and of its authors' program, which updates "
        f"the rotation branch as well, but for the arithmetic{chosen}. The test error was recorded after each "
        f"epoch of training and used for nothing: it was lowest after epoch {lowest['epoch']} "
        f"({100 * lowest['test_error']:.2f}%), and the network that ships is that of the last epoch "
        f"({100 * epochs[-1]['test_error']:.2f}%).",
        f"**Order**: every set is shuffled once by the seed, {first.about['seeds'][0]}.",
        f"**Hardware and software**: one {hardware['device']}, {hardware['processor']}, torch {versions['torch']}, "
        f"numpy {versions['numpy']}, Python {versions['python']}, testtime {versions['testtime']}"
        f"{_tell_others(found)}.",
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
        *(
            _tell_time(name, FOLDER / run.path.parent.name, run)
            for run in found.more
            for name in run.configuration["methods"]
            if name not in ("fixed", "online", "episodic")
        ),
        ["gradients of both tasks", link(GRADIENTS), f"{count:,}", f"{seconds:.0f}", f"{count / seconds:,.0f}"],
    ]
    notes = (
        "`online` ran all its streams side by side, `episodic` many images: the rates are those of all together, and a "
        "single stream is slower than its share. Every time is of one run."
    )
    if any(FOLDER / run.path.parent.name in SHARED for run in found.more):
        notes += " † These shared the GPU with other runs, so that their seconds are no measure of speed."
    timed = table(["what", "file", "images", "seconds", "images/s"], rows)
    return f"{bullets(texts)}\n\n{timed}\n\n{wrap(notes)}"


def _tell_chosen(found: Findings) -> str:
    """The levels on which the preset was chosen, where that is known."""
    tuning = found.parts.get("tuning")
    levels = sorted(by_level(tuning.results)) if tuning is not None else []
    return f" (chosen at level {' and '.join(map(str, levels))})" if levels else ""


def tell_settings(name: str, held: Mapping[str, Any]) -> str:
    """How a method learns."""
    parts = {"encoder+ssl": "the encoder and the rotation branch", "encoder": "the encoder"}
    steps = f"{held['steps']} step{'' if held['steps'] == 1 else 's'}"
    gate = "no threshold" if held["threshold"] == 1 else f"threshold {held['threshold']}"
    mirrored = "; answers for the image and its mirror image together" if held.get("mirrored") else ""
    known = f" ({PAPER_NAMES[name]})" if name in PAPER_NAMES else ""
    return (
        f"**`{name}`**{known}: {steps} of {held['optimizer']} an image, learning rate {held['lr']:g}, "
        f"{held['copies']} copies, `{held['augment']}`, `{held['task']}`; updates "
        f"{parts.get(held['update'], held['update'])}; {gate}{mirrored}; computed in {held['precision']}."
    )


def _tell_network(name: str, held: Mapping[str, Any], found: Findings) -> str:
    """Which network a method that learns nothing is."""
    words = {
        "plain": "the same network trained on the classes alone",
        "alp": "the same network trained on the classes with adversarial logit pairing",
        "uda": "for each set a network that also learned from the set's unlabelled images (see Trainings)",
    }
    marks = next(
        run.configuration["networks"][held["network"]]["fingerprint"]
        for run in found.more
        if name in run.configuration["methods"]
    )
    mark = f" (fingerprint {marks})" if isinstance(marks, str) else ""
    return f"**`{name}`** ({PAPER_NAMES[name]}): {words[name]}{mark}; it learns nothing when tested."


def _tell_others(found: Findings) -> str:
    """The methods that ran on other hardware."""
    usual = found.runs[0].about["hardware"]["device"]
    others = [(run, run.about["hardware"]) for run in found.more if run.about["hardware"]["device"] != usual]
    told = [f"`{name}` on {held['processor']}" for run, held in others for name in run.configuration["methods"]]
    return f"; {', '.join(told)}" if told else ""


def _tell_time(name: str, path: Path, run: Run) -> list[str]:
    units = [unit for unit in run.units if unit.method == name]
    count = sum(unit.about["counts"]["images"] for unit in units)
    seconds = sum(unit.about["seconds"] for unit in units)
    title = f"{method_title(name)}, {len(units)} sets"
    times = [f"{seconds:.0f} †", ""] if path in SHARED else [f"{seconds:.0f}", f"{count / seconds:,.0f}"]
    return [title, link(path), f"{count:,}", *times]


def tell_commands(found: Findings) -> str:
    """The commands that repeat it."""
    folders = [run.about["command"].split(" --out ")[1].split()[0] for run in found.runs]
    more = [run for run in found.more if run.path.parent.name != ROWS["best"].name]  # it has a part of its own
    return commands(
        [
            'testtime corrupt "$TESTTIME_DATA" "$TESTTIME_DATA/CIFAR-10-C" --all --seed 0 --frost frost/',
            training_command("joint", [found.training]),
            *(run.about["command"] for run in (*found.runs, *more)),
            "python -m testtime.analysis --checkpoint cifar10-resnet26-gn-joint --data cifar10-c --device cuda "
            "--out correlations.json",
            f"testtime correlate correlations.json {folders[0]} --out correlation/online",
            f"testtime correlate correlations.json {folders[1]} {folders[2]} --out correlation/standard",
            f"testtime report {folders[0]} {folders[1]} --paper --out report",
        ]
    )


def tell_missing(found: Findings) -> str:
    """What has not been measured."""
    rows = {"plain": "Object recognition alone (B)", "uda": "UDA-SS", "alp": "ALP"}
    parts = {
        "batch norm": "Batch Normalization",
        "gradual": "The gradual shift",
        "fast": "The fast variant",
        "threshold": "The threshold",
        "steps": "Other numbers of steps and copies",
        "costs": "What an image costs each method, with nothing else running",
        "best": "Settings other than the paper's",
        "seeds": "Several training seeds: every number here is of one network",
        "photographs": "Photographs",
        "standard photographs": "The standard version on photographs",
    }
    seen = set(found.levels[5].rows)
    missing = [words for name, words in rows.items() if name not in seen]
    missing += [words for name, words in parts.items() if name not in found.parts]
    last = ["CIFAR-10.1, VID-Robust, and anything on the whole ImageNet", "The published CIFAR-10-C arrays"]
    return bullets([f"{words}." for words in (*missing, *last)])
