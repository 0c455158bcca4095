"""Objectives: losses on unlabelled images, one file a method or a family of methods."""

from testtime.adaptation.objectives.base import Objective, Observation
from testtime.adaptation.objectives.entropy import Entropy, measure_entropy
from testtime.adaptation.objectives.self_supervision import SelfSupervision
from testtime.adaptation.objectives.teacher import Teacher

__all__ = ["Entropy", "Objective", "Observation", "SelfSupervision", "Teacher", "measure_entropy"]
