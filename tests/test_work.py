import jax
import jax.numpy as jnp
import pytest
from jax import lax

from funcgrad.work import arithmetic

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


def test_it_agrees_with_xla_for_what_is_mostly_products():
    loss_fn = lambda w, x: jnp.sum((jnp.tanh(x @ w) @ w.T) ** 2)
    w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
    grad = jax.grad(loss_fn)
    theirs = jax.jit(grad).lower(w, x).compile().cost_analysis()["flops"]
    assert abs(arithmetic(jax.make_jaxpr(grad)(w, x).jaxpr) / theirs - 1) <= 0.1
