"""A batch into microbatches: strided rows or contiguous windows, with a smaller one at the end where they do not fit."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcgrad import trees
from funcgrad.trees import PyTree

ORDERS = ("strided", "contiguous")


@dataclasses.dataclass(frozen=True)
class Split:
    """How the rows of a batch are dealt out: `num` microbatches of `size` rows, then one of `tail` rows if there are any.

    With `order="strided"` microbatch i takes rows i, i + num, i + 2 num, ...: a batch whose rows are sharded over devices
    in blocks stays where it is, each device giving some of its own rows to every microbatch. With `"contiguous"` it takes
    rows i size to (i + 1) size. The tail is the last rows of the batch in either order.
    """

    rows: int
    num: int
    size: int
    tail: int
    order: str = "strided"

    @property
    def count(self) -> int:
        """The number of microbatches, the tail included."""
        return self.num + (self.tail > 0)

    def rows_of(self, index: Any) -> int:
        """How many rows microbatch `index` has; a traced index is of one that is not the tail."""
        return self.tail if self.tail and isinstance(index, int) and index == self.num else self.size

    def take(self, leaf: Any, axis: int, index: Any) -> jax.Array:
        """The rows of microbatch `index`, a number or a traced `[]` integer below `num`, along `axis` of `leaf`."""
        strided = self.order == "strided"
        if isinstance(index, int):
            start, stop, step = (
                (index, self.num * self.size, self.num) if strided else (index * self.size, (index + 1) * self.size, 1)
            )
            return _slice(leaf, axis, start, stop, step)
        leaf = jnp.asarray(leaf)
        leaf = lax.slice_in_dim(leaf, 0, self.num * self.size, axis=axis) if self.tail else leaf
        # Two axes in place of one is free; which of the two is indexed is the order. Slicing inside the loop needs no
        # transposed copy of the batch, as a scan over a reshaped one would for strided rows.
        dealt = (self.size, self.num) if strided else (self.num, self.size)
        leaf = leaf.reshape(leaf.shape[:axis] + dealt + leaf.shape[axis + 1 :])
        return lax.dynamic_index_in_dim(leaf, index, axis + strided, keepdims=False)

    def take_tail(self, leaf: Any, axis: int) -> jax.Array:
        """The last `tail` rows along `axis` of `leaf`."""
        return _slice(leaf, axis, self.num * self.size, self.rows, 1)

    def join(self, parts: Sequence[Any], axis: int) -> jax.Array:
        """The inverse: one array whose rows along `axis` stand in the order of the batch, from one part a microbatch."""
        strided = self.order == "strided"
        even = jnp.stack(parts[: self.num], axis=axis + strided)
        even = even.reshape(*even.shape[:axis], self.num * self.size, *even.shape[axis + 2 :])
        return jnp.concatenate([even, *parts[self.num :]], axis=axis)


def split(rows: int, num_microbatches: int, microbatch_size: int | None, order: str) -> Split:
    """Deal out `rows` into `num_microbatches` equal parts, or into parts of `microbatch_size` and a smaller last one.

    Raises:
      ValueError: `num_microbatches` does not divide `rows`.
    """
    if microbatch_size is not None:
        size = min(microbatch_size, rows)
        return Split(rows, rows // size, size, rows % size, order)
    if rows % num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} does not divide the batch of {rows} rows. Use a number that divides "
            f"{rows}, or microbatch_size={-(-rows // num_microbatches)}, which lets the last microbatch be smaller"
        )
    return Split(rows, num_microbatches, rows // num_microbatches, 0, order)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The batch arguments of one call: their leaves, and the axis along which each is split (None: seen whole)."""

    leaves: list[Any]
    axes: list[int | None]
    treedef: Any
    rows: int

    def microbatch(self, split: Split, index: Any) -> PyTree:
        """The batch arguments of microbatch `index`."""
        return self._map(lambda leaf, axis: split.take(leaf, axis, index))

    def tail(self, split: Split) -> PyTree:
        """The batch arguments of the smaller last microbatch."""
        return self._map(split.take_tail)

    def unsplit(self) -> PyTree:
        """The batch arguments, with None for the leaves that are split."""
        kept = [leaf if axis is None else None for leaf, axis in zip(self.leaves, self.axes, strict=True)]
        return self.treedef.unflatten(kept)

    def _map(self, function: Any) -> PyTree:
        taken = [leaf if axis is None else function(leaf, axis) for leaf, axis in zip(self.leaves, self.axes, strict=True)]
        return self.treedef.unflatten(taken)


def read_batch(arguments: Sequence[Any], numbers: Sequence[int], axes: Sequence[Any]) -> Batch:
    """The batch arguments, checked.

    Args:
      arguments: the values of the batch arguments.
      numbers: their places in the call, for errors.
      axes: for each leaf, its batch axis, or None.

    Raises:
      TypeError: an axis is neither an integer nor None, or a leaf is no array.
      ValueError: a leaf has no such axis, or the axes differ in length, or there is no row, or no leaf is split.
    """
    named = [
        pair
        for number, argument in zip(numbers, arguments, strict=True)
        for pair in trees.leaves_with_names(argument, f"args[{number}]")
    ]
    treedef = jax.tree.structure(tuple(arguments))
    axes = [_read_axis(name, leaf, axis) for (name, leaf), axis in zip(named, axes, strict=True)]
    lengths = {name: jnp.shape(leaf)[axis] for (name, leaf), axis in zip(named, axes, strict=True) if axis is not None}
    if not lengths:
        where = ", ".join(f"args[{number}]" for number in numbers) or "no argument"
        raise ValueError(
            f"the batch ({where}) has no leaf with a batch axis. Name the arguments that "
            "hold rows in batch_argnums, and the axis of each in in_axes"
        )
    first = next(iter(lengths))
    for name, length in lengths.items():
        if length != lengths[first]:
            raise ValueError(
                f"all leaves of the batch must have the same length along their batch axis: {first} has {lengths[first]} "
                f"rows, {name} has {length}. Give in_axes=None for a leaf that every microbatch sees whole"
            )
    if lengths[first] == 0:
        raise ValueError(f"the batch is empty: {first} has 0 rows. Skip this batch: it has no mean")
    return Batch([leaf for _, leaf in named], axes, treedef, lengths[first])


def _slice(leaf: Any, axis: int, start: int, stop: int, step: int) -> jax.Array:
    """Rows of `leaf`. Of a NumPy array only these go to the device."""
    if isinstance(leaf, np.ndarray):
        return jnp.asarray(leaf[(slice(None),) * axis + (slice(start, stop, step),)])
    return lax.slice_in_dim(leaf, start, stop, step, axis)


def _read_axis(name: str, leaf: Any, axis: Any) -> int | None:
    if axis is None:
        return None
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
        raise TypeError(f"in_axes must hold integers and None, as for jax.vmap; got {axis!r} for {name}")
    whole = "Give in_axes=None for a leaf that every microbatch sees whole"
    if not trees.is_array(leaf):
        raise TypeError(f"a leaf of the batch must be an array; {name} is a {type(leaf).__name__}. {whole}")
    ndim = jnp.ndim(leaf)
    if ndim == 0:
        raise ValueError(f"a leaf of the batch must have a batch axis; {name} is a scalar, {trees.describe(leaf)}. {whole}")
    if not -ndim <= axis < ndim:
        raise ValueError(f"in_axes gives axis {axis} for {name}, which is {trees.describe(leaf)}. {whole}")
    return int(axis) % ndim
