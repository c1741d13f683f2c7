"""One call of a transformed function: its options, and its arguments by what they are for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from funcgrad import keys, loops, microbatch, options, reducers, trees
from funcgrad.loss import WeightedLoss, read_loss
from funcgrad.trees import PyTree, Trainable


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that say how a batch becomes microbatches; `funcgrad.value_and_grad` describes each."""

    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False
    num_microbatches: int = 1
    microbatch_size: int | None = None
    batch_argnums: int | Sequence[int] = 1
    in_axes: PyTree = 0
    order: str = "strided"
    key_argnums: int | Sequence[int] = ()
    aux: PyTree = "mean"
    trainable: Trainable | None = None
    skip_nonfinite: bool = False
    loop: loops.Loop = "auto"

    def __post_init__(self) -> None:
        num = options.positive_integer("num_microbatches", self.num_microbatches)
        if self.microbatch_size is not None:
            options.positive_integer("microbatch_size", self.microbatch_size)
            if num != 1:
                raise ValueError(
                    f"give num_microbatches={num} or microbatch_size={self.microbatch_size}, not both: the one follows from "
                    "the other and the batch"
                )
        options.check_choice("order", self.order, microbatch.ORDERS)
        reducers.check_reducers(self.aux)
        loops.check_loop(self.loop)
        for name in ("argnums", "batch_argnums", "key_argnums"):
            options.argument_numbers(name, getattr(self, name))

    @property
    def splits(self) -> bool:
        """Whether a batch may have to be split; if not, nothing needs to be known of it."""
        return self.num_microbatches != 1 or self.microbatch_size is not None


class MicrobatchOptions(TypedDict, total=False):
    """The keyword options of `funcgrad.value_and_grad`, for functions that hand them on."""

    num_microbatches: int
    microbatch_size: int | None
    batch_argnums: int | Sequence[int]
    in_axes: PyTree
    order: str
    key_argnums: int | Sequence[int]
    aux: PyTree
    trainable: Trainable | None
    skip_nonfinite: bool
    dtype: Any
    loop: loops.Loop


class Micro(NamedTuple):
    """What one microbatch gives. All but `grads` and `aux` are `[]`."""

    grads: PyTree
    loss: Any  # the total of a WeightedLoss, or a mean over the rows
    weight: Any  # None for a mean over the rows
    aux: PyTree


class Call:
    """The arguments of one call, by what they are for: parameters, batch, keys, and what every microbatch sees whole.

    Args:
      fun, settings, args, kwargs: the call.
      whole: there will be no microbatches, so nothing needs to be known of batch and keys.

    Attributes:
      batch: the batch arguments, checked; `rows` is 1 where there are none.

    Raises:
      ValueError: an argument number is not there, or one argument has two uses, or a PRNG key has none, or as `read_batch`.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        settings: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        whole: bool = False,
    ):
        self.fun, self.settings, self.args, self.kwargs = fun, settings, args, kwargs
        self.argnums = self._numbers("argnums")
        self.batch_argnums = () if whole else self._numbers("batch_argnums")
        self.key_argnums = () if whole else self._numbers("key_argnums")
        self.batch = microbatch.Batch([], [], jax.tree.structure(()), 1)
        if whole:
            return
        for left in ("argnums", "key_argnums"):
            both = set(getattr(self, left)) & set(self.batch_argnums)
            if both:
                raise ValueError(
                    f"argument {min(both)} is named in {left} and in batch_argnums. A batch is split into rows; it can be "
                    "neither differentiated nor folded as a key"
                )
        if self.batch_argnums or settings.splits:
            batch = tuple(args[number] for number in self.batch_argnums)
            if _is_number(settings.batch_argnums):
                spread = trees.broadcast_prefix(settings.in_axes, batch[0], "in_axes")
            else:
                spread = trees.broadcast_prefix(settings.in_axes, batch, "in_axes")
            self.batch = microbatch.read_batch(batch, self.batch_argnums, spread)
        self._check_keys()

    @property
    def params(self) -> PyTree:
        """The differentiated argument, or the tuple of them where `argnums` is a sequence."""
        return self._pick(self.args)

    def split(self, args: Sequence[Any], mask: list[bool]) -> tuple[PyTree, PyTree]:
        """The parameters among `args`, as the leaves that `mask` chooses and the others."""
        return trees.partition(self._pick(args), mask)

    def evaluate(self, params: PyTree, args: Sequence[Any]) -> tuple[Any, Any]:
        """`(loss, aux)` of the function, with `params` in their places among `args`."""
        placed = list(args)
        values = (params,) if _is_number(self.settings.argnums) else params
        for number, value in zip(self.argnums, values, strict=True):
            placed[number] = value
        try:
            output = self.fun(*placed, **self.kwargs)
        except (TypeError, ValueError) as error:
            self._note_whole_arguments(error)
            raise
        return read_loss(output, self.settings.has_aux)

    def differentiate(self, mask: list[bool], args: Sequence[Any]) -> Micro:
        """Loss and gradients for one microbatch, whose arguments are `args`. What `mask` leaves out is a constant."""
        selected, rest = self.split(args, mask)

        def scalar(selected: PyTree) -> tuple[Any, tuple[Any, Any]]:
            loss, aux = self.evaluate(trees.combine(selected, rest), args)
            return (loss.total, (loss.weight, aux)) if isinstance(loss, WeightedLoss) else (loss, (None, aux))

        (loss, (weight, aux)), grads = jax.value_and_grad(scalar, has_aux=True)(selected)
        return Micro(grads, loss, weight, aux)

    def arguments(self, batch_args: Sequence[Any], index: Any) -> list[Any]:
        """The arguments of one microbatch: its rows, and the keys folded with its index."""
        args = list(self.args)
        for number, value in zip(self.batch_argnums, batch_args, strict=True):
            args[number] = value
        for number in self.key_argnums:
            args[number] = keys.fold_keys(args[number], index, f"args[{number}]")
        return args

    def check_param_keys(self, microbatch_args: Callable[[], Sequence[Any]]) -> None:
        """Refuse a key among the parameters from which the loss draws: every microbatch would draw the same.

        Args:
          microbatch_args: gives the arguments of one microbatch; called only if there are keys among the parameters.
        """
        unnamed = {number: self.args[number] for number in self.argnums if number not in self.key_argnums}

        def evaluate(unnamed: dict[int, PyTree]) -> Any:
            args = [unnamed.get(number, arg) for number, arg in enumerate(microbatch_args())]
            return self.evaluate(self._pick(args), args)

        used = keys.used_keys(evaluate, unnamed, "args")
        if used:
            raise ValueError(
                f"the loss draws random numbers from {used[0]}, a PRNG key among the parameters, and every microbatch would "
                "draw the same. Pass a key as an argument of its own, named in key_argnums; or name the parameters there, "
                f"key_argnums={self.argnums[0]}, to fold the keys among them with the microbatch's index"
            )

    def _numbers(self, name: str) -> tuple[int, ...]:
        numbers = options.argument_numbers(name, getattr(self.settings, name))
        return options.resolve_argument_numbers(name, numbers, len(self.args))

    def _pick(self, args: Sequence[Any]) -> PyTree:
        picked = tuple(args[number] for number in self.argnums)
        return picked[0] if _is_number(self.settings.argnums) else picked

    def _whole_leaves(self) -> list[tuple[str, Any]]:
        """The leaves that every microbatch sees whole, other than parameters, keys and batch arguments."""
        named = {*self.argnums, *self.batch_argnums, *self.key_argnums}
        whole = [(number, arg) for number, arg in enumerate(self.args) if number not in named]
        leaves = [pair for number, arg in whole for pair in trees.leaves_with_names(arg, f"args[{number}]")]
        return [*leaves, *trees.leaves_with_names(self.kwargs, "kwargs")]

    def _note_whole_arguments(self, error: Exception) -> None:
        """Where the function failed on a microbatch, point at an argument that looks like a part of the batch."""
        rows = self.batch.rows
        names = [name for name, leaf in self._whole_leaves() if trees.is_array(leaf) and jnp.shape(leaf)[:1] == (rows,)]
        if names:
            error.add_note(
                f"funcgrad: {', '.join(names)} has {rows} rows, like the batch, but is passed whole to every microbatch. "
                "If it is a part of the batch, pass it by position and name it in batch_argnums"
            )

    def _check_keys(self) -> None:
        """Refuse a typed key that would be the same one for every microbatch."""
        whole = self._whole_leaves()
        for number, arg in zip(self.batch_argnums, self.batch.unsplit(), strict=True):
            whole += trees.leaves_with_names(arg, f"args[{number}]")
        for name, leaf in whole:
            if trees.is_key(leaf):
                raise ValueError(
                    f"{name} is a PRNG key ({trees.describe(leaf)}), and every microbatch would draw the same numbers from "
                    "it. Pass it as an argument of its own, by position, and name it: key_argnums=(2,) for the third argument. "
                    "It is then folded with the microbatch's index"
                )


def _is_number(argnums: Any) -> bool:
    return not isinstance(argnums, tuple | list)
