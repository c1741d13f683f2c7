"""How a training step goes: one program, or the program of one microbatch driven from the host."""

import gc
import itertools
import re
import weakref

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from comparison import FLOAT32_TOLERANCE, compilations, relative_difference

import funcgrad as fg
from funcgrad import loops, work

OPTIMIZER = optax.adam(1e-3)
SIZES = {name: models.BENCHMARK[name] for name in ("mlp", "convolutional", "transformer", "recurrent")}


def lowered(name, num, **options):
    model = SIZES[name]()
    state = jax.eval_shape(lambda params: fg.TrainState.create(params, OPTIMIZER), model.params)
    return fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=num, **options).lower(state, model.batch)


class TestChoice:
    @pytest.mark.parametrize("name", SIZES)
    def test_the_host_drives_convolutions_on_cpu(self, name):
        on_host = name == "convolutional" and jax.default_backend() == "cpu"
        assert list(lowered(name, 16).programs) == (["microbatch", "update"] if on_host else ["step"])

    def test_a_few_small_microbatches_stay_in_one_program(self):
        assert list(lowered("convolutional", loops.FEW_CALLS).programs) == ["step"]
        model = SIZES["convolutional"]()
        large = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((4096, *leaf.shape[1:]), leaf.dtype), model.batch)
        closed = jax.make_jaxpr(jax.grad(model.loss_fn))(model.params, large)
        assert loops.microbatches_a_call(closed, "cpu", 2) == 1

    def test_very_small_microbatches_stay_in_one_program(self):
        model = models.convolutional(rows=8)
        closed = jax.make_jaxpr(jax.grad(model.loss_fn))(model.params, model.batch)
        assert work.arithmetic(closed.jaxpr) < loops.MIN_WORK_OF_A_CALL
        assert loops.microbatches_a_call(closed, "cpu", 64) == 0

    @pytest.mark.parametrize(("rows", "num", "each"), [(2, 32, 2), (2, 33, 1), (8, 32, 1)])
    def test_two_in_a_call_where_gradients_outweigh_activations(self, rows, num, each):
        model = models.BENCHMARK["convolutional"]()
        microbatch = jax.tree.map(lambda leaf: leaf[:rows], model.batch)
        closed = jax.make_jaxpr(jax.value_and_grad(models.mean_loss(model.loss_fn)))(model.params, microbatch)
        assert loops.microbatches_a_call(closed, "cpu", num) == each

    def test_more_microbatches_than_are_unrolled(self):
        model = models.convolutional(rows=64)
        for num, loop in ((32, 0), (64, 1)):
            fun = fg.value_and_grad(model.loss_fn, num_microbatches=num)
            scans = str(jax.make_jaxpr(fun)(model.params, model.batch)).count("scan[")
            assert scans == (loop if jax.default_backend() == "cpu" else 1)

    def test_inside_jit_it_is_one_program(self):
        model = models.convolutional(rows=8)
        step = fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=4, loop="host")
        state = fg.TrainState.create(model.params, OPTIMIZER)
        inside, _ = jax.jit(step)(state, model.batch)
        outside, _ = step(jax.tree.map(jnp.copy, state), model.batch)
        assert relative_difference(inside.params, outside.params) <= FLOAT32_TOLERANCE

    def test_a_smaller_last_microbatch_is_a_program_of_its_own(self):
        model = models.convolutional(rows=10)
        step = fg.train_step(model.loss_fn, OPTIMIZER, microbatch_size=4, loop="host")
        state = fg.TrainState.create(model.params, OPTIMIZER)
        assert list(step.lower(state, model.batch).programs) == ["microbatch", "tail", "update"]
        text = step.lower(state, model.batch).as_text()
        assert text.count("func.func public @main") == 3
        state, metrics = step(state, model.batch)
        assert metrics["weight"] == 10
        np.testing.assert_allclose(metrics["loss"], model.loss_fn(model.params, model.batch), rtol=1e-5)


class TestHost:
    @pytest.mark.parametrize("name", ["mlp", "convolutional", "transformer", "recurrent"])
    def test_it_equals_the_other_loops(self, name):
        model = getattr(models, name)()
        results = {}
        for loop in ("host", "scan", "ordered"):
            step = fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=4, loop=loop)
            state = fg.TrainState.create(model.params, OPTIMIZER)
            for _ in range(2):
                state, metrics = step(state, model.batch)
            results[loop] = (state, metrics)
        for loop, result in results.items():
            # Adam's first steps are signs of gradients, which rounding may turn where they are zero.
            assert relative_difference(result[1], results["scan"][1]) <= 1e-4, loop
            assert relative_difference(result[0].params, results["scan"][0].params) <= 1e-4, loop

    def test_keys_aux_and_what_is_skipped(self):
        def loss_fn(params, x, key):
            noise = jax.random.normal(key, x.shape)
            return jnp.mean(params["w"] * (x + noise)), {"noise": jnp.mean(noise), "rows": len(x)}

        x = jnp.arange(12.0).at[4].set(jnp.nan)
        results = []
        for loop in ("host", "scan"):
            options = {"num_microbatches": 4, "key_argnums": 2, "has_aux": True, "aux": {"noise": "mean", "rows": "sum"}}
            step = fg.train_step(loss_fn, optax.sgd(0.1), skip_nonfinite=True, loop=loop, **options)
            state = fg.TrainState.create({"w": jnp.array(1.0), "name": "net"}, optax.sgd(0.1))
            state, metrics = step(state, x, jax.random.key(0))
            results.append((state.params["w"], metrics))
        assert results[0][1]["skipped"] == 1
        assert results[0][1]["aux"]["rows"] == 9
        assert relative_difference(*results) <= FLOAT32_TOLERANCE

    def test_two_microbatches_in_a_call_change_nothing(self, monkeypatch):
        def loss_fn(params, x, key, carry):
            noise = jax.random.normal(key, x.shape)
            loss = fg.WeightedLoss(jnp.sum(params["w"] * (x + noise) + carry), jnp.sum(x > 0))
            return loss, (carry + jnp.where(jnp.isnan(x), 0, x).max(), {"noise": noise, "rows": len(x), "last": x[-1]})

        monkeypatch.setattr(loops, "microbatches_a_call", lambda closed, platform, num: 2)
        x = jnp.arange(12.0).at[4].set(jnp.nan)
        reduced = {"noise": "stack", "rows": "sum", "last": "last"}
        results = []
        for loop, compensated in itertools.product(("auto", "scan"), (False, True)):
            options = {"key_argnums": 2, "carry_argnum": 3, "has_aux": True, "aux": reduced}
            step = fg.train_step(loss_fn, optax.sgd(0.1), microbatch_size=2, skip_nonfinite=True, loop=loop, **options)
            state = fg.TrainState.create({"w": jnp.array(1.0)}, optax.sgd(0.1), compensated=compensated)
            assert ("microbatch" in step.lower(state, x, jax.random.key(0), jnp.array(1.0)).programs) == (loop == "auto")
            results.append(step(state, x, jax.random.key(0), jnp.array(1.0)))
        assert results[0][1]["skipped"] == 1
        assert relative_difference(results[0], results[2]) <= FLOAT32_TOLERANCE
        assert relative_difference(results[1], results[3]) <= FLOAT32_TOLERANCE

    @pytest.mark.parametrize("where", ["params", "batch", "both", "neither"])
    @pytest.mark.parametrize("kind", ["device", "mesh of one"])
    def test_arrays_put_on_a_device_by_name_compile_once(self, where, kind, caplog):
        device = jax.devices()[0]
        mesh = jax.sharding.Mesh(np.array([device]), ("data",))
        target = device if kind == "device" else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

        def loss_fn(params, x, carry):
            return jnp.mean((x @ params["w"] + params["b"] - carry) ** 2), (carry + jnp.mean(x), {})

        params, batch = {"w": jnp.arange(3.0), "b": jnp.ones(1)}, np.sin(np.arange(24.0, dtype=np.float32)).reshape(8, 3)
        params = jax.device_put(params, target) if where in ("params", "both") else params
        batch = jax.device_put(batch, target) if where in ("batch", "both") else batch
        options = {"num_microbatches": 4, "has_aux": True, "carry_argnum": 2, "loop": "host"}
        step = fg.train_step(loss_fn, OPTIMIZER, **options)
        state, carry = fg.TrainState.create(params, OPTIMIZER), np.float32(0)
        with jax.log_compiles():
            state, metrics = step(state, batch, carry)
        if kind == "device":
            assert [compilations(caplog, name) for name in ("fold", "_finish_window")] == [1, 1]
        plain = fg.train_step(loss_fn, OPTIMIZER, **options | {"loop": "scan"})
        want = plain(fg.TrainState.create({"w": jnp.arange(3.0), "b": jnp.ones(1)}, OPTIMIZER), np.asarray(batch), carry)
        assert relative_difference((state.params, metrics), (want[0].params, want[1])) <= FLOAT32_TOLERANCE

    def test_what_is_wrong_is_found_before_anything_is_given_away(self):
        model = models.mlp()
        good = fg.TrainState.create(model.params, OPTIMIZER)
        calls = []

        def fails_in_update(updates, state, params=None):
            calls.append(1)
            raise KeyError("no such parameter")

        broken = optax.GradientTransformation(OPTIMIZER.init, fails_in_update)
        options = {"num_microbatches": 4, "loop": "host"}
        for make, error, text in (
            (lambda: fg.train_step(model.loss_fn, broken, **options), KeyError, "no such parameter"),
            (
                lambda: fg.train_step(model.loss_fn, optax.sgd(0.1, momentum=0.9), **options),
                ValueError,
                "opt_state is not of this",
            ),
            (lambda: fg.train_step(lambda params, batch: params, OPTIMIZER, **options), TypeError, "must be a real scalar"),
        ):
            with pytest.raises(error, match=text):
                make()(good, model.batch)
        assert len(calls) == 1
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(good))
        step = fg.train_step(model.loss_fn, OPTIMIZER, **options)
        step(good, model.batch)
        with pytest.raises(ValueError, match="this state was overwritten"):
            step(good, model.batch)

    def test_a_plan_keeps_no_arrays_alive(self):
        model = models.mlp()
        step = fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=4, loop="host")
        batch = jax.tree.map(jnp.copy, model.batch)
        alive = weakref.ref(batch["x"])
        state, _ = step(fg.TrainState.create(model.params, OPTIMIZER), batch)
        del batch
        gc.collect()
        assert alive() is None
        assert state.step == 1

    def test_a_step_that_a_trace_closes_over_leaves_nothing_of_the_trace(self):
        model = models.mlp()
        step = fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=4, loop="host", donate=False)
        state = fg.TrainState.create(model.params, OPTIMIZER)
        with jax.checking_leaks():
            inside = jax.jit(lambda: step(state, model.batch)[1]["loss"])()
        np.testing.assert_allclose(inside, step(state, model.batch)[1]["loss"], rtol=1e-5)

    def test_numpy_batches(self):
        model = models.mlp()
        step = fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=4, loop="host")
        _, metrics = step(fg.TrainState.create(model.params, OPTIMIZER), jax.tree.map(np.asarray, model.batch))
        np.testing.assert_allclose(metrics["loss"], model.loss_fn(model.params, model.batch), rtol=1e-5)


@pytest.mark.optimized
class TestCosts:
    """Counts from the compiler, at the sizes that the benchmarks use."""

    @pytest.mark.parametrize("name", SIZES)
    def test_temporary_memory_is_that_of_a_hand_written_scan(self, name):
        model, num = SIZES[name](), 8
        scan = models.hand_written_scan(model.loss_fn, num)

        def step(params, opt_state, batch):
            loss, grads = scan(params, batch)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        opt_state = jax.eval_shape(OPTIMIZER.init, model.params)
        theirs = jax.jit(step, donate_argnums=(0, 1)).lower(model.params, opt_state, model.batch).compile()
        ours = lowered(name, num).compile()
        assert ours.memory_analysis().temp_size_in_bytes <= 1.1 * theirs.memory_analysis().temp_size_in_bytes

    @pytest.mark.parametrize("name", ["convolutional", "transformer"])
    def test_an_ordered_loop_has_the_memory_of_a_scan(self, name):
        model = SIZES[name]()
        sizes = {}
        for loop in ("scan", "ordered", "unroll"):
            fun = jax.jit(fg.value_and_grad(model.loss_fn, num_microbatches=4, loop=loop))
            sizes[loop] = fun.lower(model.params, model.batch).compile().memory_analysis().temp_size_in_bytes
        assert sizes["ordered"] <= 1.2 * sizes["scan"]
        if jax.default_backend() == "cpu":
            assert sizes["unroll"] >= 1.5 * sizes["scan"]  # or there would be no need for it

    @pytest.mark.parametrize("name", SIZES)
    def test_programs_do_not_grow_with_the_number_of_microbatches(self, name):
        """What is compiled at 64 microbatches has as many operations as at 8; the numbers in it differ."""
        operations = [len(re.findall(r"= .*stablehlo", lowered(name, num).as_text())) for num in (8, 64)]
        assert operations[1] <= 1.02 * operations[0]

    @pytest.mark.parametrize("name", SIZES)
    def test_a_microbatch_costs_what_a_hand_written_one_costs(self, name):
        model, total = SIZES[name](), models.total_loss(SIZES[name]().loss_fn)
        microbatch = jax.tree.map(lambda leaf: leaf[::8], model.batch)

        def add(sums, params, microbatch):
            (value, weight), grads = jax.value_and_grad(total, has_aux=True)(params, microbatch)
            return jax.tree.map(jnp.add, sums, grads), value / weight

        zeros = jax.tree.map(jnp.zeros_like, model.params)
        theirs = jax.jit(add, donate_argnums=0).lower(zeros, model.params, microbatch).compile().cost_analysis()
        state = jax.eval_shape(lambda params: fg.TrainState.create(params, OPTIMIZER), model.params)
        backward = fg.micro_steps(model.loss_fn, OPTIMIZER).backward.lower(state, microbatch)
        driven = lowered(name, 8, loop="host").programs["microbatch"]
        # The one that the host drives also takes its rows out of the batch.
        rows = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(model.batch))
        for program, extra in ((backward, 0), (driven, rows)):
            ours = program.compile().cost_analysis()
            assert ours["flops"] <= 1.05 * theirs["flops"]
            assert ours["bytes accessed"] <= 1.05 * theirs["bytes accessed"] + extra


class TestPlans:
    """One step object serves states and arguments of many kinds."""

    def test_states_that_train_other_leaves(self):
        params, x = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(3)}, jnp.arange(12.0).reshape(4, 3)
        loss_fn = lambda params, x: jnp.mean((x @ (params["a"] * params["b"] + params["c"])) ** 2)
        step = fg.train_step(loss_fn, optax.sgd(1e-3), num_microbatches=2, loop="host")
        for trained in ("a", "b", "ac", "abc"):
            trainable = {name: name in trained for name in params}
            state, _ = step(fg.TrainState.create(params, optax.sgd(1e-3), trainable=trainable), x)
            moved = {name: not jnp.array_equal(state.params[name], params[name]) for name in params}
            assert moved == trainable

    def test_another_optimizers_state_comes_later(self):
        model = models.mlp()
        step = fg.train_step(model.loss_fn, optax.sgd(0.1), num_microbatches=4, loop="host")
        step(fg.TrainState.create(model.params, optax.sgd(0.1)), model.batch)
        other = fg.TrainState.create(model.params, OPTIMIZER)
        with pytest.raises(ValueError, match="opt_state is not of this optimizer"):
            step(other, model.batch)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(other))

    @pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.lbfgs()], ids=["sgd", "lbfgs"])
    def test_an_array_that_is_in_the_state_and_among_the_arguments(self, optimizer):
        loss_fn = lambda params, x, before: jnp.mean((x * params["w"] - before["w"]) ** 2)
        x, results = jnp.arange(8.0), []
        for copy in (False, True):
            step = fg.train_step(loss_fn, optimizer, num_microbatches=4, loop="host")
            state = fg.TrainState.create({"w": jnp.array(1.5)}, optimizer)
            state, _ = step(state, x, jax.tree.map(jnp.copy, state.params) if copy else state.params)
            results.append(state.params)
        assert relative_difference(*results) <= FLOAT32_TOLERANCE

    def test_without_donation_the_copy_counts(self):
        model = models.mlp()
        state = fg.TrainState.create(model.params, OPTIMIZER)
        found = {
            donate: fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=4, loop="host", donate=donate)
            .lower(state, model.batch)
            .compile()
            .memory_analysis()
            for donate in (True, False)
        }
        buffer = sum(leaf.nbytes for leaf in jax.tree.leaves(state.buffer))
        assert found[False].temp_size_in_bytes - found[True].temp_size_in_bytes >= buffer
        assert found[False].alias_size_in_bytes == 0


class TestScaleOfAMean:
    """Where the rows enter the gradient of a mean."""

    @pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
    def test_a_rule_that_clips_sees_the_gradient_of_the_mean(self, wrap):
        @jax.custom_vjp
        def clip(value):
            return value

        clip.defvjp(lambda value: (value, None), lambda _, cotangent: (jnp.clip(cotangent, -1e-2, 1e-2),))
        loss_fn = lambda w, x: jnp.mean(clip(x @ w) ** 2)
        x = jax.random.normal(jax.random.key(0), (12, 4))
        buffer, _ = wrap(fg.backward(loss_fn))(fg.zeros(jnp.ones(4)), jnp.ones(4), x)
        np.testing.assert_allclose(fg.mean(buffer), jax.grad(loss_fn)(jnp.ones(4), x), rtol=1e-5)
        parts = [jax.grad(loss_fn)(jnp.ones(4), x[index::3]) for index in range(3)]
        grads = wrap(fg.grad(loss_fn, num_microbatches=3))(jnp.ones(4), x)
        np.testing.assert_allclose(grads, np.mean(parts, axis=0), rtol=1e-5)

    def test_a_loss_that_computes_in_float16_does_not_overflow(self):
        def loss_fn(w, x):
            return jnp.mean(jnp.tanh(x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) ** 2) * 2.0**13

        x = jax.random.normal(jax.random.key(0), (1024, 4))
        whole = jax.grad(loss_fn)(jnp.ones(4) / 2, x)
        grads = jax.jit(fg.grad(loss_fn, num_microbatches=2))(jnp.ones(4) / 2, x)
        np.testing.assert_allclose(grads, whole, rtol=1e-2)  # float16

    @pytest.mark.parametrize(
        ("function", "exact"),
        [
            (lambda x: jnp.sum(jnp.tanh(x)), True),
            (lambda x: jnp.sum(jax.nn.relu(x)), True),
            (lambda x: jnp.sum(x.astype(jnp.bfloat16)), False),
            (
                lambda x: jax.lax.scan(lambda c, _: (c + jnp.sum(x.astype(jnp.float16)), None), jnp.float16(0), None, length=2)[
                    0
                ],
                False,
            ),
        ],
    )
    def test_which_losses_scale_exactly(self, function, exact):
        assert work.scales_exactly(jax.make_jaxpr(function)(jnp.ones(3)).jaxpr) == exact
