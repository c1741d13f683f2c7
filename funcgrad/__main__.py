"""The command line: `python -m funcgrad plan module:function --budget 8GiB` and `python -m funcgrad bench --quick`."""

import argparse
import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from funcgrad.memory import Candidate, format_bytes, plan


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["bench"]:
        return _bench(given[1:])
    parser = argparse.ArgumentParser(prog="python -m funcgrad", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="how many microbatches fit a memory budget")
    planning.add_argument("target", help="module:function; the function gives (loss_fn, params, batch)")
    planning.add_argument("--budget", help="how many bytes there are, 8GiB for example; what the device has if left out")
    planning.add_argument(
        "--candidates", help="numbers of microbatches, 1,2,4,8 for example; all that divide the batch if left out"
    )
    planning.add_argument("--optimizer", metavar="NAME", help="plan for train_step with this optax optimizer, adam for example")
    planning.add_argument("--measure", action="store_true", help="run the candidates that fit, too, and choose the fastest")
    planning.add_argument("--plot", type=Path, metavar="FILE", help="also draw memory and time over the number of microbatches")
    commands.add_parser("bench", help="measure a training step in every form; bench --help says more", add_help=False)
    try:
        return _plan(parser.parse_args(given))
    except (ValueError, TypeError, ImportError, AttributeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _plan(options: argparse.Namespace) -> int:
    loss_fn, params, batch = _load(options.target)
    numbers = [int(number) for number in options.candidates.split(",")] if options.candidates else None
    show = _Progress()
    with show:
        found = plan(
            loss_fn,
            params,
            batch,
            optimizer=_optimizer(options.optimizer),
            budget_bytes=options.budget,
            candidates=numbers,
            measure=options.measure,
            report=show.advance,
        )
    print(found)
    if options.plot:
        found.plot().savefig(options.plot, dpi=110)
    return 0


def _load(target: str) -> tuple[Any, Any, Any]:
    module_name, _, function_name = target.partition(":")
    if not function_name:
        raise ValueError(f"the target must be module:function, train:subject for example; got {target!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    subject = getattr(importlib.import_module(module_name), function_name)()
    if not isinstance(subject, tuple) or len(subject) != 3:
        raise TypeError(f"{target} must give a tuple (loss_fn, params, batch); got {_kind(subject)}")
    return subject


def _kind(subject: Any) -> str:
    return type(subject).__name__ + (f" of {len(subject)}" if isinstance(subject, tuple | list) else "")


def _optimizer(name: str | None) -> Any:
    if name is None:
        return None
    import optax

    make = getattr(optax, name, None)
    if make is None:
        raise ValueError(f"optax has no optimizer {name!r}; try adam, adamw or sgd")
    return make(1e-3)


class _Progress:
    """A line for each candidate as soon as it is known; a bar where rich is installed."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            self._bar = None
        else:
            console = Console(stderr=True)
            self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
            self._task = self._bar.add_task("compiling", total=None)

    def __enter__(self) -> None:
        if self._bar is not None:
            self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, candidate: Candidate) -> None:
        """Show a candidate."""
        text = f"{candidate.num_microbatches} microbatches: {format_bytes(candidate.memory.total_size_in_bytes)}"
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr)


def _bench(arguments: list[str]) -> int:
    script = Path(__file__).parent.parent / "benchmarks" / "run.py"
    if not script.exists():
        print(f"error: the benchmarks are in a clone of the repository, not in a package; looked for {script}", file=sys.stderr)
        return 1
    return runpy.run_path(str(script))["main"](arguments)


if __name__ == "__main__":
    sys.exit(main())
