import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import funcgrad as fg
from funcgrad.jit import JittedStep


def advance(state, x):
    """Moves `value` by the activation function among the parameters."""
    params = state.params
    value = params["activation"](params["value"] + x)
    return dataclasses.replace(state, params={**params, "value": value}, step=state.step + 1), params["value"]


def state_with(activation=jnp.sin, name="state"):
    params = {"value": jnp.zeros(()), "activation": activation, "name": name, "none": None}
    return fg.TrainState.create(params, optax.identity())


class TestJittedStep:
    def test_leaves_that_are_no_arrays_pass_through(self):
        state, before = JittedStep(advance, donate=True)(state_with(), 1.0)
        assert abs(state.params["value"] - jnp.sin(1.0)) <= 1e-6
        assert (before, state.step, state.params["activation"], state.params["name"]) == (0, 1, jnp.sin, "state")
        assert state.params["none"] is None

    def test_a_new_program_for_another_constant_and_only_then(self):
        traced = []

        def function(state, x):
            traced.append(state.params["name"])
            return advance(state, x)

        step = JittedStep(function, donate=False)
        for activation, name in ((jnp.sin, "a"), (jnp.sin, "a"), (jnp.cos, "a"), (jnp.sin, 1), (jnp.sin, True), (jnp.sin, 1)):
            state, _ = step(state_with(activation, name), 1.0)
            assert abs(state.params["value"] - activation(1.0)) <= 1e-6
            assert state.params["name"] is name
        assert traced == ["a", "a", 1, True]

    @pytest.mark.parametrize("donate", [True, False])
    def test_donation(self, donate):
        state = state_with()
        JittedStep(advance, donate=donate)(state, 1.0)
        assert state.params["value"].is_deleted() == donate

    def test_lower(self):
        shapes = jax.eval_shape(lambda: fg.TrainState.create({"value": jnp.zeros(())}, optax.identity()))
        state = dataclasses.replace(shapes, params={**shapes.params, "activation": jnp.sin})
        lowered = JittedStep(advance, donate=True).lower(state, jax.ShapeDtypeStruct((), jnp.float32))
        assert "advance" in lowered.as_text()
        assert lowered.compile().memory_analysis().alias_size_in_bytes > 0

    def test_inside_jit(self):
        step = JittedStep(advance, donate=True)
        state = state_with()

        def run(value):
            params = {**state.params, "value": value}
            return step(dataclasses.replace(state, params=params), 1.0)[0].params["value"]

        assert abs(jax.jit(run)(0.0) - jnp.sin(1.0)) <= 1e-6
