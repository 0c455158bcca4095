"""T3A: class prototypes from confident features in place of the last layer (Iwasawa and Matsuo 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testtime.adaptation.objectives.activations import list_layers, watch
from testtime.adaptation.objectives.base import Observation
from testtime.adaptation.objectives.entropy import Entropy, measure_entropy
from testtime.adaptation.settings import Settings
from testtime.networks.replicas import Replicas
from testtime.networks.stacked import Linear
from testtime.randomness import Draws


class Prototypes(Entropy):
    """Class prototypes in place of the last linear layer, without a gradient (T3A, Iwasawa and Matsuo 2021).

    A class has the `supports` inputs of that layer whose predictions had the least entropy, at first only its weights;
    its prototype is their mean direction. The loss is the entropy of the network's own predictions.
    """

    supports = 20

    def __init__(self, replicas: Replicas, settings: Settings, later: Callable[..., Any]) -> None:
        super().__init__(replicas, settings, later)
        assert replicas.example is not None
        name, layer = self._find_last(replicas.example)
        self._layers, classes = {name: layer}, self.count_classes()
        linear: Any = replicas.net.get_submodule(name)
        weight = linear.weight.detach().float()  # (K, D)
        if len(weight) != classes:
            raise ValueError(f"The last linear layer must have an output per class, {classes}, got {len(weight)}.")
        self._empty = 2 * math.log(max(classes, 2))  # above any entropy
        device, count = replicas.packed.numbers.device, replicas.count
        features = torch.zeros(count, classes, self.supports, weight.shape[1], dtype=torch.float32, device=device)
        entropy = torch.full(features.shape[:3], self._empty, dtype=torch.float32, device=device)
        self.state = {"features": features, "entropy": entropy}
        with torch.no_grad():
            logits, wanted = linear(linear.weight).float(), torch.ones(count, classes, dtype=torch.bool, device=device)
            self._add(weight.expand(count, -1, -1), logits.expand(count, -1, -1), wanted)

    def total(self, images: Tensor, draws: Draws, weights: Tensor) -> Tensor:
        features, logits = self.later(self._embed, images).result()  # and what started before it has finished
        self._add(features, logits, weights > 0)
        return (measure_entropy(logits) * weights).sum()

    def descend(self, descend: Callable[..., None], loss: Callable[[], Tensor]) -> None:
        loss()

    def observe(self, images: Tensor) -> Observation:
        features, own = self._embed(images)
        prototypes = F.normalize(F.normalize(self.state["features"], dim=-1).sum(2), dim=-1)  # (S, K, D)
        logits = features @ prototypes.transpose(1, 2)
        return Observation(logits, measure_entropy(own), logits.softmax(-1).amax(-1))

    def _add(self, features: Tensor, logits: Tensor, wanted: Tensor) -> None:
        """Add the wanted features `(S, B, D)` to the supports, of which the most certain remain."""
        stored, entropy = self.state["features"], self.state["entropy"]
        classes, most = entropy.shape[1:]
        is_predicted = F.one_hot(logits.argmax(-1), classes).bool().transpose(1, 2)  # (S, K, B)
        offered = torch.where(is_predicted & wanted.unsqueeze(1), measure_entropy(logits).unsqueeze(1), self._empty)
        least, chosen = torch.cat([entropy, offered], 2).topk(most, dim=2, largest=False)
        # Indices into the supports of all classes, followed by the new features.
        first = torch.arange(classes, device=features.device).unsqueeze(1) * most
        index = torch.where(chosen < most, chosen + first, chosen + (classes - 1) * most).flatten(1)
        everything = torch.cat([stored.flatten(1, 2), features], 1)
        found = everything.gather(1, index.unsqueeze(-1).expand(-1, -1, features.shape[-1])).view_as(stored)
        stored.copy_(torch.where((least < self._empty).unsqueeze(-1), found, 0))
        entropy.copy_(least)

    def _embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the last linear layer `(S, B, D)`, averaged over tokens, and the logits `(S, B, K)`."""
        seen: list[Tensor] = []
        with watch(self._layers, lambda name, layer, x, output: seen.append(x)):
            logits = self.replicas(images).float()
        features = torch.cat(seen).float()
        return features.reshape(*images.shape[:2], -1, features.shape[-1]).mean(2), logits

    @torch.no_grad()
    def _find_last(self, example: Tensor) -> tuple[str, nn.Module]:
        """Return the linear layer that runs last, and its name."""
        layers, ran = list_layers(self.replicas, (Linear, nn.Linear)), [""]
        with watch(layers, lambda name, layer, x, output: ran.append(name)):
            self.replicas(example.expand(self.replicas.count, *example.shape))
        if not ran[-1]:
            raise ValueError("The network has no linear layer, whose inputs the method needs.")
        return ran[-1], layers[ran[-1]]
