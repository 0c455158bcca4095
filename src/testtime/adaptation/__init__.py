"""Learning at test time: the method, what is learned, and the adapters that decide what is remembered.

method.py         observe, learn, observe again
objectives.py     what an unlabelled image teaches; corrections.py: what needs no gradient
methods.py        METHODS: objectives and settings by name
settings.py       how an adapter learns; guard.py: which images it learns from, and what is undone
learner.py        replicas, objective and optimizer; optimizers.py: how an optimizer treats stacked parameters
adapters.py       Fixed, Episodic, Online; streams.py: many online streams
replica_store.py  streams that wait for their turn; batching.py: how many at once; recorder.py: CUDA graphs
source.py         the network as it was given; prediction.py: what an adapter answers; inputs.py: checks
"""

from testtime.adaptation.adapters import Adapter, Episodic, Fixed, Online
from testtime.adaptation.methods import METHODS, Method, find_method
from testtime.adaptation.prediction import Prediction
from testtime.adaptation.settings import Settings
from testtime.adaptation.streams import Streams

__all__ = [
    "METHODS",
    "Adapter",
    "Episodic",
    "Fixed",
    "Method",
    "Online",
    "Prediction",
    "Settings",
    "Streams",
    "find_method",
]
