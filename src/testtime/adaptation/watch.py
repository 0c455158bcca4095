"""Follows streams for a `Guard`: the classes of their answers, the lengths of their updates, how far they have moved.

What it remembers are tensors with a row per replica, which are saved, reset and restored together with the replicas.
They change only after an update was accepted or undone, so that an undone update counts too, but one of values that
are not finite leaves no trace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testtime.adaptation.guard import Guard
from testtime.adaptation.prediction import Observation
from testtime.networks.replicas import Replicas, put_rows

_WARM = 32  # updates before lengths are judged
_LEAST = 0.25  # minimum standard deviation of the logarithm of the lengths, which Adam makes nearly equal


class Watch:
    """What a guard knows about the streams of S replicas.

    Args:
        guard: The guard.
        replicas: The replicas, as made from the original network.
        by_batch: Whether Batch Normalization uses the statistics of the batch.
    """

    def __init__(self, guard: Guard, replicas: Replicas, by_batch: bool) -> None:
        self.guard, self._replicas = guard, replicas
        count, numbers = replicas.count, replicas.packed.numbers
        self.state: dict[str, Tensor] = {}
        """What it remembers by name, `(S, ...)` each; empty for a guard of single updates."""
        self._start = numbers.detach()[:1].clone() if guard.distance else None  # (1, P)
        self._source: Replicas | None = None
        if guard.collapse:
            assert replicas.example is not None
            self._source = Replicas(replicas.net, count, (), replicas.example, replicas.dtype)
            self._source.batch_norms.use("batch" if by_batch else "source")
            with torch.no_grad():
                classes = self._source(replicas.example.expand(count, *replicas.example.shape)).shape[-1]
            # Uniform, and decaying at the same rate: the two are comparable from the first image on.
            uniform = torch.full((count, classes), 1 / classes, dtype=torch.float32, device=numbers.device)
            self.state |= {"classes": uniform, "source": uniform.clone()}
        if guard.burst:  # number, mean and variance of the logarithms of lengths
            self.state["lengths"] = torch.zeros(count, 3, dtype=torch.float32, device=numbers.device)
        if guard.fallback == "freeze":
            self.state["frozen"] = torch.zeros(count, dtype=torch.int64, device=numbers.device)
        self._weights = [piece for piece in replicas.pieces if piece.is_floating_point()]
        if guard.fallback == "shadow":
            self.state |= {f"shadow/{number}": piece.detach().clone() for number, piece in enumerate(self._weights)}
        self._next: dict[str, Tensor] = {}
        self._judged = torch.zeros(count, dtype=torch.bool, device=numbers.device)
        self.alarmed = self._judged
        """Which streams had collapsed or gone too far at the last update, bool `(S,)`."""

    @property
    def falls_back(self) -> bool:
        """Whether it may return a replica to an earlier state than that before the update."""
        return self.guard.fallback != "undo"

    def admit(self, wanted: Tensor) -> Tensor:
        """Return which of the wanted images to learn from, bool `(S, B)`: those of streams that are not frozen."""
        return wanted & (self.state["frozen"] == 0).unsqueeze(1) if "frozen" in self.state else wanted

    def judge(self, images: Tensor, wanted: Tensor, before: Tensor, after: Observation, finite: Tensor) -> Tensor:
        """Return which updates to accept, as far as streams are concerned, bool `(S,)`.

        Args:
            images: `(S, B, C, H, W)`.
            wanted: Which of them were learned from, bool `(S, B)`.
            before: The packed parameters before the update, `(S, P)`.
            after: Observation after the update.
            finite: Whether all values of a replica are finite, bool `(S,)`.
        """
        guard, numbers = self.guard, self._replicas.packed.numbers
        if not (guard.collapse or guard.burst or guard.distance):
            return finite
        self._judged = finite & wanted.any(1) & after.logits.flatten(1).isfinite().all(1)
        alarmed, sound = torch.zeros_like(finite), finite
        if self._source is not None:
            spread = self._average("classes", after.logits, wanted)
            alarmed = alarmed | (spread < guard.collapse * self._average("source", self._source(images), wanted))
        if self._start is not None:
            alarmed = alarmed | ((numbers - self._start).norm(dim=1) > guard.distance * self._start.norm())
        if guard.burst:
            sound = sound & self._measure((numbers - before).norm(dim=1))
        self.alarmed = alarmed & self._judged
        return sound & ~self.alarmed

    def renew(self, updated: Tensor) -> Tensor | None:
        """Move the averages; `updated`, bool `(S,)`, says which updates were accepted.

        Returns:
            Which replicas to reset, bool `(S,)`; `recover` must follow. None: none.
        """
        for name, value in self._next.items():
            put_rows(self.state[name], value, self._judged)
        if self.guard.fallback == "shadow":
            for number, piece in enumerate(self._weights):
                shadow = self.state[f"shadow/{number}"]
                put_rows(shadow, shadow.lerp(piece, 1 - self.guard.shadow), updated)
        return self.alarmed if self.falls_back else None

    def copy_shadow(self) -> list[Tensor]:
        """Return a copy of the shadow, for `recover`; empty if there is none."""
        return [tensor.clone() for name, tensor in self.state.items() if name.startswith("shadow/")]

    def recover(self, shadow: list[Tensor]) -> None:
        """Go to the shadow, or freeze, after a reset of the replicas that `renew` returned."""
        for number, old in enumerate(shadow):
            for tensor in (self._weights[number], self.state[f"shadow/{number}"]):
                put_rows(tensor, old, self.alarmed)
        if "frozen" in self.state:
            self.state["frozen"].add_(self.alarmed)

    def _average(self, name: str, logits: Tensor, wanted: Tensor) -> Tensor:
        """Average the probabilities of the wanted images with those before; returns exp(entropy), `(S,)`."""
        counts = wanted.sum(1, keepdim=True).float()  # (S, 1)
        probabilities = torch.where(wanted[..., None], logits.float().softmax(-1), 0).sum(1) / counts.clamp(min=1)
        known = self.state[name]
        self._next[name] = mean = known + (probabilities - known) * (1 - self.guard.momentum**counts)
        return torch.special.entr(mean).sum(1).exp()

    def _measure(self, lengths: Tensor) -> Tensor:
        """Return which lengths of updates `(S,)` are usual, bool `(S,)`, and count them."""
        number, mean, variance = self.state["lengths"].unbind(1)
        moved = self._judged & (lengths > 0)
        logs = torch.where(moved, lengths.clamp(min=torch.finfo(torch.float32).tiny).log(), mean)
        deviation = variance.sqrt().clamp(min=_LEAST)
        most = torch.where(number >= _WARM, mean + self.guard.burst * deviation, torch.inf)
        difference = torch.minimum(logs, most) - mean
        rate = torch.maximum(1 / (number + 1), torch.full_like(mean, 1 - self.guard.momentum))
        new = torch.stack([number + 1, mean + rate * difference, (1 - rate) * (variance + rate * difference**2)], 1)
        self._next["lengths"] = torch.where(moved.unsqueeze(1), new, self.state["lengths"])
        return logs <= most
