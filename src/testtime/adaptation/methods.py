"""METHODS: the ways to learn at test time, by name.

A method is a record: what an image teaches (an objective) or how a batch's answers correct each other (a correction),
the settings that go with it, and the paper it comes from. What is remembered from image to image is the adapter's
choice: every method works in every mode in which it makes sense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from testtime.adaptation.corrections import Correction, Lame
from testtime.adaptation.objectives import Entropy, Objective, SelfSupervision, Teacher
from testtime.adaptation.settings import Settings

Mode = Literal["fixed", "episodic", "online"]


@dataclass(frozen=True)
class Method:
    """A way to learn at test time.

    Attributes:
        name: What it is called.
        summary: What it does, in a few words.
        paper: Where it comes from.
        objective: Makes the objective of some replicas.
        correction: What corrects the answers to a batch, if anything does.
        mode: Its natural mode.
        settings: Fields of `Settings` that differ from the defaults.
        episodic: Those that differ further where every image is an episode of its own.
        needs: What it needs besides images: "branch", a trained self-supervised branch; "batch", several images a call.
    """

    name: str
    summary: str
    paper: str
    objective: Callable[..., Objective] = SelfSupervision
    correction: Correction | None = None
    mode: Mode = "online"
    settings: Mapping[str, Any] = field(default_factory=dict)
    episodic: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def make_settings(self, mode: Mode, given: Mapping[str, Any]) -> Settings:
        """The settings of the method in a mode; what is given overrides the method's own."""
        own = {"steps": 1, **self.settings, **(self.episodic if mode == "episodic" else {})}
        return Settings(**{**own, **given})


_SUN = "Sun et al., Test-Time Training with Self-Supervision, ICML 2020"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ttt", "learns the network's self-supervised task", _SUN, episodic={"steps": 10}, needs=("branch",)),
        Method(
            "best",
            "as ttt, and answers with the mean of the image and its mirror image",
            _SUN,
            settings={"mirrored": True},
            episodic={"steps": 10},
            needs=("branch",),
        ),
        Method(
            "tent",
            "lowers the entropy of the predicted classes",
            "Wang et al., Tent, ICLR 2021",
            Entropy,
            settings={"update": "norm", "share": "batch", "statistics": "batch"},
            needs=("batch",),
        ),
        Method(
            "cotta",
            "follows a slow teacher, and restores random weights",
            "Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022",
            Teacher,
            settings={"update": "all", "share": "batch", "statistics": "batch"},
            needs=("batch",),
        ),
        Method(
            "lame",
            "corrects answers by those of similar images in the batch; weights stay",
            "Boudiaf et al., Parameter-free Online Test-time Adaptation, CVPR 2022",
            Entropy,
            correction=Lame(),
            settings={"steps": 0},
            needs=("batch",),
        ),
    )
}
"""By name. `best` takes an image and its mirror image for the same thing, which holds for photographs and not for
letters or digits."""


def find_method(method: str | Method) -> Method:
    """A method by its name, or the record itself.

    Raises:
        ValueError: There is no such method.
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, or a Method; got {method!r}.")
    return METHODS[method]
