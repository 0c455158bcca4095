"""Evaluation of adapters on test sets, and runs of methods × test sets × seeds stored in a folder.

records.py             `evaluate`, a generator of records
method_specs.py        a method in a run: mode, network, settings
study.py, plan.py      what to run, from a TOML file, arguments or both
columns.py             records as columns
units.py               the run folder, one file per finished unit; `open_run`
descriptions.py        validation of the metadata of runs and units
summary.py             runs without their records, in one small file; `open_runs`
stream_checkpoints.py  checkpoints of online units that run as parallel streams
worker.py              running one unit
schedule.py, run.py    running the missing units in this process; ray.py: on Ray
predict_files.py       predictions for image files
calibration.py         the thresholds of `Auto`, fitted to runs
"""

from testtime.evaluation.calibration import Trace, fit_calibration, read_traces
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
    "Trace",
    "Unit",
    "fit_calibration",
    "format_run",
    "make_plan",
    "open_run",
    "open_runs",
    "read_study",
    "read_traces",
    "run_plan",
    "studies",
    "write_summary",
]
