"""The end of a window: one optimizer step with the mean of the buffer, which is then cleared."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.shard_alike import shard_alike

from funcgrad import accumulator, trees, window
from funcgrad.accumulator import GradBuffer
from funcgrad.opt_state import check_opt_state
from funcgrad.state import TrainState
from funcgrad.trees import PyTree


def update_state(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    call_optimizer: Callable[..., tuple[PyTree, PyTree]],
    *,
    may_be_empty: bool,
    wait_for_all: bool,
) -> tuple[TrainState, dict[str, Any]]:
    """One optimizer step with the mean of `state.buffer`, which is then cleared.

    Args:
      optimizer, state: as for the steps.
      call_optimizer: `(grads, opt_state, params) -> (updates, opt_state)`.
      may_be_empty: whether nothing may have been folded in; then nothing is updated.
      wait_for_all: whether no leaf of the buffer is cleared before all are read; then XLA keeps no copies. In a step of a whole
        window, where there is memory that the microbatches needed before, it is not worth its time: 1.08 times a step of a
        multilayer perceptron.

    Returns:
      `(state, metrics)`: `grad_norm`, `weight` and `skipped`, each `[]`.
    """
    buffer = state.buffer
    selected, rest = trees.partition(state.params, window.buffer_mask(buffer, state.params, None))
    check_opt_state(optimizer, selected, state.opt_state)
    mean = accumulator.mean(buffer)
    grads = trees.cast_like(mean, selected)
    squares = jax.tree.map(_sum_of_squares, mean)
    grad_norm = jnp.sqrt(optax.tree.sum(squares))

    def advance(carried: tuple[PyTree, PyTree, jax.Array]) -> tuple[PyTree, PyTree, jax.Array]:
        params, opt_state, step = carried
        updates, opt_state = call_optimizer(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, step + 1

    carried = (selected, state.opt_state, state.step)
    # A condition, not a choice between old and new values, which would keep both in memory (and take 3 times as long).
    carried = jax.lax.cond(buffer.count > 0, advance, lambda kept: kept, carried) if may_be_empty else advance(carried)
    params, opt_state, step = carried
    weight = buffer.weight if buffer.compensation is None else buffer.weight + buffer.compensation[1]
    metrics = {"grad_norm": grad_norm, "weight": weight, "skipped": buffer.skipped}
    reads = jax.tree.map(lambda _: grad_norm, squares) if wait_for_all else squares
    return TrainState(trees.combine(params, rest), opt_state, _clear(buffer, reads), step), metrics


def accepted(optimizer: optax.GradientTransformation, offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the extra arguments `offered` that the optimizer's `update` takes."""
    parameters = inspect.signature(optimizer.update).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in offered.items() if takes_any or name in parameters}


def _sum_of_squares(leaf: jax.Array) -> jax.Array:
    return optax.tree.norm(leaf.astype(trees.at_least_float32(leaf.dtype)), squared=True)


def _clear(buffer: GradBuffer, reads: PyTree) -> GradBuffer:
    """`zero_grad(buffer)`, in the memory of the sums, once they are read.

    A constant zero XLA writes whenever it likes, before the sums are read too, which then need a second copy of all
    gradients (measured with jax 0.10.2 on CPU: 30 MB of temporary memory, not 12, for 19 MB of parameters; an
    `optimization_barrier` changes nothing). So the zero is computed from a norm: that is never negative, and NaN is not
    either, but XLA has to read the sums to know. tests/test_memory_use.py guards it.

    Args:
      buffer: what is cleared.
      reads: for each gradient a number that is never negative, and known once the gradient is read.
    """

    def clear(read: jax.Array, leaf: jax.Array) -> jax.Array:
        if not leaf.ndim:
            return jnp.zeros_like(leaf)  # costs no memory, and so no operation
        # Without shard_alike, the zeros of a sharded leaf would be whole on every device.
        return shard_alike(leaf, jnp.zeros_like(leaf) + (read < 0).astype(leaf.dtype))[1]

    low = buffer.compensation
    return GradBuffer(
        grads=jax.tree.map(clear, reads, buffer.grads),
        weight=jnp.zeros_like(buffer.weight),
        count=jnp.zeros_like(buffer.count),
        skipped=jnp.zeros_like(buffer.skipped),
        compensation=None if low is None else (jax.tree.map(clear, reads, low[0]), jnp.zeros_like(low[1])),
    )
