"""100 steps of an MLP on digits: PyTorch with `loss.backward()` for each microbatch, and funcgrad, compared at every step."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from comparison import relative_difference

import funcgrad as fg

STEPS, WINDOW, MICROBATCHES = 100, 64, 4
# Float64: what 100 steps of rounding leave.
TOLERANCE = 1e-11

OPTIMIZERS = {
    "sgd": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        optax.sgd(0.1, momentum=0.9),
    ),
    "adam": (lambda parameters: torch.optim.Adam(parameters, lr=1e-2), optax.adam(1e-2)),
}


def initial_params():
    generator = np.random.default_rng(0)
    return {
        "hidden": {"w": generator.normal(size=(64, 32)) / 8, "b": generator.normal(size=32) / 8},
        "output": {"w": generator.normal(size=(32, 10)) / 6, "b": generator.normal(size=10) / 6},
    }


def windows(digits):
    images, labels = digits
    generator = np.random.default_rng(1)
    for _ in range(STEPS):
        rows = generator.choice(len(labels), WINDOW, replace=False)
        yield images[rows], labels[rows]


def loss_fn(params, batch):
    images, labels = batch
    hidden = jnp.tanh(images @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["output"]["w"] + params["output"]["b"]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def torch_run(digits, make_optimizer):
    """The parameters after each step of PyTorch's own loop, and each window's loss."""
    params = {
        layer: {name: torch.tensor(value, requires_grad=True) for name, value in leaves.items()}
        for layer, leaves in initial_params().items()
    }
    optimizer = make_optimizer([leaf for leaves in params.values() for leaf in leaves.values()])
    for images, labels in windows(digits):
        optimizer.zero_grad()
        window_loss = 0.0
        for index in range(MICROBATCHES):
            rows = slice(index, None, MICROBATCHES)
            x, y = torch.tensor(images[rows]), torch.tensor(labels[rows])
            logits = torch.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"]) @ params["output"]["w"]
            loss = torch.nn.functional.cross_entropy(logits + params["output"]["b"], y) / MICROBATCHES
            loss.backward()
            window_loss += loss.item()
        optimizer.step()
        yield (
            {layer: {name: leaf.detach().numpy().copy() for name, leaf in leaves.items()} for layer, leaves in params.items()},
            window_loss,
        )


def train_step_run(digits, optimizer):
    step = fg.train_step(loss_fn, optimizer, num_microbatches=MICROBATCHES)
    state = fg.TrainState.create(initial_params(), optimizer)
    for batch in windows(digits):
        state, metrics = step(state, batch)
        yield state.params, metrics["loss"]


def micro_steps_run(digits, optimizer):
    steps = fg.micro_steps(loss_fn, optimizer)
    state = fg.TrainState.create(initial_params(), optimizer)
    for images, labels in windows(digits):
        losses = []
        for index in range(MICROBATCHES):
            rows = slice(index, None, MICROBATCHES)
            state, loss = steps.backward(state, (images[rows], labels[rows]))
            losses.append(float(loss))
        state, _ = steps.update(state)
        yield state.params, np.mean(losses)


@pytest.mark.parametrize("run", [train_step_run, micro_steps_run])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_at_every_step(x64, digits, name, run):
    make_torch_optimizer, optimizer = OPTIMIZERS[name]
    worst = 0.0
    theirs, ours = torch_run(digits, make_torch_optimizer), run(digits, optimizer)
    for (params, loss), (our_params, our_loss) in zip(theirs, ours, strict=True):
        assert our_params["hidden"]["w"].dtype == np.float64
        worst = max(worst, relative_difference(our_params, params), abs(our_loss - loss) / loss)
    assert worst <= TOLERANCE
    assert loss < 0.2  # it learned: the comparison is not one of standstills
