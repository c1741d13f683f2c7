"""Digits, end to end: a network trained by accumulation, and the proof that accumulating changed nothing.

An effective batch of 256 images is folded in as 8 microbatches of 32. At several points of the training the window's
gradient is compared with the full batch's, and both programs' temporary memory is read from the compiler.

    python examples/digits.py [--microbatches 8] [--steps 300] [--smoke]
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import funcgrad as fg

BATCH = 256
MINIMUM_ACCURACY = 0.97


class Network(nnx.Module):
    """Two hidden layers on 8 x 8 images."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.second = nnx.Linear(256, 256, rngs=rngs)
        self.third = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits, [batch, 10], of images, [batch, 64]."""
        return self.third(nnx.gelu(self.second(nnx.gelu(self.first(images)))))


def loss_fn(network: Network, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean cross-entropy over the rows of the batch."""
    logits = network(batch["image"])
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def load(test_rows: int = 360) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """scikit-learn's 1,797 real images, shuffled, as a training and a test set."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    data = {"image": (images[order] / 16).astype(np.float32), "label": labels[order].astype(np.int32)}
    return {k: v[test_rows:] for k, v in data.items()}, {k: v[:test_rows] for k, v in data.items()}


def relative_difference(left: Network, right: Network) -> float:
    """The largest, over the parameters, of the difference's norm over the norm."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other)) for one, other in pairs)


def temporary_memory(fun: Any, *args: Any) -> str:
    """What the compiled program of `fun`, a jitted function, needs beside its arguments and its output."""
    analysis = fun.lower(*args).compile().memory_analysis()
    return "unknown" if analysis is None else f"{analysis.temp_size_in_bytes / 1e6:.2f} MB"


def main() -> None:
    """Train, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=8, help=f"how many; must divide {BATCH} (default 8)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer updates (default 300)")
    parser.add_argument("--smoke", action="store_true", help="a short run that only shows that all of it works")
    arguments = parser.parse_args()
    num_steps = min(arguments.steps, 20) if arguments.smoke else arguments.steps
    if num_steps < 1 or arguments.microbatches < 1 or BATCH % arguments.microbatches:
        parser.error(f"--steps must be at least 1, and --microbatches must divide {BATCH}")

    console = Console()
    console.print(f"device: {jax.devices()[0].device_kind} ({jax.default_backend()})")
    train, test = load()
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, num_steps), weight_decay=1e-4)
    state = fg.TrainState.create(Network(nnx.Rngs(0)), optimizer)
    step = fg.train_step(loss_fn, optimizer, num_microbatches=arguments.microbatches)

    whole = jax.jit(jax.value_and_grad(loss_fn))
    accumulated = jax.jit(fg.value_and_grad(loss_fn, num_microbatches=arguments.microbatches))
    accuracy = jax.jit(lambda network, batch: jnp.mean(jnp.argmax(network(batch["image"]), -1) == batch["label"]))

    generator = np.random.default_rng(1)
    checkpoints = set(np.linspace(0, num_steps - 1, 5, dtype=int).tolist())
    table = Table("step", "loss", "window against full batch", title="relative difference of the gradients")
    differences = []
    for index in track(range(num_steps), description="training", console=console):
        rows = generator.choice(len(train["label"]), BATCH, replace=False)
        batch = {name: values[rows] for name, values in train.items()}
        if index in checkpoints:
            differences.append(relative_difference(accumulated(state.params, batch)[1], whole(state.params, batch)[1]))
        state, metrics = step(state, batch)
        if index in checkpoints:
            table.add_row(str(index), f"{float(metrics['loss']):.4f}", f"{differences[-1]:.1e}")
    console.print(table)

    sizes = [temporary_memory(fun, state.params, {k: v[:BATCH] for k, v in train.items()}) for fun in (whole, accumulated)]
    reached = float(accuracy(state.params, test))
    console.print(f"test accuracy: {reached:.1%} after {num_steps} updates")
    console.print(f"largest relative difference: {max(differences):.1e}")
    console.print(f"temporary memory: full batch {sizes[0]}, {arguments.microbatches} microbatches {sizes[1]}")
    if not arguments.smoke and num_steps >= 300 and reached < MINIMUM_ACCURACY:
        raise SystemExit(f"test accuracy {reached:.1%} is below {MINIMUM_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
