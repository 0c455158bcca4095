"""Stateless randomness: a random number depends on its purpose, not on earlier draws.

Every draw is a hash of (seed, sample index, step, copy, purpose). There is no generator state, so an image's
augmentations are the same alone or in a batch, on CPU or GPU, in one process or sixteen, before or after a resume.
`Draws` holds one 64-bit key per random stream; `fold` derives new keys, and `integers`, `uniform` and `normal` draw
numbers.

    draws = Draws.of(seed=0, samples=torch.arange(8))     # one key per image
    draws = draws.fold(step).copies(32)                   # (8, 32): one per augmented copy
    left = draws.purpose("crop").integers(9)              # (8, 32), in 0..8

The hash is SplitMix64 (Steele, Lea & Flood 2014): a counter times the golden ratio, then Stafford's 13th finaliser.
Integers and uniforms are bit-identical on every device; normals use log and cosine and agree up to rounding.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from testtime import kernels


def _signed(value: int) -> int:
    """Reinterpret an unsigned 64-bit integer as two's-complement int64 (torch has no shifts on uint64)."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_LOW31 = (1 << 31) - 1
_ALL = (1 << 64) - 1


def _xor_shift(state: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask turns that into the logical shift of the hash.
    return state ^ ((state >> bits) & ((1 << (64 - bits)) - 1))


def _mix(state: Tensor, factor: int = 1, plus: int = 0) -> Tensor:
    """Hash `state * factor + plus`, int64, elementwise."""
    mixed = kernels.take_over("mix", state, factor, plus)
    if mixed is not None:
        return mixed
    state = state + plus if factor == 1 else state * factor + plus
    state = _xor_shift(state, 30) * _FIRST
    state = _xor_shift(state, 27) * _SECOND
    return _xor_shift(state, 31)


def _mix_one(state: int) -> int:
    """`_mix` of a plain integer."""
    state &= _ALL
    for bits, factor in ((30, _FIRST), (27, _SECOND)):
        state = ((state ^ (state >> bits)) * factor) & _ALL
    return _signed(state ^ (state >> 31))


def purpose_word(name: str) -> int:
    """Return the integer that is added to a key for a named purpose, before hashing."""
    return _mix_one((zlib.crc32(name.encode()) + (1 << 40) + 1) * GOLDEN)


@dataclass(frozen=True)
class Draws:
    """A tensor of independent random streams, one per key.

    Attributes:
        keys: int64 of any shape, which leads the shape of every draw.
    """

    keys: Tensor

    @staticmethod
    def of(seed: int, samples: Tensor) -> Draws:
        """Make one stream per sample index.

        Args:
            seed: Any integer; only its low 64 bits are used.
            samples: Integer tensor of any shape; numbers are drawn on its device.
        """
        return Draws(_mix(samples.to(torch.int64), GOLDEN, _signed(int(seed) * 0x2545F4914F6CDD1D + 1)))

    def fold(self, number: int | Tensor) -> Draws:
        """Derive streams that also depend on `number` (a step, a copy); a tensor broadcasts against the keys."""
        if isinstance(number, int):
            return Draws(_mix(self.keys, plus=_mix_one((number + 1) * GOLDEN)))
        return Draws(_mix(self.keys + _mix(number.to(torch.int64), GOLDEN, GOLDEN)))  # (number + 1) · GOLDEN

    def purpose(self, name: str) -> Draws:
        """Derive streams for a named purpose, so that no two uses of a key share numbers."""
        return Draws(_mix(self.keys, plus=purpose_word(name)))

    def copies(self, count: int) -> Draws:
        """Derive `count` streams from each, along a new last axis."""
        return Draws(self.keys.unsqueeze(-1)).fold(torch.arange(count, device=self.keys.device))

    def flatten(self) -> Draws:
        """Flatten the keys to one axis."""
        return Draws(self.keys.flatten())

    def _bits(self, *shape: int) -> Tensor:
        """Draw 64 random bits per element, `(*keys.shape, *shape)`."""
        count = math.prod(shape)
        counter = torch.arange(1, count + 1, device=self.keys.device) * GOLDEN
        return _mix(self.keys.unsqueeze(-1) + counter).view((*self.keys.shape, *shape))

    def integers(self, high: int | Tensor, *shape: int) -> Tensor:
        """Draw integers in 0..high-1, int64 `(*keys.shape, *shape)`; `high` is at most 2³¹, a tensor broadcasts."""
        return (((self._bits(*shape) >> 33) & _LOW31) * high) >> 31

    def uniform(self, *shape: int) -> Tensor:
        """Draw multiples of 2⁻²⁴ in [0, 1), float32 `(*keys.shape, *shape)`."""
        return ((self._bits(*shape) >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normals by the Box-Muller transform, float32 `(*keys.shape, *shape)`."""
        count = math.prod(shape)
        bits = self._bits((count + 1) // 2)  # one hash yields a pair
        radius = (((bits >> 40) & 0xFFFFFF).to(torch.float32) + 0.5) * 2.0**-24
        radius = radius.log_().mul_(-2).sqrt_()
        angle = ((bits >> 8) & 0xFFFFFF).to(torch.float32) * (2 * math.pi * 2.0**-24)
        pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
        return pairs.flatten(-2)[..., :count].reshape((*self.keys.shape, *shape))
