"""The paper's theory: each statement as a property of random instances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from testtime.diagnosis.theory import Logistic, TwoLayerLinear, guaranteed_gain, theorem_rate

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(1, 6)
SHARES = st.floats(1e-3, 1.0)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_toy(seed: int, hidden: int, inputs: int) -> tuple[TwoLayerLinear, Tensor, float, float]:
    """A model, an input and its two labels; those whose numbers are too small to compare are passed over."""
    drawn = numbers(seed, hidden * inputs + 2 * hidden + inputs + 2)
    shared, heads, x, labels = drawn.split([hidden * inputs, 2 * hidden, inputs, 2])
    model = TwoLayerLinear(shared.view(hidden, inputs), heads[:hidden], heads[hidden:])
    main_label, task_label = labels.tolist()
    factors = (
        model.main_residual(x, main_label),
        model.task_residual(x, task_label),
        float(model.main @ model.task),
        float(x @ x),
    )
    assume(min(map(abs, factors)) > 1e-3)
    return model, x, main_label, task_label


@settings(deadline=None)
@given(SEEDS, SIZES, SIZES)
def test_the_toys_gradients_are_those_of_autograd(seed: int, hidden: int, inputs: int) -> None:
    model, x, main_label, task_label = make_toy(seed, hidden, inputs)
    shared = model.shared.clone().requires_grad_()
    (main,) = torch.autograd.grad((main_label - model.main @ shared @ x) ** 2 / 2, shared)
    (task,) = torch.autograd.grad((task_label - model.task @ shared @ x) ** 2 / 2, shared)
    torch.testing.assert_close(model.main_gradient(x, main_label), main)
    torch.testing.assert_close(model.task_gradient(x, task_label), task)


@settings(deadline=None)
@given(SEEDS, SIZES, SIZES)
def test_the_best_rate_brings_the_main_loss_to_zero(seed: int, hidden: int, inputs: int) -> None:
    model, x, main_label, task_label = make_toy(seed, hidden, inputs)
    adapted = model.adapt(x, task_label, model.best_rate(x, main_label, task_label))
    assert model.main_loss(x, main_label) > 0
    size = abs(main_label) + float(adapted.main.norm() * adapted.shared.norm() * x.norm())  # what is rounded
    assert abs(adapted.main_residual(x, main_label)) <= 1e-13 * size


@settings(deadline=None)
@given(SEEDS, SIZES, SIZES, SHARES, SHARES)
def test_lemma_1_every_rate_up_to_the_best_one_helps(
    seed: int, hidden: int, inputs: int, lower: float, part: float
) -> None:
    model, x, main_label, task_label = make_toy(seed, hidden, inputs)
    best = model.best_rate(x, main_label, task_label)
    if best < 0:  # the label on the other side of the prediction turns the sign, and keeps the size
        task_label -= 2 * model.task_residual(x, task_label)
        best = model.best_rate(x, main_label, task_label)
    epsilon = best * lower  # any ε with η* in [ε, ∞)
    rate = epsilon * part  # any η in (0, ε]
    after = model.adapt(x, task_label, rate).main_loss(x, main_label)
    before = model.main_loss(x, main_label)
    assert after < before
    assert after <= (1 - rate / best) * before * (1 + 1e-9) + 1e-15  # the bound in the lemma's proof


@settings(deadline=None)
@given(SEEDS, SIZES, SIZES)
def test_lemma_2_the_best_rate_has_the_sign_of_the_inner_product(seed: int, hidden: int, inputs: int) -> None:
    model, x, main_label, task_label = make_toy(seed, hidden, inputs)
    inner = model.inner_product(x, main_label, task_label)
    assert math.copysign(1, model.best_rate(x, main_label, task_label)) == math.copysign(1, inner)


@settings(deadline=None)
@given(SEEDS, SIZES, SIZES, st.floats(1e-3, 10.0))
def test_gradients_that_disagree_make_every_step_of_the_toy_hurt(
    seed: int, hidden: int, inputs: int, rate: float
) -> None:
    model, x, main_label, task_label = make_toy(seed, hidden, inputs)
    if model.inner_product(x, main_label, task_label) > 0:
        task_label -= 2 * model.task_residual(x, task_label)
    assert model.inner_product(x, main_label, task_label) < 0
    assert model.adapt(x, task_label, rate).main_loss(x, main_label) > model.main_loss(x, main_label)


def make_losses(seed: int, size: int, scale: float) -> tuple[Logistic, Logistic, Tensor]:
    """A main task on x, a task of the same kind on a turned x, and parameters, all bounded by `scale`.

    The task turns its input half of the time and must say whether it did, as a rotation task would with two turns.
    """
    drawn = numbers(seed, 3 * size)
    x, theta = drawn[:size], drawn[size : 2 * size] * scale
    x = x * scale / x.norm().clamp(min=scale)
    turned = bool(drawn[-1] > 0)
    main = Logistic(x, 1 if drawn[-2] > 0 else -1)
    task = Logistic(x.flip(0) if turned else x, 1 if turned else -1)
    return main, task, theta


@settings(deadline=None)
@given(SEEDS, SIZES, st.floats(0.1, 3.0))
def test_logistic_losses_meet_the_theorems_assumptions(seed: int, size: int, scale: float) -> None:
    main, _, theta = make_losses(seed, size, scale)
    variable = theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.log1p(torch.exp(-main.label * (variable @ main.inputs))), variable)
    torch.testing.assert_close(main.gradient(theta), slope)
    other = theta + numbers(seed + 1, size)
    gap = float((other - theta).norm())
    assert float(main.gradient(theta).norm()) <= main.bound * (1 + 1e-12)
    change = float((main.gradient(other) - main.gradient(theta)).norm())
    assert change <= main.smoothness * gap * (1 + 1e-9)
    tangent = main.loss(theta) + float(main.gradient(theta) @ (other - theta))
    assert main.loss(other) >= tangent - 1e-12  # convex: above its tangents


@settings(deadline=None)
@given(SEEDS, SIZES, st.floats(0.1, 3.0), st.floats(0.05, 0.999))
def test_theorem_1(seed: int, size: int, scale: float, share: float) -> None:
    main, task, theta = make_losses(seed, size, scale)
    inner = float(main.gradient(theta) @ task.gradient(theta))
    assume(inner > 1e-4)
    epsilon = share * inner  # so that the inner product exceeds it
    bound = max(main.bound, task.bound)
    rate = theorem_rate(epsilon, main.smoothness, bound)
    gain = main.loss(theta) - main.loss(theta - rate * task.gradient(theta))
    assert gain > 0
    assert gain >= guaranteed_gain(epsilon, main.smoothness, bound) * (1 - 1e-6)


@settings(deadline=None)
@given(SEEDS, SIZES, st.floats(0.1, 3.0), st.floats(1e-3, 10.0))
def test_convex_losses_whose_gradients_disagree_get_worse(seed: int, size: int, scale: float, rate: float) -> None:
    main, task, theta = make_losses(seed, size, scale)
    inner = float(main.gradient(theta) @ task.gradient(theta))
    assume(inner < -1e-4)
    assert main.loss(theta - rate * task.gradient(theta)) > main.loss(theta)


def test_there_are_counterexamples_where_the_inner_product_is_negative() -> None:
    """Without its condition the theorem's conclusion fails: instances on which the step raises the main loss."""
    found = []
    for seed in range(200):
        main, task, theta = make_losses(seed, 4, 1.0)
        inner = float(main.gradient(theta) @ task.gradient(theta))
        rate = theorem_rate(0.1, main.smoothness, max(main.bound, task.bound))
        if main.loss(theta - rate * task.gradient(theta)) > main.loss(theta):
            found.append(inner)
    assert found
    assert max(found) < 0.1  # the theorem: none of them has an inner product above ε
    assert min(found) < 0


@pytest.mark.parametrize("arguments", [(0.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, 0.0), (math.nan, 1.0, 1.0)])
def test_a_rate_needs_positive_numbers(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive, got"):
        theorem_rate(*arguments)


def test_bad_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`task` must have shape \(2,\), got \(3,\)"):
        TwoLayerLinear(torch.ones(2, 3), torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="`shared` must be a matrix"):
        TwoLayerLinear(torch.ones(2), torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="`label` must be 1 or -1, got 0"):
        Logistic(torch.ones(2), 0)
    still = TwoLayerLinear(torch.eye(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="does not change the main prediction"):
        still.best_rate(torch.ones(2), 3.0, 3.0)
