"""Stochastic gradient descent: SGD, and ASGD, which averages its parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.arithmetic import is_array, is_zero
from funcgrad.torch_optim.rule import Leaf, Rule, Values, transformation


def sgd(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    momentum: Any = 0.0,
    dampening: Any = 0.0,
    weight_decay: Any = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.SGD`: gradient descent, with momentum.

    `b = momentum * b + (1 - dampening) * g`, but `b = g` at a parameter's first step; then `p -= learning_rate * b`, or with
    `nesterov` `p -= learning_rate * (g + momentum * b)`.

    Args:
      learning_rate: a number or a schedule.
      momentum: the factor of the momentum.
      dampening: what is taken off later gradients.
      weight_decay: this multiple of the parameter is added to its gradient.
      nesterov: whether to look one step of momentum ahead.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slot `momentum_buffer` where there is momentum.

    Raises:
      ValueError: the learning rate, the momentum or the weight decay is negative, or Nesterov's momentum lacks a momentum or is
        damped.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer = torch_optim.sgd(0.1, momentum=0.9, dampening=0.5)
      >>> params = jnp.array(1.0)
      >>> state = optimizer.init(params)
      >>> for _ in range(2):
      ...     updates, state = optimizer.update(jnp.array(1.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(round(float(params), 4))
      0.76

    Reference:
      `torch.optim.SGD <https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html>`_
    """
    arguments.check_learning_rate(learning_rate, nan_passes=True)
    for name, value in (("momentum", momentum), ("weight_decay", weight_decay)):
        arguments.check(name, value, lambda number: not number < 0.0, "a number of at least 0")
    if nesterov:
        arguments.check("momentum", momentum, lambda number: not number <= 0, "more than 0, as nesterov=True asks")
        arguments.check("dampening", dampening, lambda number: number == 0, "0, as nesterov=True asks")
    has_momentum, has_dampening = not is_zero(momentum), not is_zero(dampening)

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        grad, rounded = leaf.grad, leaf.rounded
        rate = rounded(leaf.values["learning_rate"])
        if not has_momentum:
            return leaf.moved(-rate * grad), {}
        old = leaf.slots["momentum_buffer"]
        buffer = rounded(rounded(momentum * old) + rounded(1 - dampening) * grad)
        if has_dampening:
            buffer = jnp.where(leaf.values["first"], grad, buffer)
        direction = rounded(grad + rounded(momentum) * buffer) if nesterov else buffer
        if is_array(momentum):  # it may be 0 while the step runs: then PyTorch leaves the buffer alone
            buffer, direction = jnp.where(momentum != 0, buffer, old), jnp.where(momentum != 0, direction, grad)
        return leaf.moved(-rate * direction), {"momentum_buffer": buffer}

    def values(step: jax.Array, numbers: dict[str, jax.Array], rate: Any) -> Values:
        return {"learning_rate": rate} | ({"first": step == 1} if has_momentum and has_dampening else {}), {}

    counts = momentum != 0 if is_array(momentum) else has_momentum
    rule = Rule({"momentum_buffer": 0.0} if has_momentum else {}, update, values, counts=counts)
    return transformation(rule, learning_rate, weight_decay=weight_decay, maximize=maximize)


def asgd(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    lambd: Any = 1e-4,
    alpha: Any = 0.75,
    t0: Any = 1e6,
    weight_decay: Any = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.ASGD`: gradient descent, and beside it the average of the parameters.

    `p = p * (1 - lambd * eta) - eta * g`, then `ax += mu * (p - ax)`, then `eta = learning_rate / (1 + lambd * learning_rate *
    t)**alpha` and `mu = 1 / max(1, t - t0)`, from `eta = learning_rate` and `mu = 1`.

    Args:
      learning_rate: a number or a schedule.
      lambd: the decay.
      alpha: the power of the step size's decline.
      t0: the step from which on parameters are averaged; before it, the average is the parameter.
      weight_decay: this multiple of the parameter is added to its gradient.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the average as slot `ax`: `optax.tree.get(state, "ax")`.

    Raises:
      ValueError: the learning rate or the weight decay is negative.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.asgd(0.1, t0=0.0), jnp.array(1.0)
      >>> state = optimizer.init(params)
      >>> for _ in range(3):
      ...     updates, state = optimizer.update(jnp.array(1.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(round(float(params), 4), round(float(optax.tree.get(state, "ax")), 4))
      0.7 0.75

    Reference:
      `torch.optim.ASGD <https://docs.pytorch.org/docs/stable/generated/torch.optim.ASGD.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check_not_negative(weight_decay=weight_decay)

    def values(step: jax.Array, numbers: dict[str, jax.Array], rate: Any) -> Values:
        eta, mu = jnp.where(step == 1, rate, numbers["eta"]), numbers["mu"]
        later = {"eta": rate / (1 + lambd * rate * step) ** alpha, "mu": 1 / jnp.maximum(1.0, step - t0)}
        return {"eta": eta, "mu": mu, "keep": 1 - lambd * eta}, later

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        eta, mu, rounded = leaf.values["eta"], leaf.values["mu"], leaf.rounded
        change = leaf.moved(-rounded(eta) * leaf.grad)
        param, average = rounded(leaf.param + change), leaf.slots["ax"]
        averaged = rounded(average + rounded(rounded(param - average) * mu))
        return change, {"ax": jnp.where(mu == 1, param, averaged)}

    rule = Rule({"ax": 0.0}, update, values, numbers={"eta": 0.0, "mu": 1.0})
    return transformation(rule, learning_rate, weight_decay=weight_decay, maximize=maximize)
