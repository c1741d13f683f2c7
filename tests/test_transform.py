import functools
import inspect

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, relative_difference

import funcgrad as fg
from funcgrad.options import MicrobatchOptions

MAKERS = {"mlp": models.mlp, "convolutional": models.convolutional, "transformer": models.transformer}


@functools.cache
def _case(name, dtype):
    """A model and its gradients for the whole batch. Cached by dtype: 64-bit ones are made with x64 on."""
    model = MAKERS[name](jnp.dtype(dtype))
    return model, jax.jit(jax.value_and_grad(models.mean_loss(model.loss_fn)))(model.params, model.batch)


def _difference(name, dtype, num, loop):
    model, expected = _case(name, dtype)
    fun = jax.jit(fg.value_and_grad(model.loss_fn, num_microbatches=num, loop=loop))
    return relative_difference(fun(model.params, model.batch), expected)


@pytest.mark.parametrize("loop", ["scan", "unroll"])
@pytest.mark.parametrize("num", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("name", MAKERS)
class TestEqualToTheFullBatch:
    def test_float32(self, name, num, loop):
        assert _difference(name, "float32", num, loop) <= FLOAT32_TOLERANCE

    def test_float64(self, x64, name, num, loop):
        assert _difference(name, "float64", num, loop) <= FLOAT64_TOLERANCE


@pytest.mark.parametrize("loop", ["auto", 3])
@pytest.mark.parametrize("order", ["strided", "contiguous"])
@pytest.mark.parametrize("size", [1, 5, 32, 100])
def test_any_microbatch_size_equals_the_full_batch(size, order, loop):
    model, expected = _case("transformer", "float32")
    fun = jax.jit(fg.value_and_grad(model.loss_fn, microbatch_size=size, order=order, loop=loop))
    assert relative_difference(fun(model.params, model.batch), expected) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("name", MAKERS)
def test_outside_jit_equals_the_full_batch(name):
    model, expected = _case(name, "float32")
    fun = fg.value_and_grad(model.loss_fn, num_microbatches=4)
    assert relative_difference(fun(model.params, model.batch), expected) <= FLOAT32_TOLERANCE


class TestOneMicrobatchIsJax:
    """num_microbatches=1 gives the jaxpr of jax.value_and_grad, whatever the arguments."""

    @staticmethod
    def _same(fun, args, argnums=0, has_aux=False):
        ours = jax.make_jaxpr(fg.value_and_grad(fun, argnums, has_aux))(*args)
        theirs = jax.make_jaxpr(jax.value_and_grad(fun, argnums, has_aux))(*args)
        assert str(ours) == str(theirs)
        ours = jax.make_jaxpr(fg.grad(fun, argnums, has_aux))(*args)
        theirs = jax.make_jaxpr(jax.grad(fun, argnums, has_aux))(*args)
        assert str(ours) == str(theirs)

    @pytest.mark.parametrize("name", ["mlp", "convolutional"])
    def test_models(self, name):
        model, _ = _case(name, "float32")
        self._same(model.loss_fn, (model.params, model.batch))

    def test_aux(self):
        model, _ = _case("mlp", "float32")
        fun = lambda params, batch: (model.loss_fn(params, batch), {"count": jnp.sum(batch["y"]), "rows": batch["x"]})
        self._same(fun, (model.params, model.batch), has_aux=True)

    @pytest.mark.parametrize("argnums", [1, -1, (0, 1), [1, 0]])
    def test_argnums(self, argnums):
        self._same(lambda w, v: jnp.sum(jnp.tanh(w) * v), (jnp.ones(3), jnp.ones(3)), argnums)

    def test_one_argument_and_a_key_need_no_options(self):
        self._same(lambda w: jnp.sum(w**2), (jnp.ones(3),))
        self._same(lambda w, x, key: jnp.sum(w * x) + jax.random.uniform(key), (jnp.ones(3), jnp.ones(3), jax.random.key(0)))

    def test_keyword_arguments(self):
        fun = lambda w, *, x: jnp.sum(w * x)
        x = jnp.arange(3.0)
        assert str(jax.make_jaxpr(lambda w: fg.value_and_grad(fun)(w, x=x))(x)) == str(
            jax.make_jaxpr(lambda w: jax.value_and_grad(fun)(w, x=x))(x)
        )


class TestAnswersLikeJax:
    """The same types, dtypes and structure as jax.value_and_grad, for more than one microbatch."""

    def test_names_are_kept(self):
        def loss_fn(params, batch):
            """Doc."""
            return jnp.mean(params * batch)

        for wrapped in (fg.value_and_grad(loss_fn), fg.grad(loss_fn), fg.backward(loss_fn)):
            assert wrapped.__name__ == "loss_fn"
            assert wrapped.__doc__ == "Doc."

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
    def test_dtypes(self, dtype):
        params = jnp.ones(3, dtype)
        fun = lambda w, x: jnp.mean(jnp.abs(x @ (w * w).real.astype(x.dtype)))
        batch = jnp.ones((4, 3), jnp.finfo(dtype).dtype)
        value, grads = jax.value_and_grad(fun)(params, batch)
        ours = fg.value_and_grad(fun, num_microbatches=2)(params, batch)
        assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), ours) == ((value.dtype, ()), (grads.dtype, (3,)))
        assert jax.tree.map(lambda leaf: leaf.dtype, jax.jit(fg.value_and_grad(fun, num_microbatches=2))(params, batch)) == (
            value.dtype,
            grads.dtype,
        )

    def test_an_explicit_dtype_is_that_of_the_sums_only(self):
        fun = lambda w, x: jnp.mean(w * x)
        grads = jax.jit(fg.grad(fun, num_microbatches=300, dtype=jnp.bfloat16))(jnp.float32(1), jnp.ones(300))
        assert grads.dtype == jnp.float32
        assert grads != 1  # 300 ones in bfloat16 add up to 256

    def test_argnums(self):
        fun = lambda w, batch, v: jnp.mean(batch @ w * v)
        args = (jnp.arange(3.0), jnp.arange(12.0).reshape(4, 3), jnp.array(2.0))
        for argnums in (0, 2, -1, (0, 2), [2, 0]):
            want = jax.value_and_grad(fun, argnums)(*args)
            got = fg.value_and_grad(fun, argnums, num_microbatches=2)(*args)
            assert type(got[1]) is type(want[1])
            assert relative_difference(got, want) <= FLOAT32_TOLERANCE

    def test_python_numbers_are_parameters(self):
        value, grads = fg.value_and_grad(lambda w, x: jnp.mean(w * x), num_microbatches=2)(3.0, np.arange(4.0))
        assert (value, grads) == (4.5, 1.5)

    def test_higher_derivatives(self):
        fun = lambda w, x: jnp.mean(jnp.tanh(w * x))
        x = jnp.linspace(-1, 1, 8)
        accumulated = fg.grad(fun, num_microbatches=4)
        want = jax.hessian(fun)(jnp.float32(0.3), x)
        for loop in ("auto", "scan", "unroll"):
            accumulated = fg.grad(fun, num_microbatches=4, loop=loop)
            assert abs(jax.grad(accumulated)(jnp.float32(0.3), x) - want) <= 1e-6
            assert abs(jax.jit(jax.jacfwd(accumulated))(jnp.float32(0.3), x) - want) <= 1e-6

    def test_vmap_over_parameters(self):
        fun = lambda w, x: jnp.mean((w * x - 1) ** 2)
        ws, x = jnp.arange(3.0), jnp.arange(4.0)
        want = jax.vmap(jax.grad(fun), in_axes=(0, None))(ws, x)
        got = jax.vmap(fg.grad(fun, num_microbatches=2), in_axes=(0, None))(ws, x)
        assert relative_difference(got, want) <= FLOAT32_TOLERANCE

    def test_a_function_that_closes_over_traced_values(self):
        def outer(scale, w, x):
            return fg.grad(lambda w, x: jnp.mean(scale * w * x), num_microbatches=2)(w, x)

        args = jnp.float32(2), jnp.float32(3), jnp.arange(4.0)
        assert jax.jit(outer)(*args) == 3.0
        assert jax.grad(outer)(*args) == 1.5

    def test_outside_jit_what_a_closure_holds_is_read_anew(self):
        scale = {"value": 1.0}
        fun = fg.grad(lambda w, x: jnp.mean(scale["value"] * w * x), num_microbatches=2)
        assert fun(1.0, jnp.ones(4)) == 1.0
        scale["value"] = 3.0
        assert fun(1.0, jnp.ones(4)) == 3.0

    def test_outside_jit_python_control_flow_on_constants_works(self):
        fun = lambda w, x, flip: jnp.mean(-w * x if flip else w * x)
        assert fg.grad(fun, num_microbatches=2)(1.0, jnp.ones(4), True) == -1.0


class TestInAxes:
    def test_prefixes(self):
        fun = lambda w, batch: jnp.mean(batch["x"].T @ w * batch["scale"]) + jnp.sum(batch["table"] * w)
        batch = {"x": jnp.arange(12.0).reshape(3, 4), "scale": jnp.arange(4.0), "table": jnp.ones(3)}
        want = jax.value_and_grad(fun)(jnp.arange(3.0), batch)
        for axis in (1, -1):
            in_axes = {"x": axis, "scale": 0, "table": None}
            got = fg.value_and_grad(fun, num_microbatches=2, in_axes=in_axes)(jnp.arange(3.0), batch)
            assert relative_difference(got, want) <= FLOAT32_TOLERANCE

    def test_several_batch_arguments(self):
        fun = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
        w, x, y = jnp.arange(3.0), jnp.arange(12.0).reshape(4, 3), jnp.arange(4.0)
        want = jax.value_and_grad(fun)(w, x, y)
        got = fg.value_and_grad(fun, num_microbatches=2, batch_argnums=(1, 2))(w, x, y)
        assert relative_difference(got, want) <= FLOAT32_TOLERANCE
        transposed = lambda w, x, y: fun(w, x.T, y)
        got = fg.value_and_grad(transposed, num_microbatches=2, batch_argnums=(1, 2), in_axes=(1, 0))(w, x.T, y)
        assert relative_difference(got, want) <= FLOAT32_TOLERANCE

    def test_a_batch_that_is_a_tuple(self):
        fun = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2)
        args = jnp.arange(3.0), (jnp.arange(12.0).reshape(4, 3), jnp.arange(4.0))
        for in_axes in (0, (0, 0)):
            got = fg.value_and_grad(fun, num_microbatches=2, in_axes=in_axes)(*args)
            assert relative_difference(got, jax.value_and_grad(fun)(*args)) <= FLOAT32_TOLERANCE


class TestKeys:
    @staticmethod
    def _loss(w, x, key):
        return jnp.mean(w * x * jax.random.bernoulli(key, 0.5, x.shape)), jax.random.key_data(key)

    def test_each_microbatch_has_the_key_folded_with_its_index(self):
        key, x = jax.random.key(3), jnp.arange(1.0, 9)
        want = sum(jnp.mean(x[i::4] * jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (2,))) for i in range(4)) / 4
        fun = fg.grad(lambda *args: self._loss(*args)[0], num_microbatches=4, key_argnums=2)
        for each in (fun, jax.jit(fun)):
            assert abs(each(1.0, x, key) - want) <= 1e-6

    def test_raw_keys_and_arrays_of_keys(self):
        def loss_fn(w, x, keys):
            return jnp.mean(w * x) + jax.random.uniform(keys["raw"]) + jax.random.uniform(keys["typed"][1])

        raw, typed = jax.random.PRNGKey(1), jax.random.split(jax.random.key(2), 3)
        for keys in ({"raw": raw, "typed": typed},):
            fun = fg.value_and_grad(loss_fn, num_microbatches=2, key_argnums=(2,))
            value, _ = fun(0.0, jnp.ones(4), keys)
            folded = [jax.random.uniform(jax.random.fold_in(typed[1], i)) for i in range(2)]
            assert abs(value - jax.random.uniform(raw) - sum(folded) / 2) <= 1e-6
        fun = fg.value_and_grad(lambda w, x, key: w * jnp.mean(x) + jax.random.uniform(key), num_microbatches=2, key_argnums=2)
        folded = [jax.random.uniform(jax.random.fold_in(raw, i)) for i in range(2)]
        assert abs(fun(0.0, jnp.ones(4), raw)[0] - sum(folded) / 2) <= 1e-6

    def test_a_key_for_each_row_is_a_batch(self):
        keys = jax.random.split(jax.random.key(0), 4)

        def loss_fn(w, batch):
            return jnp.mean(w * batch["x"] * jax.vmap(jax.random.uniform)(batch["keys"]))

        batch = {"x": jnp.ones(4), "keys": keys}
        want = jax.grad(loss_fn)(1.0, batch)
        for fun in (fg.grad(loss_fn, num_microbatches=2), jax.jit(fg.grad(loss_fn, microbatch_size=3))):
            assert abs(fun(1.0, batch) - want) <= 1e-6

    def test_keys_among_the_parameters_are_refused_if_used_unless_named(self):
        params = {"w": jnp.ones(()), "key": jax.random.key(0)}
        loss_fn = lambda params, x: params["w"] * jnp.mean(x) * jax.random.uniform(params["key"])
        with pytest.raises(ValueError, match=r"the loss draws from args\[0\]\['key'\], a PRNG key among the parameters"):
            fg.grad(loss_fn, num_microbatches=2)(params, jnp.ones(4))
        assert fg.grad(loss_fn)(params, jnp.ones(4))["w"] == jax.random.uniform(params["key"])
        grads = fg.grad(loss_fn, num_microbatches=2, key_argnums=0)(params, jnp.ones(4))
        want = sum(jax.random.uniform(jax.random.fold_in(params["key"], i)) for i in range(2)) / 2
        assert abs(grads["w"] - want) <= 1e-6
        assert grads["key"] is None

    @pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
    def test_a_smaller_last_microbatch_has_an_index_of_its_own(self, wrap):
        key, x = jax.random.key(3), jnp.arange(1.0, 8)
        parts = [x[0:6:2], x[1:6:2], x[6:]]
        folded = [jax.random.fold_in(key, index) for index in range(3)]
        masked = [part * jax.random.bernoulli(one, 0.5, part.shape) for part, one in zip(parts, folded, strict=True)]
        fun = wrap(fg.grad(lambda *args: self._loss(*args)[0], microbatch_size=3, key_argnums=2))
        assert abs(fun(1.0, x, key) - jnp.concatenate(masked).mean()) <= 1e-6

    def test_a_single_microbatch_has_the_key_as_it_is(self):
        key, x = jax.random.key(3), jnp.arange(1.0, 8)
        loss_fn = lambda *args: self._loss(*args)[0]
        want = jax.grad(loss_fn)(1.0, x, key)
        for options in ({}, {"skip_nonfinite": True}, {"microbatch_size": 7}, {"microbatch_size": 100}):
            assert abs(fg.grad(loss_fn, key_argnums=2, **options)(1.0, x, key) - want) <= 1e-6

    def test_a_skipped_microbatch_has_its_number_too(self):
        loss_fn = lambda w, x, key: w * jnp.mean(x) * jax.random.uniform(key)
        backward, key = fg.backward(loss_fn, key_argnums=2, skip_nonfinite=True), jax.random.key(0)
        buffer, _ = backward(fg.zeros(1.0), 1.0, jnp.array([jnp.nan]), key)
        buffer, _ = backward(buffer, 1.0, jnp.ones(1), key)
        assert fg.mean(buffer) == jax.random.uniform(jax.random.fold_in(key, 1))


class TestOrder:
    @pytest.mark.parametrize(("order", "first"), [("strided", [0, 2, 4]), ("contiguous", [0, 1, 2])])
    @pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
    def test_which_rows_a_microbatch_gets(self, wrap, order, first):
        loss_fn = lambda w, x, key: (jnp.mean(w * x), jnp.where(jax.random.key_data(key)[1] == chosen, x, 0))
        chosen = jax.random.key_data(jax.random.fold_in(jax.random.key(0), 0))[1]
        options = {"has_aux": True, "num_microbatches": 2, "order": order, "key_argnums": 2, "aux": "sum"}
        (_, rows), _ = wrap(fg.value_and_grad(loss_fn, **options))(1.0, jnp.arange(6.0), jax.random.key(0))
        assert rows.tolist() == first


def test_a_loss_that_is_not_finite_with_gradients_that_are():
    loss_fn = lambda w, x: jnp.mean(w * x) + jax.lax.stop_gradient(jnp.log(x[0]))
    x = jnp.array([-1.0, 1.0])  # a logarithm of -1
    assert fg.value_and_grad(loss_fn, num_microbatches=2, skip_nonfinite=True)(3.0, x) == (3.0, 1.0)
    buffer, loss = fg.backward(loss_fn, skip_nonfinite=True)(fg.zeros(3.0), 3.0, x[:1])
    assert jnp.isnan(loss)
    assert (buffer.count, buffer.skipped) == (0, 1)


def test_the_weight_is_a_constant_to_an_outer_derivative_too():
    loss_fn = lambda p, b: fg.WeightedLoss(jnp.sum((b @ p) ** 2), jnp.sum(jax.nn.sigmoid(b @ p)))
    p, b = jnp.arange(1.0, 4), jnp.sin(jnp.arange(12.0)).reshape(4, 3)
    derivatives = [
        jax.grad(lambda q, num=num: fg.value_and_grad(loss_fn, num_microbatches=num)(q, b)[0])(p) for num in (1, 2, 4)
    ]
    assert relative_difference(derivatives[1:], [derivatives[0]] * 2) <= FLOAT32_TOLERANCE


def test_aux_of_a_microbatch_without_weight_does_not_count():
    def loss_fn(w, batch):
        loss = fg.WeightedLoss(jnp.sum(w * batch["x"] * batch["mask"]), jnp.sum(batch["mask"]))
        return loss, jnp.sum(batch["x"] * batch["mask"]) / jnp.sum(batch["mask"])

    batch = {"x": jnp.arange(4.0), "mask": jnp.array([1.0, 0, 1, 0])}
    assert fg.value_and_grad(loss_fn, has_aux=True, num_microbatches=2)(1.0, batch)[0] == (1.0, 1.0)


class TestSignatures:
    def test_every_way_in_takes_the_same_options(self):
        keyword_only = lambda fun: {name for name, p in inspect.signature(fun).parameters.items() if p.kind is p.KEYWORD_ONLY}
        options = keyword_only(fg.value_and_grad)
        assert set(MicrobatchOptions.__annotations__) == options
        of_the_state = {"dtype", "compensated"}
        assert keyword_only(fg.train_step) == options - of_the_state | {"has_aux", "donate", "budget_bytes"}
        assert keyword_only(fg.backward) | {"donate"} == keyword_only(fg.micro_steps)
        assert keyword_only(fg.backward) - {"has_aux"} <= options

    def test_backward_does_not_pass_for_the_loss_function(self):
        """jax.jit looks up the names of static and donated arguments in the signature."""
        backward = jax.jit(fg.backward(lambda p, x, flip: jnp.mean(-p * x if flip else p * x)), static_argnames="flip")
        buffer, _ = backward(fg.zeros(1.0), 1.0, jnp.ones(2), flip=True)
        assert fg.mean(buffer) == -1.0


class TestTrainable:
    params = {"body": {"w": jnp.ones(3)}, "head": {"w": jnp.ones(3), "b": jnp.ones(())}, "steps": 3}

    @staticmethod
    def _loss(params, x):
        return jnp.mean(x @ (params["body"]["w"] * params["head"]["w"]) + params["head"]["b"])

    @pytest.mark.parametrize("num", [1, 2])
    def test_predicate_and_prefix_agree(self, num):
        x = jnp.arange(12.0).reshape(4, 3)
        full = fg.grad(self._loss, num_microbatches=num)(self.params, x)
        assert full["steps"] is None
        by_path = lambda path, leaf: path[0].key == "head"
        for trainable in (by_path, {"body": False, "head": True, "steps": True}):
            grads = fg.grad(self._loss, num_microbatches=num, trainable=trainable)(self.params, x)
            assert grads["body"] == {"w": None}
            assert relative_difference(grads["head"], full["head"]) <= FLOAT32_TOLERANCE

    def test_what_is_frozen_costs_no_backward_pass(self):
        model, _ = _case("mlp", "float32")
        flops = [
            jax.jit(fg.grad(model.loss_fn, num_microbatches=2, trainable=trainable, loop="unroll"))
            .lower(model.params, model.batch)
            .compile()
            .cost_analysis()["flops"]
            for trainable in ([True, True, True], [False, False, True])
        ]
        assert flops[1] < 0.6 * flops[0]


class TestBackward:
    def test_equals_the_full_batch(self):
        model, (_, want) = _case("transformer", "float32")
        backward = jax.jit(fg.backward(model.loss_fn))
        buffer = fg.zeros(model.params)
        for start, stop in ((0, 5), (5, 16), (16, 27), (27, 32)):
            rows = jax.tree.map(lambda leaf, start=start, stop=stop: leaf[start:stop], model.batch)
            buffer, loss = backward(buffer, model.params, rows)
            assert abs(loss - models.mean_loss(model.loss_fn)(model.params, rows)) <= 1e-5
        assert buffer.count == 4
        assert buffer.weight == model.batch["mask"][:, 1:].sum()
        assert relative_difference(fg.mean(buffer), want) <= FLOAT32_TOLERANCE

    def test_aux_and_no_batch(self):
        backward = fg.backward(lambda w: (w**2, {"w": w}), has_aux=True, batch_argnums=())
        buffer = fg.zeros(jnp.float32(0))
        for w in (1.0, 2.0):
            buffer, (loss, aux) = backward(buffer, jnp.float32(w))
            assert (loss, aux["w"]) == (w**2, w)
        assert fg.mean(buffer) == 3.0
        assert buffer.weight == 2

    def test_one_key_serves_the_window_as_in_value_and_grad(self):
        loss_fn = lambda w, x, key: jnp.mean(w * x * jax.random.bernoulli(key, 0.5, x.shape))
        key, x = jax.random.key(0), jnp.arange(1.0, 9)
        want = fg.grad(loss_fn, num_microbatches=4, key_argnums=2)(1.0, x, key)
        backward = fg.backward(loss_fn, key_argnums=2)
        buffer = fg.zeros(1.0)
        for index in range(4):
            buffer, _ = backward(buffer, 1.0, x[index::4], key)
        assert abs(fg.mean(buffer) - want) <= 1e-6

    def test_the_buffer_says_what_is_trained(self):
        params = {"a": jnp.ones(()), "b": jnp.ones(())}
        trainable = {"a": True, "b": False}
        buffer = fg.zeros(params, trainable=trainable)
        loss_fn = lambda params, x: jnp.mean(params["a"] * params["b"] * x)
        for options in ({}, {"trainable": trainable}):
            result, _ = fg.backward(loss_fn, **options)(buffer, params, jnp.ones(2))
            assert fg.mean(result) == {"a": 1.0, "b": None}
        with pytest.raises(ValueError, match=r"trainable says True for params\['b'\], but the buffer was made with False"):
            fg.backward(loss_fn, trainable={"a": True, "b": True})(buffer, params, jnp.ones(2))
