"""How many microbatches fit a memory budget, told by the compiler before anything runs."""

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import jax
import optax

from funcgrad import checks, loops, microbatch, trees
from funcgrad.call import Call
from funcgrad.compiled import Lowered, MemoryAnalysis
from funcgrad.jit import put_together, take_apart
from funcgrad.options import MicrobatchOptions, Options
from funcgrad.state import TrainState
from funcgrad.step import TrainStep, kind_of
from funcgrad.transform import value_and_grad
from funcgrad.trees import PyTree

_BUFFER_OPTIONS = {"dtype", "compensated"}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What a number of microbatches costs.

    Attributes:
      num_microbatches: how many.
      memory: the bytes of arguments, temporaries and output.
      seconds: the median time of a step; None where it was not measured.
    """

    num_microbatches: int
    memory: MemoryAnalysis
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found; it prints as a table.

    Attributes:
      candidates: those that were compiled, in the order of their numbers.
      budget_bytes: the budget; None if there is none.
      best: how many microbatches to use.
    """

    candidates: tuple[Candidate, ...]
    budget_bytes: int | None
    best: int

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate needs no more than the budget."""
        return self.budget_bytes is None or candidate.memory.total_size_in_bytes <= self.budget_bytes

    def __str__(self) -> str:
        head = ["microbatches", "arguments", "temporary", "new output", "total", "fits"]
        timed = any(candidate.seconds is not None for candidate in self.candidates)
        rows = [head + ["time"] * timed]
        for candidate in self.candidates:
            memory = candidate.memory
            new = memory.output_size_in_bytes - memory.alias_size_in_bytes
            sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, new, memory.total_size_in_bytes
            mark = " <-" if candidate.num_microbatches == self.best else ""
            row = [str(candidate.num_microbatches), *map(format_bytes, sizes), ("yes" if self.fits(candidate) else "no") + mark]
            seconds = "" if candidate.seconds is None else f"{1e3 * candidate.seconds:.2f} ms"
            rows.append(row + [seconds] * timed)
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        budget = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"{budget}: {self.best} microbatch{'es' * (self.best != 1)}"])

    def plot(self, axes: Any = None) -> Any:
        """Draw memory, and time where it was measured, over the number of microbatches.

        Args:
          axes: Matplotlib's axes to draw in; new ones if None.

        Returns:
          Matplotlib's figure.

        Raises:
          ImportError: Matplotlib is not installed.
        """
        import matplotlib.pyplot as plt

        axes = plt.subplots(figsize=(6, 4), layout="constrained")[1] if axes is None else axes
        numbers = [candidate.num_microbatches for candidate in self.candidates]
        sizes = [candidate.memory.total_size_in_bytes / 2**20 for candidate in self.candidates]
        temporary = [candidate.memory.temp_size_in_bytes / 2**20 for candidate in self.candidates]
        axes.plot(numbers, sizes, "o-", color="tab:blue", label="total")
        axes.plot(numbers, temporary, "o:", color="tab:blue", label="temporary")
        if self.budget_bytes is not None:
            axes.axhline(self.budget_bytes / 2**20, color="tab:red", linestyle="--", label="budget")
        axes.axvline(self.best, color="tab:gray", linewidth=6, alpha=0.25, label=f"best: {self.best}")
        axes.set(xscale="log", yscale="log", xlabel="microbatches", ylabel="memory of a step [MiB]")
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.minorticks_off()
        handles, labels = axes.get_legend_handles_labels()
        timed = [candidate for candidate in self.candidates if candidate.seconds is not None]
        if timed:
            right = axes.twinx()
            times = [1e3 * (candidate.seconds or 0.0) for candidate in timed]
            handles += right.plot([each.num_microbatches for each in timed], times, "s-", color="tab:orange", label="time")
            labels.append("time")
            right.set(ylabel="time of a step [ms]", ylim=(0, 1.15 * max(times)))
        axes.legend(handles, labels)
        return axes.figure


def plan(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *args: Any,
    optimizer: optax.GradientTransformation | None = None,
    budget_bytes: int | str | None = None,
    candidates: Iterable[int] | None = None,
    measure: bool = False,
    has_aux: bool = False,
    report: Callable[[Candidate], None] | None = None,
    **options: Unpack[MicrobatchOptions],
) -> Plan:
    """Find the fewest microbatches with which a step fits a memory budget. Nothing is run, unless `measure` is set.

    The bytes are the compiler's own (`memory_analysis()` of the step), not an estimate. With a budget the number is looked for
    by bisection, because as a rule a step with more microbatches needs less memory: 256 candidates take at most 9
    compilations. The whole batch may be an exception, needing no sum beside its gradients, so it is looked at first; and before
    it says that nothing fits, it looks at all.

    Args:
      loss_fn, params, batch, args: what the step is for, `loss_fn(params, batch, *args)`; arrays or `jax.ShapeDtypeStruct`.
      optimizer: plan for `fg.train_step` with this optimizer, its state included; None: for `fg.value_and_grad` in `jax.jit`.
      budget_bytes: how many bytes there are, a number or text like `"8GiB"`. None: what the device says that it has; where it
        says nothing, as on CPU, everything fits.
      candidates: the numbers of microbatches to choose from; None: all that divide the batch.
      measure: also run each candidate that fits, and choose the fastest.
      has_aux: whether `loss_fn` returns a pair `(loss, aux)`.
      report: called with each candidate when it is known, and again when it is measured, to show progress.
      **options: the options of `value_and_grad`: `key_argnums`, `in_axes`, `loop` and so on.

    Returns:
      A `Plan`: `best`, the number to use, and the candidates that were compiled. `print` it, or call `plot()`.

    Raises:
      ValueError: nothing fits; the text says how much the smallest candidate needs. Or a candidate does not divide the batch.
      TypeError: `measure` is set, but there are shapes where arrays are needed.

    Example:
      >>> import jax, jax.numpy as jnp, optax, funcgrad as fg
      >>> loss_fn = lambda params, x: jnp.mean(jnp.sin(x @ params["w"]) ** 2)
      >>> params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
      >>> x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
      >>> found = fg.plan(loss_fn, params, x, optimizer=optax.adam(1e-3), budget_bytes="500KiB", candidates=(1, 4, 16, 64))
      >>> found.best
      16

    Reference:
      `jax.stages.Compiled.memory_analysis
      <https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Compiled.memory_analysis>`_
    """
    arguments = (params, batch, *args)
    leaves = jax.tree.leaves(arguments)
    if measure and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TypeError("measure=True runs the steps and needs arrays; got jax.ShapeDtypeStruct")
    for name in ("num_microbatches", "microbatch_size"):
        if name in options:
            raise ValueError(f"plan looks for the number of microbatches itself; leave {name} out, or give candidates")
    if optimizer is None:
        subject = _Gradients(loss_fn, arguments, has_aux, options)
    else:
        subject = _Step(loss_fn, optimizer, arguments, has_aux, options)
    numbers = _read_candidates(candidates, subject.options, arguments)
    budget = _read_budget(budget_bytes, leaves)
    known: dict[int, Candidate] = {}

    def look(number: int) -> Candidate:
        if number not in known:
            known[number] = Candidate(number, subject.memory(number))
            if report is not None:
                report(known[number])
        return known[number]

    if budget is None:
        fitting = [look(number).num_microbatches for number in numbers]
    else:
        fitting = numbers[fewest_that_fit(numbers, lambda number: look(number).memory.total_size_in_bytes, budget) :]
    if measure:
        for number in fitting:
            known[number] = dataclasses.replace(look(number), seconds=subject.seconds(number))
            if report is not None:
                report(known[number])
        fitting.sort(key=lambda number: known[number].seconds or 0.0)
    return Plan(tuple(known[number] for number in sorted(known)), budget, fitting[0])


class BudgetedStep:
    """A training step with as few microbatches as fit a budget of memory, which is found at the first call for given shapes.

    `funcgrad.train_step(..., num_microbatches="auto", budget_bytes=...)` makes it.

    Args:
      loss_fn, optimizer, options: what the step is for.
      budget_bytes: as for `plan`.
      loop, donate: as for `TrainStep`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        options: Options,
        *,
        budget_bytes: int | str | None,
        loop: loops.Loop = "auto",
        donate: bool = True,
    ):
        if budget_bytes is not None:
            parse_bytes(budget_bytes)
        self._options, self._budget = options, budget_bytes
        self._steps: dict[Any, TrainStep] = {}

        def make(number: int) -> TrainStep:
            options = dataclasses.replace(self._options, num_microbatches=number)
            return TrainStep(loss_fn, optimizer, options, loop=loop, donate=donate)

        self._make = make

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
        """One window: `(state, metrics)`."""
        return self._step(state, args, kwargs)(state, *args, **kwargs)

    def lower(self, state: TrainState, *args: Any, **kwargs: Any) -> Lowered:
        """As `jax.jit(...).lower`: nothing runs; arguments may be `jax.ShapeDtypeStruct`."""
        return self._step(state, args, kwargs).lower(state, *args, **kwargs)

    def _step(self, state: TrainState, args: Any, kwargs: Any) -> TrainStep:
        arrays, static = take_apart(state)
        leaves, treedef = jax.tree.flatten((arrays, args, kwargs))
        key = static, treedef, tuple(map(kind_of, leaves))
        if key not in self._steps:
            budget = _read_budget(self._budget, leaves)
            if budget is None:
                raise ValueError(
                    'num_microbatches="auto" needs to know how much memory there is, and this device does not say. Give '
                    "budget_bytes, a number or text like '8GiB'"
                )
            steps: dict[int, TrainStep] = {}

            def size(number: int) -> int:
                steps[number] = self._make(number)
                return steps[number].lower(state, *args, **kwargs).compile().memory_analysis().total_size_in_bytes

            numbers = divisors(_count_rows(self._options, (state.params, *args), kwargs))
            self._steps[key] = steps[numbers[fewest_that_fit(numbers, size, budget)]]
        return self._steps[key]


def fewest_that_fit(numbers: Sequence[int], size: Callable[[int], int], budget: int) -> int:
    """The place in `numbers` of the first one whose `size` is at most `budget`, where sizes fall from the second one on.

    Raises:
      ValueError: none is.
    """
    if size(numbers[0]) <= budget:
        return 0
    low, high = 1, len(numbers)  # numbers[high:] fit, numbers[:low] do not
    while low < high:
        middle = (low + high) // 2
        if size(numbers[middle]) <= budget:
            high = middle
        else:
            low = middle + 1
    if low == len(numbers):
        sizes = [size(number) for number in numbers]
        least = min(sizes)
        if least <= budget:  # they do not fall, here
            return next(place for place, each in enumerate(sizes) if each <= budget)
        raise ValueError(
            f"nothing fits the budget of {format_bytes(budget)}: with {numbers[sizes.index(least)]} microbatches a step still "
            f"needs {format_bytes(least)} ({least} bytes). No number of microbatches makes parameters, optimizer state and "
            "gradients smaller; rematerialization (jax.checkpoint) reduces the activations"
        )
    return low


def divisors(number: int) -> list[int]:
    """All that divide `number`, from 1 on."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def format_bytes(number: int) -> str:
    """A number of bytes for people: `1.50 MiB`."""
    size, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{number} B" if unit == "B" else f"{size:.2f} {unit}"


def parse_bytes(text: int | str) -> int:
    """A number of bytes from a number, or from text like `8GiB`, `500 MB`.

    Raises:
      ValueError: it is neither, or not above zero.
    """
    if isinstance(text, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        unit = _UNITS.get((match[2] or "B").upper()) if match else None
        number = int(float(match[1]) * unit) if match and unit else 0
    else:
        number = int(text) if math.isfinite(text) else 0
    if number <= 0:
        raise ValueError(f"a budget must be a number of bytes above 0, or text like '8GiB' or '500MB'; got {text!r}")
    return number


def device_limit(leaves: Iterable[Any]) -> int | None:
    """How many bytes the device of these arrays, or the default one, says that it has; None if it says nothing."""
    devices = [device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.devices()]
    device = devices[0] if devices else jax.local_devices()[0]
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # of devices that do not tell
        return None


class _Gradients:
    """`value_and_grad` in jit, with some number of microbatches."""

    def __init__(self, loss_fn: Any, arguments: tuple[Any, ...], has_aux: bool, options: Any):
        # What sums are kept in is no matter of how the batch is split.
        known = {name: value for name, value in options.items() if name not in _BUFFER_OPTIONS}
        self.options = Options(has_aux=has_aux, **known)
        self._loss_fn, self._has_aux, self._given = loss_fn, has_aux, options
        # What is no array (an activation function) is a constant.
        self._arguments, self._rest = trees.partition(arguments, [trees.is_array(leaf) for leaf in jax.tree.leaves(arguments)])

    def _jitted(self, number: int) -> Any:
        function = value_and_grad(self._loss_fn, has_aux=self._has_aux, **{**self._given, "num_microbatches": number})
        return jax.jit(lambda *arrays: function(*trees.combine(arrays, self._rest)))

    def memory(self, number: int) -> MemoryAnalysis:
        lowered = self._jitted(number).lower(*self._arguments)
        return Lowered({"step": lowered}, self._arguments).compile().memory_analysis()

    def seconds(self, number: int) -> float:
        jitted = self._jitted(number)
        return _median_time(lambda: jitted(*self._arguments))


class _Step:
    """`train_step`, with some number of microbatches."""

    def __init__(self, loss_fn: Any, optimizer: Any, arguments: tuple[Any, ...], has_aux: bool, options: Any):
        options, self._buffer = dict(options), {}
        for name in _BUFFER_OPTIONS & options.keys():
            self._buffer[name] = options.pop(name)
        self._loop = options.pop("loop", "auto")
        self.options = Options(has_aux=has_aux, **options)
        self._loss_fn, self._optimizer = loss_fn, optimizer
        self._params, *self._args = arguments
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self._params)]
        if any(sharding is not None and len(sharding.device_set) > 1 for sharding in shardings):
            raise ValueError(
                "plan is for parameters on one device; these are on more. Look at a step with its own state and batch: "
                "step.lower(state, batch).compile().memory_analysis()"
            )

    def _step(self, number: int) -> TrainStep:
        options = dataclasses.replace(self.options, num_microbatches=number)
        return TrainStep(self._loss_fn, self._optimizer, options, loop=self._loop)

    def memory(self, number: int) -> MemoryAnalysis:
        state = state_shapes(self._params, self._optimizer, trainable=self.options.trainable, **self._buffer)
        return self._step(number).lower(state, *self._args).compile().memory_analysis()

    def seconds(self, number: int) -> float:
        step = self._step(number)
        state = TrainState.create(self._params, self._optimizer, trainable=self.options.trainable, **self._buffer)

        def run() -> Any:
            nonlocal state
            state, metrics = step(state, *self._args)
            return state, metrics

        return _median_time(run)


def state_shapes(params: PyTree, optimizer: optax.GradientTransformation, **options: Any) -> TrainState:
    """The `TrainState` of `params`, arrays or their shapes, with shapes for arrays; the options are those of `create`."""
    mask = [trees.is_array(leaf) for leaf in jax.tree.leaves(params)]
    arrays, rest = trees.partition(params, mask)
    static: list[Any] = []

    def create(arrays: PyTree) -> TrainState:
        state = TrainState.create(trees.combine(arrays, rest), optimizer, **options)
        state, constants = take_apart(state)
        static.append(constants)
        return state

    shapes = jax.eval_shape(create, arrays)
    return put_together(shapes, static[0])


def _median_time(run: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one compiles


def _read_candidates(candidates: Iterable[int] | None, options: Options, arguments: tuple[Any, ...]) -> list[int]:
    rows = _count_rows(options, arguments, {})
    if candidates is None:
        return divisors(rows)
    numbers = sorted({checks.positive_integer("candidates", number) for number in candidates})
    if not numbers:
        raise ValueError("candidates must name at least one number of microbatches; got none. Leave it out for all that divide")
    for number in numbers:
        microbatch.split(rows, number, None, options.order)
    return numbers


def _count_rows(options: Options, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    options = dataclasses.replace(options, microbatch_size=1, num_microbatches=1)  # any, so that the batch is looked at
    return Call(lambda: None, options, arguments, kwargs).batch.rows


def _read_budget(budget_bytes: int | str | None, leaves: list[Any]) -> int | None:
    return device_limit(leaves) if budget_bytes is None else parse_bytes(budget_bytes)
