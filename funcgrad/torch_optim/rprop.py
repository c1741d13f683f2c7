"""Rprop: the signs of gradients alone."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.rule import Leaf, Rule, Values, transformation


def rprop(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    etas: Sequence[Any] = (0.5, 1.2),
    step_sizes: Sequence[Any] = (1e-6, 50.0),
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Rprop`: each element has a step size, which grows while its gradient keeps its sign.

    With `s = sign(g * prev)`: `size *= etas[1]` where `s > 0`, `size *= etas[0]` where `s < 0`, clamped to `step_sizes`
    everywhere; `g = 0` where `s < 0`; then `p -= sign(g) * size` and `prev = g`. `optax.rprop` gives the step before.

    Args:
      learning_rate: the first step size of a parameter; its later ones do not depend on it. A number or a schedule.
      etas: the factors by which a step size shrinks and grows.
      step_sizes: the smallest and the largest step size.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slots `prev` and `step_size`.

    Raises:
      ValueError: the learning rate is negative, or not `0 < etas[0] < 1 < etas[1]`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.rprop(0.1), jnp.array(1.0)
      >>> state = optimizer.init(params)
      >>> for _ in range(2):
      ...     updates, state = optimizer.update(jnp.array(7.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(round(float(params), 4))
      0.78

    Reference:
      `torch.optim.Rprop <https://docs.pytorch.org/docs/stable/generated/torch.optim.Rprop.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check("etas", etas, lambda pair: 0.0 < pair[0] < 1.0 < pair[1], "two numbers with 0 < etas[0] < 1 < etas[1]")
    shrink, grow = etas
    smallest, largest = step_sizes

    def values(step: jax.Array, numbers: dict[str, jax.Array], rate: Any) -> Values:
        return {"learning_rate": rate, "first": step == 1}, {}

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        rounded = leaf.rounded
        size = jnp.where(leaf.values["first"], rounded(leaf.values["learning_rate"]), leaf.slots["step_size"])
        sign = rounded(leaf.grad * leaf.slots["prev"])
        factor = jnp.where(sign > 0, rounded(grow), jnp.where(sign < 0, rounded(shrink), 1.0))
        size = jnp.clip(rounded(size * factor), rounded(smallest), rounded(largest))
        grad = jnp.where(sign < 0, 0.0, leaf.grad)
        direction = jnp.where(jnp.isnan(grad), 0, jnp.sign(grad))  # PyTorch's sign of NaN is 0
        return leaf.moved(-direction * size), {"prev": grad, "step_size": size}

    return transformation(Rule({"prev": 0.0, "step_size": 0.0}, update, values), learning_rate, maximize=maximize)
