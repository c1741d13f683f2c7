import jax
import jax.numpy as jnp
import pytest

from funcgrad.jit import JittedStep


def count_calls(state, x):
    return {**state, "value": state["activation"](state["value"] + x)}, state["value"]


def state_with(activation=jnp.sin, name="state"):
    return {"value": jnp.zeros(()), "activation": activation, "name": name, "none": None}


class TestJittedStep:
    def test_leaves_that_are_no_arrays_pass_through(self):
        step = JittedStep(count_calls, donate=True)
        state, before = step(state_with(), 1.0)
        assert abs(state["value"] - jnp.sin(1.0)) <= 1e-6
        assert (before, state["activation"], state["name"], state["none"]) == (0, jnp.sin, "state", None)

    def test_a_new_program_for_another_function_and_only_then(self):
        traced = []

        def function(state, x):
            traced.append(state["name"])
            return count_calls(state, x)

        step = JittedStep(function, donate=False)
        for activation, name in ((jnp.sin, "a"), (jnp.sin, "a"), (jnp.cos, "a"), (jnp.sin, "b"), (jnp.cos, "a")):
            state, _ = step(state_with(activation, name), 1.0)
            assert abs(state["value"] - activation(1.0)) <= 1e-6
        assert traced == ["a", "a", "b"]

    @pytest.mark.parametrize("donate", [True, False])
    def test_donation(self, donate):
        state = state_with()
        JittedStep(count_calls, donate=donate)(state, 1.0)
        assert state["value"].is_deleted() == donate

    def test_lower(self):
        step = JittedStep(count_calls, donate=True)
        state = {**state_with(), "value": jax.ShapeDtypeStruct((), jnp.float32)}
        lowered = step.lower(state, jax.ShapeDtypeStruct((), jnp.float32))
        assert "count_calls" in lowered.as_text()
        assert lowered.compile().memory_analysis().alias_size_in_bytes == 4

    def test_inside_jit(self):
        step = JittedStep(count_calls, donate=True)
        value = jax.jit(lambda value: step({**state_with(), "value": value}, 1.0)[0]["value"])(0.0)
        assert abs(value - jnp.sin(1.0)) <= 1e-6
