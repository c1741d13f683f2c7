"""L-BFGS against PyTorch's, which runs beside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_runs
import pytest
import torch

import funcgrad as fg
from funcgrad.torch_optim.lbfgs import lbfgs
from funcgrad.torch_optim.schedules import step_lr

# Rounding grows along the iterations, each direction being a difference of nearly equal vectors divided by their products; so
# the runs are short, and end where the loss still changes by more than rounding, which the line search would else follow.
TOLERANCE = 1e-10
ROWS = np.random.default_rng(0).normal(size=(20, 5))
TARGETS = np.tanh(ROWS @ np.arange(1.0, 6.0)[:, None] / 3) + 0.1 * np.random.default_rng(1).normal(size=(20, 1))


def rosenbrock(p):
    return sum(100 * (p["x"][i + 1] - p["x"][i] ** 2) ** 2 + (1 - p["x"][i]) ** 2 for i in range(3))


def least_squares(p, library=jnp):
    rows, targets = (ROWS, TARGETS) if library is jnp else (torch.tensor(ROWS), torch.tensor(TARGETS))
    return ((rows @ p["weight"] + p["bias"] - targets) ** 2).mean()


def network(p, library=jnp):
    rows, targets = (ROWS, TARGETS) if library is jnp else (torch.tensor(ROWS), torch.tensor(TARGETS))
    return ((library.tanh(rows @ p["hidden"] + p["bias"]) @ p["out"] - targets) ** 2).mean()


def start(**shapes):
    rng = np.random.default_rng(2)
    return {name: rng.normal(size=shape) / 2 for name, shape in sorted(shapes.items())}


# The loss here and in PyTorch, the parameters to begin with, and how many steps.
PROBLEMS = {
    "rosenbrock": (rosenbrock, rosenbrock, {"x": np.array([-1.2, 1.0, -0.5, 0.8])}, 4),
    "least squares": (least_squares, functools.partial(least_squares, library=torch), start(weight=(5, 1), bias=(1,)), 3),
    "network": (network, functools.partial(network, library=torch), start(hidden=(5, 4), bias=(4,), out=(4, 1)), 3),
}
# With and without line search. The numbers are arguments of one program, but for the history's size.
DEFAULTS = {"learning_rate": 1.0, "max_iter": 20, "max_eval": 25, "tolerance_grad": 1e-7, "tolerance_change": 1e-9}
SETS = {
    None: {
        "small steps": {"learning_rate": 0.1},
        "few iterations": {"learning_rate": 0.2, "max_iter": 7, "max_eval": 8},
        "few evaluations": {"learning_rate": 0.1, "max_eval": 5},
        "large gradients": {"learning_rate": 0.1, "tolerance_grad": 0.5},
        "large changes": {"learning_rate": 0.1, "tolerance_change": 1e-2},
    },
    "strong_wolfe": {
        "defaults": {},
        "small steps": {"learning_rate": 1e-3, "max_iter": 2},
        "large steps": {"learning_rate": 30.0, "max_iter": 8, "max_eval": 30},
        "few evaluations": {"max_eval": 4},
        "one evaluation": {"max_eval": 1},
        "large gradients": {"tolerance_grad": 0.5},
        "large changes": {"tolerance_change": 1e-2},
    },
}


def torch_steps(loss_of, params, steps, options):
    """The parameters after each step, and how often the loss was asked and how many iterations there were."""
    options = {{"learning_rate": "lr"}.get(name, name): value for name, value in options.items()}
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in params.items()}
    optimizer = torch.optim.LBFGS(list(leaves.values()), **options)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(leaves)
        loss.backward()
        return loss

    results = []
    with optimizer_runs.one_thread():
        for _ in range(steps):
            optimizer.step(closure)
            results.append({name: leaf.detach().numpy().copy() for name, leaf in leaves.items()})
    state = optimizer.state[next(iter(leaves.values()))]
    return results, (state["func_evals"], state["n_iter"])


def our_steps(loss_of, steps, **static):
    """`(params, numbers) -> (the parameters of each step, (evaluations, iterations))`, compiled."""

    @jax.jit
    def run(params, numbers):
        optimizer = lbfgs(**numbers, **static)

        def step(carried, _):
            params, state = carried
            value, grads = jax.value_and_grad(loss_of)(params)
            updates, state = optimizer.update(grads, state, params, value=value, value_fn=loss_of)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        (_, state), results = jax.lax.scan(step, (params, optimizer.init(params)), length=steps)
        return results, (state.func_evals, state.n_iter)

    return run


def difference(got, want):
    """The largest difference of an element, in parts of the largest element."""
    size = max(np.max(np.abs(leaf)) for leaf in want.values())
    return max(np.max(np.abs(got[name] - want[name])) for name in want) / size


@pytest.mark.parametrize(
    ("problem", "line_search_fn", "history_size"),
    [
        *((problem, line_search_fn, 100) for problem in PROBLEMS for line_search_fn in SETS),
        ("rosenbrock", None, 3),
        ("rosenbrock", "strong_wolfe", 3),
    ],
)
def test_steps(x64, problem, line_search_fn, history_size):
    ours, theirs, params, steps = PROBLEMS[problem]
    static = {"line_search_fn": line_search_fn, "history_size": history_size}
    steps = min(steps, 2 * history_size // 3)  # a short history makes more of a rounding
    run = our_steps(ours, steps, **static)
    for name, chosen in SETS[line_search_fn].items():
        numbers = DEFAULTS | chosen
        want, asked = torch_steps(theirs, params, steps, numbers | static)
        got, ours_asked = run(params, numbers)
        for index in range(steps):
            assert difference(jax.tree.map(lambda leaf: leaf[index], got), want[index]) <= TOLERANCE, (name, index)
        assert tuple(map(int, ours_asked)) == asked, name


def test_train_step(x64):
    _, theirs, params, steps = PROBLEMS["network"]
    options = {"learning_rate": 0.5, "line_search_fn": "strong_wolfe", "max_iter": 6}
    want, _ = torch_steps(theirs, params, steps, options)

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch["rows"] @ params["hidden"] + params["bias"]) @ params["out"] - batch["targets"]) ** 2)

    optimizer = lbfgs(**options)
    state = fg.TrainState.create(jax.tree.map(jnp.asarray, params), optimizer)
    step = fg.train_step(loss_fn, optimizer, num_microbatches=4)
    for index in range(steps):
        state, _ = step(state, {"rows": ROWS, "targets": TARGETS})
        assert difference(state.params, want[index]) <= TOLERANCE


def test_none_counts_as_zeros(x64):
    ours, theirs, params, _ = PROBLEMS["network"]
    leaves = {name: torch.tensor(value, requires_grad=name != "bias") for name, value in params.items()}
    optimizer = torch.optim.LBFGS(list(leaves.values()), lr=0.3)

    def closure():
        optimizer.zero_grad()
        loss = theirs(leaves)
        loss.backward()
        return loss

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
        optimizer.step(closure)
        arrays, state = step(arrays, state)
        assert difference(arrays, {name: leaf.detach().numpy() for name, leaf in leaves.items()}) <= TOLERANCE
    np.testing.assert_array_equal(arrays["bias"], params["bias"])
    assert arrays["count"] == 3


def test_a_schedule_and_inject_hyperparams(x64):
    ours, theirs, params, _ = PROBLEMS["network"]
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in params.items()}
    optimizer = torch.optim.LBFGS(list(leaves.values()), lr=0.4, max_iter=5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = theirs(leaves)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
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
        assert difference(got, {name: leaf.detach().numpy() for name, leaf in leaves.items()}) <= TOLERANCE


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
    with pytest.raises(TypeError, match=r"lbfgs takes real parameters; got complex64 at params\['a'\]"):
        lbfgs().init({"a": jnp.zeros(2, jnp.complex64)})
