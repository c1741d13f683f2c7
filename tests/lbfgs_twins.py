"""L-BFGS beside PyTorch's: problems, options, and runs of both."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from funcgrad.torch_optim.lbfgs import lbfgs

# Rounding grows along the iterations, each direction being a difference of nearly equal vectors divided by their products. So
# runs on functions that are hard to minimize are short, and end where the loss still changes by more than rounding, which the
# line search would else follow.
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


def closure(optimizer, loss_of, leaves):
    """What PyTorch's `step` asks for the loss and its gradients."""

    def ask():
        optimizer.zero_grad()
        loss = loss_of(leaves)
        loss.backward()
        return loss

    return ask


def torch_steps(loss_of, params, steps, options):
    """The parameters after each step, and how often the loss was asked and how many iterations there were."""
    options = {{"learning_rate": "lr"}.get(name, name): value for name, value in options.items()}
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in params.items()}
    optimizer = torch.optim.LBFGS(list(leaves.values()), **options)

    results = []
    with one_thread():
        for _ in range(steps):
            optimizer.step(closure(optimizer, loss_of, leaves))
            results.append({name: leaf.detach().numpy().copy() for name, leaf in leaves.items()})
    state = optimizer.state[next(iter(leaves.values()))]
    return results, (state["func_evals"], state["n_iter"])


def our_steps(loss_of, steps, make=lbfgs, **static):
    """`(params, numbers) -> (the parameters of each step, (evaluations, iterations))`, compiled."""

    @jax.jit
    def run(params, numbers):
        optimizer = make(**numbers, **static)

        def step(carried, _):
            params, state = carried
            value, grads = jax.value_and_grad(loss_of)(params)
            updates, state = optimizer.update(grads, state, params, value=value, grad=grads, value_fn=loss_of)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        (_, state), results = jax.lax.scan(step, (params, optimizer.init(params)), length=steps)
        return results, tuple(getattr(state, name, None) for name in ("func_evals", "n_iter"))

    return run


def difference(got, want):
    """The largest difference of an element, in parts of the largest element."""
    size = max(np.max(np.abs(leaf), initial=0) for leaf in want.values())
    return max(np.max(np.abs(got[name] - want[name]), initial=0) for name in want) / size


# A run of 100 steps, on parameters of many shapes, and its options.
STEPS = 100
SHAPES = {"bias": (), "empty": (0,), "kernel": (2, 1, 2, 1), "weight": (3,)}
MATRIX = np.random.default_rng(5).normal(size=(12, 8)) / 2
BASE = {
    "float64": {"learning_rate": 0.1, "max_iter": 4, "max_eval": 5},
    # In float32 a search for a lower loss would follow rounding, if it did not end before.
    "float32": {"learning_rate": 0.1, "max_iter": 4, "max_eval": 5, "tolerance_grad": 0.2, "tolerance_change": 1e-4},
}
OPTIONS = {
    "learning_rate": 0.2,
    "max_iter": 5,
    "max_eval": 3,
    "tolerance_grad": 0.3,
    "tolerance_change": 1e-3,
    "history_size": 10,
    "line_search_fn": "strong_wolfe",
}
# What is nearest to one update of `optax.lbfgs`.
AS_OPTAX = {"max_iter": 1, "line_search_fn": "strong_wolfe"}


def long_sets():
    """No option, each alone, and all pairs."""
    return [dict(chosen) for number in (0, 1, 2) for chosen in itertools.combinations(OPTIONS.items(), number)]


def valley(params, library):
    """A function with a bent valley, of all parameters in the order of their names."""
    leaves = [params[name].ravel() for name in sorted(params)]
    z = jnp.concatenate(leaves) if library is jnp else torch.cat(leaves)
    matrix = jnp.asarray(MATRIX, z.dtype) if library is jnp else torch.tensor(MATRIX, dtype=z.dtype)
    residual = matrix @ z - 1
    return (residual**2).mean() + 0.3 * (residual**4).mean() + 10 * ((z[1:] - z[:-1] ** 2) ** 2).mean()


loss_here, loss_in_torch = (functools.partial(valley, library=library) for library in (jnp, torch))


def long_start(dtype):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def compare_long_runs(dtype):
    """For each set of options, the worst difference over all steps, and whether the loss was asked as often."""
    compiled = functools.cache(functools.partial(our_steps, loss_here, STEPS))
    worst, as_often = [], []
    for chosen in long_sets():
        options = DEFAULTS | {"history_size": 100, "line_search_fn": None} | BASE[dtype] | chosen
        want, asked = torch_steps(loss_in_torch, long_start(dtype), STEPS, options)
        static = {name: options.pop(name) for name in ("history_size", "line_search_fn")}
        got, ours_asked = compiled(**static)(long_start(dtype), options)
        each = [difference(jax.tree.map(lambda leaf, step=step: leaf[step], got), want[step]) for step in range(STEPS)]
        worst.append(max(each))
        as_often.append(tuple(map(int, ours_asked)) == asked)
    return worst, as_often


@contextlib.contextmanager
def one_thread():
    """PyTorch without its threads, which wait for each other longer than small tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
