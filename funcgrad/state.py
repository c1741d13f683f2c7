"""TrainState: what a training run carries from one step to the next, in arrays of its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from funcgrad import accumulator, trees
from funcgrad.accumulator import GradBuffer
from funcgrad.opt_state import carried_over, check_opt_state, check_optimizer, state_of
from funcgrad.trees import PyTree, Trainable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # equality of arrays is no boolean
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
        compensated: bool = False,
    ) -> "TrainState":
        """The state before the first step.

        Steps donate their state: its arrays are overwritten in place. `create` therefore copies what it is handed.

        Args:
          params: any pytree. What is no array (functions, strings, Python numbers) is kept as it is, untrained: a dropout rate
            in a module, a flag.
          optimizer: any optax transformation. It sees the trained leaves only.
          copy: False gives `params` away and saves the copy: after the first step its arrays are gone.
          trainable: which leaves are trained, as for `zeros`. The state says it; the steps follow it.
          dtype, compensated: what gradients are accumulated in, and whether exactly, as for `zeros`.

        Raises:
          TypeError: `optimizer` is no optax transformation, or `dtype` does not fit.
          ValueError: nothing is trained.

        Example:
          >>> import jax.numpy as jnp, optax, funcgrad as fg
          >>> state = fg.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
          >>> print(state.step, state.buffer.count)
          0 0
        """
        check_optimizer(optimizer)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            raise TypeError(
                "params must hold arrays. For a state's shapes: jax.eval_shape(lambda p: TrainState.create(p, ...), p)"
            )
        params = jax.tree.map(_own_array if copy else trees.strongly_typed, params)
        mask = trees.trainable_mask(params, trainable, numbers=False)
        selected, _ = trees.partition(params, mask)
        buffer = accumulator.zeros(selected, dtype=dtype, compensated=compensated)
        # The optimizer may keep an array that it was handed, parameters or a learning rate, in its state.
        opt_state = _owned(optimizer.init(selected))
        return committed_like(params, cls(_without_repeats(params), opt_state, buffer, jnp.zeros((), jnp.int32)))

    def with_trainable(
        self, optimizer: optax.GradientTransformation, trainable: Trainable | None, *, dtype: Any = None
    ) -> "TrainState":
        """The state that goes on with other leaves trained: fine-tuning that freezes or thaws a part half-way.

        Leaves that stay trained keep their moments; those that are new to the optimizer begin as in `create`, and of those that
        are frozen nothing is kept. `step`, and what the optimizer has once for all leaves (counts, schedules, hyperparameters),
        goes on.

        For leaves that stay, it is PyTorch's `requires_grad_(False)` of the others, with `.grad` None. Thawing differs from
        PyTorch in two ways: its optimizers hold on to the moments of what is frozen, and they count steps for each parameter,
        while optax's Adam has one count for all, so that a leaf that begins late has no bias correction: its first updates are
        about 3 times as large. A warm-up of the learning rate, or a new state, goes round that. A new state is right, too,
        where an optimizer computed numbers from all leaves together, as L-BFGS does.

        Called between windows and outside of `jax.jit`; the next call of a step compiles anew. The arrays are shared with this
        state, which is not to be used any more.

        Args:
          optimizer: that of the state.
          trainable: which leaves are trained from now on, as for `create`; None for all.
          dtype: what `create` was given.

        Raises:
          TypeError: `optimizer` is no optax transformation.
          ValueError: the buffer is not empty, or nothing is trained, or `optimizer` or `dtype` is not that of the state, or the
            optimizer's state does not tell what in it belongs to which leaf.

        Example:
          >>> import jax.numpy as jnp, optax, funcgrad as fg
          >>> optimizer = optax.adam(0.1)
          >>> state = fg.TrainState.create({"body": jnp.ones(3), "head": jnp.ones(3)}, optimizer)
          >>> state = state.with_trainable(optimizer, {"body": False, "head": True})
          >>> print(state.buffer.grads)
          {'body': None, 'head': Array([0., 0., 0.], dtype=float32)}

        Reference:
          `torch.Tensor.requires_grad_ <https://docs.pytorch.org/docs/stable/generated/torch.Tensor.requires_grad_.html>`_
        """
        _check_between_windows(self.buffer)
        check_optimizer(optimizer)
        check_opt_state(optimizer, _having_places(self.params, self.buffer), self.opt_state)
        compensated = self.buffer.compensation is not None
        fresh = TrainState.create(self.params, optimizer, copy=False, trainable=trainable, dtype=dtype, compensated=compensated)
        _check_same_dtypes(self.buffer, fresh.buffer)
        middle = state_of(optimizer, _having_places(_having_places(self.params, self.buffer), fresh.buffer))
        opt_state = carried_over(self.opt_state, middle, fresh.opt_state)
        return dataclasses.replace(fresh, opt_state=opt_state, step=self.step)


def _check_between_windows(buffer: GradBuffer) -> None:
    """Check that nothing was added to `buffer` since it was cleared.

    Raises:
      ValueError: something was, or it cannot be known, in a trace.
    """
    if isinstance(buffer.weight, jax.Array) and not isinstance(buffer.weight, Tracer) and buffer.weight.is_deleted():
        raise ValueError("this state was overwritten by a step, which was given it: use the state that the step returned")
    if isinstance(buffer.count, Tracer):
        raise ValueError("with_trainable changes what the state holds: call it outside of jax.jit, between two steps")
    seen = int(buffer.count) + int(buffer.skipped)
    if seen:
        raise ValueError(
            f"the buffer holds {seen} microbatch{'es' * (seen > 1)} of a window that has not ended. Change what is trained "
            "between windows: call update first, or dataclasses.replace(state, buffer=fg.zero_grad(state.buffer))"
        )


def _check_same_dtypes(old: GradBuffer, new: GradBuffer) -> None:
    """Check that leaves that stay trained are accumulated in the dtype that they were.

    Raises:
      ValueError: they are not.
    """
    pairs = zip(
        trees.leaves_with_names(old.grads, "params", none_is_leaf=True),
        jax.tree.leaves(new.grads, is_leaf=trees.is_none),
        strict=True,
    )
    for (name, before), after in pairs:
        if before is not None and after is not None and before.dtype != after.dtype:
            raise ValueError(
                f"gradients of {name} were accumulated in {before.dtype}, and would now be in {after.dtype}. Give "
                f"with_trainable the dtype that create was given: dtype={str(before.dtype)!r}"
            )


def _having_places(params: PyTree, buffer: GradBuffer) -> PyTree:
    """`params` with None for the leaves that have no place in `buffer`."""
    return jax.tree.map(lambda place, leaf: None if place is None else leaf, buffer.grads, params, is_leaf=trees.is_none)


def check_state(state: Any) -> None:
    """Check that `state` is a `TrainState`.

    Raises:
      TypeError: it is not.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"the first argument of a step must be a TrainState; got {trees.describe(state)}. Make one with "
            "fg.TrainState.create(params, optimizer)"
        )


def _own_array(leaf: Any) -> Any:
    """A copy of an array leaf that shares no memory with it, strongly typed, so that the first step compiles for good."""
    return trees.strongly_typed(jnp.array(leaf, copy=True)) if trees.is_array(leaf) else leaf


def _owned(opt_state: PyTree) -> PyTree:
    """The optimizer's state with each array copied, and each number made one.

    One at a time, so that the old ones can go as the new ones come.
    """
    leaves, treedef = jax.tree.flatten(opt_state)
    del opt_state
    for index, leaf in enumerate(leaves):
        leaves[index] = _own_array(jnp.asarray(leaf) if isinstance(leaf, trees.NUMBERS) else leaf)
    return treedef.unflatten(leaves)


def committed_like(params: PyTree, tree: PyTree) -> Any:
    """`tree` with all arrays committed to the devices of `params`, if those are: else the second step compiles anew."""
    concrete = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)]
    committed = [leaf.sharding for leaf in concrete if leaf.committed]
    if not committed:
        return tree
    sharding = committed[0]
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())

    def commit(leaf: Any) -> Any:
        concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        return jax.device_put(leaf, sharding) if concrete and not leaf.committed else leaf

    return jax.tree.map(commit, tree)


def _without_repeats(tree: PyTree) -> PyTree:
    """`tree` with a copy for an array that stands in it twice: an array can be donated only once."""
    seen: set[int] = set()

    def once(leaf: Any) -> Any:
        if id(leaf) in seen and trees.is_array(leaf):
            return _own_array(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(once, tree)
