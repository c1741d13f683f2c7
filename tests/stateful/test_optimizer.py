"""The optimizer by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from funcgrad import stateful


def test_a_step_works_in_place():
    weight = stateful.Parameter(jnp.ones(1000))
    optimizer, pointers = stateful.Optimizer(optax.adam(0.1), weight), []
    for _ in range(4):
        stateful.evaluate(jnp.sum, weight).backward()
        optimizer.step()
        pointers.append(weight._data.unsafe_buffer_pointer())
    assert len(set(pointers)) == 1


def test_numbers_that_can_be_set():
    params = [stateful.Parameter(jnp.array(1.0)) for _ in range(2)]
    make = optax.inject_hyperparams(optax.sgd)
    optimizer = stateful.Optimizer([(params[0], make(learning_rate=0.1)), (params[1], make(learning_rate=0.2))])
    for parameter in params:
        parameter.grad = jnp.array(1.0)
    optimizer.step()
    optimizer.set_hyperparams(learning_rate=0.5)
    optimizer.step()
    np.testing.assert_allclose([parameter.data for parameter in params], [0.4, 0.3], rtol=1e-6)
    with pytest.raises(KeyError, match=r"the optimizer's state holds no momentum. Make it settable"):
        optimizer.set_hyperparams(learning_rate=0.1, momentum=0.9)
    with pytest.raises(KeyError, match="state holds no learning_rate"):
        stateful.Optimizer(optax.sgd(0.1), params).set_hyperparams(learning_rate=0.1)


def test_habits_from_pytorch():
    weight = stateful.Parameter(jnp.array(1.0))
    optimizer = stateful.Optimizer(optax.sgd(0.1), weight)
    with pytest.raises(AttributeError, match=r"has no param_groups: .* set_hyperparams"):
        _ = optimizer.param_groups
    with pytest.raises(AttributeError, match="lr"):
        optimizer.lr = 0.1
    for transformation, params in (([weight], optax.sgd(0.1)), (optax.sgd, weight), ("sgd", weight), (weight, optax.sgd(0.1))):
        with pytest.raises(TypeError, match=r"expected an optax transformation and params, .* or groups, .* got "):
            stateful.Optimizer(transformation, params)
    with pytest.raises(TypeError, match="must not be given beside them"):
        stateful.Optimizer([(weight, optax.sgd(0.1))], weight)
    with pytest.raises(TypeError, match=r"options of a group in PyTorch's way, .* are not read"):
        stateful.Optimizer([({"params": [weight], "lr": 1.0}, optax.sgd(0.1))])
    named = stateful.Optimizer([({"params": weight}, optax.sgd(0.1))])  # a parameter may have that name
    assert named.parameters == [weight]


def test_a_step_that_fails_leaves_everything():
    weight = stateful.Parameter(jnp.array(1.0))

    def host(x):
        if x < 0:
            raise ArithmeticError("the callback got a negative number")
        return np.asarray(x)

    check = lambda grad: jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), grad)
    checked = optax.stateless(lambda grads, _: jax.tree.map(check, grads))
    for transformation, bad, flag, error in (
        (optax.chain(checked, optax.adam(0.1)), -1.0, False, Exception),
        (optax.adam(0.1), jnp.nan, True, FloatingPointError),
    ):
        optimizer = stateful.Optimizer(transformation, weight)
        weight.grad = jnp.array(1.0)
        optimizer.step()
        before = float(weight.data)
        weight.grad = jnp.array(bad)
        with jax.debug_nans(flag), pytest.raises(error, match=r"(negative number|invalid value)"):
            optimizer.step()
        assert weight.data == before
        weight.grad = jnp.array(1.0)
        optimizer.step()
        assert weight.data < before


def test_a_loaded_state_has_the_dtypes_of_the_transformation():
    weight = stateful.Parameter(jnp.array(1.0))
    optimizer = stateful.Optimizer(optax.adam(0.1), weight)
    weight.grad = jnp.array(1.0)
    optimizer.step()
    state, dtypes = optimizer.state_dict(), lambda tree: jax.tree.map(lambda leaf: str(leaf.dtype), tree)
    optimizer.load_state_dict(jax.tree.map(lambda leaf: leaf.astype(jnp.float16), state))
    assert dtypes(optimizer.state_dict()) == dtypes(state)
