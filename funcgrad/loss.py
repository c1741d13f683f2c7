"""A loss is a ratio of two sums: `total / weight`. Microbatches add both and divide once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import trees


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # equality of arrays is no boolean
class WeightedLoss:
    """A loss as the ratio of two sums over the rows of a microbatch.

    A mean over tokens, over unmasked rows, or with class weights is `total / weight`. The mean over a whole batch is the
    sum of the totals over the sum of the weights; it is not the mean of the microbatches' means, unless all weights are
    equal. Return one of these from a loss function, and accumulation is exact for any weights.

    The weight is a constant to differentiation: only `total` is differentiated, as in PyTorch's
    `cross_entropy(..., ignore_index=...)`, whose divisor is a count.

    Attributes:
      total: `[]`, real: the weighted sum of the losses.
      weight: `[]`, real: the sum of the weights. Zero is allowed: a microbatch whose rows are all masked adds nothing.

    Example:
      >>> import jax, jax.numpy as jnp, funcgrad as fg
      >>> def loss_fn(params, batch):
      ...     losses = (params["w"] * batch["x"] - batch["y"]) ** 2
      ...     return fg.WeightedLoss(jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]))
      >>> batch = {"x": jnp.array([1.0, 2.0, 3.0, 4.0]), "y": jnp.zeros(4), "mask": jnp.array([1.0, 0.0, 0.0, 1.0])}
      >>> loss, grads = fg.value_and_grad(loss_fn, num_microbatches=2)({"w": jnp.array(1.0)}, batch)
      >>> print(loss, grads["w"])  # (1 + 16) / 2 and (2 + 32) / 2
      8.5 17.0
    """

    total: Any
    weight: Any

    def mean(self) -> jax.Array:
        """`total / weight`, `[]`; zero where the weight is zero."""
        return ratio(self.total, jax.lax.stop_gradient(jnp.asarray(self.weight)))


def ratio(total: Any, weight: Any) -> jax.Array:
    """`total / weight` in the dtype of `total` (float32 for integers), and zeros, never NaN, where the weight is zero.

    A weight between 0 and 1 divides by itself: a guard like `max(weight, 1)` would be wrong there.
    """
    total = jnp.asarray(total)
    total = total if jnp.issubdtype(total.dtype, jnp.inexact) else total.astype(jnp.float32)
    # In bfloat16 a weight of 257 rounds to 256, so the division is done at least in float32.
    wide = trees.at_least_float32(total.dtype)
    weight = jnp.asarray(weight).astype(wide)
    empty = weight == 0
    quotient = total.astype(wide) / jnp.where(empty, 1, weight)
    return jnp.where(empty, 0, quotient).astype(total.dtype)


def read_loss(output: Any, has_aux: bool) -> tuple[Any, Any]:
    """What a loss function returned, checked, as `(loss, aux)`; aux is None without `has_aux`.

    Raises:
      TypeError: the output does not fit `has_aux`, or the loss is not a real scalar or a `WeightedLoss` of two.
    """
    if has_aux:
        if not isinstance(output, tuple | list) or len(output) != 2:
            raise TypeError(
                f"with has_aux=True the loss function must return a pair (loss, aux); got {trees.describe_output(output)}. "
                "Return a pair, or leave has_aux out"
            )
        loss, aux = output
    else:
        if isinstance(output, tuple):
            raise TypeError(
                f"the loss function must return a scalar or a WeightedLoss; got {trees.describe_output(output)}. "
                "If it returns (loss, aux), pass has_aux=True"
            )
        loss, aux = output, None
    if isinstance(loss, WeightedLoss):
        check_real_scalar(loss.total, "WeightedLoss.total", "Sum it over the rows", integers=False)
        check_real_scalar(loss.weight, "WeightedLoss.weight", "Sum it over the rows", integers=True)
        loss = WeightedLoss(loss.total, jax.lax.stop_gradient(jnp.asarray(loss.weight)))
    else:
        advice = "Return a mean over the rows, or fg.WeightedLoss(total, weight)"
        check_real_scalar(loss, "the loss", advice, integers=False)
    return loss, aux


def check_real_scalar(value: Any, name: str, advice: str, *, integers: bool) -> None:
    """Check that `value` is a floating scalar, or with `integers` any real one; `advice` ends the error's text.

    Raises:
      TypeError: it is not.
    """
    dtype = trees.dtype_of(value)
    real = dtype is not None and (
        jnp.issubdtype(dtype, jnp.floating)
        or (integers and (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)))
    )
    if not real or jnp.shape(value) != ():
        raise TypeError(f"{name} must be a real scalar, float32[] for example; got {trees.describe(value)}. {advice}")
