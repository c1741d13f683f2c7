"""The state of an optax optimizer: whose it is, and what in it belongs to which leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from funcgrad import trees
from funcgrad.trees import PyTree


def check_optimizer(optimizer: Any) -> None:
    """Check that `optimizer` is an optax transformation.

    Raises:
      TypeError: it is not.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(
            f"optimizer must be an optax transformation, optax.adam(1e-3) for example; got {trees.describe(optimizer)}"
        )


def check_opt_state(optimizer: optax.GradientTransformation, selected: PyTree, opt_state: PyTree) -> None:
    """Check that `opt_state` is of `optimizer`, by its structure.

    Raises:
      ValueError: it is of another.
    """
    expected = shapes_of(optimizer, selected)
    if expected is None:  # no fault: it ran in `create`
        return
    structures = [jax.tree.structure(tree) for tree in (expected, opt_state)]
    if structures[0] != structures[1]:
        expected_text, got_text = (trees.abbreviate(str(structure)) for structure in structures)
        raise ValueError(
            "the state's opt_state is not of this optimizer: make state and step with the same one, or for a new optimizer a "
            f"new state, fg.TrainState.create(state.params, optimizer, ...). Expected {expected_text}, got {got_text}"
        )


def shapes_of(optimizer: optax.GradientTransformation, selected: PyTree) -> PyTree | None:
    """The shapes of the optimizer's state before the first step; None if its init cannot be traced."""
    try:
        return jax.eval_shape(optimizer.init, selected)
    except (TypeError, IndexError, AttributeError):
        return None


def state_of(optimizer: optax.GradientTransformation, selected: PyTree) -> PyTree:
    """The state that the optimizer would have for `selected`, which may have no leaf, or its shapes.

    Raises:
      ValueError: it has none without a leaf, as what is laid out for all leaves together.
    """
    shapes = None
    try:
        shapes = shapes_of(optimizer, selected)
        return optimizer.init(selected) if shapes is None else shapes
    except (ValueError, IndexError) as error:
        raise ValueError(
            "the optimizer has no state for the leaves that stay trained, so what of it belongs to which cannot be told. "
            "Begin afresh: fg.TrainState.create(state.params, optimizer, trainable=...)"
        ) from error


def carried_over(old: PyTree, middle: PyTree, fresh: PyTree) -> PyTree:
    """The optimizer's state `fresh`, but with what `old` holds wherever both hold something.

    An optimizer keeps something for each leaf of the parameters, or once for all. It sees None for what is not trained, and
    keeps None there (or `optax.MaskedNode`). So a place where both states hold an array is of a leaf that stays, or of all.
    `middle`, the state of the leaves that stay, or its shapes, tells whether that is so: what is laid out for all leaves
    together, as by `optax.flatten`, has another shape in it.

    Raises:
      ValueError: something is laid out for all leaves together.
    """
    _check_alike(old, middle)
    _check_alike(middle, fresh)
    kept = dict(_places(old))

    def choose(path: Any, leaf: Any) -> Any:
        before = kept.get(path)
        return leaf if _is_empty(leaf) or _is_empty(before) else before

    return jax.tree_util.tree_map_with_path(choose, fresh, is_leaf=_is_empty)


def _check_alike(left: PyTree, right: PyTree) -> None:
    """Check that two states of an optimizer differ only where one of them holds nothing for a leaf.

    Raises:
      ValueError: they differ elsewhere.
    """
    places = dict(_places(left)), dict(_places(right))
    for ours, theirs in (places, places[::-1]):
        empty = {path for path, leaf in theirs.items() if _is_empty(leaf)}
        for path, leaf in ours.items():
            if path in theirs:
                alike = path in empty or _is_empty(leaf) or jnp.shape(leaf) == jnp.shape(theirs[path])
            else:
                alike = _is_empty(leaf) or any(path[:length] in empty for length in range(len(path)))
            if not alike:
                place = f"opt_state{jax.tree_util.keystr(path)}, {trees.describe(leaf)}"
                raise ValueError(
                    f"the optimizer keeps {place}, for all leaves together, so what of it belongs to which cannot be told. "
                    "Begin afresh: fg.TrainState.create(state.params, optimizer, trainable=...)"
                )


def _places(tree: PyTree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)[0]


def _is_empty(node: Any) -> bool:
    """Whether an optimizer holds nothing here: for a leaf that it does not see, or that it is masked from."""
    return node is None or isinstance(node, optax.MaskedNode)
