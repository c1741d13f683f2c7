"""The frame of every optimizer here: a rule for one parameter, applied to each leaf with a state of its own."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from funcgrad.torch_optim.arithmetic import Rounded, exact, is_array, is_zero, rounding_to

PyTree = Any


class State(NamedTuple):
    """The state of one of these optimizers, under PyTorch's names.

    Attributes:
      calls: how often `update` was called, int32 `[]`, for a schedule; None where the learning rate is a number.
      step: steps of each parameter, int32 `[leaves]`, in the order of `jax.tree.leaves(params)`; None where none is needed. One
        array for all, because a program with a hundred scalars spends its time on them.
      numbers: other numbers of each parameter, `[leaves]`: `mu_product` of NAdam, `eta` and `mu` of ASGD.
      slots: arrays like the parameters, each a tree like `params`: `exp_avg`, `momentum_buffer`, ...
        Adafactor has rows, columns, or None.
    """

    calls: Any
    step: jax.Array | None
    numbers: dict[str, jax.Array]
    slots: dict[str, PyTree]


class Leaf(NamedTuple):
    """One parameter as a rule sees it: real, and float32 at least.

    Attributes:
      grad: its gradient, negated for `maximize`, with the coupled weight decay added.
      param: its value.
      slots: its arrays.
      values: the numbers of this step, `[]`.
      dtype: that of the parameter itself, or of its parts.
      rounded: what PyTorch rounds each result with.
    """

    grad: jax.Array
    param: jax.Array
    slots: dict[str, jax.Array]
    values: dict[str, Any]
    dtype: Any
    rounded: Rounded

    def moved(self, *deltas: Any) -> jax.Array:
        """The update that takes the parameter to `param * keep + delta + ...`.

        The value `keep` is 1 less what decays, and missing where nothing does. PyTorch rounds it to the parameter's precision:
        the same error at each step.
        """
        keep, rounded = self.values.get("keep"), self.rounded
        if rounded is exact:
            update = functools.reduce(operator.add, deltas)
            if keep is None:
                return update
            # A mask of infinities stays one: what decays of them is a finite number, neither infinity nor infinity times zero.
            info = jnp.finfo(self.param.dtype)
            largest, smallest = float(info.max), float(info.tiny)
            decay = jnp.asarray(keep, self.param.dtype) - 1
            decay = jnp.where(decay == 0, -smallest, decay)
            return update + jnp.clip(self.param * decay, -largest, largest)
        new = self.param if keep is None else rounded(self.param * keep)
        for delta in deltas:
            new = rounded(new + delta)
        # The difference of two close numbers is exact, so that adding it gives `new`.
        return jnp.where(new == self.param, 0, new - self.param)


Values = tuple[dict[str, Any], dict[str, jax.Array]]


def learning_rate_alone(step: jax.Array, numbers: dict[str, jax.Array], learning_rate: Any) -> Values:
    """The values of a rule whose only number is the learning rate."""
    return {"learning_rate": learning_rate}, {}


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a step does with one parameter.

    Attributes:
      slots: the arrays kept for it, and what each is filled with at first; or a function of the parameter that makes
        it, or None for a parameter that has none.
      update: gives the update and the new slots of a `Leaf`.
      values: the numbers of a step for all parameters at once, `(step, numbers, learning_rate) -> (values, new numbers)`:
        `step` is floating, `[leaves]`, 1 at a parameter's first step; each value is `[leaves]` or one for all.
      numbers: the numbers kept for it, and their first values.
      counts: whether its steps are counted; not known before the step runs where it is an array.
    """

    slots: Mapping[str, Any]
    update: Callable[[Leaf], tuple[jax.Array, dict[str, jax.Array]]]
    values: Callable[[jax.Array, dict[str, jax.Array], Any], Values] = learning_rate_alone
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    counts: bool | jax.Array = True


def transformation(
    rule: Rule,
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: Any = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The optax transformation that applies `rule` to each leaf.

    Args:
      rule: the rule.
      learning_rate: a number, or a schedule, which is asked once a call, with 0 at the first.
      weight_decay: this multiple of the parameter is added to its gradient.
      decoupled: whether the parameter decays by itself instead: it is multiplied by `1 - rate * weight_decay` first.
      maximize: whether gradients are negated first.
    """
    coupled = 0.0 if decoupled else weight_decay

    def init(params: PyTree) -> Any:
        leaves = jax.tree.leaves(params)
        dtype = _numbers_dtype(leaves)
        return State(
            calls=jnp.zeros((), jnp.int32) if callable(learning_rate) else None,
            step=None if rule.counts is False else jnp.zeros(len(leaves), jnp.int32),
            numbers={name: jnp.full(len(leaves), value, dtype) for name, value in rule.numbers.items()},
            slots={name: jax.tree.map(functools.partial(_filled, value), params) for name, value in rule.slots.items()},
        )

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        del extra
        if params is None:
            raise ValueError("the optimizers of torch_optim need the parameters: call update(grads, state, params)")
        leaves, treedef = jax.tree.flatten(params)
        grads = gradients_of(updates, params)
        present = np.array([grad is not None for grad in grads], bool)
        dtype = _numbers_dtype(leaves)
        rate = learning_rate(state.calls) if callable(learning_rate) else learning_rate
        rate = jnp.reshape(jnp.asarray(rate, dtype), ()) if isinstance(rate, jax.Array | np.ndarray) else rate
        step, values, numbers = _advance(rule, state, rate, present, dtype)
        if decoupled and not is_zero(weight_decay):
            values = values | {"keep": 1 - rate * weight_decay}
        slots = {name: treedef.flatten_up_to(tree) for name, tree in state.slots.items()}
        new_updates = []
        for index, (grad, param) in enumerate(zip(grads, leaves, strict=True)):
            if grad is None:
                new_updates.append(nothing(param))
                continue
            mine = {name: value[index] if jnp.ndim(value) else value for name, value in values.items()}
            kept = {name: arrays[index] for name, arrays in slots.items() if arrays[index] is not None}
            new_update, kept = _update_leaf(rule, grad, jnp.asarray(param), kept, mine, (coupled, maximize))
            new_updates.append(new_update)
            for name, array in kept.items():
                slots[name][index] = array
        trees = {name: treedef.unflatten(arrays) for name, arrays in slots.items()}
        calls = None if state.calls is None else optax.safe_increment(state.calls)
        return treedef.unflatten(new_updates), State(calls, step, numbers, trees)

    return optax.GradientTransformationExtraArgs(init, update)


def gradients_of(updates: PyTree, params: PyTree) -> list[Any]:
    """The gradient of each leaf of `params`, or None.

    Raises:
      ValueError: the structures differ otherwise than by None, or a gradient has not the shape of its parameter.
      TypeError: a parameter that is not floating has a gradient, or a real one a complex gradient.
    """
    try:
        grads = jax.tree.structure(params).flatten_up_to(updates)
    except ValueError as error:
        raise ValueError(
            f"the gradients must have the structure of the parameters, None where there is none: {error}"
        ) from None
    for (path, param), grad in zip(jax.tree_util.tree_flatten_with_path(params)[0], grads, strict=True):
        if grad is None:
            continue
        name, shape = f"params{jax.tree_util.keystr(path)}", jnp.shape(param)
        if jnp.shape(grad) != shape:
            raise ValueError(f"the gradient of {name} must have its shape, {shape}; got {jnp.shape(grad)}")
        if not jnp.issubdtype(jnp.result_type(param), jnp.inexact):
            raise TypeError(f"{name} is {jnp.result_type(param)} and cannot be trained: give None as its gradient")
        if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(param):
            raise TypeError(
                f"{name} is {jnp.result_type(param)}, but its gradient is {jnp.result_type(grad)}: take its real part"
            )
    return grads


def nothing(param: Any) -> jax.Array:
    """The update that leaves every bit of `param`: `-0.0 + 0.0` is `0.0`, but `-0.0 + -0.0` is `-0.0`."""
    dtype = jnp.result_type(param)
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    zero = complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0
    return jnp.full_like(param, zero if inexact else 0, dtype=dtype)


def _advance(rule: Rule, state: State, rate: Any, present: np.ndarray, dtype: Any) -> tuple[Any, dict[str, Any], Any]:
    """The counts after this step, its values, and the numbers to keep, which stay where no gradient is."""
    if state.step is None:
        step, floating = None, jnp.zeros(len(present), dtype)
    else:
        advanced = jnp.asarray(optax.safe_increment(state.step))
        if isinstance(rule.counts, jax.Array):
            advanced = jnp.where(rule.counts, advanced, state.step)
        step = advanced if present.all() else jnp.where(present, advanced, state.step)
        floating = advanced.astype(dtype)
    values, numbers = rule.values(floating, state.numbers, rate)
    kept = {name: jnp.where(present, number, state.numbers[name]) for name, number in numbers.items()}
    return step, values, kept


def _update_leaf(  # noqa: PLR0917
    rule: Rule, grad: Any, param: jax.Array, slots: dict[str, Any], values: dict[str, Any], options: tuple[Any, bool]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    weight_decay, maximize = options
    dtype = param.dtype
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    # PyTorch computes in float32 what has 16 bits, and takes a complex number for two real ones.
    real = jnp.finfo(dtype).dtype
    wide = jnp.promote_types(real, jnp.float32)
    rounded = rounding_to(real)

    def read(array: Any) -> jax.Array:
        array = jnp.asarray(array)
        return (jnp.stack([array.real, array.imag], axis=-1) if is_complex else array).astype(wide)

    def write(array: jax.Array) -> jax.Array:
        array = array.astype(real)
        return jax.lax.complex(array[..., 0], array[..., 1]) if is_complex else array

    value, gradient = read(param), read(grad)
    gradient = -gradient if maximize else gradient
    if not is_zero(weight_decay):
        decayed = rounded(gradient + rounded(weight_decay) * value)
        # Infinity times an injected zero, which PyTorch would leave out.
        gradient = jnp.where(weight_decay == 0, gradient, decayed) if is_array(weight_decay) else decayed
    values = {name: each.astype(wide) if _is_floating(each) else each for name, each in values.items()}
    leaf = Leaf(gradient, value, {name: read(array) for name, array in slots.items()}, values, real, rounded)
    update, new = rule.update(leaf)
    return write(update), {name: write(array) for name, array in new.items()}


def _is_floating(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)


def _filled(value: Any, leaf: Any) -> Any:
    if callable(value):
        return value(leaf)
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        value = jax.lax.complex(*[jnp.asarray(value, jnp.finfo(dtype).dtype)] * 2)
    return jnp.full_like(leaf, value, dtype=dtype)


def _numbers_dtype(leaves: list[Any]) -> Any:
    """Float64 where a parameter is that, else float32."""
    dtypes = [jnp.result_type(leaf) for leaf in leaves]
    wide = [jnp.finfo(dtype).dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return jnp.result_type(jnp.float32, *wide)
