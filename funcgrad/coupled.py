"""Losses that couple the rows of a batch: contrastive losses, exact, with the activations of one microbatch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import accumulator, loops, reducers, trees, window
from funcgrad.call import Call, Micro
from funcgrad.loops import Loop
from funcgrad.loss import WeightedLoss, ratio, read_loss
from funcgrad.options import Options, axes_by_argument
from funcgrad.trees import PyTree, Trainable


def coupled_value_and_grad(
    encode_fn: Callable[..., PyTree],
    loss_fn: Callable[[PyTree, PyTree], Any],
    has_aux: bool = False,
    *,
    num_microbatches: int = 1,
    microbatch_size: int | None = None,
    batch_argnums: int | Sequence[int] = 1,
    in_axes: PyTree = 0,
    order: str = "strided",
    key_argnums: int | Sequence[int] = (),
    trainable: Trainable | None = None,
    dtype: Any = None,
    compensated: bool = False,
    loop: Loop = "auto",
) -> Callable[..., Any]:
    """`value_and_grad` of `loss_fn(params, encode_fn(params, batch))`, where the loss couples all rows of the batch.

    A contrastive loss compares each row with all others, so it is no mean over rows, and no sum over microbatches: plain
    accumulation learns another loss, which has fewer negatives. Here, with microbatches `x_i` and representations
    `z_i = encode(params, x_i)`, which are small,

        z = encode all microbatches, without what a backward pass would need
        value, d_params, d_z = the loss and its gradients at (params, z)
        grads = d_params + sum_i vjp(encode, params, x_i)(d_z_i)

    which is the gradient of the whole batch by the chain rule. It costs a second forward pass through the encoder. It needs the
    activations of one microbatch, and beside them all representations and what the loss makes of these, for example a matrix of
    similarities. Dropout sees the same mask in both passes.

    It goes where `value_and_grad` goes: into a jitted step of your own, around `optimizer.update`.

    Args:
      encode_fn: `encode_fn(params, batch, ...)` gives the representations: a pytree whose leaves have a row for each row of the
        batch as their first axis. Leaves that have no gradient (labels, row numbers) may be among them. Rows must not depend on
        one another here: BatchNorm's statistics in training are of a microbatch.
      loss_fn: `loss_fn(params, representations)` gives a scalar or a `WeightedLoss`; with `has_aux`, a pair of that and aux. It
        sees the representations of all rows, in the order of the batch, and the parameters, for a learned temperature.
      has_aux: whether `loss_fn` returns a pair `(loss, aux)`.
      num_microbatches, microbatch_size, batch_argnums, in_axes, order, key_argnums: as for `value_and_grad`; they say how the
        arguments of `encode_fn` become microbatches.
      trainable, dtype, compensated, loop: as for `value_and_grad`.

    Returns:
      A function that is called like `encode_fn` and returns `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The
      gradients are of the first argument, and as `value_and_grad` gives them.

    Raises:
      ValueError: a representation has not a row for each row of the microbatch, or its rows get longer with their number, or
        none has a gradient, or as for `value_and_grad`.
      TypeError: as for `value_and_grad`.

    Example:
      >>> import jax, jax.numpy as jnp, funcgrad as fg
      >>> def encode(params, pairs):
      ...     return jnp.tanh(pairs["left"] @ params["w"]), jnp.tanh(pairs["right"] @ params["w"])
      >>> def info_nce(params, representations):
      ...     left, right = representations
      ...     return -jnp.mean(jnp.diag(jax.nn.log_softmax(left @ right.T / params["temperature"])))
      >>> params = {"w": jnp.eye(3), "temperature": jnp.array(0.5)}
      >>> pairs = {"left": jnp.eye(4, 3), "right": jnp.eye(4, 3) + 0.1}
      >>> loss, grads = fg.coupled_value_and_grad(encode, info_nce, num_microbatches=4)(params, pairs)
      >>> whole = jax.value_and_grad(lambda params: info_nce(params, encode(params, pairs)))(params)
      >>> print(jnp.allclose(loss, whole[0]), jnp.allclose(grads["w"], whole[1]["w"], atol=1e-6))
      True True

    Reference:
      `Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021
      <https://arxiv.org/abs/2101.06983>`_ (GradCache)
    """
    options = Options(
        has_aux=True,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        in_axes=in_axes,
        order=order,
        key_argnums=key_argnums,
        trainable=trainable,
        loop=loop,
        in_turn=True,
    )

    # The core's functions give a loss and aux; this one is all aux.
    @functools.wraps(encode_fn, updated=())
    def encode(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        return jnp.zeros(()), encode_fn(*args, **kwargs)

    @functools.wraps(encode_fn, updated=())
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        call = Call(encode, options, args, kwargs)
        window.check_call(call)
        mask = trees.trainable_mask(call.params, trainable)
        selected, rest = trees.partition(call.params, mask)

        def evaluate(selected: PyTree, representations: PyTree) -> tuple[Any, tuple[Any, PyTree]]:
            loss, aux = read_loss(loss_fn(trees.combine(selected, rest), representations), has_aux)
            return (loss.total, (loss.weight, aux)) if isinstance(loss, WeightedLoss) else (loss, (None, aux))

        if call.split.count == 1:

            def whole(selected: PyTree) -> tuple[Any, tuple[Any, PyTree]]:
                return evaluate(selected, _encode(call, mask, selected, 0))

            (value, (weight, aux)), grads = jax.value_and_grad(whole, has_aux=True)(selected)
            value, grads = _divided((value, grads), weight)
        else:
            value, aux, direct, cotangents = _through_loss(evaluate, selected, _encode_all(call, mask, selected))
            buffer = accumulator.add_grads(accumulator.zeros(selected, dtype=dtype, compensated=compensated), direct)
            sums = _through_encoder(call, mask, buffer, cotangents)
            grads = trees.cast_like(accumulator.total(sums), selected)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_fun


def _divided(tree: PyTree, weight: Any) -> PyTree:
    """`tree` over the weight of a WeightedLoss, zeros where that is zero; as it is where there is none."""
    return tree if weight is None else jax.tree.map(lambda leaf: ratio(leaf, weight), tree)


def _encode(call: Call, mask: list[bool], selected: PyTree, index: Any) -> PyTree:
    """The representations of microbatch `index`, checked."""
    _, representations = call.evaluate_at(mask, selected, call.arguments(index))
    rows = call.split.rows_of(index)
    named = list(trees.leaves_with_names(representations, "representations"))
    for name, leaf in named:
        dtype = trees.dtype_of(leaf)
        if dtype is None or not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
            raise TypeError(
                f"{name} must be an array of numbers, with a row for each row of the batch; got {trees.describe(leaf)}"
            )
        if jnp.shape(leaf)[:1] != (rows,):
            raise ValueError(
                f"{name} is {trees.describe(leaf)}, but must have a row for each row of the microbatch as its first axis, here "
                f"{rows}. What there is once for all rows, a temperature for example, loss_fn takes from the parameters"
            )
    if any(rows in jnp.shape(leaf)[1:] for _, leaf in named) and call.split.count > 1:
        _check_rows_alone(call, mask, selected, named)
    if not any(trees.is_differentiable(leaf) for _, leaf in named):
        got = trees.abbreviate([f"{name}: {trees.describe(leaf)}" for name, leaf in named]) if named else "no leaf"
        raise ValueError(f"encode_fn must return representations that have a gradient, float32 for example; got {got}")
    return representations


def _check_rows_alone(call: Call, mask: list[bool], selected: PyTree, named: list[tuple[str, Any]]) -> None:
    """Check that what `encode_fn` gives for a row does not get longer with the rows: it is asked for the whole batch's shapes.

    Raises:
      ValueError: it does.
    """
    placed = call.whole_arguments(0)
    whole = jax.eval_shape(lambda selected: call.evaluate_at(mask, selected, placed)[1], selected)
    for (name, leaf), all_rows in zip(named, jax.tree.leaves(whole), strict=True):
        if jnp.shape(leaf)[1:] != all_rows.shape[1:]:
            raise ValueError(
                f"{name} is {trees.describe(leaf)} for a microbatch, but would be {trees.describe(all_rows)} for the whole "
                "batch: encode_fn compares the rows of a microbatch. Compare them in loss_fn, which sees all"
            )


def _encode_all(call: Call, mask: list[bool], selected: PyTree) -> PyTree:
    """The representations of all rows, in the order of the batch."""
    split = call.split

    def step(_: None, index: Any) -> PyTree:
        return _encode(call, mask, selected, index)

    def add(running: list[Any], representations: PyTree, index: Any) -> list[Any]:
        return reducers.fold("concat", running, representations, split, weight=1, index=index, keep=None)

    fold = loops.Fold(lambda like: reducers.init("concat", like, split), add)
    running, like = loops.fold_over(step, None, fold, split.num, call.options.loop, in_turn=True)
    if split.tail:
        running = add(running, step(None, split.num), split.num)
    return reducers.finish("concat", running, 1, like, split)


def _through_loss(
    evaluate: Callable[[PyTree, PyTree], tuple[Any, tuple[Any, PyTree]]], selected: PyTree, representations: PyTree
) -> tuple[jax.Array, PyTree, PyTree, list[jax.Array]]:
    """`(value, aux, grads, cotangents)`: the loss, its gradients by parameters and by representations (a list)."""
    mask = [trees.is_differentiable(leaf) for leaf in jax.tree.leaves(representations)]
    varied, constant = trees.partition(representations, mask)

    def loss(selected: PyTree, varied: PyTree) -> tuple[Any, tuple[Any, PyTree]]:
        return evaluate(selected, trees.combine(varied, constant))

    (total, (weight, aux)), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(selected, varied)
    value, (direct, cotangents) = _divided((total, gradients), weight)
    return value, aux, direct, jax.tree.leaves(cotangents)


def _through_encoder(call: Call, mask: list[bool], buffer: Any, cotangents: list[jax.Array]) -> Any:
    """`buffer` with the gradients by way of the representations added, microbatch by microbatch.

    The vector-Jacobian product of the encoder is the gradient of its product with the cotangents, which are thus one more
    argument that is split into microbatches.
    """
    options, number = call.options, len(call.args)
    options = dataclasses.replace(
        options,
        has_aux=False,
        batch_argnums=(*call.batch_argnums, number),
        key_argnums=call.key_argnums,
        in_axes=(*axes_by_argument(options.batch_argnums, options.in_axes), 0),
    )

    def product(*args: Any, **kwargs: Any) -> WeightedLoss:
        _, representations = call.fun(*args[:number], **kwargs)
        varied = filter(trees.is_differentiable, jax.tree.leaves(representations))
        products = [_inner(leaf, cotangent) for leaf, cotangent in zip(varied, args[number], strict=True)]
        return WeightedLoss(sum(products[1:], products[0]), 1.0)

    second = Call(product, options, (*call.args, cotangents), call.kwargs)

    def differentiate(_: None, index: Any) -> Micro:
        return second.differentiate(mask, second.arguments(index))

    sums, _ = window.fold_batch(second, buffer, differentiate)
    return sums.buffer


def _inner(representation: Any, cotangent: jax.Array) -> jax.Array:
    wide = trees.at_least_float32(cotangent.dtype)  # in 16 bits the product may overflow
    return jnp.sum(jnp.real(representation.astype(wide) * cotangent.astype(wide)))
