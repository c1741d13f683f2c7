"""The state of an optimizer across the border: out of PyTorch's `state_dict`, and into it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from funcgrad.torch_optim.rule import State

PyTree = Any
TorchState = dict[int, dict[str, np.ndarray]]
# PyTorch makes these states with the optimizer, and not at a parameter's first step.
BEGUN_AT_ONCE = {"sum"}
# Adafactor's, which are not like the parameter.
OTHER_SHAPES = {"row_var", "col_var"}


def to_torch_state(opt_state: PyTree, params: PyTree) -> TorchState:
    """The state as PyTorch's `optimizer.state_dict()["state"]`, in NumPy arrays.

    In PyTorch, `optimizer.load_state_dict({"state": {index: {name: torch.from_numpy(array) ...}}, "param_groups":
    optimizer.state_dict()["param_groups"]})` takes it over; learning rates and other options stay with the optimizers.

    Args:
      opt_state: the state of an optimizer of this package other than `lbfgs`, or of a chain or another wrapper with one of them
        in it.
      params: the parameters. Their leaves, in the order of `jax.tree.leaves`, are PyTorch's parameters 0, 1, ...

    Returns:
      For each parameter that has made a step its `step` and arrays, by PyTorch's names. Numbers of 16 bits are float32, because
      NumPy has no bfloat16; PyTorch puts them back.

    Raises:
      ValueError: there is no state of this package in `opt_state`, or more than one, or it is not of these parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.adam(), {"w": jnp.ones(2)}
      >>> _, state = optimizer.update({"w": jnp.ones(2)}, optimizer.init(params), params)
      >>> print(sorted(torch_optim.to_torch_state(state, params)[0]))
      ['exp_avg', 'exp_avg_sq', 'step']

    Reference:
      `torch.optim.Optimizer.state_dict
      <https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.state_dict.html>`_
    """
    state = _only_state(opt_state)
    leaves, treedef = jax.tree.flatten(params)
    slots = _slots(state, leaves, treedef)
    steps = np.zeros(len(leaves), np.int32) if state.step is None else np.asarray(state.step)
    # PyTorch counts in its default dtype, and SGD and Muon do not count.
    counted = {} if set(slots) <= {"momentum_buffer"} else {"step": steps.astype(np.float32)}
    numbers = counted | {name: np.asarray(number) for name, number in state.numbers.items()}
    # Muon's buffer is zero where no step was made, which is how PyTorch begins it.
    all_begun = bool(slots) if state.step is None else bool(BEGUN_AT_ONCE & set(slots))
    return {
        index: {name: np.array(number[index]) for name, number in numbers.items()}
        | {name: _as_numpy(arrays[index]) for name, arrays in slots.items() if arrays[index] is not None}
        for index in range(len(leaves))
        if steps[index] > 0 or all_begun
    }


def from_torch_state(
    state_dict: Mapping[Any, Mapping[str, Any]],
    params: PyTree,
    transformation: optax.GradientTransformation,
    *,
    count: int | None = None,
) -> PyTree:
    """The state of `transformation` that goes on from PyTorch's `optimizer.state_dict()["state"]`.

    Args:
      state_dict: for the index of each parameter its arrays, of NumPy or what `numpy.asarray` takes. A parameter that it lacks
        has made no step.
      params: the parameters, as for `to_torch_state`.
      transformation: the optimizer of this package, or a chain or another wrapper with one of them in it; all other state in it
        is new.
      count: the optimizer steps made, for a schedule, that of `optax.inject_hyperparams` too. Where it is left out, the largest
        step of a parameter.

    Returns:
      The state.

    Raises:
      ValueError: an entry is missing, unknown or of another shape than its parameter, or a schedule's count is not known.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> from funcgrad import torch_optim
      >>> optimizer, params = torch_optim.adam(), jnp.ones(2)
      >>> saved = {0: {"step": np.array(5.0), "exp_avg": np.ones(2), "exp_avg_sq": np.ones(2)}}
      >>> print(torch_optim.from_torch_state(saved, params, optimizer).step)
      [5]

    Reference:
      `torch.optim.Optimizer.load_state_dict
      <https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.load_state_dict.html>`_
    """
    begun = transformation.init(params)
    state = _only_state(begun)
    leaves, treedef = jax.tree.flatten(params)
    slots = _slots(state, leaves, treedef)
    entries = _read_entries(state_dict, state, slots, len(leaves))
    numbers = {name: np.array(number) for name, number in state.numbers.items()}
    steps = np.zeros(len(leaves), np.int32)
    for index, entry in entries.items():
        steps[index] = _whole(f"state_dict[{index}]['step']", entry.get("step", 1))
        for name, number in numbers.items():
            number[index] = np.asarray(entry[name])
        for name, arrays in slots.items():
            if arrays[index] is None:
                continue
            array = np.asarray(entry[name])
            if np.iscomplexobj(array) and not jnp.iscomplexobj(arrays[index]):
                raise ValueError(f"state_dict[{index}][{name!r}] is complex, but parameter {index} is real")
            if array.shape != arrays[index].shape:
                raise ValueError(
                    f"state_dict[{index}][{name!r}] must have the shape {arrays[index].shape} for parameter {index}; "
                    f"got {array.shape}"
                )
            # As an update in place, so that it lies on the parameter's devices.
            arrays[index] = arrays[index].at[...].set(jnp.asarray(array, arrays[index].dtype))
    read = State(
        calls=None if state.calls is None else jnp.asarray(_count(count, entries), jnp.int32),
        step=None if state.step is None else jnp.asarray(steps),
        numbers={name: jnp.asarray(number) for name, number in numbers.items()},
        slots={name: treedef.unflatten(arrays) for name, arrays in slots.items()},
    )
    return _with_state(begun, read, lambda: jnp.asarray(_count(count, entries), jnp.int32))


def _read_entries(
    state_dict: Mapping[Any, Mapping[str, Any]], state: State, slots: dict[str, list[Any]], num: int
) -> dict[int, Mapping[str, Any]]:
    if "state" in state_dict:
        raise ValueError('expected optimizer.state_dict()["state"]; got optimizer.state_dict() with its param_groups')
    named = set(state.slots) | set(state.numbers)
    if state.step is not None and named != {"momentum_buffer"}:
        named.add("step")
    entries = {}
    for index, entry in state_dict.items():
        if index not in range(num):
            raise ValueError(f"state_dict must have keys from 0 to {num - 1}, one for each parameter; got {index!r}")
        # PyTorch's SGD may leave None, or nothing, for a buffer.
        present = {name: value for name, value in entry.items() if value is not None}
        if not present:
            continue
        # Adafactor has other arrays for matrices than for vectors.
        wanted = named - {name for name, arrays in slots.items() if arrays[index] is None}
        if set(present) != wanted:
            raise ValueError(
                f"state_dict[{index}] must have {sorted(wanted)}, the state of this transformation; got {sorted(present)}. "
                "Give the transformation the options that PyTorch's optimizer had"
            )
        entries[index] = present
    return entries


def _slots(state: State, leaves: list[Any], treedef: Any) -> dict[str, list[Any]]:
    """The arrays of each parameter.

    Raises:
      ValueError: the state is of other parameters.
    """
    if any(map(_is_masked, jax.tree.leaves(state.slots, is_leaf=_is_masked))):
        raise ValueError(
            "the state is of some of the parameters only. Under optax.masked and optax.multi_transform, give the optimizer "
            "inside, its own state, and the parameters that it updates"
        )
    for array in (state.step, *state.numbers.values()):
        if array is not None and len(array) != treedef.num_leaves:
            raise ValueError(f"the state is of {len(array)} parameters, but params has {treedef.num_leaves}")
    try:
        slots = {name: treedef.flatten_up_to(tree) for name, tree in state.slots.items()}
    except ValueError as error:
        raise ValueError(f"the state is not of these parameters: {error}") from None
    for name, arrays in slots.items():
        for index, (array, leaf) in enumerate(zip(arrays, leaves, strict=True)):
            if name not in OTHER_SHAPES and array is not None and array.shape != jnp.shape(leaf):
                raise ValueError(
                    f"the state is not of these parameters: its {name} of parameter {index} has the shape {array.shape}, the "
                    f"parameter {jnp.shape(leaf)}"
                )
    return slots


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _count(count: int | None, entries: Mapping[int, Mapping[str, Any]]) -> int:
    if count is not None:
        return _whole("count", count)
    steps = [_whole("step", entry["step"]) for entry in entries.values() if "step" in entry]
    if not steps:
        raise ValueError("state_dict tells no step to ask the schedule with: give count=, the optimizer steps made")
    return max(steps)


def _whole(name: str, value: Any) -> int:
    number = np.asarray(value)
    if number.size != 1 or not np.issubdtype(number.dtype, np.number) or number < 0 or number != np.floor(number):
        raise ValueError(f"{name} must be a whole number of at least 0; got {value!r}")
    return int(number.item())


def _with_state(begun: PyTree, read: State, calls: Callable[[], jax.Array]) -> PyTree:
    """`begun` with `read` in the place of its state, and the schedules of `optax.inject_hyperparams` at the count `calls()`."""

    def replaced(node: Any) -> Any:
        if isinstance(node, State):
            return read
        if not isinstance(node, optax.InjectStatefulHyperparamsState):
            return node
        inner = _with_state(node.inner_state, read, calls)
        if not node.hyperparams_states:
            return node._replace(inner_state=inner)
        states = {name: _at(each, calls()) for name, each in node.hyperparams_states.items()}
        return node._replace(count=calls(), hyperparams_states=states, inner_state=inner)

    return jax.tree.map(replaced, begun, is_leaf=lambda node: isinstance(node, (State, optax.InjectStatefulHyperparamsState)))


def _at(schedule_state: Any, count: jax.Array) -> Any:
    """The state of a schedule that has nothing but a count, at this one."""
    return schedule_state._replace(count=count) if getattr(schedule_state, "_fields", ()) == ("count",) else schedule_state


def _only_state(opt_state: PyTree) -> State:
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(node)]
    if len(found) != 1:
        raise ValueError(
            f"expected a state with one optimizer of torch_optim in it; got one with {len(found)}. lbfgs has none "
            "of this kind; for several, as in optax.multi_transform, give the inner state of each and its own parameters"
        )
    return found[0]


def _is_state(node: Any) -> bool:
    return isinstance(node, State)


def _as_numpy(array: jax.Array) -> np.ndarray:
    narrow = jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32
    return np.array(array, np.float32 if narrow else None)
