"""Arithmetic as PyTorch does it: the rounding of 16-bit numbers, interpolation, powers close to one."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Rounded = Callable[[Any], Any]


def exact(value: Any) -> Any:
    """`value` itself: in float32 and float64 every operation rounds by itself."""
    return value


def rounding_to(dtype: Any) -> Rounded:
    """What rounds the result of an operation that was done in float32 to a 16-bit `dtype`; for wider ones it does nothing.

    PyTorch computes each operation on bfloat16 numbers in float32 and rounds its result. XLA leaves such roundings out where it
    fuses operations, but for `reduce_precision`. They matter: 0.999 times a second moment is that moment again in bfloat16.
    """
    info = jnp.finfo(dtype)
    if info.bits >= 32:
        return exact
    has_float32s_range = info.nexp == jnp.finfo(jnp.float32).nexp
    smallest, smallest_normal = float(info.smallest_subnormal), float(info.tiny)

    def rounded(value: Any) -> jax.Array:
        value = jnp.asarray(value, jnp.float32)
        normal = jax.lax.reduce_precision(value, info.nexp, info.nmant)
        if has_float32s_range:
            return normal
        # It makes zeros of float16's subnormal numbers, where many a second moment lies.
        return jnp.where(jnp.abs(value) < smallest_normal, jnp.round(value / smallest) * smallest, normal)

    return rounded


def lerp(start: Any, end: Any, weight: Any) -> Any:
    """`start` moved by `weight` of the way to `end`, from the nearer side, so that a weight of 1 gives `end` exactly."""
    near_start, near_end = start + weight * (end - start), end - (end - start) * (1 - weight)
    if is_array(weight):
        return jnp.where(weight < 0.5, near_start, near_end)
    return near_start if weight < 0.5 else near_end


def one_minus_power(base: Any, exponent: jax.Array) -> jax.Array:
    """`1 - base**exponent`, without the cancellation that costs float32 four digits where `base` is 0.999.

    PyTorch computes it in double precision.
    """
    return -jnp.expm1(exponent * log(base))


def log(number: Any) -> Any:
    """The logarithm, in double precision where the number is known; minus infinity for 0."""
    if is_array(number):
        return jnp.log(number)
    return math.log(number) if number > 0 else -math.inf


def is_array(number: Any) -> bool:
    """Whether a hyperparameter may have any value when the step runs, as with `optax.inject_hyperparams`."""
    return isinstance(number, jax.Array)


def is_zero(number: Any) -> bool:
    """Whether a hyperparameter is known to be 0, so that its term can be left out."""
    return not is_array(number) and number == 0
