"""Why do gradients have to be zeroed? The classic question, answered by running it, in three columns.

PyTorch (where it is installed) keeps the sum in `.grad`; the implicit face of funcgrad does the same on top of JAX; the
explicit face passes the sum along as a value. The plot shows what a forgotten `zero_grad()` does to a loss.

    python examples/zero_grad.py [--plot zero_grad.png] [--smoke]
"""

import argparse
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich import print
from rich.progress import track
from rich.table import Table

import funcgrad as fg
from funcgrad import stateful

torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
ROWS = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


def loss_fn(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """The mean square of a linear function."""
    return jnp.mean((rows @ weight - 1) ** 2)


def twins(value: Any) -> tuple[stateful.Parameter, Any]:
    """The same parameter twice; the second is PyTorch's, or None."""
    tensor = torch.tensor(value, requires_grad=True) if torch else None
    return stateful.Parameter(jnp.asarray(value)), tensor


def text(value: Any) -> str:
    """A gradient or parameter in a few characters."""
    return value if isinstance(value, str) else np.array2string(np.asarray(value), precision=2, suppress_small=True)


def unrolled(weight: Any) -> Any:
    """The losses of three steps of h = w h, added."""
    return weight + weight**2 + weight**3


def accumulation() -> Iterator[tuple[Any, ...]]:
    """Backward adds: a gradient of 1 becomes 2, 3, 4; and an effective batch of 64 is 2 x 32."""
    weight, tensor = twins(1.0)
    buffer, add = fg.zeros(weight.data), fg.backward(jnp.sum, batch_argnums=())
    for count in range(1, 5):
        if torch:
            (tensor * 1).backward()
        stateful.evaluate(jnp.sum, weight).backward()
        buffer, _ = add(buffer, weight.data)
        yield f"backward, {count} times", tensor.grad.clone() if torch else "", weight.grad, fg.total(buffer)
    (weight, tensor), buffer = twins([0.5, -1.0, 2.0]), fg.zeros(jnp.zeros(3))
    for rows in (ROWS[:32], ROWS[32:]):
        if torch:
            (((torch.tensor(rows) @ tensor - 1) ** 2).mean() / 2).backward()
        (stateful.evaluate(loss_fn, weight, rows) / 2).backward()
        buffer, _ = fg.backward(loss_fn)(buffer, weight.data, rows)
    yield "64 rows as 2 x 32", tensor.grad if torch else "", weight.grad, fg.mean(buffer)
    yield "64 rows at once", "", "", jax.grad(loss_fn)(weight.data, ROWS)


def clearing() -> Iterator[tuple[Any, ...]]:
    """One parameter cleared; None and zero under momentum; gradients added over the time steps of a recurrence."""
    pairs = [twins(1.0), twins(1.0)]
    params, buffer = [weight for weight, _ in pairs], fg.zeros([1.0, 1.0])
    for _ in range(2):
        params[0].zero_grad()
        stateful.evaluate(sum, params).backward()
        buffer = dataclasses.replace(buffer, grads=[jnp.zeros(()), buffer.grads[1]])
        buffer, _ = fg.backward(sum, batch_argnums=())(buffer, [1.0, 1.0])
        if torch:
            pairs[0][1].grad = None
            (pairs[0][1] + pairs[1][1]).backward()
    theirs = [tensor.grad.item() for _, tensor in pairs] if torch else ""
    yield "only the first zeroed", theirs, [weight.grad for weight in params], fg.total(buffer)

    (weight, tensor), transformation = twins(1.0), optax.sgd(0.1, momentum=0.9)
    ours, theirs = (
        stateful.Optimizer(transformation, weight),
        torch.optim.SGD([tensor], lr=0.1, momentum=0.9) if torch else None,
    )
    value, opt_state = weight.data, transformation.init(weight.data)
    for name, grad in (("gradient 1", 1.0), ("zeros: moves on", 0.0), ("None: stays", None)):
        weight.grad = None if grad is None else jnp.asarray(grad)
        ours.step()
        if theirs:
            tensor.grad = None if grad is None else torch.tensor(grad)
            theirs.step()
        if grad is not None:  # explicit: nothing is updated unless you say so
            updates, opt_state = transformation.update(jnp.asarray(grad), opt_state, value)
            value = optax.apply_updates(value, updates)
        yield f"momentum, {name}", tensor.detach().clone() if torch else "", weight.data, value
    weight, tensor = twins(2.0)
    if torch:
        unrolled(tensor).backward()
    stateful.evaluate(unrolled, weight).backward()
    yield "h = w h, 3 steps added", tensor.grad if torch else "", weight.grad, jax.grad(unrolled)(2.0)


def losses(num_steps: int, zeroed: bool) -> list[float]:
    """A regression, with `zero_grad()` at each step or never."""
    weight, seen = stateful.Parameter(jnp.zeros(3)), []
    optimizer = stateful.Optimizer(optax.sgd(0.05), weight)
    for _ in track(range(num_steps), description="zeroed" if zeroed else "forgotten"):
        if zeroed:
            optimizer.zero_grad()
        loss = stateful.evaluate(loss_fn, weight, ROWS)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def main() -> None:
    """The table, then the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", default="zero_grad.png", help="where the plot goes")
    parser.add_argument("--smoke", action="store_true", help="a short run that only shows that all of it works")
    arguments = parser.parse_args()
    table = Table("", "PyTorch" if torch else "PyTorch (not installed)", "implicit", "explicit")
    for part in (accumulation, clearing):
        for row in part():
            table.add_row(*map(text, row))
        table.add_section()
    print(table)
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for zeroed, label in ((True, "zero_grad() at each step"), (False, "zero_grad() forgotten")):
        axes.plot(losses(15 if arguments.smoke else 60, zeroed), label=label)
    axes.set(xlabel="step", ylabel="loss", title="A forgotten zero_grad() is momentum without friction")
    axes.legend()
    figure.savefig(arguments.plot, dpi=120)
    print(f"plot: {arguments.plot}")


if __name__ == "__main__":
    main()
