"""GradBuffer, PyTorch's `.grad` as a value, and its verbs: zeros, accumulate, merge, total, mean, zero_grad."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad import loss, trees
from funcgrad.trees import PyTree, Trainable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # equality of arrays is no boolean
class GradBuffer:
    """The running sum of gradients that PyTorch keeps in `.grad`, as a value that is passed in and handed back.

    A pytree: it goes through `jit`, `scan`, `shard_map` and checkpoints like any other, in the middle of a window too.

    Attributes:
      grads: the running sum, with the structure of the parameters; a leaf without a gradient is None.
      weight: `[]`, the running sum of the weights: float32, or float64 where a gradient is accumulated in 64 bits.
      count: `[]` int32, the microbatches folded in.
      skipped: `[]` int32, the microbatches left out because they were not finite.
      compensation: None, or the low-order parts of `grads` and `weight` as a pair: what the additions rounded off.
    """

    grads: PyTree
    weight: jax.Array
    count: jax.Array
    skipped: jax.Array
    compensation: PyTree = None


def zeros(params: PyTree, *, dtype: Any = None, compensated: bool = False, trainable: Trainable | None = None) -> GradBuffer:
    """An empty buffer for gradients of `params`.

    Args:
      params: any pytree. Leaves that have no gradient (integers, booleans, PRNG keys, None, objects) get no buffer.
      dtype: the dtype to accumulate in. None: floats narrower than 32 bits in float32, any other leaf in its own dtype.
        A real `dtype` gives complex leaves the complex dtype of its precision.
      compensated: also keep what each addition rounds off, and add it at the end: the sum is then as exact as in twice the
        precision, for twice the memory. It is Knuth's two-sum, which needs no comparison of magnitudes, so it is the same few
        operations for every element.
      trainable: which leaves are trained; the others get no buffer. A predicate `(path, leaf) -> bool` as for
        `jax.tree_util.tree_map_with_path`, or a pytree prefix of booleans.

    Returns:
      A `GradBuffer` of zeros.

    Raises:
      TypeError: `dtype` is not a floating or complex dtype, or is complex where a leaf is real.
      ValueError: nothing is trained, or `trainable` does not fit `params`.

    Example:
      >>> import jax.numpy as jnp, funcgrad as fg
      >>> buffer = fg.zeros({"w": jnp.ones(3, jnp.bfloat16), "steps": 7})
      >>> print(buffer.grads)
      {'steps': None, 'w': Array([0., 0., 0.], dtype=float32)}

    Reference:
      `torch.Tensor.grad <https://docs.pytorch.org/docs/stable/generated/torch.Tensor.grad.html>`_; Knuth, The Art of Computer
      Programming, volume 2, 4.2.2, theorem B.
    """
    selected, _ = trees.partition(params, trees.trainable_mask(params, trainable))

    def zero(path: Any, leaf: Any) -> jax.Array:
        target = _accumulation_dtype(trees.dtype_of(leaf), dtype, "params" + jax.tree_util.keystr(path))
        return jnp.zeros_like(leaf, dtype=target)

    grads = jax.tree_util.tree_map_with_path(zero, selected)
    if compensated:
        for name, leaf in trees.leaves_with_names(grads, "params"):
            if jnp.finfo(leaf.dtype).bits < 32:
                raise ValueError(
                    f"compensated sums are for many digits, but dtype={dtype!r} accumulates {name} in {leaf.dtype}. Leave out "
                    "dtype, or compensated"
                )
    double = any(trees.real_dtype(leaf.dtype) == np.float64 for leaf in jax.tree.leaves(grads))
    weight = jnp.zeros((), jnp.float64 if double else jnp.float32)
    low = jax.tree.map(jnp.zeros_like, (grads, weight)) if compensated else None
    return GradBuffer(grads, weight, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), low)


def accumulate(buffer: GradBuffer, grads: PyTree, weight: Any = 1.0, *, skip_nonfinite: bool = False) -> GradBuffer:
    """Add the gradients of one microbatch, as PyTorch's `backward()` adds to `.grad`. Nothing is divided here.

    `buffer.grads += grads`, `buffer.weight += weight`, `buffer.count += 1`.

    Args:
      buffer: from `zeros`, or an earlier call.
      grads: the gradients of the microbatch's *total*: with the structure of the parameters, cast to the buffer's dtype.
        A leaf may be None where the microbatch did not use it.
      weight: `[]`, real: the divisor that belongs to `grads`: 1 if they are the gradients of a mean and all microbatches
        count alike, else the microbatch's rows, tokens or class weights.
      skip_nonfinite: leave out a microbatch whose gradients or weight hold NaN or infinity, numerator and denominator,
        and count it in `skipped`.

    Returns:
      The new buffer.

    Raises:
      TypeError: `buffer` or `grads` is not what the verb takes, or a leaf is no gradient for its buffer, or `weight` is no real
        scalar.
      ValueError: the structure or a shape differs from the buffer's.

    Example:
      >>> import jax.numpy as jnp, funcgrad as fg
      >>> buffer = fg.zeros({"w": jnp.array(0.0)})
      >>> buffer = fg.accumulate(buffer, {"w": jnp.array(1.0)}, weight=1)  # one token
      >>> buffer = fg.accumulate(buffer, {"w": jnp.array(9.0)}, weight=3)  # three tokens
      >>> print(fg.total(buffer)["w"], fg.mean(buffer)["w"])
      10.0 2.5

    Reference:
      `torch.Tensor.backward <https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html>`_
    """
    _check_buffer(buffer, "accumulate")
    _check_gradients(buffer, grads)
    loss.check_real_scalar(weight, "weight", "Sum it over the microbatch's rows", integers=True)
    return fold(buffer, grads, weight, keep=all_finite(grads, weight) if skip_nonfinite else None)


def merge(left: GradBuffer, right: GradBuffer) -> GradBuffer:
    """Join two buffers of the same parameters: sums, weights and counts add.

    Accumulating into two buffers and merging them is accumulating into one, but for rounding.

    Raises:
      TypeError: one of the two is no buffer.
      ValueError: they are not of the same parameters: structures or shapes differ.

    Example:
      >>> import jax.numpy as jnp, funcgrad as fg
      >>> empty = fg.zeros({"w": jnp.array(0.0)})
      >>> one, two = (fg.accumulate(empty, {"w": jnp.array(g)}) for g in (1.0, 3.0))
      >>> print(fg.mean(fg.merge(one, two))["w"])
      2.0
    """
    _check_buffer(left, "merge")
    _check_buffer(right, "merge")
    _check_gradients(left, right.grads, "the right buffer's grads", "the left buffer")
    for name, one, other in _pairs(left.grads, right.grads, ""):
        if (one is None) != (other is None):
            raise ValueError(f"both buffers must train the same leaves; only one of the two has grads{name}")
    merged = add_grads(left, right.grads)
    merged = add_counts(merged, right.weight, right.count, right.skipped)
    if right.compensation is None:
        return merged
    low = right.compensation
    if merged.compensation is not None:
        low = jax.tree.map(jnp.add, merged.compensation, low)
    return dataclasses.replace(merged, compensation=low)


def total(buffer: GradBuffer) -> PyTree:
    """The sum of the gradients that were added, in the buffer's dtype: what PyTorch's `.grad` holds after the same additions.

    `backward` adds the gradient of a microbatch's *total*, so with a loss that is a mean over rows this is the sum over rows.

    Raises:
      TypeError: `buffer` is no buffer.

    Example:
      >>> import jax.numpy as jnp, funcgrad as fg
      >>> buffer = fg.zeros({"w": jnp.array(0.0)})
      >>> for _ in range(3):
      ...     buffer = fg.accumulate(buffer, {"w": jnp.array(1.0)})
      >>> print(fg.total(buffer)["w"])
      3.0
    """
    _check_buffer(buffer, "total")
    return buffer.grads if buffer.compensation is None else jax.tree.map(jnp.add, buffer.grads, buffer.compensation[0])


def mean(buffer: GradBuffer) -> PyTree:
    """The gradient of the whole window: the sum over the weight.

    `grads / weight`, in the buffer's dtype: float32 for bfloat16 parameters. A window without any weight gives zeros, never
    NaN; a weight between 0 and 1 divides by itself.

    Raises:
      TypeError: `buffer` is no buffer.

    Example:
      >>> import jax.numpy as jnp, funcgrad as fg
      >>> buffer = fg.zeros({"w": jnp.array(0.0)})
      >>> print(fg.mean(buffer)["w"], fg.mean(fg.accumulate(buffer, {"w": jnp.array(1.0)}, weight=0.5))["w"])
      0.0 2.0
    """
    _check_buffer(buffer, "mean")
    weight = buffer.weight if buffer.compensation is None else buffer.weight + buffer.compensation[1]
    return jax.tree.map(lambda leaf: loss.ratio(leaf, weight), total(buffer))


def zero_grad(buffer: GradBuffer) -> GradBuffer:
    """A fresh start for the next window: zeros in `grads`, `weight`, `count` and `skipped`.

    The zeros are new, not the old values times zero, so NaN and infinity do not survive.

    Raises:
      TypeError: `buffer` is no buffer.

    Example:
      >>> import jax.numpy as jnp, funcgrad as fg
      >>> buffer = fg.accumulate(fg.zeros({"w": jnp.array(0.0)}), {"w": jnp.array(jnp.nan)})
      >>> print(fg.total(fg.zero_grad(buffer))["w"])
      0.0

    Reference:
      `torch.optim.Optimizer.zero_grad
      <https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html>`_
    """
    _check_buffer(buffer, "zero_grad")
    return jax.tree.map(jnp.zeros_like, buffer)


def fold(buffer: GradBuffer, grads: PyTree, weight: Any, *, scale: Any = None, keep: Any = None) -> GradBuffer:
    """`accumulate` without its checks, for callers that have made them.

    Args:
      scale, keep: as for `add_grads`; where `keep` is false, the microbatch is counted as skipped.
    """
    weight = jnp.asarray(weight).astype(buffer.weight.dtype)
    folded = 1 if keep is None else keep.astype(jnp.int32)
    buffer = add_grads(buffer, grads, scale=scale, keep=keep)
    return add_counts(buffer, weight if keep is None else jnp.where(keep, weight, 0), folded, 1 - folded)


def add_counts(buffer: GradBuffer, weight: Any, folded: Any, skipped: Any) -> GradBuffer:
    """`buffer` with as many microbatches more, folded in with this weight or skipped; `add_grads` is for their gradients."""
    counts = {"count": buffer.count + folded, "skipped": buffer.skipped + skipped}
    if buffer.compensation is None:
        return dataclasses.replace(buffer, weight=buffer.weight + weight, **counts)
    summed, low = two_sum(buffer.weight, jnp.asarray(weight).astype(buffer.weight.dtype))
    grads_low, weight_low = buffer.compensation
    return dataclasses.replace(buffer, weight=summed, compensation=(grads_low, weight_low + low), **counts)


def two_sum(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(sum, low)`: the rounded sum, and what was rounded off, so that the two together are exact (Knuth)."""
    summed = left + right
    shifted = summed - left
    low = (left - (summed - shifted)) + (right - shifted)
    return summed, jnp.where(jnp.isfinite(low), low, 0)  # of an infinite sum nothing is left


def add_grads(buffer: GradBuffer, grads: PyTree, *, scale: Any = None, keep: Any = None) -> GradBuffer:
    """`buffer` with gradients added to its sums, and nothing counted.

    Args:
      buffer, grads: as for `accumulate`.
      scale: `[]` or None: multiplies the gradients, after they are cast to the buffer's dtype, so that a float16 gradient
        of a mean does not overflow when it is weighed by its rows.
      keep: `[]` boolean or None: where false, nothing is added.
    """

    def kept(new: Any, old: Any) -> Any:
        return new if keep is None else jnp.where(keep, new, old)

    def add(running: Any, grad: Any) -> Any:
        if running is None or grad is None:
            return running
        wide = trees.at_least_float32(running.dtype)
        grad = jnp.asarray(grad).astype(wide)
        return kept((running.astype(wide) + (grad if scale is None else grad * scale)).astype(running.dtype), running)

    def add_exactly(running: Any, low: Any, grad: Any) -> Any:
        if running is None or grad is None:
            return running, low
        grad = jnp.asarray(grad).astype(running.dtype)
        summed, rounded_off = two_sum(running, grad if scale is None else grad * scale)
        return kept(summed, running), kept(low + rounded_off, low)

    if buffer.compensation is not None:
        low, weight_low = buffer.compensation
        columns = [jax.tree.leaves(tree, is_leaf=trees.is_none) for tree in (buffer.grads, low, grads)]
        sums, lows = zip(*itertools.starmap(add_exactly, zip(*columns, strict=True)), strict=True)
        treedef = jax.tree.structure(buffer.grads, is_leaf=trees.is_none)
        return dataclasses.replace(buffer, grads=treedef.unflatten(sums), compensation=(treedef.unflatten(lows), weight_low))
    # A leaf that is no gradient (float0, from `jax.grad(..., allow_int=True)`) meets None in the buffer.
    return dataclasses.replace(buffer, grads=jax.tree.map(add, buffer.grads, grads, is_leaf=trees.is_none))


def all_finite(*parts: PyTree) -> jax.Array:
    """`[]` boolean: whether every floating or complex leaf of `parts` is finite throughout."""
    leaves = [leaf for leaf in jax.tree.leaves(parts) if trees.is_differentiable(leaf)]
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]).all() if leaves else jnp.array(True)


def _check_gradients(buffer: GradBuffer, grads: PyTree, grads_name: str = "grads", buffer_name: str = "the buffer") -> None:
    """Check that `grads` can be added to `buffer`.

    Raises:
      TypeError: they are a buffer, or a leaf has no dtype for its place.
      ValueError: structure or shapes differ, or a leaf has no place in the buffer.
    """
    if isinstance(grads, GradBuffer):
        raise TypeError(
            "expected gradients, got a GradBuffer. Add two buffers with fg.merge(a, b); take the gradients out of one with "
            "fg.mean(buffer) or fg.total(buffer)"
        )
    trees.check_same_structure(buffer.grads, grads, f"{buffer_name}'s grads", grads_name)
    for name, running, grad in _pairs(buffer.grads, grads, grads_name):
        if grad is None or (running is None and not trees.is_differentiable(grad)):
            continue
        if running is None:
            raise ValueError(
                f"{name} has a gradient, {trees.describe(grad)}, but {buffer_name} has none for it, because it is not "
                "trained. Drop that gradient (None), or make the buffer with another trainable"
            )
        if jnp.shape(grad) != running.shape:
            raise ValueError(f"{name} must have shape {running.shape}, as in {buffer_name}; got {trees.describe(grad)}")
        fits = trees.is_differentiable(grad) and (
            jnp.iscomplexobj(running) or not jnp.issubdtype(trees.dtype_of(grad), jnp.complexfloating)
        )
        if not fits:
            raise TypeError(f"{name} must fit {buffer_name}'s {trees.describe(running)}; got {trees.describe(grad)}")


def _pairs(expected: PyTree, got: PyTree, root: str) -> list[tuple[str, Any, Any]]:
    names = trees.leaves_with_names(got, root, none_is_leaf=True)
    running = jax.tree.leaves(expected, is_leaf=trees.is_none)
    return [(name, left, right) for left, (name, right) in zip(running, names, strict=True)]


def _check_buffer(buffer: Any, verb: str) -> None:
    if not isinstance(buffer, GradBuffer):
        raise TypeError(
            f"fg.{verb} takes a GradBuffer; got {trees.describe(buffer)}. Make one with fg.zeros(params) and put gradients "
            "into it with fg.accumulate(buffer, grads, weight)"
        )


def _accumulation_dtype(own: Any, dtype: Any, name: str) -> np.dtype:
    if dtype is None:
        return trees.at_least_float32(own)
    target = jnp.dtype(dtype)
    if not jnp.issubdtype(target, jnp.inexact):
        raise TypeError(f"dtype must be a floating or complex dtype, float32 for example; got {target}")
    if jnp.issubdtype(own, jnp.complexfloating):
        return jnp.promote_types(target, jnp.complex64)
    if jnp.issubdtype(target, jnp.complexfloating):
        raise TypeError(f"dtype={target} is complex, but {name} is {own}. Give a real dtype: complex leaves follow it")
    return target
