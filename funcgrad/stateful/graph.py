"""`evaluate` and `backward`: a loss that remembers how it came about, until its gradients are taken."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad import trees
from funcgrad.stateful.parameter import HookContext, Parameter, unique_parameters
from funcgrad.stateful.programs import Layout, Programs, programs_of
from funcgrad.trees import PyTree


@dataclasses.dataclass
class _Graph:
    """What a loss was computed from, until its gradients are taken; shared by a loss and its multiples.

    Attributes:
      programs, key, parameters: which computation, of which parameters.
      reached: for each parameter, whether it requires a gradient and the loss depends on it.
      saved: the arrays of the parameters, and the other arrays; None once the graph was used.
      result: the loss and aux, once computed.
    """

    programs: Programs
    key: Any
    parameters: list[Parameter]
    reached: list[bool]
    saved: tuple[list[jax.Array], list[Any]] | None
    result: tuple[jax.Array, PyTree] | None = None

    def __post_init__(self) -> None:
        for parameter in self.parameters:
            parameter._holders += 1

    def release(self) -> None:
        """Let go of the arrays."""
        if self.saved is not None:
            self.saved = None
            for parameter in self.parameters:
                parameter._holders -= 1

    def __del__(self) -> None:
        self.release()

    def forward(self) -> tuple[jax.Array, PyTree]:
        """The loss and aux."""
        if self.result is None:
            assert self.saved is not None
            self.result = self.programs.forward(self.key, *self.saved)
        assert self.result is not None
        return self.result

    def backward(self, wanted: tuple[int, ...], scale: float, old: list[tuple[bool, jax.Array]]) -> list[jax.Array]:
        """The gradients of the parameters with these indices, times `scale`, each added to what `old` holds.

        Args:
          wanted: which parameters.
          scale: the cotangent of the loss.
          old: for each, whether the gradient is the first, so that nothing is added; and an array, whose memory is reused.
        """
        assert self.saved is not None
        is_first = np.array([first for first, _ in old])
        given = [array for _, array in old]
        loss, aux, summed = self.programs.backward(self.key, wanted, *self.saved, jnp.asarray(scale), is_first, given)
        self.result = loss, aux
        return summed

    def gradients(self, wanted: tuple[int, ...], scale: float) -> list[jax.Array]:
        """The gradients, added to nothing."""
        return self.backward(wanted, scale, [(True, jnp.zeros_like(self.parameters[index]._data)) for index in wanted])


class Loss:
    """The value of a loss, and the way to its gradients: what PyTorch's `loss` tensor with its graph is.

    Made by `evaluate`. Nothing has been computed when it is made, and nothing waits for the device but `item`. Multiples,
    `loss / 4` or `2 * loss`, share its graph.
    """

    def __init__(self, graph: _Graph, scale: float = 1.0):
        self._graph, self._scale = graph, scale

    @property
    def value(self) -> jax.Array:
        """The loss, `[]`."""
        loss, _ = self._graph.forward()
        return loss if self._scale == 1.0 else loss * jnp.asarray(self._scale, loss.dtype)

    @property
    def aux(self) -> PyTree:
        """What the loss function returned beside the loss, as a pair; None if nothing."""
        return self._graph.forward()[1]

    def item(self) -> float:
        """The loss as a Python number; waits for the device."""
        return self.value.item()

    def __mul__(self, factor: float) -> "Loss":
        return Loss(self._graph, self._scale * float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "Loss":
        return Loss(self._graph, self._scale / float(divisor))

    def backward(self, retain_graph: bool = False, inputs: PyTree = None) -> None:
        """Add the gradients to the `.grad` of the parameters that the loss depends on.

        The pure expression: `buffer, loss = fg.backward(loss_fn)(buffer, params, *args)`. If it raises, every `.grad` is left
        as it was.

        Args:
          retain_graph: whether `backward` may be called again.
          inputs: the parameters to add gradients to, in a pytree or an iterator; None for all.

        Raises:
          RuntimeError: a second backward without `retain_graph`, or there is nothing to compute gradients for, or a hook's
            gradient does not fit.
          TypeError: something in `inputs` is no Parameter.

        The gradients are those at the parameters that the loss was evaluated at, whatever an optimizer did to them since;
        PyTorch refuses that where its graph needs what was overwritten. An error of the device while the program runs, as of a
        callback, comes too late to keep the gradients.

        Reference:
          `torch.Tensor.backward <https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html>`_
        """
        graph = self._graph
        if graph.saved is None:
            raise RuntimeError(
                "trying to backward through the graph a second time: what it needs was freed by the first backward. Give that "
                "one retain_graph=True, or evaluate the loss again"
            )
        chosen = None if inputs is None else _read_inputs(inputs)
        if not any(graph.reached):
            raise RuntimeError(
                "the loss does not depend on any parameter that requires a gradient, so there is nothing to compute. Pass the "
                "Parameters to evaluate, not their arrays, and look for requires_grad=False, detach() and stop_gradient"
            )
        wanted = tuple(
            index
            for index, parameter in enumerate(graph.parameters)
            if graph.reached[index] and parameter.requires_grad and (chosen is None or parameter in chosen)
        )
        if wanted:
            self._accumulate(wanted)
        if not retain_graph:
            graph.forward()
            graph.release()

    def _accumulate(self, wanted: tuple[int, ...]) -> None:
        parameters = [self._graph.parameters[index] for index in wanted]
        before = [parameter._grad for parameter in parameters]
        if any(parameter._hooks for parameter in parameters):
            grads = self._graph.gradients(wanted, self._scale)
            grads = [_hooked(parameter, grad) for parameter, grad in zip(parameters, grads, strict=True)]
            for parameter, grad in zip(parameters, grads, strict=True):
                # A hook may hold what it saw or gave, so this array is not ours alone.
                parameter.grad = grad if parameter._grad is None else parameter._grad + grad
        else:
            keep = any(parameter._post_hooks for parameter in parameters)  # one that raises has the gradients put back
            old = [parameter.memory_for_sum(keep=keep) for parameter in parameters]
            for parameter, grad in zip(parameters, self._graph.backward(wanted, self._scale, old), strict=True):
                parameter.set_grad(grad)
        try:
            with HookContext():
                for parameter in parameters:
                    for hook in list(parameter._post_hooks.values()):
                        hook(parameter)
        except BaseException:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
            raise


def evaluate(loss_fn: Callable[..., Any], params: PyTree, *args: Any) -> Loss:
    """The loss of a function that is written for plain arrays, at the arrays of `params`.

    Args:
      loss_fn: `loss_fn(params, *args)` gives a real scalar or a `WeightedLoss`, or a pair of that and aux. It is compiled, once
        for given shapes, so it has to be the same object at each call and get what changes as an argument.
      params: a pytree with Parameters among its leaves; the function sees their arrays.
      *args: more arguments, pytrees too; Parameters in them count like those in `params`. Numbers are arrays, as for
        `jax.jit`; leaves that are neither (booleans, strings, functions) are constants of the compiled program.

    Returns:
      A `Loss`: `item()`, `value`, `aux`, `backward()`.

    Raises:
      TypeError: `loss_fn` returns no real scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import stateful
      >>> params = stateful.parameters({"w": jnp.array(3.0)})
      >>> loss = stateful.evaluate(lambda params, x: (params["w"] * x) ** 2, params, 2.0)
      >>> loss.backward()
      >>> print(loss.item(), params["w"].grad)
      36.0 24.0
    """
    parameters = unique_parameters(params, args)
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    leaves, treedef = jax.tree.flatten((params, *args))
    slots: list[tuple[Any, ...]] = []
    arrays: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Parameter):
            slots.append(("parameter", places[id(leaf)]))
        elif trees.dtype_of(leaf) is not None and not isinstance(leaf, bool):
            slots.append(("array", len(arrays)))
            # A copy of NumPy's: nothing is computed yet, and the caller may write into it.
            arrays.append(jnp.array(leaf) if isinstance(leaf, np.ndarray) else leaf)
        else:
            slots.append(("constant", type(leaf), leaf))
    layout = Layout(treedef, tuple(slots), tuple(parameter.requires_grad for parameter in parameters))
    programs, values = programs_of(loss_fn), [parameter._data for parameter in parameters]
    key, traced = programs.trace(layout, values, arrays)
    return Loss(_Graph(programs, key, parameters, traced.reached, (values, arrays)))


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
    graph = evaluate(loss_fn, params, *args)._graph
    places = {parameter: index for index, parameter in enumerate(graph.parameters)}
    for name, leaf in trees.leaves_with_names(params, "params"):
        if not isinstance(leaf, Parameter):
            continue
        if not leaf.requires_grad:
            raise RuntimeError(f"{name} requires no gradient. Set requires_grad=True, or leave it out of params")
        if not (graph.reached[places[leaf]] or allow_unused or materialize_grads):
            raise RuntimeError(
                f"the loss does not depend on {name}. Give allow_unused=True to have None for it, or materialize_grads=True "
                "for zeros"
            )
    wanted = tuple(places[parameter] for parameter in unique_parameters(params) if graph.reached[places[parameter]])
    grads = graph.gradients(wanted, 1.0) if wanted else []
    found = {index: _hooked(graph.parameters[index], each) for index, each in zip(wanted, grads, strict=True)}

    def gradient(leaf: Any) -> Any:
        if not isinstance(leaf, Parameter):
            return None
        return found.get(places[leaf], jnp.zeros_like(leaf.data) if materialize_grads else None)

    return jax.tree.map(gradient, params)


def _read_inputs(inputs: Any) -> set[Parameter]:
    leaves = jax.tree.leaves(list(inputs) if isinstance(inputs, Iterator) else inputs)
    for leaf in leaves:
        if not isinstance(leaf, Parameter):
            raise TypeError(f"inputs must hold Parameters; got {trees.describe(leaf)}")
    if not leaves:
        raise RuntimeError("inputs must name at least one parameter; got none. Leave it out for all parameters")
    return set(leaves)


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
