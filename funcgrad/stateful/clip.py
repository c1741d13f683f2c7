"""`clip_grad_norm_` and `clip_grad_value_`, with PyTorch's formulas."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import trees
from funcgrad.stateful.parameter import some_parameters, with_gradients
from funcgrad.trees import PyTree


def clip_grad_norm_(params: PyTree, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> jax.Array:
    """Scale the gradients so that their norm, taken over all of them together, is at most `max_norm`.

    `.grad *= min(1, max_norm / (norm + 1e-6))`; a `.grad` that is None is passed over. The pure expression is
    `optax.clip_by_global_norm(max_norm)`, which has no `1e-6`.

    Args:
      params: a pytree with Parameters among its leaves.
      max_norm: the largest norm allowed.
      norm_type: the p of the p-norm, `math.inf` for the largest absolute value.
      error_if_nonfinite: raise if the norm is NaN or infinite; this waits for the device.

    Returns:
      The norm before clipping, `[]`; 0 where there is no gradient.

    Raises:
      RuntimeError: the norm is not finite, and that is an error. No gradient is changed.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import stateful
      >>> weight = stateful.Parameter(jnp.ones(2))
      >>> weight.grad = jnp.array([3.0, 4.0])
      >>> print(stateful.clip_grad_norm_(weight, 1.0), weight.grad)
      5.0 [0.5999999  0.79999983]

    Reference:
      `torch.nn.utils.clip_grad_norm_
      <https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html>`_
    """
    parameters = with_gradients(some_parameters(params))
    if not parameters:
        return jnp.zeros(())
    clipped, norm = _scaled_to_norm([parameter._grad for parameter in parameters], max_norm, float(norm_type))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm}, so they cannot be clipped. Look for the cause, "
            "or pass error_if_nonfinite=False"
        )
    for parameter, grad in zip(parameters, clipped, strict=True):
        parameter.set_grad(grad)
    return norm


def clip_grad_value_(params: PyTree, clip_value: float) -> None:
    """Clamp every element of every gradient to `[-clip_value, clip_value]`.

    The pure expression is `optax.clip(clip_value)`.

    Args:
      params: a pytree with Parameters among its leaves; a `.grad` that is None is passed over.
      clip_value: the largest absolute value allowed.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import stateful
      >>> weight = stateful.Parameter(jnp.ones(2))
      >>> weight.grad = jnp.array([3.0, -0.5])
      >>> stateful.clip_grad_value_(weight, 1.0)
      >>> print(weight.grad)
      [ 1.  -0.5]

    Reference:
      `torch.nn.utils.clip_grad_value_
      <https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_value_.html>`_
    """
    parameters = with_gradients(some_parameters(params))
    clipped = [jnp.clip(parameter._grad, -float(clip_value), float(clip_value)) for parameter in parameters]
    for parameter, grad in zip(parameters, clipped, strict=True):
        parameter.set_grad(grad)


@functools.partial(jax.jit, static_argnums=2)
def _scaled_to_norm(grads: list[Any], max_norm: Any, norm_type: float) -> tuple[list[Any], Any]:
    # In float32 at least: in float16 the square of 300 is infinite.
    wide = [grad.ravel().astype(trees.at_least_float32(grad.dtype)) for grad in grads]
    norms = jnp.stack([jnp.linalg.norm(grad, norm_type) for grad in wide])
    norm = jnp.linalg.norm(norms, norm_type)
    coefficient = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return [(grad * coefficient).astype(grad.dtype) for grad in grads], norm
