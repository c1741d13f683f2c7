"""A learning rate that falls when a metric no longer gets better."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from funcgrad.torch_optim.schedules.base import Rate, as_float

PyTree = Any


class ReduceLROnPlateauState(NamedTuple):
    """State of `reduce_lr_on_plateau`.

    Attributes:
      learning_rate: the rate of the next step, `[]`.
      best: the best value seen, `[]`.
      num_bad_epochs: how many values were not better than it, one after the other, int32 `[]`.
      cooldown_counter: for how many more values such are not counted, int32 `[]`.
    """

    learning_rate: jax.Array
    best: jax.Array
    num_bad_epochs: jax.Array
    cooldown_counter: jax.Array


def reduce_lr_on_plateau(  # noqa: PLR0917 - PyTorch's order
    learning_rate: Rate,
    mode: str = "min",
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    cooldown: int = 0,
    min_lr: float = 0.0,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.lr_scheduler.ReduceLROnPlateau`: the rate times `factor` when a value has not got better for a while.

    It stands behind an optimizer with the same `learning_rate`, `optax.chain(optimizer, reduce_lr_on_plateau(rate))`, and
    multiplies its updates by the present rate over the first one. `update` takes `value`, the metric, as `funcgrad.train_step`
    passes it; the updates of that step still have the rate from before, as when PyTorch's `scheduler.step(metric)` follows
    `optimizer.step()`. Without `value` (None) the rate stays: for a metric that comes once an epoch.

    `optax.contrib.reduce_on_plateau` differs: it changes the rate one value earlier, and the updates of that same step; it has
    no `mode="max"`, no `eps`, and its smallest rate is a part of the first.

    Args:
      learning_rate: that of the optimizer.
      mode: `"min"` or `"max"`: what is better.
      factor: below 1.
      patience: how many values that are not better pass before the rate falls with the next one.
      threshold: by how much a value must be better to count.
      threshold_mode: `"rel"`, a part of the best value, or `"abs"`.
      cooldown: for how many values after a fall none is counted.
      min_lr: the least rate.
      eps: a smaller fall than this is not made.

    Returns:
      A transformation; its state has the present `learning_rate`.

    Raises:
      ValueError: `factor` is 1 or more, or a mode is unknown; in `update`, where `value` is not one number.

    Example:
      >>> optimizer = optax.chain(optax.sgd(1.0), reduce_lr_on_plateau(1.0, factor=0.5, patience=1))
      >>> state = optimizer.init(jnp.zeros(()))
      >>> for value in (3.0, 3.0, 3.0, 3.0):
      ...     updates, state = optimizer.update(jnp.ones(()), state, value=value)
      >>> float(updates), float(state[-1].learning_rate)
      (-0.5, 0.5)

    Reference:
      https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html
    """
    if factor >= 1.0:
        raise ValueError(f"factor must be below 1; got {factor!r}")
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max'; got {mode!r}")
    if threshold_mode not in ("rel", "abs"):
        raise ValueError(f"threshold_mode must be 'rel' or 'abs'; got {threshold_mode!r}")
    sign = 1.0 if mode == "min" else -1.0

    def is_better(value: jax.Array, best: jax.Array) -> jax.Array:
        bound = best * (1.0 - sign * threshold) if threshold_mode == "rel" else best - sign * threshold
        return value < bound if mode == "min" else value > bound

    def init(params: PyTree) -> ReduceLROnPlateauState:
        del params
        zero = jnp.zeros((), jnp.int32)
        return ReduceLROnPlateauState(as_float(learning_rate), as_float(sign * math.inf), zero, jnp.zeros_like(zero))

    def step(state: ReduceLROnPlateauState, value: jax.Array) -> ReduceLROnPlateauState:
        better, cooling = is_better(value, state.best), state.cooldown_counter > 0
        bad = jnp.where(better | cooling, 0, state.num_bad_epochs + 1)
        worn = bad > patience
        lower = jnp.maximum(state.learning_rate * factor, min_lr)
        falls = worn & (state.learning_rate - lower > eps)
        return ReduceLROnPlateauState(
            learning_rate=jnp.where(falls, lower, state.learning_rate),
            best=jnp.where(better, value, state.best),
            num_bad_epochs=jnp.where(worn, 0, bad).astype(jnp.int32),
            cooldown_counter=jnp.where(worn, cooldown, state.cooldown_counter - cooling).astype(jnp.int32),
        )

    def update(
        updates: PyTree, state: Any, params: PyTree = None, *, value: Any = None, **extra: Any
    ) -> tuple[PyTree, ReduceLROnPlateauState]:
        del params, extra
        # The first rate exactly, also where it is 0, has the scale 1.
        base = as_float(learning_rate)
        scale = jnp.where(state.learning_rate == base, 1.0, state.learning_rate / base)
        updates = jax.tree.map(lambda leaf: leaf * scale.astype(jnp.result_type(leaf)), updates)
        if value is None:
            return updates, state
        if jnp.size(value) != 1:
            raise ValueError(f"reduce_lr_on_plateau needs one number as value; got an array of shape {jnp.shape(value)}")
        return updates, step(state, jnp.reshape(as_float(value), ()))

    return optax.GradientTransformationExtraArgs(init, update)
