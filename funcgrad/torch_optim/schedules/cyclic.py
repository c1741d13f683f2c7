"""Schedules that cycle the learning rate, and the momentum against it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from funcgrad.torch_optim.schedules.base import Count, Rate, Schedule, as_float, one_plus_cos, raised, setting

MODES = ("triangular", "triangular2", "exp_range")
ANNEALINGS = ("cos", "linear")


def cyclic_lr(  # noqa: PLR0917 - PyTorch's order
    base_lr: Rate,
    max_lr: Rate,
    step_size_up: float = 2000,
    step_size_down: float | None = None,
    mode: str = "triangular",
    gamma: Rate = 1.0,
    scale_fn: Callable[[Any], Any] | None = None,
    scale_mode: str = "cycle",
    cycle_momentum: bool = True,
    base_momentum: Rate = 0.8,
    max_momentum: Rate = 0.9,
) -> Schedule:
    """`torch.optim.lr_scheduler.CyclicLR`: up from one rate to another in a straight line, and down again.

    `rate(t) = base_lr + (max_lr - base_lr) * x(t) * scale`, with `x` the height in the triangle, from 0 to 1. PyTorch puts
    `base_lr` in the place of the optimizer's rate; so it is the first argument here.

    Args:
      base_lr: the rate at the bottom.
      max_lr: the rate at the top of the first cycle.
      step_size_up: how many steps go up.
      step_size_down: how many steps go down; None: as many.
      mode: `"triangular"` (scale 1), `"triangular2"` (half of it each cycle), `"exp_range"` (`gamma ** t`).
      gamma: for `"exp_range"`.
      scale_fn: a scale of your own in place of the mode's: a function of the cycle, counted from 1, or of the count.
      scale_mode: `"cycle"` or `"iterations"`: what `scale_fn` is a function of.
      cycle_momentum: whether the schedule has a `momentum`, a schedule too: it falls while the rate rises.
      base_momentum: the momentum at the top of the first cycle.
      max_momentum: the momentum at the bottom.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      ValueError: `mode` is unknown and there is no `scale_fn`.

    Example:
      >>> schedule = cyclic_lr(0.0, 1.0, step_size_up=2)
      >>> [float(schedule(count)) for count in range(5)]
      [0.0, 0.5, 1.0, 0.5, 0.0]
      >>> round(float(schedule.momentum(2)), 4)
      0.8

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.CyclicLR.html
    """
    if scale_fn is None and mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, or scale_fn given; got mode={mode!r}")
    up = float(step_size_up)
    total = up + (up if step_size_down is None else float(step_size_down))

    def scale(cycle: Rate, count: Count) -> Rate:
        if scale_fn is not None:
            return scale_fn(cycle if scale_mode == "cycle" else count)
        if mode == "triangular2":
            return 0.5 ** (cycle - 1)
        return raised(gamma, count) if mode == "exp_range" else 1.0

    def height(count: Count) -> Rate:
        moment = as_float(count)
        # The remainder is exact, where PyTorch's quotient less its whole part is rounded.
        position = moment % total
        cycle = 1 + jnp.round((moment - position) / total)
        rising, falling = position / up, (total - position) / (total - up)
        return jnp.where(position <= up, rising, falling) * scale(cycle, count)

    def value(count: Count) -> Rate:
        return base_lr + (as_float(max_lr) - base_lr) * height(count)

    def momentum(count: Count) -> Rate:
        return max_momentum - (as_float(max_momentum) - base_momentum) * height(count)

    return setting(
        base_lr,
        value,
        # On an optimizer that has had a scheduler already, the constructor leaves that one's base rate.
        first=lambda rate, initial: as_float(initial),
        momentum=setting(max_momentum, momentum) if cycle_momentum else None,
        claims="first",
    )


def one_cycle_lr(  # noqa: PLR0917 - PyTorch's order
    max_lr: Rate,
    total_steps: int | None = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    cycle_momentum: bool = True,
    base_momentum: Rate = 0.85,
    max_momentum: Rate = 0.95,
    div_factor: Rate = 25.0,
    final_div_factor: Rate = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """`torch.optim.lr_scheduler.OneCycleLR`: up to a high rate and down to almost none, once.

    From `max_lr / div_factor` up to `max_lr`, then down to `max_lr / div_factor / final_div_factor`. The optimizer's own rate
    does not enter, so `max_lr` is the first argument. After `total_steps` steps, where PyTorch raises an error, the last rate
    stays.

    Args:
      max_lr: the rate at the top.
      total_steps: how many steps the cycle has; or give `epochs` and `steps_per_epoch`, whose product it is.
      epochs: as said.
      steps_per_epoch: as said.
      pct_start: the part of the cycle that goes up, between 0 and 1.
      anneal_strategy: `"cos"` or `"linear"`.
      cycle_momentum: whether the schedule has a `momentum`, a schedule too: it falls while the rate rises.
      base_momentum: the momentum at the top.
      max_momentum: the momentum at the start and at the end.
      div_factor: as said.
      final_div_factor: as said.
      three_phase: go down to the first rate in as many steps as up, and only then to the last.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      ValueError: an argument is out of its range, or there is no number of steps.

    Example:
      >>> schedule = one_cycle_lr(1.0, total_steps=10, anneal_strategy="linear")
      >>> [round(float(schedule(count)), 4) for count in (0, 1, 2, 9)]
      [0.04, 0.52, 1.0, 0.0]
      >>> round(float(schedule.momentum(2)), 4)
      0.85

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.OneCycleLR.html
    """
    total = _total_steps(total_steps, epochs, steps_per_epoch)
    if not isinstance(pct_start, float) or pct_start < 0 or pct_start > 1:
        raise ValueError(f"pct_start must be a float between 0 and 1; got {pct_start!r}")
    if anneal_strategy not in ANNEALINGS:
        raise ValueError(f"anneal_strategy must be 'cos' or 'linear'; got {anneal_strategy!r}")
    ends = [pct_start * total - 1] + [2 * pct_start * total - 2] * three_phase + [total - 1]
    if ends[0] == 0:
        raise ValueError(
            f"pct_start * total_steps must not be 1, a rise of no step by which PyTorch divides; got pct_start={pct_start} and "
            f"total_steps={total}. Take a larger pct_start, or 0.0 for no rise"
        )
    initial = max_lr / div_factor
    last = initial / final_div_factor

    def between(points: list[Rate], count: Count) -> Rate:
        return _piecewise(points, ends, anneal_strategy, jnp.clip(count, 0, total))

    def value(count: Count) -> Rate:
        points = [initial, max_lr, *[initial] * three_phase, last]
        return jnp.where(count > total, as_float(last), between(points, count))

    def momentum(count: Count) -> Rate:
        points = [max_momentum, base_momentum, *[max_momentum] * three_phase, max_momentum]
        return jnp.where(count > total, as_float(max_momentum), between(points, count))

    return setting(initial, value, momentum=setting(max_momentum, momentum) if cycle_momentum else None, claims="always")


def _piecewise(points: list[Rate], ends: list[float], strategy: str, count: Count) -> Rate:
    """The value at `count` of the curve through `points`, whose pieces end at the counts `ends`."""
    moment, begin, pieces = as_float(count), 0.0, []
    for start, stop, end in zip(points[:-1], points[1:], ends, strict=True):
        piece = _cosine if strategy == "cos" else _line
        pieces.append(piece(as_float(start), as_float(stop), moment - begin, (end - begin) or 1.0))
        begin = end
    result = pieces[-1]
    for piece, end in zip(pieces[-2::-1], ends[-2::-1], strict=True):
        result = jnp.where(moment <= end, piece, result)
    return result


def _cosine(start: Rate, stop: Rate, steps: Rate, length: float) -> Rate:
    return stop + (start - stop) / 2.0 * one_plus_cos(steps, length)


def _line(start: Rate, stop: Rate, steps: Rate, length: float) -> Rate:
    # The last rate is tiny beside the first: in float64 it keeps the rounding that PyTorch's formula has, in float32, where
    # that would be a percent, none.
    if start.dtype == jnp.float64:
        return (stop - start) * jnp.where(steps == length, 1.0, steps / length) + start
    return stop + (start - stop) * ((length - steps) / length)


def _total_steps(total_steps: Any, epochs: Any, steps_per_epoch: Any) -> int:
    if total_steps is not None:
        return _positive("total_steps", total_steps)
    if epochs is None or steps_per_epoch is None:
        raise ValueError("one_cycle_lr needs total_steps, or both epochs and steps_per_epoch; got neither")
    return _positive("epochs", epochs) * _positive("steps_per_epoch", steps_per_epoch)


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive integer; got {value!r}")
    return value
