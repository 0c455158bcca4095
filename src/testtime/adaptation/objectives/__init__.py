"""Objectives: losses on unlabelled images, one file a method or a family of methods."""

from testtime.adaptation.objectives.actmad import ActivationMatching
from testtime.adaptation.objectives.base import Objective, Observation
from testtime.adaptation.objectives.dua import MovingStatistics
from testtime.adaptation.objectives.eata import AnchoredEntropy, ReliableEntropy
from testtime.adaptation.objectives.entropy import Entropy, measure_entropy
from testtime.adaptation.objectives.memo import MarginalEntropy
from testtime.adaptation.objectives.rehearsal import Rehearsal
from testtime.adaptation.objectives.roid import LikelihoodRatio
from testtime.adaptation.objectives.rotta import RobustTeacher
from testtime.adaptation.objectives.sar import SharpnessAwareEntropy
from testtime.adaptation.objectives.self_supervision import SelfSupervision
from testtime.adaptation.objectives.shot import InformationMaximization
from testtime.adaptation.objectives.t3a import Prototypes
from testtime.adaptation.objectives.teacher import Teacher

__all__ = [
    "ActivationMatching",
    "AnchoredEntropy",
    "Entropy",
    "InformationMaximization",
    "LikelihoodRatio",
    "MarginalEntropy",
    "MovingStatistics",
    "Objective",
    "Observation",
    "Prototypes",
    "Rehearsal",
    "ReliableEntropy",
    "RobustTeacher",
    "SelfSupervision",
    "SharpnessAwareEntropy",
    "Teacher",
    "measure_entropy",
]
