"""Schedules that multiply the rate they find: steps, ramps and decays."""

import math
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from funcgrad.torch_optim.schedules.base import (
    Count,
    Rate,
    Schedule,
    as_float,
    integer,
    nonzero,
    raised,
    scaling,
)


def step_lr(learning_rate: Rate, step_size: int, gamma: Rate = 0.1) -> Schedule:
    """`torch.optim.lr_scheduler.StepLR`: the rate times `gamma` after every `step_size` steps.

    `rate(t) = learning_rate * gamma ** (t // step_size)`.

    Args:
      learning_rate: the base rate.
      step_size: how many steps have one rate.
      gamma: the factor.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: `step_size` is no integer.
      ValueError: `step_size` is 0.

    Example:
      >>> schedule = step_lr(1.0, 30, gamma=0.5)
      >>> [float(schedule(count)) for count in (0, 29, 30, 60)]
      [1.0, 1.0, 0.5, 0.25]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.StepLR.html
    """
    size = nonzero("step_size", step_size)
    return scaling(
        learning_rate,
        ratio=lambda count: jnp.where((count != 0) & (count % size == 0), as_float(gamma), 1.0),
        growth=lambda count: raised(gamma, count // size),
    )


def multi_step_lr(learning_rate: Rate, milestones: Iterable[int], gamma: Rate = 0.1) -> Schedule:
    """`torch.optim.lr_scheduler.MultiStepLR`: the rate times `gamma` at each milestone.

    `rate(t) = learning_rate * gamma ** (how many milestones are at most t)`; one that is named twice counts twice.

    Args:
      learning_rate: the base rate.
      milestones: counts, in any order.
      gamma: the factor.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: a milestone is no integer.

    Example:
      >>> schedule = multi_step_lr(1.0, [30, 80], gamma=0.5)
      >>> [float(schedule(count)) for count in (29, 30, 80)]
      [1.0, 0.5, 0.25]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.MultiStepLR.html
    """
    all_of_them = np.asarray(sorted(integer("a milestone", milestone) for milestone in milestones), int)
    later = all_of_them[all_of_them > 0]

    return scaling(
        learning_rate,
        ratio=lambda count: raised(gamma, jnp.sum(count == all_of_them)),
        growth=lambda count: raised(gamma, jnp.sum(count >= later)),
        restart=gamma ** int(np.sum(all_of_them <= 0)),
        first=gamma ** int(np.sum(all_of_them == 0)),
    )


def constant_lr(learning_rate: Rate, factor: float = 1.0 / 3, total_iters: int = 5) -> Schedule:
    """`torch.optim.lr_scheduler.ConstantLR`: the rate times `factor` for `total_iters` steps, then the rate.

    With `total_iters=0` the factor stays for ever, as it does there. With `factor=0` the rate is NaN from `total_iters` on,
    where PyTorch divides by zero.

    Args:
      learning_rate: the base rate.
      factor: between 0 and 1.
      total_iters: how many steps have the smaller rate.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: `total_iters` is no integer.
      ValueError: `factor` is below 0 or above 1.

    Example:
      >>> schedule = constant_lr(1.0, factor=0.5, total_iters=4)
      >>> [float(schedule(count)) for count in (0, 3, 4)]
      [0.5, 0.5, 1.0]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ConstantLR.html
    """
    if factor > 1.0 or factor < 0:
        raise ValueError(f"factor must be between 0 and 1; got {factor!r}")
    total = integer("total_iters", total_iters)
    inverse = 1.0 / factor if factor else math.inf

    def ratio(count: Count) -> Rate:
        return jnp.where(count == 0, as_float(factor), jnp.where(count == total, as_float(inverse), 1.0))

    return scaling(
        learning_rate,
        ratio=ratio,
        growth=lambda count: jnp.where((total > 0) & (count >= total), as_float(inverse), 1.0),
        first=factor,
        restart=factor if total > 0 else 1.0,
    )


def linear_lr(learning_rate: Rate, start_factor: float = 1.0 / 3, end_factor: float = 1.0, total_iters: int = 5) -> Schedule:
    """`torch.optim.lr_scheduler.LinearLR`: a factor that goes in a straight line from one value to another.

    `rate(t) = learning_rate * (start_factor + (end_factor - start_factor) * min(t, total_iters) / total_iters)`.

    Args:
      learning_rate: the base rate.
      start_factor: above 0, at most 1.
      end_factor: between 0 and 1.
      total_iters: how many steps the line takes.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: `total_iters` is no integer.
      ValueError: a factor is out of its range.

    Example:
      >>> schedule = linear_lr(1.0, start_factor=0.5, total_iters=4)
      >>> [float(schedule(count)) for count in (0, 1, 4, 9)]
      [0.5, 0.625, 1.0, 1.0]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.LinearLR.html
    """
    if start_factor > 1.0 or start_factor <= 0:
        raise ValueError(f"start_factor must be above 0 and at most 1; got {start_factor!r}")
    if end_factor > 1.0 or end_factor < 0:
        raise ValueError(f"end_factor must be between 0 and 1; got {end_factor!r}")
    total, change = integer("total_iters", total_iters), end_factor - start_factor

    def ratio(count: Count) -> Rate:
        inside = 1.0 + change / (total * start_factor + as_float(count - 1) * change)
        return jnp.where(count == 0, as_float(start_factor), jnp.where(count > total, 1.0, inside))

    def growth(count: Count) -> Rate:
        if total <= 0:
            return as_float(1.0)
        return 1.0 + as_float(jnp.minimum(count, total)) * change / (total * start_factor)

    return scaling(learning_rate, ratio=ratio, growth=growth, first=start_factor, restart=start_factor)


def exponential_lr(learning_rate: Rate, gamma: Rate) -> Schedule:
    """`torch.optim.lr_scheduler.ExponentialLR`: the rate times `gamma` at each step.

    `rate(t) = learning_rate * gamma ** t`.

    Args:
      learning_rate: the base rate.
      gamma: the factor.

    Returns:
      A schedule, `count -> learning rate`.

    Example:
      >>> schedule = exponential_lr(1.0, gamma=0.5)
      >>> [float(schedule(count)) for count in range(3)]
      [1.0, 0.5, 0.25]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ExponentialLR.html
    """
    return scaling(
        learning_rate,
        ratio=lambda count: as_float(gamma),
        growth=lambda count: raised(gamma, count),
    )


def polynomial_lr(learning_rate: Rate, total_iters: int = 5, power: float = 1.0) -> Schedule:
    """`torch.optim.lr_scheduler.PolynomialLR`: a decay to zero along a power.

    `rate(t) = learning_rate * (1 - min(t, total_iters) / total_iters) ** power`.

    Args:
      learning_rate: the base rate.
      total_iters: how many steps the decay takes; with 0 there is none.
      power: of the polynomial.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: `total_iters` is no integer.

    Example:
      >>> schedule = polynomial_lr(1.0, total_iters=4, power=2.0)
      >>> [float(schedule(count)) for count in (0, 2, 4, 9)]
      [1.0, 0.25, 0.0, 0.0]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.PolynomialLR.html
    """
    total = integer("total_iters", total_iters)

    def ratio(count: Count) -> Rate:
        if total <= 0:
            return as_float(1.0)
        left = as_float(total - count)
        return jnp.where(left < 0, 1.0, (left / (left + 1)) ** power)

    def growth(count: Count) -> Rate:
        if total <= 0:
            return as_float(1.0)
        return (as_float(jnp.maximum(total - count, 0)) / total) ** power

    return scaling(learning_rate, ratio=ratio, growth=growth)
