"""Each optimizer beside PyTorch's: every option, alone and in pairs, in every dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_twins as twins
import pytest
import torch
from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE


@pytest.fixture(autouse=True)
def double_precision(x64):
    """PyTorch keeps NAdam's product and ASGD's step size in its default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", twins.NAMES)
def test_each_option(name):
    for dtype, tolerance, pattern in (
        ("float64", FLOAT64_TOLERANCE, twins.IN_TURNS),
        ("float32", FLOAT32_TOLERANCE, twins.ALWAYS),
    ):
        of_params, of_states = twins.compare(name, dtype, twins.singles(name), pattern)
        assert max(of_params) <= getattr(twins.TWINS[name], dtype)
        assert max(of_states) <= tolerance


@pytest.mark.parametrize("name", twins.NAMES)
def test_options_in_pairs(name):
    taken, refused = twins.pairs(name)
    of_params, of_states = twins.compare(name, "float64", [(options, False) for options in taken], twins.ALWAYS)
    assert max(of_params) <= twins.TWINS[name].float64
    assert max(of_states) <= FLOAT64_TOLERANCE
    for options in refused:
        with pytest.raises(ValueError, match=r"must be .*; got "):
            twins.here(name, options)


FLOAT16_TOLERANCE = 2.0**-11


@pytest.mark.parametrize("name", twins.NAMES)
def test_bfloat16_and_complex(name):
    sets = [({}, False), (twins.rich(name), False)]
    for dtype, tolerance in (("bfloat16", twins.TWINS[name].bfloat16), ("complex128", FLOAT64_TOLERANCE)):
        if dtype not in twins.TWINS[name].dtypes:
            continue
        of_params, of_states = twins.compare(name, dtype, sets, twins.ALWAYS)
        assert max(of_params) <= tolerance
        assert max(of_states) <= 4 * tolerance


def test_float16_keeps_numbers_that_are_subnormal():
    of_params, of_states = twins.compare("adamw", "float16", [({"learning_rate": 0.01, "eps": 1e-4}, False)], twins.ALWAYS)
    assert max(of_params) <= FLOAT16_TOLERANCE
    assert max(of_states) <= FLOAT16_TOLERANCE


@pytest.mark.parametrize("name", [name for name in twins.OF_ANY_SHAPE if name != "adafactor"])  # it takes the norm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_infinite_parameters(name, dtype):
    """A mask of infinities stays what it is in PyTorch, where the parameter decays too, and where the decay is injected."""
    start = np.ones(twins.ALONE, np.float32)
    start[:2] = np.inf, -np.inf
    given = twins.Problem([start], [np.full((twins.STEPS, twins.ALONE), 0.5, np.float32)])
    param = jnp.asarray(start, dtype)
    cases = [(False, 0.1), (True, 0.1), (True, 0.0)] if dtype == "float32" else [(False, 0.1)]  # optax rounds what it injects
    for inject, decay in cases:
        options = {"learning_rate": 0.05} | ({} if name == "rprop" else {"weight_decay": decay})
        theirs, _ = twins.run_torch(name, options, given, dtype, twins.ALWAYS)
        optimizer = twins.here(name, options, inject=inject)
        update = jax.jit(optimizer.update)
        ours, state = param, optimizer.init(param)
        for step in range(3):
            updates, state = update(jnp.full(twins.ALONE, 0.5, dtype), state, ours)
            ours = optax.apply_updates(ours, updates)
            np.testing.assert_allclose(
                ours.astype(jnp.float32), theirs[0][step], rtol=FLOAT32_TOLERANCE if dtype == "float32" else 1e-2
            )
