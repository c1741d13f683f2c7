"""The optimizer by itself."""

import jax.numpy as jnp
import optax

from funcgrad import stateful


def test_a_step_works_in_place():
    weight = stateful.Parameter(jnp.ones(1000))
    optimizer, pointers = stateful.Optimizer(optax.adam(0.1), weight), []
    for _ in range(4):
        stateful.evaluate(jnp.sum, weight).backward()
        optimizer.step()
        pointers.append(weight._data.unsafe_buffer_pointer())
    assert len(set(pointers)) == 1
