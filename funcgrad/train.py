"""Training steps: a whole window in one call, or microbatch by microbatch, around any optax transformation."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from funcgrad import accumulator, transform, trees, window
from funcgrad.accumulator import GradBuffer
from funcgrad.loops import Loop
from funcgrad.static import StatefulJit
from funcgrad.trees import PyTree, Trainable
from funcgrad.window import Call, Options


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a training run carries from one step to the next. A pytree; checkpoint it at any point of a window.

    Attributes:
      params: the parameters, any pytree.
      opt_state: the optimizer's state, of the trained leaves.
      buffer: the gradients of the window so far.
      step: `[]` int32, the updates made.
    """

    params: PyTree
    opt_state: PyTree
    buffer: GradBuffer
    step: jax.Array

    @classmethod
    def create(
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        copy: bool = True,
        trainable: Trainable | None = None,
        dtype: Any = None,
    ) -> "TrainState":
        """The state before the first step.

        Steps donate their state: its arrays are overwritten in place. `create` therefore copies what it is handed.

        Args:
          params: any pytree; leaves that are not arrays (functions, strings) are kept as they are.
          optimizer: any optax transformation. It sees the trained leaves only.
          copy: False gives `params` away and saves the copy: after the first step its arrays are gone.
          trainable: which leaves are trained, as for `zeros`. The state says it; the steps follow it.
          dtype: what gradients are accumulated in, as for `zeros`.

        Raises:
          TypeError: `optimizer` is no optax transformation, or `dtype` does not fit.
          ValueError: nothing is trained.

        Example:
          >>> import jax.numpy as jnp, optax, funcgrad as fg
          >>> state = fg.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
          >>> print(state.step, state.buffer.count)
          0 0
        """
        _check_optimizer(optimizer)
        params = jax.tree.map(_own_array if copy else _as_array, params)
        buffer = accumulator.zeros(params, dtype=dtype, trainable=trainable)
        selected, _ = trees.partition(params, trees.trainable_mask(params, trainable))
        # The optimizer may keep an array that it was handed, parameters or a learning rate, in its state.
        opt_state = _owned(optimizer.init(selected))
        return _committed_like(params, cls(_without_repeats(params), opt_state, buffer, jnp.zeros((), jnp.int32)))


class Steps(NamedTuple):
    """The two halves of a training step, each jitted, for microbatches that arrive one at a time.

    Attributes:
      backward: `(state, microbatch, ...) -> (state, value)`: adds one microbatch; `value` is its loss, or `(loss, aux)`.
      update: `(state, **extra) -> (state, metrics)`: one optimizer step with the window's mean gradient; clears the buffer.
        `extra` goes to the optimizer's `update`, `value=loss` for `optax.contrib.reduce_on_plateau` for example.
    """

    backward: StatefulJit
    update: StatefulJit


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    num_microbatches: int = 1,
    microbatch_size: int | None = None,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    in_axes: PyTree = 0,
    order: str = "strided",
    key_argnums: int | Sequence[int] = (),
    aux: PyTree = "mean",
    trainable: Trainable | None = None,
    skip_nonfinite: bool = False,
    loop: Loop = "auto",
    donate: bool = True,
) -> StatefulJit:
    """A jitted training step over a whole batch, in microbatches.

    One call is one window: the gradients of the microbatches are added up in `state.buffer`, on top of what it already
    holds; the optimizer sees their mean once, so clipping and schedules count windows; then the buffer is cleared.

    Args:
      loss_fn: `loss_fn(params, batch, ...)` gives a scalar or a `WeightedLoss`; with `has_aux`, a pair of that and aux.
      optimizer: the optax transformation that `TrainState.create` was given. It gets gradients in the dtypes of the
        parameters, and `value=loss, grad=grads` if it takes extra arguments.
      num_microbatches, microbatch_size, has_aux, batch_argnums, in_axes, order, key_argnums, aux, loop: as for
        `value_and_grad`; argument numbers are those of `loss_fn`, so the batch is 1.
      trainable: checked against the state, which says what is trained.
      skip_nonfinite: leave out microbatches whose loss or gradients are not finite. If none is left, nothing is updated.
      donate: overwrite the state that is passed in. False keeps it alive, at the price of a copy.

    Returns:
      `step(state, batch, ...) -> (state, metrics)`; `step.lower(...)` gives the compiled program's cost and memory, as for
      `jax.jit`. `metrics` holds `loss` `[]`; `grad_norm` `[]`, the global norm of the mean gradient; `weight` `[]`, the
      window's; `skipped` `[]` int32; and `aux` with `has_aux`.

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
    settings = Options(
        has_aux=has_aux,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        in_axes=in_axes,
        order=order,
        key_argnums=key_argnums,
        aux=aux,
        trainable=trainable,
        skip_nonfinite=skip_nonfinite,
        loop=loop,
    )
    _check_optimizer(optimizer)

    @functools.wraps(loss_fn)
    def step(state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
        _check_state(state)
        call = Call(loss_fn, settings, (state.params, *args), kwargs)
        mask = window.buffer_mask(state.buffer, state.params, trainable, "params")
        sums, like = window.fold_batch(call, state.buffer, mask)
        loss, aux_value = window.read_window(sums, like, settings)
        state = dataclasses.replace(state, buffer=sums.buffer)
        state, metrics = _update(optimizer, state, {"value": loss}, may_be_empty=skip_nonfinite)
        return state, {"loss": loss, **metrics} | ({"aux": aux_value} if has_aux else {})

    return StatefulJit(step, donate=donate)


def micro_steps(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    in_axes: PyTree = 0,
    key_argnums: int | Sequence[int] = (),
    trainable: Trainable | None = None,
    skip_nonfinite: bool = False,
    donate: bool = True,
) -> Steps:
    """PyTorch's loop, jitted in two halves: `backward` as often as you like, then `update`.

    The window ends where you say, so a short last one is exact by itself. A window into which nothing was folded (no call
    of `backward`, or every microbatch skipped) updates nothing, as a PyTorch optimizer passes over a parameter whose
    `.grad` is None.

    Args:
      loss_fn, optimizer, trainable, skip_nonfinite, donate: as for `train_step`.
      has_aux, batch_argnums, in_axes, key_argnums: as for `backward`.

    Returns:
      `Steps(backward, update)`. The metrics of `update` hold `grad_norm`, `weight` and `skipped`, as for `train_step`.

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
    _check_optimizer(optimizer)
    run_backward = transform.backward(
        loss_fn,
        has_aux=has_aux,
        batch_argnums=batch_argnums,
        in_axes=in_axes,
        key_argnums=key_argnums,
        trainable=trainable,
        skip_nonfinite=skip_nonfinite,
    )

    @functools.wraps(loss_fn)
    def backward(state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, Any]:
        _check_state(state)
        buffer, value = run_backward(state.buffer, state.params, *args, **kwargs)
        return dataclasses.replace(state, buffer=buffer), value

    def update(state: TrainState, **extra: Any) -> tuple[TrainState, dict[str, Any]]:
        _check_state(state)
        return _update(optimizer, state, extra, may_be_empty=True)

    return Steps(StatefulJit(backward, donate=donate), StatefulJit(update, donate=donate))


def _update(
    optimizer: optax.GradientTransformation, state: TrainState, extra: dict[str, Any], *, may_be_empty: bool
) -> tuple[TrainState, dict[str, Any]]:
    """One optimizer step with the mean of `state.buffer`, which is then cleared."""
    buffer = state.buffer
    mask = window.buffer_mask(buffer, state.params, None, "params")
    selected, rest = trees.partition(state.params, mask)
    mean = accumulator.mean(buffer)
    grads = trees.cast_like(mean, selected)
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, state.opt_state, selected, **{"grad": grads, **extra})
    params, step = optax.apply_updates(selected, updates), state.step + 1
    if may_be_empty:
        kept = (selected, state.opt_state, state.step)
        params, opt_state, step = jax.tree.map(functools.partial(jnp.where, buffer.count > 0), (params, opt_state, step), kept)
    grad_norm = optax.tree.norm(mean)
    metrics = {"grad_norm": grad_norm, "weight": buffer.weight, "skipped": buffer.skipped}
    return TrainState(trees.combine(params, rest), opt_state, _clear(buffer, grad_norm), step), metrics


def _clear(buffer: GradBuffer, grad_norm: jax.Array) -> GradBuffer:
    """`zero_grad(buffer)`, in the memory of the sums, once they are read.

    A constant zero XLA writes whenever it likes, before the sums are read too, which then need a second copy of all
    gradients (measured with jax 0.10.2 on CPU: 30 MB of temporary memory, not 12, for 19 MB of parameters). So the zero is
    computed from the norm: a norm is never negative, and NaN is not either, but XLA has to read the sums to know.
    """
    never = grad_norm < 0
    return jax.tree.map(lambda leaf: jnp.broadcast_to(never.astype(leaf.dtype), leaf.shape), buffer)


def _check_optimizer(optimizer: Any) -> None:
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(
            f"optimizer must be an optax transformation, optax.adam(1e-3) for example; got {trees.describe(optimizer)}"
        )


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"the first argument of a step must be a TrainState; got {trees.describe(state)}. Make one with "
            "fg.TrainState.create(params, optimizer)"
        )


def _own_array(leaf: Any) -> Any:
    """A copy of an array leaf that shares no memory with it, strongly typed, so that the first step compiles for good."""
    if not trees.is_array(leaf):
        return leaf
    copied = jnp.array(leaf, copy=True)
    return copied if trees.is_key(leaf) else jax.lax.convert_element_type(copied, copied.dtype)


def _as_array(leaf: Any) -> Any:
    if not trees.is_array(leaf) or trees.is_key(leaf):
        return leaf
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype) if array.weak_type else array


def _owned(tree: PyTree) -> PyTree:
    """`tree` with each array copied, one at a time, so that the old ones can go as the new ones come."""
    leaves, treedef = jax.tree.flatten(tree)
    del tree
    for index, leaf in enumerate(leaves):
        leaves[index] = _own_array(leaf)
    return treedef.unflatten(leaves)


def _committed_like(params: PyTree, state: TrainState) -> TrainState:
    """`state` with all arrays committed to the devices of `params`, if those are: else the second step compiles anew."""
    concrete = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)]
    committed = [leaf.sharding for leaf in concrete if leaf.committed]
    if not committed:
        return state
    sharding = committed[0]
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())

    def commit(leaf: Any) -> Any:
        return jax.device_put(leaf, sharding) if isinstance(leaf, jax.Array) and not leaf.committed else leaf

    return jax.tree.map(commit, state)


def _without_repeats(tree: PyTree) -> PyTree:
    """`tree` with a copy for an array that stands in it twice: an array can be donated only once."""
    seen: set[int] = set()

    def once(leaf: Any) -> Any:
        if id(leaf) in seen and trees.is_array(leaf):
            return _own_array(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(once, tree)
