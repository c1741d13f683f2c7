"""The graph behind a loss: what it was computed from, kept until its gradients are taken."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad import trees
from funcgrad.stateful.failure import checks_numbers
from funcgrad.stateful.parameter import Parameter, unique_parameters
from funcgrad.stateful.programs import Layout, Programs, programs_of
from funcgrad.trees import PyTree


@dataclasses.dataclass(eq=False)
class Graph:
    """What a loss was computed from, until its gradients are taken.

    Attributes:
      programs, key: the computation.
      parameters: the parameters in its arguments.
      reached: for each, whether it requires a gradient and the loss depends on it.
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

    def wanted(self, chosen: set[Parameter] | None) -> list[Parameter]:
        """The parameters that backward gives gradients to: all, or those of `chosen`."""
        return [
            parameter
            for parameter, reached in zip(self.parameters, self.reached, strict=True)
            if reached and parameter.requires_grad and (chosen is None or parameter in chosen)
        ]

    def may_fail(self, wanted: list[Parameter]) -> bool:
        """Whether backward may raise an error while it runs, which would be too late for donated arrays."""
        assert self.saved is not None
        return checks_numbers() or self.programs.backward_calls_back(self.key, self._indices(wanted), *self.saved)

    def _indices(self, wanted: list[Parameter]) -> tuple[int, ...]:
        places = {parameter: index for index, parameter in enumerate(self.parameters)}
        return tuple(places[parameter] for parameter in wanted)

    def backward(
        self, wanted: list[Parameter], scale: float, old: list[tuple[bool, jax.Array]], *, wait: bool
    ) -> list[jax.Array]:
        """The gradients of these parameters, times `scale`, each added to what `old` holds.

        Args:
          wanted: which parameters.
          scale: the cotangent of the loss.
          old: for each, whether the gradient is the first, so that nothing is added; and an array, whose memory is reused.
          wait: whether to wait for the device, so that what fails while it runs fails here.
        """
        assert self.saved is not None
        is_first = np.array([first for first, _ in old])
        given = [array for _, array in old]
        result = self.programs.backward(self.key, self._indices(wanted), *self.saved, jnp.asarray(scale), is_first, given)
        if wait:
            jax.block_until_ready(result)
        loss, aux, summed = result
        self.result = loss, aux
        return summed


def record(loss_fn: Callable[..., Any], params: PyTree, args: tuple[Any, ...]) -> Graph:
    """The graph of `loss_fn(params, *args)`; nothing is computed yet.

    Raises:
      TypeError: `loss_fn` gives no loss, or an argument can be neither traced nor kept as a constant.
    """
    params = list(params) if isinstance(params, Iterator) else params
    parameters = unique_parameters(params, args)
    places = {parameter: index for index, parameter in enumerate(parameters)}
    leaves, treedef = jax.tree.flatten((params, *args))
    slots: list[tuple[Any, ...]] = []
    arrays: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Parameter):
            slots.append(("parameter", places[leaf]))
        elif trees.dtype_of(leaf) is not None and not isinstance(leaf, bool):
            slots.append(("array", len(arrays)))
            # A copy of NumPy's: nothing is computed yet, and the caller may write into it.
            arrays.append(jnp.array(leaf) if isinstance(leaf, np.ndarray) else leaf)
        else:
            trees.check_known_arrays(leaf, f"an argument of {getattr(loss_fn, '__name__', 'the loss function')}")
            slots.append(("constant", type(leaf), leaf))
    layout = Layout(treedef, tuple(slots))
    try:
        hash(layout)
    except TypeError as error:
        raise TypeError(
            f"what is no array in the arguments of a loss function is a constant of its program and must be hashable: {error}"
        ) from None
    programs, values = programs_of(loss_fn), [parameter._data for parameter in parameters]
    key, traced = programs.trace(loss_fn, layout, values, arrays)
    reached = [found and parameter.requires_grad for found, parameter in zip(traced.reached, parameters, strict=True)]
    return Graph(programs, key, parameters, reached, (values, arrays))
