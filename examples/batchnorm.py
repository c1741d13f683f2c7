"""Batch normalization and accumulation: what microbatches do to its statistics, and the honest choices.

A layer that normalizes by the batch couples its rows, so microbatches learn another loss than the whole batch does, in any
library. Five choices on scikit-learn's digits, an effective batch of 256 in microbatches of different sizes:

- carried: each microbatch normalizes by itself, and hands the running statistics on, as in PyTorch's loop;
- carried, slow: the same, but all microbatches of a step together move the statistics as far as the whole batch would;
- frozen: constants, taken from the training set before the first step, as in fine-tuning;
- whole batch: constants, taken from the whole batch by a forward pass before each step; no gradient goes through them;
- group norm: each row is normalized by itself, so accumulation is exact.

    python examples/batchnorm.py [--steps 200] [--plot batchnorm.png] [--smoke]
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

import funcgrad as fg

BATCH, WIDTHS, MOMENTUM, GROUPS = 256, (64, 96, 96, 10), 0.1, 8
CHOICES = ("carried", "carried, slow", "frozen", "whole batch", "group norm")


def initial() -> list[dict[str, jax.Array]]:
    """The parameters: two hidden layers, each normalized, and an output layer."""
    keys = jax.random.split(jax.random.key(0), len(WIDTHS) - 1)
    shapes = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [
        {"w": jax.random.normal(k, (n, m)) * np.sqrt(2 / n), "scale": jnp.ones(m), "shift": jnp.zeros(m)} for k, n, m in shapes
    ]


def forward(params: Any, x: jax.Array, stats: Any) -> tuple[jax.Array, list[dict[str, jax.Array]]]:
    """Logits, [rows, 10], and the statistics of `x`. `stats` normalize; None: those of `x`; "group": each row by itself."""
    seen = []
    for index, layer in enumerate(params[:-1]):
        x = x @ layer["w"]
        seen.append({"mean": jnp.mean(x, axis=0), "var": jnp.var(x, axis=0)})
        if stats == "group":
            grouped = x.reshape(len(x), GROUPS, -1)
            x = jax.nn.standardize(grouped, axis=-1, epsilon=1e-5).reshape(x.shape)
        else:
            used = seen[-1] if stats is None else stats[index]
            x = (x - used["mean"]) / jnp.sqrt(used["var"] + 1e-5)
        x = jax.nn.relu(x * layer["scale"] + layer["shift"])
    return x @ params[-1]["w"] + params[-1]["shift"], seen


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over the rows."""
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_fn(params: Any, batch: dict[str, jax.Array], stats: Any, *, choice: str, momentum: float) -> tuple[jax.Array, Any]:
    """The mean cross-entropy, and the running statistics: those of the rows enter, the variance unbiased as in PyTorch."""
    used = {"frozen": stats, "whole batch": stats, "group norm": "group"}.get(choice)
    logits, seen = forward(params, batch["image"], used)
    if used is None:
        unbiased = len(batch["label"]) / (len(batch["label"]) - 1)
        stats = blend(stats, [{"mean": each["mean"], "var": each["var"] * unbiased} for each in seen], momentum)
    return cross_entropy(logits, batch["label"]), (stats, None)


def blend(old: Any, new: Any, momentum: float) -> Any:
    """Running averages."""
    return jax.tree.map(lambda one, other: (1 - momentum) * one + momentum * other, old, new)


def difference(left: Any, right: Any) -> float:
    """The norm of the difference over the norm of the right one."""
    return float(optax.tree.norm(optax.tree.sub(left, right)) / optax.tree.norm(right))


def train(choice: str, size: int, data: Any, num_steps: int, advance: Any) -> dict[str, float]:
    """One run with microbatches of `size` rows: what the table says of it."""
    images, labels, test_images, test_labels = data
    momentum = 1 - (1 - MOMENTUM) ** (size / BATCH) if choice == "carried, slow" else MOMENTUM
    function = functools.partial(loss_fn, choice=choice, momentum=momentum)
    options: dict[str, Any] = {"has_aux": True, "carry_argnum": 2}
    step = fg.train_step(function, optimizer := optax.adam(3e-3), microbatch_size=size, **options)
    state, statistics = fg.TrainState.create(initial(), optimizer), jax.jit(lambda params, x: forward(params, x, None)[1])
    running, draw, found = statistics(state.params, images), np.random.default_rng(0), {}
    for index in range(num_steps):
        rows = draw.choice(len(labels), BATCH, replace=False)
        batch = {"image": images[rows], "label": labels[rows]}
        used = statistics(state.params, batch["image"]) if choice == "whole batch" else running
        if index == 0:  # with equal parameters: the gradient, against that of the network that sees the whole batch
            whole = functools.partial(function, choice=choice if choice == "group norm" else "carried")
            grads = jax.jit(fg.grad(function, **options, microbatch_size=size)), fg.grad(whole, **options)
            found["gradient"] = difference(*(grad(state.params, batch, used)[0] for grad in grads))
        state, metrics = step(state, batch, used)
        running = blend(running, used, MOMENTUM) if choice == "whole batch" else metrics["carry"]
        advance()
    logits, _ = forward(state.params, test_images, "group" if choice == "group norm" else running)
    found["statistics"] = difference(running, statistics(state.params, images))
    found["loss"] = float(cross_entropy(logits, test_labels))
    return found | {"accuracy": float(jnp.mean(jnp.argmax(logits, -1) == test_labels))}


def main() -> None:
    """All choices with microbatches of all sizes: a table and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer updates (default 200)")
    parser.add_argument("--plot", default="batchnorm.png", help="where the plot goes")
    parser.add_argument("--smoke", action="store_true", help="a short run that only shows that all of it works")
    arguments = parser.parse_args()
    num_steps, sizes = (3, (16,)) if arguments.smoke else (arguments.steps, (256, 64, 16, 4, 2))
    choices = CHOICES[::4] if arguments.smoke else CHOICES
    console = Console()
    console.print(f"device: {jax.devices()[0].device_kind} ({jax.default_backend()})")
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    data = images[360:], labels[360:], images[:360], labels[:360]

    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    table = Table("choice", "rows", "gradient off", "statistics off", "test loss", "accuracy", title=f"{num_steps} updates")
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=len(choices) * len(sizes) * num_steps)
        for choice in choices:
            found = [train(choice, size, data, num_steps, lambda: progress.advance(task)) for size in sizes]
            for size, each in zip(sizes, found, strict=True):
                off = "-" if choice == "group norm" else f"{each['statistics']:.1%}"
                cells = f"{each['gradient']:.1e}", off, f"{each['loss']:.3f}", f"{each['accuracy']:.1%}"
                table.add_row(choice, str(size), *cells, end_section=size == sizes[-1])
            axes.plot(sizes, [each["loss"] for each in found], marker="o", label=choice)
    console.print(table)
    axes.set(
        xscale="log", yscale="log", xlabel="rows in a microbatch, of 256", ylabel="test loss", xticks=sizes, xticklabels=sizes
    )
    axes.legend()
    figure.savefig(arguments.plot, dpi=120)
    console.print(f"plot: {arguments.plot}")


if __name__ == "__main__":
    main()
