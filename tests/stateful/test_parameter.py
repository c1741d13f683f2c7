"""Parameters by themselves."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from funcgrad import stateful


def test_a_tree_of_parameters():
    tied = jnp.ones(2)
    params = stateful.parameters({"a": tied, "b": [tied, np.ones(3, np.float32), None], "n": jnp.arange(3), "name": "net"})
    assert params["a"] is params["b"][0]
    assert (params["b"][1].data.shape, params["b"][2], params["name"]) == ((3,), None, "net")
    assert [params[name].requires_grad for name in ("a", "n")] == [True, False]
    assert stateful.parameters(params)["a"] is params["a"]
    assert repr(params["n"]) == "Parameter(int32[3], requires_grad=False)"


@pytest.mark.parametrize("name", ["grad", "data"])
def test_assignments_that_do_not_fit(name):
    weight = stateful.Parameter(jnp.ones(2))
    for value in (jnp.ones(3), jnp.ones(2, jnp.float16), np.ones((), np.float32)):
        with pytest.raises(RuntimeError, match=rf"{name} must be like the parameter, float32\[2\]; got "):
            setattr(weight, name, value)
    with pytest.raises(TypeError, match=rf"{name} must be an array like the parameter's float32\[2\]; got str"):
        setattr(weight, name, "zeros")
    setattr(weight, name, np.full(2, 3, np.float32))
    assert getattr(weight, name).tolist() == [3, 3]


def test_integers_cannot_require_gradients():
    with pytest.raises(
        RuntimeError, match=r"only floating and complex parameters can require gradients; this one is int32\[3\]"
    ):
        stateful.Parameter(jnp.arange(3))


def test_arrays_that_somebody_holds_are_never_deleted():
    first = jnp.array(3.0)
    weight = stateful.Parameter(first)
    optimizer = stateful.Optimizer(optax.sgd(0.1), weight)
    held = [first]
    pending = stateful.evaluate(jnp.square, weight)
    for step in range(4):
        stateful.evaluate(jnp.square, weight).backward()
        held += [weight.grad] if step % 2 else [weight.data, weight.detach()]
        optimizer.step()
    assert not any(array.is_deleted() for array in held)
    assert pending.item() == 9.0
    pending.backward()


def test_a_loss_keeps_what_it_was_evaluated_at():
    weight = stateful.Parameter(jnp.array(3.0))
    optimizer = stateful.Optimizer(optax.sgd(0.1), weight)
    stateful.evaluate(jnp.square, weight).backward()
    optimizer.step()  # from here on the array is the Parameter's own
    pending = stateful.evaluate(jnp.square, weight)
    for _ in range(2):
        optimizer.step()
    weight.zero_grad()
    pending.backward()
    np.testing.assert_allclose([pending.item(), weight.grad], [2.4**2, 2 * 2.4], rtol=1e-6)


def test_copies_have_neither_gradient_nor_hooks():
    weight = stateful.Parameter(jnp.arange(2.0))
    weight.grad = jnp.ones(2)
    weight.register_hook(lambda grad: 2 * grad)
    frozen = stateful.Parameter(jnp.ones(2), requires_grad=False)
    for clone in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        made = clone(stateful.Parameter(weight.data)) if clone is not copy.deepcopy else clone([weight, weight])[1]
        assert (made.data.tolist(), made.grad, made.requires_grad) == ([0, 1], None, True)
        assert not clone(frozen).requires_grad
        stateful.evaluate(jnp.sum, made).backward()
        assert made.grad.tolist() == [1, 1]
    one, other = copy.deepcopy([weight, weight])
    assert one is other
    assert weight.grad.tolist() == [1, 1]


def test_what_a_parameter_tells():
    weight = stateful.Parameter(jnp.ones((2, 3), jnp.float16))
    assert (weight.shape, weight.dtype, weight.size) == ((2, 3), jnp.float16, 6)
    assert np.asarray(weight, np.float32).tolist() == [[1] * 3] * 2
    tree = {"w": weight, "name": "net", "n": 3}
    arrays = stateful.arrays(tree)
    assert arrays["w"].shape == (2, 3)
    assert (arrays["name"], arrays["n"]) == ("net", 3)


@pytest.mark.parametrize("operation", [lambda p: p * 2, lambda p: 2 - p, lambda p: p @ p, lambda p: -p, lambda p: p[0], float])
def test_a_parameter_is_no_array(operation):
    with pytest.raises(TypeError, match=r"takes part in no computation by itself. .*stateful.arrays\(params\)"):
        operation(stateful.Parameter(jnp.ones(2)))


def test_trees_without_arrays():
    class Model:
        w = jnp.ones(2)

    with pytest.raises(TypeError, match=r"there is no array in .*Model.* jax.tree_util.register_dataclass"):
        stateful.parameters(Model())
    with pytest.raises(TypeError, match=r"tree\['w'\] is a torch.Tensor, .* tensor.detach\(\).numpy\(\)"):
        stateful.parameters({"w": torch.ones(2)})
    assert stateful.parameters({}) == {}
    assert stateful.Parameter(torch.ones(2)).data.tolist() == [1, 1]


VIEWS = [lambda tree: tree.values(), lambda tree: (p for p in tree.values()), lambda tree: [set(tree.values())]]


@pytest.mark.parametrize("view", VIEWS, ids=["values", "generator", "set"])
def test_parameters_in_what_can_be_iterated_over(view):
    params = stateful.parameters({"a": jnp.array(3.0), "b": jnp.array(4.0)})
    optimizer = stateful.Optimizer(optax.sgd(0.1), view(params))
    for parameter in params.values():
        parameter.grad = parameter.data
    assert stateful.clip_grad_norm_(view(params), 1.0) == 5.0
    stateful.clip_grad_value_(view(params), 0.1)
    assert all(parameter.grad == jnp.float32(0.1) for parameter in params.values())
    assert len(optimizer.parameters) == 2
    stateful.zero_grad(view(params))
    assert all(parameter.grad is None for parameter in params.values())


def test_trees_without_parameters():
    arrays = {"w": jnp.ones(2)}
    for use in (
        lambda: stateful.zero_grad(arrays),
        lambda: stateful.clip_grad_norm_(arrays, 1.0),
        lambda: stateful.clip_grad_value_(arrays, 1.0),
        lambda: stateful.Optimizer(optax.sgd(0.1), arrays),
    ):
        with pytest.raises(TypeError, match=r"expected Parameters; got float32\[2\]. Make them with stateful.parameters"):
            use()


def test_a_number_makes_a_parameter_of_a_fixed_dtype():
    weight = stateful.Parameter(3.0)
    assert not weight.data.weak_type
    assert stateful.Parameter(jnp.asarray(3.0)).data.weak_type is False
