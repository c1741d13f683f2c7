"""flax nnx's mutable modules on the pure core: a training step that updates a module and its optimizer in place.

Nothing else in funcgrad imports flax.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from funcgrad import checks, loops, trees
from funcgrad.nnx.step import ModuleStep
from funcgrad.options import with_two_more
from funcgrad.trees import PyTree

__all__ = ["ModuleStep", "train_step"]


def train_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    loss_fn: Callable[..., Any],
    *,
    num_microbatches: int | str = 1,
    microbatch_size: int | None = None,
    budget_bytes: int | str | None = None,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    in_axes: PyTree = 0,
    order: str = "strided",
    key_argnums: int | Sequence[int] = (),
    aux: PyTree = "mean",
    skip_nonfinite: bool = False,
    dtype: Any = None,
    compensated: bool = False,
    loop: loops.Loop = "auto",
    donate: bool = True,
) -> ModuleStep:
    """A training step over a whole batch, in microbatches, that updates a module and its optimizer in place.

    One call is one window, as for `funcgrad.train_step`:

        metrics = step(batch)

    leaves `model` and `optimizer` as a loop over the microbatches would that calls `nnx.grad` for each, and then
    `optimizer.update(model, grads)` once, with the gradients of the whole batch.

    What `optimizer.wrt` selects is trained. All else that the loss changes, running statistics and the counts of random
    streams, goes from microbatch to microbatch, so dropout draws new numbers in each. Any other `nnx.Param` is frozen: it has
    no gradient and no optimizer state, and stays the same array, unless the loss assigns to it. The module is read at each
    call: after `model.eval()`, another attribute or a loaded checkpoint the step goes on from there, and compiles anew where
    it has to.

    A step overwrites only arrays that an earlier step made, and that nothing but the module or the optimizer holds. All others
    are copied first: what was there before the first step, what was loaded, what a snapshot or another module holds.

    Args:
      model: the module. `loss_fn` gets one of the same structure, not this object.
      optimizer: `nnx.Optimizer(model, tx, wrt=...)`. The step does what its `update` does, with `tx`, which is offered what
        `funcgrad.train_step` offers.
      loss_fn: `loss_fn(model, batch, ...)` gives a scalar or a `WeightedLoss`; with `has_aux`, a pair of that and aux.
      num_microbatches, microbatch_size, budget_bytes, has_aux, batch_argnums, in_axes, order, key_argnums, aux, skip_nonfinite,
        loop: as for `funcgrad.train_step`; argument numbers are those of `loss_fn`, so the batch is 1. A microbatch that is
        skipped changes nothing in the module. What else microbatches hand on, a hidden state, belongs in an `nnx.Variable`.
      dtype, compensated: what gradients are accumulated in, and whether exactly, as for `zeros`.
      donate: whether the memory of parameters and optimizer state is reused. False overwrites nothing, at the price of a copy:
        for aliases that JAX itself makes of an array, as `jax.device_put` to the same device does, which a step cannot see.

    Returns:
      `step(batch, ...) -> metrics`, with `loss`, `grad_norm`, `weight`, `skipped`, and `aux` with `has_aux`, as for
      `funcgrad.train_step`; `step.lower(batch, ...)` gives the compiled program's cost and memory.

      Inside `nnx.jit`, make the step there, of the module and the optimizer that the function was passed.

    Raises:
      ValueError, TypeError: as for `funcgrad.train_step`; or the optimizer is of a model of another structure; or the loss
        changes what it may not change: a trained variable, the module's structure, the shape of a variable; or the module is of
        another trace level. Module and optimizer then are as they were.

    Example:
      >>> import jax.numpy as jnp, optax, funcgrad as fg
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
      >>> loss_fn = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
      >>> step = fg.nnx.train_step(model, optimizer, loss_fn, num_microbatches=2)
      >>> metrics = step({"x": jnp.eye(2), "y": jnp.array([[1.0], [3.0]])})
      >>> print(metrics["loss"], model.kernel[...].ravel(), optimizer.step[...])
      5.0 [0.5 1.5] 1

    Reference:
      `flax.nnx.Optimizer <https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/training/optimizer.html>`_
    """
    numbers = {
        "batch_argnums": checks.argument_numbers("batch_argnums", batch_argnums),
        "key_argnums": checks.argument_numbers("key_argnums", key_argnums),
    }
    options = {
        "num_microbatches": num_microbatches,
        "microbatch_size": microbatch_size,
        "budget_bytes": budget_bytes,
        "order": order,
        "aux": aux,
        "skip_nonfinite": skip_nonfinite,
        "loop": loop,
        "donate": donate,
        **with_two_more(batch_argnums, in_axes, key_argnums),
    }
    buffer_options = {"dtype": dtype, "compensated": compensated}
    _check_types(model, optimizer)
    return ModuleStep(model, optimizer, loss_fn, numbers, has_aux=has_aux, options=options, buffer_options=buffer_options)


def _check_types(model: Any, optimizer: Any) -> None:
    if not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            f"optimizer must be an nnx.Optimizer(model, tx, wrt=nnx.Param); got {trees.describe(optimizer)}. For an optax "
            "transformation and a pytree of parameters there is fg.train_step"
        )
    if type(optimizer).update not in (nnx.Optimizer.update, nnx.ModelAndOptimizer.update):
        raise TypeError(
            f"{type(optimizer).__name__} has an update method of its own, which a step would not call. Do what it does in an "
            "optax transformation, or after the step"
        )
    if isinstance(optimizer, nnx.ModelAndOptimizer) and optimizer.model is not model:
        raise ValueError("the optimizer holds another model than the step was given; pass optimizer.model")
