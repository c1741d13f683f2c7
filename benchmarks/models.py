"""Models for the benchmarks and the tests, each as parameters, a batch and a loss function; and a hand-written scan.

Called without arguments a function gives a small model; `BENCHMARK` holds the sizes that costs are compared at.
"""

import itertools
import math
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


def convolutional(dtype=jnp.float32, rows=32, side=8, channels=(4, 8), strides=(2, 2), classes=10, seed=0) -> Model:
    keys = iter(jax.random.split(jax.random.key(seed), len(channels) + 4))
    sizes = (1, *channels)
    kernels = [
        jax.random.normal(next(keys), (3, 3, fan_in, fan_out), dtype) / np.sqrt(9 * fan_in).astype(dtype)
        for fan_in, fan_out in itertools.pairwise(sizes)
    ]
    flat = (side // math.prod(strides)) ** 2 * channels[-1]
    params = {"kernels": kernels, "w": _dense(next(keys), flat, classes, dtype)}
    batch = {
        "x": jax.random.normal(next(keys), (rows, side, side, 1), dtype),
        "y": jax.random.randint(next(keys), (rows,), 0, classes),
    }

    def loss_fn(params, batch):
        hidden = batch["x"]
        for kernel, stride in zip(params["kernels"], strides, strict=True):
            numbers = ("NHWC", "HWIO", "NHWC")
            window = (stride, stride)
            hidden = jax.nn.relu(lax.conv_general_dilated(hidden, kernel, window, "SAME", dimension_numbers=numbers))
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


def recurrent(dtype=jnp.float32, rows=16, steps=8, width=16, vocabulary=11, seed=0) -> Model:
    """A GRU that predicts the next character."""
    keys = iter(jax.random.split(jax.random.key(seed), 5))
    params = {
        "embedding": jax.random.normal(next(keys), (vocabulary, width), dtype),
        "input": _dense(next(keys), width, 3 * width, dtype),
        "hidden": _dense(next(keys), width, 3 * width, dtype),
        "head": _dense(next(keys), width, vocabulary, dtype),
    }
    batch = {"tokens": jax.random.randint(next(keys), (rows, steps + 1), 0, vocabulary)}

    def loss_fn(params, batch):
        inputs = params["embedding"][batch["tokens"][:, :-1]] @ params["input"]

        def cell(hidden, gates):
            reset_in, update_in, new_in = jnp.split(gates, 3, axis=-1)
            reset_out, update_out, new_out = jnp.split(hidden @ params["hidden"], 3, axis=-1)
            update = jax.nn.sigmoid(update_in + update_out)
            new = jnp.tanh(new_in + jax.nn.sigmoid(reset_in + reset_out) * new_out)
            hidden = (1 - update) * new + update * hidden
            return hidden, hidden

        start = jnp.zeros((inputs.shape[0], width), dtype)
        _, hidden = lax.scan(cell, start, inputs.swapaxes(0, 1))
        return jnp.mean(cross_entropy(hidden.swapaxes(0, 1) @ params["head"], batch["tokens"][:, 1:]))

    return Model(params, batch, loss_fn)


# The sizes at which costs are compared, here and in the tests.
BENCHMARK = {
    "mlp": lambda: mlp(rows=256, inputs=64, width=512, layers=4),
    "convolutional": lambda: convolutional(rows=64, side=28, channels=(16, 32, 32), strides=(2, 2, 1)),
    "transformer": lambda: transformer(rows=64, layers=4, width=128, heads=4, tokens=64, vocabulary=128),
    "recurrent": lambda: recurrent(rows=64, steps=64, width=128, vocabulary=128),
}


def mean_loss(loss_fn):
    """The loss function for the whole batch: a plain scalar."""

    def whole(params, batch, *args):
        loss = loss_fn(params, batch, *args)
        return loss.total / loss.weight if isinstance(loss, fg.WeightedLoss) else loss

    return whole


def total_loss(loss_fn):
    """The loss function for a microbatch, as a pair of sums: total and weight."""

    def total(params, batch):
        loss = loss_fn(params, batch)
        rows = jax.tree.leaves(batch)[0].shape[0]
        return (loss.total, loss.weight) if isinstance(loss, fg.WeightedLoss) else (loss * rows, jnp.float32(rows))

    return total


def hand_written_scan(loss_fn, num):
    """What a user writes who has no library: strided rows, sums of totals and weights, one division at the end."""
    total = total_loss(loss_fn)

    def value_and_grad(params, batch):
        dealt = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] // num, num, *leaf.shape[1:]).swapaxes(0, 1), batch)

        def body(carry, microbatch):
            (value, weight), grads = jax.value_and_grad(total, has_aux=True)(params, microbatch)
            return jax.tree.map(jnp.add, carry, (grads, value, weight)), None

        zero = (jax.tree.map(jnp.zeros_like, params), jnp.float32(0), jnp.float32(0))
        (grads, value, weight), _ = lax.scan(body, zero, dealt)
        return value / weight, jax.tree.map(lambda grad: grad / weight, grads)

    return value_and_grad
