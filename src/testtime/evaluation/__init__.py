"""Evaluation: records of an adapter on a test set, and runs of methods × test sets × seeds in a folder.

records.py             `evaluate`, a generator of records
method_specs.py        how a run uses a method: a mode, a network, settings
study.py, plan.py      what to run: from a TOML file, from arguments, or from both
units.py               the folder of a run: one file for each finished unit; `open_run` reads it
descriptions.py        what runs and units say of themselves, checked where it is read
summary.py             runs without their records, in one small file; `open_runs` reads it, or a folder
stream_checkpoints.py  checkpoints of units that advance together
worker.py              the work of a unit
schedule.py, run.py    running what is missing, in this process; ray.py: over Ray
predict_files.py       picture files in, answers out
"""

from testtime.evaluation.method_specs import MethodSpec
from testtime.evaluation.plan import Plan, SetSpec, make_plan
from testtime.evaluation.run import run_plan
from testtime.evaluation.study import read_study, studies
from testtime.evaluation.summary import open_runs, write_summary
from testtime.evaluation.units import Run, RunError, Unit, format_run, open_run

__all__ = [
    "MethodSpec",
    "Plan",
    "Run",
    "RunError",
    "SetSpec",
    "Unit",
    "format_run",
    "make_plan",
    "open_run",
    "open_runs",
    "read_study",
    "run_plan",
    "studies",
    "write_summary",
]
