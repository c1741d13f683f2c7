"""Learning rate schedules beside PyTorch's schedulers: recipes for both, and what each gives."""

import warnings

import numpy as np
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
HIGHER = 0.07
HIGHER_CYCLE = entry("cyclic_lr", base_lr=HIGHER, max_lr=0.1, step_size_up=11)
# A fourth part is our base rate where it is not `BASE`: in PyTorch an earlier schedule has set it.
HIGHER_STEP = (*STEP, HIGHER)
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
    return getattr(schedules, recipe[1])(*([] if own else [recipe[3] if len(recipe) > 3 else base]), **recipe[2])


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
