"""`python -m testtime.analysis`: gradient correlation on many test sets."""

from testtime.analysis.study import main
from testtime.ending import run_process

run_process(main)
