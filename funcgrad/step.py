"""A training step over a whole batch: one compiled program, or the program of one microbatch called from the host."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from funcgrad import loops, reducers, trees, update, window
from funcgrad.accumulator import GradBuffer
from funcgrad.call import Call, Micro
from funcgrad.compiled import Lowered
from funcgrad.jit import JittedStep, Static, put_together, take_apart, unshared, with_static
from funcgrad.options import Options
from funcgrad.state import TrainState
from funcgrad.trees import PyTree
from funcgrad.window import Window


class Step(Protocol):
    """What `funcgrad.train_step` gives."""

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
        """One window: `(state, metrics)`."""
        ...

    def lower(self, state: TrainState, *args: Any, **kwargs: Any) -> Lowered:
        """As `jax.jit(...).lower`: nothing runs; `compile()` then tells the memory that the step needs."""
        ...


class _Constants(NamedTuple):
    """What a program is compiled for.

    Attributes:
      static: the leaves of the parameters that are no arrays.
      mask: which leaves of the parameters are trained.
      tail: whether it is the smaller last microbatch.
    """

    static: Static | None
    mask: tuple[bool, ...]
    tail: bool = False


class _Plan(NamedTuple):
    """How the step goes for given shapes.

    Attributes:
      begin: gives the sums of a window before the first microbatch, but for the buffer, and the first index, `[]` int32; None
        where the step is one program.
      mask: which leaves of the parameters are trained.
      fold: the program that folds microbatches of equal size: see `TrainStep._fold_program`.
      calls: how often it is called.
      tail: the program that folds a smaller last one, where there is one.
      sharding: the device that some arrays were put on by name; None if there are none.
    """

    begin: Callable[[], tuple[Window, jax.Array]] | None
    mask: tuple[bool, ...] = ()
    fold: Any = None
    calls: int = 0
    tail: Any = None
    sharding: Any = None


_ONE_PROGRAM = _Plan(None)


class _Inputs(NamedTuple):
    """The arguments of the loss function: the arrays among the parameters, and the rest."""

    params: PyTree
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class TrainStep:
    """A jitted `step(state, batch, ...) -> (state, metrics)`; `funcgrad.train_step` makes it and describes it.

    Args:
      loss_fn, optimizer, options: what the step is for; the loop that the options name does not count.
      loop: as for `train_step`.
      donate: whether the state's memory is reused.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        options: Options,
        *,
        loop: loops.Loop = "auto",
        donate: bool = True,
    ):
        # In turn: a step promises the memory of one microbatch.
        options = dataclasses.replace(options, loop="auto" if loop == "host" else loop, in_turn=True)
        self._loss_fn, self._optimizer, self._options = loss_fn, optimizer, options
        self._host, self._donate = {"auto": None, "host": True}.get(str(loop), False), donate
        self._plans: dict[Any, _Plan] = {}

        def step(state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
            return self._whole_window(state, args, kwargs)

        self._program = JittedStep(step, donate=donate)
        # The loss function is traced in `_differentiate` only, once for given shapes, whichever program asks for it.
        self._microbatch = jax.jit(self._differentiate, static_argnums=0)
        self._finish = jax.jit(self._finish_window, static_argnums=0, donate_argnums=(1, 2) if donate else 2)

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
        """One window: `(state, metrics)`."""
        arrays, static = take_apart(state)
        plan = self._plan(static, arrays, _Inputs(arrays.params, args, kwargs))
        if plan.begin is None:
            return self._program(state, *args, **kwargs)
        # Once, and not at every microbatch, NumPy's arrays go to the device, and what the state will overwrite is copied.
        args, kwargs = unshared(arrays, (args, kwargs)) if self._donate else (args, kwargs)
        args, kwargs = jax.tree.map(functools.partial(_on_device, plan.sharding), (args, kwargs))
        if plan.sharding is not None:
            arrays = jax.tree.map(functools.partial(_on_device, plan.sharding), arrays)
        inputs = _Inputs(arrays.params, args, kwargs)
        buffer = arrays.buffer if self._donate else jax.tree.map(jnp.copy, arrays.buffer)
        zeros, index = plan.begin()
        sums = zeros._replace(buffer=buffer, carry=jax.tree.map(jnp.copy, self._carry(static, inputs)))
        (reused, numbers), treedef = _flat(sums)
        leaves = jax.tree.leaves(inputs)
        for _ in range(plan.calls):
            reused, numbers, index = plan.fold(reused, numbers, index, leaves)
        if plan.tail is not None:
            reused, numbers, index = plan.tail(reused, numbers, index, leaves)
        sums = _unflat(treedef, reused, numbers)
        new, metrics = self._finish(_Constants(static, plan.mask), _without_buffer(arrays), *_apart(sums), args, kwargs)
        return put_together(new, static), metrics

    def lower(self, state: TrainState, *args: Any, **kwargs: Any) -> Lowered:
        """As `jax.jit(...).lower`: nothing runs; arguments may be `jax.ShapeDtypeStruct`."""
        arrays, static = take_apart(state)
        inputs = _Inputs(arrays.params, args, kwargs)
        plan = self._plan(static, arrays, inputs)
        if plan.begin is None:
            return Lowered({"step": self._program.lower(state, *args, **kwargs)}, (arrays, args, kwargs))
        carry = jax.eval_shape(lambda inputs: self._carry(static, inputs), inputs)
        zeros, index = jax.eval_shape(plan.begin)
        sums = zeros._replace(buffer=arrays.buffer, carry=carry)
        flat = *_flat(sums)[0], index, jax.tree.leaves(inputs)
        programs = {"microbatch": plan.fold.lower(*flat)}
        if plan.tail is not None:
            programs["tail"] = plan.tail.lower(*flat)
        constants = _Constants(static, plan.mask)
        programs["update"] = self._finish.lower(constants, _without_buffer(arrays), *_apart(sums), args, kwargs)
        return Lowered(programs, (arrays, args, kwargs), () if self._donate else arrays.buffer)

    def _plan(self, static: Static | None, arrays: TrainState, inputs: _Inputs) -> _Plan:
        if self._host is False or not self._options.splits:
            return _ONE_PROGRAM
        leaves, treedef = jax.tree.flatten(inputs[1:])
        first = jax.tree.leaves(inputs.params)[0]
        if any(isinstance(leaf, Tracer) for leaf in (first, *leaves)):
            return _ONE_PROGRAM
        whole, structure = jax.tree.flatten(arrays)
        # At every step, so as little as will do: the state's leaves lie where the first parameter lies.
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in whole)
        # What comes of arrays that are bound to a device is bound to it, too, and then all should be: what is not is to
        # jax.jit another program.
        bound = next((leaf for leaf in (*whole, *leaves) if getattr(leaf, "committed", False)), None)
        sharding = None if bound is None else jax.sharding.SingleDeviceSharding(next(iter(bound.sharding.device_set)))
        key = static, treedef, structure, shapes, tuple(map(kind_of, (first, *leaves))), sharding
        if key not in self._plans:
            if loops.is_staging():  # a plan may outlive the trace
                return _ONE_PROGRAM
            self._plans[key] = self._make_plan(static, arrays, inputs, sharding)
        return self._plans[key]

    def _make_plan(self, static: Static | None, arrays: TrainState, inputs: _Inputs, sharding: Any) -> _Plan:
        call = self._call(static, inputs)
        split, platform = call.split, _platform(inputs)
        if split.count == 1 or platform is None:
            return _ONE_PROGRAM
        mask = tuple(window.buffer_mask(arrays.buffer, call.params, self._options.trainable))
        window.check_call(call, in_state=True)
        constants = _Constants(static, mask)
        microbatch = functools.partial(self._microbatch, constants)
        carry = jax.eval_shape(lambda inputs: self._carry(static, inputs), inputs)
        closed, like = jax.make_jaxpr(microbatch, return_shape=True)(inputs, carry, np.int32(0))
        each = 1 if self._host else loops.microbatches_a_call(closed, platform, split.num)
        if not each:
            return _ONE_PROGRAM
        # A plan keeps no arrays of the state's alive.
        buffer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays.buffer)

        def begin() -> tuple[Window, jax.Array]:
            return window.begin(split, buffer, like, self._options)._replace(buffer=None), jnp.int32(0)

        # All that can be wrong with the arguments shows here, before anything is given away.
        zeros, index = jax.eval_shape(begin)
        sums = zeros._replace(buffer=arrays.buffer, carry=carry)
        fold = self._fold_program(constants, each, sums, inputs)
        tail = self._fold_program(constants._replace(tail=True), 1, sums, inputs) if split.tail else None
        (reused, numbers), treedef = _flat(sums)
        for program in (fold,) if tail is None else (fold, tail):
            reused, numbers, index = program.eval_shape(reused, numbers, index, jax.tree.leaves(inputs))
        sums = _unflat(treedef, reused, numbers)
        self._finish.eval_shape(constants, _without_buffer(arrays), *_apart(sums), *inputs[1:])
        start = jax.jit(begin, out_shardings=sharding)
        # Where there is nothing that a microbatch overwrites, it can be the same each time.
        if not _flat(zeros)[0][0]:
            start = functools.partial(_same, start())
        return _Plan(start, mask, fold, split.num // each, tail, sharding)

    def _call(self, static: Static | None, inputs: _Inputs) -> Call:
        return Call(self._loss_fn, self._options, (with_static(inputs.params, static), *inputs.args), inputs.kwargs)

    def _carry(self, static: Static | None, inputs: _Inputs) -> PyTree:
        return None if self._options.carry_argnum is None else self._call(static, inputs).carry

    def _differentiate(self, constants: _Constants, inputs: _Inputs, carry: PyTree, index: Any) -> Micro:
        call = self._call(constants.static, inputs)
        index = call.split.num if constants.tail else index
        micro = call.differentiate(list(constants.mask), call.arguments(index, carry), call.split.rows_of(index))
        reducers.check_aux(self._options.aux, micro.aux, call.split.rows_of(index))
        return micro

    def _fold_program(self, constants: _Constants, each: int, sums: Window, inputs: _Inputs) -> Any:
        """The program that folds `each` microbatches into sums like `sums`, whose arrays it overwrites; each plan has its own.

        It takes and gives lists, and counts the microbatches itself. With a small network of 6 parameters a call then takes 30
        microseconds of the host's time; with trees, and the index as an argument, it took 55.
        """
        treedef, whole = _flat(sums)[1], jax.tree.structure(inputs)

        def fold(reused: list[Any], numbers: list[Any], index: Any, leaves: list[Any]) -> tuple[list[Any], list[Any], Any]:
            sums, inputs = _unflat(treedef, reused, numbers), whole.unflatten(leaves)
            split = self._call(constants.static, inputs).split
            for _ in range(each):
                micro = self._microbatch(constants, inputs, sums.carry, index)
                sums = window.fold_micro(sums, micro, split, split.num if constants.tail else index, self._options)
                index += np.int32(1)
            return *_flat(sums)[0], index

        return jax.jit(fold, donate_argnums=0)

    def _finish_window(  # noqa: PLR0917
        self, constants: _Constants, rest: TrainState, buffer: GradBuffer, sums: Window, args: Any, kwargs: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        inputs = _Inputs(rest.params, args, kwargs)
        call = self._call(constants.static, inputs)
        like = jax.eval_shape(functools.partial(self._microbatch, constants), inputs, call.carry, np.int32(0))
        sums = window.close(sums._replace(buffer=buffer), call.split)
        state = put_together(dataclasses.replace(rest, buffer=sums.buffer), constants.static)
        state, metrics = self._end_window(call, list(constants.mask), state, sums, like, wait_for_all=True)
        return take_apart(state)[0], metrics

    def _whole_window(self, state: TrainState, args: Any, kwargs: Any) -> tuple[TrainState, dict[str, Any]]:
        call = Call(self._loss_fn, self._options, (state.params, *args), kwargs)
        mask = window.buffer_mask(state.buffer, state.params, self._options.trainable)
        window.check_call(call, in_state=True)
        arrays, static = take_apart(state)
        inputs, split = _Inputs(arrays.params, args, kwargs), call.split

        def differentiate(carry: PyTree, index: Any) -> Micro:
            tail = isinstance(index, int) and split.tail > 0 and index == split.num
            return self._microbatch(_Constants(static, tuple(mask), tail), inputs, carry, index)

        sums, like = window.fold_batch(call, state.buffer, differentiate)
        return self._end_window(call, mask, state, sums, like, wait_for_all=False)

    def _end_window(
        self, call: Call, mask: list[bool], state: TrainState, sums: Window, like: Micro, *, wait_for_all: bool
    ) -> tuple[TrainState, Any]:
        options, optimizer = self._options, self._optimizer
        loss, aux = window.read_window(sums, like, call.split, options)

        def call_optimizer(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            value_fn = functools.partial(window.batch_loss, call, mask, sums.kept)
            offered = {"value": loss, "grad": grads, "value_fn": value_fn}
            return optimizer.update(grads, opt_state, params, **update.accepted(optimizer, offered))

        state = dataclasses.replace(state, buffer=sums.buffer)
        state, metrics = update.update_state(
            optimizer, state, call_optimizer, may_be_empty=options.skip_nonfinite, wait_for_all=wait_for_all
        )
        metrics = {"loss": loss, **metrics} | ({"aux": aux} if options.has_aux else {})
        return state, metrics | ({"carry": sums.carry} if options.carry_argnum is not None else {})


def _same(zeros: tuple[Window, jax.Array]) -> tuple[Window, jax.Array]:
    return zeros


def _flat(sums: Window) -> tuple[tuple[list[Any], list[Any]], tuple[Any, Any]]:
    """The leaves of a window in two: its arrays, whose memory is reused, and its numbers, which are not worth it."""
    reused, of_reused = jax.tree.flatten(sums._replace(loss=None, weight=None, low=None))
    numbers, of_numbers = jax.tree.flatten((sums.loss, sums.weight, sums.low))
    return (reused, numbers), (of_reused, of_numbers)


def _unflat(treedefs: tuple[Any, Any], reused: list[Any], numbers: list[Any]) -> Window:
    """What `_flat` took apart."""
    loss, weight, low = treedefs[1].unflatten(numbers)
    return treedefs[0].unflatten(reused)._replace(loss=loss, weight=weight, low=low)


def _apart(sums: Window) -> tuple[GradBuffer, Window]:
    """The buffer, whose memory is reused, and the rest."""
    return sums.buffer, sums._replace(buffer=None)


def _on_device(sharding: Any, leaf: Any) -> Any:
    """An argument as an array, bound to the device of `sharding` if that is not None."""
    if sharding is None:
        return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    return leaf if getattr(leaf, "committed", False) else jax.device_put(leaf, sharding)


def _without_buffer(state: TrainState) -> TrainState:
    return dataclasses.replace(state, buffer=None)


def kind_of(leaf: Any) -> Any:
    """All that decides what an argument is compiled to."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), leaf.sharding
    return jnp.shape(leaf), trees.dtype_of(leaf), getattr(leaf, "weak_type", False), getattr(leaf, "sharding", None)


def _platform(tree: PyTree) -> str | None:
    """The platform of the one device that holds the arrays of `tree`; None if there are more."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    devices = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    if not devices:
        return loops.default_platform()
    return devices.pop().platform if len(devices) == 1 else None
