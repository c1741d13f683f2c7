"""Checks that need several devices; tests/test_devices.py runs them in a process of their own, with 8 on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import FLOAT32_TOLERANCE, compilations, relative_difference
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import funcgrad as fg

OPTIMIZER = optax.adam(1e-2)
ROWS = jax.random.normal(jax.random.key(0), (32, 64))


def loss_fn(params, rows):
    return jnp.mean((rows @ params["w"] - 1) ** 2)


@pytest.fixture(scope="module")
def mesh():
    assert len(jax.devices()) == 8
    return Mesh(np.array(jax.devices()), ("data",))


@pytest.mark.parametrize("loop", ["scan", "unroll", 2])
def test_value_and_grad_inside_shard_map(mesh, loop):
    """Each device has rows of its own; JAX adds up the gradient of a parameter that all share."""

    def each(params, rows):
        loss, grads = fg.value_and_grad(loss_fn, num_microbatches=4, loop=loop)(params, rows)
        return jax.lax.pmean(loss, "data"), jax.tree.map(lambda grad: grad / 8, grads)

    params = {"w": jnp.ones((64, 8)) / 64}
    sharded = jax.shard_map(each, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec())
    assert relative_difference(jax.jit(sharded)(params, ROWS), jax.value_and_grad(loss_fn)(params, ROWS)) <= FLOAT32_TOLERANCE


def test_sharded_parameters_keep_their_sharding_and_compile_once(mesh, caplog):
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    params = {"w": jax.device_put(jnp.ones((64, 8)) / 64, sharding)}
    rows = jax.device_put(ROWS, sharding)
    state = fg.TrainState.create(params, OPTIMIZER)
    step, steps = fg.train_step(loss_fn, OPTIMIZER, num_microbatches=2), fg.micro_steps(loss_fn, OPTIMIZER)
    with jax.log_compiles():
        for _ in range(3):
            state, _ = step(state, rows)
            state, _ = steps.backward(state, rows)
            state, _ = steps.update(state)
            for leaf in (state.params["w"], state.buffer.grads["w"], state.opt_state[0].mu["w"]):
                assert leaf.sharding.spec == PartitionSpec("data")
    assert [compilations(caplog, name) for name in ("step", "backward", "update")] == [1, 1, 1]


def test_strided_microbatches_of_a_sharded_batch_move_no_rows(mesh):
    rows = jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec("data")))
    params = jax.device_put({"w": jnp.ones((64, 8)) / 64}, NamedSharding(mesh, PartitionSpec()))
    compiled = jax.jit(fg.value_and_grad(loss_fn, num_microbatches=4)).lower(params, rows).compile().as_text()
    assert "all-reduce" in compiled
    assert not any(moving in compiled for moving in ("all-gather", "all-to-all", "collective-permute"))


def test_a_state_on_another_device_stays_there(mesh):
    device = jax.devices()[3]
    state = fg.TrainState.create(jax.device_put({"w": jnp.ones((64, 8)) / 64}, device), OPTIMIZER)
    state, metrics = fg.train_step(loss_fn, OPTIMIZER, num_microbatches=2)(state, ROWS)
    assert {next(iter(leaf.devices())) for leaf in jax.tree.leaves((state, metrics))} == {device}


@pytest.mark.parametrize("loop", ["scan", "ordered", 2])
def test_a_carry_that_begins_alike_on_all_devices(mesh, loop):
    def loss_and_carry(params, rows, carry):
        return jnp.mean((rows @ params["w"] - carry) ** 2), (0.9 * carry + 0.1 * jnp.mean(rows @ params["w"]), None)

    grad = fg.grad(loss_and_carry, has_aux=True, carry_argnum=2, num_microbatches=2, loop=loop)

    def local(params, rows, carry):
        grads, (carry, _) = grad(params, rows, carry)
        return grads, jax.lax.pmean(carry, "data")

    specs = PartitionSpec(), PartitionSpec("data"), PartitionSpec()
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    params, start = {"w": jnp.ones(64) / 64}, jnp.zeros(())
    _, carry = sharded(params, ROWS, start)
    parts = [grad(params, ROWS[device * 4 : device * 4 + 4], start)[1][0] for device in range(8)]
    assert relative_difference(carry, jnp.mean(jnp.stack(parts))) <= FLOAT32_TOLERANCE
