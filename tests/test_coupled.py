"""Losses that couple all rows of a batch: the same value and gradients as `jax.value_and_grad` of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import FLOAT32_TOLERANCE, relative_difference

import funcgrad as fg

TOLERANCE = 1e-11
ROWS = 16
SPLITS = [{"num_microbatches": 1}, {"num_microbatches": 2}, {"num_microbatches": 8}, {"microbatch_size": 5}]


def make_params(width=6, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"first": (4, width), "second": (width, width), "other": (4, width)}
    weights = {name: jax.random.normal(key, shapes[name], dtype) for key, name in zip(keys, shapes, strict=True)}
    return {**weights, "temperature": jnp.asarray(0.7, dtype)}


def make_batch(rows=ROWS, dtype=jnp.float32):
    left, right = jax.random.normal(jax.random.key(1), (2, rows, 4), dtype)
    return {"left": left, "right": right, "label": jnp.arange(rows) % 3}


def normalized(x):
    return x / jnp.sqrt(jnp.sum(jnp.abs(x) ** 2, axis=-1, keepdims=True) + 1e-6)


def encode_pairs(params, batch):
    tower = lambda x: normalized(jnp.tanh(x @ params["first"]) @ params["second"])
    return tower(batch["left"]), tower(batch["right"])


def info_nce(params, representations):
    left, right = representations
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(left @ right.T / 0.1)))


def encode_two_towers(params, batch):
    return {"image": normalized(batch["left"] @ params["first"]), "text": normalized(batch["right"] @ params["other"])}


def clip_loss(params, representations):
    """Symmetric, with a learned temperature (Radford et al., 2021)."""
    logits = representations["image"] @ representations["text"].T * jnp.exp(params["temperature"])
    losses = [jnp.diag(jax.nn.log_softmax(logits, axis=axis)) for axis in (0, 1)]
    return -jnp.mean(jnp.stack(losses))


def encode_labelled(params, batch):
    return jnp.tanh(batch["left"] @ params["first"]) @ params["second"], batch["label"]


def triplet_loss(params, representations):
    """All anchors, positives and negatives whose margin is not kept: a mean over a number that is known only at the end."""
    points, labels = representations
    distances = jnp.sum((points[:, None] - points[None]) ** 2, axis=-1)
    same = labels[:, None] == labels[None]
    positive, negative = same & ~jnp.eye(len(labels), dtype=bool), ~same
    margins = jax.nn.relu(distances[:, :, None] - distances[:, None, :] + 1.0)
    chosen = positive[:, :, None] & negative[:, None, :]
    return fg.WeightedLoss(jnp.sum(margins * chosen), jnp.sum(chosen & (margins > 0)))


def whole(encode, loss_fn, params, *args):
    def evaluate(params):
        loss = loss_fn(params, encode(params, *args))
        return loss.mean() if isinstance(loss, fg.WeightedLoss) else loss

    return jax.value_and_grad(evaluate)(params)


KINDS = {
    "info_nce": (encode_pairs, info_nce),
    "clip": (encode_two_towers, clip_loss),
    "triplet": (encode_labelled, triplet_loss),
}


class TestEqualToTheWhole:
    @pytest.mark.parametrize("options", SPLITS, ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_float64(self, x64, kind, options):
        encode, loss_fn = KINDS[kind]
        params, batch = make_params(dtype=jnp.float64), make_batch(dtype=jnp.float64)
        got = jax.jit(fg.coupled_value_and_grad(encode, loss_fn, **options))(params, batch)
        assert relative_difference(got, whole(encode, loss_fn, params, batch)) <= TOLERANCE

    @pytest.mark.parametrize("order", ["strided", "contiguous"])
    @pytest.mark.parametrize("loop", ["auto", "scan", "unroll", "ordered", 2])
    def test_every_loop_and_order(self, loop, order):
        params, batch = make_params(), make_batch()
        fun = jax.jit(fg.coupled_value_and_grad(encode_labelled, triplet_loss, microbatch_size=5, loop=loop, order=order))
        assert relative_difference(fun(params, batch), whole(encode_labelled, triplet_loss, params, batch)) <= FLOAT32_TOLERANCE

    def test_outside_jit(self):
        params, batch = make_params(), make_batch()
        got = fg.coupled_value_and_grad(encode_two_towers, clip_loss, microbatch_size=6)(params, batch)
        assert relative_difference(got, whole(encode_two_towers, clip_loss, params, batch)) <= FLOAT32_TOLERANCE

    def test_complex_parameters_and_representations(self, x64):
        params, batch = make_params(dtype=jnp.complex128), make_batch(dtype=jnp.float64)
        encode = lambda params, batch: (batch["left"] @ params["first"], jnp.sin(batch["right"] @ params["other"]))
        loss_fn = lambda params, pair: jnp.mean(jnp.abs(pair[0] @ pair[1].T - params["temperature"]) ** 2)
        got = fg.coupled_value_and_grad(encode, loss_fn, num_microbatches=4)(params, batch)
        assert relative_difference(got, whole(encode, loss_fn, params, batch)) <= TOLERANCE

    def test_convolutional_encoder(self, x64):
        keys = jax.random.split(jax.random.key(0), 3)
        params = {
            "kernel": jax.random.normal(keys[0], (3, 3, 1, 4)),
            "out": jax.random.normal(keys[1], (4, 4)),
            "temperature": 0.1,
        }
        images = jax.random.normal(keys[2], (2, 8, 6, 6, 1))

        def encode(params, left, right):
            numbers = ("NHWC", "HWIO", "NHWC")
            convolve = lambda x: jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
            return {
                name: normalized(jnp.mean(jnp.tanh(convolve(x)), (1, 2)) @ params["out"])
                for name, x in (("image", left), ("text", right))
            }

        fun = jax.jit(fg.coupled_value_and_grad(encode, clip_loss, num_microbatches=4, batch_argnums=(1, 2)))
        assert relative_difference(fun(params, *images), whole(encode, clip_loss, params, *images)) <= TOLERANCE


class TestArguments:
    def test_batch_arguments_axes_and_what_is_seen_whole(self):
        params, batch = make_params(), make_batch()
        scale = jnp.arange(1.0, 5.0)

        def encode(params, left, scale, right, *, power):
            return normalized((left.T * scale) @ params["first"]), normalized((right**power) @ params["other"])

        args = (batch["left"].T, scale, batch["right"])
        fun = fg.coupled_value_and_grad(encode, info_nce, num_microbatches=4, batch_argnums=(-3, 3), in_axes=(1, 0))
        expected = whole(lambda params, *args: encode(params, *args, power=2), info_nce, params, *args)
        assert relative_difference(fun(params, *args, power=2), expected) <= FLOAT32_TOLERANCE

    @pytest.mark.parametrize("options", [{"num_microbatches": 4}, {"microbatch_size": 6}], ids=str)
    def test_dropout_has_one_mask_in_both_passes(self, options):
        params, batch, key = make_params(), make_batch(), jax.random.key(7)

        def encode(params, batch, key):
            kept = jax.random.bernoulli(key, 0.5, (len(batch["left"]), 6))
            return jnp.tanh(batch["left"] @ params["first"]) * kept, batch["label"]

        count = 4 if "num_microbatches" in options else 2
        part = lambda i: jax.tree.map(lambda leaf: leaf[i:12:2] if count == 2 else leaf[i::4], batch)
        places = np.argsort(
            np.concatenate([np.arange(ROWS)[i:12:2] if count == 2 else np.arange(ROWS)[i::4] for i in range(count)])
        )

        def by_hand(params):
            parts = [encode(params, part(i), jax.random.fold_in(key, i)) for i in range(count)]
            if count == 2:
                tail = jax.tree.map(lambda leaf: leaf[12:], batch)
                parts.append(encode(params, tail, jax.random.fold_in(key, 2)))
            joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
            order = places if count == 4 else np.concatenate([places, np.arange(12, ROWS)])
            return triplet_loss(params, jax.tree.map(lambda leaf: leaf[order], joined)).mean()

        fun = jax.jit(fg.coupled_value_and_grad(encode, triplet_loss, key_argnums=-1, **options))
        assert relative_difference(fun(params, batch, key), jax.value_and_grad(by_hand)(params)) <= FLOAT32_TOLERANCE

    def test_a_key_that_all_microbatches_would_share_is_refused(self):
        fun = fg.coupled_value_and_grad(lambda params, x, key: x, info_nce, num_microbatches=2)
        with pytest.raises(ValueError, match=r"args\[2\] is a PRNG key .*key_argnums=\(2,\)"):
            fun(make_params(), jnp.ones((4, 2)), jax.random.key(0))

    def test_aux_is_of_the_whole_batch(self):
        params, batch = make_params(), make_batch()

        def loss_fn(params, representations):
            left, right = representations
            correct = jnp.argmax(left @ right.T, axis=-1) == jnp.arange(len(left))
            return info_nce(params, representations), {"correct": correct, "rows": len(left)}

        (loss, aux), grads = fg.coupled_value_and_grad(encode_pairs, loss_fn, has_aux=True, num_microbatches=4)(params, batch)
        expected = whole(encode_pairs, info_nce, params, batch)
        assert relative_difference((loss, grads), expected) <= FLOAT32_TOLERANCE
        assert (aux["correct"].shape, aux["rows"]) == ((ROWS,), ROWS)
        np.testing.assert_array_equal(aux["correct"], loss_fn(params, encode_pairs(params, batch))[1]["correct"])

    def test_what_is_not_trained_gets_none(self):
        params, batch = {**make_params(), "step": jnp.int32(3), "name": None}, make_batch()
        fun = fg.coupled_value_and_grad(
            encode_two_towers, clip_loss, num_microbatches=2, trainable=lambda path, leaf: path[0].key != "other"
        )
        _, grads = jax.jit(fun)(params, batch)
        expected = whole(encode_two_towers, clip_loss, make_params(), batch)[1]
        assert grads["other"] is grads["step"] is grads["name"] is None
        assert relative_difference(grads["temperature"], expected["temperature"]) <= FLOAT32_TOLERANCE
        assert relative_difference(grads["first"], expected["first"]) <= FLOAT32_TOLERANCE

    def test_narrow_gradients_are_added_in_float32(self):
        """256 microbatches of one row, each with gradient 1: in bfloat16 the sum of 512 would stop at 256."""
        encode = lambda params, x: x * params
        fun = jax.jit(fg.coupled_value_and_grad(encode, lambda params, z: jnp.sum(z.astype(jnp.float32)), microbatch_size=1))
        loss, grad = fun(jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16))
        assert (loss, grad, grad.dtype) == (512, 512, jnp.bfloat16)

    def test_compensated(self):
        """Added singly, a million's rounding loses the ones."""
        rows = jnp.array([1e8, *[1.0] * 64, -1e8])
        fun = jax.jit(
            fg.coupled_value_and_grad(lambda w, x: x * w, lambda w, z: jnp.sum(z), microbatch_size=1, compensated=True)
        )
        assert fun(jnp.float32(1), rows)[1] == 64


def test_in_batch_negatives_are_those_of_the_whole_batch():
    """Rows by themselves have no negatives, and so no gradient."""
    params, batch = make_params(), make_batch()
    alone = fg.grad(lambda params, batch: info_nce(params, encode_pairs(params, batch)), num_microbatches=ROWS)(params, batch)
    assert all(jnp.all(leaf == 0) for leaf in jax.tree.leaves(alone))
    coupled = fg.coupled_value_and_grad(encode_pairs, info_nce, num_microbatches=ROWS)(params, batch)
    assert relative_difference(coupled, whole(encode_pairs, info_nce, params, batch)) <= FLOAT32_TOLERANCE


@pytest.mark.optimized
@pytest.mark.parametrize("loop", ["auto", "ordered"])
def test_it_needs_an_eighth_of_the_memory(loop):
    """A 4-layer encoder, 16 microbatches; bytes from XLA's own analysis."""
    layers, width, rows = 4, 128, 8192
    weights = jax.random.normal(jax.random.key(0), (layers, width, width)) / np.sqrt(width)

    def encode(params, x):
        for layer in range(layers):
            x = x + jnp.tanh(x @ params["layers"][layer])
        return normalized(x[:, :16])

    def loss_fn(params, z):
        return -jnp.mean(jax.nn.log_softmax(z[:8] @ z.T / params["temperature"])[:, 0])

    params, batch = {"layers": weights, "temperature": 0.5}, jnp.ones((rows, width))

    def temporary(fun):
        return jax.jit(fun).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    full = temporary(jax.value_and_grad(lambda params, batch: loss_fn(params, encode(params, batch))))
    assert temporary(fg.coupled_value_and_grad(encode, loss_fn, num_microbatches=16, loop=loop)) <= full / 8


def test_the_encoder_is_traced_once_for_each_pass():
    traced = []

    def encode(params, batch):
        traced.append(1)
        return encode_pairs(params, batch)

    fun = jax.jit(fg.coupled_value_and_grad(encode, info_nce, num_microbatches=8))
    for _ in range(3):
        fun(make_params(), make_batch())
    assert len(traced) == 2


class TestErrors:
    @pytest.mark.parametrize("options", [{"num_microbatches": 1}, {"num_microbatches": 4}, {"microbatch_size": 6}], ids=str)
    @pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
    @pytest.mark.parametrize(
        ("encode", "error", "text"),
        [
            (lambda p, x: {"z": jnp.mean(x @ p)}, ValueError, r"representations\['z'\] is float32\[\], but must have a row"),
            (lambda p, x: (x @ p).T, ValueError, r"representations is float32\[3,\d+\], but must have a row .* here \d+"),
            (lambda p, x: jnp.argmax(x @ p, -1), ValueError, r"that have a gradient, float32 for example; got .*int32"),
            (lambda p, x: {}, ValueError, r"that have a gradient, float32 for example; got no leaf"),
            (lambda p, x: [x @ p, "name"], TypeError, r"representations\[1\] must be an array of numbers"),
        ],
    )
    def test_representations(self, wrap, options, encode, error, text):
        fun = fg.coupled_value_and_grad(encode, lambda p, z: jnp.sum(p), **options)
        with pytest.raises(error, match=text):
            wrap(fun)(jnp.ones((4, 3)), jnp.ones((16, 4)))

    @pytest.mark.parametrize("options", [{"num_microbatches": 4}, {"microbatch_size": 6}], ids=str)
    def test_rows_that_are_compared_in_the_encoder(self, options):
        fun = fg.coupled_value_and_grad(lambda p, x: (x @ p) @ (x @ p).T, lambda p, z: jnp.sum(z), **options)
        text = r"representations is float32\[\d,\d\] for a microbatch, but would be float32\[16,16\] for the whole batch"
        with pytest.raises(ValueError, match=text):
            fun(jnp.ones((4, 3)), jnp.ones((16, 4)))
        square = fg.coupled_value_and_grad(lambda p, x: x @ p, lambda p, z: jnp.sum(z), num_microbatches=4)
        assert square(jnp.ones((4, 4)), jnp.ones((16, 4)))[0] == 16 * 4 * 4

    def test_the_loss(self):
        fun = fg.coupled_value_and_grad(lambda p, x: x @ p, lambda p, z: z, num_microbatches=4)
        with pytest.raises(TypeError, match=r"the loss must be a real scalar, float32\[\] for example; got float32\[16,3\]"):
            fun(jnp.ones((4, 3)), jnp.ones((16, 4)))
        fun = fg.coupled_value_and_grad(lambda p, x: x @ p, lambda p, z: (jnp.sum(z), z), num_microbatches=4)
        with pytest.raises(TypeError, match=r"If it returns .*aux.*, pass has_aux=True"):
            fun(jnp.ones((4, 3)), jnp.ones((16, 4)))

    def test_nothing_is_trained(self):
        fun = fg.coupled_value_and_grad(lambda p, x: x @ p, info_nce, num_microbatches=4, trainable=False)
        with pytest.raises(ValueError, match="trainable"):
            fun(jnp.ones((4, 3)), jnp.ones((16, 4)))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys_among_the_parameters_draw_one_mask_in_both_passes(make_key):
    """Named, they are folded with the index, as in `value_and_grad`."""
    weight, x = jnp.array([0.1, 0.2, 0.3]), jax.random.normal(jax.random.key(0), (6, 3))
    encode = lambda params, x: jnp.tanh(x * params["w"]) * jax.random.bernoulli(params["key"], 0.5, x.shape)
    loss_fn = lambda params, z: jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1))
    key = make_key(5)

    def by_hand(weight):
        parts = [encode({"w": weight, "key": jax.random.fold_in(key, i)}, x[i::3]) for i in range(3)]
        return loss_fn(None, jnp.stack(parts, axis=1).reshape(6, 3))

    fun = fg.coupled_value_and_grad(encode, loss_fn, num_microbatches=3, key_argnums=0)
    for wrap in (lambda fun: fun, jax.jit):
        loss, grads = wrap(fun)({"w": weight, "key": key}, x)
        assert relative_difference((loss, grads["w"]), jax.value_and_grad(by_hand)(weight)) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("num", [1, 3])
def test_a_loss_without_weight_has_no_gradient(num):
    loss_fn = lambda w, z: fg.WeightedLoss(jnp.sum(jnp.sqrt(z * 0)), 0.0)
    loss, grad = fg.coupled_value_and_grad(lambda w, x: x * w, loss_fn, num_microbatches=num)(jnp.float32(1), jnp.ones(3))
    assert (loss, grad) == (0, 0)


def test_float16_does_not_overflow_beside_the_gradient():
    fun = fg.coupled_value_and_grad(lambda w, x: x * w, lambda w, z: jnp.sum(z.astype(jnp.float32)) * 300, num_microbatches=2)
    with jax.debug_nans(True):
        loss, grads = fun(jnp.array([300.0, -300.0], jnp.float16), jnp.ones((2, 2), jnp.float16))
    assert loss == 0
    np.testing.assert_array_equal(grads, [600, 600])
