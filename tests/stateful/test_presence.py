import jax
import jax.numpy as jnp
import pytest
from jax import lax

from funcgrad.stateful.presence import reached_inputs

ONES = jnp.ones(3)


@jax.custom_jvp
def first_by_jvp(x, y):
    return 2 * x


first_by_jvp.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))


@jax.custom_jvp
def two_by_jvp(x, y):
    return x * y, x + y


two_by_jvp.defjvp(lambda primals, tangents: (two_by_jvp(*primals), tangents))


@jax.custom_jvp
def spike(x):
    return (x > 0) * 1.0


spike.defjvp(lambda primals, tangents: (spike(*primals), tangents[0]))


@jax.custom_vjp
def product_by_vjp(x, y):
    return x * y


product_by_vjp.defvjp(lambda x, y: (x * y, (x, y)), lambda saved, cotangent: (cotangent * saved[1], cotangent * saved[0]))


@jax.custom_vjp
def ones_for_gradients(x, y):
    return x * y


ones_for_gradients.defvjp(lambda x, y: (x * y, None), lambda saved, cotangent: (ONES, ONES))


def by_while_loop(x, y, z):
    """z decides how often, and is carried along."""
    body = lambda carry: (carry[0] + 1, carry[1] + y, carry[2])
    return jnp.sum(lax.while_loop(lambda carry: carry[0] < z[0], body, (0, x, z))[1])


def by_reference(x, y, z):
    reference = jax.new_ref(x)
    reference[...] += y
    return jnp.sum(reference[...])


def by_scan(x, y, z):
    """x and y are used, y times zero; z is carried along to no avail."""

    def body(carry, _):
        used, idle = carry
        return (used * x + 0 * y, idle), None

    return jnp.sum(lax.scan(body, (ONES, z), None, length=3)[0][0])


# Each is a function of x, y, z in which the gradient reaches x and y (y perhaps times zero) and not z.
FUNCTIONS = {
    "plain": lambda x, y, z: jnp.sum(x + 0 * y),
    "jit": jax.jit(lambda x, y, z: jnp.sum(x + 0 * y)),
    "an argument of an inner jit that is not used": lambda x, y, z: jnp.sum(jax.jit(lambda x, y, z: x * y)(x, y, z)),
    "stop_gradient": lambda x, y, z: jnp.sum(x * lax.stop_gradient(z) + y),
    "integers": lambda x, y, z: jnp.sum(x + y) + jnp.sum(z > 0),
    "scan": by_scan,
    "cond": lambda x, y, z: lax.cond(z[0] > 0, lambda: jnp.sum(x), lambda: jnp.sum(y)),
    "custom_jvp": lambda x, y, z: jnp.sum(first_by_jvp(x, z) + y),
    "custom_vjp": lambda x, y, z: jnp.sum(product_by_vjp(x, y)),
    "remat": jax.checkpoint(lambda x, y, z: jnp.sum(jnp.sin(x) * y)),
    "rows that are not looked up": lambda x, y, z: x[0] + jnp.sum(y[jnp.array([1])]),
    "vmap": lambda x, y, z: jnp.sum(jax.vmap(lambda x, y, z: x * y)(x, y, z)),
    "derivatives that are zero": lambda x, y, z: jnp.sum(jnp.round(x) * jnp.sign(y) + x**0),
    "custom_jvp of a step": lambda x, y, z: jnp.sum(spike(x) + spike(2 * y)),
    "custom_jvp with two results": lambda x, y, z: jnp.sum(two_by_jvp(x, z)[0] + two_by_jvp(y, y)[1]),
    "custom_vjp that ignores the cotangent": lambda x, y, z: jnp.sum(ones_for_gradients(x, y)),
    "while_loop": by_while_loop,
    "optimization_barrier": lambda x, y, z: jnp.sum(x * lax.optimization_barrier((y, z))[0]),
    "linear solve": lambda x, y, z: jnp.sum(jnp.linalg.solve(jnp.diag(x), y)),
    "a shape": lambda x, y, z: jnp.sum(x * y) * z.shape[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["", "in jit", "in remat"])
def test_presence(name, wrap):
    closed = jax.make_jaxpr(wrap(FUNCTIONS[name]))(ONES, ONES, ONES)
    assert reached_inputs(closed) == [True, True, False]


def test_references():
    assert reached_inputs(jax.make_jaxpr(by_reference)(ONES, ONES, ONES)) == [True, True, False]

    def read_before_write(x):
        reference = jax.new_ref(jnp.zeros(3))

        def body(carry, _):
            value = reference[...]
            reference[...] = value + x
            return carry, value

        return jnp.sum(lax.scan(body, None, None, length=20)[1])

    assert reached_inputs(jax.make_jaxpr(read_before_write)(ONES)) == [True]


def test_loops_of_known_length():
    def shift(x, y, z, length):
        body = lambda carry, _: ((carry[0] * y, carry[2], z), carry[1])
        (product, late, _), _ = lax.scan(body, (x, ONES, ONES), None, length=length)
        return jnp.sum(product + late)

    for length, reached in ((0, [True, False, False]), (1, [True, True, False]), (2, [True] * 3), (100, [True] * 3)):
        assert (
            reached_inputs(jax.make_jaxpr(lambda x, y, z, length=length: shift(x, y, z, length))(ONES, ONES, ONES)) == reached
        )
    swap = lambda x, y: lax.fori_loop(0, 2, lambda _, pair: pair[::-1], (x, y))[0].sum()
    assert reached_inputs(jax.make_jaxpr(swap)(ONES, ONES)) == [True, False]


def test_many_parameters():
    def loss_fn(weights):
        hidden = ONES
        for weight in weights[:-1]:
            hidden = jnp.tanh(hidden * weight)
        return jnp.sum(hidden)

    assert reached_inputs(jax.make_jaxpr(loss_fn)([ONES] * 400)) == [True] * 399 + [False]


def test_nothing_to_reach():
    assert reached_inputs(jax.make_jaxpr(lambda: jnp.ones(()))()) == []
    assert reached_inputs(jax.make_jaxpr(lambda x: jnp.ones(()))(ONES)) == [False]
