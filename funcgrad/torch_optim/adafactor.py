"""Adafactor with PyTorch's rules: every matrix factored, a step of at most 1 / sqrt(t), a decay times the learning rate."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.arithmetic import is_zero, lerp, moved, rounding_to
from funcgrad.torch_optim.rule import State, gradients_of, nothing

PyTree = Any
Slots = dict[str, jax.Array]


def adafactor(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    beta2_decay: Any = -0.8,
    eps: Sequence[Any] = (None, 1e-3),
    d: Any = 1.0,
    weight_decay: Any = 0.0,
    *,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.Adafactor`.

    With `w = t ** beta2_decay`, the mean squares of the gradient's rows and of its columns are followed, `r = (1 - w) * r + w *
    mean(g**2, -1)` and `c` likewise; `v = r * c / max(mean(r), eps1)`, or for vectors `v = (1 - w) * v + w * g**2`. Then
    `u = g / sqrt(max(v, eps1**2))`, `p *= 1 - learning_rate * weight_decay` and
    `p -= max(eps2, rms(p)) * min(learning_rate, 1 / sqrt(t)) * u / max(1, rms(u) / d)`.

    `optax.adafactor` is another rule: it factors only dimensions of 128 and more, clips and scales with other defaults, and has
    a decay that the learning rate does not scale.

    Args:
      learning_rate: a number or a schedule: the largest step, relative to the parameter, and the factor of the decay.
      beta2_decay: at most 0: how fast the mean squares become slow.
      eps: `(eps1, eps2)`: what stands for smaller roots of `v`, by default the precision of the first parameter's type; and for
        a smaller root mean square of the parameter.
      d: at least 1: updates whose root mean square is larger are scaled to it.
      weight_decay: times the learning rate, the part of the parameter that decays at each step.
      maximize: whether to go up.

    Returns:
      The transformation; its state has the slots `row_var` and `col_var` for leaves of two and more dimensions, `variance` for
      the others, None elsewhere. A leaf without elements, which PyTorch fails on, stays.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: in `init`, where a parameter is complex.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad.torch_optim.adafactor import adafactor
      >>> optimizer, params = adafactor(0.1), jnp.ones((2, 2))
      >>> updates, state = optimizer.update(jnp.full((2, 2), 3.0), optimizer.init(params), params)
      >>> print(optax.apply_updates(params, updates)[0])
      [0.9 0.9]

    Reference:
      `torch.optim.Adafactor <https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html>`_
    """
    _check(learning_rate, beta2_decay, eps, d, weight_decay)

    def init(params: PyTree) -> Any:
        _check_real(params)
        leaves, treedef = jax.tree.flatten(params)
        slots = [_new_slots(leaf) for leaf in leaves]
        names = ("row_var", "col_var", "variance")
        return State(
            calls=jnp.zeros((), jnp.int32) if callable(learning_rate) else None,
            step=jnp.zeros(len(leaves), jnp.int32),
            numbers={},
            slots={name: treedef.unflatten([each.get(name) for each in slots]) for name in names},
        )

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        del extra
        if params is None:
            raise ValueError("adafactor needs the parameters: call update(grads, state, params)")
        leaves, treedef = jax.tree.flatten(params)
        grads = gradients_of(updates, params)
        present = np.array([grad is not None for grad in grads], bool)
        rate = learning_rate(state.calls) if callable(learning_rate) else learning_rate
        step = jnp.where(present, optax.safe_increment(state.step), state.step)
        slots = {name: treedef.flatten_up_to(tree) for name, tree in state.slots.items()}
        # PyTorch takes the default of eps1 from the first parameter that it updates, and keeps it for the others.
        eps1 = next((_precision(param) for param, grad in zip(leaves, grads, strict=True) if grad is not None), 0.0)
        eps1 = eps1 if eps[0] is None else eps[0]
        new_updates = []
        for index, (grad, param) in enumerate(zip(grads, leaves, strict=True)):
            if grad is None or not jnp.size(param):
                new_updates.append(nothing(param))
                continue
            kept = {name: arrays[index] for name, arrays in slots.items() if arrays[index] is not None}
            options = (beta2_decay, eps1, eps[1], d, weight_decay)
            gradient = -jnp.asarray(grad) if maximize else jnp.asarray(grad)
            new_update, kept = _update_leaf(gradient, jnp.asarray(param), kept, (step[index], rate), options)
            new_updates.append(new_update)
            for name, array in kept.items():
                slots[name][index] = array
        calls = None if state.calls is None else optax.safe_increment(state.calls)
        trees = {name: treedef.unflatten(arrays) for name, arrays in slots.items()}
        return treedef.unflatten(new_updates), State(calls, step, {}, trees)

    return optax.GradientTransformationExtraArgs(init, update)


def _update_leaf(
    grad: jax.Array, param: jax.Array, slots: Slots, moment: tuple[jax.Array, Any], options: tuple[Any, ...]
) -> tuple[jax.Array, Slots]:
    """The update of one parameter and its new slots; `moment` is its step, 1 at the first, and the learning rate."""
    beta2_decay, eps1, eps2, d, weight_decay = options
    dtype = param.dtype
    wide, rounded = jnp.promote_types(dtype, jnp.float32), rounding_to(dtype)
    step, rate = moment[0].astype(wide), _as(wide, moment[1])
    grad, param = grad.astype(wide), param.astype(wide)
    root_size = float(np.sqrt(param.size))

    def norm(array: jax.Array, axis: int | None = None) -> jax.Array:
        return rounded(jnp.sqrt(jnp.sum(array * array, axis=axis, keepdims=axis is not None)))

    weight = step ** _as(wide, beta2_decay)
    alpha = jnp.maximum(_as(wide, eps2), norm(param) / root_size) * jnp.minimum(rate, 1 / jnp.sqrt(step))
    slots = {name: array.astype(wide) for name, array in slots.items()}
    if grad.ndim > 1:
        for name, axis in (("row_var", -1), ("col_var", -2)):
            mean = rounded(rounded(norm(grad, axis) ** 2) / grad.shape[axis])
            slots[name] = rounded(lerp(slots[name], mean, weight))
        row = slots["row_var"]
        largest = jnp.maximum(rounded(jnp.mean(row, axis=-2, keepdims=True)), rounded(_as(wide, eps1)))
        estimate = rounded(rounded(row * slots["col_var"]) / largest)
    else:
        estimate = slots["variance"] = rounded(lerp(slots["variance"], rounded(grad * grad), weight))
    estimate = jnp.maximum(estimate, rounded(_as(wide, eps1) * eps1))
    new = rounded(rounded(jax.lax.rsqrt(estimate)) * grad)
    denominator = jnp.maximum(1.0, norm(new) / (root_size * d))
    keep = None if is_zero(weight_decay) else 1 - moment[1] * weight_decay
    delta = moved(param, -(alpha / denominator) * new, keep=keep, rounded=rounded)
    return delta.astype(dtype), {name: array.astype(dtype) for name, array in slots.items()}


def _as(dtype: Any, number: Any) -> jax.Array:
    """A hyperparameter, a number or an array of one, as an array `[]`."""
    return jnp.reshape(jnp.asarray(number, dtype), ())


def _new_slots(leaf: Any) -> Slots:
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    if len(shape) < 2:
        return {"variance": jnp.zeros(shape, dtype)}
    row_shape, col_shape = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return {"row_var": jnp.zeros(row_shape, dtype), "col_var": jnp.zeros(col_shape, dtype)}


def _precision(param: Any) -> float:
    return float(jnp.finfo(jnp.result_type(param)).eps)


def _check(learning_rate: Any, beta2_decay: Any, eps: Sequence[Any], d: Any, weight_decay: Any) -> None:
    arguments.check_learning_rate(learning_rate)
    arguments.check("beta2_decay", beta2_decay, lambda decay: decay <= 0.0, "a number of at most 0")
    if eps[0] is not None:
        arguments.check("eps[0]", eps[0], lambda number: number >= 0.0, "None, or a number of at least 0")
    arguments.check("eps[1]", eps[1], lambda number: number >= 0.0, "a number of at least 0")
    arguments.check("d", d, lambda threshold: threshold >= 1.0, "a number of at least 1")
    arguments.check_not_negative(weight_decay=weight_decay)


def _check_real(params: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"adafactor takes real parameters; got {jnp.result_type(leaf)} at params{jax.tree_util.keystr(path)}. Hand it "
                "the real and the imaginary part as two"
            )
