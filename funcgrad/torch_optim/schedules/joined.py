"""Schedules made of schedules: one after the other, and all at once."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from funcgrad.torch_optim.schedules.base import Claims, Count, Rate, Schedule, as_float, integer, walk


def sequential_lr(learning_rate: Rate, schedulers: Sequence[Schedule], milestones: Sequence[int]) -> Schedule:
    """`torch.optim.lr_scheduler.SequentialLR`: one schedule after the other, each counting from 0.

    `rate(t) = schedulers[i](t - milestones[i - 1])`, with i the number of milestones that are at most t. As in PyTorch, a
    `multiplicative_lr` takes over the rate that it finds, and multiplies it at once.

    Args:
      learning_rate: the base rate, that of the schedules too.
      schedulers: schedules of this package, made with the same rate.
      milestones: the counts at which the second and later schedules begin, in order.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: an entry is no schedule of this package.
      ValueError: there is no schedule; milestones are not one fewer, or not in order; a schedule has another base rate; one
        cannot stand where it does (a sequence in a sequence, a chain in a later place: PyTorch has no step for it).

    Example:
      >>> from funcgrad.torch_optim.schedules import constant_lr, exponential_lr
      >>> warmup = constant_lr(1.0, factor=0.5, total_iters=2)
      >>> schedule = sequential_lr(1.0, [warmup, exponential_lr(1.0, gamma=0.5)], milestones=[2])
      >>> [float(schedule(count)) for count in range(5)]
      [0.5, 0.5, 1.0, 0.5, 0.25]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.SequentialLR.html
    """
    initial = _check_all("sequential_lr", learning_rate, schedulers)
    milestones = [integer("a milestone", milestone) for milestone in milestones]
    if len(milestones) != len(schedulers) - 1:
        raise ValueError(
            f"sequential_lr needs one schedule more than milestones; got {len(schedulers)} schedules and {len(milestones)} "
            "milestones"
        )
    if milestones != sorted(milestones):
        raise ValueError(f"sequential_lr needs milestones in order; got {milestones}")
    phases = _phases(schedulers, milestones)
    for place, (phase, _, _) in enumerate(phases):
        if phase.kind == "sequence" or (phase.kind == "chain" and place):
            raise ValueError(
                "sequential_lr takes a chain in the first place only, and no sequence; PyTorch has no step for others. Give "
                "all phases to one sequential_lr, and chain the whole"
            )

    def after(start: Rate, count: Count) -> Rate:
        rate = entry = start
        for place, (phase, begin, end) in enumerate(phases):
            inside = phase.after(entry, jnp.clip(count - begin, 0, None if end is None else end - 1 - begin))
            rate = jnp.where(count >= begin, inside, rate)
            if end is not None:
                left = phase.after(entry, jnp.asarray(end - 1 - begin))
                entry = phases[place + 1][0].restart(left)
        return rate

    def step(rate: Rate, count: Count) -> Rate:
        result = rate
        for place, (phase, begin, _) in enumerate(phases):
            stepped = phase.step(rate, count - begin)
            stepped = jnp.where(count == begin, phase.restart(rate), stepped) if place else stepped
            result = jnp.where(count >= begin, stepped, result)
        return result

    def first(*_: Rate) -> Rate:
        return phases[0][0].begin(as_float(initial))

    return Schedule(initial, first, step, _no_restart, after, first, claims=_claims_of(schedulers), kind="sequence")


def chained_scheduler(learning_rate: Rate, schedulers: Sequence[Schedule]) -> Schedule:
    """`torch.optim.lr_scheduler.ChainedScheduler`: at each count, all schedules change the rate in turn.

    `rate(t)` is the base rate times the factors of all of them, where they multiply; one that sets its own rate, as
    `lambda_lr` does, overwrites what those before it did, and those after it change it by one step only, as in PyTorch.
    Where there is no closed form (`cosine_annealing_lr` beyond `T_max` or with an `eta_min`, `multiplicative_lr`, a sequence)
    the steps are made anew at each call, in a loop of `count` rounds.

    Args:
      learning_rate: the base rate, that of the schedules too.
      schedulers: schedules of this package, made with the same rate, in the order in which they are constructed in PyTorch.

    Returns:
      A schedule, `count -> learning rate`.

    Raises:
      TypeError: an entry is no schedule of this package.
      ValueError: there is no schedule, or one has another base rate.

    Example:
      >>> from funcgrad.torch_optim.schedules import constant_lr, exponential_lr
      >>> warmup = constant_lr(1.0, factor=0.5, total_iters=2)
      >>> schedule = chained_scheduler(1.0, [warmup, exponential_lr(1.0, gamma=0.5)])
      >>> [float(schedule(count)) for count in range(4)]
      [0.5, 0.25, 0.25, 0.125]

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ChainedScheduler.html
    """
    shared = _check_all("chained_scheduler", learning_rate, schedulers)
    members = tuple(schedulers)

    def step(rate: Rate, count: Count) -> Rate:
        for member in members:
            rate = member.step(rate, count)
        return rate

    def first(rate: Rate, initial: Rate) -> Rate:
        for place, member in enumerate(members):
            initial = member.learning_rate if _claims(member, place) else initial
            rate = member.first(rate, initial)
        return rate

    until = min(member.until for member in members)

    def growth(count: Count) -> Rate:
        factor = as_float(1.0)
        for member in members if until else ():
            assert member.growth is not None
            factor = factor * member.growth(count)
        return factor

    sets = any(member.sets for member in members)
    walked = walk(step)

    def after(start: Rate, count: Count) -> Rate:
        if sets:  # the last step alone decides
            return jnp.where(count > 0, step(start, count), start)
        if until > 2**31:
            return start * growth(count)
        known = jnp.minimum(count, int(until))
        return walked(start * growth(known), known, count)

    def begin(rate: Rate) -> Rate:
        return step(rate, jnp.asarray(0))

    return Schedule(
        shared,
        first,
        step,
        _no_restart,
        after,
        begin,
        sets=sets,
        growth=growth,
        until=until,
        claims=_claims_of(schedulers),
        kind="chain",
    )


def _phases(schedulers: Sequence[Schedule], milestones: list[int]) -> list[tuple[Schedule, int, int | None]]:
    """`(schedule, its first count, that of the next one)`, without those that never have a turn."""
    begins = [0, *(max(milestone, 0) for milestone in milestones)]
    ends = [*begins[1:], None]
    return [phase for phase in zip(schedulers, begins, ends, strict=True) if phase[2] is None or phase[2] > phase[1]]


def _no_restart(rate: Rate) -> Rate:
    raise AssertionError("sequential_lr refuses a joined schedule in a later place")


def _claims(schedule: Schedule, place: int) -> bool:
    return schedule.claims == "always" or (schedule.claims == "first" and place == 0)


def _claims_of(schedulers: Sequence[Schedule]) -> Claims:
    """What schedules that are constructed one after the other claim together."""
    return "always" if any(schedule.claims == "always" for schedule in schedulers) else schedulers[0].claims


def _check_all(name: str, learning_rate: Rate, schedulers: Sequence[Any]) -> Rate:
    """Check that the schedules go with each other, and return the base rate that they share in the end."""
    if len(schedulers) < 1:
        raise ValueError(f"{name} needs at least one schedule; got none")
    initial = learning_rate
    for place, schedule in enumerate(schedulers):
        if isinstance(schedule, optax.GradientTransformation):
            raise ValueError(
                f"{name} takes no transformation, such as reduce_lr_on_plateau: it needs a value at each step; got one at "
                f"index {place}. Put it into optax.chain behind the optimizer"
            )
        if not isinstance(schedule, Schedule):
            raise TypeError(f"{name} takes schedules of funcgrad.torch_optim; got {type(schedule).__name__} at index {place}")
        if _claims(schedule, place):
            initial = schedule.learning_rate
        elif schedule.claims == "never":
            _check_same(name, place, schedule.learning_rate, initial)
    return initial


def _check_same(name: str, place: int, got: Rate, wanted: Rate) -> None:
    if any(isinstance(rate, Tracer) for rate in (got, wanted)):
        return
    # In float32 at least one of them may be; jnp would record the comparison inside jax.jit.
    if not np.array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32)):
        raise ValueError(
            f"{name} needs schedules with one base rate, as PyTorch's share an optimizer; got {got!r} at index {place} and "
            f"{wanted!r} before. Make all of them with the same learning_rate"
        )
