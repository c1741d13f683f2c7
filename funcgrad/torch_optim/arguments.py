"""Checks of hyperparameters: what PyTorch's constructors refuse."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check(name: str, value: Any, holds: Callable[[Any], Any], expected: str) -> None:
    """Check a hyperparameter; one whose value is not known while a computation is traced is passed over.

    Raises:
      ValueError: `holds(value)` is false, or cannot be asked.
      TypeError: it is a function.
    """
    if callable(value):
        raise TypeError(
            f"{name} must be {expected}; got a function. Only learning_rate takes a schedule by itself; "
            "optax.inject_hyperparams takes one for any argument that is a number"
        )
    if any(isinstance(part, Tracer) for part in jax.tree.leaves(value)):
        return
    try:
        held = holds(value)
    except TypeError:  # None, text, ...
        held = False
    if not held:
        raise ValueError(f"{name} must be {expected}; got {value!r}")


def check_not_negative(**values: Any) -> None:
    """Check that each is 0 or more; NaN is not."""
    for name, value in values.items():
        check(name, value, lambda number: number >= 0.0, "a number of at least 0")


def check_learning_rate(learning_rate: Any, *, nan_passes: bool = False) -> None:
    """Check a learning rate: a schedule, or one number of at least 0.

    Args:
      learning_rate: what came.
      nan_passes: whether NaN does, as PyTorch's SGD has it.

    Raises:
      ValueError: it is negative, or an array of several.
      TypeError: it is neither a schedule nor a number.
    """
    if callable(learning_rate):
        return
    if not isinstance(learning_rate, int | float | np.number | np.ndarray | jax.Array):
        raise TypeError(
            f"learning_rate must be a number or a schedule; got {type(learning_rate).__name__}. The parameters go to "
            "init(params) and update(grads, state, params)"
        )
    if jnp.size(learning_rate) != 1:
        raise ValueError(f"learning_rate must be one number or a schedule; got an array of shape {jnp.shape(learning_rate)}")
    holds = (lambda rate: not rate < 0.0) if nan_passes else (lambda rate: rate >= 0.0)
    check("learning_rate", learning_rate, holds, "a schedule, or a number of at least 0")


def check_betas(betas: Sequence[Any]) -> None:
    """Check that each of two decay rates lies in [0, 1).

    Raises:
      ValueError: one does not, or they are not two.
    """
    try:
        number = len(betas)
    except TypeError:
        number = 1
    if number != 2:
        raise ValueError(f"betas must be two numbers; got {betas!r}")
    for index in range(2):
        check(f"betas[{index}]", betas[index], lambda beta: 0.0 <= beta < 1.0, "at least 0 and less than 1")
