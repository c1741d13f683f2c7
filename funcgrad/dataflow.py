"""Which results of a traced computation are its arguments, handed through unchanged."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core


def handed_through(jaxpr: jax.extend.core.Jaxpr) -> list[int | None]:
    """For each result of `jaxpr`, the number of the argument that it is; None where it is computed.

    It looks into what the equations call: a function that was jitted or checkpointed, a scan, a loop, the branches of a
    condition. A result of which it cannot tell is None.

    Example:
      >>> import jax
      >>> handed_through(jax.make_jaxpr(jax.checkpoint(lambda x, y: (y, x + y)))(1.0, 2.0).jaxpr)
      [1, None]
    """
    source: dict[Any, int] = {variable: number for number, variable in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        for result, number in zip(equation.outvars, _of_equation(equation), strict=True):
            variable = None if number is None else equation.invars[number]
            if isinstance(variable, jax.extend.core.Var) and variable in source:
                source[result] = source[variable]
    return [source.get(result) if isinstance(result, jax.extend.core.Var) else None for result in jaxpr.outvars]


def _of_equation(equation: Any) -> Sequence[int | None]:
    """As `handed_through`, for the results and the arguments of one equation."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _of_scan(params)
    if name == "while":
        return _of_while(params)
    if name == "cond":  # its first argument chooses the branch
        branches = [handed_through(branch.jaxpr) for branch in params["branches"]]
        same = [numbers[0] if len(set(numbers)) == 1 else None for numbers in zip(*branches, strict=True)]
        return [None if number is None else number + 1 for number in same]
    called = params.get("jaxpr") or params.get("call_jaxpr")
    called = getattr(called, "jaxpr", called)
    if not isinstance(called, jax.extend.core.Jaxpr) or name == "shard_map":
        return [None] * len(equation.outvars)
    fits = _shapes(called.invars) == _shapes(equation.invars) and _shapes(called.outvars) == _shapes(equation.outvars)
    return handed_through(called) if fits else [None] * len(equation.outvars)


def _shapes(atoms: Sequence[Any]) -> list[Any]:
    return [getattr(atom.aval, "shape", None) for atom in atoms]


def _of_scan(params: dict[str, Any]) -> list[int | None]:
    """Of a scan: a carry that no step changes, and a slice of an input that each step hands out as it is."""
    first, num_carry = params["num_consts"], params["num_carry"]
    numbers = handed_through(params["jaxpr"].jaxpr)
    carried = [number if number == first + place else None for place, number in enumerate(numbers[:num_carry])]
    stacked = [number if number is not None and number >= first + num_carry else None for number in numbers[num_carry:]]
    return carried + stacked


def _of_while(params: dict[str, Any]) -> list[int | None]:
    """Of a loop: a carry that no step changes."""
    first, skipped = params["body_nconsts"], params["cond_nconsts"]
    numbers = handed_through(params["body_jaxpr"].jaxpr)
    return [number + skipped if number == first + place else None for place, number in enumerate(numbers)]
