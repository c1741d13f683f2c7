"""How a loss function's aux is reduced over the microbatches of a window."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from funcgrad import checks, loss, trees
from funcgrad.microbatch import Split
from funcgrad.trees import PyTree

# A name, or `(old, new, index) -> merged`.
Reduction = str | Callable[[Any, Any, Any], Any]


class Reducer(NamedTuple):
    """One way to reduce a leaf: three pure functions around a running value, so that it fits any loop.

    Attributes:
      init: `(leaf, split) -> running`: the value before the first microbatch; `leaf` tells shape and dtype only.
      fold: `(running, leaf, weight, index, split) -> running`: one microbatch more; `index` is `split.num` for the tail.
      finish: `(running, leaf, weight, split) -> result`: from the running value and the window's weight.
      keeps_shape: whether every microbatch, the smaller last one too, must give the same shape.
      keeps_all: whether microbatches that are left out of the sums have their place in it all the same.
    """

    init: Callable[[Any, Split], Any]
    fold: Callable[[Any, Any, Any, Any, Split], Any]
    finish: Callable[[Any, Any, Any, Split], Any]
    keeps_shape: bool = True
    keeps_all: bool = False


def _sum_dtype(leaf: Any) -> Any:
    """At least 32 bits, as in `jnp.sum`; booleans are counted."""
    dtype = trees.dtype_of(leaf)
    if trees.is_differentiable(leaf):
        return trees.at_least_float32(dtype)
    return jnp.promote_types(dtype, jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)


def _zeros(leaf: Any, split: Split) -> Any:
    return jnp.zeros(jnp.shape(leaf), _sum_dtype(leaf))


def _add_weighted(running: Any, leaf: Any, weight: Any, index: Any, split: Split) -> Any:
    weight = jnp.asarray(weight).astype(trees.real_dtype(running.dtype))
    # What a microbatch without weight says does not count, not even NaN, its mean over nothing.
    return running + jnp.where(weight == 0, 0, jnp.asarray(leaf).astype(running.dtype) * weight)


def _divide(running: Any, leaf: Any, weight: Any, split: Split) -> Any:
    return loss.ratio(running, weight).astype(trees.dtype_of(leaf))


def _add(running: Any, leaf: Any, weight: Any, index: Any, split: Split) -> Any:
    return running + jnp.asarray(leaf).astype(running.dtype)


def _sum(running: Any, leaf: Any, weight: Any, split: Split) -> Any:
    return running.astype(trees.dtype_of(leaf)) if trees.is_differentiable(leaf) else running


def _least(leaf: Any, split: Split) -> Any:
    dtype = trees.dtype_of(leaf)
    if jnp.issubdtype(dtype, jnp.bool_):
        least: Any = False
    else:
        least = -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min
    return jnp.full(jnp.shape(leaf), least, dtype)


def _max(running: Any, leaf: Any, weight: Any, index: Any, split: Split) -> Any:
    return jnp.maximum(running, jnp.asarray(leaf, running.dtype))


def _empty(leaf: Any, split: Split) -> Any:
    return jnp.zeros(jnp.shape(leaf), trees.dtype_of(leaf))


def _last(running: Any, leaf: Any, weight: Any, index: Any, split: Split) -> Any:
    return jnp.asarray(leaf, running.dtype)


def _as_it_is(running: Any, leaf: Any, weight: Any, split: Split) -> Any:
    return running


def _places(leaf: Any, split: Split) -> Any:
    return jnp.zeros((split.count, *jnp.shape(leaf)), trees.dtype_of(leaf))


def _put(running: Any, leaf: Any, weight: Any, index: Any, split: Split) -> Any:
    return running.at[index].set(jnp.asarray(leaf, running.dtype))


def _rows(leaf: Any, split: Split) -> Any:
    shape, dtype = jnp.shape(leaf)[1:], trees.dtype_of(leaf)
    dealt = (split.size, split.num) if split.order == "strided" else (split.num, split.size)
    return jnp.zeros((*dealt, *shape), dtype), jnp.zeros((split.tail, *shape), dtype)


def _put_rows(running: Any, leaf: Any, weight: Any, index: Any, split: Split) -> Any:
    even, tail = running
    leaf = jnp.asarray(leaf, even.dtype)
    if isinstance(index, int) and index == split.num:
        return even, leaf
    axis = 1 if split.order == "strided" else 0
    return jax.lax.dynamic_update_index_in_dim(even, leaf, index, axis), tail


def _join_rows(running: Any, leaf: Any, weight: Any, split: Split) -> Any:
    even, tail = running
    even = even.reshape(-1, *even.shape[2:])
    return jnp.concatenate([even, tail]) if split.tail else even


REDUCERS = {
    "mean": Reducer(_zeros, _add_weighted, _divide),
    "sum": Reducer(_zeros, _add, _sum),
    "max": Reducer(_least, _max, _as_it_is),
    "last": Reducer(_empty, _last, _as_it_is),
    "stack": Reducer(_places, _put, _as_it_is, keeps_all=True),
    "concat": Reducer(_rows, _put_rows, _join_rows, keeps_shape=False, keeps_all=True),
}


def _by_function(merge: Callable[[Any, Any, Any], Any]) -> Reducer:
    """`merge(old, new, index)` from the second microbatch on; the first one's value is where it begins."""

    def init(leaf: Any, split: Split) -> Any:
        return _empty(leaf, split), jnp.zeros((), bool)

    def fold(running: Any, leaf: Any, weight: Any, index: Any, split: Split) -> Any:
        old, has_begun = running
        leaf = jnp.asarray(leaf, old.dtype)

        def merged() -> Any:
            new = merge(old, leaf, index)
            if trees.dtype_of(new) is None or trees.describe(new) != trees.describe(old):
                raise ValueError(
                    f"a function (old, new, index) in aux must give what the leaf is, {trees.describe(old)}; it gave "
                    f"{trees.describe(new)}. Return the leaf in another dtype from the loss function, or cast"
                )
            return jnp.asarray(new)

        # A condition, not a choice: nothing is computed from the zeros that stand there before the first value.
        if isinstance(has_begun, Tracer):
            value = jax.lax.cond(has_begun, merged, lambda: leaf)
        else:
            value = merged() if has_begun else leaf
        return value, jnp.ones((), bool)

    return Reducer(init, fold, lambda running, leaf, weight, split: running[0])


def check_reducers(aux: PyTree) -> None:
    """Check the entries of the option `aux`: names, or functions.

    Raises:
      ValueError: a name is unknown; the known ones are listed.
    """
    for name, entry in trees.leaves_with_names(aux, "aux", none_is_leaf=True):
        if not callable(entry):
            also = ", or a function (old, new, index) -> merged, or aux a pytree prefix of these"
            checks.check_choice(name, entry, tuple(REDUCERS), also)


def check_aux(aux: PyTree, like: PyTree, rows: int) -> None:
    """Check that each leaf of `like`, the aux of one microbatch of `rows` rows, can be reduced as `aux` says.

    Raises:
      ValueError: `aux` is not a prefix of `like`, or a leaf to be joined has not a row for each of the microbatch's.
      TypeError: a leaf cannot be reduced in that way.
    """
    reductions = trees.broadcast_prefix(aux, like, "aux")
    for (place, leaf), reduction in zip(trees.leaves_with_names(like, "aux"), reductions, strict=True):
        dtype = trees.dtype_of(leaf)
        if dtype is None or not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
            raise _not_numeric(place, leaf)
        if reduction == "mean" and not trees.is_differentiable(leaf):
            raise TypeError(
                f'{place} is {trees.describe(leaf)}, which has no mean in its own dtype. Reduce it with "sum", as in '
                'aux="sum" or a pytree prefix like aux={"correct": "sum", "accuracy": "mean"}, or return it as a float'
            )
        if reduction == "max" and jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"{place} is {trees.describe(leaf)}: complex numbers have no maximum. Take their abs")
        if reduction == "concat" and jnp.shape(leaf)[:1] != (rows,):
            raise ValueError(
                f'{place} is {trees.describe(leaf)}, but "concat" joins leaves that have a row for each row of the microbatch, '
                f'here {rows}. Use "stack" for what there is once for a microbatch'
            )


def check_known(aux: PyTree) -> None:
    """Check that the leaves of a microbatch's aux are arrays or numbers, before they are recorded.

    Raises:
      TypeError: one is not.
    """
    for place, leaf in trees.leaves_with_names(aux, "aux"):
        if trees.dtype_of(leaf) is None:
            raise _not_numeric(place, leaf)


def _not_numeric(place: str, leaf: Any) -> TypeError:
    """The error for a leaf of aux that is no number."""
    return TypeError(f"{place} must be numeric to be reduced over microbatches; got {trees.describe(leaf)}")


def init(aux: PyTree, like: PyTree, split: Split) -> list[Any]:
    """The running values before the first microbatch, one a leaf of `like`."""
    return [reducer.init(leaf, split) for reducer, leaf in _with_leaves(aux, like)]


def fold(aux: PyTree, running: list[Any], value: PyTree, split: Split, *, weight: Any, index: Any, keep: Any) -> list[Any]:
    """The running values with one microbatch more.

    Args:
      aux: the option.
      running: the values so far.
      value: the microbatch's aux.
      split: how the rows are dealt out.
      weight: `[]`, the microbatch's.
      index: its number; the smaller last one is `split.num`.
      keep: `[]` boolean or None: where false, the values stay as they are, but for those with a place for every microbatch.

    Raises:
      ValueError: a leaf's shape is another than in the microbatches before.
    """
    folded = []
    for old, (reducer, leaf), (name, _) in zip(
        running, _with_leaves(aux, value), trees.leaves_with_names(value, "aux"), strict=True
    ):
        if reducer.keeps_shape:
            _check_shape(
                jax.eval_shape(lambda old, reducer=reducer, leaf=leaf: reducer.init(leaf, split), old), old, name, leaf
            )
        new = reducer.fold(old, leaf, weight, index, split)
        if keep is not None and not reducer.keeps_all:
            new = jax.tree.map(functools.partial(jnp.where, keep), new, old)
        folded.append(new)
    return folded


def finish(aux: PyTree, running: list[Any], weight: Any, like: PyTree, split: Split) -> PyTree:
    """The reduced aux, with the structure of `like`."""
    pairs = zip(running, _with_leaves(aux, like), strict=True)
    results = [reducer.finish(old, leaf, weight, split) for old, (reducer, leaf) in pairs]
    return jax.tree.unflatten(jax.tree.structure(like), results)


def of_one(aux: PyTree, value: PyTree) -> PyTree:
    """The reduced aux of a batch in one piece: its aux, but one on top of the other, where it is one."""
    reductions = trees.broadcast_prefix(aux, value, "aux")

    def reduced(leaf: Any, reduction: Reduction) -> Any:
        if reduction == "stack":
            return jnp.asarray(leaf)[None]
        counted = reduction == "sum" and trees.dtype_of(leaf) is not None and not trees.is_differentiable(leaf)
        return jnp.asarray(leaf, _sum_dtype(leaf)) if counted else leaf

    leaves = [reduced(leaf, reduction) for leaf, reduction in zip(jax.tree.leaves(value), reductions, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(value), leaves)


def _check_shape(expected: Any, old: Any, name: str, leaf: Any) -> None:
    if jax.tree.map(jnp.shape, expected) != jax.tree.map(jnp.shape, old):
        shape = jax.tree.leaves(old)[0].shape
        raise ValueError(
            f"{name} has the shape {shape} in the microbatches and {jnp.shape(leaf)} in the smaller last one, so it cannot be "
            'reduced leaf by leaf. Reduce it over the rows in the loss function, or use "concat", or microbatches of equal size'
        )


def _with_leaves(aux: PyTree, like: PyTree) -> list[tuple[Reducer, Any]]:
    reductions = trees.broadcast_prefix(aux, like, "aux")
    return [
        (_by_function(reduction) if callable(reduction) else REDUCERS[reduction], leaf)
        for reduction, leaf in zip(reductions, jax.tree.leaves(like), strict=True)
    ]
