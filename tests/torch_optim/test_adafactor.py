"""Adafactor against PyTorch's, which runs beside it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_runs
import pytest
import torch
from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, assert_identical, relative_difference

from funcgrad.torch_optim.adafactor import adafactor
from funcgrad.torch_optim.schedules import step_lr

STEPS = 100
SHAPES = {"column": (3, 1), "matrix": (4, 3), "scalar": (), "tensor": (2, 3, 4, 2), "vector": (5,)}
ABSENT = np.arange(STEPS) % 7 == 3
DEFAULTS = {"learning_rate": 1e-2, "beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.0}
OPTIONS = {"learning_rate": 0.3, "beta2_decay": -0.3, "eps1": 0.5, "eps2": 5.0, "d": 1.7, "weight_decay": 0.4}
SETS = [dict(chosen) for number in (0, 1, 2) for chosen in itertools.combinations(OPTIONS.items(), number)]


def torch_optimizer(options, maximize=False):
    eps = options["eps1"], options["eps2"]
    rest = {name: value for name, value in options.items() if name not in ("learning_rate", "eps1", "eps2")}
    return lambda params: torch.optim.Adafactor(params, lr=options["learning_rate"], eps=eps, maximize=maximize, **rest)


def our_optimizer(options, maximize=False):
    rest = {name: value for name, value in options.items() if name not in ("eps1", "eps2")}
    return adafactor(eps=(options["eps1"], options["eps2"]), maximize=maximize, **rest)


def as_arrays(tree, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def check_options(dtype, tolerance, sets):
    params, grads = optimizer_runs.gradients(SHAPES, STEPS)
    precision = float(jnp.finfo(dtype).eps)

    def run(options, maximize):
        return optimizer_runs.our_run(our_optimizer(options, maximize), *as_arrays((params, grads), dtype), ABSENT)

    # All sets in one program: the numbers are its arguments.
    for maximize in (False, True):
        sets = [chosen for chosen in sets if len(chosen) + maximize <= 2]
        columns = [DEFAULTS | {"eps1": precision} | chosen for chosen in sets]
        columns = {name: jnp.asarray([column[name] for column in columns], dtype) for name in DEFAULTS}
        results = jax.jit(jax.vmap(lambda columns: run(columns, maximize)))(columns)
        for index, chosen in enumerate(sets):
            make = torch_optimizer(DEFAULTS | chosen, maximize)
            want = optimizer_runs.torch_run(make, params, grads, ABSENT, dtype)
            got = jax.tree.map(lambda leaf: leaf[index], results)
            assert relative_difference(got, want) <= tolerance, (chosen, maximize)


def test_options_and_pairs_in_float64(x64):
    check_options(np.float64, FLOAT64_TOLERANCE, SETS)


def test_options_in_float32():
    check_options(np.float32, FLOAT32_TOLERANCE, [chosen for chosen in SETS if len(chosen) < 2])


def test_defaults_bfloat16_and_mixed_types():
    params, grads = optimizer_runs.gradients(SHAPES, 20)
    leaves = {name: torch.tensor(value).bfloat16() for name, value in params.items()}
    leaves["column"] = leaves["column"].float()  # the first: its precision is the default of all
    ours = {name: jnp.array(leaf.float().numpy(), str(leaf.dtype)[6:]) for name, leaf in leaves.items()}
    theirs, optimizer = torch.optim.Adafactor(leaves.values(), lr=0.1, weight_decay=0.1), adafactor(0.1, weight_decay=0.1)
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    for step in range(20):
        for name, leaf in leaves.items():
            leaf.grad = torch.tensor(grads[name][step]).to(leaf.dtype)
        theirs.step()
        now = {name: jnp.array(leaf.grad.float().numpy(), ours[name].dtype) for name, leaf in leaves.items()}
        updates, state = update(now, state, ours)
        ours = optax.apply_updates(ours, updates)
    assert {name: str(leaf.dtype) for name, leaf in ours.items()} == {
        name: str(leaf.dtype)[6:] for name, leaf in leaves.items()
    }
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), ours)
    # Bfloat16 has 8 bits; some elements are off by the last of them.
    assert relative_difference(wide, {name: leaf.float().numpy() for name, leaf in leaves.items()}) <= 2**-8


def test_a_leaf_without_a_gradient_stays():
    optimizer = adafactor(0.1, weight_decay=0.1)
    params = {"a": jnp.array([-0.0, 1.0]), "b": jnp.full((2, 3), -0.0), "none": jnp.zeros((0, 3))}
    grads = jax.tree.map(jnp.ones_like, params)
    update = jax.jit(optimizer.update)
    _, state = update(grads, optimizer.init(params), params)
    updates, after = update({**grads, "b": None}, state, params)
    assert_identical(optax.apply_updates(params, updates)["b"], params["b"])
    assert_identical(
        {name: tree["b"] for name, tree in after.slots.items()}, {name: tree["b"] for name, tree in state.slots.items()}
    )
    np.testing.assert_array_equal(after.step, [2, 1, 2])
    assert updates["none"].shape == (0, 3)


def test_a_schedule_counts_all_steps(x64):
    params, grads = optimizer_runs.gradients(SHAPES, 20)
    absent = np.arange(20) % 3 == 0

    def make(leaves):
        optimizer = torch.optim.Adafactor(leaves, lr=0.3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    want = optimizer_runs.torch_run(make, params, grads, absent)
    got = jax.jit(lambda: optimizer_runs.our_run(adafactor(step_lr(0.3, 5, gamma=0.5)), params, grads, absent))()
    assert relative_difference(got, want) <= FLOAT64_TOLERANCE


def test_inject_hyperparams(x64):
    params, grads = optimizer_runs.gradients({"matrix": (3, 2)}, 5)
    absent = np.zeros(5, bool)
    options = {"weight_decay": 0.1, "d": 1.5, "beta2_decay": -0.5}
    injected = optax.inject_hyperparams(adafactor)(step_lr(0.3, 2), **options)
    got = jax.jit(lambda: optimizer_runs.our_run(injected, params, grads, absent))()
    plain = jax.jit(lambda: optimizer_runs.our_run(adafactor(step_lr(0.3, 2), **options), params, grads, absent))()
    assert relative_difference(got, plain) <= FLOAT64_TOLERANCE


REFUSED = [
    ({"learning_rate": -1.0}, "learning_rate must be a schedule, or a number of at least 0; got -1.0"),
    ({"learning_rate": np.zeros(2)}, "one number or a schedule; got an array of shape"),
    ({"beta2_decay": 0.1}, "beta2_decay must be a number of at most 0; got 0.1"),
    ({"eps1": -1.0}, "must be None, or a number of at least 0; got -1.0"),
    ({"eps2": -1.0}, "must be a number of at least 0; got -1.0"),
    ({"d": 0.9}, "d must be a number of at least 1; got 0.9"),
    ({"weight_decay": -0.1}, "weight_decay must be a number of at least 0; got -0.1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_as_in_torch(options, message):
    theirs = {name: torch.tensor(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    with pytest.raises(ValueError):  # noqa: PT011 - PyTorch's text
        torch_optimizer(DEFAULTS | theirs)([torch.zeros(1)])
    with pytest.raises(ValueError, match=message):
        our_optimizer(DEFAULTS | options)


def test_refused_parameters():
    with pytest.raises(TypeError, match=r"takes real parameters; got complex64 at params\['a'\]"):
        adafactor().init({"a": jnp.zeros(2, jnp.complex64)})
    with pytest.raises(ValueError, match="adafactor needs the parameters"):
        adafactor().update(jnp.zeros(2), adafactor().init(jnp.zeros(2)))


def test_torch_fails_on_an_empty_parameter():
    empty = torch.zeros(0, requires_grad=True)
    empty.grad = torch.zeros(0)
    with pytest.raises(ZeroDivisionError):
        torch.optim.Adafactor([empty]).step()
