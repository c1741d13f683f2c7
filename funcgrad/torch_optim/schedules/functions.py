"""Schedules of a function of the count that the user gives."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from funcgrad.torch_optim.schedules.base import Count, Rate, Schedule, as_float, check_function, setting, walk


def lambda_lr(learning_rate: Rate, lr_lambda: Callable[[Any], Any]) -> Schedule:
    """`torch.optim.lr_scheduler.LambdaLR`: the base rate times a function of the count.

    `rate(t) = learning_rate * lr_lambda(t)`.

    Args:
      learning_rate: the base rate.
      lr_lambda: `count -> factor`; under jit it is traced: `jnp.where` in place of `if`.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: `lr_lambda` is no function.

    Example:
      >>> schedule = lambda_lr(1.0, lambda count: 0.5**count)
      >>> [float(schedule(count)) for count in range(3)]
      [1.0, 0.5, 0.25]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.LambdaLR.html
    """
    check_function("lr_lambda", lr_lambda)
    return setting(learning_rate, lambda count: as_float(learning_rate) * lr_lambda(count))


def multiplicative_lr(learning_rate: Rate, lr_lambda: Callable[[Any], Any]) -> Schedule:
    """`torch.optim.lr_scheduler.MultiplicativeLR`: each step multiplies the rate by a function of the count.

    `rate(t) = learning_rate * lr_lambda(1) * ... * lr_lambda(t)`. The product is made anew at each call, in a loop of
    `count` rounds: where a closed form is known, `lambda_lr` is the faster one.

    Args:
      learning_rate: the base rate.
      lr_lambda: `count -> factor`, traced: `jnp.where` in place of `if`.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: `lr_lambda` is no function.

    Example:
      >>> schedule = multiplicative_lr(0.5, lambda count: 0.5)
      >>> [float(schedule(count)) for count in range(3)]
      [0.5, 0.25, 0.125]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.MultiplicativeLR.html
    """
    check_function("lr_lambda", lr_lambda)

    def step(rate: Rate, count: Count) -> Rate:
        return rate * lr_lambda(count)

    steps = walk(step)
    return Schedule(
        learning_rate,
        first=lambda rate, initial: rate,
        step=step,
        restart=lambda rate: step(rate, jnp.asarray(0)),
        after=lambda start, count: steps(start, 0, count),
        begin=lambda rate: rate,
    )
