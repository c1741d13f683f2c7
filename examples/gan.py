"""Two networks, two optimizers, real digits: what happens when the generator's gradient is left in the discriminator.

The generator's loss runs through the discriminator, so its backward leaves a gradient there, too. Correct code clears it
before the discriminator's own backward; the mistake is to call only the generator's `zero_grad()`. Both are run side by side,
in the implicit face; in the explicit face the mistake cannot be written, because each network has a buffer of its own.

    python examples/gan.py [--steps 4000] [--plot gan.png] [--smoke]
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

from funcgrad import stateful

BATCH, NOISE = 64, 16


def network(key: jax.Array, sizes: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    """The parameters of a multilayer perceptron."""
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [{"w": jax.random.normal(key, (n, m)) / np.sqrt(n), "b": jnp.zeros(m)} for key, n, m in pairs]


def apply(layers: Any, x: jax.Array) -> jax.Array:
    """[batch, in] to [batch, out], with leaky ReLU between the layers."""
    for layer in layers[:-1]:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"], 0.2)
    return x @ layers[-1]["w"] + layers[-1]["b"]


def generate(generator: Any, noise: jax.Array) -> jax.Array:
    """Images, [batch, 64], with values in 0 to 1."""
    return jax.nn.sigmoid(apply(generator, noise))


def discriminator_loss(discriminator: Any, real: jax.Array, fake: jax.Array) -> jax.Array:
    """Real images want logits above 0, fake ones below."""
    losses = jax.nn.softplus(-apply(discriminator, real)) + jax.nn.softplus(apply(discriminator, fake))
    return jnp.mean(losses)


def generator_loss(generator: Any, discriminator: Any, noise: jax.Array) -> jax.Array:
    """Fake images want the discriminator's logits above 0."""
    return jnp.mean(jax.nn.softplus(-apply(discriminator, generate(generator, noise))))


def arrays(params: Any) -> Any:
    """The arrays of Parameters: constants, detached."""
    return jax.tree.map(lambda parameter: parameter.detach(), params)


def train(images: np.ndarray, num_steps: int, correct: bool, console: Console) -> dict[str, Any]:
    """One run; `correct` says whether the discriminator is cleared of the generator's gradient."""
    keys = jax.random.split(jax.random.key(0), 3)
    generator = stateful.parameters(network(keys[0], (NOISE, 128, 64)))
    discriminator = stateful.parameters(network(keys[1], (64, 128, 1)))
    g_optimizer = stateful.Optimizer(optax.adam(1e-3, b1=0.5), generator)
    d_optimizer = stateful.Optimizer(optax.adam(2e-4, b1=0.5), discriminator)
    draw, sample = np.random.default_rng(0), jax.jit(generate)
    history: dict[str, Any] = {"discriminator": [], "generator": []}
    for _ in track(range(num_steps), description="correct" if correct else "mistaken", console=console):
        real = images[draw.choice(len(images), BATCH, replace=False)]
        noise = draw.normal(size=(BATCH, NOISE)).astype(np.float32)

        if correct:
            d_optimizer.zero_grad()  # of what the generator's backward left here, too
        fake = sample(arrays(generator), noise)
        d_loss = stateful.evaluate(discriminator_loss, discriminator, real, fake)
        d_loss.backward()
        d_optimizer.step()
        if not correct:
            d_optimizer.zero_grad()  # too early: the generator's backward is still to come

        g_optimizer.zero_grad()
        g_loss = stateful.evaluate(generator_loss, generator, discriminator, noise)
        g_loss.backward()
        g_optimizer.step()
        history["discriminator"].append(d_loss.value)
        history["generator"].append(g_loss.value)
    fixed = np.random.default_rng(1).normal(size=(16, NOISE)).astype(np.float32)
    return {**{k: np.array(v) for k, v in history.items()}, "images": sample(arrays(generator), fixed)}


def draw_plot(runs: dict[str, dict[str, Any]], path: str) -> None:
    """The losses, and 16 generated digits of each run."""
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(2, len(runs), figsize=(8, 6), layout="constrained")
    for (title, run), column in zip(runs.items(), axes.T, strict=True):
        for name in ("discriminator", "generator"):
            column[0].plot(run[name], label=name)
        column[0].set(title=title, xlabel="step", ylabel="loss")
        column[0].legend()
        tiles = np.asarray(run["images"]).reshape(2, 8, 8, 8).transpose(0, 2, 1, 3).reshape(16, 64)
        column[1].imshow(tiles, cmap="gray_r", vmin=0, vmax=1)
        column[1].set_axis_off()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Both runs, a table and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="updates of each network (default 4000)")
    parser.add_argument("--plot", default="gan.png", help="where the plot goes")
    parser.add_argument("--smoke", action="store_true", help="a short run that only shows that all of it works")
    arguments = parser.parse_args()
    num_steps = min(arguments.steps, 20) if arguments.smoke else arguments.steps
    console, images = Console(), (load_digits(return_X_y=True)[0] / 16).astype(np.float32)
    runs = {
        "correct": train(images, num_steps, True, console),
        "generator's gradient left in": train(images, num_steps, False, console),
    }
    table = Table("run", "discriminator's loss", "generator's loss", title="means of the last tenth of the steps")
    table.add_row("a generator that cannot be told from the data", f"{2 * np.log(2):.3f}", f"{np.log(2):.3f}")
    for name, run in runs.items():
        tail = -max(1, num_steps // 10)
        table.add_row(name, *(f"{run[key][tail:].mean():.3f}" for key in ("discriminator", "generator")))
    console.print(table)
    draw_plot(runs, arguments.plot)
    console.print(f"plot: {arguments.plot}")


if __name__ == "__main__":
    main()
