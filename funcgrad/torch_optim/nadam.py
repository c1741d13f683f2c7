"""Two that change Adam's first moment and its step size: NAdam and RAdam."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.adam import MOMENTS, moments
from funcgrad.torch_optim.arithmetic import is_array, is_zero, log, one_minus_power
from funcgrad.torch_optim.rule import Leaf, Rule, Values, transformation


def nadam(  # noqa: PLR0917
    learning_rate: optax.ScalarOrSchedule = 2e-3,
    betas: Sequence[Any] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    momentum_decay: Any = 4e-3,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.NAdam`: Adam with Nesterov's momentum, which grows from half of `beta1` to all of it.

    `mu_t = beta1 * (1 - 0.5 * 0.96**(t * momentum_decay))`, with `P_t` the product of all up to `mu_t`; moments as in `adam`;
    then `p -= learning_rate * ((1 - mu_t) / (1 - P_t) * g + mu_{t+1} / (1 - P_{t+1}) * m) / (sqrt(v / (1 - beta2**t)) + eps)`.

    Args:
      learning_rate: a number or a schedule.
      betas: the decay rates of both moments.
      eps: what is added to the denominator, outside the root.
      weight_decay: this multiple of the parameter is added to its gradient.
      momentum_decay: how fast the momentum grows.
      decoupled_weight_decay: whether to decay the parameter by itself instead, as in `adamw`.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slots `exp_avg` and `exp_avg_sq`, and the number `mu_product`.

    Raises:
      ValueError: the learning rate, `eps`, the weight decay or the momentum's decay is negative, or a beta is not in [0, 1).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.nadam(0.1), jnp.array(1.0)
      >>> updates, state = optimizer.update(jnp.array(1.0), optimizer.init(params), params)
      >>> print(round(float(optax.apply_updates(params, updates)), 6))
      0.894355

    Reference:
      `torch.optim.NAdam <https://docs.pytorch.org/docs/stable/generated/torch.optim.NAdam.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check_betas(betas)
    arguments.check_not_negative(eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
    beta1, beta2 = betas

    def values(step: jax.Array, numbers: dict[str, jax.Array], rate: Any) -> Values:
        now, after = (beta1 * (1 - 0.5 * jnp.exp(count * momentum_decay * log(0.96))) for count in (step, step + 1))
        product = numbers["mu_product"] * now
        sizes = {"of_grad": -rate * (1 - now) / (1 - product), "of_moment": -rate * after / (1 - product * after)}
        return sizes | {"correction": one_minus_power(beta2, step)}, {"mu_product": product}

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        rounded, new = leaf.rounded, moments(leaf, beta1, beta2)
        denominator = rounded(rounded(jnp.sqrt(rounded(new["exp_avg_sq"] / leaf.values["correction"]))) + rounded(eps))
        of_grad = leaf.values["of_grad"] * leaf.grad / denominator
        of_moment = leaf.values["of_moment"] * new["exp_avg"] / denominator
        return leaf.moved(of_grad, of_moment), new

    rule = Rule(MOMENTS, update, values, numbers={"mu_product": 1.0})
    return transformation(rule, learning_rate, weight_decay=weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def radam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    betas: Sequence[Any] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.RAdam`: Adam that divides by the second moment only once enough gradients have entered it.

    Moments as in `adam`; `m_hat = m / (1 - beta1**t)`, `r = 2 / (1 - beta2) - 1`,
    `r_t = r - 2 * t * beta2**t / (1 - beta2**t)`. Where `r_t > 5`,
    `p -= learning_rate * m_hat * sqrt(1 - beta2**t) / (sqrt(v) + eps) * f` with
    `f = sqrt((r_t - 4) * (r_t - 2) * r / ((r - 4) * (r - 2) * r_t))`; else `p -= learning_rate * m_hat`.

    Args:
      learning_rate: a number or a schedule.
      betas: the decay rates of both moments.
      eps: what is added to the root of the second moment, before its bias is corrected.
      weight_decay: this multiple of the parameter is added to its gradient.
      decoupled_weight_decay: whether to decay the parameter by itself instead, as in `adamw`.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slots `exp_avg` and `exp_avg_sq`.

    Raises:
      ValueError: the learning rate, `eps` or the weight decay is negative, or a beta is not in [0, 1).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.radam(0.1), jnp.array(1.0)
      >>> updates, state = optimizer.update(jnp.array(1.0), optimizer.init(params), params)
      >>> print(optax.apply_updates(params, updates))
      0.9

    Reference:
      `torch.optim.RAdam <https://docs.pytorch.org/docs/stable/generated/torch.optim.RAdam.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check_betas(betas)
    arguments.check_not_negative(eps=eps, weight_decay=weight_decay)
    beta1, beta2 = betas

    def values(step: jax.Array, numbers: dict[str, jax.Array], rate: Any) -> Values:
        correction = {"first": one_minus_power(beta1, step), "root": jnp.sqrt(one_minus_power(beta2, step))}
        return correction | {"learning_rate": rate, "rectification": _rectification(beta2, step)}, {}

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        rounded, values, new = leaf.rounded, leaf.values, moments(leaf, beta1, beta2)
        plain = rounded(rounded(new["exp_avg"] / values["first"]) * values["learning_rate"])
        inverse = rounded(1 / rounded(rounded(jnp.sqrt(new["exp_avg_sq"])) + rounded(eps)))
        rectified = rounded(rounded(plain * rounded(inverse * values["root"])) * values["rectification"])
        delta = jnp.where(values["rectification"] > 0, rectified, plain)
        return leaf.moved(-delta), new

    return transformation(
        Rule(MOMENTS, update, values),
        learning_rate,
        weight_decay=weight_decay,
        decoupled=decoupled_weight_decay,
        maximize=maximize,
    )


def _rectification(beta2: Any, step: jax.Array) -> jax.Array:
    """The factor of RAdam's step, `[leaves]`; 0 where the step is not rectified."""
    limit = 2 / (1 - beta2) - 1
    length = _average_length(beta2, step)
    ratio = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
    return jnp.where(length > 5, jnp.sqrt(jnp.maximum(ratio, 0)), 0)


def _average_length(beta2: Any, step: jax.Array) -> jax.Array:
    """`2 / (1 - beta2) - 1 - 2 * step * beta2**step / (1 - beta2**step)`, without its cancellation.

    PyTorch computes it so in double precision; in float32, of the 1999 and the 1994 for a `beta2` of 0.999 only four digits
    would be left. With `rate = -log(beta2)` and `x = rate * step` it is
    `2 / (1 - beta2) - 1 - 2 / rate + 2 / rate * (1 - x / expm1(x))`, where the last bracket has a series for small `x`.
    """
    if is_zero(beta2):
        return jnp.ones_like(step)
    rate = -log(beta2)
    x = rate * step
    # Bernoulli's numbers; what is left out is 1e-10 of it at 0.7. From there on, what the difference from 1 loses is little.
    series = x / 2 - x**2 / 12 + x**4 / 720 - x**6 / 30240 + x**8 / 1209600
    series_end = 0.0625 if step.dtype == jnp.float64 else 0.7
    bracket = jnp.where(x < series_end, series, 1 - x / jnp.expm1(x))
    constant = 2 / (1 - beta2) - 1 - 2 / rate
    return constant + 2 / rate * bracket if is_array(beta2) else float(constant) + float(2 / rate) * bracket
