"""The values of nnx variables, and which of them a step may overwrite."""

import sys
import weakref
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, nnx
from jax.core import Tracer

from funcgrad import trees
from funcgrad.trees import PyTree

# The arrays that steps made: only these are overwritten. An entry goes when its array does.
_MADE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

# flax 0.12.0 has the attribute `raw_value` in place of methods.
_HAS_METHODS = hasattr(nnx.Variable, "set_raw_value")


def prepare(tree: PyTree, root: str, *, overwrite: bool | None) -> bool:
    """Make the values of variables arrays, in place, and those that a step overwrites arrays of its own.

    Args:
      tree: variables; where they are not given away, arrays too, as modules may hold them.
      root: what they are of, for errors.
      overwrite: whether a step may overwrite the arrays; None where they are not given away.

    Returns:
      Whether one had to be copied.

    Raises:
      TypeError: what the step would update is no variable.
      ValueError: a variable is of another trace level, so that nothing could be written back to it.
    """
    copied, references = False, _references(nnx.Variable(object()))
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)[0]:
        if not is_variable(leaf):
            if overwrite is None:
                continue
            raise TypeError(
                f"{_place(root, path)} is {trees.describe(leaf)}, no nnx.Variable that could be updated. Make it an nnx.Param"
            )
        owned = not overwrite or _is_owned(leaf, references)
        copied |= not owned
        value = _value(leaf)
        if not (owned and isinstance(value, jax.Array) and not getattr(value, "weak_type", False)):  # as it mostly is
            value = jax.tree.map(_as_array if owned else _own_array, value)
        try:
            set_value(leaf, value)
        except errors.TraceContextError as error:
            raise ValueError(
                f"{_place(root, path)} is of another trace level: the step was called inside jax.jit or another "
                "transformation, with a module that was made outside. Pass module and optimizer to nnx.jit, and make the step "
                "in there, of those that come in; or call the step outside"
            ) from error
    return copied


def _place(root: str, path: Any) -> str:
    return f"{root}.{jax.tree_util.keystr(path, simple=True, separator='.')}"


def _is_owned(variable: Any, references: int) -> bool:
    """Whether a step may overwrite what a variable holds: a step made it, and only this variable holds it.

    Args:
      variable: the variable.
      references: what `_references` gives where nothing but the variable holds the value; it depends on the interpreter.
    """
    value = _value(variable)
    if isinstance(value, Tracer):
        return True
    if _MADE.get(id(value)) is not value:
        return False
    del value
    return _references(variable) <= references


def _references(variable: Any) -> int:
    """How many references there are to what a variable holds, those of this function included."""
    value = _value(variable)
    return sys.getrefcount(value)


def _as_array(leaf: Any) -> Any:
    return trees.strongly_typed(jnp.asarray(leaf) if isinstance(leaf, trees.NUMBERS) else leaf)


def _own_array(leaf: Any) -> Any:
    if isinstance(leaf, Tracer) or not (trees.is_array(leaf) or isinstance(leaf, trees.NUMBERS)):
        return leaf
    array = trees.strongly_typed(jnp.array(leaf, copy=True))
    _MADE[id(array)] = array
    return array


def note_made(tree: PyTree) -> None:
    """Note that a step made the arrays of `tree`, so that another one may overwrite them."""
    _MADE.update((id(leaf), leaf) for leaf in jax.tree.leaves(tree) if not isinstance(leaf, Tracer))


def is_variable(leaf: Any) -> bool:
    """Whether `leaf` is an nnx variable."""
    return isinstance(leaf, nnx.Variable)


def _value(variable: Any) -> Any:
    """What a variable holds, as it is, without the hooks of `variable.value`."""
    return variable.get_raw_value() if _HAS_METHODS else variable.raw_value


def set_value(variable: Any, value: Any) -> None:
    """Put a value into a variable, as it is, without its hooks."""
    if _HAS_METHODS:
        variable.set_raw_value(value)
    else:
        variable.raw_value = value


def values_of(tree: PyTree) -> PyTree:
    """`tree` with what variables hold in place of variables."""
    return jax.tree.map(lambda leaf: _value(leaf) if is_variable(leaf) else leaf, tree, is_leaf=is_variable)
