import jax
import jax.numpy as jnp
import pytest
from jax import lax

from funcgrad.stateful.presence import gradient_reaches

ONES = jnp.ones(3)


@jax.custom_jvp
def first_by_jvp(x, y):
    return 2 * x


first_by_jvp.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))


@jax.custom_vjp
def product_by_vjp(x, y):
    return x * y


product_by_vjp.defvjp(lambda x, y: (x * y, (x, y)), lambda saved, cotangent: (cotangent * saved[1], cotangent * saved[0]))


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
    "a shape": lambda x, y, z: jnp.sum(x * y) * z.shape[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["", "in jit", "in remat"])
def test_presence(name, wrap):
    fun = wrap(FUNCTIONS[name])
    assert gradient_reaches(lambda inputs: fun(*inputs), [ONES, ONES, ONES]) == [True, True, False]


def test_values_do_not_matter():
    fun = lambda inputs: jnp.sum(inputs[0] * inputs[1])
    assert gradient_reaches(fun, [0 * ONES, jnp.nan * ONES]) == [True, True]
    assert gradient_reaches(fun, [jax.ShapeDtypeStruct((3,), jnp.float32)] * 2) == [True, True]


def test_nothing_to_reach():
    assert gradient_reaches(lambda inputs: jnp.ones(()), []) == []
    assert gradient_reaches(lambda inputs: jnp.ones(()), [ONES]) == [False]
