"""What is refused: the values that PyTorch refuses, and what does not fit the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optimizer_twins as twins
import pytest
import torch

from funcgrad import torch_optim

NAN = float("nan")
NUMBERS = (-1.0, -1e-9, -0.0, 0.0, 0.5, 1.0, 1.5, NAN)
PAIRS = ((0.9, 1.0), (1.0, 0.9), (-0.1, 0.9), (0.0, 0.9), (0.9, 0.0), (0, 0.9), (NAN, 0.9), (0.9, NAN))
ETAS = ((0.5, 1.2), (0.0, 1.2), (1.0, 1.2), (0.5, 1.0), (-0.5, 1.2), (1.2, 0.5), (0.5, NAN))
TWO_EPS = ((None, 1e-3), (-1.0, 1e-3), (1e-3, -1.0), (NAN, 1e-3), (0.0, 0.0))


@pytest.mark.parametrize("name", twins.NAMES)
def test_the_same_values_are_refused_as_in_pytorch(name):
    # What PyTorch's Muon refuses of these at the first step only is in test_muon.
    at_once = {"ns_coefficients": (), "ns_steps": (), "adjust_lr_fn": ("original", "none")}
    choices = (
        at_once
        | {"betas": PAIRS, "etas": ETAS, "step_sizes": ((1.0, 0.1),)}
        | ({"eps": TWO_EPS} if name == "adafactor" else {})
    )
    refused = 0
    for option, usual in twins.TWINS[name].options.items():
        for value in choices.get(option, (True, False) if isinstance(usual, bool) else NUMBERS):
            options = {option: value}
            try:
                twins.in_torch(name, options, [torch.zeros(twins.TWINS[name].alone, requires_grad=True)])
            except ValueError:
                refused += 1
                with pytest.raises(ValueError, match=r"(must be|must have) .*; got "):
                    twins.here(name, options)
            else:
                twins.here(name, options)
    assert refused >= 3


def test_defaults_are_pytorchs():
    import inspect

    own = {"lr": "learning_rate"}
    chosen_by_pytorch = {"foreach", "fused", "capturable", "differentiable"}
    for name in twins.NAMES:
        theirs = inspect.signature(twins.TWINS[name].torch_class).parameters
        mine = inspect.signature(getattr(torch_optim, name)).parameters
        wanted = {own.get(key, key): each.default for key, each in theirs.items() if key not in {"params", *chosen_by_pytorch}}
        assert {key: each.default for key, each in mine.items()} == wanted


def test_more_than_one_learning_rate():
    with pytest.raises(ValueError, match=r"learning_rate must be one number or a schedule; got an array of shape \(2,\)"):
        torch_optim.adam(jnp.ones(2))
    with pytest.raises(TypeError, match=r"learning_rate must be a number or a schedule; got dict. The parameters go to init"):
        torch_optim.adamw({"w": jnp.ones(2)})
    for betas in (0.9, (0.9,), (0.9, 0.99, 0.999)):
        with pytest.raises(ValueError, match="betas must be two numbers; got"):
            torch_optim.nadam(betas=betas)
    for options in ({"eps": None}, {"weight_decay": "a"}, {"betas": (None, None)}, {"betas": ("a", "b")}):
        with pytest.raises(ValueError, match=r"must be .*; got "):
            torch_optim.adamax(**options)
    with pytest.raises(ValueError, match=r"eps must be two numbers, the first of which may be None; got 0\.9"):
        torch_optim.adafactor(eps=0.9)
    params = jnp.ones(3)
    one = torch_optim.sgd(jnp.full(1, 0.5))
    assert one.update(params, one.init(params), params)[0].tolist() == [-0.5] * 3
    with pytest.raises(ValueError, match="betas must be two floats or two arrays; got"):
        torch_optim.adam(betas=(0.9, np.zeros(())))


def test_what_does_not_fit_the_parameters():
    params = {"w": jnp.ones(3), "index": jnp.arange(2)}
    optimizer = torch_optim.adamw()
    state = optimizer.init(params)
    for grads, error, text in (
        ({"w": jnp.ones(3)}, ValueError, "the gradients must have the structure of the parameters, None where there is none"),
        (
            {"w": jnp.ones(()), "index": None},
            ValueError,
            r"the gradient of params\['w'\] must have its shape, \(3,\); got \(\)",
        ),
        ({"w": None, "index": jnp.ones(2)}, TypeError, r"params\['index'\] is int32 and cannot be trained"),
        (
            {"w": jnp.ones(3) * 1j, "index": None},
            TypeError,
            r"\['w'\] is float32, but its gradient is complex64: take its real",
        ),
    ):
        with pytest.raises(error, match=text):
            optimizer.update(grads, state, params)
    with pytest.raises(ValueError, match=r"need the parameters: call update\(grads, state, params\)"):
        optimizer.update(params, state)
    with pytest.raises(ValueError, match="per_parameter needs the parameters"):
        torch_optim.per_parameter(optimizer).update(params, None)
    updates, _ = optimizer.update({"w": jnp.ones(3), "index": None}, state, params)
    assert updates["index"].dtype == jnp.int32
    assert updates["index"].tolist() == [0, 0]


def test_numbers_that_are_traced():
    params = jnp.ones(3)

    @jax.jit
    def step(rate, momentum, betas):
        first, second = torch_optim.sgd(rate, momentum), torch_optim.adam(rate, betas)
        return [each.update(params, each.init(params), params)[0] for each in (first, second)]

    got = step(0.5, 0.9, (0.9, 0.99))
    for update, optimizer in zip(got, (torch_optim.sgd(0.5, 0.9), torch_optim.adam(0.5, (0.9, 0.99))), strict=True):
        want = optimizer.update(params, optimizer.init(params), params)[0]
        np.testing.assert_allclose(update, want, rtol=1e-5)


def test_a_schedule_in_the_place_of_a_number():
    cycle = torch_optim.schedules.one_cycle_lr(0.1, total_steps=10)
    with pytest.raises(TypeError, match=r"momentum must be a number of at least 0; got a function.* optax.inject_hyperparams"):
        torch_optim.sgd(cycle, momentum=cycle.momentum)


def test_the_first_beta_alone_may_be_an_array():
    params = jnp.ones(3)
    mixed, plain = torch_optim.adam(betas=(jnp.asarray(0.9), 0.999)), torch_optim.adam(betas=(0.9, 0.999))
    got, want = (each.update(params, each.init(params), params)[0] for each in (mixed, plain))
    np.testing.assert_allclose(got, want, rtol=1e-5)
