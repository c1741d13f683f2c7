import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import funcgrad as fg
from funcgrad import microbatch


def loss_fn(w, batch):
    loss = fg.WeightedLoss(jnp.sum(w * batch["x"] * batch["mask"]), jnp.sum(batch["mask"]))
    aux = {
        "accuracy": jnp.sum((batch["x"] > 2) * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1),
        "correct": jnp.sum(batch["x"] > 2),
        "any": jnp.any(batch["x"] > 2),
        "nested": [batch["x"].max() * jnp.ones(2), None],
    }
    return loss, aux


BATCH = {"x": jnp.arange(6.0), "mask": jnp.array([1.0, 0, 1, 1, 1, 1])}
REDUCTION = {"accuracy": "mean", "correct": "sum", "any": "sum", "nested": "mean"}


@pytest.mark.parametrize("loop", ["auto", "scan", "unroll"])
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
def test_mean_is_weighted_like_the_loss_and_sum_adds(loop, wrap):
    fun = wrap(fg.value_and_grad(loss_fn, has_aux=True, num_microbatches=3, aux=REDUCTION, loop=loop))
    (loss, aux), _ = fun(1.0, BATCH)
    assert loss == (0 + 2 + 3 + 4 + 5) / 5
    assert jnp.isclose(aux["accuracy"], 3 / 5)
    assert (aux["correct"], aux["correct"].dtype) == (3, jnp.int32)
    assert (aux["any"], aux["any"].dtype) == (3, jnp.int32)  # a sum of booleans counts
    # strided: rows 0 and 3, 1 and 4, 2 and 5; weights 2, 1, 2
    np.testing.assert_allclose(aux["nested"][0], np.full(2, (3 * 2 + 4 * 1 + 5 * 2) / 5), rtol=1e-6)
    assert aux["nested"][1] is None


@pytest.mark.parametrize("reducer", ["mean", "sum"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtypes_are_kept_and_low_precision_is_added_in_float32(dtype, reducer):
    fun = fg.value_and_grad(
        lambda w, x: (jnp.mean(w * x.real), jnp.ones((), dtype)), has_aux=True, num_microbatches=300, aux=reducer
    )
    (_, aux), _ = jax.jit(fun)(1.0, jnp.ones(300, jnp.float32))
    assert aux.dtype == dtype
    assert aux == (1 if reducer == "mean" else 300)


def test_a_skipped_microbatch_does_not_enter_aux():
    x = jnp.array([1.0, jnp.nan, 5.0])
    fun = fg.value_and_grad(
        lambda w, x: (jnp.mean(w * x), {"x": x[0], "rows": 1}),
        has_aux=True,
        num_microbatches=3,
        aux={"x": "mean", "rows": "sum"},
        skip_nonfinite=True,
    )
    for each in (fun, jax.jit(fun)):
        (_, aux), _ = each(1.0, x)
        assert aux == {"x": 3.0, "rows": 2}


def test_aux_that_cannot_be_reduced():
    fun = fg.value_and_grad(lambda w, x: (jnp.mean(w * x), {"name": "train"}), has_aux=True, num_microbatches=2)
    with pytest.raises(TypeError, match=r"aux\['name'\] must be numeric to be reduced over microbatches; got str"):
        fun(1.0, jnp.ones(4))


def per_row(w, batch):
    """Things of a microbatch, each reduced in its own way."""
    loss = jnp.mean(w * batch["x"])
    return loss, {
        "max": jnp.max(batch["x"]),
        "count": jnp.int8(3),
        "flag": jnp.any(batch["x"] > 4),
        "last": batch["x"][-1],
        "stack": jnp.sum(batch["x"]),
        "rows": {"double": 2 * batch["x"], "pair": jnp.stack([batch["x"], -batch["x"]], axis=1)},
        "join": jnp.sum(batch["x"]),
    }


PER_ROW = {
    "max": "max",
    "count": "max",
    "flag": "max",
    "last": "last",
    "stack": "stack",
    "rows": "concat",
    "join": lambda old, new, index: 10 * old + new + 0.0 * index,
}


@pytest.mark.parametrize("order", ["strided", "contiguous"])
@pytest.mark.parametrize("options", [{"num_microbatches": 3}, {"microbatch_size": 4}, {"microbatch_size": 7}], ids=str)
@pytest.mark.parametrize(
    ("loop", "wrap"), [("auto", lambda fun: fun), ("scan", jax.jit), ("ordered", jax.jit)], ids=["eager", "scan", "ordered"]
)
def test_every_reducer(loop, wrap, options, order):
    x = jnp.array([3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0, 6.0, 0.5]) if "microbatch_size" in options else jnp.arange(6.0) - 2
    fun = fg.value_and_grad(per_row, has_aux=True, aux=PER_ROW, order=order, loop=loop, **options)
    (_, aux), _ = wrap(fun)(1.0, {"x": x})
    split = microbatch.split(len(x), options.get("num_microbatches", 1), options.get("microbatch_size"), order)
    parts = [np.asarray(split.take(x, 0, index)) for index in range(split.num)]
    parts += [np.asarray(split.take_tail(x, 0))] * (split.tail > 0)
    sums = [part.sum() for part in parts]
    merged = sums[0]
    for each in sums[1:]:
        merged = 10 * merged + each
    assert (aux["max"], aux["count"], aux["flag"], aux["last"]) == (x.max(), 3, bool((x > 4).any()), parts[-1][-1])
    assert (aux["count"].dtype, aux["flag"].dtype) == (jnp.int8, bool)
    np.testing.assert_allclose(aux["stack"], sums, rtol=1e-6)
    np.testing.assert_array_equal(aux["rows"]["double"], 2 * x)  # in the order of the batch, whatever the microbatches
    np.testing.assert_array_equal(aux["rows"]["pair"], np.stack([x, -x], axis=1))
    np.testing.assert_allclose(aux["join"], merged, rtol=1e-6)


@pytest.mark.parametrize("loop", ["auto", "host"])
def test_every_reducer_in_a_training_step(loop):
    x = jnp.array([3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0])
    step = fg.train_step(per_row, optax.sgd(0.1), microbatch_size=2, has_aux=True, aux=PER_ROW, loop=loop)
    _, metrics = step(fg.TrainState.create(jnp.array(1.0), optax.sgd(0.1)), {"x": x})
    (_, aux), _ = fg.value_and_grad(per_row, has_aux=True, aux=PER_ROW, microbatch_size=2)(1.0, {"x": x})
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), metrics["aux"], aux)


def test_one_microbatch_gives_the_same_shapes():
    x = jnp.arange(4.0)
    one, (_, again) = (
        fg.value_and_grad(per_row, has_aux=True, aux=PER_ROW, **options)(1.0, {"x": x})[0]
        for options in ({"num_microbatches": 1}, {"microbatch_size": 4})
    )
    jax.tree.map(np.testing.assert_array_equal, one[1], again)


def test_what_is_skipped_keeps_its_place_in_stack_and_concat():
    x = jnp.array([1.0, jnp.nan, 5.0])
    aux = {"max": "max", "last": "last", "stack": "stack", "concat": "concat", "join": lambda old, new, index: old + new}
    fun = fg.value_and_grad(
        lambda w, x: (jnp.mean(w * x), {name: (x if name == "concat" else x[0]) for name in aux}),
        has_aux=True,
        num_microbatches=3,
        aux=aux,
        skip_nonfinite=True,
    )
    (_, found), _ = jax.jit(fun)(1.0, x)
    assert (found["max"], found["last"], found["join"]) == (5, 5, 6)
    np.testing.assert_array_equal(found["stack"], x)
    np.testing.assert_array_equal(found["concat"], x)


@pytest.mark.parametrize(
    ("aux", "leaf", "error", "text"),
    [
        ("max", lambda x: x + 1j, TypeError, r"aux is complex64\[2\]: complex numbers have no maximum"),
        (
            "concat",
            lambda x: jnp.sum(x),
            ValueError,
            r'aux is float32\[\], but "concat" joins leaves that have a row for each .* 2',
        ),
        (
            lambda old, new, index: jnp.stack([old, new]),
            lambda x: x,
            ValueError,
            r"must give what the leaf is, .*\[2\]; it gave",
        ),
        (
            "median",
            lambda x: x,
            ValueError,
            r"aux must be one of 'mean', 'sum', 'max', 'last', 'stack', 'concat', or a function",
        ),
    ],
)
def test_aux_that_does_not_fit_its_reducer(aux, leaf, error, text):
    loss_fn = lambda w, x: (jnp.mean(w * x), leaf(x))
    with pytest.raises(error, match=text):
        fg.value_and_grad(loss_fn, has_aux=True, num_microbatches=2, aux=aux)(1.0, jnp.ones(4))


def test_a_smaller_last_microbatch_of_another_shape():
    fun = fg.value_and_grad(lambda w, x: (jnp.mean(w * x), x), has_aux=True, microbatch_size=2, aux="stack")
    with pytest.raises(ValueError, match=r"aux has the shape .* and \(1,\) in the smaller last one, .* use \"concat\""):
        fun(1.0, jnp.ones(3))


def test_a_function_is_not_called_for_the_first_microbatch():
    loss_fn = lambda w, x: (jnp.mean(w * x), w * jnp.max(x))
    x = jnp.array([1.0, 4.0, 9.0])
    mean = lambda old, new, index: old + (new - old) * (1 / (index + 1)) / jnp.sign(old)  # NaN where old is 0
    for wrap in (lambda fun: fun, jax.jit):
        with jax.debug_nans(True):
            fun = wrap(fg.value_and_grad(loss_fn, has_aux=True, num_microbatches=3, aux=mean))
            np.testing.assert_allclose(fun(jnp.float32(1), x)[0][1], 14 / 3, rtol=1e-6)
    seen = []
    fg.value_and_grad(loss_fn, has_aux=True, num_microbatches=3, aux=lambda old, new, index: seen.append(index) or new)(1.0, x)
    assert seen == [1, 2]
    root = lambda w: fg.value_and_grad(loss_fn, has_aux=True, num_microbatches=3, aux=lambda a, b, i: jnp.sqrt(a * b))(w, x)[0][
        1
    ]
    np.testing.assert_allclose(jax.grad(root)(1.0), root(1.0), rtol=1e-5)  # it is linear in w


def test_a_function_keeps_shape_and_dtype():
    fun = lambda merge: fg.value_and_grad(lambda w, x: (jnp.mean(w * x), len(x)), has_aux=True, num_microbatches=2, aux=merge)
    for merge, got in ((lambda old, new, i: 0.5 * old + new, r"float32\[\]"), (lambda old, new, i: None, "None")):
        with pytest.raises(ValueError, match=rf"must give what the leaf is, int32\[\]; it gave .*{got}"):
            jax.jit(fun(merge))(1.0, jnp.ones(4))


@pytest.mark.parametrize("num", [1, 2])
def test_booleans_are_counted_whatever_the_number_of_microbatches(num):
    loss_fn = lambda w, x: (jnp.mean(w * x), jnp.all(x > 0))
    (_, aux), _ = fg.value_and_grad(loss_fn, has_aux=True, num_microbatches=num, aux="sum")(1.0, jnp.ones(4))
    assert (aux, aux.dtype) == (num, jnp.int32)
