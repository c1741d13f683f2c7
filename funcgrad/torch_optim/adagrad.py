"""Two that sum up squared gradients: Adagrad, and Adadelta, which needs no learning rate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.arithmetic import is_zero
from funcgrad.torch_optim.rule import Leaf, Rule, Values, transformation


def adagrad(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    lr_decay: Any = 0.0,
    weight_decay: Any = 0.0,
    initial_accumulator_value: Any = 0.0,
    eps: Any = 1e-10,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Adagrad`: steps divided by the root of the sum of all squared gradients.

    `sum += g**2`, then `p -= learning_rate / (1 + (t - 1) * lr_decay) * g / (sqrt(sum) + eps)`.

    Args:
      learning_rate: a number or a schedule.
      lr_decay: the decline of the learning rate.
      weight_decay: this multiple of the parameter is added to its gradient.
      initial_accumulator_value: what the sum begins with.
      eps: what is added to the denominator, outside the root.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slot `sum`.

    Raises:
      ValueError: an argument is negative.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.adagrad(0.1), jnp.array(1.0)
      >>> updates, state = optimizer.update(jnp.array(2.0), optimizer.init(params), params)
      >>> print(optax.apply_updates(params, updates))
      0.9

    Reference:
      `torch.optim.Adagrad <https://docs.pytorch.org/docs/stable/generated/torch.optim.Adagrad.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check_not_negative(
        lr_decay=lr_decay, weight_decay=weight_decay, initial_accumulator_value=initial_accumulator_value, eps=eps
    )

    def values(step: jax.Array, numbers: dict[str, jax.Array], rate: Any) -> Values:
        return {"learning_rate": rate if is_zero(lr_decay) else rate / (1 + (step - 1) * lr_decay)}, {}

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        grad, rounded = leaf.grad, leaf.rounded
        total = rounded(leaf.slots["sum"] + grad * grad)
        denominator = rounded(rounded(jnp.sqrt(total)) + rounded(eps))
        return leaf.moved(-leaf.values["learning_rate"] * grad / denominator), {"sum": total}

    rule = Rule({"sum": initial_accumulator_value}, update, values)
    return transformation(rule, learning_rate, weight_decay=weight_decay, maximize=maximize)


def adadelta(
    learning_rate: optax.ScalarOrSchedule = 1.0,
    rho: Any = 0.9,
    eps: Any = 1e-6,
    weight_decay: Any = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Adadelta`: steps of the size of earlier ones.

    `v = rho * v + (1 - rho) * g**2`, `d = sqrt(u + eps) / sqrt(v + eps) * g`, `u = rho * u + (1 - rho) * d**2`, then
    `p -= learning_rate * d`.

    Args:
      learning_rate: a number or a schedule.
      rho: the decay rate of both averages.
      eps: what is added to them, inside the roots.
      weight_decay: this multiple of the parameter is added to its gradient.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slots `square_avg` and `acc_delta`.

    Raises:
      ValueError: the learning rate, `eps` or the weight decay is negative, or `rho` is not in [0, 1].

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.adadelta(), jnp.array(1.0)
      >>> updates, state = optimizer.update(jnp.array(1.0), optimizer.init(params), params)
      >>> print(round(float(optax.apply_updates(params, updates)), 6))
      0.996838

    Reference:
      `torch.optim.Adadelta <https://docs.pytorch.org/docs/stable/generated/torch.optim.Adadelta.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check("rho", rho, lambda number: 0.0 <= number <= 1.0, "from 0 to 1")
    arguments.check_not_negative(eps=eps, weight_decay=weight_decay)

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        grad, deltas, rounded = leaf.grad, leaf.slots["acc_delta"], leaf.rounded
        squares = rounded(rounded(leaf.slots["square_avg"] * rho) + (1 - rho) * grad * grad)
        root_of_squares, root_of_deltas = (rounded(jnp.sqrt(rounded(each + rounded(eps)))) for each in (squares, deltas))
        delta = rounded(rounded(root_of_deltas / root_of_squares) * grad)
        deltas = rounded(rounded(deltas * rho) + (1 - rho) * delta * delta)
        return leaf.moved(-rounded(leaf.values["learning_rate"]) * delta), {"square_avg": squares, "acc_delta": deltas}

    rule = Rule({"square_avg": 0.0, "acc_delta": 0.0}, update)
    return transformation(rule, learning_rate, weight_decay=weight_decay, maximize=maximize)
