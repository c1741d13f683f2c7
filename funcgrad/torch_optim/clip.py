"""Clipping of gradients with PyTorch's formulas, as transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def clip_grad_norm(max_norm: Any, norm_type: float = 2.0) -> optax.GradientTransformationExtraArgs:
    """`torch.nn.utils.clip_grad_norm_`: scale the gradients so that the norm of all together is at most `max_norm`.

    `g *= min(1, max_norm / (norm + 1e-6))`; `optax.clip_by_global_norm` has no `1e-6`. A gradient that is None is passed over.

    Args:
      max_norm: the largest norm allowed.
      norm_type: the p of the p-norm, `math.inf` for the largest size. Under `optax.inject_hyperparams` it has to be one of the
        `static_args`.

    Returns:
      The transformation.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> clip = torch_optim.clip_grad_norm(0.5)
      >>> grads = {"w": jnp.array([0.3, 0.4]), "b": None}
      >>> print(clip.update(grads, clip.init(grads))[0]["w"])
      [0.29999942 0.3999992 ]

    Reference:
      `torch.nn.utils.clip_grad_norm_
      <https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html>`_
    """
    order = float(norm_type)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        del params, extra
        grads = jax.tree.leaves(updates)
        if not grads:
            return updates, state
        # In float32 at least: in float16 the square of 300 is infinite.
        wide = [jnp.ravel(grad).astype(jnp.promote_types(jnp.result_type(grad), jnp.float32)) for grad in grads]
        norm = jnp.linalg.norm(jnp.stack([jnp.linalg.norm(grad, order) for grad in wide]), order)
        coefficient = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
        return jax.tree.map(lambda grad: (grad * coefficient).astype(jnp.result_type(grad)), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def clip_grad_value(clip_value: Any) -> optax.GradientTransformationExtraArgs:
    """`torch.nn.utils.clip_grad_value_`: clamp every element to `[-clip_value, clip_value]`.

    `optax.clip` by PyTorch's name. A gradient that is None is passed over.

    Args:
      clip_value: the largest size allowed.

    Returns:
      The transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import torch_optim
      >>> clip = torch_optim.clip_grad_value(1.0)
      >>> grads = jnp.array([3.0, -0.5])
      >>> print(clip.update(grads, clip.init(grads))[0])
      [ 1.  -0.5]

    Reference:
      `torch.nn.utils.clip_grad_value_
      <https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_value_.html>`_
    """
    return optax.with_extra_args_support(optax.clip(clip_value))
