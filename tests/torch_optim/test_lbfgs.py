"""L-BFGS against PyTorch's, which runs beside it."""

import functools

import jax
import jax.numpy as jnp
import lbfgs_twins as twins
import numpy as np
import optax
import pytest
import torch
from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE

import funcgrad as fg
from funcgrad.torch_optim.lbfgs import lbfgs
from funcgrad.torch_optim.schedules import step_lr


@pytest.mark.parametrize(
    ("problem", "line_search_fn", "history_size"),
    [
        *((problem, line_search_fn, 100) for problem in twins.PROBLEMS for line_search_fn in twins.SETS),
        ("rosenbrock", None, 3),
        ("rosenbrock", "strong_wolfe", 3),
    ],
)
def test_steps(x64, problem, line_search_fn, history_size):
    ours, theirs, params, steps = twins.PROBLEMS[problem]
    static = {"line_search_fn": line_search_fn, "history_size": history_size}
    steps = min(steps, 2 * history_size // 3)  # a short history makes more of a rounding
    run = twins.our_steps(ours, steps, **static)
    for name, chosen in twins.SETS[line_search_fn].items():
        numbers = twins.DEFAULTS | chosen
        want, asked = twins.torch_steps(theirs, params, steps, numbers | static)
        got, ours_asked = run(params, numbers)
        for index in range(steps):
            assert twins.difference(jax.tree.map(lambda leaf: leaf[index], got), want[index]) <= twins.TOLERANCE, (name, index)
        assert tuple(map(int, ours_asked)) == asked, name


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", FLOAT64_TOLERANCE), ("float32", FLOAT32_TOLERANCE)])
def test_every_option_alone_and_in_pairs_over_100_steps(x64, dtype, tolerance):
    worst, as_often = twins.compare_long_runs(dtype)
    assert max(worst) <= tolerance
    assert all(as_often)


def test_train_step(x64):
    _, theirs, params, steps = twins.PROBLEMS["network"]
    options = {"learning_rate": 0.5, "line_search_fn": "strong_wolfe", "max_iter": 6}
    want, _ = twins.torch_steps(theirs, params, steps, options)

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch["rows"] @ params["hidden"] + params["bias"]) @ params["out"] - batch["targets"]) ** 2)

    optimizer = lbfgs(**options)
    state = fg.TrainState.create(jax.tree.map(jnp.asarray, params), optimizer)
    step = fg.train_step(loss_fn, optimizer, num_microbatches=4)
    for index in range(steps):
        state, _ = step(state, {"rows": twins.ROWS, "targets": twins.TARGETS})
        assert twins.difference(state.params, want[index]) <= twins.TOLERANCE


def test_none_counts_as_zeros(x64):
    ours, theirs, params, _ = twins.PROBLEMS["network"]
    leaves = {name: torch.tensor(value, requires_grad=name != "bias") for name, value in params.items()}
    optimizer = torch.optim.LBFGS(list(leaves.values()), lr=0.3)

    twin, arrays = lbfgs(0.3), {**jax.tree.map(jnp.asarray, params), "count": jnp.array(3)}
    state = twin.init(arrays)
    assert state.d.shape == (28,)

    @jax.jit
    def step(arrays, state):
        value, grads = jax.value_and_grad(ours, allow_int=True)(arrays)
        grads = {**grads, "bias": None, "count": None}
        updates, state = twin.update(grads, state, arrays, value=value, value_fn=ours)
        return optax.apply_updates(arrays, updates), state

    for _ in range(2):
        optimizer.step(twins.closure(optimizer, theirs, leaves))
        arrays, state = step(arrays, state)
        assert twins.difference(arrays, {name: leaf.detach().numpy() for name, leaf in leaves.items()}) <= twins.TOLERANCE
    np.testing.assert_array_equal(arrays["bias"], params["bias"])
    assert arrays["count"] == 3


def test_a_schedule_and_inject_hyperparams(x64):
    ours, theirs, params, _ = twins.PROBLEMS["network"]
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in params.items()}
    optimizer = torch.optim.LBFGS(list(leaves.values()), lr=0.4, max_iter=5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    for _ in range(3):
        optimizer.step(twins.closure(optimizer, theirs, leaves))
        scheduler.step()
    for twin in (
        lbfgs(step_lr(0.4, 1, gamma=0.5), max_iter=5),
        optax.inject_hyperparams(lbfgs)(step_lr(0.4, 1, gamma=0.5), max_iter=5),
    ):
        arrays = jax.tree.map(jnp.asarray, params)

        def step(carried, _):
            arrays, state = carried
            value, grads = jax.value_and_grad(ours)(arrays)
            updates, state = twin.update(grads, state, arrays, value=value, value_fn=ours)
            return (optax.apply_updates(arrays, updates), state), None

        state = twin.init(arrays)
        (got, _), _ = jax.jit(lambda carried: jax.lax.scan(step, carried, length=3))((arrays, state))
        assert twins.difference(got, {name: leaf.detach().numpy() for name, leaf in leaves.items()}) <= twins.TOLERANCE


def test_at_the_minimum_nothing_changes():
    optimizer, params = lbfgs(), jnp.zeros(2)
    state = optimizer.init(params)
    updates, after = optimizer.update(jnp.zeros(2), state, params, value=0.0, value_fn=lambda x: jnp.sum(x**2))
    np.testing.assert_array_equal(updates, np.zeros(2))
    assert (int(after.func_evals), int(after.n_iter)) == (1, 0)


def test_refused():
    with pytest.raises(ValueError, match="Invalid learning rate"):
        torch.optim.LBFGS([torch.zeros(1)], lr=-1.0)
    with pytest.raises(ValueError, match="learning_rate must be a schedule, or a number of at least 0"):
        lbfgs(-1.0)
    with pytest.raises(ValueError, match="line_search_fn must be None or 'strong_wolfe'; got 'armijo'"):
        lbfgs(line_search_fn="armijo")
    with pytest.raises(ValueError, match="history_size must be at least 1; got 0"):
        lbfgs(history_size=0)
    with pytest.raises(ValueError, match="lbfgs needs more: call update"):
        lbfgs().update(jnp.zeros(2), lbfgs().init(jnp.zeros(2)), jnp.zeros(2))
    with pytest.raises(ValueError, match="lbfgs needs at least one floating number to train; got none"):
        lbfgs().init({"a": jnp.arange(2)})


def test_complex_parameters(x64):
    rows, targets = twins.ROWS[:, :3] + 1j * twins.ROWS[:, 2:], twins.TARGETS[:, 0]
    begin = np.array([0.5 + 0.1j, -0.3j, 0.2 + 0j])
    leaves = {"a": torch.tensor(begin, requires_grad=True), "b": torch.tensor(0.5, dtype=torch.float64, requires_grad=True)}
    theirs = torch.optim.LBFGS(leaves.values(), line_search_fn="strong_wolfe", max_iter=6)

    def loss_of(leaves):
        return ((torch.tensor(rows) @ leaves["a"] + leaves["b"] - torch.tensor(targets)).abs() ** 2).mean()

    def loss_fn(params):
        return jnp.mean(jnp.abs(rows @ params["a"] + params["b"] - targets) ** 2)

    conjugate = optax.stateless(lambda grads, params: jax.tree.map(jnp.conj, grads))
    ours = optax.chain(conjugate, lbfgs(line_search_fn="strong_wolfe", max_iter=6))

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = ours.update(grads, state, params, value=value, value_fn=loss_fn)
        return optax.apply_updates(params, updates), state

    params = {"a": jnp.asarray(begin), "b": jnp.asarray(0.5)}
    state = ours.init(params)
    for _ in range(2):
        theirs.step(twins.closure(theirs, loss_of, leaves))
        params, state = step(params, state)
        assert twins.difference(params, {name: leaf.detach().numpy() for name, leaf in leaves.items()}) <= twins.TOLERANCE


def test_a_nan_gradient_leaves_the_other_elements(x64):
    start = np.array([np.nan, 1.0])
    leaf = torch.tensor(start, requires_grad=True)
    theirs = torch.optim.LBFGS([leaf], max_iter=1)

    theirs.step(twins.closure(theirs, lambda leaf: (leaf**4).sum(), leaf))
    ours, params, loss_of = lbfgs(max_iter=1), jnp.asarray(start), lambda x: jnp.sum(x**4)
    value, grad = jax.value_and_grad(loss_of)(params)
    updates, _ = jax.jit(functools.partial(ours.update, value_fn=loss_of))(grad, ours.init(params), params, value=value)
    np.testing.assert_array_equal(params + updates, leaf.detach().numpy())


def test_a_new_state_can_be_donated():
    params = jnp.zeros(2)
    state = lbfgs().init(params)
    jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
