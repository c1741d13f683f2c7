"""The cost of the implicit face, as the median of ratios, interleaved in one run."""

import statistics
import time

import jax
import jax.numpy as jnp
import models
import optax
import pytest

import funcgrad as fg
from funcgrad import stateful

pytestmark = pytest.mark.optimized


def test_a_loop_over_the_shell_costs_little_more_than_micro_steps():
    model = models.BENCHMARK["mlp"]()
    parts = [jax.tree.map(lambda leaf, part=part: leaf[part::4], model.batch) for part in range(4)]
    optimizer = optax.adam(1e-3)
    steps, states = fg.micro_steps(model.loss_fn, optimizer), [fg.TrainState.create(model.params, optimizer)]
    params = stateful.parameters(jax.tree.map(jnp.copy, model.params))
    shell = stateful.Optimizer(optimizer, params)

    def explicit():
        for part in parts:
            states[0], _ = steps.backward(states[0], part)
        states[0], _ = steps.update(states[0])
        jax.block_until_ready(states[0])

    def implicit():
        shell.zero_grad()
        for part in parts:
            (stateful.evaluate(model.loss_fn, params, part) / 4).backward()
        shell.step()
        # Not `.data`: what is handed out is kept, so the next step would copy it.
        jax.block_until_ready([parameter._data for parameter in shell.parameters])

    def measure():
        times = {explicit: [], implicit: []}
        for _ in range(25):
            for run, seconds in times.items():
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
        pairs = zip(times[implicit][3:], times[explicit][3:], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    # Other work on the machine can lift one median, hardly three in a row.
    assert any(measure() <= 1.15 for _ in range(3))
