"""`evaluate` and `grad`: a function that is written for plain arrays, at the arrays of Parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import trees
from funcgrad.stateful.graph import record
from funcgrad.stateful.loss import Loss, gradients
from funcgrad.stateful.parameter import Parameter, unique_parameters
from funcgrad.trees import PyTree


def evaluate(loss_fn: Callable[..., Any], params: PyTree, *args: Any) -> Loss:
    """The loss of a function that is written for plain arrays, at the arrays of `params`.

    Args:
      loss_fn: `loss_fn(params, *args)` gives a real scalar or a `WeightedLoss`, or a pair of that and aux. It is compiled, once
        for given shapes, so it has to be the same object at each call and get what changes as an argument; its programs live
        as long as it does. A function that is defined anew at each call is compiled at each call, which gives a warning.
      params: a pytree with Parameters among its leaves; the function sees their arrays.
      *args: more arguments, pytrees too; Parameters in them count like those in `params`. Numbers are arrays, as for
        `jax.jit`; leaves that are neither (booleans, strings, functions) are constants of the compiled program.

    Returns:
      A `Loss`: `item()`, `value`, `aux`, `backward()`.

    Raises:
      TypeError: `loss_fn` returns no real scalar, or an argument is neither an array nor hashable.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import stateful
      >>> params = stateful.parameters({"w": jnp.array(3.0)})
      >>> loss = stateful.evaluate(lambda params, x: (params["w"] * x) ** 2, params, 2.0)
      >>> loss.backward()
      >>> print(loss.item(), params["w"].grad)
      36.0 24.0
    """
    return Loss({record(loss_fn, params, args): 1.0})


def grad(
    loss_fn: Callable[..., Any], params: PyTree, *args: Any, allow_unused: bool = False, materialize_grads: bool = False
) -> PyTree:
    """The gradients themselves, which leave every `.grad` alone: PyTorch's `torch.autograd.grad`.

    The pure expression: `fg.grad(loss_fn)(params, *args)`.

    Args:
      loss_fn, params, args: as for `evaluate`.
      allow_unused: give None for a parameter that the loss does not depend on, where that is an error otherwise.
      materialize_grads: give zeros for it.

    Returns:
      `params` with a gradient for each Parameter, and None for what is none.

    Raises:
      RuntimeError: a Parameter requires no gradient, or the loss does not depend on it.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import stateful
      >>> params = stateful.parameters({"w": jnp.array(3.0)})
      >>> print(stateful.grad(lambda params: params["w"] ** 2, params)["w"], params["w"].grad)
      6.0 None

    Reference:
      `torch.autograd.grad <https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html>`_
    """
    graph = record(loss_fn, params, args)
    chosen = unique_parameters(params)
    reached = set(graph.wanted(set(chosen)))
    for name, leaf in trees.leaves_with_names(params, "params"):
        if not isinstance(leaf, Parameter):
            continue
        if not leaf.requires_grad:
            raise RuntimeError(f"{name} requires no gradient. Set requires_grad=True, or leave it out of params")
        if not (leaf in reached or allow_unused or materialize_grads):
            raise RuntimeError(
                f"the loss does not depend on {name}. Give allow_unused=True to have None for it, or materialize_grads=True "
                "for zeros"
            )
    found = gradients({graph: 1.0}, set(chosen))

    def gradient(leaf: Any) -> Any:
        if not isinstance(leaf, Parameter):
            return None
        return found.get(leaf, jnp.zeros_like(leaf.data) if materialize_grads else None)

    return jax.tree.map(gradient, params)
