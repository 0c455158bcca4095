"""Evaluation runs: methods × test sets × seeds, kept in a folder that can be taken up again and read by reports.

units.py         the folder: one file for each finished unit, written whole or not at all; `open_run` reads it
descriptions.py  what runs and units say of themselves, checked where it is read
summary.py       runs without their records, in one small file; `open_runs` reads it, or a folder
methods.py       the methods by name: a mode, a network, settings
plan.py          what to run: from arguments, or from a study in TOML
underway.py      what units that advance together have so far, so that a kill does not cost it
workshop.py      the work of a unit
run.py           running what is missing, in this process
cluster.py       the same over Ray
"""

from testtime.runs.methods import Method
from testtime.runs.plan import Plan, Source, make_plan, read_study, studies
from testtime.runs.run import run_plan
from testtime.runs.summary import open_runs, write_summary
from testtime.runs.units import Run, RunError, Unit, open_run, tell

__all__ = [
    "Method",
    "Plan",
    "Run",
    "RunError",
    "Source",
    "Unit",
    "make_plan",
    "open_run",
    "open_runs",
    "read_study",
    "run_plan",
    "studies",
    "tell",
    "write_summary",
]
