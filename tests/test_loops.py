import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax import lax

import funcgrad as fg
from funcgrad import loops, work


def _scans(fun, *args):
    return str(jax.make_jaxpr(fun)(*args)).count("scan[")


class TestAuto:
    def test_a_scan_unless_there_is_a_convolution_on_cpu(self):
        for model, has_convolution in ((models.mlp(), False), (models.convolutional(), True)):
            fun = fg.value_and_grad(model.loss_fn, num_microbatches=4)
            unrolled = has_convolution and jax.default_backend() == "cpu"
            assert _scans(fun, model.params, model.batch) == (0 if unrolled else 1)

    @pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fun: lambda x, k: lax.cond(True, fun, fun, x, k)])
    def test_a_convolution_is_found_wherever_it_stands(self, wrap):
        convolve = wrap(lambda x, kernel: lax.conv(x, kernel, (1, 1), "SAME"))
        closed = jax.make_jaxpr(convolve)(jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3)))
        assert work.holds_convolution(closed.jaxpr)
        assert loops.choose(closed, "cpu", 8) == "unroll"
        assert loops.choose(closed, "gpu", 8) == loops.choose(closed, "tpu", 8) == "scan"

    @pytest.mark.parametrize(
        ("rows", "width", "of_8", "of_64", "in_turn"),
        [(4, 64, 8, 4, 2), (1024, 64, 8, 4, "scan"), (4, 768, 2, 4, 2), (4, 1024, 2, 2, 2), (4, 2048, "scan", "scan", "scan")],
        ids=["large gradients", "large activations", "some memory", "more memory", "too much memory"],
    )
    def test_more_microbatches_a_loop_body_where_that_costs_little_memory(self, rows, width, of_8, of_64, in_turn):
        loss_fn = lambda ws, x: jnp.mean(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]))
        weight, x = (jax.ShapeDtypeStruct((size, width), jnp.float32) for size in (width, rows))
        closed = jax.make_jaxpr(jax.grad(loss_fn))((weight, weight), x)
        assert not work.holds_convolution(closed.jaxpr)
        assert loops.choose(closed, "cpu", 8) == of_8
        assert loops.choose(closed, "cpu", 64) == of_64
        assert loops.choose(closed, "cpu", 8, in_turn=True) == in_turn
        assert loops.choose(closed, "gpu", 8) == "scan"

    def test_a_loop_in_the_loss(self):
        closed = jax.make_jaxpr(jax.jit(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]))(1.0)
        assert work.holds_loop(closed.jaxpr)
        assert loops.choose(closed, "cpu", 8) == "scan"

    def test_the_platform_follows_the_default_device(self):
        assert loops.default_platform() == jax.default_backend()
        with jax.default_device(jax.devices("cpu")[0]):
            assert loops.default_platform() == "cpu"


class TestFoldOver:
    @staticmethod
    def _squares(num, loop):
        seen = []

        def step(_, index):
            seen.append(index)
            return index**2

        fold = loops.Fold(lambda like: jnp.int32(0), lambda carry, output, _: carry + output)
        carry, _ = loops.fold_over(step, None, fold, num, loop)
        return carry, seen

    @pytest.mark.parametrize("loop", ["auto", "scan", "unroll", 1, 3, 100])
    @pytest.mark.parametrize("num", [1, 2, 7])
    def test_every_loop_gives_the_same_and_traces_once(self, num, loop):
        want = sum(index**2 for index in range(num))
        traced = []

        @jax.jit
        def run():
            carry, seen = self._squares(num, loop)
            traced.append(len(seen))
            return carry

        assert run() == want
        assert traced == [1]
        assert self._squares(num, loop)[0] == want

    def test_outside_a_trace_steps_run_one_after_the_other(self):
        assert self._squares(3, "auto")[1] == [0, 1, 2]

    @pytest.mark.parametrize(("loop", "bodies"), [("scan", 1), (2, 2), ("unroll", 6)])
    def test_microbatches_a_loop_body(self, loop, bodies):
        """An integer is the number of microbatches that a loop body holds: lax.scan's `unroll`."""
        compiled = jax.jit(fg.grad(lambda w, x: jnp.mean(jnp.sin(x @ w)), num_microbatches=6, loop=loop))
        text = compiled.lower(jnp.ones((8, 8)), jnp.ones((12, 8))).compile().as_text()
        assert text.count(" dot(") == 2 * bodies  # forward and back

    def test_is_staging(self):
        assert not loops.is_staging()
        jax.vmap(lambda x: (self._check(False), x)[1])(np.ones(2))
        jax.jit(lambda: self._check(True))()

    @staticmethod
    def _check(expected):
        assert loops.is_staging() == expected
