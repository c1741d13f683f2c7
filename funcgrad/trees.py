"""Pytrees: which leaves have a gradient, taking a tree apart and joining it again, and names for leaves in errors."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
NUMBERS = (bool, int, float, complex)
Trainable = Callable[[tuple[Any, ...], Any], bool] | PyTree


def is_none(leaf: Any) -> bool:
    """Whether `leaf` is None: with it as `is_leaf`, JAX's tree functions take None for a leaf."""
    return leaf is None


def dtype_of(leaf: Any) -> Any:
    """The NumPy dtype that JAX gives `leaf` (float32 for a float64 array unless x64 is on); None if it is no array."""
    if isinstance(leaf, NUMBERS):
        return jnp.result_type(leaf)
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        return None
    if isinstance(dtype, np.dtype) and dtype.kind in "OSUMm":  # objects, text, dates
        return None
    try:
        return jax.dtypes.canonicalize_dtype(dtype) if jnp.issubdtype(dtype, jnp.number) else dtype
    except TypeError:  # the dtype of another library: PyTorch's is none of NumPy's
        return None


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array: of JAX, of NumPy, a PRNG key, or a shape that stands for one. A Python number is none."""
    if isinstance(leaf, jax.Array):  # by far the most, in a check that every step makes
        return True
    return dtype_of(leaf) is not None and (
        isinstance(leaf, np.generic) or not isinstance(leaf, NUMBERS)
    )  # np.float64 is a float


def strongly_typed(leaf: Any) -> Any:
    """An array leaf as a JAX array whose dtype does not give way in arithmetic; any other leaf as it is."""
    if not is_array(leaf) or is_key(leaf):
        return leaf
    array = jnp.asarray(leaf)
    # float0 stays an array of NumPy, which has no weak type.
    return jax.lax.convert_element_type(array, array.dtype) if getattr(array, "weak_type", False) else array


def strongly_typed_tree(tree: PyTree) -> PyTree:
    """`tree` with each number and array as a strongly typed array."""
    return jax.tree.map(lambda leaf: strongly_typed(jnp.asarray(leaf) if isinstance(leaf, NUMBERS) else leaf), tree)


def is_differentiable(leaf: Any) -> bool:
    """Whether `leaf` has a gradient: floating or complex, not an integer, a boolean, a PRNG key, float0 or an object."""
    dtype = dtype_of(leaf)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed PRNG keys, as `jax.random.key` makes them."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def at_least_float32(dtype: Any) -> np.dtype:
    """The dtype in which sums of `dtype` are kept: float32 for what is narrower, else `dtype` itself."""
    return np.dtype(np.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def real_dtype(dtype: Any) -> np.dtype:
    """The real dtype of the same precision: float32 for complex64."""
    return jnp.finfo(dtype).dtype


def check_known_arrays(tree: PyTree, root: str) -> None:
    """Check that no leaf of `tree` is an array of another library, which would pass for an object.

    Raises:
      TypeError: one is.
    """
    for name, leaf in leaves_with_names(tree, root):
        if dtype_of(leaf) is None and (hasattr(leaf, "__dlpack__") or hasattr(leaf, "__array_interface__")):
            module = type(leaf).__module__.partition(".")[0]
            raise TypeError(
                f"{name} is a {module}.{type(leaf).__name__}, which is no array to JAX. Give it as a numeric NumPy array: "
                "tensor.detach().numpy() for PyTorch's"
            )


def describe(leaf: Any) -> str:
    """`float32[8,3]` for an array, the type's name for anything else."""
    dtype = dtype_of(leaf)
    return type(leaf).__name__ if dtype is None else f"{dtype}[{','.join(map(str, jnp.shape(leaf)))}]"


def describe_output(output: Any) -> str:
    """What a function returned: `a tuple of 3`, or as `describe` says."""
    return f"a {type(output).__name__} of {len(output)}" if isinstance(output, tuple | list) else describe(output)


def abbreviate(text: str | list[str], limit: int = 300) -> str:
    """`text`, or a list of names, cut to about `limit` characters, so that a large model does not flood an error."""
    text = text if isinstance(text, str) else ", ".join(text)
    return text if len(text) <= limit else text[:limit] + " ..."


def leaves_with_names(tree: PyTree, root: str = "", *, none_is_leaf: bool = False) -> Iterator[tuple[str, Any]]:
    """The leaves of `tree`, each with its place in it: `params['dense']['kernel']`."""
    is_leaf = is_none if none_is_leaf else None
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        yield root + jax.tree_util.keystr(path), leaf


def partition(tree: PyTree, mask: list[bool]) -> tuple[PyTree, PyTree]:
    """Take `tree` apart: the leaves for which `mask` is true, and the others; each part has None where the other has a leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    chosen = [leaf if choose else None for leaf, choose in zip(leaves, mask, strict=True)]
    rest = [None if choose else leaf for leaf, choose in zip(leaves, mask, strict=True)]
    return treedef.unflatten(chosen), treedef.unflatten(rest)


def combine(chosen: PyTree, rest: PyTree) -> PyTree:
    """Join what `partition` took apart."""
    return jax.tree.map(lambda left, right: right if left is None else left, chosen, rest, is_leaf=is_none)


def broadcast_prefix(prefix: PyTree, tree: PyTree, what: str) -> list[Any]:
    """One entry of `prefix` for each leaf of `tree`, as the `in_axes` of `jax.vmap` are spread; None is an entry too.

    Raises:
      ValueError: `prefix` is not a prefix of `tree`; `what` names it.
    """
    spread: list[Any] = []
    try:
        jax.tree.map(
            lambda entry, subtree: spread.extend([entry] * jax.tree.structure(subtree).num_leaves),
            prefix,
            tree,
            is_leaf=is_none,
        )
    except ValueError:
        places = [name for name, _ in leaves_with_names(tree)]
        raise ValueError(
            f"{what} must be one entry, or a pytree prefix with an entry for each of {abbreviate(places)}; got "
            f"{abbreviate(repr(prefix))}"
        ) from None
    return spread


def trainable_mask(params: PyTree, trainable: Trainable | None, *, numbers: bool = True) -> list[bool]:
    """For each leaf of `params`, whether it is trained: it has a gradient, and `trainable` chooses it.

    Args:
      trainable: None for all, a predicate `(path, leaf) -> bool` as for `jax.tree_util.tree_map_with_path`, or a pytree
        prefix of booleans.
      numbers: whether a Python float or complex number is a parameter, as for `jax.grad`; if not, it is configuration.

    Raises:
      ValueError: no leaf is trained, or `trainable` is not a prefix of `params`.
      TypeError: an entry of `trainable` is not a boolean.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    if trainable is None:
        chosen = [True] * len(flat)
    elif callable(trainable) and jax.tree_util.all_leaves([trainable]):  # a module of booleans may be callable, too
        chosen = [trainable(path, leaf) for path, leaf in flat]
    else:
        chosen = broadcast_prefix(trainable, params, "trainable")
    for (path, _), choice in zip(flat, chosen, strict=True):
        if not isinstance(choice, bool | np.bool_):
            where = f"params{jax.tree_util.keystr(path)}"
            raise TypeError(f"trainable must give True or False for each leaf; got {choice!r} for {where}")
    mask = [
        bool(choice) and is_differentiable(leaf) and (numbers or is_array(leaf))
        for (_, leaf), choice in zip(flat, chosen, strict=True)
    ]
    if not any(mask):
        kinds = ", ".join(f"params{jax.tree_util.keystr(path)}: {describe(leaf)}" for path, leaf in flat[:8])
        reason = (
            f"no leaf is {'' if numbers else 'an array that is '}floating or complex"
            if trainable is None
            else f"trainable={trainable!r} selects nothing"
        )
        hint = "" if numbers else ". A Python number is configuration here: make one that is a parameter jnp.asarray(number)"
        raise ValueError(f"there is nothing to train: {reason}. Leaves: {kinds or 'none'}{hint}")
    return mask


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """`tree` in the dtypes of `like`, whose leaves may be numbers or arrays. None stays None."""
    return jax.tree.map(lambda leaf, model: leaf if leaf is None else leaf.astype(dtype_of(model)), tree, like, is_leaf=is_none)


def check_same_structure(expected: PyTree, got: PyTree, expected_name: str, got_name: str) -> None:
    """Check that two trees have the same structure, None counting as a leaf.

    Raises:
      ValueError: they differ; the first leaves that only one of them has are named.
    """
    structures = [jax.tree.structure(tree, is_leaf=is_none) for tree in (expected, got)]
    if structures[0] == structures[1]:
        return
    wanted, given = (dict(leaves_with_names(tree, none_is_leaf=True)) for tree in (expected, got))
    missing = [name for name in wanted if name not in given][:4]
    extra = [name for name in given if name not in wanted][:4]
    if missing or extra:
        parts = [f"missing {', '.join(missing)}"] * bool(missing) + [f"unexpected {', '.join(extra)}"] * bool(extra)
        difference = "; ".join(parts)
    else:
        difference = f"expected {abbreviate(str(structures[0]))}, got {abbreviate(str(structures[1]))}"
    raise ValueError(f"{got_name} must have the structure of {expected_name}: {difference}")
