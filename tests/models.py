"""Small models for the tests, as pairs of parameters and a loss function, in any dtype; and a hand-written scan beside them."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import funcgrad as fg


class Model(NamedTuple):
    params: Any
    batch: Any
    loss_fn: Callable[..., Any]


def _dense(key, fan_in, fan_out, dtype):
    return jax.random.normal(key, (fan_in, fan_out), dtype) / np.sqrt(fan_in).astype(dtype)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]


def mlp(dtype=jnp.float32, rows=32, inputs=8, width=16, layers=2, classes=10, seed=0) -> Model:
    keys = iter(jax.random.split(jax.random.key(seed), layers + 4))
    sizes = [inputs] + [width] * layers + [classes]
    params = [
        {"w": _dense(next(keys), fan_in, fan_out, dtype), "b": jnp.zeros(fan_out, dtype)}
        for fan_in, fan_out in itertools.pairwise(sizes)
    ]
    batch = {
        "x": jax.random.normal(next(keys), (rows, inputs), dtype),
        "y": jax.random.randint(next(keys), (rows,), 0, classes),
    }

    def loss_fn(params, batch):
        hidden = batch["x"]
        for layer in params[:-1]:
            hidden = jnp.tanh(hidden @ layer["w"] + layer["b"])
        return jnp.mean(cross_entropy(hidden @ params[-1]["w"] + params[-1]["b"], batch["y"]))

    return Model(params, batch, loss_fn)


def convolutional(dtype=jnp.float32, rows=32, side=8, channels=(4, 8), classes=10, seed=0) -> Model:
    keys = iter(jax.random.split(jax.random.key(seed), len(channels) + 4))
    sizes = (1, *channels)
    kernels = [
        jax.random.normal(next(keys), (3, 3, fan_in, fan_out), dtype) / np.sqrt(9 * fan_in).astype(dtype)
        for fan_in, fan_out in itertools.pairwise(sizes)
    ]
    flat = (side // 2 ** len(channels)) ** 2 * channels[-1]
    params = {"kernels": kernels, "w": _dense(next(keys), flat, classes, dtype)}
    batch = {
        "x": jax.random.normal(next(keys), (rows, side, side, 1), dtype),
        "y": jax.random.randint(next(keys), (rows,), 0, classes),
    }

    def loss_fn(params, batch):
        hidden = batch["x"]
        for kernel in params["kernels"]:
            numbers = ("NHWC", "HWIO", "NHWC")
            hidden = jax.nn.relu(lax.conv_general_dilated(hidden, kernel, (2, 2), "SAME", dimension_numbers=numbers))
        return jnp.mean(cross_entropy(hidden.reshape(hidden.shape[0], -1) @ params["w"], batch["y"]))

    return Model(params, batch, loss_fn)


def transformer(dtype=jnp.float32, rows=32, layers=1, width=16, heads=2, tokens=8, vocabulary=11, seed=0) -> Model:
    """Causal; the loss is a mean over the unmasked tokens of all rows, of which there are 1 to `tokens` in a row."""
    keys = iter(jax.random.split(jax.random.key(seed), 4 * layers + 6))
    params = {
        "embedding": jax.random.normal(next(keys), (vocabulary, width), dtype),
        "position": jax.random.normal(next(keys), (tokens, width), dtype),
        "head": _dense(next(keys), width, vocabulary, dtype),
        "blocks": [
            {
                "qkv": _dense(next(keys), width, 3 * width, dtype),
                "out": _dense(next(keys), width, width, dtype),
                "up": _dense(next(keys), width, 4 * width, dtype),
                "down": _dense(next(keys), 4 * width, width, dtype),
            }
            for _ in range(layers)
        ],
    }
    lengths = jax.random.randint(next(keys), (rows,), 1, tokens + 1)
    batch = {
        "tokens": jax.random.randint(next(keys), (rows, tokens), 0, vocabulary),
        "mask": (jnp.arange(tokens) < lengths[:, None]).astype(dtype),
    }

    def normalize(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)

    def attend(x, block):
        split_heads = (*x.shape[:-1], heads, width // heads)
        query, key, value = (part.reshape(split_heads) for part in jnp.split(x @ block["qkv"], 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(width // heads).astype(dtype)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape) @ block["out"]

    def loss_fn(params, batch):
        x = params["embedding"][batch["tokens"]] + params["position"]
        for block in params["blocks"]:
            x = x + attend(normalize(x), block)
            x = x + jax.nn.gelu(normalize(x) @ block["up"]) @ block["down"]
        losses = cross_entropy(normalize(x[:, :-1]) @ params["head"], batch["tokens"][:, 1:])
        mask = batch["mask"][:, 1:]
        return fg.WeightedLoss(jnp.sum(losses * mask), jnp.sum(mask))

    return Model(params, batch, loss_fn)


def mean_loss(loss_fn):
    """The loss function for the whole batch: a plain scalar."""

    def whole(params, batch, *args):
        loss = loss_fn(params, batch, *args)
        return loss.total / loss.weight if isinstance(loss, fg.WeightedLoss) else loss

    return whole


def hand_written_scan(loss_fn, num):
    """What a user writes who has no library: strided rows, sums of totals and weights, one division at the end."""

    def total(params, batch):
        loss = loss_fn(params, batch)
        rows = jax.tree.leaves(batch)[0].shape[0]
        return (loss.total, loss.weight) if isinstance(loss, fg.WeightedLoss) else (loss * rows, jnp.float32(rows))

    def value_and_grad(params, batch):
        dealt = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] // num, num, *leaf.shape[1:]).swapaxes(0, 1), batch)

        def body(carry, microbatch):
            (value, weight), grads = jax.value_and_grad(total, has_aux=True)(params, microbatch)
            return jax.tree.map(jnp.add, carry, (grads, value, weight)), None

        zero = (jax.tree.map(jnp.zeros_like, params), jnp.float32(0), jnp.float32(0))
        (grads, value, weight), _ = lax.scan(body, zero, dealt)
        return value / weight, jax.tree.map(lambda grad: grad / weight, grads)

    return value_and_grad
