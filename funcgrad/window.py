"""One window: a batch, folded into a buffer microbatch by microbatch. The transforms and the training step share it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from funcgrad import accumulator, loops, reducers, trees
from funcgrad.accumulator import GradBuffer
from funcgrad.call import Call, Micro, chosen
from funcgrad.loss import WeightedLoss, ratio
from funcgrad.microbatch import Split
from funcgrad.options import Options
from funcgrad.trees import PyTree, Trainable


class Window(NamedTuple):
    """What is carried from one microbatch to the next. All but `buffer` is of this batch only.

    What is known beforehand is not carried: each number more is an operation more for each microbatch.

    Attributes:
      buffer: the gradients, on top of what the buffer held before; its weight and counts follow in `close`.
      loss: `[]`, the sum of the totals.
      weight: `[]`, the sum of the weights; None where it is the number of rows.
      low: what the sums of loss and weight rounded off, each `[]`, where the buffer is compensated; else None.
      aux: the running values of aux.
      kept: `[count]` boolean, which microbatches were folded in; None where none is left out.
      carry: what the last microbatch handed on; None where nothing is carried.
    """

    buffer: Any
    loss: Any
    weight: jax.Array | None
    low: tuple[jax.Array, jax.Array | None] | None
    aux: Any
    kept: jax.Array | None
    carry: PyTree = None


def check_call(call: Call, *, in_state: bool = False) -> None:
    """Check that no two microbatches of a call draw from one key, and warn of what looks like a part of the batch.

    Args:
      call: the call.
      in_state: the parameters stay in a state, so that two steps would draw from a key among them.

    Raises:
      ValueError: two would.
    """
    if call.split.count > 1:
        call.check_whole_keys()
        call.warn_of_whole_rows()
    if call.split.count > 1 or in_state:
        call.check_param_keys(lambda: call.arguments(0))


def begin(split: Split, buffer: GradBuffer, like: Micro, options: Options, carry: PyTree = None) -> Window:
    """The sums before the first microbatch, on top of `buffer`, or of its shapes; `like` tells shapes and dtypes only."""
    dtype = trees.at_least_float32(trees.dtype_of(like.loss))
    kept = jnp.zeros(split.count, bool) if options.skip_nonfinite else None
    weight = None if like.weight is None and not options.skip_nonfinite else jnp.zeros((), buffer.weight.dtype)
    loss = jnp.zeros((), dtype)
    low = None if buffer.compensation is None else (jnp.zeros_like(loss), None if weight is None else jnp.zeros_like(weight))
    return Window(buffer, loss, weight, low, reducers.init(options.aux, like.aux, split), kept, carry)


def fold_batch(call: Call, buffer: GradBuffer, differentiate: Callable[[PyTree, Any], Micro]) -> tuple[Window, Micro]:
    """Fold the batch of one call into `buffer`.

    Args:
      call: the call.
      buffer: what is added to.
      differentiate: from what the microbatch before handed on, and the index, to loss and gradients; the smaller last one is
        `split.num`.

    Returns:
      `(window, like)`: the sums, and one microbatch's output or its shapes.
    """
    options, split = call.options, call.split

    def init(like: Micro) -> Window:
        return begin(split, buffer, like, options, call.carry)

    def add(window: Window, micro: Micro, index: Any) -> Window:
        return fold_micro(window, micro, split, index, options)

    fold = loops.Fold(init, add, lambda window: window.carry)
    window, like = loops.fold_over(differentiate, call.carry, fold, split.num, options.loop, in_turn=options.in_turn)
    if split.tail:
        window = fold_micro(window, differentiate(window.carry, split.num), split, split.num, options)
    return close(window, split), like


def batch_loss(call: Call, mask: list[bool], kept: jax.Array | None, selected: PyTree) -> jax.Array:
    """The loss of the whole batch, `[]`, at other parameters: `selected`, in place of the leaves that `mask` chooses.

    Like the gradients, it is taken microbatch by microbatch; to differentiate it needs the activations of one, because each
    is computed again on the way back. Line searches ask for it. It is the loss of the microbatches that the window `kept`,
    also where one of them is not finite: a search has to see that it went too far.
    """
    split = call.split

    def evaluate(carry: PyTree, index: Any, rows: int) -> tuple[tuple[jax.Array, jax.Array], PyTree]:
        loss, aux = call.evaluate_at(mask, selected, call.arguments(index, carry))
        handed_on = None if call.carry is None else trees.strongly_typed_tree(aux[0])
        weighted = isinstance(loss, WeightedLoss)
        total, weight, scale = (loss.total, loss.weight, 1) if weighted else (loss, rows, rows)
        total = jnp.asarray(total).astype(trees.at_least_float32(trees.dtype_of(total))) * scale
        sums = total, jnp.asarray(weight).astype(total.dtype)
        if kept is None:
            return sums, handed_on
        keep = kept[index]
        sums = jax.tree.map(lambda part: jnp.where(keep, part, 0), sums)
        return sums, None if handed_on is None else chosen(keep, handed_on, carry)

    def step(carry: PyTree, index: Any) -> Any:
        return jax.checkpoint(lambda carry: evaluate(carry, index, split.size))(carry)

    def add(running: Any, output: Any, index: Any) -> Any:
        return jax.tree.map(jnp.add, running[0], output[0]), output[1]

    def init(like: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), like[0]), call.carry

    fold = loops.Fold(init, add, lambda running: running[1])
    options = call.options
    running, _ = loops.fold_over(step, call.carry, fold, split.num, options.loop, in_turn=options.in_turn)
    if split.tail:
        running = add(running, evaluate(running[1], split.num, split.tail), split.num)
    return ratio(*running[0])


def weigh(micro: Micro, rows: int) -> tuple[Any, Any]:
    """`(weight, scale)`, as `accumulator.fold` takes them, for a microbatch of `rows` rows.

    A mean over the rows weighs as many as there are, and its gradient is scaled to that of a total, if it is not one.
    """
    weight, scale = rows if micro.weight is None else micro.weight, micro.scale
    return weight, scale


def fold_micro(window: Window, micro: Micro, split: Split, index: Any, options: Options) -> Window:
    """Add one microbatch, number `index`, to the sums; the smaller last one is `split.num`."""
    rows = split.rows_of(index)
    (weight, scale), keep = weigh(micro, rows), micro.keep
    loss = jnp.asarray(micro.loss).astype(window.loss.dtype)
    added = loss * rows if micro.weight is None else loss
    added, counted = (part if keep is None else jnp.where(keep, part, 0) for part in (added, weight))
    loss_low, weight_low = (None, None) if window.low is None else window.low
    loss_sum, loss_low = _add(window.loss, added, loss_low)
    weight_sum, weight_low = (None, None) if window.weight is None else _add(window.weight, counted, weight_low)
    return Window(
        accumulator.add_grads(window.buffer, micro.grads, scale=scale, keep=keep),
        loss_sum,
        weight_sum,
        None if loss_low is None else (loss_low, weight_low),
        reducers.fold(options.aux, window.aux, micro.aux, split, weight=weight, index=index, keep=keep),
        None if keep is None or window.kept is None else window.kept.at[index].set(keep),
        micro.carry,
    )


def _add(total: jax.Array, part: Any, low: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """`(total + part, low)`, where `low`, if there is one, takes up what that rounds off."""
    part = jnp.asarray(part).astype(total.dtype)
    if low is None:
        return total + part, None
    total, rounded_off = accumulator.two_sum(total, part)
    return total, low + rounded_off


def close(window: Window, split: Split) -> Window:
    """The window after its last microbatch, with weight and counts."""
    weight = jnp.asarray(split.rows, window.buffer.weight.dtype) if window.weight is None else window.weight
    folded = split.count if window.kept is None else jnp.sum(window.kept, dtype=jnp.int32)
    buffer = accumulator.add_counts(window.buffer, weight, folded, split.count - folded)
    if window.low is not None and window.low[1] is not None:
        buffer = accumulator.add_counts(buffer, window.low[1], 0, 0)
    return window._replace(buffer=buffer, weight=weight)


def read_window(window: Window, like: Micro, split: Split, options: Options) -> tuple[jax.Array, PyTree]:
    """The loss of this batch, `[]` in the loss's own dtype, and the reduced aux, from a window that is closed."""
    total, weight = window.loss, window.weight
    if window.low is not None:
        loss_low, weight_low = window.low
        total, weight = total + loss_low, weight if weight is None or weight_low is None else weight + weight_low
    loss = ratio(total, weight).astype(trees.dtype_of(like.loss))
    return loss, reducers.finish(options.aux, window.aux, window.weight, like.aux, split)


def buffer_mask(buffer: GradBuffer, params: PyTree, trainable: Trainable | None) -> list[bool]:
    """For each leaf of `params`, whether `buffer` has a place for its gradient: the buffer says what is trained.

    Raises:
      TypeError: `buffer` is no GradBuffer, or a leaf that it trains has no gradient.
      ValueError: the buffer is of other parameters, or `trainable` chooses others than it holds.
    """
    if not isinstance(buffer, GradBuffer):
        raise TypeError(f"expected a GradBuffer, from fg.zeros(params); got {trees.describe(buffer)}")
    trees.check_same_structure(params, buffer.grads, "params", "buffer.grads")
    places = jax.tree.leaves(buffer.grads, is_leaf=trees.is_none)
    leaves = list(trees.leaves_with_names(params, "params", none_is_leaf=True))
    mask = []
    for (name, leaf), place in zip(leaves, places, strict=True):
        if place is not None and not trees.is_differentiable(leaf):
            raise TypeError(f"the buffer holds a gradient for {name}, which has none: it is {trees.describe(leaf)}")
        if place is not None and jnp.shape(leaf) != place.shape:
            raise ValueError(f"the buffer holds {trees.describe(place)} for {name}, which is {trees.describe(leaf)}")
        if leaf is not None:
            mask.append(place is not None)
    if trainable is not None:
        chosen = trees.trainable_mask(params, trainable)
        named = [(name, leaf) for name, leaf in leaves if leaf is not None]
        for (name, leaf), wanted, held in zip(named, chosen, mask, strict=True):
            # A TrainState trains no Python number, though `trainable` may be true for all of a module.
            if wanted != held and trees.is_array(leaf):
                raise ValueError(
                    f"trainable says {wanted} for {name}, but the buffer was made with {held}. Make the buffer with the same "
                    "trainable: fg.zeros(params, trainable=...) or fg.TrainState.create(..., trainable=...)"
                )
    return mask
