"""One call of a transformed function: its arguments, by what they are for, and what one microbatch of it gives."""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp

from funcgrad import checks, keys, loops, microbatch, reducers, trees, work
from funcgrad.accumulator import all_finite
from funcgrad.loss import WeightedLoss, read_loss
from funcgrad.options import Options
from funcgrad.trees import PyTree


class Micro(NamedTuple):
    """What one microbatch gives.

    Attributes:
      grads: the gradients of a total, or of a mean over the rows.
      loss: `[]`, the total of a WeightedLoss, or a mean over the rows.
      weight: `[]`; None for a mean over the rows.
      aux: what the loss function returned beside the loss.
      scale: what the gradients have to be multiplied with to be those of a total; None where they are.
      carry: what it hands on to the next microbatch; None where nothing is carried.
      keep: `[]` boolean, whether all is finite; None where it does not matter.
    """

    grads: PyTree
    loss: Any
    weight: Any
    aux: PyTree
    scale: Any = None
    carry: PyTree = None
    keep: Any = None


_SHARED_KEY = (
    "draw the same numbers from it. Pass a key as an argument of its own, by position, and name it: key_argnums=(2,) for the "
    "third argument. It is then folded with the microbatch's index"
)


class Call:
    """The arguments of one call, by what they are for: parameters, batch, keys, and what every microbatch sees whole.

    Args:
      fun, options, args, kwargs: the call.
      whole: there will be no microbatches, so nothing needs to be known of batch and keys.

    Attributes:
      batch: the batch arguments, checked; one row where there are none.
      split: how the rows are dealt out.

    Raises:
      ValueError: an argument number is not there, or one argument has two uses, or as `read_batch` and `microbatch.split`.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        whole: bool = False,
    ):
        self.fun, self.options, self.args, self.kwargs = fun, options, args, kwargs
        self.argnums = self._numbers("argnums")
        self.batch_argnums = () if whole else self._numbers("batch_argnums")
        self.key_argnums = () if whole else self._numbers("key_argnums")
        self.carry_argnums: tuple[int, ...] = () if options.carry_argnum is None else self._numbers("carry_argnum")
        self._check_carry()
        for left in ("argnums", "key_argnums"):
            both = set(getattr(self, left)) & set(self.batch_argnums)
            if both:
                raise ValueError(
                    f"argument {min(both)} is named in {left} and in batch_argnums. A batch is split into rows; it can be "
                    "neither differentiated nor folded as a key"
                )
        if whole or not (self.batch_argnums or options.splits):
            self.batch = microbatch.Batch([], [], jax.tree.structure(()), 1)
        else:
            self.batch = self._read_batch()
        self.split = microbatch.split(self.batch.rows, options.num_microbatches, options.microbatch_size, options.order)

    @property
    def params(self) -> PyTree:
        """The differentiated argument, or the tuple of them where `argnums` is a sequence."""
        return self._pick(self.args)

    @property
    def carry(self) -> PyTree:
        """What the first microbatch is handed; None where nothing is carried."""
        return trees.strongly_typed_tree(self.args[self.carry_argnums[0]]) if self.carry_argnums else None

    def arguments(self, index: Any, carry: PyTree = None) -> list[Any]:
        """The arguments of microbatch `index`, a number or a traced `[]` integer; the smaller last one is `split.num`.

        Args:
          index: which microbatch.
          carry: what the one before it handed on; None for what the call was given.
        """
        if self.split.tail and isinstance(index, int) and index == self.split.num:
            rows = self.batch.tail(self.split)
        else:
            rows = self.batch.microbatch(self.split, index)
        # A key for one microbatch is the key: as without microbatches.
        args = self._place(rows, index if self.split.count > 1 else None)
        if self.carry_argnums:
            carry = args[self.carry_argnums[0]] if carry is None else carry
            # A constant, also where somebody differentiates the result: a line search, or an outer jax.grad.
            args[self.carry_argnums[0]] = jax.tree.map(_detached, carry)
        return args

    def whole_arguments(self, index: Any) -> list[Any]:
        """The arguments with the batch as it is, being microbatch `index` of a window."""
        return self._place([self.args[number] for number in self.batch_argnums], index)

    def evaluate(self, params: PyTree, args: Sequence[Any]) -> tuple[Any, Any]:
        """`(loss, aux)` of the function, with `params` in their places among `args`."""
        placed = list(args)
        values = (params,) if _is_number(self.options.argnums) else params
        for number, value in zip(self.argnums, values, strict=True):
            placed[number] = value
        try:
            output = self.fun(*placed, **self.kwargs)
        except (TypeError, ValueError) as error:
            names = self._looks_like_rows()
            if names:
                error.add_note(f"funcgrad: {self._rows_advice(names)}")
            raise
        return read_loss(output, self.options.has_aux)

    def evaluate_at(self, mask: list[bool], selected: PyTree, args: Sequence[Any]) -> tuple[Any, Any]:
        """`(loss, aux)` at `selected`, in place of those parameters among `args` that `mask` chooses."""
        _, rest = trees.partition(self._pick(args), mask)
        return self.evaluate(trees.combine(selected, rest), args)

    def differentiate(self, mask: list[bool], args: Sequence[Any], rows: int | None = None) -> Micro:
        """Loss and gradients for one microbatch. What `mask` leaves out is a constant.

        Args:
          mask: which leaves of the parameters are differentiated.
          args: the microbatch's arguments.
          rows: how many rows it has; None to take the gradient of a mean as it is.

        Raises:
          TypeError: with `carry_argnum`, aux is no pair of carry and aux.
          ValueError: the new carry has another structure, shape or dtype than the one before.
        """

        def scalar(selected: PyTree) -> tuple[Any, tuple[Any, Any]]:
            loss, aux = self.evaluate_at(mask, selected, args)
            return (loss.total, (loss.weight, aux)) if isinstance(loss, WeightedLoss) else (loss, (None, aux))

        selected, _ = trees.partition(self._pick(args), mask)
        loss, weight, aux, grads, scale = _value_and_grad(scalar, selected, rows)
        carry = None
        if self.carry_argnums:
            carry, aux = self._read_carry(args[self.carry_argnums[0]], aux)
        if not self.options.skip_nonfinite:
            return Micro(grads, loss, weight, aux, scale, carry)
        keep = all_finite(grads, loss, 0 if weight is None else weight)
        if self.carry_argnums:  # what is left out hands on nothing
            old = trees.strongly_typed_tree(args[self.carry_argnums[0]])
            carry = chosen(keep, carry, old)
        return Micro(grads, loss, weight, aux, scale, carry, keep)

    def _check_carry(self) -> None:
        for number in self.carry_argnums:
            for name in ("argnums", "batch_argnums", "key_argnums"):
                if number in getattr(self, name):
                    raise ValueError(f"argument {number} is named in carry_argnum and in {name}; it cannot be both")

    def _read_carry(self, old: PyTree, output: Any) -> tuple[PyTree, PyTree]:
        if not isinstance(output, tuple | list) or len(output) != 2:
            raise TypeError(
                f"with carry_argnum the function must return (loss, (carry, aux)); got {trees.describe_output(output)} beside "
                "the loss. aux may be None"
            )
        carry, aux = output
        name = f"args[{self.carry_argnums[0]}]"
        trees.check_same_structure(old, carry, f"the carry that came in as {name}", "the carry that the function returns")
        for (place, leaf), before in zip(trees.leaves_with_names(carry, "carry"), jax.tree.leaves(old), strict=True):
            if trees.describe(leaf) != trees.describe(before):
                raise ValueError(
                    f"the carry must keep its shapes and dtypes from microbatch to microbatch: {place} came in as "
                    f"{trees.describe(before)}, and the function returns {trees.describe(leaf)}. Begin with {name} of that "
                    "kind, or cast what is returned"
                )
        return trees.strongly_typed_tree(carry), aux

    def check_whole_keys(self) -> None:
        """Refuse a typed key that every microbatch sees whole."""
        whole = self._whole_leaves()
        for number, arg in zip(self.batch_argnums, self.batch.unsplit(), strict=True):
            whole += trees.leaves_with_names(arg, f"args[{number}]")
        for name, leaf in whole:
            if trees.is_key(leaf):
                raise ValueError(f"{name} is a PRNG key ({trees.describe(leaf)}), and every microbatch would {_SHARED_KEY}")

    def check_param_keys(self, microbatch_args: Callable[[], Sequence[Any]]) -> None:
        """Refuse a key among the parameters if the loss draws from it.

        Args:
          microbatch_args: gives the arguments of one microbatch; called, and the loss traced, only if there are such keys.
        """
        unnamed = {number: self.args[number] for number in self.argnums if number not in self.key_argnums}

        def evaluate(unnamed: dict[int, PyTree]) -> Any:
            args = [unnamed.get(number, arg) for number, arg in enumerate(microbatch_args())]
            return self.evaluate(self._pick(args), args)

        for name in keys.used_keys(evaluate, unnamed, "args"):
            raise ValueError(
                f"the loss draws from {name}, a PRNG key among the parameters, and every microbatch and every step would "
                f"{_SHARED_KEY}. For an nnx.Module there is fg.nnx.train_step, too"
            )

    def warn_of_whole_rows(self) -> None:
        """Warn of an argument that looks like a part of the batch, where no shape would tell: rows come singly."""
        names = self._looks_like_rows() if 1 in (self.split.size, self.split.tail) else []
        if names:
            warnings.warn(self._rows_advice(names), UserWarning, stacklevel=_frames_to_the_user())

    def _read_batch(self) -> microbatch.Batch:
        batch, in_axes = tuple(self.args[number] for number in self.batch_argnums), self.options.in_axes
        if _is_number(self.options.batch_argnums):
            axes = trees.broadcast_prefix(in_axes, batch[0], "in_axes")
        else:
            axes = trees.broadcast_prefix(tuple(in_axes) if isinstance(in_axes, list) else in_axes, batch, "in_axes")
        return microbatch.read_batch(batch, self.batch_argnums, axes)

    def _numbers(self, name: str) -> tuple[int, ...]:
        numbers = checks.argument_numbers(name, getattr(self.options, name))
        return checks.resolve_argument_numbers(name, numbers, len(self.args))

    def _pick(self, args: Sequence[Any]) -> PyTree:
        picked = tuple(args[number] for number in self.argnums)
        return picked[0] if _is_number(self.options.argnums) else picked

    def _place(self, batch_args: Sequence[Any], index: Any) -> list[Any]:
        """The arguments with `batch_args` for the batch, and the keys folded with `index`, unless it is None."""
        args = list(self.args)
        for number, value in zip(self.batch_argnums, batch_args, strict=True):
            args[number] = value
        if index is not None:
            for number in self.key_argnums:
                args[number] = keys.fold_keys(args[number], index, f"args[{number}]")
        return args

    def _whole_leaves(self) -> list[tuple[str, Any]]:
        """The leaves that every microbatch sees whole, other than parameters, keys and batch arguments."""
        named = {*self.argnums, *self.batch_argnums, *self.key_argnums, *self.carry_argnums}
        whole = [(number, arg) for number, arg in enumerate(self.args) if number not in named]
        leaves = [pair for number, arg in whole for pair in trees.leaves_with_names(arg, f"args[{number}]")]
        return [*leaves, *trees.leaves_with_names(self.kwargs, "kwargs")]

    def _looks_like_rows(self) -> list[str]:
        """The names of whole leaves that are as long as the batch; none where the batch is not split."""
        leaves = self._whole_leaves() if self.split.count > 1 else []
        return [name for name, leaf in leaves if trees.is_array(leaf) and jnp.shape(leaf)[:1] == (self.batch.rows,)]

    def _rows_advice(self, names: list[str]) -> str:
        return (
            f"{trees.abbreviate(names)} has {self.batch.rows} rows, like the batch, but is passed whole to every microbatch. "
            "If it is a part of the batch, pass it by position and name it in batch_argnums"
        )


def _value_and_grad(scalar: Any, selected: PyTree, rows: int | None) -> tuple[Any, Any, Any, PyTree, Any]:
    """`(loss, weight, aux, grads, scale)` of `scalar(selected)`, which gives `(loss, (weight, aux))`.

    The gradient of a mean over rows is taken of the mean times the rows, so that the factor is a constant where the backward
    pass begins, and adding the gradient to a sum costs no multiplication. Not where that might change more than the last bit:
    in a loss that computes in 16 bits, which might overflow, or that has a `custom_vjp`, which might clip. To know that, the
    loss has to be recorded anyhow; so it is done inside `jax.jit` only. Else the gradient is that of the mean, with a `scale`.
    """
    if rows is None or rows == 1 or not loops.is_staging():
        (loss, (weight, aux)), grads = jax.value_and_grad(scalar, has_aux=True)(selected)
        return loss, weight, aux, grads, None if weight is not None or rows in (None, 1) else rows

    def recorded(selected: PyTree) -> Any:
        output = scalar(selected)
        reducers.check_known(output[1][1])
        return output

    closed, like = jax.make_jaxpr(recorded, return_shape=True)(selected)
    run, treedef = jax.extend.core.jaxpr_as_fun(closed), jax.tree.structure(like)
    is_total = like[1][0] is not None
    in_backward = not is_total and work.scales_exactly(closed.jaxpr)

    def scaled(selected: PyTree) -> tuple[Any, Any]:
        loss, rest = treedef.unflatten(run(*jax.tree.leaves(selected)))
        return loss * rows if in_backward else loss, (loss, rest)

    (_, (loss, (weight, aux))), grads = jax.value_and_grad(scaled, has_aux=True)(selected)
    return loss, weight, aux, grads, None if is_total or in_backward else rows


def chosen(keep: Any, new: PyTree, old: PyTree) -> PyTree:
    """`new` where `keep`, `[]` boolean, is true, else `old`; both may hold keys."""

    def choose(new: Any, old: Any) -> Any:
        if trees.is_key(new):
            return jax.lax.select(jnp.broadcast_to(keep, new.shape), new, old)
        return jnp.where(keep, new, old)

    return jax.tree.map(choose, new, old)


def _detached(leaf: Any) -> Any:
    return jax.lax.stop_gradient(leaf) if trees.is_differentiable(leaf) else leaf


def _is_number(argnums: Any) -> bool:
    return not isinstance(argnums, Sequence)


def _frames_to_the_user() -> int:
    """How many frames above the caller the first one stands that is neither of this library nor of JAX."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("funcgrad", "jax"):
        level, frame = level + 1, frame.f_back
    return level
