"""The schedule that looks at the loss, against PyTorch's ReduceLROnPlateau."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from schedule_twins import BASE, FLOAT64_TOLERANCE, STEPS, difference
from torch.optim import lr_scheduler

from funcgrad.torch_optim import schedules

PLATEAUS = [
    {},
    {"factor": 0.5, "patience": 0},
    {"mode": "max", "patience": 2, "cooldown": 3},
    {"threshold": 0.05, "patience": 3, "threshold_mode": "abs", "min_lr": 1e-4},
    {"mode": "max", "threshold": 0.05, "threshold_mode": "abs", "patience": 1},
    {"patience": 1, "eps": 1e-3, "cooldown": 1},
    {"factor": 0.0, "patience": 40, "min_lr": 1e-3},
]


@pytest.mark.parametrize("options", PLATEAUS)
def test_plateau(x64, options):
    values = np.exp(-np.arange(STEPS) / 100) + 0.1 * np.random.default_rng(1).normal(size=STEPS)
    values[100:110] = np.nan
    values = values * (-1 if options.get("mode") == "max" else 1)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    before, after = [], []
    for value in values:
        before.append(optimizer.param_groups[0]["lr"])
        scheduler.step(value)
        after.append(scheduler.get_last_lr()[0])

    ours = optax.chain(optax.sgd(BASE), schedules.reduce_lr_on_plateau(BASE, **options))

    def step(state, value):
        updates, state = ours.update(jnp.ones(()), state, value=value)
        return state, (-updates, state[-1].learning_rate)

    _, (used, rates) = jax.lax.scan(step, ours.init(jnp.ones(())), values)
    assert len(set(after)) > 1
    assert difference(rates, np.array(after)) <= FLOAT64_TOLERANCE
    assert difference(used, np.array(before)) <= FLOAT64_TOLERANCE


def test_plateau_without_a_value_keeps_the_rate():
    optimizer = schedules.reduce_lr_on_plateau(0.0, patience=0)
    state = optimizer.init(None)
    updates, kept = optimizer.update(jnp.ones(2), state)
    np.testing.assert_array_equal(updates, np.ones(2))
    assert kept is state
    _, after = optimizer.update(jnp.ones(2), state, value=jnp.ones(1))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    with pytest.raises(ValueError, match=r"needs one number as value; got an array of shape \(2,\)"):
        optimizer.update(jnp.ones(2), state, value=jnp.ones(2))
