"""The options of a transform over microbatches, checked."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypedDict

from funcgrad import checks, loops, microbatch, reducers
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
    carry_argnum: int | None = None
    aux: PyTree = "mean"
    trainable: Trainable | None = None
    skip_nonfinite: bool = False
    loop: loops.Loop = "auto"
    in_turn: bool = False  # whether "auto" keeps to the memory of a scan

    def __post_init__(self) -> None:
        num, size = checks.positive_integer("num_microbatches", self.num_microbatches), self.microbatch_size
        if size is not None:
            size = checks.positive_integer("microbatch_size", size)
            if num != 1:
                raise ValueError(
                    f"give num_microbatches={num} or microbatch_size={size}, not both: the one follows from the other and the "
                    "batch"
                )
        object.__setattr__(self, "num_microbatches", num)
        object.__setattr__(self, "microbatch_size", size)
        checks.check_choice("order", self.order, microbatch.ORDERS)
        reducers.check_reducers(self.aux)
        loops.check_loop(self.loop)
        for name in ("argnums", "batch_argnums", "key_argnums"):
            checks.argument_numbers(name, getattr(self, name))
        if self.carry_argnum is not None:
            if len(checks.argument_numbers("carry_argnum", self.carry_argnum)) != 1 or isinstance(self.carry_argnum, Sequence):
                raise TypeError(f"carry_argnum must be the number of one argument; got {self.carry_argnum!r}")
            if not self.has_aux:
                raise ValueError(
                    "with carry_argnum the function returns (loss, (carry, aux)), so pass has_aux=True, too; aux may be None"
                )

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
    carry_argnum: int | None
    aux: PyTree
    trainable: Trainable | None
    skip_nonfinite: bool
    dtype: Any
    compensated: bool
    loop: loops.Loop


def axes_by_argument(batch_argnums: int | Sequence[int], in_axes: PyTree) -> tuple[PyTree, ...]:
    """`in_axes` with an entry for each batch argument, to which those of further arguments can be added."""
    if not isinstance(batch_argnums, Sequence):
        return (in_axes,)
    return tuple(in_axes) if isinstance(in_axes, tuple | list) else (in_axes,) * len(batch_argnums)


def with_two_more(batch_argnums: int | Sequence[int], in_axes: PyTree, key_argnums: int | Sequence[int]) -> dict[str, Any]:
    """The options that name arguments, for a function that takes two more at the end than the one that they are for.

    The last one is carried. The one before is seen whole by every microbatch: a part of the batch that has no axis, so that
    none of it is taken for rows.
    """

    def moved(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number if number >= 0 else number - 2 for number in numbers)

    batch = moved(checks.argument_numbers("batch_argnums", batch_argnums))
    keys = moved(checks.argument_numbers("key_argnums", key_argnums))
    options = {"key_argnums": keys, "carry_argnum": -1}
    if not batch:
        return options | {"batch_argnums": (), "in_axes": in_axes}
    return options | {"batch_argnums": (*batch, -2), "in_axes": (*axes_by_argument(batch_argnums, in_axes), None)}
