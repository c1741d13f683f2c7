"""What is trained changes in the middle of a run: moments of what stays trained stay, of all optimizers of optax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, assert_identical, relative_difference
from flax import nnx

import funcgrad as fg

NAMES = ("a", "b", "c")
X = np.sin(np.arange(24.0)).reshape(8, 3)


def make_params():
    return {"a": jnp.array([0.5, -1.0, 2.0]), "b": jnp.array([1.0, 0.25, -0.5]), "c": {"w": jnp.eye(3) + 0.1}}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["c"]["w"] * params["a"]) @ params["b"] - 1) ** 2)


def trains(names):
    return {name: name in names for name in NAMES}


def gradients(params, step):
    return jax.tree.map(lambda leaf: jnp.sin(leaf + step), params)


def run(optimizer, phases, steps_each=2):
    """Updates in phases, each with the names of what is trained in it. Not jitted, so that nothing is compiled."""
    state = fg.TrainState.create(make_params(), optimizer, trainable=trains(phases[0]))
    for phase, names in enumerate(phases):
        state = state.with_trainable(optimizer, trains(names))
        for step in range(steps_each):
            selected = {
                name: leaf if name in names else jax.tree.map(lambda _: None, leaf) for name, leaf in state.params.items()
            }
            grads = gradients(selected, phase * steps_each + step)
            updates, opt_state = optimizer.update(grads, state.opt_state, selected)
            params = {**state.params, **{name: optax.apply_updates(selected, updates)[name] for name in names}}
            state = dataclasses.replace(state, params=params, opt_state=opt_state, step=state.step + 1)
    return state


def by_hand(make_optimizer, phases, steps_each=2):
    """An optimizer for each leaf of the dict, whose steps are left out while it is frozen, and which is new when it thaws."""
    params, states, optimizer = make_params(), {}, make_optimizer()
    for phase, names in enumerate(phases):
        states = {name: states[name] if name in states else optimizer.init(params[name]) for name in names}
        for step in range(steps_each):
            for name in names:
                grads = gradients(params[name], phase * steps_each + step)
                updates, states[name] = optimizer.update(grads, states[name], params[name])
                params[name] = optax.apply_updates(params[name], updates)
    return params


# Rules that treat each leaf by itself, and keep nothing that counts steps, so that a leaf that begins late begins afresh.
COUNTLESS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "decay": lambda: optax.chain(optax.trace(0.9, nesterov=True), optax.add_decayed_weights(0.1), optax.scale(-0.05)),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.5),
    "lion": lambda: optax.lion(1e-2),
    "none": lambda: optax.sgd(0.1),
}
# Rules with counts, for leaves that stay.
COUNTING = {
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 8)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=lambda count: 1e-2 / (1 + count)),
    "masked": lambda: optax.chain(
        optax.masked(optax.trace(0.9), lambda params: jax.tree.map(lambda leaf: leaf.ndim == 1, params)), optax.sgd(0.1)
    ),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "by label": lambda: optax.multi_transform(
        {1: optax.adam(1e-2), 2: optax.sgd(0.1, momentum=0.9)}, lambda params: jax.tree.map(jnp.ndim, params)
    ),
    "schedule-free": lambda: optax.contrib.schedule_free_sgd(0.1),
}


@pytest.mark.parametrize("name", [*COUNTLESS, *COUNTING])
def test_freezing_is_leaving_out(name):
    make = {**COUNTLESS, **COUNTING}[name]
    phases = ("abc", "ac", "a")
    state = run(make(), phases)
    assert relative_difference(state.params, by_hand(make, phases)) <= FLOAT32_TOLERANCE
    assert state.step == 6


@pytest.mark.parametrize("name", COUNTLESS)
def test_what_thaws_begins_afresh(name):
    phases = ("ab", "bc", "abc", "a")
    state = run(COUNTLESS[name](), phases)
    assert relative_difference(state.params, by_hand(COUNTLESS[name], phases)) <= FLOAT32_TOLERANCE


def test_what_is_kept_and_what_is_new():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1e-2, 0, 100)))
    step = fg.train_step(loss_fn, optimizer)
    state = fg.TrainState.create(make_params(), optimizer, trainable=trains("ab"), compensated=True)
    state, _ = step(state, X)
    before = jax.tree.map(jnp.copy, state)
    state = state.with_trainable(optimizer, trains("bc"))
    assert_identical((state.params, state.step), (before.params, before.step))
    (old, old_schedule), (new, new_schedule) = before.opt_state[1], state.opt_state[1]
    for old_moment, new_moment in ((old.mu, new.mu), (old.nu, new.nu)):
        assert new_moment["a"] is None
        assert_identical(new_moment["b"], old_moment["b"])
        assert_identical(new_moment["c"], {"w": jnp.zeros((3, 3))})
    assert (new.count, new_schedule.count) == (old.count, old_schedule.count) == (1, 1)
    assert state.buffer.grads["a"] is None
    assert jax.tree.structure(state.buffer.compensation[0]) == jax.tree.structure(state.buffer.grads)
    state, metrics = step(state, X)
    grads = jax.grad(loss_fn)(before.params, X)
    wanted = optax.tree.norm({name: grads[name] for name in "bc"})
    assert abs(metrics["grad_norm"] - wanted) <= FLOAT32_TOLERANCE * wanted


def test_all_again_and_modules():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    optimizer = optax.adam(1e-2)
    step = fg.train_step(lambda network, x: jnp.mean(network.second(jnp.tanh(network.first(x))) ** 2), optimizer)
    whole = fg.TrainState.create(Network(nnx.Rngs(0)), optimizer)
    first, second = (np.asarray(layer.kernel[...]) for layer in (whole.params.first, whole.params.second))
    state = whole.with_trainable(optimizer, lambda path, leaf: "second" in jax.tree_util.keystr(path))
    state, _ = step(state, X)
    assert np.array_equal(state.params.first.kernel[...], first)
    assert not np.array_equal(state.params.second.kernel[...], second)
    again = state.with_trainable(optimizer, None)
    assert jax.tree.structure(again) == jax.tree.structure(whole)
    assert np.array_equal(again.opt_state[0].mu.second.kernel[...], state.opt_state[0].mu.second.kernel[...])
    assert_identical(again.with_trainable(optimizer, None), again)


@pytest.mark.parametrize(
    ("make_theirs", "optimizer", "phases"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9), ("ab", "a", "ab")),
        (lambda params: torch.optim.Adam(params, lr=1e-2), optax.adam(1e-2), ("ab", "a")),
    ],
    ids=["sgd", "adam"],
)
def test_it_is_requires_grad_of_pytorch(x64, make_theirs, optimizer, phases):
    """A frozen parameter's `.grad` is None, and the optimizer passes it over. Its momentum, which PyTorch keeps, is dropped."""
    initial = {"a": np.array([0.5, -1.0, 2.0]), "b": np.array([1.0, 0.25, -0.5])}
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in initial.items()}
    theirs = make_theirs(tensors.values())
    step = fg.train_step(lambda p, x: jnp.mean((jnp.tanh(x * p["a"]) @ p["b"] - 1) ** 2), optimizer)
    state = fg.TrainState.create({name: jnp.array(value) for name, value in initial.items()}, optimizer)
    for names in phases:
        state = state.with_trainable(optimizer, {name: name in names for name in initial})
        for name, tensor in tensors.items():
            if name in names and not tensor.requires_grad:
                theirs.state[tensor].clear()
            tensor.requires_grad_(name in names)
        for _ in range(5):
            theirs.zero_grad()
            (torch.tanh(torch.tensor(X) * tensors["a"]) @ tensors["b"] - 1).pow(2).mean().backward()
            theirs.step()
            state, _ = step(state, X)
        expected = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
        assert relative_difference(state.params, expected) <= FLOAT64_TOLERANCE


class TestErrors:
    optimizer = optax.adam(1e-2)

    def _state(self, **options):
        return fg.TrainState.create(make_params(), self.optimizer, **options)

    @pytest.mark.parametrize(("skip_nonfinite", "x"), [(False, X), (True, X * np.nan)], ids=["added", "skipped"])
    def test_in_the_middle_of_a_window(self, skip_nonfinite, x):
        steps = fg.micro_steps(loss_fn, self.optimizer, skip_nonfinite=skip_nonfinite)
        state, _ = steps.backward(self._state(), x)
        with pytest.raises(
            ValueError, match=r"the buffer holds 1 microbatch of a window that has not ended.*call update first"
        ):
            state.with_trainable(self.optimizer, trains("a"))
        state, _ = steps.update(state)
        assert state.with_trainable(self.optimizer, trains("a")).buffer.grads["b"] is None

    def test_in_a_trace(self):
        with pytest.raises(ValueError, match=r"call it outside of jax.jit, between two steps"):
            jax.jit(lambda state: state.with_trainable(self.optimizer, trains("a")))(self._state())

    def test_another_optimizer(self):
        with pytest.raises(ValueError, match=r"the state's opt_state is not of this optimizer"):
            self._state().with_trainable(optax.sgd(0.1), trains("a"))
        with pytest.raises(TypeError, match=r"optimizer must be an optax transformation.*got float32\[\]"):
            self._state().with_trainable(0.1, trains("a"))

    def test_another_dtype(self):
        state = self._state(dtype=jnp.bfloat16)
        with pytest.raises(ValueError, match=r"params\['a'\] were accumulated in bfloat16, .* float32. .*dtype='bfloat16'"):
            state.with_trainable(self.optimizer, trains("a"))
        state = state.with_trainable(self.optimizer, trains("a"), dtype=jnp.bfloat16)
        assert state.buffer.grads["a"].dtype == jnp.bfloat16

    @pytest.mark.parametrize("names", ["a", "bc", "c"])
    def test_what_is_kept_of_all_leaves_together(self, names):
        optimizer = optax.flatten(optax.adam(1e-2))
        state = fg.TrainState.create(make_params(), optimizer, trainable=trains("ac"))
        with pytest.raises(ValueError, match=r"keeps opt_state\[0\].mu, float32\[12\], for all leaves together.*Begin afresh"):
            state.with_trainable(optimizer, trains(names))

    @pytest.mark.parametrize("optimizer", [optax.flatten(optax.adam(1e-2)), optax.lbfgs()], ids=["flatten", "lbfgs"])
    def test_no_leaf_stays(self, optimizer):
        state = fg.TrainState.create(make_params(), optimizer, trainable=trains("a"))
        with pytest.raises(ValueError, match="Begin afresh"):
            state.with_trainable(optimizer, trains("b"))

    def test_what_is_kept_in_a_list_of_leaves(self):
        optimizer = optax.GradientTransformation(
            lambda params: [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)],
            lambda grads, state, params=None: (grads, state),
        )
        state = fg.TrainState.create(make_params(), optimizer, trainable=trains("a"))
        for names in ("b", "ab"):
            with pytest.raises(ValueError, match=r"keeps opt_state\[[01]\], float32\[3\], for all leaves together"):
                state.with_trainable(optimizer, trains(names))

    def test_nothing_is_given_away(self):
        state = self._state()
        before = jax.tree.map(np.asarray, state)
        with pytest.raises(ValueError, match="there is nothing to train"):
            state.with_trainable(self.optimizer, False)
        assert_identical(state, before)


def test_a_window_that_was_given_up():
    state, _ = fg.micro_steps(loss_fn, optax.adam(1e-2)).backward(fg.TrainState.create(make_params(), optax.adam(1e-2)), X)
    state = dataclasses.replace(state, buffer=fg.zero_grad(state.buffer))
    assert state.with_trainable(optax.adam(1e-2), trains("a")).buffer.count == 0


def test_a_state_that_was_overwritten():
    optimizer = optax.sgd(0.1)
    state = fg.TrainState.create(make_params(), optimizer)
    fg.train_step(loss_fn, optimizer)(state, X)
    with pytest.raises(ValueError, match="this state was overwritten by a step"):
        state.with_trainable(optimizer, None)
