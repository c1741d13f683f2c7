"""The plan of memory: the compiler's own figures, the right choice, as few compilations as a bisection takes."""

import re

import jax
import jax.numpy as jnp
import matplotlib as mpl
import models
import numpy as np
import optax
import pytest

import funcgrad as fg
from funcgrad import memory

OPTIMIZER = optax.adam(1e-3)


@pytest.fixture(scope="module")
def model():
    return models.transformer(rows=16, width=32)


@pytest.fixture
def compiled_once(monkeypatch):
    """What a plan compiles is compiled once for all tests that ask for the same."""
    compile_for = memory._Step.memory

    def memory_of(self, number):
        key = self._loss_fn, number, self.options
        if key not in KNOWN:
            KNOWN[key] = compile_for(self, number)
        return KNOWN[key]

    monkeypatch.setattr(memory._Step, "memory", memory_of)


KNOWN = {}


@pytest.fixture(scope="module")
def sizes(model):
    """The bytes of a step with each number of microbatches, from the step itself."""
    state = fg.TrainState.create(model.params, OPTIMIZER)
    steps = {num: fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=num) for num in (1, 2, 4, 8, 16)}
    return {num: step.lower(state, model.batch).compile().memory_analysis().total_size_in_bytes for num, step in steps.items()}


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


class TestPlan:
    def test_its_bytes_are_those_of_the_step_that_runs(self, model, sizes):
        found = fg.plan(model.loss_fn, shapes(model.params), shapes(model.batch), optimizer=OPTIMIZER)
        assert {candidate.num_microbatches: candidate.memory.total_size_in_bytes for candidate in found.candidates} == sizes
        assert (found.best, found.budget_bytes) == (1, None)

    @pytest.mark.parametrize("num", [1, 2, 4, 8, 16])
    def test_a_budget_just_above_and_just_below_a_candidate(self, model, sizes, compiled_once, num):
        assert sorted(sizes.values(), reverse=True) == list(sizes.values())
        options = {"optimizer": OPTIMIZER, "candidates": sizes}
        assert fg.plan(model.loss_fn, model.params, model.batch, budget_bytes=sizes[num], **options).best == num
        below = sizes[num] - 1
        if num == 16:
            text = rf"nothing fits the budget of .*: with 16 microbatches a step still needs .* \({sizes[16]} bytes\)"
            with pytest.raises(ValueError, match=text):
                fg.plan(model.loss_fn, model.params, model.batch, budget_bytes=below, **options)
        else:
            assert fg.plan(model.loss_fn, model.params, model.batch, budget_bytes=below, **options).best == 2 * num

    def test_without_an_optimizer_it_plans_for_value_and_grad(self, model):
        found = fg.plan(model.loss_fn, model.params, model.batch, candidates=[4])
        fun = jax.jit(fg.value_and_grad(model.loss_fn, num_microbatches=4))
        analysis = fun.lower(model.params, model.batch).compile().memory_analysis()
        assert found.candidates[0].memory.temp_size_in_bytes == analysis.temp_size_in_bytes
        assert found.candidates[0].memory.output_size_in_bytes == analysis.output_size_in_bytes

    def test_measured_the_fastest_that_fits_is_the_best(self, model, sizes, compiled_once, monkeypatch):
        times = {1: 0.1, 2: 5.0, 4: 3.0, 8: 4.0, 16: 9.0}
        monkeypatch.setattr(memory._Step, "seconds", lambda self, number: times[number])
        options = {"optimizer": OPTIMIZER, "budget_bytes": sizes[2]}
        found = fg.plan(model.loss_fn, model.params, model.batch, measure=True, **options)
        assert found.best == 4  # 1 is faster and does not fit
        assert {each.num_microbatches: each.seconds for each in found.candidates if each.seconds} == {
            num: times[num] for num in (2, 4, 8, 16)
        }

    def test_measuring_runs_the_steps_and_keeps_the_parameters(self, model):
        seen = []
        for optimizer in (OPTIMIZER, None):
            found = fg.plan(
                model.loss_fn,
                model.params,
                model.batch,
                optimizer=optimizer,
                candidates=[4],
                measure=True,
                report=seen.append,
            )
            assert all(candidate.seconds > 0 for candidate in found.candidates)
        assert [(candidate.num_microbatches, candidate.seconds is None) for candidate in seen] == 2 * [(4, True), (4, False)]
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model.params))
        with pytest.raises(TypeError, match="measure=True runs the steps and needs arrays"):
            fg.plan(model.loss_fn, shapes(model.params), model.batch, measure=True)

    def test_it_prints_as_a_table(self, model, sizes, compiled_once):
        text = str(fg.plan(model.loss_fn, model.params, model.batch, optimizer=OPTIMIZER, budget_bytes=sizes[4]))
        assert re.search(r"^ *microbatches +arguments +temporary +new output +total +fits$", text, re.MULTILINE)
        assert re.search(r"^ *4 .* yes <-$", text, re.MULTILINE)
        assert re.search(r"^budget .*: 4 microbatches$", text, re.MULTILINE)

    def test_plot(self, model):
        mpl.use("Agg")
        found = fg.plan(
            model.loss_fn, model.params, model.batch, optimizer=OPTIMIZER, budget_bytes="1GiB", candidates=[2], measure=True
        )
        figure = found.plot()
        lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
        assert {"total", "temporary", "budget", "time"} <= set(lines)
        np.testing.assert_allclose(lines["total"].get_ydata()[-1] * 2**20, found.candidates[-1].memory.total_size_in_bytes)

    def test_options_reach_the_step(self):
        def loss_fn(params, batch, key):
            return jnp.mean(params["w"] * batch * jax.random.normal(key, batch.shape)), {"n": 1.0}

        params = {"w": jnp.ones(4), "activation": jnp.tanh}
        arguments = (loss_fn, params, jax.ShapeDtypeStruct((6, 4), jnp.float32), jax.random.key(0))
        for optimizer in (OPTIMIZER, None):
            found = fg.plan(*arguments, optimizer=optimizer, has_aux=True, key_argnums=2)
            assert [candidate.num_microbatches for candidate in found.candidates] == [1, 2, 3, 6]

    def test_the_loop_and_the_buffer_are_those_of_the_step(self):
        model = models.convolutional(rows=16, side=16)
        for loop in ("host", "auto"):
            options = {"optimizer": OPTIMIZER, "candidates": [4], "loop": loop}
            found = fg.plan(model.loss_fn, model.params, model.batch, dtype=jnp.float32, compensated=True, **options)
            state = fg.TrainState.create(model.params, OPTIMIZER, compensated=True)
            step = fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=4, loop=loop)
            analysis = step.lower(state, model.batch).compile().memory_analysis()
            assert found.candidates[0].memory == analysis

    def test_bad_arguments(self, model):
        for name in ("num_microbatches", "microbatch_size"):
            with pytest.raises(ValueError, match=f"plan looks for the number .* itself; leave {name} out"):
                fg.plan(model.loss_fn, model.params, model.batch, **{name: 2})
        with pytest.raises(ValueError, match="num_microbatches=3 does not divide the batch of 16 rows"):
            fg.plan(model.loss_fn, model.params, model.batch, candidates=[3])
        with pytest.raises(ValueError, match="candidates must name at least one number"):
            fg.plan(model.loss_fn, model.params, model.batch, candidates=[])
        for budget in ("8 apples", 0, -1, "GiB", float("inf"), float("nan")):
            with pytest.raises(ValueError, match=r"a budget must be a number of bytes above 0, or text like '8GiB'"):
                fg.plan(model.loss_fn, model.params, model.batch, budget_bytes=budget)


class TestBisection:
    @pytest.mark.parametrize("budget", [*range(1, 257, 17), 256, 1000])
    def test_256_candidates_take_at_most_9_compilations(self, budget):
        looked = []

        def size(number):
            looked.append(number)
            return 257 - number

        place = memory.fewest_that_fit(range(1, 257), size, budget)
        assert place + 1 == max(1, 257 - budget)
        assert len(set(looked)) <= 9

    def test_sizes_that_do_not_fall(self):
        """The whole batch is looked at first, and all before it says that nothing fits."""
        sizes = {1: 7, 2: 12, 4: 12, 8: 11, 16: 6}
        assert memory.fewest_that_fit(list(sizes), sizes.get, 7) == 0
        assert memory.fewest_that_fit(list(sizes), sizes.get, 6) == 4
        assert memory.fewest_that_fit([2, 4, 8, 16, 32], {2: 12, 4: 12, 8: 5, 16: 12, 32: 12}.get, 6) == 2

    def test_divisors(self):
        assert memory.divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
        assert memory.divisors(1) == [1]


@pytest.mark.parametrize(
    ("text", "number"), [("8GiB", 8 * 2**30), ("500 MB", 5 * 10**8), ("1.5kib", 1536), ("12", 12), (7, 7), (7.9, 7)]
)
def test_bytes(text, number):
    assert memory.parse_bytes(text) == number


@pytest.mark.parametrize(
    ("number", "text"), [(512, "512 B"), (1536, "1.50 KiB"), (2**31, "2.00 GiB"), (5 * 2**50, "5120.00 TiB")]
)
def test_formatted_bytes(number, text):
    assert memory.format_bytes(number) == text


class TestAuto:
    def test_the_fewest_that_fit(self, model, sizes, compiled_once):
        step = fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches="auto", budget_bytes=sizes[4])
        state = fg.TrainState.create(model.params, OPTIMIZER)
        assert step.lower(state, model.batch).compile().memory_analysis().total_size_in_bytes == sizes[4]
        state, metrics = step(state, model.batch)
        whole = models.mean_loss(model.loss_fn)(model.params, model.batch)
        np.testing.assert_allclose(metrics["loss"], whole, rtol=1e-5)
        state, _ = step(state, model.batch)
        assert state.step == 2

    def test_what_does_not_go_together(self):
        model = models.mlp(rows=4)
        state = fg.TrainState.create(model.params, OPTIMIZER)
        with pytest.raises(ValueError, match='goes with num_microbatches="auto"; got num_microbatches=2'):
            fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches=2, budget_bytes=1)
        with pytest.raises(ValueError, match='give num_microbatches="auto" or microbatch_size, not both'):
            fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches="auto", microbatch_size=2, budget_bytes=1)
        with pytest.raises(ValueError, match="a budget must be a number of bytes"):
            fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches="auto", budget_bytes="a lot")
        with pytest.raises(ValueError, match="nothing fits the budget of 1 B"):
            fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches="auto", budget_bytes=1)(state, model.batch)
        if memory.device_limit(jax.tree.leaves(state)) is None:
            with pytest.raises(ValueError, match="needs to know how much memory there is, and this device does not say"):
                fg.train_step(model.loss_fn, OPTIMIZER, num_microbatches="auto")(state, model.batch)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
