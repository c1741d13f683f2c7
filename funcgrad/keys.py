"""PRNG keys: a key of its own for each microbatch, and the detection of a key that all would share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from funcgrad import trees
from funcgrad.trees import PyTree


def fold_keys(argument: PyTree, index: Any, name: str) -> PyTree:
    """`argument` with each PRNG key in it folded with `index`.

    Raises:
      ValueError: there is no key in it.
    """
    leaves, treedef = jax.tree.flatten(argument)
    typed = any(map(trees.is_key, leaves))

    def fold(leaf: Any) -> Any:
        if trees.is_key(leaf) and leaf.shape:
            return jax.vmap(fold)(leaf)
        if trees.is_key(leaf):
            return jax.random.fold_in(leaf, index)
        if not typed and trees.dtype_of(leaf) == jnp.uint32 and jnp.ndim(leaf) == 1:
            return jax.random.fold_in(leaf, index)  # a raw key, from jax.random.PRNGKey
        return leaf

    folded = [fold(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(folded, leaves, strict=True)):
        kinds = ", ".join(trees.describe(leaf) for leaf in leaves[:4])
        raise ValueError(f"key_argnums names {name}, which holds no PRNG key: {kinds or 'no leaf'}")
    return treedef.unflatten(folded)


def used_keys(function: Callable[[PyTree], Any], tree: PyTree, root: str) -> list[str]:
    """The names of the typed keys in `tree` on which the result of `function(tree)` depends.

    It is decided from the traced computation, whatever the key's values; `function` is traced only if there are keys.
    """
    mask = [trees.is_key(leaf) for leaf in jax.tree.leaves(tree)]
    if not any(mask):
        return []
    keys, rest = trees.partition(tree, mask)
    closed = jax.make_jaxpr(lambda keys: function(trees.combine(keys, rest)))(keys)
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return [name for (name, _), is_used in zip(trees.leaves_with_names(keys, root), used, strict=True) if is_used]
