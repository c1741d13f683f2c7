"""Muon with PyTorch's rules: momentum made orthogonal by a Newton-Schulz iteration in bfloat16."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.arithmetic import lerp, rounding_to
from funcgrad.torch_optim.rule import Leaf, Rule, transformation

PyTree = Any
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUSTMENTS = ("original", "match_rms_adamw")


def muon(  # noqa: PLR0917 - PyTorch's order
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    weight_decay: Any = 0.1,
    momentum: Any = 0.95,
    nesterov: bool = True,
    ns_coefficients: Sequence[Any] = COEFFICIENTS,
    eps: Any = 1e-7,
    ns_steps: Any = 5,
    adjust_lr_fn: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Muon`, for matrices.

    `b = momentum * b + (1 - momentum) * g`, `u = orthogonal(momentum * b + (1 - momentum) * g)` with `nesterov` and
    `orthogonal(b)` without, `p *= 1 - learning_rate * weight_decay`, `p -= learning_rate * ratio * u`. `orthogonal` computes in
    bfloat16, as it does in PyTorch: an update is right to about a hundredth of it, whatever the parameter's type. Where that is
    bfloat16, without `nesterov` `b` is divided by its norm after each step: PyTorch's iteration begins in place.

    Weights are PyTorch's, `[out, in]`: those of flax, `[in, out]`, have another `ratio`. `optax.contrib.muon` is another rule:
    it computes in the parameter's type, does not weigh the gradient with `1 - momentum`, and takes other parameters to Adam.
    For a network with other parameters too, use `optax.multi_transform`.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: times the learning rate, the part of the parameter that decays at each step.
      momentum: of the gradients' mean.
      nesterov: whether to look ahead.
      ns_coefficients: the three coefficients of the iteration.
      eps: what stands for a smaller norm.
      ns_steps: how many iterations, below 100.
      adjust_lr_fn: None or `"original"`: a ratio of `sqrt(max(1, rows / columns))`; `"match_rms_adamw"`: `0.2 * sqrt(max(rows,
        columns))`.

    Returns:
      The transformation; its state has the slot `momentum_buffer`.

    Raises:
      ValueError: an argument is out of its range; in `init`, where a parameter is no matrix.
      TypeError: in `init`, where a parameter is complex.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad.torch_optim.muon import muon
      >>> optimizer, params = muon(0.5, weight_decay=0.0), jnp.zeros((2, 2))
      >>> updates, state = optimizer.update(jnp.array([[3.0, 0.0], [0.0, 0.0]]), optimizer.init(params), params)
      >>> print(round(float(updates[0, 0]), 1))
      -0.3

    Reference:
      `torch.optim.Muon <https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html>`_
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check_not_negative(momentum=momentum, weight_decay=weight_decay)
    if adjust_lr_fn is not None and adjust_lr_fn not in ADJUSTMENTS:
        raise ValueError(f"adjust_lr_fn must be None, 'original' or 'match_rms_adamw'; got {adjust_lr_fn!r}")
    if len(ns_coefficients) != 3:
        raise ValueError(f"ns_coefficients must be three numbers; got {ns_coefficients!r}")
    arguments.check("ns_steps", ns_steps, lambda steps: steps < 100, "less than 100")

    def update(leaf: Leaf) -> tuple[jax.Array, dict[str, jax.Array]]:
        rounded = leaf.rounded
        buffer = rounded(lerp(leaf.slots["momentum_buffer"], leaf.grad, 1 - momentum))
        direction = rounded(lerp(leaf.grad, buffer, momentum)) if nesterov else buffer
        start = _normalized(direction, eps)
        if not nesterov and leaf.dtype == jnp.bfloat16:
            buffer = start  # PyTorch normalizes it in place there
        direction = _iterated(start, ns_coefficients, ns_steps).astype(leaf.param.dtype)
        rate = leaf.values["learning_rate"] * _ratio(adjust_lr_fn, *leaf.param.shape)
        return leaf.moved(-rate * direction), {"momentum_buffer": buffer}

    rule = Rule({"momentum_buffer": 0.0}, update, counts=False)
    plain = transformation(rule, learning_rate, weight_decay=weight_decay, decoupled=True)

    def init(params: PyTree) -> Any:
        _check_matrices(params)
        return plain.init(params)

    return optax.GradientTransformationExtraArgs(init, plain.update)


def orthogonal(matrix: jax.Array, coefficients: Sequence[Any], steps: Any, eps: Any) -> jax.Array:
    """The Newton-Schulz iteration: a matrix with about the singular vectors of `matrix` and singular values near 1.

    `x = x / norm(x)`, then `steps` times `a = x @ x.T; x = c[0] * x + (c[1] * a + c[2] * a @ a) @ x`. Each operation is done in
    float32 and its result rounded to bfloat16, as PyTorch does it.

    Args:
      matrix: `[rows, columns]`, float32 or float64.
      coefficients: `c`, three numbers.
      steps: how many iterations.
      eps: what stands for a smaller norm.

    Returns:
      `[rows, columns]`, bfloat16.
    """
    return _iterated(_normalized(matrix, eps), coefficients, steps)


def _iterated(start: jax.Array, coefficients: Sequence[Any], steps: Any) -> jax.Array:
    """The iteration from a matrix of norm 1."""
    rounded = rounding_to(jnp.bfloat16)
    first, second, third = coefficients
    is_tall = start.shape[0] > start.shape[1]
    x = (start.T if is_tall else start).astype(jnp.bfloat16)

    def iterate(_: Any, x: jax.Array) -> jax.Array:
        gram = rounded(_product(x, x.T))
        polynomial = rounded(second * gram + third * _product(gram.astype(jnp.bfloat16), gram.astype(jnp.bfloat16)))
        return rounded(first * x.astype(jnp.float32) + _product(polynomial.astype(jnp.bfloat16), x)).astype(jnp.bfloat16)

    if isinstance(steps, int):
        for index in range(steps):
            x = iterate(index, x)
    else:  # from inject_hyperparams
        x = jax.lax.fori_loop(0, steps, iterate, x)
    return x.T if is_tall else x


def _normalized(matrix: jax.Array, eps: Any) -> jax.Array:
    """The matrix over its norm, float32 with numbers of bfloat16."""
    rounded = rounding_to(jnp.bfloat16)
    x = rounded(matrix.astype(jnp.float32))
    return rounded(x / jnp.maximum(rounded(jnp.sqrt(jnp.sum(x * x))), rounded(eps)))


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def _ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


def _check_matrices(params: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = f"params{jax.tree_util.keystr(path)}"
        if jnp.ndim(leaf) != 2:
            raise ValueError(
                f"muon takes matrices only; got the shape {jnp.shape(leaf)} at {name}. Give other parameters to another "
                "optimizer with optax.multi_transform"
            )
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(f"muon takes real parameters; got {jnp.result_type(leaf)} at {name}")
