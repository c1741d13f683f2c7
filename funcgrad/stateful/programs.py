"""The compiled programs of a loss function: forward, and backward with the addition to `.grad`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from funcgrad.loss import WeightedLoss, read_loss
from funcgrad.stateful.presence import gradient_reaches
from funcgrad.trees import PyTree


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arguments of a loss function are put together; hashable, so that programs are compiled once for it.

    Attributes:
      treedef: the structure of the tuple of arguments.
      slots: for each leaf, `("parameter", index)`, `("array", index)` or `("constant", type, value)`.
      requires_grad: for each parameter.
    """

    treedef: Any
    slots: tuple[tuple[Any, ...], ...]
    requires_grad: tuple[bool, ...]

    def arguments(self, values: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments, with `values` for the parameters."""
        sources = {"parameter": values, "array": arrays}
        return self.treedef.unflatten(slot[2] if slot[0] == "constant" else sources[slot[0]][slot[1]] for slot in self.slots)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A loss function, traced for one layout and given shapes.

    Attributes:
      run: `(values, arrays) -> [loss, *aux leaves]`.
      aux_treedef: the structure of aux.
      reached: for each parameter, whether it requires a gradient and the loss depends on it.
    """

    run: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    aux_treedef: Any
    reached: list[bool]

    def __call__(self, values: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, PyTree]:
        """`(loss, aux)`."""
        loss, *aux = self.run(values, arrays)
        return loss, self.aux_treedef.unflatten(aux)


class Programs:
    """The compiled programs of one loss function, which is itself called once for given shapes."""

    def __init__(self, loss_fn: Callable[..., Any]):
        self._loss_fn = loss_fn
        self._traced: dict[Any, Traced] = {}
        self.forward = jax.jit(self._forward, static_argnums=0)
        self.backward = jax.jit(self._backward, static_argnums=(0, 1), donate_argnums=6)

    def trace(self, layout: Layout, values: list[jax.Array], arrays: list[Any]) -> tuple[Any, Traced]:
        """`(key, traced)`, with `key` a hashable name for it."""
        leaves = [jax.typeof(leaf) for leaf in (*values, *arrays)]
        config = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        key = layout, config, tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves)
        if key not in self._traced:

            def evaluate(values: list[Any], arrays: list[Any]) -> tuple[Any, PyTree]:
                output = self._loss_fn(*layout.arguments(values, arrays))
                loss, aux = read_loss(output, has_aux=isinstance(output, tuple))
                return jnp.asarray(loss.mean() if isinstance(loss, WeightedLoss) else loss), aux

            closed, (_, aux) = jax.make_jaxpr(evaluate, return_shape=True)(values, arrays)
            run_flat = jax.extend.core.jaxpr_as_fun(closed)
            required = [index for index, is_required in enumerate(layout.requires_grad) if is_required]

            def loss_of(chosen: list[Any]) -> Any:
                return run_flat(*_replaced(values, required, chosen), *arrays)[0]

            found = dict(zip(required, gradient_reaches(loss_of, [values[index] for index in required]), strict=True))
            reached = [found.get(index, False) for index in range(len(values))]
            self._traced[key] = Traced(lambda values, arrays: run_flat(*values, *arrays), jax.tree.structure(aux), reached)
        return key, self._traced[key]

    def _forward(self, key: Any, values: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, PyTree]:
        return self._traced[key](values, arrays)

    def _backward(  # noqa: PLR0917
        self, key: Any, wanted: tuple[int, ...], values: Any, arrays: Any, scale: Any, is_first: Any, old: Any
    ) -> tuple[Any, PyTree, list[jax.Array]]:
        def loss_of(chosen: list[Any]) -> tuple[Any, PyTree]:
            return self._traced[key](_replaced(values, wanted, chosen), arrays)

        loss, pullback, aux = jax.vjp(loss_of, [values[index] for index in wanted], has_aux=True)
        # PyTorch's gradient of a complex parameter is the conjugate of JAX's.
        grads = [jnp.conj(grad) for grad in pullback(scale.astype(loss.dtype))[0]]
        # Where a gradient is the first, what was in its memory does not count, not even NaN.
        summed = [jnp.where(first, grad, before + grad) for first, before, grad in zip(is_first, old, grads, strict=True)]
        return loss, aux, summed


@functools.lru_cache(maxsize=256)
def programs_of(loss_fn: Callable[..., Any]) -> Programs:
    """The programs of a loss function, kept for the last 256 functions."""
    return Programs(loss_fn)


def _replaced(values: Sequence[Any], indices: Sequence[int], chosen: Sequence[Any]) -> list[Any]:
    replaced = list(values)
    for index, value in zip(indices, chosen, strict=True):
        replaced[index] = value
    return replaced
