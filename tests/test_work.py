import jax
import jax.numpy as jnp
import pytest
from jax import lax

from funcgrad.work import arithmetic, live_bytes, output_bytes

X, W = jnp.ones((2, 3)), jnp.ones((3, 4))
IMAGES, KERNEL = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))


def convolve(images, kernel):
    return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize(
    ("function", "arguments", "count"),
    [
        (jnp.dot, (X, W), 2 * 2 * 3 * 4),
        (jax.jit(jnp.dot), (X, W), 2 * 2 * 3 * 4),
        (jnp.sin, (X,), 6),
        (convolve, (IMAGES, KERNEL), 2 * (2 * 8 * 8 * 5) * 3 * 3 * 3),
        (lambda x: lax.scan(lambda carry, _: (jnp.sin(carry), None), x, None, length=10)[0], (X,), 60),
        (lambda x: lax.cond(True, jnp.sin, jnp.cos, x), (X,), 12),
        (lambda x: x, (X,), 0),
    ],
)
def test_arithmetic(function, arguments, count):
    assert arithmetic(jax.make_jaxpr(function)(*arguments).jaxpr) == count


@pytest.mark.parametrize(
    ("function", "live"),
    [
        (lambda x: x, 0),
        (lambda x: jnp.sin(jnp.cos(x)), 2 * 24),
        (lambda x: jnp.sin(jnp.sin(jnp.sin(x))), 2 * 24),
        (lambda x: (jnp.sin(x), jnp.cos(x)), 2 * 24),
        (lambda x: (jnp.sin(x), jnp.cos(x).astype(jnp.float16)), 2 * 24 + 12),
        (jax.jit(lambda x: jnp.sin(jnp.cos(x))), 2 * 24),
        (lambda x: lax.scan(lambda carry, _: (jnp.sin(jnp.cos(carry)), carry), x, None, length=10)[1], 11 * 24),
    ],
)
def test_live_bytes(function, live):
    jaxpr = jax.make_jaxpr(function)(X).jaxpr
    assert live_bytes(jaxpr) == live
    assert output_bytes(jaxpr) == sum(leaf.nbytes for leaf in jax.tree.leaves(function(X)))


def test_it_agrees_with_xla_for_what_is_mostly_products():
    loss_fn = lambda w, x: jnp.sum((jnp.tanh(x @ w) @ w.T) ** 2)
    w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
    grad = jax.grad(loss_fn)
    theirs = jax.jit(grad).lower(w, x).compile().cost_analysis()["flops"]
    assert abs(arithmetic(jax.make_jaxpr(grad)(w, x).jaxpr) / theirs - 1) <= 0.1
