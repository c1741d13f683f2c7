"""What a step costs: no more than plain optax's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_optim as benchmark

from funcgrad import torch_optim

pytestmark = pytest.mark.optimized
SLACK = 1.05
LEAVES = 10


def test_a_step_of_adamw_costs_what_optax_s_does():
    params, grads = benchmark.inputs(LEAVES)
    costs = {name: benchmark.costs(optimizer, params, grads) for name, optimizer in benchmark.contenders().items()}
    assert costs["torch_optim"]["flops"] <= SLACK * costs["optax"]["flops"]
    assert costs["torch_optim"]["bytes"] <= SLACK * costs["optax"]["bytes"]


def test_the_state_of_adamw_is_optax_s_but_for_the_counts():
    params = {"a": jnp.ones((16, 16)), "b": jnp.ones(3, jnp.bfloat16)}
    sizes = {name: held(optimizer.init(params)) for name, optimizer in benchmark.contenders().items()}
    one_count = np.dtype(np.int32).itemsize
    assert sizes["torch_optim"] - len(params) * one_count == sizes["optax"] - one_count


def held(state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_where_there_is_no_momentum_nothing_is_kept():
    assert jax.tree.leaves(torch_optim.sgd().init(jnp.ones(3))) == []
