"""Adafactor with PyTorch's rules: every matrix factored, a step of at most 1 / sqrt(t), a decay times the learning rate."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.arithmetic import lerp
from funcgrad.torch_optim.rule import Leaf, Rule, Values, gradients_of, transformation

PyTree = Any


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

    def values(step: jax.Array, numbers: dict[str, jax.Array], rate: Any) -> Values:
        return {"step": step, "learning_rate": rate}, {}

    def with_eps1(eps1: Any) -> optax.GradientTransformationExtraArgs:
        rule = Rule(SLOTS, lambda leaf: _update_leaf(leaf, beta2_decay, (eps1, eps[1]), d), values)
        return transformation(rule, learning_rate, weight_decay=weight_decay, decoupled=True, maximize=maximize)

    def init(params: PyTree) -> Any:
        _check_real(params)
        return with_eps1(None).init(params)

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        eps1 = _first_precision(updates, params) if eps[0] is None and params is not None else eps[0]
        return with_eps1(eps1).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _rows(param: Any) -> jax.Array | None:
    shape = jnp.shape(param)
    return jnp.zeros((*shape[:-1], 1), jnp.result_type(param)) if len(shape) > 1 else None


def _columns(param: Any) -> jax.Array | None:
    shape = jnp.shape(param)
    return jnp.zeros((*shape[:-2], 1, shape[-1]), jnp.result_type(param)) if len(shape) > 1 else None


def _variance(param: Any) -> jax.Array | None:
    return jnp.zeros(jnp.shape(param), jnp.result_type(param)) if jnp.ndim(param) < 2 else None


SLOTS = {"row_var": _rows, "col_var": _columns, "variance": _variance}


def _first_precision(updates: PyTree, params: PyTree) -> float:
    """PyTorch's default of `eps1`, which it takes from the first parameter that it updates and keeps for the others."""
    pairs = zip(jax.tree.leaves(params), gradients_of(updates, params), strict=True)
    return next((float(jnp.finfo(jnp.result_type(param)).eps) for param, grad in pairs if grad is not None), 0.0)


def _update_leaf(leaf: Leaf, beta2_decay: Any, eps: tuple[Any, Any], d: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The update of one parameter and its new slots."""
    grad, param, slots, rounded = leaf.grad, leaf.param, dict(leaf.slots), leaf.rounded
    if not param.size:
        return jnp.zeros_like(param), slots
    wide, root_size = param.dtype, float(np.sqrt(param.size))
    step, rate, eps1, eps2 = (_as(wide, each) for each in (leaf.values["step"], leaf.values["learning_rate"], *eps))

    def norm(array: jax.Array, axis: int | None = None) -> jax.Array:
        return rounded(jnp.sqrt(jnp.sum(array * array, axis=axis, keepdims=axis is not None)))

    weight = step ** _as(wide, beta2_decay)
    alpha = _larger(eps2, norm(param) / root_size) * jnp.minimum(rate, 1 / jnp.sqrt(step))
    if grad.ndim > 1:
        for name, axis in (("row_var", -1), ("col_var", -2)):
            mean = rounded(rounded(norm(grad, axis) ** 2) / grad.shape[axis])
            slots[name] = rounded(lerp(slots[name], mean, weight))
        row = slots["row_var"]
        largest = jnp.maximum(rounded(jnp.mean(row, axis=-2, keepdims=True)), rounded(eps1))
        estimate = rounded(rounded(row * slots["col_var"]) / largest)
    else:
        estimate = slots["variance"] = rounded(lerp(slots["variance"], rounded(grad * grad), weight))
    estimate = jnp.maximum(estimate, rounded(eps1 * eps1))
    new = rounded(rounded(jax.lax.rsqrt(estimate)) * grad)
    denominator = _larger(1.0, norm(new) / (root_size * d))
    return leaf.moved(-(alpha / denominator) * new), slots


def _larger(left: Any, right: jax.Array) -> jax.Array:
    """Python's `max`, which PyTorch takes here: a NaN on the right is passed over."""
    return jnp.where(right > left, right, left)


def _as(dtype: Any, number: Any) -> jax.Array:
    """A hyperparameter, a number or an array of one, as an array `[]`."""
    return jnp.reshape(jnp.asarray(number, dtype), ())


def _check(learning_rate: Any, beta2_decay: Any, eps: Sequence[Any], d: Any, weight_decay: Any) -> None:
    arguments.check_learning_rate(learning_rate)
    arguments.check("beta2_decay", beta2_decay, lambda decay: decay <= 0.0, "a number of at most 0")
    if not isinstance(eps, Sequence) or len(eps) != 2:
        raise ValueError(f"eps must be two numbers, the first of which may be None; got {eps!r}")
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
