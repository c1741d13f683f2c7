"""Muon: what is its own, beside what `test_optimizers` tries of all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_twins as twins
import pytest
import torch
from comparison import assert_identical, relative_difference
from optimizer_twins import NEWTON_SCHULZ
from torch.optim._muon import _zeropower_via_newtonschulz

from funcgrad.torch_optim.muon import COEFFICIENTS, muon, orthogonal

# The steps of the optimizer that are not in bfloat16 differ by rounding; where that, or the order of a sum of products, moves a
# number over the border between two numbers of bfloat16, which are 2**-8 apart, the iteration makes 2**-6 of it at most.
BFLOAT16_TOLERANCE = 2**-6


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (4, 4), (8, 5), (5, 8)])
def test_the_iteration_bit_for_bit(x64, shape):
    matrices = np.random.default_rng(0).normal(size=(8, *shape))
    matrices[0] = 0.0
    got = jax.jit(lambda: jnp.stack([orthogonal(matrix, COEFFICIENTS, 2, 1e-7) for matrix in jnp.asarray(matrices)]))()
    want = [_zeropower_via_newtonschulz(torch.tensor(matrix), COEFFICIENTS, 2, 1e-7).float().numpy() for matrix in matrices]
    assert_identical(got.astype(jnp.float32), np.stack(want))


@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (32, 96), (96, 32), (256, 256)])
def test_the_iteration_of_larger_matrices(shape):
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    got = np.asarray(orthogonal(jnp.asarray(matrix), COEFFICIENTS, 5, 1e-7).astype(jnp.float32))
    want = _zeropower_via_newtonschulz(torch.tensor(matrix), COEFFICIENTS, 5, 1e-7).float().numpy()
    assert np.max(np.abs(got - want)) <= BFLOAT16_TOLERANCE * np.max(np.abs(want))
    assert relative_difference(got, want) <= 8e-3  # as the documentation says
    # What it is for: singular values near 1, but for the smallest of a square matrix.
    near = np.abs(np.linalg.svd(got, compute_uv=False) - 1) < 0.5
    assert np.mean(near) >= (0.9 if shape[0] == shape[1] else 1.0)


def test_original_is_the_default():
    params = jnp.ones((6, 2))
    twins = [muon(adjust_lr_fn=name) for name in (None, "original")]
    assert_identical(*[jax.jit(twin.update)(params, twin.init(params), params)[0] for twin in twins])
    matrix = torch.ones((6, 2), requires_grad=True)
    matrix.grad = torch.ones((6, 2))
    torch.optim.Muon([matrix], adjust_lr_fn="original").step()
    updates, _ = jax.jit(twins[1].update)(params, twins[1].init(params), params)
    assert relative_difference(params + updates, matrix.detach().numpy()) <= NEWTON_SCHULZ


def test_without_nesterov_pytorch_normalizes_a_bfloat16_buffer_in_place(x64):
    both = ((True, True),)  # two parameters of random shapes
    of_params, of_states = twins.compare("muon", "bfloat16", [({"nesterov": False}, False)] * 4, both)
    params = [param for run in range(4) for param in twins.problem(f"muon bfloat16 {run}", "bfloat16", 2).params]
    assert any(rows > columns for rows, columns in (param.shape for param in params))
    assert max(of_params) <= twins.TWINS["muon"].bfloat16
    assert max(of_states) == 0


def test_a_leaf_without_a_gradient_stays():
    optimizer = muon(0.1)
    params = {"a": jnp.ones((2, 2)), "b": jnp.full((2, 3), -0.0), "none": jnp.zeros((3, 0))}
    grads = jax.tree.map(jnp.ones_like, params)
    update = jax.jit(optimizer.update)
    _, state = update(grads, optimizer.init(params), params)
    updates, after = update({**grads, "b": None}, state, params)
    assert_identical(optax.apply_updates(params, updates)["b"], params["b"])
    assert_identical(after.slots["momentum_buffer"]["b"], state.slots["momentum_buffer"]["b"])
    assert updates["none"].shape == (3, 0)


REFUSED = [
    ({"learning_rate": -1.0}, "learning_rate must be a schedule, or a number of at least 0"),
    ({"momentum": -0.1}, "momentum must be a number of at least 0"),
    ({"weight_decay": -0.1}, "weight_decay must be a number of at least 0"),
    ({"adjust_lr_fn": "none"}, "adjust_lr_fn must be None, 'original' or 'match_rms_adamw'; got 'none'"),
    ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
    ({"ns_steps": 100}, "ns_steps must be less than 100; got 100"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_as_in_torch(options, message):
    theirs = {{"learning_rate": "lr"}.get(name, name): value for name, value in options.items()}
    matrix = torch.zeros((2, 2), requires_grad=True)
    matrix.grad = torch.ones((2, 2))
    with pytest.raises(ValueError):  # noqa: PT011 - PyTorch's text; some are found at the first step only
        torch.optim.Muon([matrix], **theirs).step()
    with pytest.raises(ValueError, match=message):
        muon(**options)


def test_refused_parameters():
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        torch.optim.Muon([torch.zeros(3)])
    with pytest.raises(ValueError, match=r"muon takes matrices only; got the shape \(3,\) at params\['bias'\]"):
        muon().init({"bias": jnp.zeros(3)})
    with pytest.raises(TypeError, match=r"muon takes real parameters; got complex64 at params\['a'\]"):
        muon().init({"a": jnp.zeros((2, 2), jnp.complex64)})
