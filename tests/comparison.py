"""Distances between pytrees, for tests that name their tolerances."""

import jax
import numpy as np
import optax

# What rounding explains when sums of up to 32 parts are added in another order.
FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-12


def relative_difference(got, want) -> float:
    """The largest, over the leaves, of the difference's norm over the wanted leaf's norm. Structures must be the same."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    worst = 0.0
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        left, right = (_widened(leaf) for leaf in (left, right))
        assert left.shape == right.shape
        size = np.linalg.norm(right.ravel())
        difference = np.linalg.norm((left - right).ravel())
        assert np.isfinite(difference)
        worst = max(worst, difference / size if size else difference)
    return worst


def _widened(leaf) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.result_type(array.dtype, np.float64))


def assert_identical(got, want) -> None:
    """The same structure, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        left, right = np.asarray(left), np.asarray(right)
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()


def compilations(caplog, name) -> int:
    """How often a function of this name was compiled, in what was logged under `jax.log_compiles()`."""
    return sum(record.getMessage().startswith(f"Compiling jit({name})") for record in caplog.records)


def watch_losses(seen):
    """An optimizer that only notes the loss that a step offers it, and what it gives when asked again, as in a search."""

    def update(updates, state, params=None, *, value, value_fn, **extra):
        seen.append((value, value_fn(params)))
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
