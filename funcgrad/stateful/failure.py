"""Which programs may fail while they run: too late for what they were given to overwrite."""

from typing import Any

import jax

from funcgrad.work import nested


def calls_back(jaxpr: Any) -> bool:
    """Whether a traced computation calls back into Python, or has another effect.

    A pure callback has no effect that JAX would list, so it is looked for by name, also in what is nested.
    """
    return bool(jaxpr.effects) or any(
        "callback" in equation.primitive.name or any(map(calls_back, nested(equation.params))) for equation in jaxpr.eqns
    )


def checks_numbers() -> bool:
    """Whether JAX raises an error for a result that is NaN or infinite."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs  # pyright: ignore[reportAttributeAccessIssue]
