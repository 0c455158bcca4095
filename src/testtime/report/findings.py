"""The results on CIFAR-10 as a document, made from committed files: `python -m testtime.report.findings`.

Reads the files of `results/cifar10/` and writes the parts of `docs/results.md` between comments, and its figures. With
`--check` nothing is written; the exit code says whether the document is what the files say. The curves along the
stream need every record: `--records RUN` names the folder of the run that `levels.json` is the summary of, and without
it that figure stays as it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from testtime.report.canvas import Drawing
from testtime.report.committed import (
    GRADIENTS,
    LEVELS,
    PART,
    PRECISIONS,
    STAND_INS,
    STANDARD,
    TRAINING,
    Findings,
    by_level,
    read,
)
from testtime.report.correlation import PAPER, PREDICTORS, Fit, Joined
from testtime.report.documents import bullets, table, update, wrap
from testtime.report.paper import PAPER_NAMES
from testtime.report.results import BASELINE, MEAN, ORIGINAL, Results, Table, collect, column_title, method_title
from testtime.report.run_figures import draw_bars, draw_correlation, draw_flips, draw_levels, draw_streams
from testtime.report.run_tables import difference, explain, markdown
from testtime.report.sources import ResultsError
from testtime.runs import Run, open_run
from testtime.storage import write_whole

DOCUMENT = Path("docs/results.md")
BARS, STREAMS = Path("docs/cifar10-level-5.svg"), Path("docs/cifar10-streams.svg")
STREAMED = (
    *("gaussian_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("fog", "brightness", "elastic_transform", "pixelate"),
)
"""The corruptions whose streams are drawn: two of each kind."""


def tell_all(found: Findings) -> dict[str, str]:
    """The parts of the document by name."""
    return {
        "means": tell_means(found),
        "what was run": tell_runs(found),
        "commands": tell_commands(found),
        "level 5": tell_level(found, 5),
        "levels 1 to 4": "\n\n".join(tell_level(found, level) for level in (4, 3, 2, 1)),
        "the standard version at levels 1 to 4": tell_part(found),
        "differences": tell_differences(found),
        "online above fixed": tell_losses(found),
        "flips": tell_flips(found),
        "arithmetic": tell_precisions(found),
        "gradients": tell_gradients(found),
        "gradients without labels": tell_stand_ins(found),
    }


def tell_means(found: Findings) -> str:
    """The mean over the corruptions at every level, the paper's beside it."""
    levels, part = found.levels, by_level(found.part)
    heads = ["error in %, mean over the corruptions", "original", *(f"level {level}" for level in levels)]
    rows = []
    for method in ("fixed", "online"):
        cells = [levels[5].rows[method][ORIGINAL], *(each.rows[method][MEAN] for each in levels.values())]
        known = [_paper(levels[5], method, ORIGINAL), *(_paper(each, method, MEAN) for each in levels.values())]
        rows.append([method_title(method), *(f"{cell.error:.1f}" for cell in cells)])
        rows.append(["the paper's", *(f"{value:.1f}" for value in known)])
    for method, title in (("fixed", "fixed (JT), TTT's images"), ("episodic", method_title("episodic"))):
        some = [f"{each.rows[method][MEAN].error:.1f} ‡" for each in part.values()]
        rows.append([title, _error(levels[5], method, ORIGINAL), *some, _error(levels[5], method, MEAN)])
    known = [_paper(each, "episodic", MEAN) for each in levels.values()]
    rows.append(["the paper's", f"{_paper(levels[5], 'episodic', ORIGINAL):.1f}", *(f"{value:.1f}" for value in known)])
    half = max(each.rows[method][MEAN].half_width for each in levels.values() for method in each.rows)
    wide = max(each.rows[method][MEAN].half_width for each in part.values() for method in each.rows)
    words = (
        f"{_images(levels[5]):,} images of each set; ‡ the first {_images(part[1]):,} of the shuffled order. The 95% "
        f"intervals of the means over images are ±{half:.1f} or less, on ‡ ±{wide:.1f} or less. One network, one seed."
    )
    return f"{table(heads, rows)}\n\n{wrap(words)}"


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
        f"**`fixed`** was run once, on all images; in {_link(STANDARD)} and {_link(PART)} its answers are those of "
        f"{_link(LEVELS)} on the same images.",
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
        ["joint training, with a test after each epoch", _link(TRAINING), "", f"{found.training['seconds']:.0f}", ""],
        *(
            _tell_time(name, path, run)
            for path, run in zip((LEVELS, STANDARD, PART), found.runs, strict=True)
            for name in (("fixed", "online") if path == LEVELS else ("episodic",))
        ),
        ["gradients of both tasks", _link(GRADIENTS), f"{count:,}", f"{seconds:.0f}", f"{count / seconds:,.0f}"],
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
    return [title, _link(path), f"{count:,}", f"{seconds:.0f}", f"{count / seconds:,.0f}"]


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
    return "```sh\n" + "\n".join(_fold(line) for line in lines) + "\n```"


def _fold(command: str) -> str:
    """A command in lines of at most 120, each from an option on."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        if len(lines[-1]) + len(part) > 117:
            lines.append("   ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines)[1:]


def tell_level(found: Findings, level: int) -> str:
    """The table of one level, as the paper prints it, and under level 5 what its signs mean."""
    shown = _table(found.results, found.levels[level])
    if level < 5:
        return f"### Level {level}\n\n{shown}"
    return f"{shown}\n\n{bullets([text.replace('*', chr(92) + '*') for text in explain(found.results, 'error')])}"


def tell_part(found: Findings) -> str:
    """The standard version at the lower levels, on some of the images."""
    tables = by_level(found.part)
    return "\n\n".join(f"### Level {level}\n\n{_table(found.part, tables[level])}" for level in (4, 3, 2, 1))


def _table(results: Results, one: Table) -> str:
    text = markdown(replace(results, tables=(one,)), "error", paper=True)
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def tell_differences(found: Findings) -> str:
    """What is further from the paper than chance over images explains."""
    levels, part = found.levels, by_level(found.part)
    texts = []
    for method in ("fixed", "online"):
        gaps = [_gap(each, method, MEAN) for each in levels.values()]
        out = [f"level {level}" for level, each in levels.items() if _is_beyond(each, method, MEAN)]
        texts.append(
            f"{PAPER_NAMES[method]}, mean over the corruptions: {_signed(min(gaps))} to {_signed(max(gaps))} from the "
            f"paper's over the levels; outside: {', '.join(out) or 'none'}."
        )
    shown = (*part.values(), levels[5])
    ours = [each.rows["fixed"][MEAN].error - each.rows["episodic"][MEAN].error for each in shown]
    theirs = [_paper(each, "fixed", MEAN) - _paper(each, "episodic", MEAN) for each in shown]
    apart = [each.rows["fixed"][MEAN].error - levels[level].rows["fixed"][MEAN].error for level, each in part.items()]
    texts.append(
        f"TTT lowers the mean error of JT on the same images by {_list(ours)} points at levels 1 to 5, in the paper by "
        f"{_list(theirs)}. At levels 1 to 4 these are the first {_images(part[1]):,} images; JT's mean on them is "
        f"{', '.join(map(_signed, apart))} from that on all."
    )
    texts += [_tell_beyond(levels[5], method) for method in levels[5].rows]
    texts += [_tell_constant(levels, method) for method in ("fixed", "online")]
    return bullets(texts)


def _tell_beyond(one: Table, method: str) -> str:
    columns = [ORIGINAL, *one.shifted]
    out = {column: _gap(one, method, column) for column in columns if _is_beyond(one, method, column)}
    lists = []
    for sign, word in ((1, "higher"), (-1, "lower")):
        ordered = sorted((column for column in out if sign * out[column] > 0), key=lambda column: -abs(out[column]))
        if ordered:
            lists.append(f"{word} on {', '.join(f'{column_title(each)} ({_signed(out[each])})' for each in ordered)}")
    return (
        f"{PAPER_NAMES[method]} at level {one.level}: outside on {len(out)} of {len(columns)} sets; {'; '.join(lists)}."
    )


def _tell_constant(levels: Mapping[int, Table], method: str) -> str:
    """Which corruptions are off to the same side at every level."""
    found = []
    for column in levels[5].shifted:
        gaps = [_gap(each, method, column) for each in levels.values()]
        if all(_is_beyond(each, method, column) for each in levels.values()) and (min(gaps) > 0 or max(gaps) < 0):
            found.append(f"{column_title(column)} ({_signed(min(gaps))} to {_signed(max(gaps))})")
    return f"{PAPER_NAMES[method]} outside at all five levels and to the same side: {', '.join(found) or 'none'}."


def _gap(one: Table, method: str, column: str) -> float:
    """Ours minus the paper's, both as printed."""
    return round(round(one.rows[method][column].error, 1) - round(_paper(one, method, column), 1), 1)


def _is_beyond(one: Table, method: str, column: str) -> bool:
    """Whether the paper's value lies outside the 95% interval of ours."""
    low, high = one.rows[method][column].interval
    return not low <= _paper(one, method, column) <= high


def tell_losses(found: Findings) -> str:
    """Where learning along the stream does harm, here and in the paper."""
    levels = found.levels
    rows, places, worse = [], [(levels[1], ORIGINAL)], []
    places += [(each, column) for each in levels.values() for column in each.shifted]
    above = 0
    for each, column in places:
        base, cell = each.rows["fixed"][column], each.rows["online"][column]
        theirs = _paper(each, "online", column) - _paper(each, "fixed", column)
        above += round(theirs, 1) > 0
        if cell.error <= base.error:
            continue
        title = "original" if column == ORIGINAL else f"{column_title(column)} {each.level}"
        worse += [title] if cell.mark else []
        gain = f"{cell.error - base.error:+.2f}{cell.mark}"
        rows.append([title, f"{base.error:.2f}", f"{cell.error:.2f}", gain, _signed(theirs)])
    rows.sort(key=lambda row: -float(row[3].rstrip("†")))
    words = (
        f"On {len(rows)} of {len(places)} sets TTT-Online's error is above JT's, in the paper on {above}; with † as in "
        f"the tables on {len(worse)} of them{': ' if worse else ''}{', '.join(worse)}."
    )
    harm = [
        f"{column_title(column)} {each.level}"
        for results in (found.results, found.part)
        for each in by_level(results).values()
        if "episodic" in each.rows
        for column in each.columns
        if each.rows["episodic"][column].error > each.rows["fixed"][column].error
    ]
    words += f" TTT's error is above JT's on {', '.join(harm) if harm else 'no set'}."
    heads = ["set and level", "JT", "TTT-Online", "difference", "the paper's difference"]
    return f"{wrap(words)}\n\n{table(heads, rows)}"


def tell_flips(found: Findings) -> str:
    """How many answers adaptation turned right and wrong at level 5."""
    top, texts = found.levels[5], []
    for method in ("episodic", "online"):
        cells = [top.rows[method][column] for column in top.shifted]
        right, wrong = sum(cell.to_right or 0 for cell in cells), sum(cell.to_wrong or 0 for cell in cells)
        texts.append(
            f"{PAPER_NAMES[method]} turns {right:,} wrong answers right and {wrong:,} right ones wrong, "
            f"{right / wrong:.1f} to 1"
        )
    count = sum(top.rows["fixed"][column].images for column in top.shifted)
    return wrap(f"Of the {count:,} answers at level 5, {'; '.join(texts)}.")


def tell_precisions(found: Findings) -> str:
    """The error of `online` in each arithmetic, on the same images."""
    tables = {name: results.tables[0] for name, results in found.precisions.items()}
    columns = tables["fp32"].columns
    rows = [
        [f"`{name}`", *(f"{shown.rows['online'][column].error:.1f}" for column in columns)]
        for name, shown in tables.items()
    ]
    exact = tables["fp32"].rows["online"]
    apart = max(
        abs(shown.rows["online"][column].error - exact[column].error) for shown in tables.values() for column in columns
    )
    links = ", ".join(_link(PRECISIONS[name]) for name in tables)
    words = (
        f"TTT-Online at level 5 on the first {exact[columns[0]].images:,} images of the shuffled order; `fp32` on a "
        f"CPU, the others on the {found.results.runs[0].about['hardware']['device']}; {links}. The largest difference "
        f"from `fp32` is {apart:.2f} points."
    )
    return f"{table(['error in %', *(column_title(column) for column in columns)], rows)}\n\n{wrap(words)}"


def tell_gradients(found: Findings) -> str:
    """The linear correlations with the improvement, the paper's beside its own."""
    methods, fits = list(found.gradients), _fits(found.gradients)
    best = [
        f"{PAPER_NAMES[method]} that of {PREDICTORS[fit.predictor]} ({fit.correlation:.2f})"
        for method in methods
        if (fit := max((fit for fit in fits.values() if fit.method == method), key=lambda fit: fit.correlation))
    ]
    names = [len(joined.names) for joined in found.gradients.values()]
    words = (
        f"{names[0]} sets; intervals by bootstrap over sets. TTT's improvements at levels 1 to 4 are those on "
        f"{_images(by_level(found.part)[1]):,} images: its points carry more chance than TTT-Online's. The highest of "
        f"the correlations is for {' and for '.join(best)}. The inner product, the cosine and the error need labels, "
        "but for the rows without."
    )
    return f"{_correlation_table(found.gradients)}\n\n{wrap(words)}"


def tell_stand_ins(found: Findings) -> str:
    """How well the improvement is predicted without labels, by the balance of the predictions among others."""
    fits = _fits(found.stand_ins)
    study = found.stand_in_study
    sets, images = len(study["sets"]), study["configuration"]["limit"]
    pairs = [
        f"{fits['balance.inner', method].correlation:.2f} for {PAPER_NAMES[method]} "
        f"({fits['batch.inner', method].correlation:.2f} with labels)"
        for method in found.stand_ins
    ]
    words = (
        f"{sets} sets, the first {images} images of each, in batches of {study['configuration']['batch']}; "
        f'[`{STAND_INS.name}`](../{STAND_INS.as_posix()}), {study["hardware"]["processor"]}. "Balance" takes, in '
        "place of the classes' loss, how uneven the mean prediction of a batch is: no labels, but classes that are "
        f"about equally frequent. Its inner product with the task's gradient gives {' and '.join(pairs)}. "
        "Confident predictions in place of labels do worse: a wrong one turns its gradient around."
    )
    return f"{_correlation_table(found.stand_ins)}\n\n{wrap(words)}"


def _fits(gradients: Mapping[str, Joined]) -> dict[tuple[str, str], Fit]:
    return {(fit.predictor, fit.method): fit for joined in gradients.values() for fit in joined.fits}


def _correlation_table(gradients: Mapping[str, Joined]) -> str:
    methods, fits = list(gradients), _fits(gradients)
    rows = []
    for key, words in PREDICTORS.items():
        if any((key, method) not in fits for method in methods):
            continue  # the study does not have it
        cells = []
        for method in methods:
            fit = fits[key, method]
            ends = " to ".join(_minus(f"{end:.2f}") for end in fit.interval)
            known = f"{PAPER[method]:.2f}" if key == "batch.inner" else ""
            cells += [_minus(f"{fit.correlation:.2f}"), ends, known]
        rows.append([words, *cells])
    heads = ["r with the improvement in error"]
    for method in methods:
        heads += [method_title(method), "95%", "the paper's"]
    return table(heads, rows)


def draw_figures(found: Findings, records: Path | None = None) -> dict[Path, Drawing]:
    """The figures by path; the streams' only where there are records.

    Raises:
        ValueError: The records are not those of a run with streams.
    """
    levels = found.levels
    plain = [replace(each, rows={name: each.rows[name] for name in ("fixed", "online")}) for each in levels.values()]
    flips = draw_flips(levels[5])
    assert flips is not None
    figures = {
        BARS: draw_bars(levels[5], paper=True),
        Path("docs/cifar10-levels.svg"): draw_levels(plain, paper=True),
        Path("docs/cifar10-flips.svg"): flips,
    }
    for method, joined in found.gradients.items():
        figures[Path(f"docs/cifar10-gradients-{method}.svg")] = draw_correlation(
            joined.values["batch.inner"],
            joined.improvements[method],
            name=f"gradients-{method}",
            title=f"inner product of the two gradients against the improvement of {method}",
            x_label="inner product of the two gradients",
            y_label=f"improvement of {PAPER_NAMES[method]}, points",
            colour=method,
        )
    if records is not None:
        streams = collect([open_run(records)])
        top = next((one for one in streams.tables if one.level == 5), streams.tables[0])
        chosen = tuple(column for column in STREAMED if column in top.columns)
        drawing = draw_streams(streams, replace(top, columns=chosen))
        if drawing is None:
            raise ResultsError(f"{records} has no records of fixed and online at level 5.")
        figures[STREAMS] = drawing
    return figures


def _adapting(run: Run) -> list[str]:
    return [name for name in run.configuration["methods"] if name != BASELINE]


def _paper(one: Table, method: str, column: str) -> float:
    value = one.paper_value(method, column, "error")
    if value is None:
        raise ResultsError(f"The paper has no {column} of {method} at level {one.level}.")
    return value


def _error(one: Table, method: str, column: str) -> str:
    return f"{one.rows[method][column].error:.1f}"


def _images(one: Table) -> int:
    return next(iter(one.rows.values()))[one.shifted[0]].images


def _signed(gap: float) -> str:
    return difference(gap, 0.0)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _link(path: Path) -> str:
    return f"[`{path.name}`](../{path})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the document and its figures in the checkout in the current folder; the exit code."""
    parser = argparse.ArgumentParser(description="Make docs/results.md and its figures from the results files.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the document is not current"
    )
    parser.add_argument("--records", type=Path, help="folder of the run, for the curves along the stream")
    options = parser.parse_args(arguments)
    try:
        found = read()
        drawn = {} if options.check else draw_figures(found, options.records)
        figures = {path: drawing.svg(inline=False) for path, drawing in drawn.items()}
        current = update({DOCUMENT: tell_all(found)}, options.check)
        for path, svg in figures.items():
            write_whole(path, svg)
    except (OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return int(options.check and not current)


if __name__ == "__main__":
    sys.exit(main())
