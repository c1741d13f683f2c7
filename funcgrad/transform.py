"""`value_and_grad` and `grad`, called like JAX's own, over microbatches; `backward`, for microbatches that arrive singly."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax

from funcgrad import accumulator, reducers, trees, window
from funcgrad.accumulator import GradBuffer
from funcgrad.call import Call, Micro
from funcgrad.loops import Loop
from funcgrad.loss import ratio
from funcgrad.options import MicrobatchOptions, Options
from funcgrad.trees import PyTree, Trainable


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    num_microbatches: int = 1,
    microbatch_size: int | None = None,
    batch_argnums: int | Sequence[int] = 1,
    in_axes: PyTree = 0,
    order: str = "strided",
    key_argnums: int | Sequence[int] = (),
    carry_argnum: int | None = None,
    aux: PyTree = "mean",
    trainable: Trainable | None = None,
    skip_nonfinite: bool = False,
    dtype: Any = None,
    compensated: bool = False,
    loop: Loop = "auto",
) -> Callable[..., Any]:
    """`jax.value_and_grad` over microbatches: the same call, the same answer, the activations of one microbatch.

    With microbatches `i`, whose loss is `total_i / weight_i`, the answer is

        value = sum_i total_i / sum_i weight_i,    grads = sum_i d(total_i) / sum_i weight_i,

    which is that of the whole batch, whatever the weights. A function that returns a scalar is taken for the mean over its
    rows, so its weight is their number. One that returns a `WeightedLoss` says its weight itself.

    Unlike there, leaves that have no gradient may stand among the parameters, and the batch is passed by position.
    `holomorphic` and `allow_int` are not taken.

    Called inside `jax.jit`, it is a loop in the compiled program. Called outside, it runs microbatch after microbatch in
    Python, as JAX runs any operation there; `loop="scan"` or an integer would compile anew at each such call.

    Args:
      fun: `fun(params, batch, ...)` gives a scalar or a `WeightedLoss`; with `has_aux`, a pair of that and aux.
      argnums: which positional arguments to differentiate, as in `jax.value_and_grad`.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      num_microbatches: how many microbatches; it must divide the rows of the batch. 1 is `jax.value_and_grad` itself.
      microbatch_size: how many rows each, in place of `num_microbatches`: any batch; the last microbatch may be smaller.
      batch_argnums: which positional arguments hold the batch. Arguments that are named nowhere, keyword arguments among
        them, are seen whole by every microbatch.
      in_axes: which axis of which leaf holds the rows, as in `jax.vmap`: an axis, None for a leaf that every microbatch sees
        whole, or a pytree prefix with these at its leaves: of the batch argument, or of the tuple of them where
        `batch_argnums` is a sequence.
      order: `"strided"`: microbatch i takes rows i, i + N, ..., so that no row of a batch that is sharded over devices moves;
        `"contiguous"`: it takes the next rows in turn.
      key_argnums: which positional arguments hold PRNG keys. Each key is folded with the microbatch's index
        (`jax.random.fold_in`), so each microbatch draws its own numbers; a single microbatch gets it as it is.
        A typed key that is not named is an error, and so is one among the parameters from which the loss draws. (Name the
        parameters' own argument to have the keys in it folded; give them new keys at each step, then.)
      carry_argnum: an argument that each microbatch updates for the next one: BatchNorm's statistics, an RNN's hidden state.
        `fun` has `has_aux=True` and returns `(loss, (carry, aux))`; aux is then `(carry, aux)` here, too, with the last carry.
        It enters each microbatch as a constant: truncated back-propagation. One that is skipped hands on what it was given.
        Where time steps are the rows, name their axis and keep them together: `in_axes=1, order="contiguous"`.
      aux: how each leaf of aux is reduced: `"mean"`, weighted like the loss; `"sum"`; `"max"`; `"last"`; `"stack"`, one on top
        of the other; `"concat"`, rows, which are its first axis, in the order of the batch; a function `(old, new, index) ->
        merged`, called from the second microbatch on, which keeps shape and dtype; or a pytree prefix of these.
      trainable: which leaves of the differentiated arguments are trained: a predicate `(path, leaf) -> bool` as for
        `jax.tree_util.tree_map_with_path`, or a pytree prefix of booleans. The others get None and cost no backward pass.
      skip_nonfinite: leave out a microbatch whose loss or gradients hold NaN or infinity, numerator and denominator. If none
        is left, loss and gradients are zeros.
      dtype: what to accumulate in; None: float32 for narrower floats, else the leaf's own.
      compensated: also keep what the additions round off, as for `zeros`: for very many microbatches.
      loop: `"scan"`; an integer, how many microbatches a loop body holds; `"unroll"`, which lets XLA compute them side by side;
        `"ordered"`, unrolled but in turn, with the memory of a scan; or `"auto"`: inside a trace a scan; but on CPU unrolled
        where the loss holds a convolution and there are at most 32 microbatches (a scan is 5 to 10 times slower there), and 2
        to 8 microbatches in a loop body where one needs less than 16 MiB, those beside it less than 32, and the loss has no
        loop in it.

    Returns:
      A function that is called like `fun` and returns `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The
      gradients have the structure and the dtypes of the parameters; a leaf that has none (an integer, a boolean, a PRNG key,
      an object, or one that is not trained) is None.

    Raises:
      ValueError, TypeError: when an option, the batch or what `fun` returns does not fit; the text says what to do.

    Example:
      >>> import jax, jax.numpy as jnp, funcgrad as fg
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> batch = {"x": jnp.eye(4), "y": jnp.arange(4.0)}
      >>> loss, grads = jax.jit(fg.value_and_grad(loss_fn, num_microbatches=2))({"w": jnp.zeros(4)}, batch)
      >>> print(loss, grads["w"])
      3.5 [ 0.  -0.5 -1.  -1.5]

    Reference:
      `jax.value_and_grad <https://docs.jax.dev/en/latest/_autosummary/jax.value_and_grad.html>`_
    """
    options = Options(
        argnums=tuple(argnums) if isinstance(argnums, Sequence) else argnums,
        has_aux=has_aux,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        in_axes=in_axes,
        order=order,
        key_argnums=key_argnums,
        carry_argnum=carry_argnum,
        aux=aux,
        trainable=trainable,
        skip_nonfinite=skip_nonfinite,
        loop=loop,
    )

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        if options.splits or skip_nonfinite:
            value, aux_value, grads = _in_microbatches(Call(fun, options, args, kwargs), dtype, compensated)
        else:
            value, aux_value, grads = _whole(Call(fun, options, args, kwargs, whole=True))
        return ((value, aux_value) if has_aux else value), grads

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **microbatch_options: Unpack[MicrobatchOptions],
) -> Callable[..., Any]:
    """`jax.grad` over microbatches: `value_and_grad` without the value.

    Args:
      fun: as for `value_and_grad`.
      argnums: as for `value_and_grad`.
      has_aux: as for `value_and_grad`.
      **microbatch_options: the keyword options of `value_and_grad`.

    Returns:
      A function that is called like `fun` and returns the gradients, or `(grads, aux)` with `has_aux`.

    Raises:
      ValueError, TypeError: as `value_and_grad`.

    Example:
      >>> import jax.numpy as jnp, funcgrad as fg
      >>> grad_fn = fg.grad(lambda w, x: jnp.mean(w * x), microbatch_size=2)
      >>> print(grad_fn(1.0, jnp.array([1.0, 2.0, 6.0])))  # microbatches of 2 and 1 rows
      3.0

    Reference:
      `jax.grad <https://docs.jax.dev/en/latest/_autosummary/jax.grad.html>`_
    """
    value_and_grad_fun = value_and_grad(fun, argnums, has_aux, **microbatch_options)

    @functools.wraps(fun, updated=())
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def backward(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    in_axes: PyTree = 0,
    key_argnums: int | Sequence[int] = (),
    carry_argnum: int | None = None,
    trainable: Trainable | None = None,
    skip_nonfinite: bool = False,
) -> Callable[..., Any]:
    """PyTorch's `loss.backward()`, with the buffer passed in and handed back: for microbatches that arrive one at a time.

    Args:
      loss_fn: `loss_fn(params, microbatch, ...)` gives a scalar, which is the mean over the microbatch's rows and weighs as
        many as it has, or a `WeightedLoss`; with `has_aux`, a pair of that and aux.
      has_aux: whether `loss_fn` returns a pair `(loss, aux)`.
      batch_argnums: which arguments hold the rows; `()` where there are none: each call then weighs 1.
      in_axes: which axis of which leaf holds the rows, as for `value_and_grad`.
      key_argnums: which arguments hold PRNG keys; each is folded with the number of microbatches that the buffer has seen, so
        one key serves a whole window.
      carry_argnum: as for `value_and_grad`: hand the carry that comes back on to the next call.
      trainable: checked against the buffer, which says what is trained: see `zeros`.
      skip_nonfinite: leave out a microbatch whose loss or gradients are not finite, and count it in `buffer.skipped`.

    Returns:
      `(buffer, params, *args, **kwargs) -> (buffer, value)`; `value` is the microbatch's loss, or `(loss, aux)`, as they are:
      those of a skipped microbatch too.

    Raises:
      ValueError, TypeError: the buffer does not fit the parameters, or as for `value_and_grad`.

    Example:
      >>> import jax.numpy as jnp, funcgrad as fg
      >>> params = {"w": jnp.array(2.0)}
      >>> backward = fg.backward(lambda params, x: jnp.mean(params["w"] * x))
      >>> buffer = fg.zeros(params)
      >>> for rows in (jnp.array([1.0, 2.0]), jnp.array([6.0])):
      ...     buffer, loss = backward(buffer, params, rows)
      >>> print(fg.mean(buffer)["w"], loss)
      3.0 12.0

    Reference:
      `torch.Tensor.backward <https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html>`_
    """
    options = Options(
        has_aux=has_aux,
        batch_argnums=batch_argnums,
        in_axes=in_axes,
        key_argnums=key_argnums,
        carry_argnum=carry_argnum,
        trainable=trainable,
        skip_nonfinite=skip_nonfinite,
    )

    # Not the loss function's signature, which jax.jit would look up for the names of its static arguments.
    @functools.wraps(loss_fn, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    def backward_fun(buffer: GradBuffer, params: PyTree, *args: Any, **kwargs: Any) -> tuple[GradBuffer, Any]:
        call = Call(loss_fn, options, (params, *args), kwargs)
        mask = window.buffer_mask(buffer, params, trainable)
        arguments = call.whole_arguments(buffer.count + buffer.skipped)
        call.check_whole_keys()
        call.check_param_keys(lambda: arguments)
        micro = call.differentiate(mask, arguments, call.batch.rows)
        weight, scale = window.weigh(micro, call.batch.rows)
        value = micro.loss if micro.weight is None else ratio(micro.loss, micro.weight)
        buffer = accumulator.fold(buffer, micro.grads, weight, scale=scale, keep=micro.keep)
        aux = micro.aux if carry_argnum is None else (micro.carry, micro.aux)
        return buffer, (value, aux) if has_aux else value

    del backward_fun.__wrapped__
    return backward_fun


def _in_microbatches(call: Call, dtype: Any, compensated: bool) -> tuple[Any, PyTree, PyTree]:
    """`(loss, aux, grads)`, accumulated."""
    mask = trees.trainable_mask(call.params, call.options.trainable)
    selected, _ = trees.partition(call.params, mask)
    window.check_call(call)

    def differentiate(carry: PyTree, index: Any) -> Micro:
        micro = call.differentiate(mask, call.arguments(index, carry), call.split.rows_of(index))
        reducers.check_aux(call.options.aux, micro.aux, call.split.rows_of(index))
        return micro

    sums, like = window.fold_batch(call, accumulator.zeros(selected, dtype=dtype, compensated=compensated), differentiate)
    value, aux = window.read_window(sums, like, call.split, call.options)
    aux = aux if call.options.carry_argnum is None else (sums.carry, aux)
    return value, aux, trees.cast_like(accumulator.mean(sums.buffer), selected)


def _whole(call: Call) -> tuple[Any, PyTree, PyTree]:
    """`(loss, aux, grads)` of the batch in one piece: the computation of `jax.value_and_grad`, and nothing else."""
    micro = call.differentiate(trees.trainable_mask(call.params, call.options.trainable), call.args)
    aux = reducers.of_one(call.options.aux, micro.aux)
    aux = aux if call.options.carry_argnum is None else (micro.carry, aux)
    if micro.weight is None:
        return micro.loss, aux, micro.grads
    value, grads = jax.tree.map(lambda total: ratio(total, micro.weight), (micro.loss, micro.grads))
    return value, aux, grads
