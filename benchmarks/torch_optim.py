"""A step of `torch_optim.adamw` against `optax.adamw`: `python benchmarks/torch_optim.py`.

100 leaves of 256 x 256 in float32. Each round runs both, in an order of its own, in one process.
"""

import argparse
import random
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from funcgrad import torch_optim

LEAVES, SIZE = 100, 256
OPTIONS: dict[str, Any] = {"learning_rate": 1e-3, "eps": 1e-8, "weight_decay": 1e-2}


def contenders() -> dict[str, optax.GradientTransformation]:
    return {"optax": optax.adamw(b1=0.9, b2=0.999, **OPTIONS), "torch_optim": torch_optim.adamw(betas=(0.9, 0.999), **OPTIONS)}


def inputs(leaves: int = LEAVES, size: int = SIZE) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Parameters and gradients."""
    keys = jax.random.split(jax.random.key(0), 2 * leaves)
    arrays = [jax.random.normal(key, (size, size)) for key in keys]
    names = [f"layer{index}" for index in range(leaves)]
    return dict(zip(names, arrays[:leaves], strict=True)), dict(zip(names, arrays[leaves:], strict=True))


def step_of(optimizer: optax.GradientTransformation) -> Any:
    """A jitted step that reuses the memory of the parameters and of the state."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def costs(optimizer: optax.GradientTransformation, params: Any, grads: Any) -> dict[str, float]:
    """What the compiler counts in a step: floating-point operations and bytes of memory read and written."""
    compiled = step_of(optimizer).lower(params, optimizer.init(params), grads).compile()
    counted = compiled.cost_analysis()
    counted = counted[0] if isinstance(counted, list) else counted
    return {"flops": counted["flops"], "bytes": counted["bytes accessed"]}


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by contender."""
    params, grads = inputs()
    running, times = {}, {}
    for name, optimizer in contenders().items():
        step, own = step_of(optimizer), jax.tree.map(jnp.copy, params)
        running[name] = (step, *step(own, optimizer.init(own), grads))
        times[name] = []
    for _ in range(rounds):
        for name in random.sample(list(running), len(running)):
            step, own, state = running[name]
            start = time.perf_counter()
            own, state = jax.block_until_ready(step(own, state, grads))
            times[name].append(time.perf_counter() - start)
            running[name] = step, own, state
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    times = measure(parser.parse_args().rounds)
    counted = {name: costs(optimizer, *inputs()) for name, optimizer in contenders().items()}
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratios = [mine / theirs for mine, theirs in zip(times["torch_optim"], times["optax"], strict=True)]
    print(f"{jax.default_backend()}, {LEAVES} leaves of {SIZE} x {SIZE}, {len(ratios)} rounds")
    for name, median in medians.items():
        print(f"{name:12} {1e3 * median:8.3f} ms  {counted[name]['flops']:.4g} flops  {counted[name]['bytes']:.4g} bytes")
    ratio = medians["torch_optim"] / medians["optax"]
    print(f"ratio of the medians {ratio:.3f}, median of the ratios {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
