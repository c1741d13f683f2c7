"""Mutable modules of flax on the pure core: linen by hand, nnx through `fg.nnx.train_step`."""

import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_identical, relative_difference
from flax import nnx

import funcgrad as fg

STEPS, NUM, ROWS = 5, 4, 8
ADAM = optax.adam(1e-2)  # one object, so that what is compiled for it serves all tests
# What rounding explains after five steps of Adam, which divides by the root of small squares.
FIVE_STEPS_FLOAT32, FIVE_STEPS_FLOAT64 = 1e-4, 1e-11


def batches(dtype=jnp.float32):
    rows = jnp.sin(jnp.arange(STEPS * ROWS * 3, dtype=dtype)).reshape(STEPS, ROWS, 3)
    return [{"x": x, "y": jnp.sum(x, axis=1) ** 2} for x in rows]


class Net(nnx.Module):
    """BatchNorm, Dropout, and a part that is frozen by a filter."""

    def __init__(self, seed=0, *, width=8, dtype=jnp.float32):
        rngs, options = nnx.Rngs(seed), {"param_dtype": dtype, "dtype": dtype}
        self.frozen = nnx.Linear(3, width, rngs=rngs, **options)
        self.first = nnx.Linear(width, width, use_bias=False, rngs=rngs, **options)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs, **options)
        self.norm.mean, self.norm.var = (nnx.BatchStat(make(width, dtype)) for make in (jnp.zeros, jnp.ones))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(width, 1, rngs=rngs, **options)

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(jnp.tanh(self.frozen(x)))))))[:, 0]


TRAINED = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("frozen")))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def made(model, optimizer=None, wrt=TRAINED):
    return model, nnx.Optimizer(model, optimizer or ADAM, wrt=wrt)


def values(*modules):
    """The arrays of modules and optimizers; keys as their data."""
    leaves = jax.tree.leaves([nnx.state(module) for module in modules])
    return [np.array(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


@nnx.jit
def hand_written(model, optimizer, batch):
    """A loop over the microbatches, in turn: the gradients averaged by hand, statistics and streams as nnx has them."""
    total, losses = None, []
    for index in range(NUM):
        part = jax.tree.map(lambda leaf, index=index: leaf[index::NUM], batch)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, optimizer.wrt))(model, part)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        losses.append(loss)
    optimizer.update(model, jax.tree.map(lambda leaf: leaf / NUM, total))
    return sum(losses) / NUM


def compare_with_hand_written(dtype, tolerance):
    model, optimizer = made(Net(dtype=dtype))
    other, other_optimizer = made(Net(dtype=dtype))
    frozen = values(model.frozen)
    step = fg.nnx.train_step(model, optimizer, loss_fn, num_microbatches=NUM)
    for number, batch in enumerate(batches(dtype), start=1):
        metrics, want = step(batch), hand_written(other, other_optimizer, batch)
        assert relative_difference(metrics["loss"], want) <= tolerance
        assert relative_difference(values(model, optimizer), values(other, other_optimizer)) <= tolerance
        assert model.dropout.rngs.count[...] == number * NUM
    assert model.last.kernel[...].dtype == dtype
    assert sorted(metrics) == ["grad_norm", "loss", "skipped", "weight"]
    assert_identical(values(model.frozen), frozen)
    return optimizer


def test_linen_with_statistics_and_dropout_equals_a_hand_written_loop():
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            x = flax.linen.BatchNorm(use_running_average=False, momentum=0.9)(flax.linen.Dense(8, use_bias=False)(x))
            return flax.linen.Dense(1)(flax.linen.Dropout(0.5, deterministic=False)(jnp.tanh(x)))[:, 0]

    model, optimizer = Model(), optax.adam(1e-2)
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.ones((2, 3)))

    def loss_fn(params, batch, key, statistics):
        inputs = {"params": params, "batch_stats": statistics}
        predictions, new = model.apply(inputs, batch["x"], rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean((predictions - batch["y"]) ** 2), (new["batch_stats"], None)

    @jax.jit
    def by_hand(params, opt_state, statistics, batch, key):
        total = jax.tree.map(jnp.zeros_like, params)
        for index in range(NUM):
            part = jax.tree.map(lambda leaf, index=index: leaf[index::NUM], batch)
            grads, (statistics, _) = jax.grad(loss_fn, has_aux=True)(params, part, jax.random.fold_in(key, index), statistics)
            total = jax.tree.map(jnp.add, total, grads)
        updates, opt_state = optimizer.update(jax.tree.map(lambda leaf: leaf / NUM, total), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, statistics

    step = fg.train_step(loss_fn, optimizer, num_microbatches=NUM, has_aux=True, key_argnums=2, carry_argnum=3)
    state, statistics = fg.TrainState.create(variables["params"], optimizer), variables["batch_stats"]
    want = variables["params"], optimizer.init(variables["params"]), variables["batch_stats"]
    for number, batch in enumerate(batches()):
        key = jax.random.key(number)
        state, metrics = step(state, batch, key, statistics)
        statistics, want = metrics["carry"], by_hand(*want, batch, key)
        assert relative_difference((state.params, state.opt_state, statistics), want) <= FIVE_STEPS_FLOAT32


def test_a_module_equals_a_hand_written_loop():
    optimizer = compare_with_hand_written(jnp.float32, FIVE_STEPS_FLOAT32)
    assert "frozen" not in optimizer.opt_state[0].mu
    assert optimizer.step[...] == STEPS


def test_a_module_equals_a_hand_written_loop_in_float64(x64):
    compare_with_hand_written(jnp.float64, FIVE_STEPS_FLOAT64)


@pytest.fixture(scope="module")
def shared():
    """One module, its optimizer and a step with every call of the loss noted, for tests that leave them fit for use."""
    calls = []

    def noted(model, batch):
        calls.append(1)
        return loss_fn(model, batch)

    model, optimizer = made(Net())
    return model, optimizer, fg.nnx.train_step(model, optimizer, noted, num_microbatches=NUM), calls


def test_the_loss_is_traced_once_for_given_shapes_and_attributes(shared):
    model, _, step, calls = shared
    batch, before = batches()[0], len(calls)
    for mode in (model.train, model.train, model.eval, model.train, model.eval):
        mode()
        step(batch)
    assert len(calls) - before <= 2  # an earlier test may have been the first to train
    statistics = values(model.norm)
    step(batch)
    assert_identical(values(model.norm)[1], statistics[1])  # the running mean is not touched in eval mode
    model.train()
    step(batch)
    assert not np.array_equal(values(model.norm)[1], statistics[1])


def test_an_error_leaves_module_and_optimizer_as_they_were(shared):
    model, optimizer, step, _ = shared
    batch = batches()[0]
    step(batch)
    before = values(model, optimizer)
    for wrong, text in (
        ({"x": batch["x"][:7], "y": batch["y"][:7]}, "num_microbatches=4 does not divide the batch of 7 rows"),
        ({"x": batch["x"][:, :2], "y": batch["y"]}, "dot_general requires contracting dimensions"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            step(wrong)
    with pytest.raises(ValueError, match="batch_argnums names argument 1, but the function was called with 1 positional"):
        step()
    assert_identical(values(model, optimizer), before)
    step(batch)


def test_a_step_reuses_its_arrays_and_no_others(shared):
    model, optimizer, step, _ = shared
    batch = batches()[0]

    def pointers():
        return sorted(
            leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((nnx.state(model, TRAINED), optimizer.opt_state))
        )

    step(batch)
    before = pointers()
    step(batch)
    assert pointers() == before
    target = Net(1)
    nnx.update(target, jax.tree.map(lambda leaf: leaf, nnx.state(model)))  # it holds the same arrays
    snapshot = jax.tree.leaves(nnx.state(model))
    want = values(target)
    step(batch)
    assert_identical(values(target), want)
    assert not any(leaf.is_deleted() for leaf in snapshot)
    model.last.bias, bias = nnx.Param(model.last.bias[...]), model.last.bias  # the old variable lives on
    step(batch)
    assert np.isfinite(bias[...]).all()


@pytest.mark.parametrize(
    "call", [lambda step, x: nnx.jit(step)(x), lambda step, x: jax.jit(step)(x)], ids=["nnx.jit", "jax.jit"]
)
def test_a_module_from_another_trace_level(shared, call):
    model, optimizer, step, _ = shared
    before = values(model, optimizer)
    with pytest.raises(
        ValueError, match=r"model\.first\.kernel is of another trace level: .* Pass module and optimizer to nnx"
    ):
        call(step, batches()[0])
    assert_identical(values(model, optimizer), before)


def test_inside_nnx_jit():
    model, optimizer = made(Net())
    other, other_optimizer = made(Net())

    @nnx.jit
    def train(model, optimizer, batch):
        return fg.nnx.train_step(model, optimizer, loss_fn, num_microbatches=NUM)(batch)["loss"]

    for batch in batches()[:2]:
        want = hand_written(other, other_optimizer, batch)
        assert relative_difference(train(model, optimizer, batch), want) <= FIVE_STEPS_FLOAT32
    assert relative_difference(values(model, optimizer), values(other, other_optimizer)) <= FIVE_STEPS_FLOAT32


def test_memory_is_that_of_the_pure_step():
    model, optimizer = made(Net(width=384), wrt=nnx.Param)
    batch = batches()[0]
    step = fg.nnx.train_step(model, optimizer, loss_fn, num_microbatches=NUM)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    (params, treedef), (rest, rest_treedef) = map(jax.tree.flatten, (params, rest))

    def pure_loss(params, batch, rest):
        merged = nnx.merge(graphdef, treedef.unflatten(params), rest_treedef.unflatten(rest))
        loss = loss_fn(merged, batch)
        return loss, (jax.tree.leaves(nnx.state(merged, nnx.Not(nnx.Param))), None)

    pure = fg.train_step(pure_loss, ADAM, num_microbatches=NUM, has_aux=True, carry_argnum=2)
    state = fg.TrainState.create(params, ADAM)
    of_module = step.lower(batch).compile().memory_analysis()
    of_pure = pure.lower(state, batch, rest).compile().memory_analysis()
    assert of_module.temp_size_in_bytes <= 1.05 * of_pure.temp_size_in_bytes
    assert of_module.total_size_in_bytes <= 1.05 * of_pure.total_size_in_bytes


def test_what_is_frozen_has_neither_optimizer_state_nor_buffer():
    model = Net(width=64)
    sizes = []
    for wrt in (TRAINED, nnx.Param):
        step = fg.nnx.train_step(*made(model, optax.sgd(0.1, momentum=0.9), wrt=wrt), loss_fn, num_microbatches=NUM)
        inputs = jax.tree.leaves(step.lower(batches()[0]).inputs)
        sizes.append(sum(leaf.nbytes for leaf in inputs if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)))
    assert sizes[1] - sizes[0] == 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model.frozen)))


class Layered(nnx.Module):
    """Tied weights, layers in a scan, a checkpoint and a jit, which hand out anew what they were passed, and containers."""

    def __init__(self, rngs):
        self.embed, self.tied = (nnx.Linear(3, 3, use_bias=False, rngs=rngs) for _ in range(2))
        self.tied.kernel = self.embed.kernel

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs):
            return nnx.Linear(3, 3, rngs=rngs)

        self.scanned, self.layers = stacked(rngs), nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(3)])
        self.parts = nnx.Dict(last=nnx.Linear(3, 1, rngs=rngs), shift=nnx.Variable(0.0))
        self.seen, self.constant = nnx.Variable({"rows": 0, "calls": jnp.array(0)}), jnp.array(2.0)

    def __call__(self, x):
        seen = self.seen.get_value() if hasattr(self.seen, "get_value") else self.seen.value
        new = {"rows": seen["rows"] + len(x), "calls": seen["calls"] + 1}
        self.seen.set_value(new) if hasattr(self.seen, "set_value") else setattr(self.seen, "value", new)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def apply(x, layer):
            return jnp.tanh(layer(x))

        x = apply(self.tied(jnp.tanh(self.embed(x))), self.scanned)
        for layer in self.layers:
            x = x + nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(layer, x)
        return (nnx.jit(lambda layer, x: layer(x))(self.parts["last"], x) * self.constant)[:, 0]


def test_tied_weights_lifted_layers_and_containers():
    batch = batches()[0]
    results = []
    for options, num in (({"num_microbatches": 1}, 1), ({"microbatch_size": 3}, 3)):
        model, optimizer = made(Layered(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.All(nnx.Param, nnx.Not(nnx.PathContains(1))))
        kept = model.layers[1].kernel[...]
        step = fg.nnx.train_step(model, optimizer, loss_fn, **options)
        losses = [step(batch)["loss"] for _ in range(2)]
        assert model.tied.kernel is model.embed.kernel
        assert model.layers[1].kernel[...] is kept
        calls, rows = jax.tree.leaves(model.seen)
        assert (calls, rows) == (2 * num, 2 * ROWS)
        results.append((losses, [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]))
    assert relative_difference(*results) <= FIVE_STEPS_FLOAT32


def test_weights_aux_keys_and_a_ragged_tail():
    model, optimizer = made(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)

    def weighted(model, x, key, y):
        errors = (model(x.T)[:, 0] - y) ** 2
        return fg.WeightedLoss(jnp.sum(errors), 2 * len(y)), {"errors": errors, "noise": jax.random.normal(key)}

    options = {"batch_argnums": (1, -1), "in_axes": (1, 0), "key_argnums": 2, "aux": {"errors": "concat", "noise": "stack"}}
    step = fg.nnx.train_step(
        model, optimizer, weighted, microbatch_size=3, has_aux=True, order="contiguous", skip_nonfinite=True, **options
    )
    batch = batches()[0]
    want = (model(batch["x"])[:, 0] - batch["y"]) ** 2
    metrics = step(batch["x"].T, jax.random.key(0), batch["y"])
    np.testing.assert_allclose(metrics["aux"]["errors"], want, rtol=1e-5)
    assert len(set(map(float, metrics["aux"]["noise"]))) == 3
    assert (metrics["weight"], metrics["skipped"]) == (16, 0)
    before, metrics = values(model, optimizer), step(batch["x"].T, jax.random.key(0), batch["y"] * jnp.nan)
    assert metrics["skipped"] == 3
    assert_identical(values(model, optimizer), before)


def test_what_donate_is_for():
    """An alias that JAX makes of an array is not known to Python."""
    for donate in (True, False):
        model, optimizer = made(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
        step = fg.nnx.train_step(model, optimizer, lambda model, batch: jnp.mean(model(batch["x"]) ** 2), donate=donate)
        step(batches()[0])
        alias = jax.device_put(jax.tree.leaves(nnx.state(model)), jax.devices()[0])
        step(batches()[0])
        assert [leaf.is_deleted() for leaf in alias] == [donate] * 2


@pytest.mark.parametrize("options", [{"loop": "host"}, {"donate": False}])
def test_other_forms_of_the_step(options):
    model, optimizer = made(Net())
    other, other_optimizer = made(Net())
    step = fg.nnx.train_step(model, optimizer, loss_fn, num_microbatches=NUM, **options)
    for batch in batches()[:2]:
        old = jax.tree.leaves(nnx.state(model, TRAINED))
        assert relative_difference(step(batch)["loss"], hand_written(other, other_optimizer, batch)) <= FIVE_STEPS_FLOAT32
        assert not any(leaf.is_deleted() for leaf in old)
    assert relative_difference(values(model, optimizer), values(other, other_optimizer)) <= FIVE_STEPS_FLOAT32


def test_as_few_microbatches_as_fit():
    model, optimizer = made(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
    sizes = []

    def noted(model, batch):
        sizes.append(len(batch["x"]))
        return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

    step = fg.nnx.train_step(model, optimizer, noted, num_microbatches="auto", budget_bytes="1GB")
    assert step(batches()[0])["weight"] == ROWS
    assert set(sizes) == {ROWS}


class Odd(nnx.Module):
    """A linear layer, and a variable with which `change` does something at each call."""

    def __init__(self, change, value=None, kind=nnx.Variable):
        self.linear, self.odd, self.change = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), kind(value), change

    def __call__(self, x):
        self.change(self)
        return self.linear(x)[:, 0]


def assign(module, value):
    nnx.update(module.odd, value)


def add_one(module):
    module.odd[...] = module.odd[...] + 1


def test_an_attribute_or_a_value_or_an_optimizer_that_was_changed_takes_effect():
    calls = []

    def scale(module):
        calls.append(1)
        module.odd[...] = module.odd[...] * module.factor

    module = Odd(scale, jnp.array(1.0))
    module.factor = 2
    (model, optimizer), batch = made(module, optax.sgd(0.1), wrt=nnx.Param), batches()[0]
    step = fg.nnx.train_step(model, optimizer, loss_fn, num_microbatches=NUM)
    step(batch)
    model.factor = 3
    nnx.update(model.linear, jax.tree.map(np.zeros_like, nnx.state(model.linear)))
    np.testing.assert_allclose(step(batch)["loss"], jnp.mean(batch["y"] ** 2), rtol=1e-6)
    assert (model.odd[...], len(calls)) == (2**NUM * 3**NUM, 2)
    optimizer.tx = optax.sgd(0.0)
    weights = values(model.linear)
    step(batch)
    assert_identical(values(model.linear), weights)


def test_a_frozen_parameter_that_the_loss_changes_is_carried():
    model, optimizer = made(Odd(add_one, jnp.array(0.0), nnx.Param), wrt=nnx.PathContains("linear"))
    fg.nnx.train_step(model, optimizer, loss_fn, num_microbatches=NUM)(batches()[0])
    assert model.odd[...] == NUM


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            lambda: Odd(lambda module: assign(module, jnp.zeros(4)), jnp.zeros(3)),
            r"the loss changes model\.odd from float32\[3\] to float32\[4\]. What microbatches hand on must keep",
        ),
        (
            lambda: Odd(lambda module: assign(module, jnp.zeros(3, jnp.bfloat16)), jnp.zeros(3)),
            r"the loss changes model\.odd from float32\[3\] to bfloat16\[3\]",
        ),
        (
            lambda: Odd(lambda module: assign(module, (jnp.zeros(3), jnp.ones(()))), (jnp.zeros(3),)),
            r"the loss changes model\.odd from \('float32\[3\]',\) to \('float32\[3\]', 'float32\[\]'\)",
        ),
        (
            lambda: Odd(lambda module: setattr(module, "more", nnx.Intermediate(jnp.zeros(3)))),
            r"the loss adds model\.more to the module, .* nnx\.pop\(model, nnx\.Intermediate\)",
        ),
        (lambda: Odd(lambda module: delattr(module, "odd")), r"the loss takes model\.odd out of the module"),
        (
            lambda: Odd(lambda module: setattr(module, "calls", 1)),
            "the loss changes the structure of the module, or an attribute that is no variable: calls\\. Do that",
        ),
        (lambda: Odd(add_one, jnp.array(0.0), nnx.Param), r"the loss assigns to model\.odd, which the optimizer trains"),
        (lambda: Odd(lambda module: None, jnp.array(1), nnx.Param), r"model\.odd is int32\[\], which has no gradient"),
    ],
)
def test_what_a_loss_may_not_do(model, text):
    model, optimizer = made(model(), optax.sgd(0.1), wrt=nnx.Param)
    before = values(model, optimizer)
    with pytest.raises((ValueError, TypeError), match=text):
        fg.nnx.train_step(model, optimizer, loss_fn, num_microbatches=NUM)(batches()[0])
    assert_identical(values(model, optimizer), before)


def test_what_is_only_seen_is_taken_out_in_the_loss():
    model, optimizer = made(Odd(lambda module: setattr(module, "more", nnx.Intermediate(jnp.ones(())))), wrt=nnx.Param)

    nnx.pop((model(jnp.ones((2, 3))), model)[1], nnx.Intermediate)  # flax 0.12.0 notes an attribute's name for good

    def seeing(model, batch):
        loss = loss_fn(model, batch)
        return loss, jax.tree.leaves(nnx.pop(model, nnx.Intermediate))

    step = fg.nnx.train_step(model, optimizer, seeing, num_microbatches=NUM, has_aux=True, aux="sum")
    assert step(batches()[0])["aux"] == [NUM]


class OwnUpdate(nnx.Optimizer):
    def update(self, model, grads, **kwargs):
        raise AssertionError


@pytest.mark.parametrize(
    ("optimizer", "error", "text"),
    [
        (lambda model: optax.sgd(0.1), TypeError, "must be an nnx.Optimizer.* got GradientTransformation"),
        (lambda model: OwnUpdate(model, optax.sgd(0.1), wrt=nnx.Param), TypeError, "OwnUpdate has an update method of its own"),
        (
            lambda model: nnx.Optimizer(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param),
            ValueError,
            r"not of this model: .* opt_state\[0\]\.mu\['bias'\] must be float32\[1\]; it is float32\[2\]",
        ),
        (
            lambda model: nnx.Optimizer(Net(), optax.adam(0.1), wrt=nnx.Param),
            ValueError,
            "not of this model: .* it is absent",
        ),
        (
            lambda model: nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.BatchStat),
            ValueError,
            "there is nothing to train: wrt=<class .*BatchStat'> of the optimizer selects no variable",
        ),
    ],
)
def test_what_is_wrong_with_an_optimizer(optimizer, error, text):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=text):
        fg.nnx.train_step(model, optimizer(model), loss_fn)(batches()[0])


def test_an_array_that_is_no_variable_cannot_be_trained():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    model.bare = jnp.ones(3)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Any(nnx.Param, nnx.PathContains("bare")))
    with pytest.raises(TypeError, match=r"model\.bare is float32\[3\], no nnx\.Variable that could be updated"):
        fg.nnx.train_step(model, optimizer, loss_fn)(batches()[0])


def test_a_value_that_is_mutable_to_jax_itself():
    model, optimizer = made(Odd(lambda module: None, jnp.zeros(3), functools.partial(nnx.Variable, hijax=True)), wrt=nnx.Param)
    with pytest.raises(TypeError, match=r"model\.odd is mutable to JAX itself"):
        fg.nnx.train_step(model, optimizer, loss_fn)(batches()[0])


def test_flax_is_imported_when_it_is_asked_for():
    with pytest.raises(AttributeError, match="module 'funcgrad' has no attribute 'missing'"):
        fg.missing  # noqa: B018
    assert fg.__getattr__("nnx") is fg.nnx


def test_the_module_is_not_an_argument_of_the_step():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = fg.nnx.train_step(model, optimizer, lambda model, x: jnp.mean(model(x) ** 2), num_microbatches=2)
    for arguments in ((model, optimizer, jnp.ones((4, 2))), (optimizer, jnp.ones((4, 2)))):
        with pytest.raises(TypeError, match=r"the step holds the module and the optimizer already: call step\(batch\)"):
            step(*arguments)


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.PathContains("kernel")])
def test_a_variable_that_holds_no_array(wrt):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.PathContains("kernel"))
    model.name = nnx.Param("text")
    optimizer.wrt = wrt
    step = fg.nnx.train_step(model, optimizer, lambda model, x: jnp.mean(model(x) ** 2), num_microbatches=2)
    with pytest.raises(TypeError, match=r"model.name holds .*, which is no array"):
        step(jnp.ones((4, 2)))
