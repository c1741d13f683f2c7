"""State for each parameter, and across the border to PyTorch and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_twins as twins
import pytest
import torch
from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, assert_identical, relative_difference

from funcgrad import torch_optim


@pytest.fixture
def double_precision(x64):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


HALF = twins.STEPS // 2
RICH = [twins.rich(name) for name in twins.NAMES]
OURS = tuple(twins.here(name, options) for name, options in zip(twins.NAMES, RICH, strict=True))


def with_none(grads):
    return {"a": None, "b": grads}


def test_none_keeps_every_bit():
    of_any_shape = [each for name, each in zip(twins.NAMES, OURS, strict=True) if name in twins.OF_ANY_SHAPE]
    optimizers = (
        *of_any_shape,
        torch_optim.per_parameter(optax.adam(0.1)),
        torch_optim.per_parameter(optax.sgd(0.1, momentum=0.9)),
    )
    params = {"a": jnp.array([-0.0, 0.0, 1.5, jnp.nan, jnp.inf]), "b": jnp.array([1.0, -2.0])}

    @jax.jit
    def step(grads, states):
        pairs = [each.update(grads, state, params) for each, state in zip(optimizers, states, strict=True)]
        return [optax.apply_updates(params, updates) for updates, _ in pairs], [state for _, state in pairs]

    all_present = jax.tree.map(jnp.ones_like, params)
    _, states = step(all_present, [each.init(params) for each in optimizers])
    moved, later = step(with_none(jnp.ones(2)), states)
    for new, before, after in zip(moved, states, later, strict=True):
        assert_identical(new["a"], params["a"])
        assert (new["b"] != params["b"]).all()
        if hasattr(before, "states"):
            assert_identical(after.states["a"], before.states["a"])
            continue
        for name, tree in before.slots.items():
            assert_identical(after.slots[name]["a"], tree["a"])
        for name, number in before.numbers.items():
            assert_identical(after.numbers[name][0], number[0])
        if before.step is not None:
            assert after.step.tolist() == [1, 2]
    updates, _ = OURS[0].update(with_none(jnp.ones(2)), states[0], params)
    assert np.signbit(updates["a"]).all()  # added without a compiler, too, it leaves the sign of -0.0
    assert_identical(optax.apply_updates(params, updates)["a"], params["a"])


@pytest.mark.usefixtures("double_precision")
def test_per_parameter_makes_plain_optax_skip_as_pytorch_does():
    decayed = optax.add_decayed_weights(0.1)
    plain = {
        "adamw": (optax.adamw(1e-3, weight_decay=1e-2), {}),
        "adam": (optax.chain(decayed, optax.adam(1e-3)), {"weight_decay": 0.1}),
        "sgd": (optax.chain(decayed, optax.sgd(1e-3, momentum=0.9)), {"weight_decay": 0.1, "momentum": 0.9}),
    }
    optimizers = tuple(torch_optim.per_parameter(optimizer) for optimizer, _ in plain.values())
    problems = [twins.problem(name, "float64", 2) for name in plain]
    params = [[jnp.asarray(param) for param in given.params] for given in problems]
    passed, _ = twins.run_here(
        optimizers, params, twins.begin(optimizers, params), [given.grads for given in problems], twins.IN_TURNS
    )
    for (name, (_, options)), mine, given in zip(plain.items(), passed, problems, strict=True):
        theirs, _ = twins.run_torch(name, options, given, "float64", twins.IN_TURNS)
        assert twins.worst_difference(mine, theirs, given.params) <= FLOAT64_TOLERANCE


@pytest.mark.usefixtures("double_precision")
def test_a_run_crosses_the_border_both_ways():
    problems = [twins.problem(name, "float64", 1) for name in twins.NAMES]
    saved, unbroken = {}, {}
    for name, options, given in zip(twins.NAMES, RICH, problems, strict=True):

        def save(step, optimizer, params, name=name):
            if step == HALF - 1:
                entries = optimizer.state_dict()["state"]
                arrays = {
                    index: {key: value.numpy().copy() for key, value in entry.items()} for index, entry in entries.items()
                }
                saved[name] = arrays, [twins.as_numpy(param).copy() for param in params]

        unbroken[name], _ = twins.run_torch(name, options, given, "float64", twins.ALWAYS, save)

    begun = [[jnp.asarray(param) for param in given.params] for given in problems]
    halves = [[[grad[part] for grad in given.grads] for given in problems] for part in (slice(HALF), slice(HALF, None))]
    passed, states = twins.run_here(OURS, begun, twins.begin(OURS, begun), halves[0], twins.ALWAYS)
    params = [[jnp.asarray(param) for param in saved[name][1]] for name in twins.NAMES]
    loaded = [
        torch_optim.from_torch_state(saved[name][0], each, optimizer)
        for name, each, optimizer in zip(twins.NAMES, params, OURS, strict=True)
    ]
    assert jax.tree.structure(loaded) == jax.tree.structure(states)
    went_on, _ = twins.run_here(OURS, params, loaded, halves[1], twins.ALWAYS)
    for name, options, given, first, second, state in zip(twins.NAMES, RICH, problems, passed, went_on, states, strict=True):
        rest = [array[HALF:] for array in unbroken[name]]
        assert twins.worst_difference(second, rest, given.params) <= twins.TWINS[name].float64

        tensors = [torch.tensor(np.asarray(array[-1])).requires_grad_() for array in first]
        optimizer, _ = twins.in_torch(name, options, tensors)
        entries = torch_optim.to_torch_state(state, given.params)
        assert all(isinstance(array, np.ndarray) for entry in entries.values() for array in entry.values())
        as_tensors = {index: {key: torch.from_numpy(array) for key, array in entry.items()} for index, entry in entries.items()}
        optimizer.load_state_dict({"state": as_tensors, "param_groups": optimizer.state_dict()["param_groups"]})
        for step in range(HALF, twins.STEPS):
            for tensor, grad in zip(tensors, given.grads, strict=True):
                tensor.grad = torch.tensor(grad[step])
            optimizer.step()
        last = [array[-1:] for array in unbroken[name]]
        got = [twins.as_numpy(tensor)[None] for tensor in tensors]
        assert twins.worst_difference(got, last, given.params) <= twins.TWINS[name].float64


def test_the_state_of_bfloat16_and_of_a_parameter_without_steps():
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones((), jnp.bfloat16)}
    optimizer = optax.chain(torch_optim.clip_grad_norm(1.0), torch_optim.adamw(lambda count: 0.1 / (1 + count)))
    _, state = optimizer.update({"a": jnp.ones(3, jnp.bfloat16), "b": None}, optimizer.init(params), params)
    entries = torch_optim.to_torch_state(state, params)
    assert list(entries) == [0]
    assert {name: array.dtype for name, array in entries[0].items()} == dict.fromkeys(
        ["step", "exp_avg", "exp_avg_sq"], np.dtype(np.float32)
    )
    assert_identical(torch_optim.from_torch_state(entries, params, optimizer), state)
    later = torch_optim.from_torch_state(entries, params, optimizer, count=7)
    assert optax.tree.get(later, "calls") == 7


def test_states_that_do_not_fit():
    params = {"w": jnp.ones(2)}
    adam, sgd = torch_optim.adam(), torch_optim.sgd(momentum=0.9)
    entry = {"step": np.array(1.0), "exp_avg": np.ones(2), "exp_avg_sq": np.ones(2)}
    read = torch_optim.from_torch_state
    for state_dict, optimizer, text in (
        ({"state": {0: entry}}, adam, r'expected optimizer.state_dict\(\)\["state"\]'),
        ({1: entry}, adam, r"must have keys from 0 to 0, one for each parameter; got 1"),
        (
            {0: entry},
            sgd,
            r"state_dict\[0\] must have \['momentum_buffer'\], the state of this transformation; got \['exp_avg'",
        ),
        ({0: entry | {"exp_avg": np.ones(3)}}, adam, r"\['exp_avg'\] must have the shape \(2,\) for parameter 0; got \(3,\)"),
        ({0: entry}, optax.adam(0.1), r"one optimizer of torch_optim in it; got one with 0"),
        (
            {0: {"momentum_buffer": np.ones(2)}},
            torch_optim.sgd(lambda count: 0.1, momentum=0.9),
            r"tells no step to ask the schedule with: give count=",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            read(state_dict, params, optimizer)
    with pytest.raises(ValueError, match="the state is of 1 parameters, but params has 2"):
        torch_optim.to_torch_state(adam.init(params), {"w": jnp.ones(2), "b": jnp.ones(())})
    with pytest.raises(ValueError, match="the state is not of these parameters: Dict key mismatch"):
        torch_optim.to_torch_state(adam.init(params), {"v": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"its exp_avg of parameter 0 has the shape \(2,\), the parameter \(3,\)"):
        torch_optim.to_torch_state(adam.init(params), {"w": jnp.ones(3)})
    for step in (-5.0, 5.5, float("nan"), np.ones(2), "5"):
        with pytest.raises(ValueError, match=r"state_dict\[0\]\['step'\] must be a whole number of at least 0; got"):
            read({0: entry | {"step": step}}, params, adam)
    with pytest.raises(ValueError, match=r"count must be a whole number of at least 0; got -3"):
        read({0: entry}, params, torch_optim.adam(lambda count: 0.1), count=-3)
    with pytest.raises(ValueError, match=r"state_dict\[0\]\['exp_avg'\] is complex, but parameter 0 is real"):
        read({0: entry | {"exp_avg": np.ones(2) * 1j}}, params, adam)
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    for inner in (adam, sgd):
        masked = optax.masked(inner, {"w": True, "b": False})
        with pytest.raises(ValueError, match=r"Under optax.masked and optax.multi_transform, give the optimizer inside"):
            read({0: entry}, params, masked)
        with pytest.raises(ValueError, match=r"Under optax.masked and optax.multi_transform, give the optimizer inside"):
            torch_optim.to_torch_state(masked.init(params), params)
    params = {"w": jnp.ones(2)}
    assert torch_optim.to_torch_state(torch_optim.sgd().init(params), params) == {}
    assert read({}, params, torch_optim.sgd()) == torch_optim.sgd().init(params)
    assert read({0: {"momentum_buffer": None}}, params, sgd).step.tolist() == [0]


def test_muon_and_adafactor_cross_the_border():
    """Muon counts no steps, and Adafactor's arrays have other shapes than its parameters, or are not there."""
    random = np.random.default_rng(0)
    for make, torch_class, shapes in (
        (torch_optim.muon, torch.optim.Muon, [(3, 2), (2, 4)]),
        (torch_optim.adafactor, torch.optim.Adafactor, [(3, 2), (5,)]),
    ):
        params = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
        grads = [random.normal(size=(2, *shape)).astype(np.float32) for shape in shapes]
        optimizer = make(0.1)
        update = jax.jit(optimizer.update)
        updates, state = update([grad[0] for grad in grads], optimizer.init(params), params)
        params = optax.apply_updates(params, updates)
        entries = torch_optim.to_torch_state(state, params)
        assert_identical(torch_optim.from_torch_state(entries, params, optimizer), state)

        tensors = [torch.tensor(np.asarray(param), requires_grad=True) for param in params]
        theirs = torch_class(tensors, lr=0.1)
        entries = {index: {name: torch.from_numpy(array) for name, array in entry.items()} for index, entry in entries.items()}
        theirs.load_state_dict({"state": entries, "param_groups": theirs.state_dict()["param_groups"]})
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = torch.tensor(grad[1])
        theirs.step()
        updates, _ = update([grad[1] for grad in grads], state, params)
        got = optax.apply_updates(params, updates)
        assert relative_difference(got, [tensor.detach().numpy() for tensor in tensors]) <= FLOAT32_TOLERANCE


def test_injected_schedules_go_on():
    cycle = torch_optim.schedules.one_cycle_lr(0.1, total_steps=10)
    optimizer = optax.inject_hyperparams(torch_optim.sgd)(cycle, momentum=cycle.momentum)
    params, grads = jnp.ones(2), jnp.ones(2)
    state = optimizer.init(params)
    for _ in range(4):
        _, state = optimizer.update(grads, state, params)
    entries = torch_optim.to_torch_state(state, params)
    loaded = torch_optim.from_torch_state(entries, params, optimizer, count=4)
    got, want = optimizer.update(grads, loaded, params), optimizer.update(grads, state, params)
    assert_identical(got[0], want[0])
    assert_identical(got[1].hyperparams, want[1].hyperparams)
    with pytest.raises(ValueError, match="tells no step to ask the schedule with"):
        torch_optim.from_torch_state(entries, params, optimizer)
