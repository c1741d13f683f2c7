"""Faults that users of other systems reported, each with its right value.

Numbers follow the project's list of faults; a whole kind of fault must be impossible here, or exact.
"""

import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import funcgrad as fg
from funcgrad import stateful


def token_loss(params, batch):
    """Per-token losses w * x, masked: the gradient of a token is x."""
    return fg.WeightedLoss(jnp.sum(params * batch["x"] * batch["mask"]), jnp.sum(batch["mask"]))


def linear_loss(params, rows):
    return jnp.mean(params * rows)


def fold_means(gradients, **options):
    buffer = fg.zeros(jnp.zeros_like(jnp.asarray(gradients[0])))
    for gradient in gradients:
        buffer = fg.accumulate(buffer, jnp.asarray(gradient), **options)
    return buffer


class TestNormalisation:
    def test_01_mean_of_means(self):
        batch = {"x": jnp.array([[1.0, 0, 0], [3, 3, 3]]), "mask": jnp.array([[1.0, 0, 0], [1, 1, 1]])}
        assert fg.grad(token_loss, num_microbatches=2)(0.0, batch) == 2.5
        buffer = fg.accumulate(fg.zeros(0.0), jnp.array(1.0), weight=1)
        assert fg.mean(fg.accumulate(buffer, jnp.array(9.0), weight=3)) == 2.5

    def test_02_all_rows_masked(self):
        x = jnp.array([1.0, 2.0, 7.0, 8.0])
        one = {"x": x, "mask": jnp.array([1.0, 0, 1.0, 0])}  # strided: the second microbatch is masked throughout
        loss, gradient = fg.value_and_grad(token_loss, num_microbatches=2)(2.0, one)
        assert (loss, gradient) == (8.0, 4.0)
        for num in (1, 2, 4):
            fun = fg.value_and_grad(token_loss, num_microbatches=num)
            assert fun(2.0, {"x": x, "mask": jnp.zeros(4)}) == (0.0, 0.0)
            assert jax.jit(fun)(2.0, {"x": x, "mask": jnp.zeros(4)}) == (0.0, 0.0)
            # 0 times an infinite derivative, for example of a square root at 0, is NaN; without weight it does not count.
            root = lambda w, x: fg.WeightedLoss(jnp.sum(jnp.sqrt(w * x)) * 0, 0)
            assert fg.value_and_grad(root, num_microbatches=num)(0.0, x) == (0.0, 0.0)
        assert fg.mean(fg.zeros(1.0)) == 0.0

    def test_03_forgotten_or_doubled_scale(self):
        assert fg.mean(fold_means([1.0, 3.0])) == 2.0
        assert fg.grad(linear_loss, num_microbatches=2)(0.0, jnp.array([1.0, 3.0])) == 2.0
        # A scale in the loss is the user's own and is not undone: nothing here asks for one.
        assert fg.grad(lambda w, x: linear_loss(w, x) / 2, num_microbatches=2)(0.0, jnp.array([1.0, 3.0])) == 1.0

    def test_04_weights_below_one(self):
        assert fg.mean(fold_means([1.0, 1.0], weight=0.25)) == 4.0
        batch = {"x": jnp.array([4.0, 4.0]), "mask": jnp.array([0.25, 0.25])}
        assert fg.grad(token_loss, num_microbatches=2)(0.0, batch) == 4.0

    def test_05_loss_does_not_depend_on_the_number_of_microbatches(self):
        batch = {"x": jnp.arange(8.0), "mask": jnp.array([1.0, 0, 1, 1, 0, 0, 1, 1])}
        losses = {num: fg.value_and_grad(token_loss, num_microbatches=num)(2.0, batch)[0] for num in (1, 2, 4, 8)}
        assert losses == dict.fromkeys((1, 2, 4, 8), np.float32(2 * (0 + 2 + 3 + 6 + 7) / 5))
        optimizer = optax.sgd(0.1)
        for num in (1, 2, 4):
            step = fg.train_step(token_loss, optimizer, num_microbatches=num)
            _, metrics = step(fg.TrainState.create(jnp.array(2.0), optimizer), batch)
            assert metrics["loss"] == np.float32(7.2)

    def test_06_class_weights_smoothing_and_ignored_labels(self):
        logits = jax.random.normal(jax.random.key(0), (12, 5))
        labels = jnp.array([0, 1, 2, 3, 4, 0, -1, -1, -1, 2, 1, -1])  # -1 is ignored
        class_weights = jnp.array([1.0, 2.0, 0.5, 3.0, 1.5])

        def loss_fn(params, batch):
            kept = batch["labels"] >= 0
            weights = jnp.where(kept, class_weights[batch["labels"]], 0)
            smooth = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 5), 0.1)
            losses = -jnp.sum(jax.nn.log_softmax(batch["logits"] * params) * smooth, -1)
            return fg.WeightedLoss(jnp.sum(losses * weights), jnp.sum(weights))

        batch = {"logits": logits, "labels": labels}
        whole = jax.value_and_grad(models.mean_loss(loss_fn))(jnp.float32(1), batch)
        for num in (1, 2, 3, 4, 6, 12):
            assert np.allclose(fg.value_and_grad(loss_fn, num_microbatches=num)(jnp.float32(1), batch), whole, rtol=1e-6)


class TestWindows:
    """Each row's gradient is the row; the optimizer is SGD with a rate of 1, so updates can be read off."""

    @staticmethod
    def _run(windows):
        steps = fg.micro_steps(linear_loss, optax.sgd(1.0))
        state, positions = fg.TrainState.create(jnp.array(0.0), optax.sgd(1.0)), [0.0]
        for window in windows:
            for row in window:
                state, _ = steps.backward(state, jnp.array([row]))
            state, _ = steps.update(state)
            positions.append(float(state.params))
        return state, [before - after for before, after in itertools.pairwise(positions)]

    def test_07_short_last_window_is_divided_by_its_own_length(self):
        _, updates = self._run([[1.0, 1.0], [1.0]])
        assert updates == [1.0, 1.0]

    def test_08_an_update_when_told_to(self):
        state, updates = self._run([[1.0, 1.0, 1.0]])
        assert updates == [1.0]
        assert state.step == 1

    def test_09_a_tail_does_not_leak_into_the_next_epoch(self):
        _, updates = self._run([[1.0, 1.0], [10.0], [1.0, 1.0], [1.0]])
        assert updates == [1.0, 10.0, 1.0, 1.0]

    def test_10_a_batch_that_does_not_divide(self):
        rows = jnp.arange(10.0) ** 2
        sizes = []

        def loss_fn(w, x):
            sizes.append(x.shape[0])
            return jnp.mean(w * x)

        loss, gradient = fg.value_and_grad(loss_fn, microbatch_size=4)(2.0, rows)
        assert sizes == [4, 4, 2]
        assert (loss, gradient) == (57.0, 28.5)
        message = r"num_microbatches=4 does not divide the batch of 10 rows.*microbatch_size=3"
        with pytest.raises(ValueError, match=message):
            fg.value_and_grad(loss_fn, num_microbatches=4)(2.0, rows)

    def test_11_resume_in_the_middle_of_a_window(self):
        optimizer = optax.adam(0.1)
        steps = fg.micro_steps(linear_loss, optimizer)
        rows = [jnp.array([1.0, 2.0]), jnp.array([5.0]), jnp.array([-3.0])]
        state = fg.TrainState.create(jnp.array(0.5), optimizer)
        for row in rows:
            state, _ = steps.backward(state, row)
        unbroken, _ = steps.update(state)

        state = fg.TrainState.create(jnp.array(0.5), optimizer)
        state, _ = steps.backward(state, rows[0])
        leaves, treedef = jax.tree.flatten(state)
        saved = [np.asarray(leaf) for leaf in leaves]  # what a checkpoint holds: arrays, and nothing of the loop
        resumed = treedef.unflatten(jnp.asarray(leaf) for leaf in saved)
        assert resumed.buffer.count == 1
        for row in rows[1:]:
            resumed, _ = steps.backward(resumed, row)
        resumed, _ = steps.update(resumed)
        assert jax.tree.leaves(resumed) == jax.tree.leaves(unbroken)


class TestZeroGrad:
    def test_12_cleared_at_the_end_of_the_window_and_only_there(self):
        assert fg.total(fold_means([1.0, 2.0])) == 3.0
        _, updates = TestWindows._run([[1.0, 2.0], [1.0]])
        assert updates == [1.5, 1.0]
        step = fg.train_step(linear_loss, optax.sgd(1.0), num_microbatches=2)
        state = fg.TrainState.create(jnp.array(0.0), optax.sgd(1.0))
        state, _ = step(state, jnp.array([1.0, 2.0]))
        state, _ = step(state, jnp.array([1.0, 1.0]))
        assert state.params == -2.5

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_13_nan_does_not_survive(self, bad):
        buffer = fg.zero_grad(fold_means([bad]))
        assert fg.mean(fg.accumulate(buffer, jnp.array(2.0))) == 2.0

        optimizer = optax.set_to_zero()  # the parameters stay finite, so that only the buffer could carry the fault on
        state = fg.TrainState.create(jnp.array(1.0), optimizer)
        steps = fg.micro_steps(linear_loss, optimizer)
        state, _ = steps.backward(state, jnp.array([bad]))
        state, metrics = steps.update(state)
        assert not np.isfinite(metrics["grad_norm"])
        step = fg.train_step(linear_loss, optimizer, num_microbatches=2)
        for rows, finite in (([bad, 1.0], False), ([3.0, 1.0], True)):
            fresh = fg.zeros(state.params)
            assert [float(leaf) for leaf in jax.tree.leaves(state.buffer)] == [0.0] * len(jax.tree.leaves(fresh))
            state, metrics = step(state, jnp.array(rows))
            assert np.isfinite(metrics["grad_norm"]) == finite
        assert metrics["grad_norm"] == 2.0

    def test_14_gradients_read_before_zero_grad_keep_their_value(self):
        buffer = fold_means([1.0, 2.0])
        kept = fg.total(buffer)
        cleared = fg.zero_grad(buffer)
        assert (kept, fg.total(cleared), cleared.count, cleared.weight) == (3.0, 0.0, 0, 0)


class TestClipScheduleState:
    def test_15_the_norm_is_clipped_once_a_window(self):
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        rows = jnp.array([[3.0, 0.0], [0.0, 4.0]])
        step = fg.train_step(lambda w, x: jnp.mean(x @ w), optimizer, num_microbatches=2)
        state, metrics = step(fg.TrainState.create(jnp.zeros(2), optimizer), rows)
        assert np.allclose(-state.params, [0.6, 0.8], rtol=1e-6)
        assert metrics["grad_norm"] == 2.5  # of the mean, before clipping

    def test_16_a_schedule_ticks_once_a_window(self):
        optimizer = optax.sgd(lambda count: 0.1 * 0.5**count)
        steps = fg.micro_steps(linear_loss, optimizer)
        state, updates = fg.TrainState.create(jnp.array(0.0), optimizer), []
        for _ in range(2):
            before = float(state.params)
            for _ in range(2):
                state, _ = steps.backward(state, jnp.array([1.0]))
            state, _ = steps.update(state)
            updates.append(before - float(state.params))
        assert np.allclose(updates, [0.1, 0.05], rtol=1e-6)

    def test_17_the_optimizer_does_not_run_in_backward(self):
        """Accumulating never reaches the optimizer: in PyTorch, an optimizer run by a hook in backward() breaks the window."""
        optimizer = optax.adam(0.1)
        steps = fg.micro_steps(linear_loss, optimizer)
        state = fg.TrainState.create(jnp.array(1.0), optimizer)
        before = [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state, state.step))]
        for _ in range(3):
            state, _ = steps.backward(state, jnp.array([1.0]))
        assert [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state, state.step))] == before
        with pytest.raises(TypeError, match=r"optimizer must be an optax transformation.*got function"):
            fg.micro_steps(linear_loss, lambda grads: grads)


class TestNumbers:
    @pytest.mark.parametrize("count", [300, 1000])
    def test_18_low_precision_sums(self, count):
        ones = jnp.ones((), jnp.bfloat16)
        buffer = jax.lax.fori_loop(0, count, lambda _, buffer: fg.accumulate(buffer, ones), fg.zeros(ones))
        assert fg.total(buffer) == count
        loss_fn = lambda w, x: jnp.sum(w * x)  # one row a microbatch
        gradient = jax.jit(fg.grad(loss_fn, num_microbatches=count))(ones, jnp.ones(count, jnp.bfloat16))
        assert (gradient, gradient.dtype) == (1, jnp.bfloat16)

    def test_18_float16_does_not_overflow(self):
        large = jnp.array(30000, jnp.float16)
        assert fg.mean(fold_means([large] * 8)) == 30000
        for num, rows in ((8, 8), (2, 64)):
            loss_fn = lambda w, x: jnp.mean(w * x[:1])
            gradient = fg.grad(loss_fn, num_microbatches=num)(jnp.float16(1), jnp.full(rows, large))
            assert (gradient, gradient.dtype) == (30000, jnp.float16)

    def test_19_float64_stays_float64(self, x64):
        rows = np.random.default_rng(0).normal(size=64)
        gradient = fg.grad(linear_loss, num_microbatches=8)(1.0, rows)
        assert gradient.dtype == np.float64
        assert abs(gradient - np.mean(rows)) <= 1e-15
        assert fg.zeros(jnp.float64(1)).weight.dtype == np.float64

    def test_19_complex_keeps_its_imaginary_part(self):
        rows = jnp.array([1 + 2j, 3 - 1j, -2 + 5j, 1j])
        loss_fn = lambda w, x: jnp.mean(jnp.abs(w * x) ** 2)
        whole = jax.grad(loss_fn)(1 + 1j, rows)
        for num in (2, 4):
            assert np.allclose(fg.grad(loss_fn, num_microbatches=num)(1 + 1j, rows), whole, rtol=1e-6)
        assert fg.mean(fold_means([1 + 2j, 3 - 4j])) == 2 - 1j

    def test_20_a_microbatch_that_is_not_finite_is_left_out_whole(self):
        for bad in (np.nan, np.inf):
            buffer = fold_means([1.0, bad, 5.0], skip_nonfinite=True)
            assert (fg.mean(buffer), buffer.weight, buffer.count, buffer.skipped) == (3.0, 2, 2, 1)
            rows = jnp.array([1.0, bad, 5.0])
            loss, gradient = fg.value_and_grad(linear_loss, num_microbatches=3, skip_nonfinite=True)(2.0, rows)
            assert (loss, gradient) == (6.0, 3.0)
            optimizer = optax.sgd(1.0)
            step = fg.train_step(linear_loss, optimizer, num_microbatches=3, skip_nonfinite=True)
            state, metrics = step(fg.TrainState.create(jnp.array(0.0), optimizer), rows)
            assert (state.params, metrics["skipped"], metrics["weight"]) == (-3.0, 1, 2)


class TestStructure:
    def test_23_recurrent_state_detached_or_not(self):
        def loss_fn(w, times, h):
            """The losses of h_t = w h_(t-1), added, over the time steps of a window."""
            losses = []
            for _ in times:
                h = w * h
                losses.append(h)
            return fg.WeightedLoss(sum(losses), 1.0), (h, None)

        times, options = jnp.arange(2), {"has_aux": True, "carry_argnum": 2, "order": "contiguous"}
        for num, gradient in ((2, 3.0), (1, 5.0)):  # two windows of a step each: truncated; one of two steps: full
            fun = fg.value_and_grad(loss_fn, num_microbatches=num, **options)
            for each in (fun, jax.jit(fun)):
                (mean, (h, _)), mean_gradient = each(2.0, times, 1.0)
                assert (mean * num, h, mean_gradient * num) == (6.0, 4.0, gradient)
        backward, buffer, h = fg.backward(loss_fn, has_aux=True, carry_argnum=2), fg.zeros(2.0), 1.0
        for time_step in (times[:1], times[1:]):
            buffer, (_, (h, _)) = backward(buffer, 2.0, time_step, h)
        assert fg.total(buffer) == 3.0

    def test_24_in_batch_negatives(self):
        x, y = (jax.random.normal(jax.random.key(seed), (4, 3)) for seed in (0, 1))
        encode = lambda w, batch: tuple(jnp.tanh(rows @ w) for rows in batch)

        def contrast(w, representations):
            """Each row's answer among those of all rows."""
            queries, answers = representations
            return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(queries @ answers.T)))

        loss_fn = lambda w, batch: contrast(w, encode(w, batch))
        w = jnp.eye(3) + 0.5
        whole = jax.grad(loss_fn)(w, (x, y))
        assert np.linalg.norm(whole) > 0.1
        assert np.all(fg.grad(loss_fn, num_microbatches=4)(w, (x, y)) == 0)  # a row among one: nothing to tell apart
        loss, in_two_passes = fg.coupled_value_and_grad(encode, contrast, num_microbatches=4)(w, (x, y))
        assert np.allclose(in_two_passes, whole, rtol=1e-5, atol=1e-7)
        assert np.isclose(loss, loss_fn(w, (x, y)), rtol=1e-6)

    def test_25_the_same_dropout_mask_in_every_microbatch(self):
        def loss_fn(w, x, key):
            mask = jax.random.bernoulli(key, 0.5, x.shape)
            return jnp.mean(w * x * mask), mask.astype(jnp.float32)

        x = jnp.ones((4, 64))
        with pytest.raises(ValueError, match=r"args\[2\] is a PRNG key.*key_argnums=\(2,\)"):
            fg.value_and_grad(loss_fn, has_aux=True, num_microbatches=2)(1.0, x, jax.random.key(0))
        fun = fg.value_and_grad(loss_fn, has_aux=True, num_microbatches=2, key_argnums=2, aux="sum")
        (_, overlap), _ = fun(1.0, x, jax.random.key(0))
        assert set(np.unique(overlap)) == {0.0, 1.0, 2.0}  # with equal masks only 0 and 2 occur

    def test_26_leaves_that_cannot_be_differentiated(self):
        params = {
            "w": jnp.ones(()),
            "int": jnp.arange(3),
            "bool": jnp.array(True),
            "key": jax.random.key(0),
            "none": None,
            "float0": np.zeros((2,), jax.dtypes.float0),
            "number": 3,
            "name": "encoder",
            "function": jnp.tanh,
        }
        loss_fn = lambda params, x: jnp.mean(params["function"](params["w"] * x)) + 0 * params["int"].sum()
        rows = jnp.arange(4.0)
        want = jax.grad(lambda w: loss_fn({**params, "w": w}, rows))(params["w"])
        for num in (1, 2):
            grads = fg.grad(loss_fn, num_microbatches=num)(params, rows)
            assert abs(grads.pop("w") - want) <= 1e-6
            assert grads == {name: None for name in params if name != "w"}
        buffer = fg.zeros(params)
        assert buffer.grads == {name: None if name != "w" else 0.0 for name in params}
        integer = {"w": jnp.ones(()), "int": jnp.arange(3)}
        grads = jax.grad(lambda p: p["w"] * p["int"].sum(), allow_int=True)(integer)
        assert fg.mean(fg.accumulate(fg.zeros(integer), grads)) == {"w": 3.0, "int": None}

        optimizer = optax.adam(0.1)
        step = fg.train_step(loss_fn, optimizer, num_microbatches=2)
        state, _ = step(fg.TrainState.create(params, optimizer), rows)
        assert state.params["w"] != params["w"]
        assert (state.params["name"], state.params["function"], state.params["number"]) == ("encoder", jnp.tanh, 3)
        assert jnp.array_equal(jax.random.key_data(state.params["key"]), jax.random.key_data(params["key"]))

    def test_27_a_leaf_of_the_batch_without_a_batch_axis(self):
        batch = {"x": jnp.arange(4.0), "scale": jnp.array(2.0)}
        loss_fn = lambda w, batch: jnp.mean(w * batch["x"] * batch["scale"])
        with pytest.raises(ValueError, match=r"args\[1\]\['scale'\] is a scalar, float32\[\].*in_axes=None"):
            fg.grad(loss_fn, num_microbatches=2)(1.0, batch)
        assert fg.grad(loss_fn, num_microbatches=2, in_axes={"x": 0, "scale": None})(1.0, batch) == 3.0

    def test_28_the_mean_of_an_integer(self):
        loss_fn = lambda w, x: (jnp.mean(w * x), {"correct": jnp.sum(x > 1)})
        options = {"has_aux": True, "num_microbatches": 2}
        with pytest.raises(TypeError, match=r"aux\['correct'\] is int32\[\], which has no mean .*Reduce it with \"sum\""):
            fg.value_and_grad(loss_fn, **options)(1.0, jnp.arange(4.0))
        (_, aux), _ = fg.value_and_grad(loss_fn, **options, aux="sum")(1.0, jnp.arange(4.0))
        assert (aux["correct"], aux["correct"].dtype) == (2, jnp.int32)

    def test_29_no_buffer_for_frozen_parameters(self):
        params = {"frozen": jnp.ones((100, 100)), "trained": jnp.ones(3)}
        trainable = {"frozen": False, "trained": True}
        buffer = fg.zeros(params, trainable=trainable)
        assert buffer.grads["frozen"] is None
        optimizer = optax.adam(0.1)
        state = fg.TrainState.create(params, optimizer, trainable=trainable)
        assert sum(leaf.size for leaf in jax.tree.leaves((state.buffer, state.opt_state))) == 3 * 3 + 4
        step = fg.train_step(lambda p, x: jnp.mean(x * p["frozen"].sum() * p["trained"].sum()), optimizer)
        state, _ = step(state, jnp.ones(2))
        assert jnp.array_equal(state.params["frozen"], params["frozen"])
        assert not jnp.array_equal(state.params["trained"], params["trained"])

    def test_29_a_frozen_half_halves_the_buffer_and_costs_no_backward_pass(self):
        """Four equal layers: of the 7 matrix products in the backward pass 3 are left, or 5 if the last half is frozen."""
        model, optimizer = models.mlp(inputs=64, width=64, layers=3, classes=64), optax.sgd(0.1)
        forward = jax.jit(model.loss_fn).lower(model.params, model.batch).compile().cost_analysis()["flops"]
        backward = fg.micro_steps(model.loss_fn, optimizer).backward

        def costs(trainable):
            state = fg.TrainState.create(model.params, optimizer, trainable=trainable)
            flops = backward.lower(state, model.batch).compile().cost_analysis()["flops"]
            return sum(leaf.nbytes for leaf in jax.tree.leaves(state.buffer.grads)), flops - forward

        all_bytes, all_flops = costs(None)
        for trained, most in (([2, 3], 0.5), ([0, 1], 0.8)):
            half_bytes, half_flops = costs([index in trained for index in range(4)])
            assert half_bytes == all_bytes / 2
            assert half_flops <= most * all_flops

    @pytest.mark.optimized
    def test_30_convolutions_in_a_rolled_loop(self):
        model = models.convolutional(rows=32, side=32, channels=(16, 32))
        functions = {
            loop: jax.jit(fg.value_and_grad(model.loss_fn, num_microbatches=4, loop=loop)) for loop in ("auto", "scan")
        }
        if jax.default_backend() == "cpu":
            assert "scan[" not in str(jax.make_jaxpr(functions["auto"])(model.params, model.batch))
            assert "scan[" in str(jax.make_jaxpr(functions["scan"])(model.params, model.batch))
        times = {loop: [] for loop in functions}
        for _ in range(6):
            for loop, fun in functions.items():
                start = time.perf_counter()
                jax.block_until_ready(fun(model.params, model.batch))
                times[loop].append(time.perf_counter() - start)
        if jax.default_backend() == "cpu":
            assert statistics.median(times["auto"][1:]) <= statistics.median(times["scan"][1:]) / 2


class TestImplicitFace:
    """The same faults where gradient state is hidden."""

    @staticmethod
    def _weight(value=0.0):
        weight = stateful.Parameter(jnp.array(value))
        return weight, stateful.Optimizer(optax.sgd(1.0), weight)

    def test_12_cleared_at_the_end_of_the_window_and_only_there(self):
        weight, optimizer = self._weight()
        for window, total in (([1.0, 2.0], 3.0), ([1.0], 1.0)):
            optimizer.zero_grad()
            for row in window:
                stateful.evaluate(jnp.multiply, weight, row).backward()
            assert weight.grad == total
            optimizer.step()

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_13_nan_does_not_survive(self, bad, set_to_none):
        weight, optimizer = self._weight()
        for row in (bad, 2.0):
            optimizer.zero_grad(set_to_none)
            stateful.evaluate(jnp.multiply, weight, row).backward()
        assert weight.grad == 2.0

    def test_14_gradients_read_before_zero_grad_keep_their_value(self):
        weight, optimizer = self._weight()
        stateful.evaluate(jnp.multiply, weight, 3.0).backward()
        kept = weight.grad
        optimizer.zero_grad()
        assert weight.grad is None
        stateful.evaluate(jnp.multiply, weight, 5.0).backward()
        assert (kept, weight.grad) == (3.0, 5.0)

    def test_17_an_optimizer_that_runs_in_backward_warns(self):
        weight, optimizer = self._weight()
        weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.warns(UserWarning, match="an optimizer steps in a hook, at every backward"):
            stateful.evaluate(jnp.multiply, weight, 1.0).backward()

    def test_21_a_parameter_used_in_one_microbatch_only(self):
        params = stateful.parameters({"a": jnp.array(1.0), "b": jnp.array(1.5)})
        losses = [lambda params: 2 * params["a"], lambda params: params["a"] + 3 * params["b"]]
        for loss_fn in losses:
            stateful.evaluate(loss_fn, params).backward()
        assert (params["a"].grad, params["b"].grad) == (3.0, 3.0)
        buffer = fg.zeros({"a": jnp.array(1.0), "b": jnp.array(1.5)})
        buffer = fg.accumulate(
            fg.accumulate(buffer, {"a": jnp.array(2.0), "b": None}), {"a": jnp.array(1.0), "b": jnp.array(3.0)}
        )
        assert fg.total(buffer) == {"a": 3.0, "b": 3.0}

    def test_22_the_generators_backward_leaves_nothing_in_the_discriminator(self):
        discriminator, generator = stateful.Parameter(jnp.array(2.0)), stateful.Parameter(jnp.array(3.0))
        stateful.evaluate(jnp.multiply, discriminator, generator).backward(inputs=[generator])
        assert (discriminator.grad, generator.grad) == (None, 2.0)
        generator.zero_grad()
        stateful.evaluate(jnp.multiply, discriminator.detach(), generator).backward()
        assert (discriminator.grad, generator.grad) == (None, 2.0)
        buffer, _ = fg.backward(lambda generator, discriminator: discriminator * generator, batch_argnums=())(
            fg.zeros(jnp.array(3.0)), jnp.array(3.0), jnp.array(2.0)
        )
        assert fg.total(buffer) == 2.0  # the explicit face: each network has a buffer of its own

    def test_23_recurrent_state_detached_or_not(self):
        def step(w, h):
            return w * h, w * h  # the loss, and the next state

        def two_steps(w, h):
            first, h = step(w, h)
            return first + step(w, h)[0]

        weight, _ = self._weight(2.0)
        loss = stateful.evaluate(step, weight, 1.0)
        loss.backward()
        stateful.evaluate(step, weight, loss.aux).backward()
        assert weight.grad == 3.0  # truncated: the second step sees the first one's state as a constant
        weight.zero_grad()
        stateful.evaluate(two_steps, weight, 1.0).backward()
        assert weight.grad == 5.0
