"""The compiled programs of a loss function: forward, and backward with the addition to `.grad`."""

import dataclasses
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from funcgrad import trees
from funcgrad.loss import WeightedLoss, read_loss
from funcgrad.stateful.failure import calls_back
from funcgrad.stateful.parameter import TRACING, during
from funcgrad.stateful.presence import reached_inputs
from funcgrad.trees import PyTree

# JAX's options on which it depends what a function is traced to.
_TRACE_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arguments of a loss function are put together; hashable, so that programs are compiled once for it.

    Attributes:
      treedef: the structure of the tuple of arguments.
      slots: for each leaf, `("parameter", index)`, `("array", index)` or `("constant", type, value)`.
    """

    treedef: Any
    slots: tuple[tuple[Any, ...], ...]

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
      reached: for each parameter, whether the gradient of the loss reaches it.
    """

    run: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    aux_treedef: Any
    reached: list[bool]

    def __call__(self, values: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, PyTree]:
        """`(loss, aux)`."""
        loss, *aux = self.run(values, arrays)
        return loss, self.aux_treedef.unflatten(aux)


class Programs:
    """The compiled programs of one loss function, which is itself called once for given shapes and not kept."""

    def __init__(self) -> None:
        self._traced: dict[Any, Traced] = {}
        self._calls_back: dict[Any, bool] = {}
        self.forward = jax.jit(self._forward, static_argnums=0)
        self.backward = jax.jit(self._backward, static_argnums=(0, 1), donate_argnums=6)

    def trace(
        self, loss_fn: Callable[..., Any], layout: Layout, values: list[jax.Array], arrays: list[Any]
    ) -> tuple[Any, Traced]:
        """`(key, traced)`, with `key` a hashable name for it."""
        config = tuple(getattr(jax.config, name) for name in _TRACE_OPTIONS)
        key = layout, config, tuple(jax.typeof(leaf) for leaf in (*values, *arrays))
        if key not in self._traced:
            self._traced[key] = _trace(loss_fn, layout, values, arrays)
        return key, self._traced[key]

    def backward_calls_back(self, key: Any, wanted: tuple[int, ...], values: Any, arrays: Any) -> bool:
        """Whether the backward program calls back into Python, and so may fail while it runs."""
        if (key, wanted) not in self._calls_back:
            old = [values[index] for index in wanted]
            traced = self.backward.trace(key, wanted, values, arrays, jnp.zeros(()), np.zeros(len(wanted), bool), old)
            self._calls_back[key, wanted] = calls_back(traced.jaxpr.jaxpr)
        return self._calls_back[key, wanted]

    def _forward(self, key: Any, values: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, PyTree]:
        return self._traced[key](values, arrays)

    def _backward(  # noqa: PLR0917
        self, key: Any, wanted: tuple[int, ...], values: Any, arrays: Any, scale: Any, is_first: Any, old: Any
    ) -> tuple[Any, PyTree, list[jax.Array]]:
        def loss_of(chosen: list[Any]) -> tuple[Any, PyTree]:
            replaced = dict(zip(wanted, chosen, strict=True))
            return self._traced[key]([replaced.get(index, value) for index, value in enumerate(values)], arrays)

        loss, pullback, aux = jax.vjp(loss_of, [values[index] for index in wanted], has_aux=True)
        # PyTorch's gradient of a complex parameter is the conjugate of JAX's.
        grads = [jnp.conj(grad) for grad in pullback(scale.astype(loss.dtype))[0]]
        # Where a gradient is the first, what was in its memory does not count, not even NaN.
        summed = [jnp.where(first, grad, before + grad) for first, before, grad in zip(is_first, old, grads, strict=True)]
        return loss, aux, summed


def _trace(loss_fn: Callable[..., Any], layout: Layout, values: list[jax.Array], arrays: list[Any]) -> Traced:
    def evaluate(values: list[Any], arrays: list[Any]) -> tuple[Any, PyTree]:
        output = loss_fn(*layout.arguments(values, arrays))
        if isinstance(output, tuple) and len(output) != 2:
            raise TypeError(f"the loss function must return a loss, or a pair of loss and aux; got a tuple of {len(output)}")
        loss, aux = read_loss(output, has_aux=isinstance(output, tuple))
        return jnp.asarray(loss.mean() if isinstance(loss, WeightedLoss) else loss), aux

    with during(TRACING):
        closed, (_, aux) = jax.make_jaxpr(evaluate, return_shape=True)(values, arrays)
    run = jax.extend.core.jaxpr_as_fun(closed)
    reached = reached_inputs(closed)[: len(values)]
    return Traced(lambda values, arrays: run(*values, *arrays), jax.tree.structure(aux), reached)


# By the identity of the function, or of the object whose method it is, and as long as that lives.
_programs: dict[int, dict[Any, Programs]] = {}
# How many functions with the same code there were and are no more: a function in a loop is made anew in each round.
_gone: weakref.WeakKeyDictionary[types.CodeType, int] = weakref.WeakKeyDictionary()
_GONE_LIMIT = 4


def programs_of(loss_fn: Callable[..., Any]) -> Programs:
    """The programs of a loss function, kept as long as the function is, or longer where they refer to it by a callback.

    Raises:
      TypeError: it cannot be called, or not be kept.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function; got {trees.describe(loss_fn)}")
    # A method is a new object each time that it is asked for.
    owner, name = (loss_fn.__self__, loss_fn.__func__) if isinstance(loss_fn, types.MethodType) else (loss_fn, None)
    if id(owner) not in _programs:
        try:
            weakref.finalize(owner, _forget, id(owner), _code_of(loss_fn)).atexit = False
        except TypeError:
            raise TypeError(
                f"loss_fn must be a function or a method of an object that can be referred to weakly; got {loss_fn!r}. "
                "Wrap it in a function"
            ) from None
        _programs[id(owner)] = {}
    kept = _programs[id(owner)]
    if name not in kept:
        kept[name] = Programs()
        _warn_of_copies(_code_of(loss_fn))
    return kept[name]


def _forget(owner_id: int, code: types.CodeType | None) -> None:
    _programs.pop(owner_id, None)
    if code is not None:
        _gone[code] = _gone.get(code, 0) + 1


def _code_of(loss_fn: Any) -> types.CodeType | None:
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    return getattr(inspect.unwrap(function), "__code__", None)


def _warn_of_copies(code: types.CodeType | None) -> None:
    if code is not None and _gone.get(code) == _GONE_LIMIT:
        warnings.warn(
            f"{code.co_name} ({code.co_filename}, line {code.co_firstlineno}) was defined and traced anew "
            f"{_GONE_LIMIT + 1} times, which is slow. Define the loss function once, outside of the loop, and pass it what "
            "changes as an argument",
            UserWarning,
            stacklevel=5,  # who called evaluate or grad
        )
