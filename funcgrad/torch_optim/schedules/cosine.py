"""Cosine annealing."""

import math

import jax.numpy as jnp
import numpy as np

from funcgrad.torch_optim.schedules.base import (
    Count,
    Rate,
    Schedule,
    as_float,
    nonzero,
    one_plus_cos,
    setting,
)


def cosine_annealing_lr(learning_rate: Rate, T_max: int, eta_min: Rate = 0.0) -> Schedule:
    """`torch.optim.lr_scheduler.CosineAnnealingLR`: down along half a cosine in `T_max` steps, up again in as many.

    `rate(t) = eta_min + (learning_rate - eta_min) * (1 + cos(pi * t / T_max)) / 2`. PyTorch makes each rate from the one
    before it; what its rounding leaves after `T_max` is followed here too.

    Args:
      learning_rate: the base rate.
      T_max: the steps of half a period.
      eta_min: the least rate.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: `T_max` is no integer.
      ValueError: `T_max` is 0.

    Example:
      >>> schedule = cosine_annealing_lr(1.0, T_max=4)
      >>> [round(float(schedule(count)), 4) for count in (0, 2, 4, 6, 8)]
      [1.0, 0.5, 0.0, 0.5, 1.0]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.CosineAnnealingLR.html
    """
    half = nonzero("T_max", T_max)
    rise = (1 - math.cos(math.pi / half)) / 2

    def height(count: Count) -> Rate:  # of the cosine, from 0 to 2
        phase = count % (2 * half)
        # In float32 the phase, for its precision; in float64 the count, for PyTorch's rounding.
        at = count if jnp.result_type(float) == jnp.float64 else phase
        return jnp.where(phase == half, 0.0, one_plus_cos(at, half))

    def step(rate: Rate, count: Count) -> Rate:
        turned = rate + (as_float(learning_rate) - eta_min) * rise
        return jnp.where(
            (count - 1 - half) % (2 * half) == 0, turned, height(count) / height(count - 1) * (rate - eta_min) + eta_min
        )

    def after(start: Rate, count: Count) -> Rate:
        fallen = eta_min + (start - eta_min) * height(count) / 2
        # At T_max the rate is eta_min, whatever it was; PyTorch goes on from the next count.
        turn = half + 1 + (count - half - 1) // (2 * half) * (2 * half)
        risen = eta_min + (as_float(learning_rate) - eta_min) * rise * (height(count) / height(turn))
        return jnp.where(count <= half, fallen, risen)

    from_zero = isinstance(eta_min, (int, float)) and eta_min == 0
    return Schedule(
        learning_rate,
        first=lambda rate, initial: rate,
        step=step,
        restart=lambda rate: as_float(learning_rate),
        after=after,
        begin=lambda rate: rate,
        growth=(lambda count: height(count) / 2) if from_zero else None,
        until=half if from_zero else 0,
    )


def cosine_annealing_warm_restarts(
    learning_rate: Rate,
    T_0: int,
    T_mult: int = 1,
    eta_min: float = 0.0,
) -> Schedule:
    """`torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`: half a cosine down, and at once up again.

    `rate(t) = eta_min + (learning_rate - eta_min) * (1 + cos(pi * T_cur / T_i)) / 2`, with `T_cur` the steps since the last
    restart; the first cycle has `T_i = T_0` steps, each later one `T_mult` times as many as the one before.

    Args:
      learning_rate: the base rate.
      T_0: the steps of the first cycle.
      T_mult: the factor from cycle to cycle.
      eta_min: the least rate.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      ValueError: `T_0` or `T_mult` is no integer of at least 1, or `eta_min` no number.

    Example:
      >>> schedule = cosine_annealing_warm_restarts(1.0, T_0=2, T_mult=2)
      >>> [round(float(schedule(count)), 4) for count in (0, 1, 2, 4, 6)]
      [1.0, 0.5, 1.0, 0.5, 1.0]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.CosineAnnealingWarmRestarts.html
    """
    if not isinstance(T_0, int) or T_0 <= 0:
        raise ValueError(f"T_0 must be a positive integer; got {T_0!r}")
    if not isinstance(T_mult, int) or T_mult < 1:
        raise ValueError(f"T_mult must be an integer of at least 1; got {T_mult!r}")
    if not isinstance(eta_min, (int, float)):
        raise ValueError(f"eta_min must be a number; got {eta_min!r} of type {type(eta_min).__name__}")
    starts, lengths = _cycles(T_0, T_mult)

    def value(count: Count) -> Rate:
        if T_mult == 1:
            since, length = count % T_0, T_0
        else:
            cycle = jnp.sum(count >= starts) - 1
            since, length = count - jnp.asarray(starts, count.dtype)[cycle], as_float(lengths)[cycle]
        return eta_min + (as_float(learning_rate) - eta_min) * one_plus_cos(since, length) / 2

    return setting(learning_rate, value)


def _cycles(first: int, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """The first count of each cycle and its steps, for all counts of 32 bits."""
    starts, lengths = [0], [first]
    while factor > 1 and starts[-1] + lengths[-1] < 2**31:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * factor)
    return np.asarray(starts, np.int32), np.asarray(lengths, np.float64)
