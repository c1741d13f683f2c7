"""How much a traced computation has to do: a rough count, from the shapes alone."""

import math
from collections.abc import Iterator
from typing import Any

import jax.extend.core
import jax.numpy as jnp


def arithmetic(jaxpr: jax.extend.core.Jaxpr) -> float:
    """About how many floating-point operations `jaxpr` takes.

    Two for each multiplication of a matrix product or a convolution, one for each number that another operation gives. A
    loop counts for as often as it runs, where that is known (a `while_loop` counts once), a condition with all branches.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> arithmetic(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).jaxpr)
      48.0
    """
    return float(sum(_of_equation(equation) for equation in jaxpr.eqns))


def live_bytes(jaxpr: jax.extend.core.Jaxpr) -> int:
    """The most bytes of results that are alive at once when the equations of `jaxpr` run in their order.

    From the shapes alone, and without arguments and constants. A compiler that fuses operations needs less; of a loop, what one
    round needs is not added to what all of them give.
    """
    uses = [_variables(equation.invars) for equation in jaxpr.eqns]
    last = {variable: index for index, used in enumerate(uses) for variable in used}
    last |= dict.fromkeys(_variables(jaxpr.outvars), len(uses))
    alive: set[Any] = set()
    held = most = 0
    for index, (equation, used) in enumerate(zip(jaxpr.eqns, uses, strict=True)):
        results = set(equation.outvars)
        inside = max(map(live_bytes, nested(equation.params)), default=0)
        most = max(most, held + max(inside, sum(map(_size, results))))
        ended = {variable for variable in (alive & used) | results if last.get(variable, index) == index}
        held += sum(map(_size, results)) - sum(map(_size, ended))
        alive |= results
        alive -= ended
    return most


def output_bytes(jaxpr: jax.extend.core.Jaxpr) -> int:
    """The bytes of the results of `jaxpr`."""
    return sum(map(_size, jaxpr.outvars))


def scales_exactly(jaxpr: jax.extend.core.Jaxpr) -> bool:
    """Whether the gradient of a multiple of the result is the multiple of its gradient, but for the last bit.

    It may not be where there is a `custom_vjp`, which need not be linear, or a number of 16 bits, which might overflow.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("custom_vjp_call") or not all(map(scales_exactly, nested(equation.params))):
            return False
    variables = [variable for equation in jaxpr.eqns for variable in equation.outvars] + list(jaxpr.invars)
    dtypes = [getattr(variable.aval, "dtype", None) for variable in variables]
    return not any(dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 for dtype in dtypes)


def holds_convolution(jaxpr: jax.extend.core.Jaxpr) -> bool:
    """Whether `jaxpr`, or one nested in it, convolves."""
    return _holds(jaxpr, ("conv_general_dilated",))


def holds_loop(jaxpr: jax.extend.core.Jaxpr) -> bool:
    """Whether `jaxpr`, or one nested in it, has a loop."""
    return _holds(jaxpr, ("scan", "while"))


def _holds(jaxpr: jax.extend.core.Jaxpr, names: tuple[str, ...]) -> bool:
    return any(
        equation.primitive.name in names or any(_holds(inner, names) for inner in nested(equation.params))
        for equation in jaxpr.eqns
    )


def nested(params: dict[str, Any]) -> Iterator[jax.extend.core.Jaxpr]:
    """The computations among the parameters of an equation: bodies, branches, called functions."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jax.extend.core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jax.extend.core.Jaxpr):
                yield item


def _variables(atoms: Any) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, jax.extend.core.Literal)}


def _size(variable: Any) -> int:
    aval = variable.aval
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0) if hasattr(aval, "shape") else 0


def _of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    inner = [arithmetic(jaxpr) for jaxpr in nested(params)]
    if inner:
        return params.get("length", 1) * sum(inner)
    size = sum(math.prod(getattr(variable.aval, "shape", ())) for variable in equation.outvars)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return 2 * size * math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    return size
