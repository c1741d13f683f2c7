"""Optimizer: PyTorch's `step` and `zero_grad` around any optax transformation, with state for each parameter."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from funcgrad import trees
from funcgrad.opt_state import check_optimizer
from funcgrad.stateful.failure import calls_back, checks_numbers
from funcgrad.stateful.parameter import IN_HOOK, Parameter, some_parameters
from funcgrad.trees import PyTree

Groups = Sequence[tuple[PyTree, optax.GradientTransformation]]


class Optimizer:
    """Updates Parameters in place from their `.grad`.

    As in PyTorch, each parameter has a state of its own, begun at its first step. A parameter whose `.grad` is None is not
    touched, nor is its state; one whose `.grad` is zeros is. Whether it still requires a gradient is not looked at.

    Each parameter is given to the transformation by itself, without the loss, so what couples parameters or needs a loss
    belongs elsewhere: clip with `clip_grad_norm_` before the step, as in PyTorch; for masks use groups. Two that the same key
    makes noise for (`optax.add_noise`) get the same noise, and `optax.adam` takes a complex number for one and not for two
    numbers, as PyTorch does. The pure expression of a step, for one transformation and all parameters together: `updates,
    opt_state = optimizer.update(fg.mean(buffer), opt_state, params)`, and then `optax.apply_updates`.

    Args:
      transformation: any optax transformation, for `params`; or groups, `[(params, transformation), ...]`.
      params: a pytree with Parameters among its leaves; None with groups.

    Raises:
      ValueError: there is no Parameter, or one is in two groups.
      TypeError: a transformation is none.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import stateful
      >>> weight = stateful.Parameter(jnp.array(3.0))
      >>> optimizer = stateful.Optimizer(optax.sgd(0.1), weight)
      >>> for _ in range(2):
      ...     optimizer.zero_grad()
      ...     stateful.evaluate(jnp.square, weight).backward()
      ...     optimizer.step()
      >>> print(round(weight.data.item(), 2))
      1.92

    Reference:
      `torch.optim.Optimizer <https://docs.pytorch.org/docs/stable/optim.html>`_
    """

    __slots__ = ("__weakref__", "_groups")  # so that optimizer.lr = 0.1 is an error

    def __init__(self, transformation: optax.GradientTransformation | Groups, params: PyTree = None):
        groups = _read_groups(transformation, params)
        self._groups: list[_Group] = []
        seen: set[Parameter] = set()
        for group_params, each in groups:
            check_optimizer(each)
            found = some_parameters(group_params)
            if not found:
                raise ValueError("the optimizer got no Parameter. Make them with stateful.parameters(tree)")
            if seen.intersection(found):
                raise ValueError("a Parameter stands in more than one group; each can be updated by one transformation only")
            seen.update(found)
            self._groups.append(_Group(found, each))
        if not self._groups:
            raise ValueError("the optimizer got no group: give it [(params, transformation), ...]")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. The gradients stay: clear them with `zero_grad`.

        Args:
          closure: called first, to evaluate the loss and its gradients; its answer is returned.
        """
        if IN_HOOK.get():
            warnings.warn(
                "an optimizer steps in a hook, at every backward: gradients are then not accumulated over microbatches. Step "
                "after the last backward of a window",
                UserWarning,
                stacklevel=2,
            )
        answer = None if closure is None else closure()
        for group in self._groups:
            group.step()
        return answer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the `.grad` of this optimizer's parameters, and of no others."""
        for parameter in self.parameters:
            parameter.zero_grad(set_to_none)

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of all groups, in order."""
        return [parameter for group in self._groups for parameter in group.parameters]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """PyTorch's name for the options, which belong to the transformation here.

        Raises:
          AttributeError: always, with what to do.
        """
        raise AttributeError(
            "an Optimizer has no param_groups: learning rates belong to the optax transformation. Give it a schedule, "
            "optax.sgd(optax.cosine_decay_schedule(0.1, 1000)), or make the rate settable, "
            "optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), and use set_hyperparams(learning_rate=0.01)"
        )

    def set_hyperparams(self, **values: Any) -> None:
        """Set numbers that `optax.inject_hyperparams` has put into the state: `set_hyperparams(learning_rate=0.01)`.

        Raises:
          KeyError: a transformation has no such number; nothing is changed.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> from funcgrad import stateful
          >>> weight = stateful.Parameter(jnp.array(3.0))
          >>> optimizer = stateful.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), weight)
          >>> optimizer.set_hyperparams(learning_rate=0.5)
          >>> weight.grad = jnp.array(2.0)
          >>> optimizer.step()
          >>> print(weight.data)
          2.0

        Reference:
          `optax.inject_hyperparams
          <https://optax.readthedocs.io/en/latest/api/utilities.html#optax.inject_hyperparams>`_
        """
        begun = [group.begun_states() for group in self._groups]
        changed = [[_with_hyperparams(state, values) for state in states] for states in begun]
        for group, states in zip(self._groups, changed, strict=True):
            group.states = states

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: for each parameter that of the transformation, or None before the first step."""
        states = [state for group in self._groups for state in group.states]
        return {"state": [jax.tree.map(jnp.copy, state) for state in states]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; nothing is changed if it does not fit.

        Raises:
          ValueError: it is of another number of parameters, or of another transformation.
        """
        if "state" not in state_dict:
            raise ValueError(f"expected what state_dict() gave, with an entry 'state'; got the entries {sorted(state_dict)}")
        states = list(state_dict["state"])
        owners = [(group, index) for group in self._groups for index in range(len(group.parameters))]
        if len(states) != len(owners):
            raise ValueError(f"the state is of {len(states)} parameters, but this optimizer has {len(owners)}")
        for position, ((group, index), state) in enumerate(zip(owners, states, strict=True)):
            if state is not None:
                expected = jax.eval_shape(group.transformation.init, group.parameters[index]._data)
                _check_state(expected, state, f"state_dict['state'][{position}]")
        for (group, index), state in zip(owners, states, strict=True):
            group.states[index] = None if state is None else group.like_begun(index, state)


def _read_groups(transformation: Any, params: PyTree) -> list[tuple[PyTree, Any]]:
    if hasattr(transformation, "update"):
        return [(params, transformation)]
    is_list = isinstance(transformation, Sequence) and not isinstance(transformation, str)
    if not is_list or not all(isinstance(group, tuple | list) and len(group) == 2 for group in transformation):
        raise TypeError(
            "expected an optax transformation and params, Optimizer(optax.sgd(0.1), params), or groups, "
            f"Optimizer([(params, optax.sgd(0.1)), ...]); got {trees.abbreviate(repr(transformation))}"
        )
    if params is not None:
        raise TypeError("params stand in the groups, [(params, transformation), ...], and must not be given beside them")
    for group in transformation:
        for options in jax.tree.leaves(group[0], is_leaf=lambda node: isinstance(node, dict) and "params" in node):
            if isinstance(options, dict) and not isinstance(options["params"], Parameter):
                raise TypeError(
                    "options of a group in PyTorch's way, {'params': ..., 'lr': ...}, are not read. Give each group its own "
                    "transformation: [(params, optax.sgd(0.1)), ...]"
                )
    return [(group[0], group[1]) for group in transformation]


def _with_hyperparams(state: PyTree, values: dict[str, Any]) -> PyTree:
    for name, value in values.items():
        old = optax.tree.get(state, name)
        if old is None:
            raise KeyError(
                f"the optimizer's state holds no {name}. Make it settable: optax.inject_hyperparams(optax.sgd)({name}=0.1)"
            )
        state = optax.tree.set(state, **{name: jnp.asarray(value, jnp.asarray(old).dtype)})
    return state


def _check_state(expected: PyTree, state: PyTree, name: str) -> None:
    trees.check_same_structure(expected, state, "the transformation's state", name)
    for (place, leaf), model in zip(trees.leaves_with_names(state, name), jax.tree.leaves(expected), strict=True):
        if jnp.shape(leaf) != model.shape:
            raise ValueError(f"{place} must have shape {model.shape}, as its parameter asks; got {trees.describe(leaf)}")


class _Group:
    """The parameters that one transformation updates, and its state for each of them."""

    def __init__(self, parameters: list[Parameter], transformation: optax.GradientTransformation):
        self.parameters, self.transformation = parameters, transformation
        self.states: list[Any] = [None] * len(parameters)
        self._calls_back: dict[tuple[int, ...], bool] = {}
        self._update = jax.jit(self._update_each, donate_argnums=(0, 2))

    def step(self) -> None:
        active = [index for index, parameter in enumerate(self.parameters) if parameter._grad is not None]
        if not active:
            return
        self.states = self.begun_states(active)
        grads = [self.parameters[index]._grad for index in active]
        states = [self.states[index] for index in active]
        keep = self._may_fail(tuple(active), grads, states)  # the arrays, until it is known that the step has not failed
        values = [self.parameters[index].data_to_donate(keep=keep) for index in active]
        values, states = self._update(values, grads, jax.tree.map(jnp.copy, states) if keep else states)
        if keep:
            jax.block_until_ready((values, states))
        for index, value, state in zip(active, values, states, strict=True):
            self.parameters[index].set_data(value)
            self.states[index] = state

    def begun_states(self, chosen: Sequence[int] | None = None) -> list[Any]:
        """The states, with those of the `chosen` parameters begun; None for all."""
        states = list(self.states)
        for index in range(len(states)) if chosen is None else chosen:
            if states[index] is None:
                # Its own arrays: it is given away at each step, and a state may hold the parameter itself.
                states[index] = jax.tree.map(jnp.copy, self.transformation.init(self.parameters[index]._data))
        return states

    def like_begun(self, index: int, state: PyTree) -> PyTree:
        """A copy of `state` in the dtypes of the transformation's state for that parameter."""
        expected = jax.eval_shape(self.transformation.init, self.parameters[index]._data)
        return jax.tree.map(lambda model, leaf: jnp.array(leaf, model.dtype), expected, state)

    def _may_fail(self, active: tuple[int, ...], grads: list[Any], states: list[Any]) -> bool:
        if active not in self._calls_back:
            values = [self.parameters[index]._data for index in active]
            self._calls_back[active] = calls_back(self._update.trace(values, grads, states).jaxpr.jaxpr)
        return self._calls_back[active] or checks_numbers()

    def _update_each(self, values: list[Any], grads: list[Any], states: list[Any]) -> tuple[list[Any], list[Any]]:
        new_values, new_states = [], []
        for value, grad, state in zip(values, grads, states, strict=True):
            updates, new_state = self.transformation.update(grad, state, value)
            new_values.append(optax.apply_updates(value, updates))
            new_states.append(new_state)
        return new_values, new_states
