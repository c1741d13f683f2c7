"""The optimizers inside what people put them in: the same steps everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from comparison import FLOAT32_TOLERANCE, assert_identical, relative_difference

import funcgrad as fg
from funcgrad import stateful, torch_optim

MAX_NORM, STEPS = 0.5, 4
MATRIX = torch_optim.adamw(0.1, weight_decay=0.5)
BIAS = torch_optim.sgd(0.1, momentum=0.9, dampening=0.5)
LABELS = {"w": "matrix", "b": "bias"}
WRAPPED = {
    "multi_transform": optax.multi_transform({"matrix": MATRIX, "bias": BIAS}, LABELS),
    "masked": optax.chain(optax.masked(MATRIX, {"w": True, "b": False}), optax.masked(BIAS, {"w": False, "b": True})),
}
CHAINS = {name: optax.chain(torch_optim.clip_grad_norm(MAX_NORM), inner) for name, inner in WRAPPED.items()}
X = np.sin(np.arange(24.0, dtype=np.float32)).reshape(8, 3)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - params["b"] + 1) ** 2)


def begin():
    return {"w": jnp.arange(3.0), "b": jnp.array(0.5)}


def in_pytorch():
    w, b = torch.arange(3.0, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    optimizers = (
        torch.optim.AdamW([w], lr=0.1, weight_decay=0.5),
        torch.optim.SGD([b], lr=0.1, momentum=0.9, dampening=0.5),
    )
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ((torch.tensor(X) @ w - b + 1) ** 2).mean().backward()
        torch.nn.utils.clip_grad_norm_([w, b], MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
    return {"w": w.detach().numpy(), "b": b.detach().numpy()}


def by_hand(optimizer, *, jit, num_microbatches=1):
    value_and_grad = fg.value_and_grad(loss_fn, num_microbatches=num_microbatches)

    def step(params, state):
        _, grads = value_and_grad(params, X)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    params = begin()
    state = optimizer.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def by_train_step(optimizer):
    step = fg.train_step(loss_fn, optimizer, num_microbatches=2)
    state = fg.TrainState.create(begin(), optimizer)
    for _ in range(STEPS):
        state, _ = step(state, X)
    return state.params


def in_the_implicit_face():
    params = stateful.parameters(begin())
    optimizer = stateful.Optimizer([(params["w"], MATRIX), (params["b"], BIAS)])
    for _ in range(STEPS):
        optimizer.zero_grad()
        stateful.evaluate(loss_fn, params, X).backward()
        stateful.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
    return stateful.arrays(params)


RUNS = {
    "eager": lambda: by_hand(CHAINS["multi_transform"], jit=False),
    "jit": lambda: by_hand(CHAINS["multi_transform"], jit=True),
    "masked": lambda: by_hand(CHAINS["masked"], jit=True),
    "microbatches": lambda: by_hand(CHAINS["multi_transform"], jit=True, num_microbatches=2),
    "train_step": lambda: by_train_step(CHAINS["multi_transform"]),
    "stateful": in_the_implicit_face,
}


@pytest.mark.parametrize("name", RUNS)
def test_the_same_everywhere(name):
    assert relative_difference(RUNS[name](), in_pytorch()) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("name", CHAINS)
def test_none_passes_through_chains_and_masks(name):
    params, optimizer = begin(), CHAINS[name]

    @jax.jit
    def step(grads, state):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    moved, state = step({"w": jnp.ones(3), "b": None}, optimizer.init(params))
    assert_identical(moved["b"], params["b"])
    assert (moved["w"] != params["w"]).all()
    moved, _ = step({"w": None, "b": jnp.ones(())}, state)
    assert_identical(moved["w"], params["w"])
    assert moved["b"] != params["b"]


def test_complex_parameters_with_the_conjugate_of_jax_s_gradient():
    start = np.array([1 + 2j, -0.5j], np.complex64)
    theirs = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.AdamW([theirs], lr=0.1)
    conjugate = optax.stateless(lambda grads, params: jax.tree.map(jnp.conj, grads))
    ours = optax.chain(conjugate, torch_optim.adamw(0.1))
    state = fg.TrainState.create(jnp.asarray(start), ours)
    step = fg.train_step(lambda z, x: jnp.mean(jnp.abs(z[0] * x + z[1] * z[0] - 1j) ** 2), ours, num_microbatches=2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (theirs[0] * torch.tensor(X[:, 0]) + theirs[1] * theirs[0] - 1j).abs().square().mean().backward()
        optimizer.step()
        state, _ = step(state, X[:, 0])
    assert relative_difference(state.params, theirs.detach().numpy()) <= FLOAT32_TOLERANCE


def test_hyperparameters_that_are_set_between_steps():
    """A momentum that was 0 begins its buffer when it is not, and without dampening the first time, as in PyTorch."""
    w, p = torch.tensor(1.0, requires_grad=True), stateful.Parameter(jnp.array(1.0))
    theirs = torch.optim.SGD([w], lr=0.1, dampening=0.5)
    injected = optax.inject_hyperparams(torch_optim.sgd)(learning_rate=0.1, dampening=0.5)
    ours = stateful.Optimizer(injected, p)
    for rate, momentum in ((0.1, 0.0), (0.1, 0.0), (0.05, 0.9), (0.05, 0.9), (0.05, 0.0), (0.1, 0.5)):
        theirs.param_groups[0].update(lr=rate, momentum=momentum)
        ours.set_hyperparams(learning_rate=rate, momentum=momentum)
        w.grad, p.grad = torch.tensor(2.0), jnp.array(2.0)
        theirs.step()
        ours.step()
        np.testing.assert_allclose(p.data, w.detach().numpy(), rtol=FLOAT32_TOLERANCE)
