"""`jax.jit` for functions of a `TrainState`, whose parameters may hold leaves that are not arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from funcgrad import trees
from funcgrad.state import TrainState, check_state


@dataclasses.dataclass(frozen=True)
class Static:
    """The leaves of the parameters that are not arrays, hashable, so that `jax.jit` compiles anew when they change."""

    leaves: tuple[Any, ...]
    types: tuple[type, ...]  # 1 == True, but they are two programs
    treedef: Any


class JittedStep:
    """A jitted `function(state, *args, **kwargs) -> (state, result)`, which may overwrite the state it is given.

    Leaves of `state.params` that are not arrays (an activation function, a dropout rate) are constants of the compiled program
    and stand in the new state as they did in the old.
    """

    def __init__(self, function: Callable[..., tuple[TrainState, Any]], *, donate: bool):
        def run(static: Static | None, state: TrainState, args: Any, kwargs: Any) -> tuple[TrainState, Any]:
            state, result = function(put_together(state, static), *args, **kwargs)
            return take_apart(state)[0], result

        # The compiled program's name, in logs, profiles and errors.
        run.__name__, run.__qualname__ = function.__name__, function.__qualname__
        self._jitted, self._donate = jax.jit(run, static_argnums=0, donate_argnums=1 if donate else ()), donate

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, Any]:
        """The function's answer: `(state, result)`."""
        arrays, static = take_apart(state)
        if self._donate:
            args, kwargs = unshared(arrays, (args, kwargs))
        arrays, result = self._jitted(static, arrays, args, kwargs)
        return put_together(arrays, static), result

    def lower(self, state: TrainState, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(...).lower`: nothing runs; arguments may be `jax.ShapeDtypeStruct`."""
        arrays, static = take_apart(state)
        return self._jitted.lower(static, arrays, args, kwargs)


class JittedBackward:
    """A jitted `function(buffer, params, *args, **kwargs) -> (buffer, value)`, of the buffer and the parameters of a state.

    Called with a `TrainState`, it answers `(state, value)`. The rest of the state does not pass through the program, and only
    the buffer is overwritten; but the old state's buffer is then gone, so go on with the new state.
    """

    def __init__(self, function: Callable[..., tuple[Any, Any]], *, donate: bool):
        def backward(static: Static | None, buffer: Any, params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return function(buffer, with_static(params, static), *args, **kwargs)

        self._jitted = jax.jit(backward, static_argnums=0, donate_argnums=1 if donate else ())

    def __call__(self, state: TrainState, *args: Any, **kwargs: Any) -> tuple[TrainState, Any]:
        """`(state, value)`."""
        arrays, static = take_apart(state)
        buffer, value = self._jitted(static, arrays.buffer, arrays.params, args, kwargs)
        return TrainState(state.params, state.opt_state, buffer, state.step), value

    def lower(self, state: TrainState, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(...).lower`: nothing runs; arguments may be `jax.ShapeDtypeStruct`."""
        arrays, static = take_apart(state)
        return self._jitted.lower(static, arrays.buffer, arrays.params, args, kwargs)


def unshared(state: TrainState, arguments: Any) -> Any:
    """`arguments` with a copy of each array that will be overwritten in `state`: a teacher's parameters, for example."""
    held = set(map(id, jax.tree.leaves(state)))

    def keep(leaf: Any) -> Any:
        return jnp.copy(leaf) if id(leaf) in held and isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(keep, arguments)


def take_apart(state: TrainState) -> tuple[TrainState, Static | None]:
    """`state` with arrays only, and the leaves of its parameters that are none; None if there are no such.

    Raises:
      TypeError, ValueError: it is no state, or one that was overwritten.
    """
    check_state(state)
    leaves = jax.tree.leaves(state.params)
    if all(map(trees.is_array, leaves)):
        _check_alive(leaves[0], state.buffer)
        return state, None
    arrays, rest = trees.partition(state.params, [trees.is_array(leaf) for leaf in leaves])
    _check_alive(jax.tree.leaves(arrays)[0], state.buffer)
    static, treedef = jax.tree.flatten(rest)
    return dataclasses.replace(state, params=arrays), Static(tuple(static), tuple(map(type, static)), treedef)


def put_together(state: TrainState, static: Static | None) -> TrainState:
    """Join what `take_apart` took apart."""
    return state if static is None else dataclasses.replace(state, params=with_static(state.params, static))


def with_static(params: Any, static: Static | None) -> Any:
    """Parameters with the leaves in their places that are no arrays."""
    return params if static is None else trees.combine(params, static.treedef.unflatten(static.leaves))


def _check_alive(leaf: Any, buffer: Any) -> None:
    """Check that a state was not overwritten; two leaves of it tell, since a step takes all of them, or the buffer's."""
    for array in (leaf, getattr(buffer, "weight", None)):
        if isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted():
            raise ValueError(
                "this state was overwritten by an earlier step, which was given it to reuse its memory. Go on with the state "
                "that the step returned, or make the step with donate=False"
            )
