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
        return _committed_like(params, cls(_without_repeats(params), opt_state, buffer, jnp.zeros((), jnp.int32)))


def check_optimizer(optimizer: Any) -> None:
    """Check that `optimizer` is an optax transformation.

    Raises:
      TypeError: it is not.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(
            f"optimizer must be an optax transformation, optax.adam(1e-3) for example; got {trees.describe(optimizer)}"
        )


def check_opt_state(optimizer: optax.GradientTransformation, selected: PyTree, opt_state: PyTree) -> None:
    """Check that `opt_state` is of `optimizer`, by its structure.

    Raises:
      ValueError: it is of another.
    """
    try:
        expected = jax.eval_shape(optimizer.init, selected)
    except (TypeError, IndexError, AttributeError):  # of an init that cannot be traced: no fault, it ran in `create`
        return
    structures = [jax.tree.structure(tree) for tree in (expected, opt_state)]
    if structures[0] != structures[1]:
        expected_text, got_text = (trees.abbreviate(str(structure)) for structure in structures)
        raise ValueError(
            "the state's opt_state is not of this optimizer: make state and step with the same one. Expected "
            f"{expected_text}, got {got_text}"
        )


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
        concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        return jax.device_put(leaf, sharding) if concrete and not leaf.committed else leaf

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
