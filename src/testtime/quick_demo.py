"""A first look in seconds: the bundled digits network adapts to three shifts that it was not trained on.

Nothing is trained. The settings are those that the network's card recommends; demo.py says how they were chosen. The
shifts are three of those of the demo, chosen to show the effect.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from testtime.demo import CHOICE, FAMILY, SHIFTS, TOGETHER, WORDS, Bars, make_sets, no_bars
from testtime.evaluation import MethodSpec, Plan, SetSpec, run_plan
from testtime.evaluation.recommended import use_recommended
from testtime.report import publish, require
from testtime.report.results import Results
from testtime.threads import count_cpus

NETWORK = "digits-resnet8-gn-joint"
KINDS = ("contrast", "dim_light", "brightness")
IMAGES = 120


def run_quick(out: str | Path, *, seed: int = 0, progress: Bars | None = None) -> tuple[Results, float]:
    """Adapt the bundled network to shifted digits and write a page, `out/index.html`.

    Args:
        out: The folder; an existing report is overwritten, a finished run with the same seed is reused.
        seed: Seed of shifts, order and augmentation.
        progress: Called with the title of each stage; returns a context manager that yields its progress callback.

    Returns:
        The results, and the seconds it took.

    Raises:
        ModuleNotFoundError: A package that the report needs is not installed.
    """
    require()
    bars, out, begin = progress or no_bars, Path(out), time.perf_counter()
    command = f"testtime demo --quick --out {out}" + (f" --seed {seed}" if seed else "")
    shifts = [shift for kind in KINDS for shift in SHIFTS if shift.kind == kind]
    sets = make_sets(shifts, seed)
    methods = [MethodSpec("fixed", "fixed"), MethodSpec("online", "online")]
    plan = Plan(
        {"joint": NETWORK},
        tuple(map(SetSpec, sets)),
        tuple(use_recommended(methods, {"joint": NETWORK})),
        seeds=(seed,),
        shuffle=True,
        limit=IMAGES,
        title="Digits under shifts",
    )
    with bars("adapting to shifted digits") as report:
        jobs = min(count_cpus(), 4)
        folder = out / f"run-quick-seed-{seed}"
        found = run_plan(plan, folder, command=command, together=TOGETHER, jobs=jobs, sets=sets, progress=report)
    words = ", ".join(f"{shift.title}: {shift.words}" for shift in shifts)
    remarks = {"Network": f"{NETWORK}, bundled; trained on clean digits only", "Shifts": words, "Choice": CHOICE}
    found = replace(found, about=found.about | {"remarks": remarks})
    with bars("report") as report:
        given: dict[str, Any] = {"sets": sets, "sections": WORDS, "command": command, "figures": False}
        results = publish([found], out, formats=("html",), progress=report, **given)
    return results, time.perf_counter() - begin


def format_effect(results: Results) -> str:
    """Say in one sentence what adaptation did."""
    (table,) = results.tables
    fixed, online = (table.rows[method]["mean"] for method in ("fixed", "online"))
    return (
        f"Learning from each image, without labels, changed the error on {len(table.shifted)} shifts from "
        f"{fixed.error:.1f}% to {online.error:.1f}% ({FAMILY}, {IMAGES} digits each)."
    )
