"""Evaluating a function at Parameters."""

import dataclasses
import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from funcgrad import stateful


def test_the_function_is_called_once_for_given_shapes():
    calls = []

    def loss_fn(params, x):
        calls.append(x.shape)
        return jnp.sum(params["w"] * x) ** 2, {"x": x}

    params = stateful.parameters({"w": jnp.ones(3)})
    for step in range(5):
        for x in (jnp.ones(3), jnp.arange(3.0)):
            loss = stateful.evaluate(loss_fn, params, x)
            if step % 2:
                loss.item()
            loss.backward()
            _ = params["w"].grad if step % 3 else None  # lent or not, one program
        stateful.zero_grad(params, set_to_none=bool(step % 2))
    assert len(calls) == 1
    stateful.evaluate(loss_fn, params, jnp.ones(()))
    assert len(calls) == 2


def test_a_step_between_evaluate_and_backward_changes_nothing():
    weight = stateful.Parameter(jnp.array(3.0))
    loss = stateful.evaluate(jnp.square, weight)
    weight.data = jnp.array(100.0)
    loss.backward()
    assert (loss.item(), weight.grad) == (9.0, 6.0)


def test_a_numpy_array_may_be_written_into():
    x, weight = np.ones(2, np.float32), stateful.Parameter(jnp.ones(2))
    loss = stateful.evaluate(lambda weight, x: jnp.sum(weight * x), weight, x)
    weight.grad = gradient = np.ones(100000, np.float32)[:2]
    x[:], gradient[:] = 100, 100
    assert (loss.item(), weight.grad.tolist()) == (2.0, [1, 1])


def test_types_decide_what_is_traced_and_not_the_first_call(x64):
    weight = stateful.Parameter(jnp.ones(2, jnp.bfloat16))
    loss_fn = lambda weight, scale: (jnp.sum(weight * scale), weight * scale)
    dtypes = [stateful.evaluate(loss_fn, weight, scale).aux.dtype for scale in (1.5, jnp.float32(1.5), jnp.float64(1.5))]
    assert dtypes == ["bfloat16", "float32", "float64"]


def test_flags_are_constants_and_numbers_are_not():
    calls = []

    def loss_fn(weight, scale, flip):
        calls.append(flip)
        return -weight * scale if flip else weight * scale

    weight = stateful.Parameter(jnp.array(1.0))
    values = [stateful.evaluate(loss_fn, weight, scale, flip).item() for scale in (1, 2, 3) for flip in (True, False)]
    assert values == [-1, 1, -2, 2, -3, 3]
    assert calls == [True, False]


def test_a_loss_that_is_no_scalar():
    weight = stateful.Parameter(jnp.ones(2))
    with pytest.raises(TypeError, match=r"the loss must be a real scalar, float32\[\] for example; got float32\[2\]"):
        stateful.evaluate(lambda weight: weight, weight)
    assert weight.grad is None


def test_options_of_jax_and_types_of_constants_decide_what_is_traced():
    weight = stateful.Parameter(jnp.ones((), jnp.float32))
    loss_fn = lambda weight: weight * jnp.zeros(()).astype(float).dtype.itemsize
    values = [stateful.evaluate(loss_fn, weight).item()]
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        values.append(stateful.evaluate(loss_fn, weight).item())
    assert values == [4.0, 8.0]
    kind = lambda weight, flag: weight * (1 if type(flag) is bool else 2)
    frozen = type("Flag", (), {"__eq__": lambda self, other: True, "__hash__": lambda self: hash(True)})()
    assert [stateful.evaluate(kind, weight, flag).item() for flag in (True, frozen)] == [1.0, 2.0]


def test_a_loss_that_is_no_pair():
    weight = stateful.Parameter(jnp.ones(2))
    with pytest.raises(TypeError, match="must return a loss, or a pair of loss and aux; got a tuple of 3"):
        stateful.evaluate(lambda weight: (jnp.sum(weight), 1, 2), weight)


def test_arguments_and_functions_that_cannot_be_kept():
    weight = stateful.Parameter(jnp.ones(()))
    with pytest.raises(TypeError, match="is a constant of its program and must be hashable: unhashable type: 'set'"):
        stateful.evaluate(lambda weight, names: weight, weight, {"a", "b"})
    with pytest.raises(TypeError, match=r"loss_fn must be a function; got float32\[\]"):
        stateful.evaluate(jnp.ones(()), weight)

    class Slotted:
        __slots__ = ()

        def __call__(self, weight):
            return weight

    with pytest.raises(TypeError, match=r"can be referred to weakly; got .*Slotted.* Wrap it in a function"):
        stateful.evaluate(Slotted(), weight)


def test_a_loss_that_cannot_be_differentiated_has_a_value():
    weight = stateful.Parameter(jnp.array(3.0))
    loss = stateful.evaluate(lambda weight: jax.lax.while_loop(lambda x: x < 10, lambda x: 2 * x, weight), weight)
    assert loss.item() == 12.0
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        loss.backward()
    assert weight.grad is None


def test_methods_are_traced_once():
    calls = []

    @dataclasses.dataclass  # comparable, so not hashable
    class Model:
        scale: float

        def loss(self, weight):
            calls.append(self.scale)
            return self.scale * weight

        def __call__(self, weight):
            return self.loss(weight)

    weight, model = stateful.Parameter(jnp.ones(())), Model(2.0)
    for loss_fn in (model.loss, model.loss, model, model, Model(3.0).loss):
        stateful.evaluate(loss_fn, weight).backward()
    assert (calls, weight.grad) == ([2.0, 2.0, 3.0], 11.0)


def test_programs_live_as_long_as_their_function():
    weight, closed_over = stateful.Parameter(jnp.ones(3)), jnp.arange(3.0)
    alive = weakref.ref(closed_over)

    def make(closed_over):
        return lambda weight: jnp.sum(weight * closed_over)

    loss_fn = make(closed_over)
    del closed_over
    stateful.evaluate(loss_fn, weight).backward()
    gc.collect()
    assert alive() is not None
    del loss_fn
    gc.collect()
    assert alive() is None


def test_a_function_that_is_defined_anew_at_each_call():
    weight = stateful.Parameter(jnp.ones(()))

    def defined_in_a_loop():
        for _ in range(8):
            stateful.evaluate(lambda weight: 2 * weight, weight).backward()

    with pytest.warns(
        UserWarning, match=r"<lambda> \(.*test_evaluate.py, line \d+\) was defined and traced anew 5 times"
    ) as caught:
        defined_in_a_loop()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functions = [lambda weight: 2 * weight for _ in range(8)]  # many that live are no fault
        for each in [*functions, functions[0]]:
            stateful.evaluate(each, weight)


def test_parameters_from_a_generator():
    pair = [stateful.Parameter(jnp.array(2.0)), stateful.Parameter(jnp.array(3.0))]
    stateful.evaluate(lambda pair: pair[0] * pair[1], (each for each in pair)).backward()
    assert [each.grad for each in pair] == [3.0, 2.0]


def test_a_parameter_that_is_no_argument():
    weight, other = stateful.Parameter(jnp.ones(())), stateful.Parameter(jnp.ones(()))
    for read in (lambda: other.data, other.detach, lambda: np.asarray(other)):
        with pytest.raises(
            RuntimeError, match=r"reads a Parameter that is no argument of it, .* Pass the Parameter to evaluate"
        ):
            stateful.evaluate(lambda weight, read: weight * read(), weight, read)
    assert other.data == 1.0


def test_tensors_of_another_library():
    weight, double = stateful.Parameter(jnp.ones(())), lambda weight, x: weight * x
    with pytest.raises(TypeError, match=r"an argument of <lambda> is a torch.Tensor, which is no array to JAX. .*numpy\(\)"):
        stateful.evaluate(double, weight, torch.ones(()))
