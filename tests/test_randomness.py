"""Randomness: the hash against whole numbers in plain Python, and the numbers against their distributions."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from testtime.randomness import Draws

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
INT64 = st.integers(-(2**63), 2**63 - 1)


def mix(state: int) -> int:
    """SplitMix64's finaliser on unsigned 64-bit numbers, as published."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def key(seed: int, sample: int, *folds: int) -> int:
    state = mix((sample * GOLDEN + seed * 0x2545F4914F6CDD1D + 1) & MASK)
    for number in folds:
        state = mix((state + mix((number + 1) * GOLDEN & MASK)) & MASK)
    return state


def chi_square_limit(freedom: int) -> float:
    """The value that chance exceeds once in ten thousand, by Wilson and Hilferty's formula."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


def chi_square(counts: Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])


@given(INT64, INT64, INT64, st.integers(0, 40))
def test_keys_and_numbers_are_the_published_hash(seed: int, sample: int, step: int, copy: int) -> None:
    draws = Draws.of(seed, torch.tensor([sample])).fold(step).copies(copy + 1)
    expected = key(seed, sample, step, copy)
    assert int(draws.keys[0, copy]) & MASK == expected
    bits = [mix((expected + n * GOLDEN) & MASK) for n in (1, 2, 3)]
    assert draws.integers(1000, 3)[0, copy].tolist() == [(b >> 33) * 1000 >> 31 for b in bits]
    assert draws.uniform(3)[0, copy].tolist() == [(b >> 40) / 2**24 for b in bits]


def test_a_purpose_is_a_fold_of_its_name() -> None:
    draws = Draws.of(3, torch.arange(4))
    assert torch.equal(draws.purpose("crop").keys, draws.fold(zlib.crc32(b"crop") + 2**40).keys)


@pytest.mark.parametrize("kind", ["integers", "uniform", "normal"])
def test_numbers_depend_on_their_key_alone(kind: str) -> None:
    def numbers(samples: Tensor) -> Tensor:
        draws = Draws.of(7, samples).fold(2).copies(3).purpose("test")
        return draws.integers(50, 4, 5) if kind == "integers" else getattr(draws, kind)(4, 5)

    samples = torch.tensor([5, -3, 10**12, 0, 8, 5])
    together = numbers(samples)
    assert together.shape == (6, 3, 4, 5)
    assert torch.equal(together[0], together[5])  # the same sample twice
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    assert torch.equal(numbers(samples[order]), together[order])
    for place in range(6):
        assert torch.equal(numbers(samples[place : place + 1])[0], together[place])
    assert torch.equal(numbers(samples.view(2, 3)).flatten(0, 1), together)


def test_drawing_changes_nothing_and_global_seeds_do_not_matter() -> None:
    draws = Draws.of(0, torch.arange(5))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draws.normal(7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    draws.uniform(100)
    assert torch.equal(draws.normal(7), first)


def test_more_numbers_begin_with_the_same_ones() -> None:
    draws = Draws.of(0, torch.arange(5))
    assert torch.equal(draws.uniform(100)[:, :30], draws.uniform(30))
    assert torch.equal(draws.normal(101)[:, :30], draws.normal(30))


def test_every_part_of_the_key_matters() -> None:
    keys = [
        Draws.of(seed, torch.tensor([sample])).fold(step).copies(3).purpose(name).keys[0, copy]
        for seed in (0, 1)
        for sample in (0, 1)
        for step in (0, 1)
        for copy in (0, 1, 2)
        for name in ("crop", "flip", "rotation", "box", "place")
    ]
    assert len({int(key) for key in keys}) == 2 * 2 * 2 * 3 * 5


def test_neighbouring_keys_never_share_a_stream() -> None:
    """100,000 combinations of 10 seeds, 100 samples, 10 steps and 10 copies; samples and seeds may be negative."""
    streams = torch.cat(
        [
            Draws.of(seed, torch.arange(-50, 50)).fold(step).copies(10).purpose("crop").keys.flatten()
            for seed in range(-5, 5)
            for step in range(10)
        ]
    )
    assert len(streams) == 100_000
    assert len(streams.unique()) == 100_000
    # Their first numbers are on a grid of 2²⁴ values; chance alone leaves about 298 pairs.
    first = Draws(streams).uniform(1)
    assert 100_000 - 298 - 100 < len(first.unique()) < 100_000 - 298 + 100


@pytest.mark.parametrize("high", [2, 3, 4, 9, 10, 100])
def test_integers_are_uniform(high: int) -> None:
    """Over keys (one number of each) and within streams (many numbers of few)."""
    for numbers in (
        Draws.of(11, torch.arange(60_000)).integers(high),
        Draws.of(12, torch.arange(6)).integers(high, 10_000),
        Draws.of(13, torch.arange(60)).fold(3).copies(1000).purpose("crop").integers(high),
    ):
        assert chi_square(numbers.flatten().bincount(minlength=high)) < chi_square_limit(high - 1)


def test_uniforms_are_uniform() -> None:
    for numbers in (Draws.of(1, torch.arange(100_000)).uniform(), Draws.of(2, torch.arange(10)).uniform(10_000)):
        assert float(numbers.min()) >= 0
        assert float(numbers.max()) < 1
        for bins in (10, 256):
            counts = (numbers.flatten() * bins).long().bincount(minlength=bins)
            assert chi_square(counts) < chi_square_limit(bins - 1)


@pytest.mark.parametrize("across", ["keys", "numbers"])
def test_normals_are_normal(across: str) -> None:
    draws = Draws.of(5, torch.arange(100_000)) if across == "keys" else Draws.of(5, torch.arange(10))
    numbers = (draws.normal() if across == "keys" else draws.normal(10_000)).flatten().double()
    n = len(numbers)
    assert n == 100_000
    # Bounds are four standard errors of each moment of a normal sample.
    assert abs(numbers.mean()) < 4 / math.sqrt(n)
    assert abs((numbers**2).mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs((numbers**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((numbers**4).mean() - 3) < 4 * math.sqrt(96 / n)
    # Kolmogorov and Smirnov: the largest gap to the distribution; 1.95 / √n is exceeded once in a thousand times.
    distribution = 0.5 * (1 + torch.erf(numbers.sort().values / math.sqrt(2)))
    steps = torch.arange(n + 1).double() / n
    gap = torch.maximum((steps[1:] - distribution).abs(), (distribution - steps[:-1]).abs()).max()
    assert gap < 1.95 / math.sqrt(n)


SHIFTS: dict[str, Callable[[Draws], Draws]] = {
    "next sample": lambda draws: Draws.of(0, torch.arange(1, 20_001)),
    "next seed": lambda draws: Draws.of(1, torch.arange(20_000)),
    "a step": lambda draws: draws.fold(0),
    "a purpose": lambda draws: draws.purpose("crop"),
}


@pytest.mark.parametrize("shift", list(SHIFTS))
def test_neighbouring_streams_are_unrelated(shift: str) -> None:
    base = Draws.of(0, torch.arange(20_000))
    other = SHIFTS[shift](base)
    bound = 4 / math.sqrt(20_000)
    assert abs(correlation(base.uniform(), other.uniform())) < bound
    assert abs(correlation(base.normal(), other.normal())) < bound
    assert abs(correlation(base.uniform(2)[:, 1], other.uniform())) < bound


def test_steps_copies_and_purposes_of_a_sample_are_unrelated() -> None:
    base = Draws.of(0, torch.arange(20_000))
    bound = 4 / math.sqrt(20_000)
    columns = [base.fold(step).uniform() for step in range(4)]
    columns += list(base.fold(0).copies(4).uniform().unbind(1))
    columns += [base.purpose(name).uniform() for name in ("crop", "flip", "rotation", "box", "place")]
    related = torch.corrcoef(torch.stack(columns).double()) - torch.eye(len(columns))
    assert related.abs().max() < bound


def test_numbers_of_one_stream_are_unrelated() -> None:
    for numbers in (Draws.of(3, torch.arange(2)).uniform(20_001), Draws.of(3, torch.arange(2)).normal(20_001)):
        for lag in (1, 2, 3):  # both numbers of a Box-Muller pair among them
            assert abs(correlation(numbers[:, :-lag], numbers[:, lag:])) < 4 / math.sqrt(40_000)


@given(INT64, st.integers(1, 2**31), st.integers(0, 3))
def test_integers_stay_in_range_for_any_high(sample: int, high: int, step: int) -> None:
    numbers = Draws.of(0, torch.tensor(sample)).fold(step).integers(high, 50)
    assert numbers.dtype == torch.int64
    assert int(numbers.min()) >= 0
    assert int(numbers.max()) < high


@given(st.lists(st.integers(1, 2**31), min_size=1, max_size=20))
def test_high_may_differ_for_each_key(highs: list[int]) -> None:
    draws = Draws.of(4, torch.arange(len(highs)))
    together = draws.integers(torch.tensor(highs))
    assert together.tolist() == [int(Draws(draws.keys[n : n + 1]).integers(high)) for n, high in enumerate(highs)]
    assert all(0 <= number < high for number, high in zip(together.tolist(), highs, strict=True))


def test_the_ends_of_a_range_are_reached() -> None:
    numbers = Draws.of(0, torch.arange(2000)).integers(2**31)
    assert int(numbers.min()) < 2**31 * 0.01
    assert int(numbers.max()) > 2**31 * 0.99
    assert Draws.of(0, torch.arange(100)).integers(1).tolist() == [0] * 100


def test_the_extremes_of_the_hash_give_finite_normals_and_uniforms_below_one() -> None:
    """Every pattern of the bits that are read, at its ends: all zeros and all ones."""

    class Extreme(Draws):
        def _bits(self, *shape: int) -> Tensor:
            return self.keys.unsqueeze(-1).expand(*self.keys.shape, math.prod(shape)).reshape(*self.keys.shape, *shape)

    draws = Extreme(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert draws.uniform().max() < 1
    assert draws.uniform().min() == 0
    assert draws.normal(2).isfinite().all()
    assert draws.normal(2).abs().max() < 6.2  # √(-2 ln 2⁻²⁵)·…
    assert draws.integers(2**31).tolist() == [0, 2**31 - 1, 2**30 - 1, 2**30]


@given(st.integers(-(2**70), 2**70))
def test_seeds_count_by_their_low_64_bits(seed: int) -> None:
    samples = torch.arange(3)
    assert torch.equal(Draws.of(seed, samples).keys, Draws.of(seed + 2**64, samples).keys)
    assert not torch.equal(Draws.of(seed, samples).keys, Draws.of(seed + 1, samples).keys)


@given(st.lists(st.integers(0, 4), max_size=3))
def test_shapes_are_keys_then_what_was_asked(shape: list[int]) -> None:
    draws = Draws.of(0, torch.zeros(2, 3, dtype=torch.int32))
    for numbers in (draws.integers(5, *shape), draws.uniform(*shape), draws.normal(*shape)):
        assert numbers.shape == (2, 3, *shape)
    assert draws.copies(4).keys.shape == (2, 3, 4)
    assert torch.equal(draws.copies(4).flatten().keys, draws.copies(4).keys.view(-1))


def test_a_single_key_without_axes_gives_a_single_number() -> None:
    key, keys = Draws.of(0, torch.tensor(5)), Draws.of(0, torch.tensor([5]))
    assert torch.equal(key.uniform(), keys.uniform()[0])
    assert torch.equal(key.integers(9), keys.integers(9)[0])
    assert torch.equal(key.normal(), keys.normal()[0])
