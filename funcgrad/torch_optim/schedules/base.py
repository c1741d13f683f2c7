"""A learning rate as PyTorch's schedulers make it: each step from the rate before it, in closed form where there is one."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

Rate = Any
Count = Any
Claims = Literal["always", "first", "never"]
# Beyond any count: a closed form that holds for ever.
ALWAYS = math.inf


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """An optax schedule, `count -> learning rate`, `[]`: float64 where x64 is on, else float32.

    A scheduler of PyTorch changes the rate that it finds in the optimizer. So that schedules can be chained and follow each
    other as there, a schedule knows each way in which PyTorch calls it; a count is an integer array `[]`, a rate a number
    or an array `[]`.

    Attributes:
      learning_rate: the base rate.
      first: `(rate, initial) -> rate`: what the constructor leaves of the rate that it finds; `initial` is the base rate
        that the schedulers of an optimizer share.
      step: `(rate, count) -> rate`: one `step()` to `count`, outside the constructor.
      restart: `rate -> rate`: the step with which a sequence enters a later phase.
      after: `(start, count) -> rate`: the rate `count` steps after the rate was `start`.
      begin: `rate -> rate`: the step with which a sequence enters its first phase.
      sets: whether `step` gives the same whatever rate it finds.
      growth: `count -> factor`: what the steps 1 to `count` have multiplied the rate with, for counts up to `until`.
      until: the last count for which `growth` holds.
      momentum: the schedule of the momentum, where there is one.
      claims: whether the constructor makes its own rate the shared one: always, if it comes first, or never.
      kind: whether it is made of other schedules, and how.
    """

    learning_rate: Rate
    first: Callable[[Rate, Rate], Rate]
    step: Callable[[Rate, Count], Rate]
    restart: Callable[[Rate], Rate]
    after: Callable[[Rate, Count], Rate]
    begin: Callable[[Rate], Rate]
    sets: bool = False
    growth: Callable[[Count], Rate] | None = None
    until: float = 0
    momentum: "Schedule | None" = None
    claims: Claims = "never"
    kind: Literal["plain", "chain", "sequence"] = "plain"

    def __call__(self, count: Count) -> jax.Array:
        """The learning rate of the step with this count, the first being 0.

        Args:
          count: integer, `[]`, Python's or an array.

        Returns:
          The rate, `[]`.

        Raises:
          TypeError: `count` is no integer.
        """
        count = jnp.asarray(count)
        if not jnp.issubdtype(count.dtype, jnp.integer):
            raise TypeError(f"a schedule's count must be an integer; got {count.dtype}. Count steps, not epochs in parts")
        # The widest integer: 1 / count, in a user's function, then has the precision of a rate.
        count = count.astype(jnp.result_type(int))
        return as_float(self.after(as_float(self.first(as_float(self.learning_rate), self.learning_rate)), count))


def scaling(
    learning_rate: Rate,
    *,
    ratio: Callable[[Count], Rate],
    growth: Callable[[Count], Rate],
    first: Rate = 1.0,
    restart: Rate = 1.0,
) -> Schedule:
    """A schedule whose every step multiplies the rate.

    Args:
      learning_rate: the base rate.
      ratio: the factor of the step to `count`, outside the constructor.
      growth: the product of the factors of the steps 1 to `count`.
      first: the factor of the constructor.
      restart: the base rate's factor where a sequence enters the schedule.
    """
    return Schedule(
        learning_rate,
        first=lambda rate, initial: rate * first,
        step=lambda rate, count: rate * ratio(count),
        restart=lambda rate: as_float(learning_rate) * restart,
        after=lambda start, count: start * growth(count),
        begin=lambda rate: rate * first,
        growth=growth,
        until=ALWAYS,
    )


def setting(learning_rate: Rate, value: Callable[[Count], Rate], **attributes: Any) -> Schedule:
    """A schedule that looks only at the count: `value(count)`, whatever the rate was."""

    def at_zero(*_: Rate) -> Rate:
        return value(jnp.asarray(0))

    parts = {
        "first": at_zero,
        "step": lambda rate, count: value(count),
        "restart": at_zero,
        "after": lambda start, count: jnp.where(count > 0, value(count), start),
        "begin": at_zero,
    }
    return Schedule(learning_rate, **(parts | attributes), sets=True)


def walk(step: Callable[[Rate, Count], Rate]) -> Callable[[Rate, Count, Count], Rate]:
    """`(rate, begin, end) -> rate`: the steps to the counts begin + 1 to end, one after the other.

    Compiled once, so that a call outside jit does not compile the loop anew.
    """

    @jax.jit
    def steps(rate: Rate, begin: Count, end: Count) -> Rate:
        return jax.lax.fori_loop(begin + 1, end + 1, lambda count, rate: as_float(step(rate, count)), as_float(rate))

    return steps


def as_float(number: Any) -> jax.Array:
    """`number` in float64 where x64 is on, else in float32."""
    return jnp.asarray(number, jnp.result_type(float))


def one_plus_cos(numerator: Any, denominator: Any) -> jax.Array:
    """1 + cos(pi * numerator / denominator).

    In float64 with PyTorch's own rounding, which its recursions keep. In float32, where near pi that sum would keep only some
    digits, by 1 + cos(x) = 2 sin((pi - x) / 2)**2.
    """
    if jnp.result_type(float) == jnp.float64:
        return 1 + jnp.cos(math.pi * as_float(numerator) / denominator)
    return 2 * jnp.sin(math.pi / 2 * as_float(denominator - numerator) / denominator) ** 2


def raised(base: Rate, exponent: Count) -> jax.Array:
    """`base ** exponent`. In float32, where a rounded base costs digits with each step, from the logarithm of the number."""
    if jnp.result_type(float) == jnp.float32 and isinstance(base, (int, float)) and base > 0:
        return jnp.exp(as_float(exponent) * math.log(base))
    return as_float(base) ** as_float(exponent)


def integer(name: str, value: Any) -> int:
    """`value` as an int.

    Raises:
      TypeError: it is no integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; got {value!r}") from None


def nonzero(name: str, value: Any) -> int:
    """The magnitude of an integer; its sign does not matter to PyTorch.

    Raises:
      TypeError: it is no integer.
      ValueError: it is 0.
    """
    number = integer(name, value)
    if number == 0:
        raise ValueError(f"{name} must not be 0: PyTorch's scheduler divides by it; got {value!r}")
    return abs(number)


def check_function(name: str, value: Any) -> None:
    """Check that `value` can be called.

    Raises:
      TypeError: it cannot.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function of the count; got {type(value).__name__}")
