"""Random programs over a small network with a tied parameter, in PyTorch and in the implicit face, compared at each step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcgrad import stateful

# A program has at most 12 instructions of float64 arithmetic.
TOLERANCE = 1e-10
NAMES = ("a", "b", "tied")
X = np.array([[0.5, -1.0], [1.5, 0.25]])


def torch_loss(params, detached, constant):
    hidden = torch.tensor(X) @ (params["a"].detach() if constant else params["a"]) * params["tied"]
    hidden = hidden.detach() if detached else hidden
    return ((hidden + params["b"]) * params["tied"]).pow(2).mean()


def loss_fn(params, x, detached):
    hidden = x @ params["a"] * params["tied"]
    hidden = jax.lax.stop_gradient(hidden) if detached else hidden
    return jnp.mean(((hidden + params["b"]) * params["again"]) ** 2)


def implicit_loss(tree, detached, constant):
    tree = {**tree, "a": tree["a"].detach()} if constant else tree
    return stateful.evaluate(loss_fn, tree, X, detached)


names = st.sampled_from(NAMES)
instructions = st.one_of(
    st.tuples(st.just("backward"), st.tuples(st.booleans(), st.booleans())),
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.just("zero_one"), st.tuples(names, st.booleans())),
    st.tuples(st.just("step"), st.none()),
    st.tuples(st.just("freeze"), names),
    st.tuples(st.just("unfreeze"), names),
)


@given(st.lists(instructions, min_size=1, max_size=12))
@settings(max_examples=60)
def check_programs(program):  # noqa: PLR0912
    initial = {"a": np.array([0.3, -0.7]), "b": np.array([0.1, 0.2]), "tied": np.array(1.5)}
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in initial.items()}
    shared = jnp.asarray(initial["tied"])
    tree = stateful.parameters(
        {"a": jnp.asarray(initial["a"]), "b": jnp.asarray(initial["b"]), "tied": shared, "again": shared}
    )
    params = {name: tree[name] for name in NAMES}
    theirs = torch.optim.SGD(tensors.values(), lr=0.05, momentum=0.9)
    ours = stateful.Optimizer(optax.sgd(0.05, momentum=0.9), tree)
    for instruction, argument in program:
        if instruction == "backward":
            errors = []
            for run in (
                lambda argument=argument: torch_loss(tensors, *argument).backward(),
                lambda argument=argument: implicit_loss(tree, *argument).backward(),
            ):
                try:
                    run()
                    errors.append(None)
                except RuntimeError as error:
                    errors.append(type(error))
            assert errors[0] == errors[1]
        elif instruction == "zero_grad":
            theirs.zero_grad(set_to_none=argument)
            ours.zero_grad(set_to_none=argument)
        elif instruction == "zero_one":
            name, to_none = argument
            if to_none:
                tensors[name].grad, params[name].grad = None, None
            else:
                if tensors[name].grad is not None:
                    tensors[name].grad.zero_()
                params[name].zero_grad(set_to_none=False)
        elif instruction == "step":
            theirs.step()
            ours.step()
        else:
            tensors[argument].requires_grad_(instruction == "unfreeze")
            params[argument].requires_grad = instruction == "unfreeze"
        for name in NAMES:
            np.testing.assert_allclose(params[name].data, tensors[name].detach().numpy(), rtol=TOLERANCE)
            assert (params[name].grad is None) == (tensors[name].grad is None)
            if params[name].grad is not None:
                np.testing.assert_allclose(params[name].grad, tensors[name].grad.numpy(), rtol=TOLERANCE, atol=TOLERANCE)


def test_random_programs(x64):
    check_programs()
