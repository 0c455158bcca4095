"""Evaluation runs: methods × test sets × seeds, kept in a folder that can be taken up again and read by reports.

units.py    the folder: one file for each finished unit, written whole or not at all; `open_run` reads it
plan.py     what to run: from arguments, or from a study in TOML
run.py      running what is missing, in this process
cluster.py  the same over Ray
"""

from testtime.runs.units import Run, Unit, open_run

__all__ = ["Run", "Unit", "open_run"]
