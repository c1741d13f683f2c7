"""A training step of one module and one optimizer: it reads them, calls the pure step, and writes them back."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from funcgrad import accumulator, checks, train, trees
from funcgrad.accumulator import GradBuffer
from funcgrad.compiled import Lowered
from funcgrad.nnx.layout import CARRIED, FIXED, TRAINED, Layout, Path, Written, functional_loss, name_of
from funcgrad.nnx.variables import is_variable, note_made, prepare, set_value, values_of
from funcgrad.opt_state import shapes_of
from funcgrad.state import TrainState, committed_like
from funcgrad.trees import PyTree


class ModuleStep:
    """`step(batch, ...) -> metrics`, of one module and one optimizer; `train_step` makes it and describes it.

    Args:
      model, optimizer, loss_fn, has_aux: as for `train_step`.
      numbers: the argument numbers that it was given, by their names.
      options: those of `funcgrad.train_step`, for a loss function with two arguments more at the end.
      buffer_options: those of `zeros`.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: Callable[..., Any],
        numbers: dict[str, tuple[int, ...]],
        *,
        has_aux: bool,
        options: dict[str, Any],
        buffer_options: dict[str, Any],
    ):
        self._model, self._optimizer, self._has_aux = model, optimizer, has_aux
        self._loss_fn, self._numbers = functional_loss(loss_fn, has_aux), numbers
        self._options, self._buffer_options = options, buffer_options
        self._layouts: dict[Any, Layout] = {}
        self._written: set[Path] = set()
        self._set_optimizer()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """One window: `metrics`. Module and optimizer are updated in place."""
        return self._with_state(self._run, args, kwargs, overwrite=self._options["donate"])

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `jax.jit(...).lower`: nothing runs; arguments may be `jax.ShapeDtypeStruct`."""
        return self._with_state(self._lower, args, kwargs, overwrite=False)

    def _with_state(self, use: Callable[..., Any], args: Any, kwargs: Any, *, overwrite: bool) -> Any:
        held = [arg for arg in (*args, *kwargs.values()) if arg is self._model or arg is self._optimizer]
        if held:
            raise TypeError(
                f"the step holds the module and the optimizer already: call step(batch). It was passed {type(held[0]).__name__}"
            )
        for option, numbers in self._numbers.items():
            checks.resolve_argument_numbers(option, numbers, 1 + len(args))
        # The containers anew, so that one of the module's own variables among them is a holder of its array like any other.
        args, kwargs = jax.tree.map(lambda leaf: leaf, (args, kwargs))
        if self._optimizer.tx is not self._tx:
            self._set_optimizer()
        while True:
            try:
                return use(*self._read(overwrite=overwrite), args, kwargs)
            except Written as written:
                self._written |= written.paths

    def _set_optimizer(self) -> None:
        self._tx = self._optimizer.tx
        self._step = train.train_step(self._loss_fn, self._tx, has_aux=True, **self._options)
        # For which parameters, and the buffer, which is empty between steps.
        self._buffer: tuple[Any, GradBuffer | None] = None, None

    def _read(self, *, overwrite: bool) -> tuple[Layout, TrainState, tuple[Any, Any]]:
        """Module and optimizer as they are now: how the module is made, the state, and the step's two last arguments."""
        graphdef, states = self._split()
        trained, fixed, carried = states
        optimizer = self._optimizer.opt_state, self._optimizer.step
        copied = prepare(trained, "model", overwrite=overwrite) | prepare(optimizer, "optimizer", overwrite=overwrite)
        prepare(carried, "model", overwrite=None)
        params, opt_state, step = values_of((trained, *optimizer))
        layout_key = graphdef, tuple(map(jax.tree.structure, states))
        layout = self._layouts.get(layout_key)
        if layout is None:
            _check_arrays(states)
            layout = self._layouts[layout_key] = Layout(*layout_key)
        leaves, treedef = jax.tree.flatten(params)
        buffer_key = treedef, tuple((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves)
        buffer = self._buffer[1] if self._buffer[0] == buffer_key else None
        first = buffer is None
        if buffer is None:
            _check_fit(self._tx, layout, params, opt_state)
            buffer = accumulator.zeros(params, **self._buffer_options)
        self._buffer = buffer_key, None  # the step may overwrite it, and then fail
        state, carried = TrainState(params, opt_state, buffer, step), tuple(jax.tree.leaves(values_of(carried)))
        if copied or first:  # else the second step would compile anew
            state, carried = (committed_like(params, part) for part in (state, carried))
        return layout, state, ((layout, tuple(jax.tree.leaves(fixed))), carried)

    def _split(self) -> tuple[Any, tuple[PyTree, ...]]:
        """How the module is made, and its variables: those that are trained, fixed and carried."""
        graphdef, state = nnx.split(self._model)
        groups: tuple[list[Any], ...] = [], [], []
        is_trained = nnx.Any(self._optimizer.wrt)
        for path, leaf in nnx.to_flat_state(state):
            if any(getattr(leaf, kind, False) is True for kind in ("ref", "has_ref", "hijax")):
                raise TypeError(
                    f"{name_of(path)} is mutable to JAX itself (ref=True, or hijax=True), and a step hands values in and out. "
                    "Make it a plain nnx.Variable"
                )
            constant = isinstance(leaf, nnx.Param) or not (is_variable(leaf) or trees.is_key(leaf))
            rest = FIXED if constant and path not in self._written else CARRIED
            groups[TRAINED if is_trained(path, leaf) else rest].append((path, leaf))
        if not groups[TRAINED]:
            raise ValueError(f"there is nothing to train: wrt={self._optimizer.wrt!r} of the optimizer selects no variable")
        return graphdef, tuple(map(nnx.from_flat_state, groups))

    def _lower(self, layout: Layout, state: TrainState, rest: tuple[Any, Any], args: Any, kwargs: Any) -> Lowered:
        lowered = self._step.lower(state, *args, *rest, **kwargs)
        self._keep(state.buffer)
        return lowered

    def _run(self, layout: Layout, state: TrainState, rest: tuple[Any, Any], args: Any, kwargs: Any) -> dict[str, Any]:
        new, metrics = self._step(state, *args, *rest, **kwargs)
        note_made((new.params, new.opt_state, new.step))
        nnx.update(self._model, layout.state(TRAINED, new.params))
        nnx.update(self._model, layout.state(CARRIED, metrics.pop("carry")))
        variables, treedef = jax.tree.flatten((self._optimizer.opt_state, self._optimizer.step), is_leaf=is_variable)
        for variable, value in zip(variables, treedef.flatten_up_to((new.opt_state, new.step)), strict=True):
            set_value(variable, value)
        self._keep(new.buffer)
        if not self._has_aux:
            del metrics["aux"]
        return metrics

    def _keep(self, buffer: GradBuffer) -> None:
        """Keep the buffer for the next step, unless it is of a trace."""
        self._buffer = self._buffer[0], None if isinstance(buffer.weight, Tracer) else buffer


def _check_arrays(states: tuple[PyTree, ...]) -> None:
    for state in states:
        for path, leaf in nnx.to_flat_state(state):
            for value in jax.tree.leaves(values_of(leaf)):
                if not (trees.is_array(value) or isinstance(value, trees.NUMBERS)):
                    raise TypeError(
                        f"{name_of(path)} holds {trees.describe(value)}, which is no array. Make it an attribute of the module"
                        "not a variable"
                    )


def _check_fit(tx: Any, layout: Layout, params: PyTree, opt_state: PyTree) -> None:
    """Check that what the optimizer selects can be trained, and that its state is of that."""
    leaves = jax.tree.leaves(params)
    for place in layout.places[TRAINED]:
        for leaf in (leaves[number] for number in place.leaves):
            if not trees.is_differentiable(leaf):
                raise TypeError(
                    f"{name_of(place.path)} is {trees.describe(leaf)}, which has no gradient, but the optimizer's wrt selects "
                    "it. Make the optimizer with a filter that leaves it out"
                )
    expected = shapes_of(tx, params)
    if expected is None:
        return
    wanted, got = (
        {name: trees.describe(leaf) for name, leaf in trees.leaves_with_names(tree, "opt_state")}
        for tree in (expected, opt_state)
    )
    for name in {**wanted, **got}:
        if wanted.get(name) != got.get(name):
            raise ValueError(
                f"the optimizer is not of this model: for what its wrt selects, {name} must be {wanted.get(name, 'absent')}; "
                f"it is {got.get(name, 'absent')}. Make the optimizer anew: nnx.Optimizer(model, tx, wrt=...)"
            )
