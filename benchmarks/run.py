"""Measure a training step in every form, interleaved in one process: `python benchmarks/run.py --help`.

Each round runs every contender once, in an order of its own, so that whatever else the
machine does falls on all of them. What is printed are medians
and ratios to the best form written by hand that has the memory of a scan.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REFERENCES = ("scan", "stream")  # written by hand, with the memory of one microbatch


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("mlp", "convolutional", "transformer", "recurrent")
    parser.add_argument("--models", nargs="+", choices=names, help="all if left out")
    parser.add_argument("--microbatches", nargs="+", type=int, help="2 8 32 if left out")
    parser.add_argument("--rounds", type=int, help="rounds; if left out 30, or as many as take 15 s")
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), help="JAX's default if left out")
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out, 'PyTorch compiled' for example")
    parser.add_argument("--quick", action="store_true", help="the MLP and the convolutional network, 8 microbatches, 5 rounds")
    parser.add_argument("--output", type=Path, help="the folder for JSON, plot and table; benchmarks/results if left out")
    options = parser.parse_args(arguments)
    if set(REFERENCES) <= set(options.without):
        parser.error(f"one of {REFERENCES} is needed, for the ratios")
    quick = options.quick
    options.models = options.models or (["mlp", "convolutional"] if quick else names)
    options.microbatches = options.microbatches or ([8] if quick else [2, 8, 32])
    options.seconds = 0 if quick or options.rounds else 15
    options.rounds = options.rounds or (5 if quick else 30)
    return options


def measure(name: str, num: int, options: argparse.Namespace, progress: Any) -> list[dict[str, Any]]:
    """The rows of the table for one model and one number of microbatches."""
    import jax
    import models
    from contenders import jax_contenders

    makers = jax_contenders(models.BENCHMARK[name](), num)
    try:
        from torch_contenders import torch_contenders
    except ImportError:
        progress.console.print("PyTorch is not installed; its contenders are left out")
    else:
        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        makers |= torch_contenders(name, num, device)
    makers = {contender: make for contender, make in makers.items() if contender not in options.without}
    task = progress.add_task(f"{name}, {num} microbatches", total=len(makers) + options.rounds)
    ready, rows = {}, {}
    for contender, make in makers.items():
        start = time.perf_counter()
        try:
            made = make()
            jax.block_until_ready(made.run())
        except Exception as error:  # PyTorch's compiler needs a C++ compiler, a GPU build its libraries
            progress.console.print(f"{contender}, {name}: left out, {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            progress.advance(task)
            continue
        seconds = time.perf_counter() - start
        temporary = made.temporary() if made.temporary else None
        ready[contender] = made
        where = {"model": name, "microbatches": num, "contender": contender}
        rows[contender] = where | {"first_call_seconds": seconds, "temporary_bytes": temporary}
        progress.advance(task)
    times: dict[str, list[float]] = {contender: [] for contender in ready}
    began, rounds = time.perf_counter(), 0
    while rounds < options.rounds or time.perf_counter() - began < options.seconds:
        rounds += 1
        # In another order each time: what ran before leaves the caches and the clock as it likes.
        for contender in random.sample(list(ready), len(ready)):
            made = ready[contender]
            start = time.perf_counter()
            jax.block_until_ready(made.run())
            times[contender].append(time.perf_counter() - start)
        progress.advance(task)
    progress.console.print(f"{rounds} rounds of {name}, N={num}")
    medians = {contender: statistics.median(each) for contender, each in times.items()}
    reference = min(medians[contender] for contender in REFERENCES if contender in medians)
    for contender, row in rows.items():
        row |= {"seconds": medians[contender], "ratio": medians[contender] / reference}
    progress.remove_task(task)
    return list(rows.values())


def host_overhead(num: int = 32, rounds: int = 60) -> float:
    """What it costs that the host drives a microbatch, beyond the bare call of its program: seconds, from medians."""
    import jax
    from contenders import host_and_bare

    pair = host_and_bare(num)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for contender, seconds in zip(pair, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(contender.run())
            seconds.append(time.perf_counter() - start)
    driven, bare = (statistics.median(seconds[3:]) for seconds in times)
    return (driven - bare) / num


def as_markdown(rows: list[dict[str, Any]], where: str) -> str:
    """A table for people: milliseconds, and the ratio to the best hand-written form in brackets."""
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    cases = list(dict.fromkeys((row["model"], row["microbatches"]) for row in rows))
    by_place = {(row["model"], row["microbatches"], row["contender"]): row for row in rows}
    lines = [where, ""]
    for title, cell in (
        ("Milliseconds a step (ratio)", _time_cell),
        ("Temporary memory, MB", _memory_cell),
        ("First call, s", _first),
    ):
        lines += [f"**{title}**", "", "| | " + " | ".join(f"{model}<br>N={num}" for model, num in cases) + " |"]
        lines.append("|---|" + "---:|" * len(cases))
        for contender in contenders:
            found = [by_place.get((*case, contender)) for case in cases]
            lines.append(f"| {contender} | " + " | ".join("" if row is None else cell(row) for row in found) + " |")
        lines.append("")
    return "\n".join(lines)


def _time_cell(row: dict[str, Any]) -> str:
    return f"{1e3 * row['seconds']:.1f} ({row['ratio']:.2f})"


def _memory_cell(row: dict[str, Any]) -> str:
    return "" if row["temporary_bytes"] is None else f"{row['temporary_bytes'] / 1e6:.1f}"


def _first(row: dict[str, Any]) -> str:
    return f"{row['first_call_seconds']:.1f}"


def plot(rows: list[dict[str, Any]]) -> Any:
    """Bars of the ratios, a panel for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["model"] for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    figure, panels = plt.subplots(
        len(names), 1, figsize=(9, 2.6 * len(names)), layout="constrained", squeeze=False, sharex=False
    )
    colors = dict(zip(contenders, plt.get_cmap("tab20").colors, strict=False))  # pyright: ignore[reportAttributeAccessIssue]
    for panel, name in zip(panels[:, 0], names, strict=True):
        numbers = sorted({row["microbatches"] for row in rows if row["model"] == name})
        for place, contender in enumerate(contenders):
            found = {row["microbatches"]: row["ratio"] for row in rows if (row["model"], row["contender"]) == (name, contender)}
            offset = (place - (len(contenders) - 1) / 2) * 0.8 / len(contenders)
            where = [index + offset for index, num in enumerate(numbers) if num in found]
            heights = [found[num] for num in numbers if num in found]
            panel.bar(where, heights, 0.8 / len(contenders), color=colors[contender], label=contender)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=name, ylabel="time / best by hand", ylim=(0, 3.2))
        panel.set_xticks(range(len(numbers)), [f"{num} microbatches" for num in numbers])
    panels[0, 0].legend(ncols=5, fontsize="x-small", loc="upper left")
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = read_arguments(arguments)
    sys.path.insert(0, str(HERE))
    import jax

    if options.device:
        jax.config.update("jax_platforms", "cuda" if options.device == "gpu" else options.device)
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console, rows = Console(), []
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        for name in options.models:
            for num in options.microbatches:
                found = measure(name, num, options, progress)
                rows += found
                line = ", ".join(f"{row['contender']} {1e3 * row['seconds']:.1f} ms ({row['ratio']:.2f})" for row in found)
                console.print(f"[bold]{name}, N={num}[/bold]: {line}", highlight=False)
    device = jax.devices()[0]
    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    overhead = 1e6 * host_overhead()
    where = (
        f"{device.device_kind} ({device.platform}), {os.cpu_count()} cores, {versions}, {options.rounds} rounds or more. "
        f"Driving a microbatch from the host costs {overhead:.0f} microseconds beyond the bare call of its program."
    )
    table = as_markdown(rows, where)
    console.print(Markdown(table.replace("<br>", " ")))
    output = options.output or HERE / "results"
    output.mkdir(parents=True, exist_ok=True)
    stem = f"{device.platform}{'-quick' if options.quick else ''}"
    (output / f"{stem}.json").write_text(json.dumps({"where": where, "rows": rows}, indent=1) + "\n")
    (output / f"{stem}.md").write_text(table)
    plot(rows).savefig(output / f"{stem}.png", dpi=110)
    console.print(f"Written: {output / stem}.json, .md, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
