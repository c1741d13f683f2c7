"""How each leaf of a loss function's aux is reduced over the microbatches of a window."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from funcgrad import checks, loss, trees
from funcgrad.trees import PyTree


class Reducer(NamedTuple):
    """One way to reduce a leaf: three pure functions around a running value, so that it fits any loop.

    Attributes:
      init: `(leaf) -> running`: the value before the first microbatch; `leaf` tells shape and dtype only.
      fold: `(running, leaf, weight, index) -> running`: one microbatch more.
      finish: `(running, leaf, weight) -> result`: from the running value and the window's weight.
    """

    init: Callable[[Any], Any]
    fold: Callable[[Any, Any, Any, Any], Any]
    finish: Callable[[Any, Any, Any], Any]


def _zeros(leaf: Any) -> Any:
    return jnp.zeros(jnp.shape(leaf), _sum_dtype(leaf))


def _sum_dtype(leaf: Any) -> Any:
    """At least 32 bits, as in `jnp.sum`; booleans are counted."""
    dtype = trees.dtype_of(leaf)
    if trees.is_differentiable(leaf):
        return trees.at_least_float32(dtype)
    return jnp.promote_types(dtype, jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)


def _add_weighted(running: Any, leaf: Any, weight: Any, index: Any) -> Any:
    weight = jnp.asarray(weight).astype(trees.real_dtype(running.dtype))
    # What a microbatch without weight says does not count, not even NaN, its mean over nothing.
    return running + jnp.where(weight == 0, 0, jnp.asarray(leaf).astype(running.dtype) * weight)


def _add(running: Any, leaf: Any, weight: Any, index: Any) -> Any:
    return running + jnp.asarray(leaf).astype(running.dtype)


def _divide(running: Any, leaf: Any, weight: Any) -> Any:
    return loss.ratio(running, weight).astype(trees.dtype_of(leaf))


def _sum(running: Any, leaf: Any, weight: Any) -> Any:
    return running.astype(trees.dtype_of(leaf)) if trees.is_differentiable(leaf) else running


REDUCERS = {
    "mean": Reducer(_zeros, _add_weighted, _divide),
    "sum": Reducer(_zeros, _add, _sum),
}


def check_reducers(aux: PyTree) -> None:
    """Check the names in the option `aux`.

    Raises:
      ValueError: one of them is unknown; the known ones are listed.
    """
    for name, entry in trees.leaves_with_names(aux, "aux", none_is_leaf=True):
        checks.check_choice(name, entry, tuple(REDUCERS), ", or aux a pytree prefix of these")


def check_aux(aux: PyTree, like: PyTree) -> None:
    """Check that each leaf of `like`, one microbatch's aux or its shapes, can be reduced as `aux` says.

    Raises:
      ValueError: `aux` is not a prefix of `like`.
      TypeError: a leaf cannot be reduced in that way.
    """
    names = trees.broadcast_prefix(aux, like, "aux")
    for (place, leaf), name in zip(trees.leaves_with_names(like, "aux"), names, strict=True):
        dtype = trees.dtype_of(leaf)
        if dtype is None or not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
            raise TypeError(f"{place} must be numeric to be reduced over microbatches; got {trees.describe(leaf)}")
        if name == "mean" and not trees.is_differentiable(leaf):
            raise TypeError(
                f'{place} is {trees.describe(leaf)}, which has no mean in its own dtype. Reduce it with "sum", as in '
                'aux="sum" or a pytree prefix like aux={"correct": "sum", "accuracy": "mean"}, or return it as a float'
            )


def init(aux: PyTree, like: PyTree) -> list[Any]:
    """The running values before the first microbatch, one a leaf of `like`."""
    return [reducer.init(leaf) for reducer, leaf in _with_leaves(aux, like)]


def fold(aux: PyTree, running: list[Any], value: PyTree, weight: Any, index: Any, *, keep: Any) -> list[Any]:
    """One microbatch more; where `keep` (`[]` boolean or None) is false, the running values stay as they are.

    Raises:
      ValueError: a leaf's shape is another than in the microbatches before.
    """
    for old, (name, leaf) in zip(running, trees.leaves_with_names(value, "aux"), strict=True):
        if jnp.shape(leaf) != old.shape:
            raise ValueError(
                f"{name} has shape {old.shape} in the microbatches and {jnp.shape(leaf)} in the smaller last one, so it cannot "
                "be averaged or added up. Reduce it over the rows in the loss function, or use microbatches of equal size"
            )
    folded = [
        reducer.fold(old, leaf, weight, index) for old, (reducer, leaf) in zip(running, _with_leaves(aux, value), strict=True)
    ]
    if keep is None:
        return folded
    return [jnp.where(keep, new, old) for new, old in zip(folded, running, strict=True)]


def finish(aux: PyTree, running: list[Any], weight: Any, like: PyTree) -> PyTree:
    """The reduced aux, with the structure of `like`."""
    results = [reducer.finish(old, leaf, weight) for old, (reducer, leaf) in zip(running, _with_leaves(aux, like), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), results)


def _with_leaves(aux: PyTree, like: PyTree) -> list[tuple[Reducer, Any]]:
    names = trees.broadcast_prefix(aux, like, "aux")
    return [(REDUCERS[name], leaf) for name, leaf in zip(names, jax.tree.leaves(like), strict=True)]
