"""RMSprop: steps divided by the root of an average of squared gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.arithmetic import is_zero, lerp
from funcgrad.torch_optim.rule import Leaf, Rule, transformation


def rmsprop(  # noqa: PLR0917
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    alpha: Any = 0.99,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    momentum: Any = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.RMSprop`.

    `v = alpha * v + (1 - alpha) * g**2`, `d = g / (sqrt(v) + eps)`, then `p -= learning_rate * d`; with momentum
    `b = momentum * b + d` and `p -= learning_rate * b`, so that a schedule scales the whole momentum. `centered` takes the
    square of the averaged gradient off `v`.

    Args:
      learning_rate: a number or a schedule.
      alpha: the decay rate of the averages.
      eps: what is added to the denominator, outside the root.
      weight_decay: this multiple of the parameter is added to its gradient.
      momentum: the factor of the momentum.
      centered: whether to divide by the deviation instead.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slots `square_avg`, with momentum `momentum_buffer`, and if centered `grad_avg`.

    Raises:
      ValueError: a number is negative.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.rmsprop(0.1), jnp.array(1.0)
      >>> updates, state = optimizer.update(jnp.array(1.0), optimizer.init(params), params)
      >>> print(round(float(optax.apply_updates(params, updates)), 4))
      0.0

    Reference:
      `torch.optim.RMSprop <https://docs.pytorch.org/docs/stable/generated/torch.optim.RMSprop.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check_not_negative(eps=eps, momentum=momentum, weight_decay=weight_decay, alpha=alpha)
    has_momentum = not is_zero(momentum)

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        grad, rate, rounded = leaf.grad, leaf.values["learning_rate"], leaf.rounded
        squares = rounded(rounded(leaf.slots["square_avg"] * alpha) + (1 - alpha) * grad * grad)
        new, variance = {"square_avg": squares}, squares
        if centered:
            mean = new["grad_avg"] = rounded(lerp(leaf.slots["grad_avg"], grad, 1 - alpha))
            variance = rounded(squares - mean * mean)
        denominator = rounded(rounded(jnp.sqrt(variance)) + rounded(eps))
        if not has_momentum:
            return leaf.moved(-rate * grad / denominator), new
        buffer = rounded(rounded(leaf.slots["momentum_buffer"] * momentum) + grad / denominator)
        return leaf.moved(-rounded(rate) * buffer), new | {"momentum_buffer": buffer}

    optional = {"momentum_buffer": has_momentum, "grad_avg": centered}
    slots = {"square_avg": 0.0} | {name: 0.0 for name, wanted in optional.items() if wanted}
    return transformation(Rule(slots, update), learning_rate, weight_decay=weight_decay, maximize=maximize)
