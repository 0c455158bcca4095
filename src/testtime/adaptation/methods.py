"""METHODS: the adaptation methods, by name.

A method consists of an objective or a correction, its settings, and a reference. What persists between images is up to
the adapter: a method works in every mode in which it makes sense.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch

from testtime.adaptation.adam import Adam
from testtime.adaptation.corrections import Correction, Lame
from testtime.adaptation.objectives import (
    ActivationMatching,
    AnchoredEntropy,
    Entropy,
    InformationMaximization,
    LikelihoodRatio,
    MarginalEntropy,
    MovingStatistics,
    Objective,
    Prototypes,
    Rehearsal,
    ReliableEntropy,
    RobustTeacher,
    SelfSupervision,
    SharpnessAwareEntropy,
    Teacher,
)
from testtime.adaptation.settings import Settings
from testtime.checks import format_value, is_integer, is_number

Mode = Literal["fixed", "episodic", "online"]
Need = Literal["branch", "batch", "statistics", "batchnorm"]
_SIZES = ("capacity", "supports")  # constants that cannot be 0


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
        needs: Requirements: "branch", a trained self-supervised branch; "batch", several images per call; "statistics",
            those of training images, see `testtime.collect`; "batchnorm", layers of Batch Normalization.
        holds_images: Whether the state of a stream contains recent images.
    """

    name: str
    summary: str
    paper: str
    objective: Callable[..., Objective] = SelfSupervision
    correction: Correction | None = None
    mode: Mode = "online"
    settings: Mapping[str, Any] = field(default_factory=dict)
    episodic: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    holds_images: bool = False

    def __post_init__(self) -> None:
        for need in self.needs:
            if need not in get_args(Need):
                raise ValueError(f"`needs` must be among {', '.join(get_args(Need))}, got {need!r}.")

    @property
    def needs_branch(self) -> bool:
        """Whether it needs a self-supervised branch."""
        return "branch" in self.needs or self.objective is SelfSupervision

    def make_settings(self, mode: Mode, given: Mapping[str, Any]) -> Settings:
        """Return the settings of the method in a mode; `given` overrides the method's.

        Raises:
            TypeError: There is no setting of that name; the message names the closest.
            ValueError: A setting is invalid, or the objective has no such constant.
        """
        known = [one.name for one in fields(Settings)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, ["method", "preset", *known], 1)
                meant = "method" if close == ["preset"] else "".join(close)  # its name in version 0.1
                hint = f"did you mean `{meant}`?" if meant else f"the settings are {', '.join(known)}."
                raise TypeError(f"`{name}` is not a setting of an adapter; {hint}")
        own = {"steps": 1, **self.settings, **(self.episodic if mode == "episodic" else {})}
        settings = Settings(**{**own, **given})
        constants = {name: self._read_constant(name, value) for name, value in settings.constants.items()}
        return replace(settings, constants=constants)

    def _read_constant(self, name: str, value: float) -> float:
        """Return a constant of the objective: an integer, where its own is one."""
        default = getattr(self.objective, name, None)
        if not is_number(default):
            raise ValueError(f"`constants`: the method {self.name!r} has no {format_value(name)}.")
        if not isinstance(default, int):
            return value
        low = min(default, int(name in _SIZES))
        if value != int(value) or not is_integer(int(value), low):
            raise ValueError(f"`constants`: `{name}` must be an integer of at least {low}, got {format_value(value)}.")
        return int(value)


_SUN = "Sun et al., Test-Time Training with Self-Supervision, ICML 2020"
_NIU = "Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022"
_BATCH = {"share": "batch", "statistics": "batch"}
# For CIFAR and batches of 200, as in the papers of TENT and CoTTA and in comparisons of the others.
_NORM = {"update": "norm", **_BATCH, "optimizer": Adam, "lr": 0.001}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ttt", "trains the network's self-supervised task", _SUN, episodic={"steps": 10}, needs=("branch",)),
        *(
            Method(
                name,
                "mirrored ttt with information maximisation on a memory of images; learns only if the task is hard",
                f"{_SUN}; Liang et al., Do We Really Need to Access the Source Data?, ICML 2020",
                Rehearsal,
                settings={"update": "encoder", "mirrored": True, "lr": 0.0005},  # see docs/results/rehearsal.md
                episodic={"steps": 10},
                needs=("branch",),
                holds_images=True,
            )
            for name in ("best", "rehearsal")
        ),
        Method(
            "mirrored",
            "ttt that averages the logits of the image and its mirror image",
            _SUN,
            settings={"mirrored": True},
            episodic={"steps": 10},
            needs=("branch",),
        ),
        Method(
            "norm",
            "normalises with the statistics of the batch, without learning",
            "Schneider et al., Improving robustness by covariate shift adaptation, NeurIPS 2020",
            Entropy,
            settings={"steps": 0, **_BATCH},
            needs=("batch", "batchnorm"),
        ),
        Method(
            "dua",
            "moves the running statistics of the norms, without a gradient",
            "Mirza et al., The Norm Must Go On, CVPR 2022",
            MovingStatistics,
            settings={"update": "norm", "statistics": "running", "copies": 64},
            needs=("batchnorm",),
        ),
        Method(
            "tent",
            "minimises the entropy of the predicted classes",
            "Wang et al., Tent, ICLR 2021",
            Entropy,
            settings=_NORM,
            needs=("batch",),
        ),
        Method(
            "shot",
            "makes each prediction certain and their mean diverse (information maximisation)",
            "Liang et al., Do We Really Need to Access the Source Data?, ICML 2020",
            InformationMaximization,
            settings={"update": "encoder", **_BATCH, "optimizer": functools.partial(torch.optim.SGD, momentum=0.9)},
            needs=("batch",),
        ),
        Method(
            "eta",
            "minimises the entropy of reliable images that are not redundant",
            _NIU,
            ReliableEntropy,
            settings=_NORM,
            needs=("batch",),
        ),
        Method(
            "eata",
            "eta that holds on to parameters that matter to the source network",
            _NIU,
            AnchoredEntropy,
            settings=_NORM,
            needs=("batch", "statistics"),
        ),
        Method(
            "rdumb",
            "eta that returns to the source network every 1,000 updates",
            "Press et al., RDumb, NeurIPS 2023",
            ReliableEntropy,
            settings={**_NORM, "resets": 1000},
            needs=("batch",),
        ),
        Method(
            "sar",
            "minimises the entropy of reliable images in a flat region, resets after a collapse",
            "Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023",
            SharpnessAwareEntropy,
            settings={**_NORM, "update": "norm-early"},
            needs=("batch",),
        ),
        Method(
            "cotta",
            "follows a mean teacher and restores random weights",
            "Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022",
            Teacher,
            settings={"update": "all", **_BATCH, "optimizer": Adam, "lr": 0.001},
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
        Method(
            "t3a",
            "replaces the last layer by prototypes of confident features, without a gradient",
            "Iwasawa and Matsuo, Test-Time Classifier Adjustment Module, NeurIPS 2021",
            Prototypes,
            settings={"update": "none", "share": "batch", "statistics": "source"},
        ),
        Method(
            "memo",
            "minimises the entropy of the mean prediction over augmented views of an image",
            "Zhang et al., MEMO, NeurIPS 2022",
            MarginalEntropy,
            mode="episodic",
            settings={"update": "all", "statistics": "source", "lr": 0.005},
        ),
        Method(
            "roid",
            "makes diverse and certain predictions more certain, stays near the source, corrects class frequencies",
            "Marsden et al., Universal Test-time Adaptation, WACV 2024",
            LikelihoodRatio,
            settings={**_NORM, "copies": 1},
            needs=("batch",),
        ),
        Method(
            "rotta",
            "follows a mean teacher on a balanced memory of recent images",
            "Yuan et al., Robust Test-Time Adaptation in Dynamic Scenarios, CVPR 2023",
            RobustTeacher,
            settings={**_NORM, "statistics": "running"},
            holds_images=True,
        ),
        Method(
            "actmad",
            "matches the moments of activations to those of training",
            "Mirza et al., ActMAD, CVPR 2023",
            ActivationMatching,
            settings={
                "update": "all",
                "share": "batch",
                "statistics": "source",
                "optimizer": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4, nesterov=True),
            },
            needs=("batch", "statistics"),
        ),
    )
}
"""The methods by name. `best` is the recommended one, in this version `rehearsal`. It and `mirrored` assume that
mirroring preserves the class: true of photographs, not of letters or digits."""

ALIASES = {"best": "rehearsal"}
"""Names whose method may change with the version, and its own name, which records have."""


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
