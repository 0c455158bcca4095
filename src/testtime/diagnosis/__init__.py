"""When does Test-Time Training help? (paper, sections 3 and 4)

measure.py         `diagnose`: measures a network on unlabelled images
result.py          what was measured, as a record and in words
verdict.py         the verdict on it
gradients.py       inner products of per-image gradients; batch_gradients.py: of a batch's
correlation.py     `gradient_correlation`: agreement of the two tasks' gradients on a test set
gradient_study.py  gradient correlation on many sets, stored in one file
theory.py          the theorem of section 4 and its linear model
"""

from testtime.diagnosis.correlation import Agreement, Correlation, gradient_correlation
from testtime.diagnosis.gradient_study import StudyError, name_sets, open_for, read_gradient_study, run_study

__all__ = [
    "Agreement",
    "Correlation",
    "StudyError",
    "gradient_correlation",
    "name_sets",
    "open_for",
    "read_gradient_study",
    "run_study",
]
