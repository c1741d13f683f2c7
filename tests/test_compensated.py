"""Sums that keep what each addition rounds off: float32 with the exactness of more, through XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import funcgrad as fg
from funcgrad.accumulator import two_sum

pytestmark = pytest.mark.optimized

# Relative, of a mean gradient in float32; its last rounding alone is 6e-8.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def stream():
    """Weights and gradients of 100,000 microbatches, over 5 and 13 orders of magnitude, and their mean in float64."""
    generator, count = np.random.default_rng(0), 100_000
    weights = (10.0 ** generator.uniform(-2, 3, count)).astype(np.float32)
    grads = (generator.normal(size=(count, 3)) * weights[:, None] * 10.0 ** generator.uniform(-4, 4, (count, 1))).astype(
        np.float32
    )
    return grads, weights, grads.astype(np.float64).sum(0) / weights.astype(np.float64).sum()


def _error(mean, exact):
    return np.abs(np.asarray(mean, np.float64) / exact - 1).max()


def _accumulated(stream, compensated):
    @jax.jit
    def run(grads, weights):
        buffer = fg.zeros({"w": jnp.zeros(3)}, compensated=compensated)
        add = lambda buffer, pair: (fg.accumulate(buffer, {"w": pair[0]}, pair[1]), None)
        return jax.lax.scan(add, buffer, (grads, weights))[0]

    return run(*stream[:2])


def test_100000_microbatches(stream):
    plain, compensated = (fg.mean(_accumulated(stream, flag))["w"] for flag in (False, True))
    assert _error(compensated, stream[2]) <= TOLERANCE
    assert _error(plain, stream[2]) >= 10 * TOLERANCE  # what it is for


def test_in_value_and_grad_with_weights_that_are_no_counts(stream):
    grads, weights = (array[:20_000] for array in stream[:2])
    exact = grads.astype(np.float64).sum(0) / weights.astype(np.float64).sum()
    loss_fn = lambda w, batch: fg.WeightedLoss(jnp.sum(batch["g"] * w), jnp.sum(batch["weight"]))
    errors = []
    for compensated in (False, True):
        fun = fg.value_and_grad(loss_fn, num_microbatches=len(weights), compensated=compensated, order="contiguous")
        _, mean = jax.jit(fun)(jnp.ones(3), {"g": grads, "weight": weights})
        errors.append(_error(mean, exact))
    assert errors[1] <= TOLERANCE <= errors[0]


@pytest.mark.parametrize("loop", ["scan", "host"])
def test_in_a_training_step(loop):
    """A large gradient that comes and goes leaves the small ones as they were."""
    batch = jnp.array([1e8, 1.0, 1.0, -1e8])
    step = fg.train_step(lambda w, x: jnp.mean(w * x), optax.sgd(1.0), num_microbatches=4, order="contiguous", loop=loop)
    params = []
    for compensated in (False, True):
        state = fg.TrainState.create(jnp.array(0.0), optax.sgd(1.0), compensated=compensated)
        for _ in range(2):  # the low-order parts are cleared with the sums
            state, _ = step(state, batch)
        params.append(float(state.params))
    assert params[1] == -1.0 != params[0]


def test_merge_total_and_zero_grad():
    parts = [1e8, 1.0, 1.0, -1e8]
    for flags in ((True, True), (True, False), (False, True)):
        left, right = (fg.zeros(jnp.array(0.0), compensated=flag) for flag in flags)
        for grad in parts[:2]:
            left = fg.accumulate(left, jnp.array(grad))
        for grad in parts[2:]:
            right = fg.accumulate(right, jnp.array(grad))
        merged = fg.merge(left, right)
        assert (merged.count, merged.weight) == (4, 4)
        if flags == (True, True):
            assert (fg.total(merged), fg.mean(merged)) == (2.0, 0.5)
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(fg.zero_grad(merged)))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_what_it_is(bad):
    buffer = fg.zeros(jnp.array(0.0), compensated=True)
    for grad in (1.0, bad, 1.0):
        buffer = fg.accumulate(buffer, jnp.array(grad))
    np.testing.assert_array_equal(fg.total(buffer), np.float32(bad))
    skipping = fg.zeros(jnp.array(0.0), compensated=True)
    for grad in (1e8, bad, 1.0, -1e8):
        skipping = fg.accumulate(skipping, jnp.array(grad), skip_nonfinite=True)
    assert (fg.total(skipping), skipping.count, skipping.skipped) == (1.0, 3, 1)


def test_complex_and_low_precision_leaves_and_those_without_a_gradient():
    params = {"z": jnp.array(0j), "h": jnp.zeros((), jnp.bfloat16), "n": 3}
    buffer = fg.zeros(params, compensated=True)
    for grad in (1e8 + 1e8j, 1 + 1j, -1e8 - 1e8j):
        buffer = fg.accumulate(buffer, {"z": jnp.array(grad), "h": jnp.ones((), jnp.bfloat16), "n": None})
    assert (fg.total(buffer)["z"], fg.total(buffer)["h"], fg.total(buffer)["n"]) == (1 + 1j, 3.0, None)


def test_two_sum_is_exact_after_xla():
    generator = np.random.default_rng(1)
    left, right = ((generator.normal(size=1000) * 10.0 ** generator.uniform(-8, 8, 1000)).astype(np.float32) for _ in range(2))
    summed, low = jax.jit(two_sum)(left, right)
    exact = left.astype(np.float64) + right.astype(np.float64)
    np.testing.assert_allclose(np.asarray(summed, np.float64) + np.asarray(low, np.float64), exact, rtol=1e-14)
    assert np.any(np.asarray(low) != 0)


def test_loss_and_weight_are_exact_too():
    """100,000 weights of .1: a plain float32 sum of them is off in the fourth digit."""
    loss_fn = lambda p, x: fg.WeightedLoss(jnp.sum(x * p), 0.1)
    x = jnp.ones(100_000) * 0.3
    loss, grad = jax.jit(fg.value_and_grad(loss_fn, microbatch_size=1, compensated=True, loop="scan"))(jnp.float32(1), x)
    np.testing.assert_allclose([loss, grad], 3, rtol=TOLERANCE)
    state = fg.TrainState.create(jnp.float32(1), optax.sgd(0.1), compensated=True)
    _, metrics = fg.train_step(loss_fn, optax.sgd(0.1), microbatch_size=1)(state, x)
    np.testing.assert_allclose([metrics["loss"], metrics["weight"] / 1e4], [3, 1], rtol=TOLERANCE)


def test_not_in_16_bits():
    with pytest.raises(
        ValueError, match=r"compensated sums are for many digits, but dtype='bfloat16' accumulates params\['w'\]"
    ):
        fg.zeros({"w": jnp.ones(3)}, dtype="bfloat16", compensated=True)
