"""Which results of a computation are its arguments, handed through."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from funcgrad.dataflow import handed_through


def scanned(x, y, z):
    """One carry stays as it is, one changes; of three stacked results one is a slice of the input."""
    (x, y), (z, total, again) = lax.scan(lambda carry, z: ((carry[0], carry[1] + z), (z, carry[0] + z, carry[0])), (x, y), z)
    return x, y, z, total, again


def swapped(x, y, z):
    return lax.scan(lambda carry, _: ((carry[1], carry[0]), None), (x, y), z)[0]


def looped(x, y, z):
    limit = y * 2
    return lax.while_loop(lambda carry: carry[1] < limit, lambda carry: (carry[0], carry[1] + z[0], z), (x, y, z))


def branched(x, y, z):
    return lax.cond(x > 0, lambda y, z: (y, z, y), lambda y, z: (y, z, y + 1), y, z)


@jax.custom_jvp
def custom(x, y):
    return y, x * 2


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents))


@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (lambda x, y, z: (z, x, 1.0, x + y), [2, 0, None, None]),
        (lambda x, y, z: jax.jit(lambda y, x: (x * 2, y, x))(y, x), [None, 1, 0]),
        (jax.checkpoint(lambda x, y, z: jax.jit(lambda x: (x, jnp.sin(x)))(z)), [2, None]),
        (scanned, [0, None, 2, None, None]),
        (swapped, [None, None]),
        (looped, [0, None, None]),
        (branched, [1, 2, None]),
        (lambda x, y, z: custom(x, y), [1, None]),
        (lambda x, y, z: lax.reduce(z, y, lambda left, right: right, (0,)), [None]),  # it calls with other shapes
        (functools.partial(jax.vmap(lambda x, y, z: (z, x + y), in_axes=(None, None, 0), out_axes=(0, None))), [2, None]),
    ],
)
def test_handed_through(function, numbers):
    assert handed_through(jax.make_jaxpr(function)(1.0, 2.0, jnp.arange(3.0)).jaxpr) == numbers
