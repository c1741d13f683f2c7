"""The Adam family with one step size for all elements' first moments: Adam, AdamW, Adamax."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.arithmetic import lerp, one_minus_power
from funcgrad.torch_optim.rule import Leaf, Rule, Values, transformation


def adam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    betas: Sequence[Any] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Adam`.

    `m = beta1 * m + (1 - beta1) * g`, `v = beta2 * v + (1 - beta2) * g**2`, then `p -= learning_rate / (1 - beta1**t) * m /
    (sqrt(v / (1 - beta2**t)) + eps)`. With `amsgrad` the largest `v` so far takes the place of `v` in the last.

    Args:
      learning_rate: a number or a schedule.
      betas: the decay rates of both moments.
      eps: what is added to the denominator, outside the root.
      weight_decay: this multiple of the parameter is added to its gradient.
      amsgrad: whether to divide by the largest second moment so far.
      maximize: whether to go up.
      decoupled_weight_decay: whether to decay the parameter by itself instead, which makes it `adamw`.

    Returns:
      The transformation; its state has the slots `exp_avg`, `exp_avg_sq` and with `amsgrad` `max_exp_avg_sq`.

    Raises:
      ValueError: the learning rate, `eps` or the weight decay is negative, or `betas` are not two floats
        or JAX arrays in [0, 1), or two arrays.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.adam(0.1, amsgrad=True), jnp.array(1.0)
      >>> updates, state = optimizer.update(jnp.array(2.0), optimizer.init(params), params)
      >>> print(optax.apply_updates(params, updates))
      0.9

    Reference:
      `torch.optim.Adam <https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check_betas(betas)
    arguments.check_not_negative(eps=eps, weight_decay=weight_decay)
    # PyTorch wants two of a kind; a JAX array beside a float is what `optax.inject_hyperparams` makes of one that is scheduled.
    if not any(all(isinstance(beta, kind) for beta in betas) for kind in (float | jax.Array, jax.Array | np.ndarray)):
        raise ValueError(f"betas must be two floats or two arrays; got {betas!r}")
    beta1, beta2 = betas

    def values(step: jax.Array, numbers: dict[str, jax.Array], rate: Any) -> Values:
        root = jnp.sqrt(one_minus_power(beta2, step))
        return {"step_size": rate / one_minus_power(beta1, step), "root": root}, {}

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        rounded, new = leaf.rounded, moments(leaf, beta1, beta2)
        second = new["exp_avg_sq"]
        if amsgrad:
            second = new["max_exp_avg_sq"] = jnp.maximum(leaf.slots["max_exp_avg_sq"], second)
        denominator = rounded(rounded(rounded(jnp.sqrt(second)) / leaf.values["root"]) + rounded(eps))
        delta = -leaf.values["step_size"] * new["exp_avg"] / denominator
        return leaf.moved(delta), new

    rule = Rule(MOMENTS | ({"max_exp_avg_sq": 0.0} if amsgrad else {}), update, values)
    return transformation(rule, learning_rate, weight_decay=weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def adamw(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    betas: Sequence[Any] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.AdamW`: Adam, with the decay of the parameters apart from the moments.

    `p *= 1 - learning_rate * weight_decay`, and then the step of `adam`.

    Args:
      learning_rate: a number or a schedule.
      betas: the decay rates of both moments.
      eps: what is added to the denominator, outside the root.
      weight_decay: times the learning rate, the part of the parameter that decays at each step; `optax.adamw` has 1e-4.
      amsgrad: whether to divide by the largest second moment so far.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slots `exp_avg`, `exp_avg_sq` and with `amsgrad` `max_exp_avg_sq`.

    Raises:
      ValueError: as for `adam`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.adamw(0.1, weight_decay=0.5), jnp.array(1.0)
      >>> updates, state = optimizer.update(jnp.array(2.0), optimizer.init(params), params)
      >>> print(round(float(optax.apply_updates(params, updates)), 4))
      0.85

    Reference:
      `torch.optim.AdamW <https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html>`_
    """
    return adam(learning_rate, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True)


def adamax(
    learning_rate: optax.ScalarOrSchedule = 2e-3,
    betas: Sequence[Any] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Adamax`: Adam with the infinity norm.

    `m = beta1 * m + (1 - beta1) * g`, `u = max(beta2 * u, |g| + eps)`, then `p -= learning_rate / (1 - beta1**t) * m / u`.

    Args:
      learning_rate: a number or a schedule.
      betas: the decay rates of the moment and of the norm.
      eps: what is added to the size of the gradient.
      weight_decay: this multiple of the parameter is added to its gradient.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slots `exp_avg` and `exp_inf`.

    Raises:
      ValueError: the learning rate, `eps` or the weight decay is negative, or a beta is not in [0, 1).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.adamax(0.1), jnp.array(1.0)
      >>> updates, state = optimizer.update(jnp.array(2.0), optimizer.init(params), params)
      >>> print(optax.apply_updates(params, updates))
      0.9

    Reference:
      `torch.optim.Adamax <https://docs.pytorch.org/docs/stable/generated/torch.optim.Adamax.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check_betas(betas)
    arguments.check_not_negative(eps=eps, weight_decay=weight_decay)
    beta1, beta2 = betas

    def values(step: jax.Array, numbers: dict[str, jax.Array], rate: Any) -> Values:
        return {"step_size": rate / one_minus_power(beta1, step)}, {}

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        grad, rounded = leaf.grad, leaf.rounded
        first = rounded(lerp(leaf.slots["exp_avg"], grad, 1 - beta1))
        norm = jnp.maximum(rounded(leaf.slots["exp_inf"] * beta2), rounded(jnp.abs(grad) + rounded(eps)))
        return leaf.moved(-leaf.values["step_size"] * first / norm), {"exp_avg": first, "exp_inf": norm}

    rule = Rule({"exp_avg": 0.0, "exp_inf": 0.0}, update, values)
    return transformation(rule, learning_rate, weight_decay=weight_decay, maximize=maximize)


MOMENTS = {"exp_avg": 0.0, "exp_avg_sq": 0.0}


def moments(leaf: Leaf, beta1: Any, beta2: Any) -> dict[str, jax.Array]:
    """Both moments of a parameter's gradients, after this one."""
    grad, rounded = leaf.grad, leaf.rounded
    first = rounded(lerp(leaf.slots["exp_avg"], grad, 1 - beta1))
    second = rounded(rounded(leaf.slots["exp_avg_sq"] * beta2) + (1 - beta2) * grad * grad)
    return {"exp_avg": first, "exp_avg_sq": second}
