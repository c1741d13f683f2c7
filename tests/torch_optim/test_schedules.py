"""The schedules against PyTorch's schedulers, which run beside them."""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.optim import lr_scheduler

from funcgrad.torch_optim import schedules

STEPS = 500
BASE = 0.05
FLOAT64_TOLERANCE = 1e-12
# Float32 has 24 bits, and a power of 500 takes some of them.
FLOAT32_TOLERANCE = 1e-5
# Counts at which a call outside jit, with a single count, is tried too.
SOME = (0, 6, 499)

# PyTorch's name, ours, and the arguments of both; those of a cyclic one begin with the rate that it sets.
PLAIN = [
    ("LambdaLR", "lambda_lr", {"lr_lambda": lambda count: 0.95**count}),
    ("LambdaLR", "lambda_lr", {"lr_lambda": lambda count: 1.0 / (1 + count // 30)}),
    ("MultiplicativeLR", "multiplicative_lr", {"lr_lambda": lambda count: 0.99}),
    ("MultiplicativeLR", "multiplicative_lr", {"lr_lambda": lambda count: 1 - 1 / (count + 9)}),
    ("StepLR", "step_lr", {"step_size": 30}),
    ("StepLR", "step_lr", {"step_size": 1, "gamma": 0.97}),
    ("StepLR", "step_lr", {"step_size": 7, "gamma": 1.01}),
    ("StepLR", "step_lr", {"step_size": 150, "gamma": -0.5}),
    ("MultiStepLR", "multi_step_lr", {"milestones": [30, 80, 81]}),
    ("MultiStepLR", "multi_step_lr", {"milestones": [100, 0, 30, 30], "gamma": 0.3}),
    ("MultiStepLR", "multi_step_lr", {"milestones": []}),
    ("ConstantLR", "constant_lr", {}),
    ("ConstantLR", "constant_lr", {"factor": 0.7, "total_iters": 30}),
    ("ConstantLR", "constant_lr", {"factor": 0.5, "total_iters": 0}),
    ("ConstantLR", "constant_lr", {"factor": 0.0, "total_iters": 1000}),
    ("LinearLR", "linear_lr", {}),
    ("LinearLR", "linear_lr", {"start_factor": 1e-3, "total_iters": 100}),
    ("LinearLR", "linear_lr", {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 400}),
    ("LinearLR", "linear_lr", {"start_factor": 0.5, "end_factor": 0.1, "total_iters": 0}),
    ("ExponentialLR", "exponential_lr", {"gamma": 0.95}),
    ("ExponentialLR", "exponential_lr", {"gamma": 1.005}),
    ("PolynomialLR", "polynomial_lr", {}),
    ("PolynomialLR", "polynomial_lr", {"total_iters": 400, "power": 0.9}),
    ("PolynomialLR", "polynomial_lr", {"total_iters": 100, "power": 3.0}),
    ("PolynomialLR", "polynomial_lr", {"total_iters": 100, "power": 0}),
    ("PolynomialLR", "polynomial_lr", {"total_iters": 0}),
    ("CosineAnnealingLR", "cosine_annealing_lr", {"T_max": 30}),
    ("CosineAnnealingLR", "cosine_annealing_lr", {"T_max": 1, "eta_min": 0.01}),
    ("CosineAnnealingLR", "cosine_annealing_lr", {"T_max": 7, "eta_min": 1e-4}),
    ("CosineAnnealingLR", "cosine_annealing_lr", {"T_max": 499, "eta_min": 1e-3}),
    ("CosineAnnealingLR", "cosine_annealing_lr", {"T_max": 200}),
    ("CosineAnnealingLR", "cosine_annealing_lr", {"T_max": -30, "eta_min": 0.1}),
    ("CosineAnnealingWarmRestarts", "cosine_annealing_warm_restarts", {"T_0": 30}),
    ("CosineAnnealingWarmRestarts", "cosine_annealing_warm_restarts", {"T_0": 1, "T_mult": 2, "eta_min": 1e-3}),
    ("CosineAnnealingWarmRestarts", "cosine_annealing_warm_restarts", {"T_0": 10, "T_mult": 3}),
]
CYCLIC = [
    ("CyclicLR", "cyclic_lr", {"base_lr": 0.001, "max_lr": 0.1}),
    ("CyclicLR", "cyclic_lr", {"base_lr": 0.0, "max_lr": 0.1, "step_size_up": 3, "mode": "triangular2"}),
    ("CyclicLR", "cyclic_lr", {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 20, "step_size_down": 7, "base_momentum": 0.6}),
    (
        "CyclicLR",
        "cyclic_lr",
        {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 25, "mode": "exp_range", "gamma": 0.99, "max_momentum": 0.99},
    ),
    (
        "CyclicLR",
        "cyclic_lr",
        {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 25, "scale_fn": lambda cycle: 1 / (5 ** (cycle * 0.1))},
    ),
    (
        "CyclicLR",
        "cyclic_lr",
        {
            "base_lr": 0.001,
            "max_lr": 0.1,
            "step_size_up": 2.5,
            "scale_fn": lambda count: 0.999**count,
            "scale_mode": "iterations",
        },
    ),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 500}),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "epochs": 50, "steps_per_epoch": 10, "anneal_strategy": "linear"}),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 500, "three_phase": True, "base_momentum": 0.7}),
    (
        "OneCycleLR",
        "one_cycle_lr",
        {"max_lr": 0.1, "total_steps": 600, "three_phase": True, "anneal_strategy": "linear", "pct_start": 0.45},
    ),
    (
        "OneCycleLR",
        "one_cycle_lr",
        {"max_lr": 0.1, "total_steps": 500, "pct_start": 0.0, "div_factor": 5.0, "max_momentum": 0.9},
    ),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 499, "pct_start": 0.25, "final_div_factor": 10.0}),
]


def entry(name, **arguments):
    return next((torchs, ours, arguments) for torchs, ours, _ in PLAIN + CYCLIC if ours == name)


STEP, EXPONENTIAL = entry("step_lr", step_size=30, gamma=0.5), entry("exponential_lr", gamma=0.99)
WARMUP, CONSTANT = entry("linear_lr", start_factor=0.1, total_iters=20), entry("constant_lr", total_iters=25)
COSINE, COSINE_MIN = entry("cosine_annealing_lr", T_max=60), entry("cosine_annealing_lr", T_max=60, eta_min=0.01)
POLYNOMIAL = entry("polynomial_lr", total_iters=450, power=2.0)
FUNCTION, FACTORS = (
    entry("lambda_lr", lr_lambda=lambda count: 0.98**count),
    entry("multiplicative_lr", lr_lambda=lambda count: 0.97),
)
RESTARTS = entry("cosine_annealing_warm_restarts", T_0=10, T_mult=2)
MILESTONES = entry("multi_step_lr", milestones=[0, 10, 40], gamma=0.4)
CYCLE = entry("cyclic_lr", base_lr=BASE, max_lr=0.1, step_size_up=11)
HIGHER_CYCLE = entry("cyclic_lr", base_lr=0.07, max_lr=0.1, step_size_up=11)
ONE_CYCLE = entry("one_cycle_lr", max_lr=BASE * 25, total_steps=500)

CHAINS = [
    [CONSTANT, EXPONENTIAL],
    [WARMUP, STEP, MILESTONES, POLYNOMIAL],
    [WARMUP, COSINE],
    [COSINE_MIN, EXPONENTIAL],
    [COSINE, COSINE_MIN, CONSTANT],
    [FACTORS, WARMUP],
    [EXPONENTIAL, FUNCTION, WARMUP],
    [RESTARTS, EXPONENTIAL, COSINE_MIN],
    [WARMUP, HIGHER_CYCLE],
    [CYCLE, EXPONENTIAL],
    [ONE_CYCLE, STEP],
    [EXPONENTIAL],
]
SEQUENCES = [
    ([CONSTANT, EXPONENTIAL], [20]),
    ([WARMUP, COSINE], [20]),
    ([WARMUP, COSINE_MIN, EXPONENTIAL], [20, 200]),
    ([EXPONENTIAL, FACTORS, WARMUP, FACTORS], [50, 100, 150]),
    ([COSINE, FACTORS, POLYNOMIAL], [60, 61]),
    ([WARMUP, RESTARTS, CYCLE, FUNCTION], [7, 80, 200]),
    ([CYCLE, MILESTONES, entry("constant_lr", total_iters=0), STEP], [30, 90, 95]),
    ([STEP, EXPONENTIAL, WARMUP], [0, 40]),
    ([STEP, EXPONENTIAL, FACTORS], [40, 40]),
    ([FACTORS, ONE_CYCLE], [3]),
    ([POLYNOMIAL], []),
]


def torch_scheduler(recipe):
    """A scheduler and its optimizer; a recipe is an entry, `("chain", parts)` or `("sequence", parts, milestones)`."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=BASE, momentum=0.9)

    def build(recipe):
        if recipe[0] == "chain":
            return lr_scheduler.ChainedScheduler([build(part) for part in recipe[1]], optimizer)
        if recipe[0] == "sequence":
            return lr_scheduler.SequentialLR(optimizer, [build(part) for part in recipe[1]], recipe[2])
        return getattr(lr_scheduler, recipe[0])(optimizer, **recipe[2])

    return build(recipe), optimizer


def our_schedule(recipe, base=BASE):
    if recipe[0] == "chain":
        return schedules.chained_scheduler(base, [our_schedule(part, base) for part in recipe[1]])
    if recipe[0] == "sequence":
        return schedules.sequential_lr(base, [our_schedule(part, base) for part in recipe[1]], recipe[2])
    own = recipe[1] in ("cyclic_lr", "one_cycle_lr")
    return getattr(schedules, recipe[1])(*([] if own else [base]), **recipe[2])


def torch_run(recipe, steps=STEPS):
    """The rates and momenta of the first steps, `[steps]` each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the order of calls: no optimizer steps here
        scheduler, optimizer = torch_scheduler(recipe)
        rates, momenta = [], []
        for step in range(steps):
            if step:
                scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            momenta.append(optimizer.param_groups[0]["momentum"])
    return np.array(rates), np.array(momenta)


def difference(got, want):
    """The largest relative difference; of rates that are only rounding, in parts of the largest rate."""
    got, want = np.asarray(got, np.float64), np.asarray(want)
    peak = np.max(np.abs(want))
    sizes = np.where(np.abs(want) > 1e-9 * peak, np.abs(want), peak or 1.0)
    assert got.shape == want.shape
    return np.max(np.abs(got - want) / sizes)


def check(recipes, base=BASE):
    """Compare all rates traced, and those of the first two recipes of each kind outside jit too."""
    made = [our_schedule(recipe, base) for recipe in recipes]
    counts, seen = jnp.arange(STEPS, dtype=jnp.int32), collections.Counter()
    traced = jax.jit(lambda counts: [jax.vmap(schedule)(counts) for schedule in made])(counts)
    for recipe, schedule, rates in zip(recipes, made, traced, strict=True):
        want, momenta = torch_run(recipe)
        assert rates.dtype == jnp.float64
        assert difference(rates, want) <= FLOAT64_TOLERANCE, recipe
        seen[recipe[0]] += 1
        if seen[recipe[0]] <= 2:
            assert difference(jax.vmap(schedule)(counts), want) <= FLOAT64_TOLERANCE, recipe
            assert difference([schedule(count) for count in SOME], want[list(SOME)]) <= FLOAT64_TOLERANCE, recipe
        if schedule.momentum is not None:
            assert difference(jax.vmap(schedule.momentum)(counts), momenta) <= FLOAT64_TOLERANCE, recipe


def test_rates_of_plain_schedules(x64):
    check(PLAIN)


def test_rates_and_momenta_of_cyclic_schedules(x64):
    check(CYCLIC)


def test_rates_of_chains(x64):
    check([("chain", parts) for parts in CHAINS])


def test_rates_of_sequences(x64):
    check([("sequence", *parts) for parts in SEQUENCES])


def test_rates_of_schedules_within_each_other(x64):
    chain = ("chain", [WARMUP, EXPONENTIAL, POLYNOMIAL, COSINE_MIN, FACTORS])
    sequence = ("sequence", [WARMUP, EXPONENTIAL, FACTORS], [20, 90])
    check(
        [
            ("sequence", [chain, COSINE], [30]),
            ("sequence", [("chain", [EXPONENTIAL, FUNCTION]), FACTORS], [30]),
            ("chain", [sequence, EXPONENTIAL]),
            ("chain", [EXPONENTIAL, sequence]),
            ("chain", [("chain", [WARMUP, STEP]), EXPONENTIAL]),
        ]
    )


def test_float32_without_x64():
    recipes = [*PLAIN, *CYCLIC, *(("chain", parts) for parts in CHAINS[:3]), *(("sequence", *parts) for parts in SEQUENCES[:3])]
    made = [our_schedule(recipe) for recipe in recipes]
    traced = jax.jit(lambda counts: [jax.vmap(schedule)(counts) for schedule in made])(jnp.arange(STEPS))
    for recipe, rates in zip(recipes, traced, strict=True):
        want = torch_run(recipe)[0]
        near = np.abs(want) >= 1e-6 * np.max(np.abs(want))
        assert rates.dtype == jnp.float32
        assert difference(np.asarray(rates)[near], want[near]) <= FLOAT32_TOLERANCE, recipe


def test_after_the_cycle_the_last_rate_stays(x64):
    schedule = schedules.one_cycle_lr(0.1, total_steps=20, anneal_strategy="linear")
    assert schedule.momentum is not None
    rates, _ = torch_run(("OneCycleLR", "", {"max_lr": 0.1, "total_steps": 20, "anneal_strategy": "linear"}), steps=21)
    assert difference([schedule(20)], rates[20:]) <= FLOAT64_TOLERANCE
    assert [float(schedule(count)) for count in (21, 10**6)] == [0.1 / 25 / 1e4] * 2
    assert float(schedule.momentum(21)) == 0.95


def test_no_momentum_where_none_is_cycled():
    assert schedules.cyclic_lr(0.1, 0.2, cycle_momentum=False).momentum is None
    assert schedules.one_cycle_lr(0.1, 10, cycle_momentum=False).momentum is None


def test_sgd_with_a_schedule(x64):
    gradients = np.random.default_rng(0).normal(size=(60, 3))
    weight = torch.ones(3, dtype=torch.float64)
    theirs = torch.optim.SGD([weight], lr=BASE, momentum=0.9)
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
    assert difference(params, weight.numpy()) <= FLOAT64_TOLERANCE

    plain = optax.sgd(schedules.step_lr(0.5, 1, gamma=0.5))
    state = plain.init(params)
    for rate in (0.5, 0.25):
        updates, state = plain.update(jnp.ones(3), state)
        np.testing.assert_array_equal(updates, -rate * np.ones(3))


PLATEAUS = [
    {},
    {"factor": 0.5, "patience": 0},
    {"mode": "max", "patience": 2, "cooldown": 3},
    {"threshold": 0.05, "patience": 3, "threshold_mode": "abs", "min_lr": 1e-4},
    {"mode": "max", "threshold": 0.05, "threshold_mode": "abs", "patience": 1},
    {"patience": 1, "eps": 1e-3, "cooldown": 1},
    {"factor": 0.0, "patience": 40, "min_lr": 1e-3},
]


@pytest.mark.parametrize("options", PLATEAUS)
def test_plateau(x64, options):
    values = np.exp(-np.arange(STEPS) / 100) + 0.1 * np.random.default_rng(1).normal(size=STEPS)
    values[100:110] = np.nan
    values = values * (-1 if options.get("mode") == "max" else 1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    before, after = [], []
    for value in values:
        before.append(optimizer.param_groups[0]["lr"])
        scheduler.step(value)
        after.append(scheduler.get_last_lr()[0])

    ours = optax.chain(optax.sgd(BASE), schedules.reduce_lr_on_plateau(BASE, **options))

    def step(state, value):
        updates, state = ours.update(jnp.ones(()), state, value=value)
        return state, (-updates, state[-1].learning_rate)

    _, (used, rates) = jax.lax.scan(step, ours.init(jnp.ones(())), values)
    assert len(set(after)) > 1
    assert difference(rates, np.array(after)) <= FLOAT64_TOLERANCE
    assert difference(used, np.array(before)) <= FLOAT64_TOLERANCE


def test_plateau_without_a_value_keeps_the_rate():
    optimizer = schedules.reduce_lr_on_plateau(0.0, patience=0)
    state = optimizer.init(None)
    updates, kept = optimizer.update(jnp.ones(2), state)
    np.testing.assert_array_equal(updates, np.ones(2))
    assert kept is state


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
        torch_scheduler((theirs, ours, arguments))
    with pytest.raises(ValueError, match=message):
        our_schedule((theirs, ours, arguments))


# Where PyTorch's constructor or its first steps divide by zero, or fail in another way.
DIVIDING = [
    ("StepLR", "step_lr", {"step_size": 0}, "step_size must not be 0"),
    ("CosineAnnealingLR", "cosine_annealing_lr", {"T_max": 0}, "T_max must not be 0"),
    ("OneCycleLR", "one_cycle_lr", {"max_lr": 0.1, "total_steps": 10, "pct_start": 0.1}, "must not be 1"),
]


@pytest.mark.parametrize(("theirs", "ours", "arguments", "message"), DIVIDING)
def test_refused_where_torch_divides_by_zero(theirs, ours, arguments, message):
    with pytest.raises(ZeroDivisionError):
        torch_run((theirs, ours, arguments), steps=2)
    with pytest.raises(ValueError, match=message):
        our_schedule((theirs, ours, arguments))


def test_refused_types():
    with pytest.raises(TypeError, match="lr_lambda must be a function of the count; got float"):
        schedules.multiplicative_lr(0.1, 0.5)
    with pytest.raises(TypeError, match="lr_lambda must be a function of the count; got list"):
        schedules.lambda_lr(0.1, [])
    with pytest.raises(TypeError, match=r"step_size must be an integer; got 2\.5"):
        schedules.step_lr(0.1, 2.5)
    with pytest.raises(TypeError, match="count must be an integer; got float32"):
        schedules.step_lr(0.1, 2)(1.0)


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
    chain = schedules.chained_scheduler(0.1, [step])
    for parts in ([step, chain], [schedules.sequential_lr(0.1, [step], []), step]):
        with pytest.raises(ValueError, match="a chain in the first place only, and no sequence"):
            schedules.sequential_lr(0.1, parts, [3])
