"""Which inputs of a function its gradient reaches, decided from the traced computation and not from values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval


def gradient_reaches(loss_fn: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> list[bool]:
    """For each of `inputs`, whether the gradient of the scalar `loss_fn(inputs)` reaches it.

    PyTorch leaves `.grad` None where the graph has no path to a leaf, and writes zeros where it has one, though every
    derivative on it is zero. `jax.grad` gives zeros in both cases. Here the transposed computation is traced, and an input
    counts as reached if its gradient depends on the cotangent of the loss: through `jit`, `scan`, `cond`, `custom_jvp`,
    `custom_vjp` and `checkpoint`, not through `stop_gradient` or integers.

    Args:
      loss_fn: from a list of arrays to a real scalar.
      inputs: arrays or their shapes, floating or complex.

    Returns:
      A boolean for each input.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> gradient_reaches(lambda x: 0 * x[0] + jax.lax.stop_gradient(x[1]), [jnp.ones(()), jnp.ones(()), jnp.ones(())])
      [True, False, False]
    """
    shape = jax.eval_shape(loss_fn, list(inputs))
    cotangent = jax.ShapeDtypeStruct(shape.shape, shape.dtype)

    def transposed(inputs: list[Any], cotangent: Any) -> list[Any]:
        _, pullback = jax.vjp(loss_fn, inputs)
        return pullback(cotangent)[0]

    closed = jax.make_jaxpr(transposed)(list(inputs), cotangent)
    reached = []
    for index in range(len(closed.jaxpr.outvars)):
        wanted = [index == other for other in range(len(closed.jaxpr.outvars))]
        _, used = partial_eval.dce_jaxpr(closed.jaxpr, wanted)
        reached.append(bool(used[-1]))
    return reached
