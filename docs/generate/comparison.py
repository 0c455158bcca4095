"""Tables of the comparison of methods."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from testtime.report.comparison import compare_runs

from .documents import link, table
from .result_files import CIFAR, ROOT, format_command, format_hardware, read_file, read_runs

FOLDER = Path("results/comparison")
NAMES = {"gn": "GN", "bn": "BN", "robust": "robust"}
"""How the names of files begin, and titles of networks."""
SHIFTS = {
    "reset-full": "reset, full sets",
    "continual-full": "continual, full sets",
    "reset": "reset",
    "continual": "continual",
    "continual-1": "order 1",
    "continual-2": "order 2",
    "mixed": "mixed",
    "clean": "clean",
    "gradual": "gradual",
    "recurring": "recurring",
    "seeds": "three seeds",
}
"""How the names of files go on, and titles: of protocols that differ in how shifts follow each other."""
STREAMS = {
    "correlated-1": "correlated, 1",
    "correlated-0.1": "correlated, 0.1",
    "correlated-0.01": "correlated, 0.01",
    "batch-64": "batch 64",
    "batch-16": "batch 16",
    "batch-1": "batch 1",
}
"""Those in which every set starts anew, and which differ in how images do."""
TITLES = SHIFTS | STREAMS
FIXED, BEST = "fixed", "best"
OURS = (FIXED, "online", BEST)
"""Methods whose rows come first."""
SPEED = {"online": "ttt"}
"""Methods that the benchmark of speed has under another name."""

ELSEWHERE = {
    ("gn", "reset-full"): "past-joint",
    ("gn", "mixed"): "harm-mixed",
    ("gn", "correlated-0.1"): "harm-correlated",
    ("robust", "reset-full"): "past-robust",
}
"""Network and protocol → the file of CIFAR-10 that has the row of `best`, on the same images."""

Row = Mapping[str, Any]


def find_files() -> dict[str, list[Path]]:
    """The result files of each network."""
    files = [file.relative_to(ROOT) for file in sorted((ROOT / FOLDER).glob("*.json"))]
    return {name: own for name in NAMES if (own := [file for file in files if file.name.startswith(f"{name}-")])}


def read_rows(network: str) -> dict[str, dict[str, Row]]:
    """The scores with a network by protocol and method; several files may be of one protocol, the first counts."""
    found: dict[str, dict[str, Row]] = {}
    for protocol in TITLES:
        for suffix, title in (("", ""), ("-single", ""), ("-memo", ""), ("-tuned", "-tuned")):
            file = FOLDER / f"{network}-{protocol}{suffix}.json"
            if (ROOT / file).exists():
                own = found.setdefault(protocol, {})
                for row in read_file(file)["rows"]:
                    own.setdefault(f"{row['method']}{title}", row)
        if protocol in found and (network, protocol) in ELSEWHERE:
            found[protocol].setdefault(BEST, read_summary(CIFAR / f"{ELSEWHERE[network, protocol]}.json", BEST))
    return found


def read_summary(file: Path, method: str) -> Row:
    """The scores of a method in the summary of a run."""
    (results,) = compare_runs(read_runs(file)).protocols
    return asdict(results.scores[method])


def format_errors(network: str, titles: Mapping[str, str]) -> str:
    """The errors with a network: a row for each method, a column for each protocol, by their names and titles."""
    found = {protocol: rows for protocol, rows in read_rows(network).items() if protocol in titles}
    known = dict.fromkeys(name for rows in found.values() for name in rows)
    names = [*(name for name in OURS if name in known), *sorted(name for name in known if name not in OURS)]
    lines = [[f"`{name}`", *(_format_error(rows, name) for rows in found.values())] for name in names]
    return table(["error in %, level 5 / original", *(titles[protocol] for protocol in found)], lines)


def _format_error(rows: Mapping[str, Row], name: str) -> str:
    if name not in rows:
        return ""
    row = rows[name]
    half = (row["interval"][1] - row["interval"][0]) / 2
    clean = "" if row["clean"] is None else f" / {row['clean']:.1f}"
    mark = " ‡" if row["collapsed"] > rows.get(FIXED, {}).get("collapsed", 0) else ""
    return f"{row['error']:.1f} ± {half:.1f}{clean}{mark}"


def format_guards() -> str:
    """The errors without and with a guard: a row for each method, two columns for each network and protocol."""
    heads, columns = [], []
    for network, protocol in itertools.product(NAMES, TITLES):
        file = FOLDER / f"{network}-{protocol}-guarded.json"
        if (ROOT / file).exists():
            usual = read_rows(network)[protocol]
            held = {row["method"].removesuffix("-guarded"): row for row in read_file(file)["rows"]}
            heads += [f"{NAMES[network]}, {TITLES[protocol]}", "guarded"]
            columns += [usual, {**held, FIXED: usual[FIXED]}]  # what collapses is marked by comparison with `fixed`
    names = [name for name in columns[1] if name != FIXED and all(name in column for column in columns)]
    lines = [[f"`{name}`", *(_format_error(column, name) for column in columns)] for name in names]
    return table(["error in %, level 5 / original", *heads], lines)


def format_costs(speed: Mapping[str, Any]) -> str:
    """What a method costs, and how its answers change, when every set starts anew.

    Args:
        speed: The benchmark of methods on a GPU.
    """
    found = {network: rows for network in NAMES if (rows := read_rows(network).get("reset"))}
    times = {row["method"]: row["ms_per_image"] for row in speed["rows"]}
    lines, first = [], next(iter(found.values()))
    for name in sorted(first, key=lambda name: name not in OURS):
        row = first[name]
        time, state = times.get(SPEED.get(name, name)), row["state_bytes"]
        cells = [f"`{name}`", "" if time is None else f"{time:.2f}", "" if state is None else f"{state / 1024:,.0f}"]
        for rows in found.values():
            own = rows.get(name, {"ece_after": None, "to_right": None})
            cells.append("" if own["ece_after"] is None else f"{own['ece_after']:.1f}")
            cells.append("" if own["to_right"] is None else f"{own['to_right']:.1f} / {own['to_wrong']:.1f}")
        lines.append(cells)
    heads = [
        f"{title}, {NAMES[network]}" for network in found for title in ("calibration error", "to right / to wrong")
    ]
    return table(["", "ms an image", "KiB a stream", *heads], lines)


def format_files() -> str:
    """Where the numbers come from."""
    rows = []
    for file in (file for own in find_files().values() for file in own):
        held = read_file(file)
        first = held["rows"][0]
        about = [f"{first['answers']:,}", format_hardware(held["hardware"]), format_command(held["command"])]
        rows.append([link(file), *about])
    for file in (CIFAR / f"{name}.json" for name in ELSEWHERE.values()):
        about = read_runs(file)[0].about
        answers = f"{read_summary(file, BEST)['answers']:,}"
        rows.append([link(file), answers, format_hardware(about["hardware"]), format_command(about["command"])])
    return table(["file", "answers at level 5", "hardware", "command"], rows, words=(0, 2, 3))
