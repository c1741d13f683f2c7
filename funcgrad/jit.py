"""`jax.jit` for functions of a state that may hold leaves which are not arrays, such as a module's activation function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from funcgrad import trees
from funcgrad.trees import PyTree


@dataclasses.dataclass(frozen=True)
class _Static:
    """The non-array leaves of a state, hashable, so that `jax.jit` compiles anew when they change."""

    leaves: tuple[Any, ...]
    treedef: Any


class JittedStep:
    """A jitted `function(state, *args, **kwargs) -> (state, result)`, which may overwrite the state it is given.

    Leaves of the state that are not arrays are kept out of the compiled program and put back into the new state.
    """

    def __init__(self, function: Callable[..., tuple[PyTree, Any]], *, donate: bool):
        def run(static: _Static | None, arrays: PyTree, args: Any, kwargs: Any) -> tuple[PyTree, Any]:
            state, result = function(_put_together(arrays, static), *args, **kwargs)
            return _take_apart(state)[0], result

        # The compiled program's name, in logs, profiles and errors.
        run.__name__, run.__qualname__ = function.__name__, function.__qualname__
        self._jitted = jax.jit(run, static_argnums=0, donate_argnums=1 if donate else ())

    def __call__(self, state: PyTree, *args: Any, **kwargs: Any) -> tuple[PyTree, Any]:
        """The function's answer: `(state, result)`."""
        arrays, static = _take_apart(state)
        _check_alive(arrays)
        arrays, result = self._jitted(static, arrays, args, kwargs)
        return _put_together(arrays, static), result

    def lower(self, state: PyTree, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(...).lower`: nothing runs; arguments may be `jax.ShapeDtypeStruct`."""
        arrays, static = _take_apart(state)
        return self._jitted.lower(static, arrays, args, kwargs)


def _take_apart(state: PyTree) -> tuple[PyTree, _Static | None]:
    leaves = jax.tree.leaves(state)
    if all(map(trees.is_array, leaves)):
        return state, None
    arrays, rest = trees.partition(state, [trees.is_array(leaf) for leaf in leaves])
    static, treedef = jax.tree.flatten(rest)
    return arrays, _Static(tuple(static), treedef)


def _put_together(arrays: PyTree, static: _Static | None) -> PyTree:
    return arrays if static is None else trees.combine(arrays, static.treedef.unflatten(static.leaves))


def _check_alive(arrays: PyTree) -> None:
    """Check that the state was not overwritten: one leaf tells, since a step takes all of them."""
    leaf = next(iter(jax.tree.leaves(arrays)), None)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
        raise ValueError(
            "this state was overwritten by an earlier step, which was given it to reuse its memory. Go on with the state that "
            "the step returned, or make the step with donate=False"
        )
