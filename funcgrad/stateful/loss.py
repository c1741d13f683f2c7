"""Loss: the value of a loss, and the way to its gradients."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from funcgrad import trees
from funcgrad.stateful.graph import Graph
from funcgrad.stateful.parameter import IN_HOOK, Parameter, all_leaves, during
from funcgrad.trees import PyTree


class Loss:
    """The value of a loss, and the way to its gradients: what PyTorch's `loss` tensor with its graph is.

    Made by `evaluate`. Nothing has been computed when it is made, and nothing waits for the device but `item`, `float`,
    comparing, printing, and factors that are arrays. Losses can be added, and multiplied with numbers: `loss / 4`,
    `real + fake`. Such a combination shares the graphs of its terms, and is what `fg.backward` of the combined function
    would be.
    """

    __array_ufunc__ = None  # NumPy's arrays and numbers leave arithmetic to this class

    def __init__(self, terms: Mapping[Graph, float], constant: float = 0.0):
        self._terms, self._constant = dict(terms), constant

    @property
    def value(self) -> jax.Array:
        """The loss, `[]`."""
        scaled = [
            loss if scale == 1.0 else loss * scale
            for loss, scale in ((graph.forward()[0], scale) for graph, scale in self._terms.items())
        ]
        total = scaled[0]
        for each in scaled[1:]:
            total += each
        return total if self._constant == 0.0 else total + self._constant

    @property
    def aux(self) -> PyTree:
        """What the loss function returned beside the loss, as a pair; None if nothing. Of several terms, a tuple of those."""
        found = tuple(graph.forward()[1] for graph in self._terms)
        return found[0] if len(found) == 1 else found

    def item(self) -> float:
        """The loss as a Python number; waits for the device."""
        return self.value.item()

    def detach(self) -> jax.Array:
        """The value, which keeps nothing alive."""
        return self.value

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __repr__(self) -> str:
        return f"Loss({self.item()})"

    def __bool__(self) -> bool:
        return bool(self.item())

    def __eq__(self, other: object) -> bool:
        return self.item() == other

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> bool:
        return self.item() < other

    def __le__(self, other: Any) -> bool:
        return self.item() <= other

    def __gt__(self, other: Any) -> bool:
        return self.item() > other

    def __ge__(self, other: Any) -> bool:
        return self.item() >= other

    def __add__(self, other: Any) -> "Loss":
        if isinstance(other, Loss):
            terms = dict(self._terms)
            for graph, scale in other._terms.items():
                terms[graph] = terms.get(graph, 0.0) + scale
            return Loss(terms, self._constant + other._constant)
        number = _number(other)
        return NotImplemented if number is None else Loss(self._terms, self._constant + number)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> "Loss":
        number = _number(factor)
        if number is None:
            return NotImplemented
        return Loss({graph: scale * number for graph, scale in self._terms.items()}, self._constant * number)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Loss":
        number = _number(divisor)
        if number is None:
            return NotImplemented
        return Loss({graph: scale / number for graph, scale in self._terms.items()}, self._constant / number)

    def __pow__(self, exponent: Any) -> "Loss":
        _number(self)
        return NotImplemented

    def __rtruediv__(self, dividend: Any) -> "Loss":
        _number(self)
        return NotImplemented

    def __neg__(self) -> "Loss":
        return self * -1.0

    def __sub__(self, other: Any) -> "Loss":
        return self + -other if isinstance(other, Loss) or _number(other) is not None else NotImplemented

    def __rsub__(self, other: Any) -> "Loss":
        return -self + other if _number(other) is not None else NotImplemented

    def backward(self, retain_graph: bool = False, inputs: PyTree = None) -> None:
        """Add the gradients to the `.grad` of the parameters that the loss depends on.

        The pure expression: `buffer, loss = fg.backward(loss_fn)(buffer, params, *args)`. If it raises, every `.grad` is left
        as it was. It does not wait for the device, unless the loss function calls back into Python or `jax_debug_nans` is on,
        whose errors come while the program runs. The loss is computed on the way: to read it before costs another forward pass.

        Args:
          retain_graph: whether `backward` may be called again.
          inputs: the parameters to add gradients to, in a pytree or an iterator; None for all.

        Raises:
          RuntimeError: a second backward without `retain_graph`, or there is nothing to compute gradients for, or a hook's
            gradient does not fit.
          TypeError: something in `inputs` is no Parameter, or a hook's answer no array.

        The gradients are those at the parameters that the loss was evaluated at, whatever an optimizer did to them since;
        PyTorch refuses that where its graph needs what was overwritten.

        Reference:
          `torch.Tensor.backward <https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html>`_
        """
        if any(graph.saved is None for graph in self._terms):
            raise RuntimeError(
                "trying to backward through the graph a second time: what it needs was freed by the first backward. Give that "
                "one retain_graph=True, or evaluate the loss again"
            )
        chosen = None if inputs is None else _read_inputs(inputs)
        if not any(any(graph.reached) for graph in self._terms):
            raise RuntimeError(
                "the loss does not depend on any parameter that requires a gradient, so there is nothing to compute. Pass the "
                "Parameters to evaluate, not their arrays, and look for requires_grad=False, detach() and stop_gradient"
            )
        for graph in self._terms:
            if not graph.wanted(chosen):  # a constant: it may fail, too, and better before anything was added
                jax.block_until_ready(graph.forward())
        _accumulate(self._terms, chosen)
        if not retain_graph:
            for graph in self._terms:
                graph.release()


def gradients(terms: Mapping[Graph, float], chosen: set[Parameter] | None) -> dict[Parameter, jax.Array]:
    """The gradients of a sum of losses, as the hooks leave them, in arrays of their own: no `.grad` is touched."""
    found: dict[Parameter, jax.Array] = {}
    for graph, scale in terms.items():
        wanted = graph.wanted(chosen)
        if wanted:
            old = [(each not in found, found[each] if each in found else jnp.zeros_like(each._data)) for each in wanted]
            found.update(zip(wanted, graph.backward(wanted, scale, old, wait=graph.may_fail(wanted)), strict=True))
    return {parameter: _hooked(parameter, grad) for parameter, grad in found.items()}


def _accumulate(terms: Mapping[Graph, float], chosen: set[Parameter] | None) -> None:
    parameters = list(dict.fromkeys(parameter for graph in terms for parameter in graph.wanted(chosen)))
    before = [parameter._grad for parameter in parameters]
    try:
        if len(terms) > 1 or any(parameter._hooks for parameter in parameters):
            found = gradients(terms, chosen)
            sums = [grad if each._grad is None else each._grad + grad for each, grad in found.items()]
            for parameter, total in zip(found, sums, strict=True):
                parameter.grad = total  # a hook may hold what it saw or gave, so this array is not ours alone
        elif parameters:
            ((graph, scale),) = terms.items()
            # What may still raise has the gradients put back.
            may_fail = graph.may_fail(parameters)
            keep = may_fail or any(parameter._post_hooks for parameter in parameters)
            old = [parameter.grad_to_donate(keep=keep) for parameter in parameters]
            for parameter, grad in zip(parameters, graph.backward(parameters, scale, old, wait=may_fail), strict=True):
                parameter.set_grad(grad)
        with during(IN_HOOK):
            for parameter in parameters:
                for hook in list(parameter._post_hooks.values()):
                    hook(parameter)
    except BaseException:
        for parameter, grad in zip(parameters, before, strict=True):
            if grad is None or not grad.is_deleted():
                parameter.grad = grad
        raise


def _hooked(parameter: Parameter, grad: jax.Array) -> jax.Array:
    for hook in list(parameter._hooks.values()):
        answer = hook(grad)
        if answer is None:
            continue
        if not trees.is_array(answer):
            raise TypeError(f"a hook must return a gradient, {trees.describe(grad)}, or None; got {trees.describe(answer)}")
        if jnp.shape(answer) != grad.shape or trees.dtype_of(answer) != grad.dtype:
            raise RuntimeError(
                f"a hook must return a gradient like {trees.describe(grad)}, or None; got {trees.describe(answer)}"
            )
        grad = jnp.asarray(answer)
    return grad


def _read_inputs(inputs: Any) -> set[Parameter]:
    leaves = list(all_leaves(inputs))
    for leaf in leaves:
        if not isinstance(leaf, Parameter):
            raise TypeError(f"inputs must hold Parameters; got {trees.describe(leaf)}")
    if not leaves:
        raise RuntimeError("inputs must name at least one parameter; got none. Leave it out for all parameters")
    return set(leaves)


def _number(value: Any) -> float | None:
    """`value` as a number, if it is a real scalar."""
    if isinstance(value, Loss):
        raise TypeError(
            "losses can be added, and multiplied with numbers. Write a product of two, or a power, in one loss function, or "
            "take the value of one: loss.item()"
        )
    dtype = trees.dtype_of(value)
    is_real = dtype is not None and not jnp.issubdtype(dtype, jnp.complexfloating) and not trees.is_key(value)
    return float(value) if is_real and jnp.shape(value) == () else None
