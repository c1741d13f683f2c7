"""State for each parameter, around any optax transformation."""

from typing import Any, NamedTuple

import jax
import optax

from funcgrad.torch_optim.rule import gradients_of, nothing

PyTree = Any


class PerParameterState(NamedTuple):
    """The states of a transformation, one for each parameter.

    Attributes:
      states: a tree like `params`, with the transformation's state for that parameter in the place of each leaf.
    """

    states: PyTree


def per_parameter(transformation: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Give an elementwise transformation a state, its step count included, for each leaf of the parameters.

    A leaf whose gradient is None keeps its parameter and its state bit for bit, as in PyTorch; optax's own transformations fail
    there, or count a step. The optimizers of this package do that by themselves.

    Args:
      transformation: any optax transformation that treats each element by itself: not one with a norm over all leaves. A
        schedule in it counts the steps of each leaf.

    Returns:
      The transformation. The update of a leaf without a gradient is -0.0, which changes no number that it is added to.

    Raises:
      ValueError: in `update`, where `params` are missing or the gradients do not fit them.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import torch_optim
      >>> params = {"a": jnp.array(1.0), "b": jnp.array(1.0)}
      >>> optimizer = torch_optim.per_parameter(optax.adam(0.1))
      >>> state = optimizer.init(params)
      >>> for _ in range(3):
      ...     updates, state = optimizer.update({"a": jnp.array(1.0), "b": None}, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params["b"], [int(state.states[name][0].count) for name in params])
      1.0 [3, 0]

    Reference:
      `torch.optim.Optimizer.step <https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.step.html>`_
    """
    inner = optax.with_extra_args_support(transformation)

    def init(params: PyTree) -> Any:
        return PerParameterState(jax.tree.map(inner.init, params))

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError("per_parameter needs the parameters: call update(grads, state, params)")
        leaves, treedef = jax.tree.flatten(params)
        states = treedef.flatten_up_to(state.states)
        new_updates = []
        for index, (grad, param) in enumerate(zip(gradients_of(updates, params), leaves, strict=True)):
            if grad is None:
                new_updates.append(nothing(param))
            else:
                new_update, states[index] = inner.update(grad, states[index], param, **extra)
                new_updates.append(new_update)
        return treedef.unflatten(new_updates), PerParameterState(treedef.unflatten(states))

    return optax.GradientTransformationExtraArgs(init, update)
