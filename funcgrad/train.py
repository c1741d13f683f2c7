"""Training steps: a whole window in one call, or microbatch by microbatch, around any optax transformation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import optax

from funcgrad import transform
from funcgrad.jit import JittedBackward, JittedStep
from funcgrad.loops import Loop
from funcgrad.memory import BudgetedStep
from funcgrad.opt_state import check_optimizer
from funcgrad.options import Options
from funcgrad.state import TrainState
from funcgrad.step import Step, TrainStep
from funcgrad.trees import PyTree, Trainable
from funcgrad.update import accepted, update_state


class Steps(NamedTuple):
    """The two halves of a training step, each jitted, for microbatches that arrive one at a time.

    Attributes:
      backward: `(state, microbatch, ...) -> (state, value)`: adds one microbatch; `value` is its loss, or `(loss, aux)`.
      update: `(state, **extra) -> (state, metrics)`: one optimizer step with the window's mean gradient; clears the buffer.
        `extra` goes to the optimizer's `update`, `value=loss` for `optax.contrib.reduce_on_plateau` for example.
    """

    backward: JittedBackward
    update: JittedStep


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    num_microbatches: int | str = 1,
    microbatch_size: int | None = None,
    budget_bytes: int | str | None = None,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    in_axes: PyTree = 0,
    order: str = "strided",
    key_argnums: int | Sequence[int] = (),
    carry_argnum: int | None = None,
    aux: PyTree = "mean",
    trainable: Trainable | None = None,
    skip_nonfinite: bool = False,
    loop: Loop = "auto",
    donate: bool = True,
) -> Step:
    """A jitted training step over a whole batch, in microbatches.

    One call is one window: the gradients of the microbatches are added up in `state.buffer`, on top of what it already
    holds; the optimizer sees their mean once, so clipping and schedules count windows; then the buffer is cleared.

    Args:
      loss_fn: `loss_fn(params, batch, ...)` gives a scalar or a `WeightedLoss`; with `has_aux`, a pair of that and aux.
      optimizer: the optax transformation that `TrainState.create` was given. It gets gradients in the dtypes of the
        parameters, and those of `value`, `grad` and `value_fn` that it takes: the loss of the batch, the gradients, and that
        loss as a function of the parameters, in microbatches too. So line searches and plateaus work.
      num_microbatches, microbatch_size, has_aux, batch_argnums, in_axes, order, key_argnums, carry_argnum, aux: as for
        `value_and_grad`; argument numbers are those of `loss_fn`, so the batch is 1. A carry stays in the caller's hands: pass
        it to each step, and take the next one from `metrics["carry"]`.
        `num_microbatches="auto"` is the fewest that fit `budget_bytes`, found with the compiler at the first call for given
        shapes: see `fg.plan`.
      budget_bytes: for `"auto"`: how many bytes of memory there are, a number or text like `"8GiB"`; None: what the device
        says that it has.
      loop: as for `value_and_grad`, or `"host"`: the program of one microbatch, called as often as there are microbatches. With
        `"auto"` a step keeps to the memory of a scan: on CPU, where the loss holds a convolution, it is `"ordered"` for a few
        small microbatches and else `"host"`; two microbatches stand in a loop body only where gradients outweigh activations.
      trainable: checked against the state, which says what is trained.
      skip_nonfinite: leave out microbatches whose loss or gradients are not finite. If none is left, nothing is updated.
      donate: overwrite the state that is passed in. False keeps it alive, at the price of a copy.

    Returns:
      `step(state, batch, ...) -> (state, metrics)`; `step.lower(...)` gives the compiled program's cost and memory, as for
      `jax.jit`. `metrics` holds `loss` `[]`, of this batch; `grad_norm` `[]`, the global norm of the window's mean gradient;
      `weight` `[]`, the window's; `skipped` `[]` int32; `aux` with `has_aux`; and `carry` with
      `carry_argnum`.

    Raises:
      ValueError, TypeError: as for `value_and_grad`, before anything is donated: the state stays as it was.

    Example:
      >>> import jax.numpy as jnp, optax, funcgrad as fg
      >>> optimizer = optax.sgd(0.5)
      >>> step = fg.train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer, num_microbatches=2)
      >>> state = fg.TrainState.create({"w": jnp.array(0.0)}, optimizer)
      >>> state, metrics = step(state, jnp.array([1.0, 2.0, 3.0, 6.0]))
      >>> print(state.params["w"], metrics["loss"], metrics["grad_norm"])
      3.0 12.5 6.0

    Reference:
      `torch.optim.Optimizer.step <https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.step.html>`_
    """
    is_auto = num_microbatches == "auto"
    if budget_bytes is not None and not is_auto:
        raise ValueError(f'budget_bytes goes with num_microbatches="auto"; got num_microbatches={num_microbatches!r}')
    options = Options(
        has_aux=has_aux,
        num_microbatches=1 if is_auto else cast(int, num_microbatches),
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        in_axes=in_axes,
        order=order,
        key_argnums=key_argnums,
        carry_argnum=carry_argnum,
        aux=aux,
        trainable=trainable,
        skip_nonfinite=skip_nonfinite,
        loop="auto" if loop == "host" else loop,
    )
    check_optimizer(optimizer)
    if is_auto:
        if microbatch_size is not None:
            raise ValueError('give num_microbatches="auto" or microbatch_size, not both')
        return BudgetedStep(loss_fn, optimizer, options, budget_bytes=budget_bytes, loop=loop, donate=donate)
    return TrainStep(loss_fn, optimizer, options, loop=loop, donate=donate)


def micro_steps(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    in_axes: PyTree = 0,
    key_argnums: int | Sequence[int] = (),
    carry_argnum: int | None = None,
    trainable: Trainable | None = None,
    skip_nonfinite: bool = False,
    donate: bool = True,
) -> Steps:
    """PyTorch's loop, jitted in two halves: `backward` as often as you like, then `update`.

    The window ends where you say, so a short last one is exact by itself. A window into which nothing was folded (no call
    of `backward`, or every microbatch skipped) updates nothing, as a PyTorch optimizer passes over a parameter whose
    `.grad` is None.

    Args:
      loss_fn, trainable, skip_nonfinite, donate: as for `train_step`.
      optimizer: as for `train_step`, but for line searches, which need the batch.
      has_aux, batch_argnums, in_axes, key_argnums, carry_argnum: as for `backward`; one key serves a window.

    Returns:
      `Steps(backward, update)`. The metrics of `update` hold `grad_norm`, `weight` and `skipped`, as for `train_step`; losses
      come from `backward`.

    Raises:
      ValueError, TypeError: as for `train_step`.

    Example:
      >>> import jax.numpy as jnp, optax, funcgrad as fg
      >>> optimizer = optax.sgd(0.5)
      >>> steps = fg.micro_steps(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
      >>> state = fg.TrainState.create({"w": jnp.array(0.0)}, optimizer)
      >>> for rows in (jnp.array([1.0, 2.0, 3.0]), jnp.array([6.0])):
      ...     state, loss = steps.backward(state, rows)
      >>> state, metrics = steps.update(state)
      >>> print(state.params["w"], metrics["weight"])
      3.0 4.0

    Reference:
      `PyTorch, Gradient accumulation <https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation>`_
    """
    check_optimizer(optimizer)
    backward = transform.backward(
        loss_fn,
        has_aux=has_aux,
        batch_argnums=batch_argnums,
        in_axes=in_axes,
        key_argnums=key_argnums,
        carry_argnum=carry_argnum,
        trainable=trainable,
        skip_nonfinite=skip_nonfinite,
    )

    def update(state: TrainState, **extra: Any) -> tuple[TrainState, dict[str, Any]]:
        def call_optimizer(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            try:
                return optimizer.update(grads, opt_state, params, **{**accepted(optimizer, {"grad": grads}), **extra})
            except TypeError as error:
                error.add_note(
                    "funcgrad: give update what the optimizer takes beside gradients: update(state, value=loss). A line search "
                    "needs the batch: use train_step"
                )
                raise

        return update_state(optimizer, state, call_optimizer, may_be_empty=True, wait_for_all=True)

    return Steps(JittedBackward(backward, donate=donate), JittedStep(update, donate=donate))
