"""A contrastive loss over an effective batch of 512 pairs, three ways: whole, accumulated plainly, and coupled.

Each row is compared with all others of its batch. Accumulated plainly, a row is compared with those of its microbatch: that is
another loss, with fewer negatives, and another gradient. The coupled form is the whole batch's. It needs the activations of one
microbatch, and what the loss makes of all representations: here matrices of 512 x 512.

    python examples/contrastive.py [--microbatches 64] [--steps 150] [--plot contrastive.png] [--smoke]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import funcgrad as fg

BATCH, WIDTH, LAYERS, FEATURES = 512, 256, 4, 32
Params = dict[str, Any]


def init(key: jax.Array) -> Params:
    """A residual network from 64 pixels to features, and a learned temperature."""
    keys = jax.random.split(key, LAYERS + 2)
    return {
        "first": jax.random.normal(keys[0], (64, WIDTH)) / 8,
        "layers": [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:-1]],
        "last": jax.random.normal(keys[-1], (WIDTH, FEATURES)) / WIDTH**0.5,
        "scale": jnp.asarray(np.log(5.0), jnp.float32),  # a dtype of its own, or the step is compiled twice
    }


def features(params: Params, images: jax.Array) -> jax.Array:
    """Unit vectors, [rows, features], of images, [rows, 64]."""
    hidden = images @ params["first"]
    for layer in params["layers"]:
        hidden = hidden + 0.5 * jax.nn.gelu(hidden @ layer)
    out = hidden @ params["last"]
    return out / jnp.linalg.norm(out, axis=-1, keepdims=True)


def encode(params: Params, pairs: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The representations of both views."""
    return features(params, pairs["left"]), features(params, pairs["right"])


def info_nce(params: Params, representations: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Symmetric InfoNCE: which of all right views belongs to this left one, and the other way round."""
    left, right = representations
    logits = left @ right.T * jnp.exp(params["scale"])
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits, 0)) + jnp.diag(jax.nn.log_softmax(logits, 1))) / 2


def loss_fn(params: Params, pairs: dict[str, jax.Array]) -> jax.Array:
    """The loss over the rows that it is given."""
    return info_nce(params, encode(params, pairs))


def augment(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Each image, [rows, 64], moved by up to one pixel, brightened or darkened, with noise."""
    pixels = np.arange(8)
    rows, columns = ((pixels + generator.integers(-1, 2, (len(images), 1))) % 8 for _ in range(2))
    moved = images.reshape(-1, 8, 8)[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
    lit = moved.reshape(-1, 64) * generator.uniform(0.7, 1.3, (len(images), 1))
    return (lit + generator.normal(0, 0.1, lit.shape)).astype(np.float32)


def neighbour_accuracy(params: Params, images: np.ndarray, labels: np.ndarray, known: int) -> float:
    """How often the nearest of `known` labelled images, by the features, has the right digit."""
    vectors = features(params, jnp.asarray(images))
    nearest = jnp.argmax(vectors[known:] @ vectors[:known].T, axis=-1)
    return float(np.mean(labels[:known][np.asarray(nearest)] == labels[known:]))


def plot(path: Path, losses: dict[str, list[float]]) -> None:
    """The loss of the whole batch over the steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), style in zip(losses.items(), ("-", ":", "--"), strict=True):
        axes.plot(values, style, label=name, linewidth=4 if style == "-" else 2, alpha=0.6 if style == "-" else 1)
    axes.set(xlabel="step", ylabel="loss over all 512 pairs", title="Contrastive learning in microbatches")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train three ways on the same pairs, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=64, help=f"how many; must divide {BATCH} (default 64)")
    parser.add_argument("--steps", type=int, default=150, help="optimizer updates (default 150)")
    parser.add_argument("--plot", type=Path, help="where to draw the losses")
    parser.add_argument("--smoke", action="store_true", help="a short run that only shows that all of it works")
    arguments = parser.parse_args()
    num, num_steps = arguments.microbatches, min(arguments.steps, 5) if arguments.smoke else arguments.steps
    if num_steps < 1 or num < 1 or BATCH % num:
        parser.error(f"--steps must be at least 1, and --microbatches must divide {BATCH}")

    console = Console()
    console.print(f"device: {jax.devices()[0].device_kind} ({jax.default_backend()})")
    images, labels = load_digits(return_X_y=True)
    images, optimizer = images / 16, optax.adam(1e-3)
    forms: dict[str, Callable[..., Any]] = {
        "whole batch": jax.value_and_grad(loss_fn),
        "accumulated": fg.value_and_grad(loss_fn, num_microbatches=num),
        "coupled": fg.coupled_value_and_grad(encode, info_nce, num_microbatches=num),
    }

    def step(form: Callable[..., Any], params: Params, opt_state: Any, pairs: Any) -> tuple[Params, Any, jax.Array]:
        _, grads = form(params, pairs)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss_fn(params, pairs)  # pyright: ignore[reportReturnType]

    steps = {name: jax.jit(lambda *args, form=form: step(form, *args)) for name, form in forms.items()}
    held = {name: (init(jax.random.key(0)), optimizer.init(init(jax.random.key(0)))) for name in forms}
    losses: dict[str, list[float]] = {name: [] for name in forms}
    generator, pairs = np.random.default_rng(0), {}
    for _ in track(range(num_steps), description="training", console=console):
        rows = generator.choice(len(images), BATCH, replace=False)
        pairs = {side: augment(images[rows], generator) for side in ("left", "right")}
        for name, run in steps.items():
            params, opt_state, loss = run(*held[name], pairs)
            held[name] = params, opt_state
            losses[name].append(float(loss))

    gradients = {name: jax.jit(form) for name, form in forms.items()}
    exact = gradients["whole batch"](held["whole batch"][0], pairs)[1]
    table = Table("form", "loss over 512", "gradient's difference", "accuracy", "temporary memory")
    for name, gradient in gradients.items():
        analysis = gradient.lower(held[name][0], pairs).compile().memory_analysis()
        size = "unknown" if analysis is None else f"{analysis.temp_size_in_bytes / 1e6:.2f} MB"
        found = gradient(held["whole batch"][0], pairs)[1]
        difference = optax.tree.norm(optax.tree.sub(found, exact)) / optax.tree.norm(exact)
        accuracy = neighbour_accuracy(held[name][0], images, labels, known=500)
        table.add_row(name, f"{losses[name][-1]:.4f}", f"{difference:.1e}", f"{accuracy:.1%}", size)
    console.print(table)
    if arguments.plot:
        plot(arguments.plot, losses)


if __name__ == "__main__":
    main()
