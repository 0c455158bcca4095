"""When Test-Time Training helps (paper, sections 3 and 4).

measure.py         `diagnose`: a network on images without labels
verdict.py         what follows from that, in words
gradients.py       the gradients of single images, as inner products
correlation.py     `gradient_correlation`: how far the two tasks' gradients agree on a test set
gradient_study.py  the same on many sets, stored in one file
theory.py          the theorem of section 4, checked on a linear model
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
