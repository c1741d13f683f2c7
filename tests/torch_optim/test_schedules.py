"""The schedules against PyTorch's schedulers, which run beside them."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import schedule_twins as twins
import torch
from torch.optim import lr_scheduler

from funcgrad.torch_optim import schedules


def check(recipes, base=twins.BASE):
    """Compare all rates traced, and those of the first two recipes of each kind outside jit too."""
    made = [twins.our_schedule(recipe, base) for recipe in recipes]
    counts, seen = jnp.arange(twins.STEPS, dtype=jnp.int32), collections.Counter()
    traced = jax.jit(lambda counts: [jax.vmap(schedule)(counts) for schedule in made])(counts)
    for recipe, schedule, rates in zip(recipes, made, traced, strict=True):
        want, momenta = twins.torch_run(recipe)
        assert rates.dtype == jnp.float64
        assert twins.difference(rates, want) <= twins.FLOAT64_TOLERANCE, recipe
        seen[recipe[0]] += 1
        if seen[recipe[0]] <= 2:
            assert twins.difference(jax.vmap(schedule)(counts), want) <= twins.FLOAT64_TOLERANCE, recipe
            assert (
                twins.difference([schedule(count) for count in twins.SOME], want[list(twins.SOME)]) <= twins.FLOAT64_TOLERANCE
            ), recipe
        if schedule.momentum is not None:
            assert twins.difference(jax.vmap(schedule.momentum)(counts), momenta) <= twins.FLOAT64_TOLERANCE, recipe


def test_rates_of_plain_schedules(x64):
    check(twins.PLAIN)


def test_rates_and_momenta_of_cyclic_schedules(x64):
    check(twins.CYCLIC)


def test_rates_of_chains(x64):
    check([("chain", parts) for parts in twins.CHAINS])


def test_rates_of_sequences(x64):
    check([("sequence", *parts) for parts in twins.SEQUENCES])


def test_rates_of_schedules_within_each_other(x64):
    one_cycle = twins.entry("one_cycle_lr", max_lr=twins.HIGHER * 25, total_steps=500)
    chain = ("chain", [twins.WARMUP, twins.EXPONENTIAL, twins.POLYNOMIAL, twins.COSINE_MIN, twins.FACTORS])
    sequence = ("sequence", [twins.WARMUP, twins.EXPONENTIAL, twins.FACTORS], [20, 90])
    check(
        [
            ("sequence", [chain, twins.COSINE], [30]),
            ("sequence", [("chain", [twins.EXPONENTIAL, twins.FUNCTION]), twins.FACTORS], [30]),
            ("chain", [sequence, twins.EXPONENTIAL]),
            ("chain", [twins.EXPONENTIAL, sequence]),
            ("chain", [("chain", [twins.WARMUP, twins.STEP]), twins.EXPONENTIAL]),
            # A cyclic schedule inside sets the base rate of what is outside, too.
            ("sequence", [("chain", [twins.EXPONENTIAL, one_cycle]), twins.HIGHER_STEP], [30]),
            ("sequence", [("chain", [twins.HIGHER_CYCLE, twins.HIGHER_STEP]), twins.HIGHER_STEP], [30]),
            ("chain", [("sequence", [one_cycle, twins.HIGHER_STEP], [30]), twins.HIGHER_STEP]),
        ]
    )


def test_float32_without_x64():
    recipes = [
        *twins.PLAIN,
        *twins.CYCLIC,
        *(("chain", parts) for parts in twins.CHAINS[:3]),
        *(("sequence", *parts) for parts in twins.SEQUENCES[:3]),
    ]
    made = [twins.our_schedule(recipe) for recipe in recipes]
    traced = jax.jit(lambda counts: [jax.vmap(schedule)(counts) for schedule in made])(jnp.arange(twins.STEPS))
    for recipe, rates in zip(recipes, traced, strict=True):
        want = twins.torch_run(recipe)[0]
        near = np.abs(want) >= 1e-6 * np.max(np.abs(want))
        assert rates.dtype == jnp.float32
        assert twins.difference(np.asarray(rates)[near], want[near]) <= twins.FLOAT32_TOLERANCE, recipe


def test_after_the_cycle_the_last_rate_stays(x64):
    schedule = schedules.one_cycle_lr(0.1, total_steps=20, anneal_strategy="linear")
    assert schedule.momentum is not None
    rates, _ = twins.torch_run(("OneCycleLR", "", {"max_lr": 0.1, "total_steps": 20, "anneal_strategy": "linear"}), steps=21)
    assert twins.difference([schedule(20)], rates[20:]) <= twins.FLOAT64_TOLERANCE
    assert [float(schedule(count)) for count in (21, 10**6)] == [0.1 / 25 / 1e4] * 2
    assert float(schedule.momentum(21)) == 0.95


def test_no_momentum_where_none_is_cycled():
    assert schedules.cyclic_lr(0.1, 0.2, cycle_momentum=False).momentum is None
    assert schedules.one_cycle_lr(0.1, 10, cycle_momentum=False).momentum is None


def test_sgd_with_a_schedule(x64):
    gradients = np.random.default_rng(0).normal(size=(60, 3))
    weight = torch.ones(3, dtype=torch.float64)
    theirs = torch.optim.SGD([weight], lr=twins.BASE, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(theirs, max_lr=0.1, total_steps=60)
    schedule = schedules.one_cycle_lr(0.1, total_steps=60)
    ours = optax.inject_hyperparams(optax.sgd)(schedule, momentum=schedule.momentum)
    params = jnp.ones(3)
    state = ours.init(params)
    update = jax.jit(ours.update)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        theirs.step()
        scheduler.step()
        updates, state = update(jnp.asarray(gradient), state, params)
        params = optax.apply_updates(params, updates)
    assert twins.difference(params, weight.numpy()) <= twins.FLOAT64_TOLERANCE

    plain = optax.sgd(schedules.step_lr(0.5, 1, gamma=0.5))
    state = plain.init(params)
    for rate in (0.5, 0.25):
        updates, state = plain.update(jnp.ones(3), state)
        np.testing.assert_array_equal(updates, -rate * np.ones(3))


# What PyTorch refuses in a constructor.
REFUSED = [
    ("ConstantLR", "constant_lr", {"factor": 1.1}, "factor must be between 0 and 1; got 1.1"),
    ("ConstantLR", "constant_lr", {"factor": -0.1}, "factor must be between 0 and 1; got -0.1"),
    ("LinearLR", "linear_lr", {"start_factor": 0.0}, "start_factor must be above 0"),
    ("LinearLR", "linear_lr", {"start_factor": 1.1}, "start_factor must be above 0"),
    ("LinearLR", "linear_lr", {"end_factor": 1.1}, "end_factor must be between 0 and 1"),
    ("LinearLR", "linear_lr", {"end_factor": -0.1}, "end_factor must be between 0 and 1"),
    ("CosineAnnealingWarmRestarts", "cosine_annealing_warm_restarts", {"T_0": 0}, "T_0 must be a positive integer"),
    ("CosineAnnealingWarmRestarts", "cosine_annealing_warm_restarts", {"T_0": 1.0}, "T_0 must be a positive integer"),
    ("CosineAnnealingWarmRestarts", "cosine_annealing_warm_restarts", {"T_0": 1, "T_mult": 0}, "T_mult must be an integer"),
    ("CosineAnnealingWarmRestarts", "cosine_annealing_warm_restarts", {"T_0": 1, "T_mult": 1.5}, "T_mult must be an integer"),
    ("CosineAnnealingWarmRestarts", "cosine_annealing_warm_restarts", {"T_0": 1, "eta_min": "0"}, "eta_min must be a number"),
    ("CyclicLR", "cyclic_lr", {"base_lr": 0.1, "max_lr": 0.2, "mode": "square"}, "mode must be one of 'triangular'"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1}, "needs total_steps, or both"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "epochs": 1}, "needs total_steps, or both"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 0}, "total_steps must be a positive integer"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 1.5}, "total_steps must be a positive integer"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "epochs": 0, "steps_per_epoch": 1}, "epochs must be a positive"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "epochs": 1, "steps_per_epoch": 0}, "steps_per_epoch must be a positive"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 9, "pct_start": 1.5}, "pct_start must be a float"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 9, "pct_start": 1}, "pct_start must be a float"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 9, "anneal_strategy": "sin"}, "must be 'cos' or 'linear'"),
    ("ReduceLROnPlateau", "reduce_lr_on_plateau", {"factor": 1.0}, "factor must be below 1"),
    ("ReduceLROnPlateau", "reduce_lr_on_plateau", {"mode": "up"}, "mode must be 'min' or 'max'"),
    ("ReduceLROnPlateau", "reduce_lr_on_plateau", {"threshold_mode": "up"}, "threshold_mode must be 'rel' or 'abs'"),
]


@pytest.mark.parametrize(("theirs", "ours", "arguments", "message"), REFUSED)
def test_refused_as_in_torch(theirs, ours, arguments, message):
    with pytest.raises(ValueError):  # noqa: PT011 - PyTorch's text
        twins.torch_scheduler((theirs, ours, arguments))
    with pytest.raises(ValueError, match=message):
        twins.our_schedule((theirs, ours, arguments))


# Where PyTorch's constructor or its first steps divide by zero, or fail in another way.
DIVIDING = [
    ("StepLR", "step_lr", {"step_size": 0}, "step_size must not be 0"),
    ("CosineAnnealingLR", "cosine_annealing_lr", {"T_max": 0}, "T_max must not be 0"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 10, "pct_start": 0.1}, "must not be 1"),
]


@pytest.mark.parametrize(("theirs", "ours", "arguments", "message"), DIVIDING)
def test_refused_where_torch_divides_by_zero(theirs, ours, arguments, message):
    with pytest.raises(ZeroDivisionError):
        twins.torch_run((theirs, ours, arguments), steps=2)
    with pytest.raises(ValueError, match=message):
        twins.our_schedule((theirs, ours, arguments))


def test_refused_types():
    with pytest.raises(TypeError, match="lr_lambda must be a function of the count; got float"):
        schedules.multiplicative_lr(0.1, 0.5)
    with pytest.raises(TypeError, match="lr_lambda must be a function of the count; got list"):
        schedules.lambda_lr(0.1, [])
    with pytest.raises(TypeError, match=r"step_size must be an integer; got 2\.5"):
        schedules.step_lr(0.1, 2.5)
    with pytest.raises(TypeError, match="count must be an integer; got float32"):
        schedules.step_lr(0.1, 2)(1.0)


def test_joined_schedules_made_while_a_computation_is_traced():
    @jax.jit
    def rate(base, count):
        plain = schedules.sequential_lr(0.1, [schedules.linear_lr(0.1), schedules.step_lr(0.1, 3)], [4])
        traced = schedules.chained_scheduler(base, [schedules.linear_lr(base), schedules.step_lr(base, 3)])
        return plain(count), traced(count)

    step = schedules.step_lr(0.1, 3)
    assert rate(0.1, 5)[0] == schedules.sequential_lr(0.1, [schedules.linear_lr(0.1), step], [4])(5)
    np.testing.assert_allclose(
        rate(0.1, 5)[1], schedules.chained_scheduler(0.1, [schedules.linear_lr(0.1), step])(5), rtol=1e-6
    )
    mixed = schedules.chained_scheduler(0.1, [schedules.step_lr(jnp.float32(0.1), 3)])
    assert mixed(0) == jnp.float32(0.1)


def test_refused_in_joined_schedules():
    step = schedules.step_lr(0.1, 2)
    with pytest.raises(ValueError, match="sequential_lr needs at least one schedule; got none"):
        schedules.sequential_lr(0.1, [], [])
    with pytest.raises(ValueError, match="chained_scheduler needs at least one schedule; got none"):
        schedules.chained_scheduler(0.1, [])
    with pytest.raises(ValueError, match="got 1 schedules and 1 milestones"):
        schedules.sequential_lr(0.1, [step], [3])
    with pytest.raises(ValueError, match=r"milestones in order; got \[3, 2\]"):
        schedules.sequential_lr(0.1, [step] * 3, [3, 2])
    with pytest.raises(TypeError, match="got function at index 1"):
        schedules.chained_scheduler(0.1, [step, optax.constant_schedule(0.1)])
    with pytest.raises(ValueError, match=r"takes no transformation, such as reduce_lr_on_plateau.* at index 0"):
        schedules.chained_scheduler(0.1, [schedules.reduce_lr_on_plateau(0.1)])
    with pytest.raises(ValueError, match=r"one base rate.*; got 0.2 at index 1 and 0.1 before"):
        schedules.chained_scheduler(0.1, [step, schedules.step_lr(0.2, 2)])
    with pytest.raises(ValueError, match=r"one base rate"):
        schedules.chained_scheduler(0.1, [step, schedules.step_lr(jnp.array(0.2), 2)])
    cycle = schedules.chained_scheduler(0.1, [schedules.one_cycle_lr(5.0, 10)])
    with pytest.raises(ValueError, match=r"one base rate.*; got 0.1 at index 1 and 0.2 before"):
        schedules.sequential_lr(0.1, [cycle, step], [10])
    chain = schedules.chained_scheduler(0.1, [step])
    for parts in ([step, chain], [schedules.sequential_lr(0.1, [step], []), step]):
        with pytest.raises(ValueError, match="a chain in the first place only, and no sequence"):
            schedules.sequential_lr(0.1, parts, [3])
