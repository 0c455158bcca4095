"""The README's table and the demo's, made from committed results: `python -m testtime.report.readme`.

Writes parts of `README.md` from `results/cifar10/` and from what the benchmarks wrote to `results/`, and the table of
`docs/demo.md` and its picture from `results/digits-demo.json`. The README's picture is one of those of
`testtime.report.findings`. With `--check` nothing is written; the exit code says whether both documents already are
what the results say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testtime.report.committed import by_level, read_whole
from testtime.report.documents import table, update, wrap
from testtime.report.results import MEAN, Results, collect, column_short, column_title, method_title
from testtime.report.run_figures import draw_bars
from testtime.runs import open_runs
from testtime.storage import printable, read_json, write_whole

README, DEMO = Path("README.md"), Path("docs/demo.md")
RESULTS, PICTURE = Path("results/digits-demo.json"), Path("docs/demo.svg")
ENGINE = Path("results/engine-cpu.json")
ENGINES, TRAININGS = (ENGINE, Path("results/engine-h200.json")), (Path("results/train-h200.json"),)
_SHOWN = 64  # at once, of the rows of a benchmark that went further
_NETWORKS = {"resnet26": "ResNet-26, 32×32, 32 copies", "resnet18": "ResNet-18, 224×224, 64 copies"}
_OTHERS = {
    "plain": "is a network trained on the classes alone",
    "uda": "is the joint network trained further with the unlabelled test set",
    "alp": "is one trained with adversarial logit pairing",
    "best": "is `online` with this package's preset of that name",
}


def tell_cifar(results: Results) -> str:
    """Methods down and the sets of level 5 across, with the paper's mean, and what belongs to it."""
    top = by_level(results)[5]
    names = {method: method_title(method).replace(method, f"`{method}`", 1) for method in top.rows}
    rows = []
    for method, row in top.rows.items():
        known = top.paper_value(method, MEAN, "error")
        cells = [f"{row[column].error:.1f}" if column in row else "" for column in top.columns[:-1]]
        mean = f"**{row[MEAN].error:.1f}**" if MEAN in row else ""
        rows.append([names[method], *cells, mean, "" if known is None else f"{known:.1f}"])
    heads = ["error in %", *(column_short(column) for column in top.columns[:-1]), "**mean**", "paper's mean"]
    means = {method: row[MEAN].error for method, row in top.rows.items() if MEAN in row}
    gains = {method: f"{100 * (1 - mean / means['fixed']):.0f}%" for method, mean in means.items()}
    others = "; ".join(f"`{name}` {words}" for name, words in _OTHERS.items() if name in top.rows)
    first = results.runs[0]
    device = first.about["hardware"]["device"]
    elsewhere = [run for run in results.runs if run.about["hardware"]["device"] != device]
    apart = "".join(f", but for `{name}`" for run in elsewhere for name in run.configuration["methods"])
    shape = next(iter(first.configuration["networks"].values()))["architecture"]
    images = top.rows["fixed"][top.shifted[0]].images
    half = max(row[MEAN].half_width for row in top.rows.values() if MEAN in row)
    words = (
        f"CIFAR-10-C at level 5, made by this package; ResNet-{shape['depth']} with {shape['norm'].capitalize()} "
        f"Normalization; {images:,} images in every column; diamonds are the paper's values. Mean error over the "
        f"{len(top.shifted)} corruptions: `online` {gains['online']} and `episodic` {gains['episodic']} below `fixed`; "
        f"the 95% intervals of the means over images are ±{half:.1f} or less. "
        f"{others}{'. ' if others else ''}One network{' of each kind' if others else ''}, one run, seed "
        f"{first.about['seeds'][0]}, on one {device}{apart}. Commands, files, the other levels, "
        "where it differs from the paper and what is not measured yet: [docs/results.md](docs/results.md)."
    )
    return f"{table(heads, rows)}\n\n{wrap(words)}"


def tell_speed(
    engines: Mapping[str, Mapping[str, Any]], training: Mapping[str, Mapping[str, Any]], results: Results
) -> str:
    """Steps a second of the benchmark's rows beside the naive loop's, the rates of runs on CIFAR-10-C, and of training.

    Args:
        engines: What `benchmarks/engine.py` wrote, by file.
        training: What `benchmarks/train.py` wrote, by file.
        results: The runs.
    """
    parts = []
    for file, engine in engines.items():
        for network in dict.fromkeys(row.get("network", "resnet26") for row in engine["rows"]):
            own = [row for row in engine["rows"] if row.get("network", "resnet26") == network]
            parts.append(_tell_rows(_NETWORKS[network], own))
            parts.append(_tell_limit(own))
        turns = ""
        if "cuda" not in engine["command"]:
            turns = f"rows measured in turn, load average {engine['load_average_before']} before, "
        parts.append(
            wrap(
                f"{engine['hardware']}; `{engine['command']}`, medians, {turns}torch {engine['versions']['torch']}; "
                f"all rows: [`{file}`]({file})."
            )
        )
    parts.append(
        wrap(
            "A step is forward, backward and update on the copies of one image. The naive loop augments each copy as a "
            "picture of its own and takes one image at a time, as the method is usually written."
        )
    )
    rates = []
    for method, steps in (("online", 1), ("episodic", 10)):
        units = [unit for run in results.runs for unit in run.units if unit.method == method]
        images, seconds = sum(unit.about["counts"]["images"] for unit in units), sum(unit.seconds for unit in units)
        rates.append(f"{images / seconds * steps:,.0f} steps a second for `{method}` ({images:,} images)")
    device = results.runs[0].about["hardware"]["device"]
    alone = "" if len(engines) > 1 else " The benchmark itself has not been run there yet."
    words = (
        f"On one {device} the runs of the table at the top went at {' and '.join(rates)}, in bfloat16, reading and "
        f"recording included.{alone}"
    )
    return "\n\n".join([*parts, wrap(words), *(_tell_training(file, held) for file, held in training.items())])


def _tell_rows(title: str, own: Sequence[Mapping[str, Any]]) -> str:
    """The rows of a network; of those of many at once 64, the most and the fastest, where there are so many."""
    memory = any(row.get("peak_mib") for row in own)
    counts = {row["name"]: int(row["name"].split()[0]) for row in own if row["name"][0].isdecimal()}
    most, fastest = max(counts.values(), default=0), max(own, key=_rate)["name"]
    rows = []
    for row in own:
        if most > _SHOWN and counts.get(row["name"], most) not in (_SHOWN, most, counts.get(fastest)):
            continue
        cells = [f"{row['steps_per_s']:,.1f}", f"{row['images_per_s']:,.1f}", f"{row['times_naive']:,.2f}"]
        peak = "" if row.get("peak_mib") is None else f"{row['peak_mib']:,.0f}"
        rows.append([row["name"], *cells, *([peak] if memory else [])])
    return table([title, "steps/s", "images/s", "× naive loop", *(["peak MiB"] if memory else [])], rows)


def _tell_limit(own: Sequence[Mapping[str, Any]]) -> str:
    """The fastest row beside plain training of the same network, which has nothing to keep apart."""
    plain = max((row for row in own if row["name"].startswith("plain training")), key=_rate)
    learned = [row for row in own if row["name"] != plain["name"] and "gate" not in row["name"]]  # a gate skips steps
    fastest = max((row for row in learned if not row["name"].startswith("plain training")), key=_rate)
    return wrap(
        f"The most steps, {fastest['name']}, are {_rate(fastest) / _rate(plain):.1f} times those of plain training on "
        f"large batches at its fastest ({plain['name'].removeprefix('plain training, ')})."
    )


def _rate(row: Mapping[str, Any]) -> float:
    return row["steps_per_s"]


def _tell_training(file: str, held: Mapping[str, Any]) -> str:
    """Joint training beside an ordinary loop, by arithmetic."""
    rows = [row for row in held["rows"] if "times_ordinary" in row]
    counts = sorted({row["seeds"] for row in rows if "seeds" in row})
    loop = next(row["name"] for row in rows if "seeds" not in row).rpartition(", ")[0]
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        times = f" ({row['times_ordinary']:.1f} times)" if "seeds" in row else ""
        cells.setdefault(row["precision"], {})[row.get("seeds", 0)] = f"{row['images_per_s']:,.0f}{times}"
    heads = ["joint training, images/s", loop, *("one seed" if one == 1 else f"{one} seeds together" for one in counts)]
    shown = table(heads, [[name, *(own.get(count, "") for count in (0, *counts))] for name, own in cells.items()])
    words = (
        f"ResNet-26 on {held['hardware'].split(';')[0]}, all seeds counted; `{held['command']}`; [`{file}`]({file}). "
        "The ordinary loop has torch's own arithmetic, TF32 in convolutions, or autocast to bf16."
    )
    return f"{shown}\n\n{wrap(words)}"


def tell_demo(results: Results) -> str:
    """Sets down and methods across, with how many digits, which command, hardware, seed and file."""
    shown, run = results.tables[0], results.runs[0]
    methods = list(shown.rows)
    rows = []
    for column in shown.columns:
        bold = "**" if column == MEAN else ""
        title = "mean of the shifts" if column == MEAN else column_title(column)
        cells = [f"{bold}{shown.rows[name][column].error:.1f}{bold}" for name in methods]
        rows.append([f"{bold}{title}{bold}", *cells])
    rows.append(["ms for an image", *(f"{1000 * results.seconds[name]:.1f}" for name in methods)])
    demo, hardware = run.about["demo"], run.about["hardware"]
    means = {name: row[MEAN].error for name, row in shown.rows.items()}
    gains = {name: 100 * (1 - mean / means["fixed"]) for name, mean in means.items()}
    count = shown.rows["fixed"][shown.shifted[0]].images
    half = max(row[MEAN].half_width for row in shown.rows.values())
    busy = "" if demo["load"] is None else f", load average {demo['load']} at the start"
    words = (
        f"Mean error over the {len(shown.shifted)} shifts: `online` {gains['online']:.0f}% and `episodic` "
        f"{gains['episodic']:.0f}% below `fixed`; the 95% intervals of the means over images are ±{half:.1f} or less. "
        f"{count} test digits in every row, one run, seed {run.units[0].seed}; `{run.about['command']}` took "
        f"{demo['seconds']:.0f} s ({demo['training']:.0f} s of it training) on {demo['cores']} cores "
        f"({hardware['processor']}{busy}), torch {run.about['versions']['torch']}; all numbers in "
        f"[`{RESULTS}`](../{RESULTS})."
    )
    heads = ["error in %", *(f"`{name}`" for name in methods)]
    return "\n\n".join([table(heads, rows), wrap(f"{words} {demo['choice']}")])


def read_files(files: Sequence[Path], root: Path = Path()) -> dict[str, Any]:
    """The contents of JSON files that are there, by name."""
    there = [file for file in files if (root / file).exists()]
    return {str(file): read_json(root / file) for file in there}


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the documents and the demo's picture in the checkout in the current folder; the exit code."""
    parser = argparse.ArgumentParser(description="Make the README's and the demo's table from the results files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is not current")
    check = parser.parse_args(arguments).check
    try:
        demo, cifar = collect(open_runs(RESULTS)), read_whole()
        speed = tell_speed(read_files(ENGINES), read_files(TRAININGS), cifar)
        parts = {
            README: {"results/cifar10": tell_cifar(cifar), str(ENGINE): speed},
            DEMO: {str(RESULTS): tell_demo(demo)},
        }
        current = update(parts, check)
    except (OSError, ValueError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    if check:
        return int(not current)
    write_whole(PICTURE, draw_bars(demo.tables[0]).svg(inline=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
