import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcgrad as fg
from funcgrad.loss import ratio


class TestRatio:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
    def test_dtype_is_that_of_the_total(self, dtype):
        value = ratio(jnp.asarray(6, dtype), jnp.float32(4))
        assert (value, value.dtype) == (1.5, dtype)

    def test_integers(self):
        value = ratio(3, 2)
        assert (value, value.dtype) == (1.5, jnp.float32)

    @pytest.mark.parametrize("total", [0.0, 3.0, np.nan, np.inf])
    def test_no_weight_gives_zero(self, total):
        assert ratio(total, 0) == 0

    def test_the_weight_is_not_rounded_to_the_totals_dtype(self):
        assert ratio(jnp.asarray(512, jnp.bfloat16), 257) == 1.9921875  # 2 with 257 rounded to 256


class TestWeightedLoss:
    def test_the_weight_is_a_constant_to_differentiation(self):
        loss_fn = lambda w, x: fg.WeightedLoss(jnp.sum(w * x), jnp.sum(w * jnp.ones_like(x)))
        x = jnp.arange(4.0)
        constant = jax.grad(lambda w: jnp.sum(w * x) / 8)(2.0)
        for num in (1, 2, 4):
            assert fg.grad(loss_fn, num_microbatches=num)(2.0, x) == constant

    def test_the_gradient_of_a_mean_without_weight_is_zero(self):
        assert jax.grad(lambda w: fg.WeightedLoss(w * 3, 0.0).mean())(1.0) == 0

    def test_it_is_a_pytree(self):
        doubled = jax.tree.map(lambda leaf: 2 * leaf, fg.WeightedLoss(1.0, 3.0))
        assert (doubled.total, doubled.weight) == (2.0, 6.0)

    @pytest.mark.parametrize("weight", [4, np.int64(4), jnp.array(4), jnp.array(4, jnp.uint8), 4.0])
    def test_weights_of_any_real_type(self, weight):
        loss_fn = lambda w, x: fg.WeightedLoss(jnp.sum(w * x), weight)
        for num in (1, 2):
            loss, gradient = fg.value_and_grad(loss_fn, num_microbatches=num)(2.0, jnp.full(8, 2.0))
            assert (loss, gradient) == (8.0 / num, 4.0 / num)
