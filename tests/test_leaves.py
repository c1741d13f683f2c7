"""Parameters whose leaves are not all floats: integers, booleans, keys, None, float0, text, functions, complex numbers.

Each way in gives the gradients of the floating and complex leaves, those of the whole batch, and None for the rest; steps hand
the rest on as it was.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import FLOAT32_TOLERANCE, relative_difference

import funcgrad as fg

ROWS, SIZE = 10, 4  # 4, 4 and 2
X = jnp.sin(jnp.arange(3.0 * ROWS)).reshape(ROWS, 3)
TRAINED = ("w", "half", "complex", "scale")
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)  # Adam would hide a wrong scale of the gradients


def make_params():
    """New arrays at each call: steps overwrite theirs."""
    return {
        "w": jnp.array([0.5, -1.0, 2.0]),
        "half": jnp.array([1.0, 0.5, -0.5], jnp.bfloat16),
        "complex": jnp.array([1 + 2j, -1j, 0.5]),
        "scale": jnp.array(1.5),
        "integer": jnp.arange(3),
        "small": np.int8(2),
        "flag": jnp.array([True, False, True]),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(1), 2),
        "none": None,
        "float0": np.zeros((2,), jax.dtypes.float0),
        "number": 3,
        "name": "encoder",
        "function": jnp.tanh,
        "empty": (),
    }


def loss_fn(params, x):
    """The integer, the boolean and the function matter; real and imaginary parts have different gradients."""
    z = x @ jnp.where(params["flag"], params["complex"], 1j * params["complex"])
    hidden = params["function"](x @ (params["w"] * params["integer"] + params["half"].astype(x.dtype)))
    return jnp.mean((hidden * params["scale"] + z.real + 2 * z.imag) ** 2) * params["number"]


def carrying(params, x, carry):
    """What is carried holds every kind of leaf, too; the phase is complex and enters the loss."""
    new = {**carry, "count": carry["count"] + len(x), "flag": ~carry["flag"], "phase": carry["phase"] * 1j}
    new["key"] = jax.random.fold_in(carry["key"], 1)
    return loss_fn(params, x) + jnp.mean(params["scale"] * x) * carry["phase"].imag, (new, {"seen": len(x)})


def make_carry():
    return {
        "count": jnp.array(0),
        "flag": jnp.array(False),
        "phase": jnp.array(1 + 0j),
        "key": jax.random.key(2),
        "none": None,
        "float0": np.zeros((2,), jax.dtypes.float0),
    }


@functools.cache
def whole(carried=False):
    """The gradients of the trained leaves, by JAX alone."""
    params = make_params()

    def of_trained(trained):
        if not carried:
            return loss_fn({**params, **trained}, X)
        total, carry = 0.0, make_carry()
        for begin in range(0, ROWS, SIZE):
            rows = X[begin : begin + SIZE]
            loss, (carry, _) = carrying({**params, **trained}, rows, carry)
            total += loss * len(rows)
        return total / ROWS

    return jax.jit(jax.grad(of_trained))({name: params[name] for name in TRAINED})


def check_gradients(grads, carried=False):
    """The half's gradient is a bfloat16 number in both, so it is right to 3 digits."""
    params = make_params()
    rest = {name: leaf for name, leaf in grads.items() if name not in TRAINED}
    assert rest == {name: () if name == "empty" else None for name in params if name not in TRAINED}
    for name in TRAINED:
        assert grads[name].dtype == params[name].dtype
        assert relative_difference(grads[name], whole(carried)[name]) <= (1e-2 if name == "half" else FLOAT32_TOLERANCE)


def check_carry(carry):
    assert (carry["count"], carry["flag"], carry["none"]) == (ROWS, True, None)
    assert jnp.abs(carry["phase"] - (-1j)) <= 1e-6
    key = make_carry()["key"]
    for _ in range(3):
        key = jax.random.fold_in(key, 1)
    assert jnp.array_equal(jax.random.key_data(carry["key"]), jax.random.key_data(key))
    assert carry["float0"].dtype == jax.dtypes.float0


def check_rest(params):
    """What is not trained stands in the new parameters as it was."""
    before = make_params()
    assert jax.tree.structure(params) == jax.tree.structure(before)
    for name in set(before) - set(TRAINED):
        if name in ("key", "keys"):
            assert jnp.array_equal(jax.random.key_data(params[name]), jax.random.key_data(before[name]))
        elif name in ("none", "number", "name", "function", "empty"):
            assert params[name] is before[name] or params[name] == before[name]
        else:
            assert params[name].dtype == before[name].dtype
            assert name == "float0" or np.array_equal(params[name], before[name])
    for name in TRAINED:
        assert not np.array_equal(params[name], before[name])


def in_jit(fun):
    """`fun` of the parameters, inside `jax.jit`, which takes neither text nor functions."""
    params = make_params()
    static = {name: params[name] for name in ("name", "function", "number")}

    @jax.jit
    def jitted(arrays, *args):
        return fun({**arrays, **static}, *args)

    return lambda params, *args: jitted({name: leaf for name, leaf in params.items() if name not in static}, *args)


@pytest.mark.parametrize(("loop", "wrap"), [("auto", lambda fun: fun), ("scan", in_jit)], ids=["eager", "scan"])
def test_value_and_grad(wrap, loop):
    fun = wrap(fg.value_and_grad(loss_fn, microbatch_size=SIZE, loop=loop))
    loss, grads = fun(make_params(), X)
    assert abs(loss - loss_fn(make_params(), X)) <= FLOAT32_TOLERANCE * loss
    check_gradients(grads)


def test_the_whole_batch_and_grad():
    check_gradients(fg.grad(loss_fn)(make_params(), X))
    check_gradients(fg.grad(loss_fn, microbatch_size=SIZE, order="contiguous", compensated=True)(make_params(), X))


@pytest.mark.parametrize(
    ("loop", "wrap", "skip_nonfinite"),
    [("auto", lambda fun: fun, True), ("ordered", in_jit, False)],
    ids=["eager", "ordered"],
)
def test_a_carry(wrap, loop, skip_nonfinite):
    options = {"has_aux": True, "carry_argnum": 2, "aux": "sum", "skip_nonfinite": skip_nonfinite}
    fun = wrap(fg.value_and_grad(carrying, microbatch_size=SIZE, order="contiguous", loop=loop, **options))
    (_, (carry, aux)), grads = fun(make_params(), X, make_carry())
    check_gradients(grads, carried=True)
    check_carry(carry)
    assert aux["seen"] == ROWS


def test_a_coupled_loss():
    """The representations of a row are two numbers, of which the loss takes the mean square."""

    def encode(params, x):
        z = x @ jnp.where(params["flag"], params["complex"], 1j * params["complex"])
        hidden = params["function"](x @ (params["w"] * params["integer"] + params["half"].astype(x.dtype)))
        return hidden, z.real + 2 * z.imag

    def couple(params, representations):
        hidden, phase = representations
        return jnp.mean((hidden * params["scale"] + phase) ** 2) * params["number"]

    check_gradients(fg.coupled_value_and_grad(encode, couple, microbatch_size=SIZE)(make_params(), X)[1])


def test_backward():
    params = make_params()
    buffer, carry = fg.zeros(params), make_carry()
    backward = fg.backward(carrying, has_aux=True, carry_argnum=2)
    for begin in range(0, ROWS, SIZE):
        buffer, (_, (carry, _)) = backward(buffer, params, X[begin : begin + SIZE], carry)
    half = fg.mean(buffer)["half"]
    assert half.dtype == jnp.float32
    check_gradients({**fg.mean(buffer), "half": half.astype(jnp.bfloat16)}, carried=True)
    check_carry(carry)


def expected_step(carried=False):
    """The trained leaves after one update, by optax alone."""
    trained = {name: make_params()[name] for name in TRAINED}
    updates, _ = OPTIMIZER.update(whole(carried), OPTIMIZER.init(trained), trained)
    return optax.apply_updates(trained, updates)


def check_step(params, carried=False):
    check_rest(params)
    got = {name: params[name] for name in TRAINED}
    assert relative_difference(got, expected_step(carried)) <= FLOAT32_TOLERANCE


class TestTrainStep:
    def test_plain(self):
        step = fg.train_step(loss_fn, OPTIMIZER, microbatch_size=SIZE, loop="scan")
        state, _ = step(fg.TrainState.create(make_params(), OPTIMIZER), X)
        check_step(state.params)
        state, _ = step(state, X)
        assert state.step == 2

    def test_driven_by_the_host(self):
        options = {"has_aux": True, "carry_argnum": 2, "aux": "sum", "skip_nonfinite": True}
        step = fg.train_step(carrying, OPTIMIZER, microbatch_size=SIZE, order="contiguous", loop="host", **options)
        state, metrics = step(fg.TrainState.create(make_params(), OPTIMIZER), X, make_carry())
        check_step(state.params, carried=True)
        check_carry(metrics["carry"])


def test_micro_steps():
    steps = fg.micro_steps(carrying, OPTIMIZER, has_aux=True, carry_argnum=2)
    state, carry = fg.TrainState.create(make_params(), OPTIMIZER), make_carry()
    for begin in range(0, ROWS, SIZE):
        state, (_, (carry, _)) = steps.backward(state, X[begin : begin + SIZE], carry)
    state, _ = steps.update(state)
    check_step(state.params, carried=True)
    check_carry(carry)


def test_verbs():
    """What JAX gives for an integer, float0, is no gradient, and adds nothing."""
    params = {"w": jnp.ones(()), "integer": jnp.arange(3), "complex": jnp.array(1j)}
    loss = lambda p: p["w"] * p["integer"].sum() + (p["complex"] ** 2).real
    grads = jax.grad(loss, allow_int=True)(params)
    assert grads["integer"].dtype == jax.dtypes.float0
    for compensated in (False, True):
        buffer = fg.accumulate(fg.zeros(params, compensated=compensated), grads)
        merged = fg.merge(buffer, buffer)
        assert fg.total(merged) == {"w": 6.0, "integer": None, "complex": 2 * grads["complex"]}
        assert fg.mean(merged) == {"w": 3.0, "integer": None, "complex": grads["complex"]}
        assert fg.total(fg.zero_grad(merged)) == {"w": 0.0, "integer": None, "complex": 0j}
