"""Clipping beside PyTorch's."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_twins as twins
import pytest
import torch
from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, assert_identical, relative_difference

from funcgrad import torch_optim

TOLERANCES = {"float64": FLOAT64_TOLERANCE, "float32": FLOAT32_TOLERANCE, "complex128": FLOAT64_TOLERANCE, "bfloat16": 2.0**-7}
NORMS = (0.5, 1.0, 2.0, 3.0, math.inf)
BOUNDS = (0.5, 1e6)


def grads_in(dtype):
    random = np.random.default_rng(0)
    imaginary = 1j if dtype.startswith("complex") else 0
    make = lambda *shape: jnp.asarray(random.normal(size=shape) + imaginary * random.normal(size=shape), dtype)
    return {"a": make(3, 4), "b": None, "c": make(), "d": make(5)}


def in_torch(grads, dtype, clip):
    tensors = []
    for grad in grads.values():
        tensor = torch.zeros(() if grad is None else grad.shape, dtype=twins.DTYPES[dtype], requires_grad=True)
        tensor.grad = None if grad is None else twins.to_torch(np.asarray(grad), dtype)
        tensors.append(tensor)
    clip(tensors)
    clipped = [None if tensor.grad is None else twins.as_numpy(tensor.grad) for tensor in tensors]
    return dict(zip(grads, clipped, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_clip_grad_norm(x64, dtype):
    cases = [(bound, norm) for bound in BOUNDS for norm in NORMS]
    grads = grads_in(dtype)
    clipped = jax.jit(lambda grads: [torch_optim.clip_grad_norm(*case).update(grads, optax.EmptyState())[0] for case in cases])(
        grads
    )
    for (bound, norm), got in zip(cases, clipped, strict=True):
        want = in_torch(grads, dtype, lambda tensors: torch.nn.utils.clip_grad_norm_(tensors, bound, norm))
        assert {name: leaf is None for name, leaf in got.items()} == {name: leaf is None for name, leaf in want.items()}
        assert got["a"].dtype == grads["a"].dtype
        assert relative_difference(got, want) <= TOLERANCES[dtype]
        if bound == BOUNDS[1]:
            assert_identical(got, grads)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_clip_grad_value(x64, dtype):
    grads = grads_in(dtype)
    clip = torch_optim.clip_grad_value(0.3)
    got, _ = clip.update(grads, clip.init(grads))
    want = in_torch(grads, dtype, lambda tensors: torch.nn.utils.clip_grad_value_(tensors, 0.3))
    assert relative_difference(got, want) == 0


def test_without_gradients():
    clip = torch_optim.clip_grad_norm(1.0)
    assert clip.update({"a": None}, clip.init({"a": jnp.ones(2)}))[0] == {"a": None}
