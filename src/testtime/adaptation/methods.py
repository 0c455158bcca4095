"""METHODS: the adaptation methods, by name.

A method consists of an objective or a correction, its settings, and a reference. What persists between images is up to
the adapter: a method works in every mode in which it makes sense.
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
    """An adaptation method.

    Attributes:
        name: Its name.
        summary: A short description.
        paper: The reference.
        objective: Makes the objective of some replicas.
        correction: Corrects the predictions of a batch, or None.
        mode: Its default mode.
        settings: Fields of `Settings` that differ from the defaults.
        episodic: Fields that override `settings` in episodic mode.
        needs: Requirements: "branch", a trained self-supervised branch; "batch", several images per call.
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

    @property
    def needs_branch(self) -> bool:
        """Whether it needs a self-supervised branch."""
        return "branch" in self.needs or self.objective is SelfSupervision

    def make_settings(self, mode: Mode, given: Mapping[str, Any]) -> Settings:
        """Return the settings of the method in a mode; `given` overrides the method's."""
        own = {"steps": 1, **self.settings, **(self.episodic if mode == "episodic" else {})}
        return Settings(**{**own, **given})


_SUN = "Sun et al., Test-Time Training with Self-Supervision, ICML 2020"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ttt", "trains the network's self-supervised task", _SUN, episodic={"steps": 10}, needs=("branch",)),
        Method(
            "best",
            "ttt that averages the logits of the image and its mirror image",
            _SUN,
            settings={"mirrored": True},
            episodic={"steps": 10},
            needs=("branch",),
        ),
        Method(
            "tent",
            "minimises the entropy of the predicted classes",
            "Wang et al., Tent, ICLR 2021",
            Entropy,
            settings={"update": "norm", "share": "batch", "statistics": "batch"},
            needs=("batch",),
        ),
        Method(
            "cotta",
            "follows a mean teacher and restores random weights",
            "Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022",
            Teacher,
            settings={"update": "all", "share": "batch", "statistics": "batch"},
            needs=("batch",),
        ),
        Method(
            "lame",
            "corrects predictions by those of similar images in the batch, without learning",
            "Boudiaf et al., Parameter-free Online Test-time Adaptation, CVPR 2022",
            Entropy,
            correction=Lame(),
            settings={"steps": 0},
            needs=("batch",),
        ),
    )
}
"""The methods by name. `best` assumes that mirroring preserves the class: true of photographs, not of letters or
digits."""


def find_method(method: str | Method) -> Method:
    """Return the method of a name; a `Method` is returned unchanged.

    Raises:
        ValueError: There is no such method.
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, or a Method; got {method!r}.")
    return METHODS[method]
