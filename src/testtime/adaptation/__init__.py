"""Adaptation at test time: the method, its objectives, and the adapters.

method.py         observe, learn, observe again
objectives/       losses on unlabelled images; corrections.py: methods without gradients; adam.py: Adam for replicas
methods.py        METHODS: objectives and settings by name
settings.py       settings of an adapter
guard.py          which images to learn from, which updates to undo; watch.py: streams that go wrong
selection.py      which parameters and statistics learn; safe defaults and warnings
learner.py        replicas, objective and optimizer; optimizers.py: optimizers of stacked parameters
adapters.py       Fixed, Episodic, Online; streams.py: many online streams; auto.py: a stream that chooses the mode
replica_store.py  storage of many streams; batching.py: how many run in parallel; recorder.py: CUDA graphs
source.py         the unadapted network; prediction.py: predictions of an adapter
state.py          the state of an adapter: counts and what it has learned, saved and loaded
inputs.py         checks of arguments
"""

from testtime.adaptation.adapters import Adapter, Episodic, Fixed, Online
from testtime.adaptation.auto import Auto, Calibration
from testtime.adaptation.guard import Guard
from testtime.adaptation.methods import METHODS, Method, find_method
from testtime.adaptation.prediction import Prediction
from testtime.adaptation.settings import Settings
from testtime.adaptation.streams import Streams

__all__ = [
    "METHODS",
    "Adapter",
    "Auto",
    "Calibration",
    "Episodic",
    "Fixed",
    "Guard",
    "Method",
    "Online",
    "Prediction",
    "Settings",
    "Streams",
    "find_method",
]
