"""Checks of option values: what was expected, what came, and what is allowed."""

import operator
from collections.abc import Sequence
from typing import Any


def check_choice(name: str, value: Any, allowed: Sequence[str], also: str = "") -> None:
    """Check that `value` is one of `allowed`; `also` is text for what is allowed besides.

    Raises:
      ValueError: it is not; the allowed values are listed.
    """
    if not isinstance(value, str) or value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {choices}{also}; got {value!r}")


def positive_integer(name: str, value: Any) -> int:
    """`value` as an int of at least 1.

    Raises:
      TypeError: it is no integer (a float or a boolean is none).
      ValueError: it is below 1.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, at least 1; got {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, at least 1; got {value!r}")
    if number < 1:
        raise ValueError(f"{name} must be at least 1; got {value!r}")
    return number


def argument_numbers(name: str, value: Any) -> tuple[int, ...]:
    """`value`, an argument's number or a sequence of them, as a tuple.

    Raises:
      TypeError: it is neither.
    """
    numbers: Any = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    try:
        return tuple(operator.index(number) for number in numbers)
    except TypeError:
        raise TypeError(f"{name} must be an integer or a sequence of integers; got {value!r}") from None


def resolve_argument_numbers(name: str, numbers: tuple[int, ...], num_args: int) -> tuple[int, ...]:
    """Argument numbers counted from the front, for a call with `num_args` positional arguments.

    Raises:
      ValueError: one of them is not there.
    """
    for number in numbers:
        if not -num_args <= number < num_args:
            raise ValueError(
                f"{name} names argument {number}, but the function was called with {num_args} positional "
                f"argument{'s' * (num_args != 1)}. Pass that argument by position, or set {name}"
            )
    resolved = tuple(number % num_args for number in numbers)
    if len(set(resolved)) != len(resolved):
        raise ValueError(f"{name}={numbers} names an argument twice")
    return resolved
