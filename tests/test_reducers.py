import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcgrad as fg


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
