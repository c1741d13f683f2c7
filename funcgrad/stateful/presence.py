"""Which inputs of a function its result depends on as PyTorch's graph would say, decided from the traced computation."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from funcgrad import trees

# The inputs that a value depends on, as the bits of an integer.
_Inputs = int
# The rounds of a loop that are looked at one by one.
_FOLLOWED = 16


def reached_inputs(closed: jax.extend.core.ClosedJaxpr, output: int = 0) -> list[bool]:
    """For each input of a traced function, whether the gradient of one of its outputs reaches it.

    PyTorch leaves `.grad` None where the graph has no path to a leaf, and writes zeros where it has one, though every
    derivative on it is zero. `jax.grad` gives zeros in both cases. Here the paths are followed, over the computation as it
    was traced and through `jit`, `scan`, `while_loop`, `cond` and `checkpoint`: a floating or complex result depends on what
    its operands depend on, whatever the derivative, as `0 * x` and `round(x)` do on `x`. A path ends at `stop_gradient`, and
    at integers and booleans. A `custom_jvp` function depends on what its rule uses the tangents of, a `custom_vjp` function on
    all its arguments.

    Args:
      closed: the computation, from `jax.make_jaxpr`.
      output: which output, floating or complex.

    Returns:
      A boolean for each input.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss_fn = lambda x, y, z: 0 * x + jnp.sign(y) + jax.lax.stop_gradient(z)
      >>> reached_inputs(jax.make_jaxpr(loss_fn)(1.0, 2.0, 3.0))
      [True, True, False]
    """
    count = len(closed.jaxpr.invars)
    found = _outputs(closed.jaxpr, [1 << index for index in range(count)])[output]
    return [bool(found >> index & 1) for index in range(count)]


def _outputs(jaxpr: Any, inputs: Sequence[_Inputs]) -> list[_Inputs]:
    """What the outputs of `jaxpr` depend on, where its inputs depend on `inputs`."""
    known: dict[Any, _Inputs] = dict(zip(jaxpr.invars, map(_if_differentiable, jaxpr.invars, inputs), strict=True))

    def read(variable: Any) -> _Inputs:
        return 0 if isinstance(variable, jax.extend.core.Literal) else known.get(variable, 0)

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        results = _results(equation, jaxpr, operands)
        known.update(zip(equation.outvars, map(_if_differentiable, equation.outvars, results), strict=True))
        known.update((variable, _any(operands)) for variable in equation.invars if _is_reference(variable))
    return [read(variable) for variable in jaxpr.outvars]


def _results(equation: Any, jaxpr: Any, operands: list[_Inputs]) -> list[_Inputs]:
    name, params = equation.primitive.name, equation.params
    if name == "stop_gradient" or not any(operands):
        return [0] * len(equation.outvars)
    if any(map(_is_reference, equation.invars)):  # what is written into it may be read in a later round of a loop
        return [_any(operands)] * len(equation.outvars)
    if name == "scan":
        constants = params["num_consts"]
        return _loop(params["jaxpr"].jaxpr, operands, constants, constants + params["num_carry"], params["length"])
    if name == "while":
        skipped, constants = params["cond_nconsts"], params["body_nconsts"]
        return _loop(params["body_jaxpr"].jaxpr, operands[skipped:], constants, len(operands) - skipped)
    if name == "cond":
        branches = [_outputs(branch.jaxpr, operands[1:]) for branch in params["branches"]]
        return [_any(outputs) for outputs in zip(*branches, strict=True)]
    if name == "custom_jvp_call":
        return _by_jvp(equation, jaxpr, operands)
    if name == "optimization_barrier":
        return operands
    inner = None if name.startswith("custom_vjp_call") else _body(equation)
    return [_any(operands)] * len(equation.outvars) if inner is None else _outputs(inner, operands)


def _loop(body: Any, operands: list[_Inputs], start: int, stop: int, length: int | None = None) -> list[_Inputs]:
    """The results of a loop, whose operands from `start` to `stop` are carried from one round to the next.

    A short loop of known length is followed round by round: what it carries may come too late to matter.
    """
    operands, num_carried = list(operands), stop - start
    if length is not None and length <= _FOLLOWED:
        stacked = [0] * (len(body.outvars) - num_carried)
        for _ in range(length):
            results = _outputs(body, operands)
            operands[start:stop] = results[:num_carried]
            stacked = list(map(operator.or_, stacked, results[num_carried:]))
        return operands[start:stop] + stacked
    while True:
        results = _outputs(body, operands)
        carried = [old | new for old, new in zip(operands[start:stop], results, strict=False)]
        if carried == operands[start:stop]:
            return carried + results[num_carried:]
        operands[start:stop] = carried


def _by_jvp(equation: Any, jaxpr: Any, operands: list[_Inputs]) -> list[_Inputs]:
    """The results of an equation of `jaxpr` whose derivative is a rule of its own: those of the tangents in that rule."""
    pairs = zip(equation.invars, operands, strict=True)
    known = {variable: inputs for variable, inputs in pairs if not isinstance(variable, jax.extend.core.Literal)}
    variables = list(known)
    alone = jaxpr.replace(constvars=[], invars=variables, outvars=equation.outvars, eqns=[equation])
    run = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(alone, ()))
    places = [index for index, variable in enumerate(variables) if trees.is_differentiable(variable.aval)]

    def tangents_of(primals: list[Any], tangents: list[Any]) -> list[Any]:
        def function(chosen: list[Any]) -> list[Any]:
            replaced = dict(zip(places, chosen, strict=True))
            return run(*(replaced.get(index, primal) for index, primal in enumerate(primals)))

        return jax.jvp(function, ([primals[place] for place in places],), (tangents,))[1]

    shapes = [jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in variables]
    rule = jax.make_jaxpr(tangents_of)(shapes, [shapes[place] for place in places]).jaxpr
    return _outputs(rule, [0] * len(variables) + [known[variables[place]] for place in places])


def _body(equation: Any) -> Any:
    """The computation that `equation` calls with its own operands and for its own results, if it calls one."""
    for value in equation.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == len(equation.invars) and len(jaxpr.outvars) == len(equation.outvars):
            return jaxpr
    return None


def _if_differentiable(variable: Any, inputs: _Inputs) -> _Inputs:
    """`inputs`, or nothing for a variable that cannot be differentiated."""
    dtype = getattr(variable.aval, "dtype", None)
    return inputs if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) else 0


def _is_reference(variable: Any) -> bool:
    return hasattr(variable.aval, "inner_aval")


def _any(inputs: Sequence[_Inputs]) -> _Inputs:
    return functools.reduce(operator.or_, inputs, 0)
