"""Truncated back-propagation through time: a character network on real text, in windows, against full back-propagation.

Python's own documentation, which ships with it, is read as 16 streams of characters. Each update sees the next 256 of every
stream. Full back-propagation keeps the activations of 256 time steps; in windows of 32 it keeps those of 32, the hidden state
enters each window as a constant, and the windows' gradients are added. Either way there is one update, and the state of the
last time step is handed on to the next one. What the windows miss is the gradient that crosses their borders.

    python examples/recurrent.py [--steps 300] [--smoke]
"""

import argparse
import pydoc_data.topics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import funcgrad as fg

STREAMS, TIME, WIDTH = 16, 256, 128
WINDOWS = (256, 100, 32, 8)  # 100 does not divide 256: windows of 100, 100 and 56


def load() -> tuple[np.ndarray, np.ndarray, int]:
    """Streams of character codes to train on and to test with, [stream, time], and how many characters there are."""
    text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    symbols, codes = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    streams = codes[: len(codes) // STREAMS * STREAMS].reshape(STREAMS, -1).astype(np.int32)
    tested = streams.shape[1] // 10
    return streams[:, :-tested], streams[:, -tested:], len(symbols)


def initial(num_symbols: int) -> dict[str, jax.Array]:
    """The parameters of one gated recurrent layer. What a character adds to each gate stands in a row of `input`."""
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, *shape: jax.random.normal(key, shape) / np.sqrt(WIDTH)  # noqa: E731
    return {
        "input": draw(keys[0], num_symbols, 3 * WIDTH),
        "gates": draw(keys[1], WIDTH, 2 * WIDTH),
        "new": draw(keys[2], WIDTH, WIDTH),
        "output": draw(keys[3], WIDTH, num_symbols),
    }


def loss_fn(params: dict[str, jax.Array], codes: dict[str, Any], hidden: jax.Array) -> tuple[jax.Array, tuple[jax.Array, None]]:
    """The mean cross-entropy of a window, of codes [stream, time], and the hidden state after it, [stream, width]."""

    def step(hidden: jax.Array, entering: jax.Array) -> tuple[jax.Array, jax.Array]:
        for_gates, for_new = jnp.split(entering, [2 * WIDTH], axis=-1)
        reset, update = jnp.split(jax.nn.sigmoid(for_gates + hidden @ params["gates"]), 2, axis=-1)
        hidden = update * hidden + (1 - update) * jnp.tanh(for_new + (reset * hidden) @ params["new"])
        return hidden, hidden

    hidden, seen = jax.lax.scan(step, hidden, params["input"][codes["read"].T])  # over time
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(seen @ params["output"], codes["next"].T)
    return losses.mean(), (hidden, None)


def stretch(streams: np.ndarray, begin: int, length: int) -> dict[str, np.ndarray]:
    """Characters to read, and those that come next."""
    return {"read": streams[:, begin : begin + length], "next": streams[:, begin + 1 : begin + length + 1]}


# The rows of a microbatch are time steps here: in_axes=1 is the time axis, and a window's mean is weighed by its length.
OPTIONS: dict[str, Any] = {"has_aux": True, "carry_argnum": 2, "in_axes": 1, "order": "contiguous"}
full_grad = jax.jit(fg.grad(loss_fn, **OPTIONS))


def run(window: int, num_steps: int, streams: np.ndarray, num_symbols: int, console: Console) -> dict[str, Any]:
    """Train in windows of `window` time steps."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    state = fg.TrainState.create(initial(num_symbols), optimizer)
    step = fg.train_step(loss_fn, optimizer, microbatch_size=window, **OPTIONS)
    rest = jnp.zeros((STREAMS, WIDTH))
    compiled = step.lower(state, stretch(streams, 0, TIME), rest).compile()
    carry, losses, per_epoch, start = rest, [], (streams.shape[1] - 1) // TIME, 0.0
    for index in track(range(num_steps), description=f"windows of {window}", console=console):
        begin = index % per_epoch * TIME
        carry = rest if begin == 0 else carry
        state, metrics = step(state, stretch(streams, begin, TIME), carry)
        carry = metrics["carry"]
        losses.append(float(metrics["loss"]))
        start = time.perf_counter() if index == 0 else start  # the first step compiles
    seconds = (time.perf_counter() - start) / max(1, num_steps - 1)

    # The same parameters, the same characters: how much of the gradient do the windows see?
    batch = stretch(streams, 0, TIME)
    grad, _ = jax.jit(fg.grad(loss_fn, microbatch_size=window, **OPTIONS))(state.params, batch, carry)
    full, _ = full_grad(state.params, batch, carry)
    return {
        "params": state.params,
        "memory": compiled.memory_analysis().temp_size_in_bytes,
        "train": np.mean(losses[-max(1, num_steps // 10) :]),
        "missing": float(optax.tree.norm(optax.tree.sub(grad, full)) / optax.tree.norm(full)),
        "seconds": seconds,
    }


def main() -> None:
    """Train with each length of window; a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer updates, each of 256 time steps (default 300)")
    parser.add_argument("--smoke", action="store_true", help="a short run that only shows that all of it works")
    arguments = parser.parse_args()
    num_steps, windows = (min(arguments.steps, 3), WINDOWS[:2]) if arguments.smoke else (arguments.steps, WINDOWS)
    if num_steps < 1:
        parser.error("--steps must be at least 1")

    console = Console()
    console.print(f"device: {jax.devices()[0].device_kind} ({jax.default_backend()})")
    train, test, num_symbols = load()
    console.print(f"text: {train.size + test.size} characters, {num_symbols} different ones, a tenth to test with")
    evaluate = jax.jit(lambda params, codes: loss_fn(params, codes, jnp.zeros((STREAMS, WIDTH)))[0])
    held_out = stretch(test, 0, test.shape[1] - 1)

    table = Table("window", "memory", "gradient missing", "loss", "test loss", "ms/step", title=f"{num_steps} updates")
    for window in windows:
        found = run(window, num_steps, train, num_symbols, console)
        table.add_row(
            f"{window} (full)" if window == TIME else str(window),
            f"{found['memory'] / 1e6:.1f} MB",
            f"{found['missing']:.1%}",
            f"{found['train']:.3f}",
            f"{float(evaluate(found['params'], held_out)):.3f}",
            f"{found['seconds'] * 1e3:.0f}",
        )
    console.print(table)
    console.print("memory: temporary memory of the compiled step; gradient missing: norm of the difference to the full one;")
    console.print("loss: of the last tenth of the updates, in nats a character")


if __name__ == "__main__":
    main()
