"""Adafactor: what is its own, beside what `test_optimizers` tries of all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_twins as twins
import pytest
import torch
from comparison import assert_identical, relative_difference

from funcgrad.torch_optim.adafactor import adafactor

SHAPES = {"column": (3, 1), "matrix": (4, 3), "scalar": (), "tensor": (2, 3, 4, 2), "vector": (5,)}


def test_defaults_bfloat16_and_mixed_types():
    random = np.random.default_rng(0)
    params = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    grads = {name: random.normal(size=(20, *shape)) * (random.random((20, *shape)) > 0.2) for name, shape in SHAPES.items()}
    leaves = {name: torch.tensor(value).bfloat16() for name, value in params.items()}
    leaves["column"] = leaves["column"].float()  # the first: its precision is the default of all
    ours = {name: jnp.array(leaf.float().numpy(), str(leaf.dtype)[6:]) for name, leaf in leaves.items()}
    theirs, optimizer = torch.optim.Adafactor(leaves.values(), lr=0.1, weight_decay=0.1), adafactor(0.1, weight_decay=0.1)
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    for step in range(20):
        for name, leaf in leaves.items():
            leaf.grad = torch.tensor(grads[name][step]).to(leaf.dtype)
        theirs.step()
        now = {name: jnp.array(leaf.grad.float().numpy(), ours[name].dtype) for name, leaf in leaves.items()}
        updates, state = update(now, state, ours)
        ours = optax.apply_updates(ours, updates)
    assert {name: str(leaf.dtype) for name, leaf in ours.items()} == {
        name: str(leaf.dtype)[6:] for name, leaf in leaves.items()
    }
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), ours)
    theirs = {name: leaf.float().numpy() for name, leaf in leaves.items()}
    assert relative_difference(wide, theirs) <= twins.TWINS["adafactor"].bfloat16


def test_a_leaf_without_a_gradient_stays():
    optimizer = adafactor(0.1, weight_decay=0.1)
    params = {"a": jnp.array([-0.0, 1.0]), "b": jnp.full((2, 3), -0.0), "none": jnp.zeros((0, 3))}
    grads = jax.tree.map(jnp.ones_like, params)
    update = jax.jit(optimizer.update)
    _, state = update(grads, optimizer.init(params), params)
    updates, after = update({**grads, "b": None}, state, params)
    assert_identical(optax.apply_updates(params, updates)["b"], params["b"])
    assert_identical(
        {name: tree["b"] for name, tree in after.slots.items()}, {name: tree["b"] for name, tree in state.slots.items()}
    )
    np.testing.assert_array_equal(after.step, [2, 1, 2])
    assert updates["none"].shape == (0, 3)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_nan_goes_where_pytorch_lets_it(shape):
    for place in ("param", "grad"):
        param, grad = np.ones(shape, np.float32), np.full(shape, 0.5, np.float32)
        (param if place == "param" else grad)[..., 0] = np.nan
        leaf = torch.tensor(param, requires_grad=True)
        leaf.grad = torch.tensor(grad)
        torch.optim.Adafactor([leaf], lr=0.1).step()
        ours = jnp.asarray(param)
        updates, _ = adafactor(0.1).update(jnp.asarray(grad), adafactor(0.1).init(ours), ours)
        np.testing.assert_allclose(optax.apply_updates(ours, updates), leaf.detach().numpy(), rtol=1e-5)


def test_refused_parameters():
    with pytest.raises(TypeError, match=r"takes real parameters; got complex64 at params\['a'\]"):
        adafactor().init({"a": jnp.zeros(2, jnp.complex64)})
    with pytest.raises(ValueError, match="the optimizers of torch_optim need the parameters"):
        adafactor().update(jnp.zeros(2), adafactor().init(jnp.zeros(2)))


def test_torch_fails_on_an_empty_parameter():
    empty = torch.zeros(0, requires_grad=True)
    empty.grad = torch.zeros(0)
    with pytest.raises(ZeroDivisionError):
        torch.optim.Adafactor([empty]).step()
