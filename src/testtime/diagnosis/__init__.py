"""When Test-Time Training helps: the correlation of the two tasks' gradients (paper, sections 3 and 4).

gradients.py    the gradients of single images, as inner products
correlation.py  `gradient_correlation`: a network on a test set
study.py        the same on many sets, kept in one file; `python -m testtime.analysis` runs it
"""

from testtime.analysis.correlation import Agreement, Correlation, gradient_correlation
from testtime.analysis.study import StudyError, name_sets, open_for, read_study, run_study

__all__ = [
    "Agreement",
    "Correlation",
    "StudyError",
    "gradient_correlation",
    "name_sets",
    "open_for",
    "read_study",
    "run_study",
]
