"""Measure the optimizers of `funcgrad.torch_optim` and write the table of docs/torch_optim.md.

`python tests/write_optimizer_table.py` takes a few minutes.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import lbfgs_twins
import optax
import optimizer_twins as twins
import torch

PAGE = Path(__file__).parent.parent / "docs" / "torch_optim.md"
BEGIN, END = "<!-- table: python tests/write_optimizer_table.py -->", "<!-- end of the table -->"
HEADER = (
    "| optimizer | sets of options | float64 | float32 | bfloat16 | the nearest plain optax call | its difference, float64 |",
    "|---|---:|---:|---:|---:|---|---:|",
)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    jax.config.update("jax_enable_x64", True)
    rows = [row_of_lbfgs() if name == "lbfgs" else row(name) for name in sorted(["lbfgs", *twins.NAMES])]
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, "", *HEADER, *rows, "", END]) + rest.split(END)[1])
    print("\n".join(rows))


def row(name: str) -> str:
    """One row: the worst difference of the parameters over all sets of options."""
    pairs = [(options, False) for options in twins.pairs(name)[0]]
    sets = twins.singles(name) + pairs
    plain = [(options, injected) for options, injected in sets if not injected]  # optax rounds what it injects to bfloat16
    worst = {
        "float64": max(
            largest(name, "float64", twins.singles(name), twins.IN_TURNS), largest(name, "float64", pairs, twins.ALWAYS)
        ),
        "float32": largest(name, "float32", sets, twins.ALWAYS),
        "bfloat16": largest(name, "bfloat16", plain, twins.ALWAYS),
    }
    twin = twins.TWINS[name]
    at = f" against {call(name, twin.where)}" if twin.where else ""
    figures = " | ".join(f"{worst[dtype]:.0e}" for dtype in ("float64", "float32", "bfloat16"))
    return f"| `{name}` | {len(sets)} | {figures} | `{twin.nearest}`{at} | {of_optax(name):.0e} |"


def row_of_lbfgs() -> str:
    worst = [max(lbfgs_twins.compare_long_runs(dtype)[0]) for dtype in ("float64", "float32")]
    figures = " | ".join(f"{each:.0e}" for each in worst)
    at = call("lbfgs", lbfgs_twins.AS_OPTAX)
    return f"| `lbfgs` | {len(lbfgs_twins.long_sets())} | {figures} | | `optax.lbfgs()` against {at} | {of_optax_lbfgs():.0e} |"


def largest(name: str, dtype: str, sets: list, pattern: tuple) -> float:
    return max(twins.compare(name, dtype, sets, pattern)[0])


def call(name: str, options: dict) -> str:
    return f"`{name}({', '.join(f'{key}={value}' for key, value in options.items())})`"


def of_optax(name: str) -> float:
    """The difference of the nearest call of plain optax, with its defaults."""
    twin = twins.TWINS[name]
    optimizer = eval(twin.nearest, {"optax": optax})
    given = twins.problem(f"{name} optax", "float64", 1)
    params = [[jnp.asarray(param) for param in given.params]]
    passed, _ = twins.run_here((optimizer,), params, twins.begin((optimizer,), params), [given.grads], twins.ALWAYS)
    theirs, _ = twins.run_torch(name, twin.where, given, "float64", twins.ALWAYS)
    return twins.worst_difference(passed[0], theirs, given.params)


def of_optax_lbfgs() -> float:
    """The difference of `optax.lbfgs`, one iteration an update, from PyTorch's with one iteration a step."""
    start = lbfgs_twins.long_start("float64")
    got, _ = lbfgs_twins.our_steps(lbfgs_twins.loss_here, lbfgs_twins.STEPS, make=optax.lbfgs)(start, {})
    want, _ = lbfgs_twins.torch_steps(lbfgs_twins.loss_in_torch, start, lbfgs_twins.STEPS, lbfgs_twins.AS_OPTAX)
    return max(
        lbfgs_twins.difference(jax.tree.map(lambda leaf, step=step: leaf[step], got), each) for step, each in enumerate(want)
    )


def table_on_the_page() -> dict[str, list[str]]:
    """The cells of each row that the page has, by the optimizer's name."""
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    return {re.sub("`", "", cells[0]): cells[1:] for cells in rows}


if __name__ == "__main__":
    main()
