"""Parameter: an array with a `.grad` beside it, as in PyTorch."""

from collections.abc import Callable, Iterable, Iterator, MappingView, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

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

        Raises:
          RuntimeError: it is read inside of a loss function, which would keep the value that it has at the first call.
        """
        if TRACING.get():
            raise RuntimeError(
                "a loss function reads a Parameter that is no argument of it, and would keep the value of its first call. Pass "
                "the Parameter to evaluate, in params or as a further argument"
            )
        self._data_is_lent = True
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        self._data, self._data_is_lent = self._fitting(value, "data"), True
        self._spare = None  # it may be on another device

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
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self._data.shape

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self._data.dtype

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return self._data.size

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

        After None, the memory of a gradient that nobody else holds is kept for the next one.
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
        self._grad, self._grad_is_lent = _concrete(grad), False

    def set_data(self, data: jax.Array) -> None:
        """Take over an array that nobody else holds."""
        self._data, self._data_is_lent = _concrete(data), False

    def data_to_donate(self, *, keep: bool = False) -> jax.Array:
        """The array, or a copy of it if somebody else may still need the one that is there.

        Args:
          keep: the array itself must stay alive, too.
        """
        return jnp.copy(self._data) if keep or self._data_is_lent or self._holders else self._data

    def grad_to_donate(self, *, keep: bool = False) -> tuple[bool, jax.Array]:
        """`(is_first, array)`: whether there is no gradient yet, and an array to give away, with the sum so far if there is.

        Args:
          keep: `.grad` itself must stay alive, too.
        """
        if self._grad is None:
            spare, self._spare = self._spare, None
            return True, jnp.zeros_like(self._data) if spare is None else spare
        return False, jnp.copy(self._grad) if keep or self._grad_is_lent else self._grad

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.data, dtype)

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


def _takes_no_part(self: Parameter, *_: Any) -> NoReturn:
    raise TypeError(
        "a Parameter takes part in no computation by itself. Write a function of plain arrays and give it to evaluate with the "
        "Parameters, or compute with the arrays: parameter.data, stateful.arrays(params)"
    )


for _operator in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    setattr(Parameter, f"__{_operator}__", _takes_no_part)
    setattr(Parameter, f"__r{_operator}__", _takes_no_part)
Parameter.__neg__ = Parameter.__getitem__ = Parameter.__float__ = _takes_no_part  # pyright: ignore[reportAttributeAccessIssue]

# Whether a loss function is being traced, and whether hooks run that see `.grad` after it was added to.
TRACING: ContextVar[bool] = ContextVar("tracing", default=False)
IN_HOOK: ContextVar[bool] = ContextVar("in_hook", default=False)


@contextmanager
def during(flag: ContextVar[bool]) -> Any:
    """Set a flag for a `with` block."""
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def _own(value: Any) -> jax.Array:
    """`value` as a JAX array; what is none is copied, because its owner may write into it."""
    return trees.strongly_typed(_concrete(value) if isinstance(value, jax.Array) else jnp.array(value))


def _concrete(array: jax.Array) -> jax.Array:
    if isinstance(array, Tracer):
        raise RuntimeError(
            "a Parameter cannot keep an array of a function that is being traced: leave backward, step, clipping and "
            "assignments out of jax.jit, jax.grad and the loops of jax.lax, where they would be done once, at the first call. "
            "The step that can be jitted is fg.train_step"
        )
    return array


def parameters(tree: PyTree) -> PyTree:
    """`tree` with a `Parameter` for each array; an array that stands in two places is one `Parameter` (tied weights).

    Integers, booleans and PRNG keys become Parameters that require no gradient; leaves that are no arrays stay.

    Raises:
      TypeError: there is no array, or one of another library.

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
    trees.check_known_arrays(tree, "tree")
    leaves = jax.tree.leaves(tree)
    if leaves and not any(isinstance(leaf, Parameter) or trees.is_array(leaf) for leaf in leaves):
        raise TypeError(
            f"there is no array in {trees.abbreviate(repr(tree))}. Give a pytree of arrays: a dict, a list, or a class that "
            "jax.tree_util.register_dataclass knows"
        )
    made: dict[int, Parameter] = {}

    def make(leaf: Any) -> Any:
        if isinstance(leaf, Parameter) or not trees.is_array(leaf):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = Parameter(leaf, requires_grad=trees.is_differentiable(leaf))
        return made[id(leaf)]

    return jax.tree.map(make, tree)


def arrays(tree: PyTree) -> PyTree:
    """`tree` with the array of each Parameter in its place: to predict with, or to save.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import stateful
      >>> params = stateful.parameters({"w": jnp.ones(2)})
      >>> print(jnp.sum(stateful.arrays(params)["w"]))
      2.0
    """
    return jax.tree.map(lambda leaf: leaf.data if isinstance(leaf, Parameter) else leaf, tree)


def unique_parameters(*trees_of_parameters: PyTree) -> list[Parameter]:
    """The Parameters in some pytrees, iterators or views of a dict, each once, in the order of their first places."""
    return list(dict.fromkeys(leaf for leaf in all_leaves(trees_of_parameters) if isinstance(leaf, Parameter)))


def all_leaves(tree: PyTree) -> Iterable[Any]:
    """The leaves of a pytree, and of what can be iterated over in it, like generators and `dict.values()`."""
    for leaf in jax.tree.leaves(tree, is_leaf=_is_view):
        if _is_view(leaf):
            yield from all_leaves(list(leaf))
        else:
            yield leaf


def _is_view(node: Any) -> bool:
    return isinstance(node, Iterator | MappingView | Set)


def with_gradients(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Those of the Parameters that have a gradient."""
    return [parameter for parameter in parameters if parameter._grad is not None]


def some_parameters(params: PyTree) -> list[Parameter]:
    """The Parameters in `params`.

    Raises:
      TypeError: there is none, but something else.
    """
    leaves = list(all_leaves(params))
    found = unique_parameters(leaves)
    if leaves and not found:
        raise TypeError(
            f"expected Parameters; got {trees.abbreviate([trees.describe(leaf) for leaf in leaves])}. Make them with "
            "stateful.parameters(tree), and pass that tree"
        )
    return found


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
    for parameter in some_parameters(params):
        parameter.zero_grad(set_to_none)
