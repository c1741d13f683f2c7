"""Parameter: an array with a `.grad` beside it, as in PyTorch."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from funcgrad import trees
from funcgrad.trees import PyTree


class Handle:
    """What registering a hook gives: `remove()` takes the hook away again."""

    def __init__(self, hooks: dict[int, Callable[..., Any]], number: int):
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        """Take the hook away; a second time does nothing."""
        self._hooks.pop(self._number, None)


class Parameter:
    """An array, and the gradient that `backward` adds up for it: the hidden state, in an object of its own.

    The pure core keeps the same sum in a `GradBuffer`: `parameter.grad` is that leaf of `fg.total(buffer)`, or None before the
    first gradient.

    Args:
      data: an array.
      requires_grad: whether gradients are computed for it.

    Raises:
      RuntimeError: `requires_grad` of an array that is neither floating nor complex.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import stateful
      >>> weight = stateful.Parameter(jnp.ones(2))
      >>> for _ in range(3):
      ...     stateful.evaluate(lambda weight: weight.sum(), weight).backward()
      >>> print(weight.grad)
      [3. 3.]

    Reference:
      `torch.nn.Parameter <https://docs.pytorch.org/docs/stable/generated/torch.nn.parameter.Parameter.html>`_
    """

    def __init__(self, data: Any, requires_grad: bool = True):
        self._data = _own(data)
        # Whether somebody outside may hold the array, and how many losses do that may still need it.
        self._data_is_lent, self._holders = True, 0
        self._grad: jax.Array | None = None
        # Whether somebody outside may hold the array of `.grad`, so that its memory must not be reused.
        self._grad_is_lent = False
        # The memory of a gradient that was cleared, for the next one.
        self._spare: jax.Array | None = None
        self._hooks: dict[int, Callable[..., Any]] = {}
        self._post_hooks: dict[int, Callable[..., Any]] = {}
        self._next_hook = 0
        self.requires_grad = requires_grad

    @property
    def data(self) -> jax.Array:
        """The array. Assigning one of another shape or dtype is an error.

        The array that is handed out keeps its value; a step makes a new one.
        """
        self._data_is_lent = True
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        self._data, self._data_is_lent = self._fitting(value, "data"), True

    @property
    def grad(self) -> jax.Array | None:
        """The sum of the gradients since the last `zero_grad`, or None. Assigning one of another shape or dtype is an error.

        The array that is handed out keeps its value; later gradients are added in a new one.
        """
        self._grad_is_lent = True
        return self._grad

    @grad.setter
    def grad(self, value: Any) -> None:
        self._grad = None if value is None else self._fitting(value, "grad")
        self._grad_is_lent = True

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are computed. Turning it off keeps the `.grad` that is there, as in PyTorch."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and not trees.is_differentiable(self._data):
            raise RuntimeError(
                f"only floating and complex parameters can require gradients; this one is {trees.describe(self._data)}. "
                "Make it with requires_grad=False"
            )
        self._requires_grad = bool(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad`: to None, or to zeros where there is one. The pure expression: `buffer = fg.zero_grad(buffer)`.

        The memory of a gradient that nobody else holds is kept for the next one, also after None.
        """
        if self._grad is None:
            return
        if set_to_none:
            self._spare, self._grad = None if self._grad_is_lent else self._grad, None
        else:
            self.set_grad(jnp.zeros_like(self._grad))

    def detach(self) -> jax.Array:
        """The array, which is a constant to a loss function: `jax.lax.stop_gradient` of the parameter."""
        return self.data

    def register_hook(self, hook: Callable[[jax.Array], Any]) -> Handle:
        """Have `hook(gradient)` see each backward's gradient before it is added; what it returns, if not None, replaces it."""
        return self._register(self._hooks, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[["Parameter"], None]) -> Handle:
        """Have `hook(parameter)` called after each backward that added to `.grad`."""
        return self._register(self._post_hooks, hook)

    def set_grad(self, grad: jax.Array) -> None:
        """Take over a gradient that nobody else holds."""
        self._grad, self._grad_is_lent = grad, False

    def set_data(self, data: jax.Array) -> None:
        """Take over an array that nobody else holds."""
        self._data, self._data_is_lent = data, False

    def data_to_give_away(self) -> jax.Array:
        """The array, or a copy of it if somebody else may still need the one that is there."""
        return jnp.copy(self._data) if self._data_is_lent or self._holders else self._data

    def memory_for_sum(self, *, keep: bool = False) -> tuple[bool, jax.Array]:
        """`(is_first, array)`: whether there is no gradient yet, and an array to give away, with the sum so far if there is.

        Args:
          keep: `.grad` itself must stay alive, too.
        """
        if self._grad is None:
            spare, self._spare = self._spare, None
            return True, jnp.zeros_like(self._data) if spare is None else spare
        return False, jnp.copy(self._grad) if keep or self._grad_is_lent else self._grad

    def __reduce__(self) -> tuple[Any, ...]:
        # As in PyTorch, neither a copy nor a pickle has the gradient or the hooks.
        return Parameter, (self.data, self.requires_grad)

    def __repr__(self) -> str:
        return f"Parameter({trees.describe(self._data)}, requires_grad={self.requires_grad})"

    def _register(self, hooks: dict[int, Callable[..., Any]], hook: Callable[..., Any]) -> Handle:
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a Parameter that requires no gradient")
        number = self._next_hook
        self._next_hook += 1
        hooks[number] = hook
        return Handle(hooks, number)

    def _fitting(self, value: Any, name: str) -> jax.Array:
        if not trees.is_array(value):
            raise TypeError(
                f"{name} must be an array like the parameter's {trees.describe(self._data)}; got {trees.describe(value)}"
            )
        if jnp.shape(value) != self._data.shape or trees.dtype_of(value) != self._data.dtype:
            raise RuntimeError(f"{name} must be like the parameter, {trees.describe(self._data)}; got {trees.describe(value)}")
        return _own(value)


class HookContext:
    """Counts the hooks that are running after an accumulation, so that an optimizer knows that it steps in one."""

    depth = 0

    def __enter__(self) -> None:
        HookContext.depth += 1

    def __exit__(self, *_: object) -> None:
        HookContext.depth -= 1


def _own(value: Any) -> jax.Array:
    """`value` as a JAX array; NumPy's is copied, because its owner may write into it."""
    return jnp.array(value) if isinstance(value, np.ndarray) else jnp.asarray(value)


def parameters(tree: PyTree) -> PyTree:
    """`tree` with a `Parameter` for each array; an array that stands in two places is one `Parameter` (tied weights).

    Integers, booleans and PRNG keys become Parameters that require no gradient; leaves that are no arrays stay.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import stateful
      >>> tied = jnp.ones(2)
      >>> params = stateful.parameters({"encode": tied, "decode": tied, "name": "autoencoder"})
      >>> params["encode"] is params["decode"]
      True

    Reference:
      `torch.nn.Module.parameters
      <https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.parameters>`_
    """
    made: dict[int, Parameter] = {}

    def make(leaf: Any) -> Any:
        if isinstance(leaf, Parameter) or not trees.is_array(leaf):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = Parameter(leaf, requires_grad=trees.is_differentiable(leaf))
        return made[id(leaf)]

    return jax.tree.map(make, tree)


def unique_parameters(*trees_of_parameters: PyTree) -> list[Parameter]:
    """The Parameters in some pytrees, each once, in the order of their first places."""
    leaves = jax.tree.leaves([list(each) if isinstance(each, Iterator) else each for each in trees_of_parameters])
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Parameter)))


def zero_grad(params: PyTree, set_to_none: bool = True) -> None:
    """Clear the `.grad` of every Parameter in `params`: PyTorch's `model.zero_grad()`.

    The pure expression: `buffer = fg.zero_grad(buffer)`.

    Args:
      params: a pytree with Parameters among its leaves.
      set_to_none: leave None behind; if false, zeros where there is a gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import stateful
      >>> params = stateful.parameters({"w": jnp.ones(2)})
      >>> stateful.evaluate(lambda params: params["w"].sum(), params).backward()
      >>> stateful.zero_grad(params)
      >>> print(params["w"].grad)
      None

    Reference:
      `torch.nn.Module.zero_grad
      <https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.zero_grad>`_
    """
    for parameter in unique_parameters(params):
        parameter.zero_grad(set_to_none)
