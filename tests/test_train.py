import dataclasses
import functools

import flax.linen
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from comparison import FLOAT32_TOLERANCE, assert_identical, compilations, relative_difference, watch_losses
from flax import nnx

import funcgrad as fg

OPTIMIZER = optax.adam(1e-2)


@pytest.fixture(params=["auto", "host"])
def form(request, monkeypatch):
    """Everything holds for a step in one program, and for one whose microbatches the host drives."""
    monkeypatch.setattr(fg, "train_step", functools.partial(fg.train_step, loop=request.param))


def quadratic(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def quadratic_params():
    return {"w": jnp.arange(3.0), "b": jnp.array(1.0)}


def rows(count=8):
    return jnp.sin(jnp.arange(3.0 * count)).reshape(count, 3)


@jax.tree_util.register_pytree_with_keys_class
class Layer:
    """An Equinox-like module: arrays, a function as a leaf, and a static field in the structure."""

    def __init__(self, w, activation, name="layer"):
        self.w, self.activation, self.name = w, activation, name

    def __call__(self, x):
        return self.activation(x @ self.w)

    def tree_flatten_with_keys(self):
        keys = jax.tree_util.GetAttrKey("w"), jax.tree_util.GetAttrKey("activation")
        return tuple(zip(keys, (self.w, self.activation), strict=True)), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)


class LinenModel(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(1)(jnp.tanh(flax.linen.Dense(4)(x)))[:, 0]


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))[:, 0]


def _params_of_any_kind():
    linen = LinenModel()
    yield "dict", quadratic_params(), quadratic
    yield "linen", linen.init(jax.random.key(0), rows()), lambda params, x: jnp.mean((linen.apply(params, x) - 1) ** 2)
    yield "nnx", NnxModel(nnx.Rngs(0)), lambda model, x: jnp.mean((model(x) - 1) ** 2)
    yield "module", Layer(jnp.ones((3, 2)), jnp.tanh), lambda layer, x: jnp.mean((layer(x) - 1) ** 2)
    yield "tuple", (jnp.ones(3), None, [jnp.ones(())]), lambda params, x: jnp.mean((x @ params[0] - params[2][0]) ** 2)


KINDS = {name: (params, loss_fn) for name, params, loss_fn in _params_of_any_kind()}


def _hand_written_run(params, loss_fn, num_steps):
    arrays, rest = _split_arrays(params)
    opt_state = OPTIMIZER.init(arrays)
    for _ in range(num_steps):
        grads = jax.grad(lambda arrays: loss_fn(_join(arrays, rest), rows()))(arrays)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, arrays)
        arrays = optax.apply_updates(arrays, updates)
    return _join(arrays, rest)


def _split_arrays(tree):
    return (jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) == keep else None, tree) for keep in (True, False))


def _join(arrays, rest):
    return jax.tree.map(lambda one, other: other if one is None else one, arrays, rest, is_leaf=lambda leaf: leaf is None)


@pytest.mark.parametrize("kind", KINDS)
class TestAnyParams:
    def test_train_step_and_micro_steps_equal_a_hand_written_loop(self, kind):
        params, loss_fn = KINDS[kind]
        want = jax.tree.leaves(_split_arrays(_hand_written_run(params, loss_fn, 5)).__next__())
        step = fg.train_step(loss_fn, OPTIMIZER, num_microbatches=4)
        state = fg.TrainState.create(params, OPTIMIZER)
        for _ in range(5):
            state, metrics = step(state, rows())
        assert type(state.params) is type(params)
        assert jax.tree.structure(state.params) == jax.tree.structure(params)
        assert relative_difference(_arrays(state.params), want) <= FLOAT32_TOLERANCE

        steps = fg.micro_steps(loss_fn, OPTIMIZER)
        state = fg.TrainState.create(params, OPTIMIZER)
        for _ in range(5):
            for start, stop in ((0, 3), (3, 6), (6, 8)):
                state, _ = steps.backward(state, rows()[start:stop])
            state, update_metrics = steps.update(state)
        assert relative_difference(_arrays(state.params), want) <= FLOAT32_TOLERANCE
        assert abs(update_metrics["grad_norm"] - metrics["grad_norm"]) <= 1e-5 * metrics["grad_norm"]
        assert state.step == 5


def _arrays(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


class DropoutModel(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(3, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, rngs=None, deterministic=None):
        return self.dropout(self.linear(x), rngs=rngs, deterministic=deterministic)[:, 0]


class TestModulesWithTheirOwnKeys:
    """nnx.Dropout draws from a key inside the module: unseen, that would be one mask for all microbatches."""

    def test_a_key_that_is_used_is_refused(self):
        model = DropoutModel(nnx.Rngs(0))
        loss_fn = lambda model, x: jnp.mean(model(x) ** 2)
        message = r"the loss draws from args\[0\]\.dropout\.rngs\.key.*, a PRNG key among the parameters.*key_argnums"
        for wrap in (lambda fun: fun, jax.jit):
            with pytest.raises(ValueError, match=message):
                wrap(fg.grad(loss_fn, num_microbatches=2))(model, rows())
            with pytest.raises(ValueError, match=message):
                wrap(fg.backward(loss_fn))(fg.zeros(model), model, rows())
        for num in (1, 2):  # one microbatch, too: the next step would draw the same
            with pytest.raises(ValueError, match=message):
                fg.train_step(loss_fn, OPTIMIZER, num_microbatches=num)(fg.TrainState.create(model, OPTIMIZER), rows())

    def test_a_key_that_is_not_used_passes_through(self):
        model = DropoutModel(nnx.Rngs(0))
        loss_fn = jax.jit(lambda model, x: jnp.mean((model(x, deterministic=True) - 3) ** 2))
        got = jax.jit(fg.grad(loss_fn, num_microbatches=2))(model, rows())
        want = jax.grad(lambda linear: jnp.mean((linear(rows())[:, 0] - 3) ** 2))(model.linear)
        assert relative_difference(got.linear, want) <= FLOAT32_TOLERANCE

    def test_trainable_as_a_module_of_booleans(self):
        model = DropoutModel(nnx.Rngs(0))
        is_variable = lambda node: isinstance(node, nnx.Variable)
        trainable = jax.tree.map(lambda variable: isinstance(variable, nnx.Param), model, is_leaf=is_variable)
        assert callable(trainable)  # and is no predicate
        assert len(jax.tree.leaves(fg.zeros(model, trainable=trainable).grads)) == 2

    def test_a_key_argument(self):
        model = DropoutModel(nnx.Rngs(0))
        loss_fn = lambda model, x, key: (jnp.mean(model(x, rngs=nnx.Rngs(key)) ** 2), (model(x, rngs=nnx.Rngs(key)) == 0) * 1)
        step = fg.train_step(loss_fn, OPTIMIZER, num_microbatches=2, key_argnums=2, has_aux=True, aux="sum")
        _, metrics = step(fg.TrainState.create(model, OPTIMIZER), rows(64), jax.random.key(1))
        assert set(np.unique(metrics["aux"])) == {0, 1, 2}  # equal masks would give 0 and 2 only


def test_numbers_that_configure_a_module_stay_numbers():
    def loss_fn(params, x):
        assert params["depth"] == 2  # Python branches on it
        return jnp.mean(params["w"] * params["rate"] * x) if params["flag"] else jnp.sum(x)

    config = {"flag": True, "depth": 2, "rate": 0.5}
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    step = fg.train_step(loss_fn, optimizer, num_microbatches=2)
    state, _ = step(fg.TrainState.create({"w": jnp.ones(()), **config}, optimizer), jnp.ones(4))
    assert state.params.pop("w") < 1
    assert state.params == config


def test_trainable_may_be_true_for_all_of_a_module_with_numbers():
    params = {"w": jnp.ones(()), "rate": 0.5}
    for trainable in (True, lambda path, leaf: True):
        state = fg.TrainState.create(params, OPTIMIZER, trainable=trainable)
        step = fg.train_step(lambda params, x: jnp.mean(params["w"] * params["rate"] * x), OPTIMIZER, trainable=trainable)
        state, _ = step(state, jnp.ones(4))
        assert (state.params["rate"], state.buffer.grads["rate"]) == (0.5, None)


def test_numbers_in_an_optimizers_state_count():
    counting = optax.GradientTransformation(
        lambda params: {"count": 0},
        lambda updates, state, params=None: (
            jax.tree.map(lambda u: -u / (state["count"] + 1), updates),
            {"count": state["count"] + 1},
        ),
    )
    state = fg.TrainState.create(jnp.zeros(()), counting)
    step = fg.train_step(lambda w, x: jnp.mean(w * x), counting)
    positions = []
    for _ in range(3):
        state, _ = step(state, jnp.ones(2))
        positions.append(float(state.params))
    np.testing.assert_allclose(positions, [-1, -1 - 1 / 2, -1 - 1 / 2 - 1 / 3], rtol=1e-6)
    assert state.opt_state["count"] == 3


def test_a_count_that_a_user_sets_to_a_number():
    state = fg.TrainState.create(quadratic_params(), OPTIMIZER)
    state = dataclasses.replace(state, step=0)
    for _ in range(3):
        state, _ = fg.train_step(quadratic, OPTIMIZER)(state, rows())
    assert state.step == 3


@pytest.mark.usefixtures("form")
class TestTracesOnce:
    @staticmethod
    def _counted():
        calls = []

        def loss_fn(params, x):
            calls.append(x.shape)
            return quadratic(params, x)

        return calls, loss_fn

    @pytest.mark.parametrize("options", [{"num_microbatches": 4}, {"num_microbatches": 4, "loop": "unroll"}, {}])
    def test_train_step(self, options):
        calls, loss_fn = self._counted()
        step = fg.train_step(loss_fn, OPTIMIZER, **options)
        state = fg.TrainState.create(quadratic_params(), OPTIMIZER)
        for _ in range(10):
            state, _ = step(state, rows())
        assert len(calls) == 1

    def test_a_smaller_last_microbatch_is_one_shape_more(self):
        calls, loss_fn = self._counted()
        step = fg.train_step(loss_fn, OPTIMIZER, microbatch_size=3)
        state = fg.TrainState.create(quadratic_params(), OPTIMIZER)
        for _ in range(10):
            state, _ = step(state, rows())
        assert calls == [(3, 3), (2, 3)]

    @pytest.mark.parametrize(
        "params",
        [
            quadratic_params(),
            {"w": np.arange(3.0), "b": jnp.asarray(1.0)},  # NumPy, and weakly typed: another type after a step, if not mended
            jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), quadratic_params()),
        ],
        ids=["arrays", "weak", "bfloat16"],
    )
    def test_micro_steps(self, params, caplog):
        calls, loss_fn = self._counted()
        optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
        steps = fg.micro_steps(loss_fn, optimizer)
        state = fg.TrainState.create(params, optimizer)
        with jax.log_compiles():
            for _ in range(5):
                for _ in range(2):
                    state, _ = steps.backward(state, rows())
                state, _ = steps.update(state)
        assert len(calls) == 1
        assert compilations(caplog, "backward") == 1
        assert compilations(caplog, "update") == 1

    def test_a_committed_state_compiles_once(self, caplog):
        device = jax.devices()[0]
        step = fg.train_step(quadratic, OPTIMIZER)
        state = fg.TrainState.create(jax.device_put(quadratic_params(), device), OPTIMIZER)
        with jax.log_compiles():
            for _ in range(3):
                state, _ = step(state, rows())
        assert compilations(caplog, "step") == 1


@pytest.mark.usefixtures("form")
class TestDonation:
    """pytest turns JAX's warning about unusable donated buffers into an error."""

    @pytest.mark.parametrize("kind", ["dict", "module", "nnx"])
    def test_the_state_is_overwritten(self, kind):
        params, loss_fn = KINDS[kind]
        step = fg.train_step(loss_fn, OPTIMIZER, num_microbatches=2)
        state = fg.TrainState.create(params, OPTIMIZER)
        pointers = {leaf.unsafe_buffer_pointer() for leaf in _arrays(state) if leaf.ndim}
        new, _ = step(state, rows())
        assert all(leaf.is_deleted() for leaf in _arrays(state) if leaf.ndim)  # XLA drops a scalar that nothing reads
        assert {leaf.unsafe_buffer_pointer() for leaf in _arrays(new) if leaf.ndim} == pointers

    def test_micro_steps_overwrite_the_state(self):
        steps = fg.micro_steps(quadratic, OPTIMIZER)
        state = fg.TrainState.create(quadratic_params(), OPTIMIZER)
        after, _ = steps.backward(state, rows())
        assert all(leaf.is_deleted() for leaf in _arrays(state.buffer) if leaf.ndim)
        assert after.params is state.params  # the rest does not pass through the program
        with pytest.raises(ValueError, match="this state was overwritten by an earlier step"):
            steps.backward(state, rows())
        steps.update(after)
        assert all(leaf.is_deleted() for leaf in _arrays(after) if leaf.ndim)

    def test_donate_false_leaves_the_inputs_alive(self):
        state = fg.TrainState.create(quadratic_params(), OPTIMIZER)
        before = jax.tree.map(np.asarray, state)
        step = fg.train_step(quadratic, OPTIMIZER, num_microbatches=2, donate=False)
        steps = fg.micro_steps(quadratic, OPTIMIZER, donate=False)
        step(state, rows())
        after, _ = steps.backward(state, rows())
        kept = jax.tree.map(np.asarray, after)
        steps.update(after)
        assert_identical(state, before)
        assert_identical(after, kept)

    def test_nothing_of_the_users_is_deleted(self):
        rate, tied = jnp.array(0.1), jnp.arange(3.0)
        params = {"w": tied, "again": tied, "b": jnp.array(1.0), "steps": jnp.arange(2)}
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        batch = rows()
        state = fg.TrainState.create(params, optimizer)
        step = fg.train_step(quadratic, optimizer, num_microbatches=2)
        for _ in range(2):
            state, _ = step(state, batch)
        assert not any(leaf.is_deleted() for leaf in [*jax.tree.leaves(params), rate, batch])

    def test_copy_false_gives_the_parameters_away(self):
        params = quadratic_params()
        state = fg.TrainState.create(params, OPTIMIZER, copy=False)
        assert state.params["w"] is params["w"]
        fg.train_step(quadratic, OPTIMIZER)(state, rows())
        assert params["w"].is_deleted()

    def test_copy_false_with_one_array_in_two_places(self):
        tied = jnp.arange(3.0)
        params = {"w": tied, "again": tied, "b": jnp.array(1.0)}
        state = fg.TrainState.create(params, optax.ema(0.9), copy=False)
        state, _ = fg.train_step(quadratic, optax.ema(0.9))(state, rows())
        assert state.step == 1

    def test_an_optimizer_that_keeps_the_parameters(self):
        anchor = optax.GradientTransformation(
            lambda params: params,  # the state is the parameters themselves
            lambda updates, state, params: (jax.tree.map(lambda u, s, p: s - p - u, updates, state, params), state),
        )
        for copy in (True, False):
            state = fg.TrainState.create(quadratic_params(), anchor, copy=copy)
            step = fg.train_step(quadratic, anchor)
            for _ in range(2):
                state, _ = step(state, rows())
            assert_identical(state.opt_state, quadratic_params())

    @pytest.mark.parametrize("bad", [jnp.ones((8, 2)), jnp.ones((7, 3)), jnp.ones(())])
    def test_bad_input_leaves_the_state_as_it_was(self, bad):
        state = fg.TrainState.create(quadratic_params(), OPTIMIZER)
        before = jax.tree.map(np.asarray, state)
        step = fg.train_step(quadratic, OPTIMIZER, num_microbatches=2)
        with pytest.raises((ValueError, TypeError)):
            step(state, bad)
        assert_identical(state, before)
        state, _ = step(state, rows())
        assert state.step == 1


@pytest.mark.usefixtures("form")
class TestMetrics:
    def test_values(self):
        step = fg.train_step(lambda w, x: (jnp.mean(w * x), {"sum": x.sum()}), optax.sgd(1.0), has_aux=True, aux="sum")
        state, metrics = step(fg.TrainState.create(jnp.array(2.0), optax.sgd(1.0)), jnp.arange(4.0))
        assert metrics == {"loss": 3.0, "grad_norm": 1.5, "weight": 4.0, "skipped": 0, "aux": {"sum": 6.0}}
        assert state.params == 0.5

    def test_the_norm_of_a_float16_buffer_does_not_overflow(self):
        state = fg.TrainState.create(jnp.zeros(4), OPTIMIZER, dtype=jnp.float16)
        _, metrics = fg.train_step(lambda w, x: jnp.mean(x) * w.sum(), OPTIMIZER)(state, jnp.full(2, 1000.0))
        assert metrics["grad_norm"] == 2000

    def test_the_norm_is_that_of_what_is_trained(self):
        params = {"w": jnp.ones(3), "b": jnp.ones(())}
        state = fg.TrainState.create(params, OPTIMIZER, trainable={"w": False, "b": True})
        _, metrics = fg.train_step(quadratic, OPTIMIZER)(state, rows())
        assert abs(metrics["grad_norm"] - abs(jax.grad(quadratic)(params, rows())["b"])) <= 1e-5


@pytest.mark.usefixtures("form")
class TestWindows:
    def test_train_step_goes_on_with_a_window_that_was_begun(self):
        steps = fg.micro_steps(quadratic, OPTIMIZER)
        step = fg.train_step(quadratic, OPTIMIZER, num_microbatches=2)
        state = fg.TrainState.create(quadratic_params(), OPTIMIZER)
        state, _ = steps.backward(state, rows()[:4])
        state, metrics = step(state, rows()[4:])
        whole, whole_metrics = step(fg.TrainState.create(quadratic_params(), OPTIMIZER), rows())
        assert relative_difference(state.params, whole.params) <= FLOAT32_TOLERANCE
        assert metrics["weight"] == whole_metrics["weight"] == 8
        assert abs(metrics["loss"] - quadratic(quadratic_params(), rows()[4:])) <= 1e-4  # of this batch

    def test_an_empty_window_updates_nothing(self):
        optimizer = optax.adamw(0.1, weight_decay=0.5)
        steps = fg.micro_steps(quadratic, optimizer)
        state = fg.TrainState.create(quadratic_params(), optimizer)
        before = jax.tree.map(np.asarray, state)
        state, metrics = steps.update(state)
        assert_identical(state, before)
        assert metrics["grad_norm"] == 0

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_window_that_is_skipped_whole_updates_nothing(self, bad):
        optimizer = optax.adamw(0.1, weight_decay=0.5)
        step = fg.train_step(quadratic, optimizer, num_microbatches=2, skip_nonfinite=True)
        state = fg.TrainState.create(quadratic_params(), optimizer)
        before = jax.tree.map(np.asarray, state)
        state, metrics = step(state, jnp.full((4, 3), bad))
        assert_identical(state, before)
        assert (metrics["skipped"], metrics["weight"], metrics["loss"]) == (2, 0, 0)
        state, metrics = step(state, rows())
        assert (state.step, metrics["skipped"]) == (1, 0)

    def test_a_masked_window_is_a_window(self):
        """Zeros are gradients: as in PyTorch, momentum and decay go on; only None is passed over."""
        loss_fn = lambda params, batch: fg.WeightedLoss(jnp.sum(params * batch * 0), jnp.sum(batch * 0))
        optimizer = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
        state, metrics = fg.train_step(loss_fn, optimizer)(fg.TrainState.create(jnp.array(1.0), optimizer), jnp.ones(2))
        assert state.params == np.float32(0.95)
        assert (state.step, metrics["loss"]) == (1, 0)


class TestOptimizers:
    def test_extra_arguments(self):
        """reduce_on_plateau needs the loss: train_step hands it over, micro_steps takes it."""
        optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
        step = fg.train_step(lambda w, x: jnp.mean(w * 0 + x), optimizer, num_microbatches=2)
        steps = fg.micro_steps(lambda w, x: jnp.mean(w * 0 + x), optimizer)
        states = [fg.TrainState.create(jnp.array(1.0), optimizer) for _ in range(2)]
        for _ in range(4):
            states[0], _ = step(states[0], jnp.ones(4))
            states[1], loss = steps.backward(states[1], jnp.ones(4))
            states[1], _ = steps.update(states[1], value=loss)
        assert states[0].opt_state[1].scale < 1
        assert states[0].opt_state[1].scale == states[1].opt_state[1].scale

    @pytest.mark.parametrize(
        "optimizer",
        [
            optax.MultiSteps(optax.adam(1e-2), 2),
            optax.multi_transform({"w": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"w": "w", "b": "b"}),
            optax.masked(optax.adamw(1e-2), {"w": True, "b": False}),
            optax.apply_if_finite(optax.adam(1e-2), 3),
            optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2)),
            optax.contrib.schedule_free_adamw(1e-2),
            optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01)),
        ],
        ids=["multi_steps", "multi_transform", "masked", "apply_if_finite", "noise", "schedule_free", "sam"],
    )
    def test_wrappers(self, optimizer):
        state = fg.TrainState.create(quadratic_params(), optimizer)
        steps = fg.micro_steps(quadratic, optimizer)
        step = fg.train_step(quadratic, optimizer, num_microbatches=4)
        opt_state, params = optimizer.init(quadratic_params()), quadratic_params()
        for index in range(4):
            grads = jax.grad(quadratic)(params, rows())
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            if index % 2:
                state, _ = step(state, rows())
            else:
                state, _ = steps.backward(state, rows())
                state, _ = steps.update(state)
        assert relative_difference(state.params, params) <= 1e-4

    @pytest.mark.parametrize("options", [{"num_microbatches": 4}, {"microbatch_size": 5}])
    def test_a_line_search_sees_the_loss_of_the_whole_batch(self, options):
        """L-BFGS evaluates the loss at other parameters: `value_fn`, microbatch by microbatch too."""
        model, optimizer = models.mlp(layers=1), optax.lbfgs(memory_size=3)
        whole = models.mean_loss(model.loss_fn)

        @jax.jit
        def hand_written(params, opt_state):
            value, grad = jax.value_and_grad(whole)(params, model.batch)
            value_fn = lambda params: whole(params, model.batch)
            updates, opt_state = optimizer.update(grad, opt_state, params, value=value, grad=grad, value_fn=value_fn)
            return optax.apply_updates(params, updates), opt_state

        step = fg.train_step(model.loss_fn, optimizer, **options)
        state = fg.TrainState.create(model.params, optimizer)
        params, opt_state = model.params, optimizer.init(model.params)
        for _ in range(4):
            params, opt_state = hand_written(params, opt_state)
            state, _ = step(state, model.batch)
        assert relative_difference(state.params, params) <= 1e-4  # a search amplifies rounding

    def test_a_line_search_backs_off_from_what_is_not_finite(self):
        """The loss is that of the microbatches that were kept, finite or not at the trial point."""
        loss_fn = lambda w, x: jnp.mean(jnp.exp(w * x) - w * x)
        optimizer = optax.chain(optax.sgd(1000.0), optax.scale_by_backtracking_linesearch(40))
        results = []
        for skip_nonfinite in (False, True):
            step = fg.train_step(loss_fn, optimizer, num_microbatches=4, skip_nonfinite=skip_nonfinite)
            state, _ = step(fg.TrainState.create(jnp.array(-1.0), optimizer), jnp.arange(1.0, 9))
            results.append(float(state.params))
        assert results[0] == results[1]
        assert abs(results[0]) < 1

    def test_the_loss_that_a_line_search_sees_leaves_out_what_the_window_did(self):
        loss_fn = lambda w, x: jnp.mean(jnp.sqrt(jnp.abs(w * x)))  # where x is 0, the loss is finite and the gradient is not
        seen = []
        watching = watch_losses(seen)
        step = fg.train_step(loss_fn, watching, num_microbatches=4, skip_nonfinite=True)
        state = fg.TrainState.create(jnp.array(2.0), watching)
        with jax.disable_jit():
            step(state, jnp.array([1.0, 0.0, 4.0, 9.0]))
        value, again = seen[0]
        assert abs(value - again) <= 1e-6
        assert abs(value - np.sqrt(2) * (1 + 2 + 3) / 3) <= 1e-6

    def test_gradients_come_in_the_dtype_of_the_parameters(self):
        """So the optimizer's state keeps its dtypes, though sums are kept in float32."""
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), quadratic_params())
        state = fg.TrainState.create(params, OPTIMIZER)
        dtypes = jax.tree.leaves(jax.tree.map(lambda leaf: leaf.dtype, state))
        state, _ = fg.train_step(quadratic, OPTIMIZER, num_microbatches=2)(state, rows().astype(jnp.bfloat16))
        assert jax.tree.leaves(jax.tree.map(lambda leaf: leaf.dtype, state)) == dtypes
        assert state.buffer.grads["w"].dtype == jnp.float32


class TestInsideTheUsersOwnTransformations:
    def test_scan_over_steps(self):
        step = fg.train_step(quadratic, OPTIMIZER, num_microbatches=2)
        epoch = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0)
        batches = rows(24).reshape(3, 8, 3)
        scanned, metrics = epoch(fg.TrainState.create(quadratic_params(), OPTIMIZER), batches)
        state = fg.TrainState.create(quadratic_params(), OPTIMIZER)
        for batch in batches:
            state, _ = step(state, batch)
        assert relative_difference(scanned.params, state.params) <= FLOAT32_TOLERANCE
        assert metrics["loss"].shape == (3,)

    def test_an_ensemble_by_vmap(self):
        step = fg.train_step(quadratic, OPTIMIZER, num_microbatches=2, donate=False)
        create = lambda b: fg.TrainState.create({"w": jnp.arange(3.0), "b": b}, OPTIMIZER)
        states, _ = jax.vmap(step, in_axes=(0, None))(jax.vmap(create)(jnp.arange(3.0)), rows())
        one, _ = step(create(jnp.array(2.0)), rows())
        last = jax.tree.map(lambda leaf: leaf[2], states.params)
        assert relative_difference(last, one.params) <= FLOAT32_TOLERANCE

    def test_state_is_data(self):
        state = fg.TrainState.create(quadratic_params(), OPTIMIZER)
        changed = dataclasses.replace(state, params=jax.tree.map(jnp.zeros_like, state.params))
        changed, _ = fg.train_step(quadratic, OPTIMIZER)(changed, rows())
        assert changed.step == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            state.step = 3
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
        assert ".params['w']" in paths
        assert ".buffer.grads['w']" in paths


def test_two_models_and_a_transformer_learn():
    """A step lowers the loss: gradient signs and the optimizer's are right for WeightedLoss too."""
    for model in (models.mlp(), models.transformer()):
        step = fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=4)
        state = fg.TrainState.create(model.params, OPTIMIZER)
        losses = []
        for _ in range(30):
            state, metrics = step(state, model.batch)
            losses.append(float(metrics["loss"]))
        assert losses[-1] < 0.7 * losses[0]
