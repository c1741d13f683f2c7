"""The optimizers of `funcgrad.torch_optim` beside PyTorch's: their options, and 100 steps of both."""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE

from funcgrad import torch_optim

STEPS = 100
SMALLEST = 1e-30  # NAdam's product of all momenta gets smaller than any number of float32
# Which parameters have a gradient in the steps of a scan's body: one always; two in turns, the second beginning one step later.
ALWAYS = ((True,),)
IN_TURNS = ((True, False), (False, True))
SHAPES = ((), (0,), (5,), (3, 4), (2, 1, 3, 2))
# One parameter alone has this many elements: PyTorch rounds the products of bfloat16 numbers that do not fill a vector register
# otherwise than the others. (Programs with few dimensions compile faster, too.)
ALONE = 64
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "complex128": torch.complex128,
}


def schedule(count):
    """A learning rate that is about as large as the defaults."""
    return 0.02 * 0.97**count


@dataclasses.dataclass(frozen=True)
class Twin:
    """An optimizer here and in PyTorch.

    Attributes:
      torch_class: PyTorch's.
      options: for each option a value that is not the default.
      nearest: the nearest call of plain optax, for the table.
      where: the options it is compared at.
      shapes: those of its parameters.
      alone: the shape of one that is alone.
      dtypes: those it takes.
      float64, float32, bfloat16: how far it may be off in these; in the last, one unit in the last place, where no sums are
        taken in another order.
    """

    torch_class: Any
    options: dict[str, Any]
    nearest: str
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    alone: tuple[int, ...] = (ALONE,)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    float64: float = FLOAT64_TOLERANCE
    float32: float = FLOAT32_TOLERANCE
    bfloat16: float = 2.0**-8


# Muon's Newton-Schulz iteration computes in bfloat16, whatever the parameter's type. Where rounding, or the order of a sum of
# products, moves a number over the border between two numbers of bfloat16, which are 2**-8 apart, the iteration makes 2**-6 of
# it at most: that much of one step, of which there are 100.
NEWTON_SCHULZ = 1e-3
# An optimizer that is added here is tested with all its options, and gets a row in the table.
ADAM = {"learning_rate": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}
TWINS = {
    "adadelta": Twin(
        torch.optim.Adadelta,
        {"learning_rate": 0.5, "rho": 0.8, "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
        "optax.adadelta(1.0)",
    ),
    "adafactor": Twin(
        torch.optim.Adafactor,
        {"learning_rate": 0.3, "beta2_decay": -0.3, "eps": (0.5, 5.0), "d": 1.7, "weight_decay": 0.4, "maximize": True},
        "optax.adafactor(1e-2)",
        shapes=tuple(shape for shape in SHAPES if shape != (0,)),  # PyTorch divides by the number of elements
        alone=(8, 8),
        dtypes=("float64", "float32", "bfloat16"),
        bfloat16=2.0**-6,
    ),
    "adagrad": Twin(
        torch.optim.Adagrad,
        {
            "learning_rate": 0.05,
            "lr_decay": 0.1,
            "weight_decay": 0.1,
            "initial_accumulator_value": 0.5,
            "eps": 1e-3,
            "maximize": True,
        },
        "optax.adagrad(1e-2)",
    ),
    "adam": Twin(
        torch.optim.Adam,
        ADAM | {"amsgrad": True, "decoupled_weight_decay": True},
        "optax.amsgrad(1e-3)",
        {"amsgrad": True},
    ),
    "adamax": Twin(torch.optim.Adamax, ADAM, "optax.adamax(2e-3)"),
    "adamw": Twin(torch.optim.AdamW, ADAM | {"amsgrad": True}, "optax.adamw(1e-3)"),
    "asgd": Twin(
        torch.optim.ASGD,
        {"learning_rate": 0.05, "lambd": 0.1, "alpha": 0.5, "t0": 10.0, "weight_decay": 0.1, "maximize": True},
        "optax.sgd(1e-2)",
    ),
    "muon": Twin(
        torch.optim.Muon,
        {
            "learning_rate": 0.02,
            "weight_decay": 0.0,
            "momentum": 0.5,
            "nesterov": False,
            "ns_coefficients": (2.0, -1.5, 0.5),
            "eps": 3.0,
            "ns_steps": 3,
            "adjust_lr_fn": "match_rms_adamw",
        },
        "optax.contrib.muon(1e-3)",
        shapes=((1, 5), (4, 4), (7, 3), (3, 6)),
        alone=(8, 8),
        dtypes=("float64", "float32", "bfloat16"),
        float64=NEWTON_SCHULZ,
        float32=NEWTON_SCHULZ,
        bfloat16=2.0**-6,
    ),
    "nadam": Twin(torch.optim.NAdam, ADAM | {"momentum_decay": 0.1, "decoupled_weight_decay": True}, "optax.nadam(2e-3)"),
    "radam": Twin(torch.optim.RAdam, ADAM | {"decoupled_weight_decay": True}, "optax.radam(1e-3, eps=1e-3)", {"eps": 1e-3}),
    "rmsprop": Twin(
        torch.optim.RMSprop,
        {
            "learning_rate": 0.002,
            "alpha": 0.9,
            "eps": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.5,
            "centered": True,
            "maximize": True,
        },
        "optax.rmsprop(1e-2)",
    ),
    "rprop": Twin(
        torch.optim.Rprop,
        {"learning_rate": 0.001, "etas": (0.4, 1.5), "step_sizes": (1e-3, 0.1), "maximize": True},
        "optax.rprop(1e-2)",
    ),
    "sgd": Twin(
        torch.optim.SGD,
        {"learning_rate": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "nesterov": True, "maximize": True},
        "optax.sgd(1e-3, momentum=0.9)",
        {"momentum": 0.9, "dampening": 0.3},
    ),
}
NAMES = list(TWINS)
OF_ANY_SHAPE = [name for name in NAMES if name != "muon"]


def singles(name: str) -> list[tuple[dict[str, Any], bool]]:
    """Sets of options, and whether they are injected: none, each that PyTorch takes alone, a schedule, many at once."""
    alone = [{key: value} for key, value in TWINS[name].options.items()]
    plain = [{}, *split(name, alone)[0], {"learning_rate": schedule}]
    return [(options, False) for options in plain] + [({}, True), (rich(name), True)]


def pairs(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The options two by two: those that PyTorch takes, and those that it refuses."""
    return split(name, [dict(pair) for pair in itertools.combinations(TWINS[name].options.items(), 2)])


def split(name: str, sets: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those that PyTorch takes, and those that it refuses."""
    taken, refused = [], []
    for each in sets:
        try:
            in_torch(name, each, [torch.zeros(TWINS[name].alone, requires_grad=True)])
        except ValueError:
            refused.append(each)
        else:
            taken.append(each)
    return taken, refused


def rich(name: str) -> dict[str, Any]:
    """Many options at once."""
    return {key: value for key, value in TWINS[name].options.items() if key not in ("nesterov", "decoupled_weight_decay")}


def in_torch(name: str, options: dict[str, Any], params: list[torch.Tensor]) -> tuple[Any, Any]:
    """PyTorch's optimizer, and the scheduler of its learning rate or None."""
    rate = options.get("learning_rate")
    named = {("lr" if key == "learning_rate" else key): value for key, value in options.items()}
    if callable(rate):
        named["lr"] = 1.0
    optimizer = TWINS[name].torch_class(params, **named)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate) if callable(rate) else None


def here(name: str, options: dict[str, Any], *, inject: bool = False) -> optax.GradientTransformationExtraArgs:
    """The optimizer of `funcgrad.torch_optim`."""
    make = getattr(torch_optim, name)
    return (optax.inject_hyperparams(make) if inject else make)(**options)


@dataclasses.dataclass
class Problem:
    """Two parameters, and their gradients in each of 100 steps, the parameters' elements among them exactly zero at times."""

    params: list[np.ndarray]
    grads: list[np.ndarray]


def problem(seed: str, dtype: str, num: int) -> Problem:
    """Random numbers, the same for the same `seed`, which begins with an optimizer's name; two parameters get random shapes."""
    twin = TWINS[seed.split(maxsplit=1)[0]]
    random = np.random.default_rng(zlib.crc32(seed.encode()))
    shapes = [twin.alone] if num == 1 else [twin.shapes[index] for index in random.integers(len(twin.shapes), size=num)]

    def normal(shape):
        real = random.normal(size=shape)
        return real + 1j * random.normal(size=shape) if dtype.startswith("complex") else real

    params = [normal(shape) for shape in shapes]
    grads = [normal((STEPS, *shape)) * (random.random((STEPS, *shape)) > 0.2) for shape in shapes]
    for grad in grads:
        grad[3::7] = 0
    # Both sides start from the same rounded numbers.
    rounded = lambda array: np.asarray(jnp.asarray(array, dtype))
    return Problem([rounded(param) for param in params], [rounded(grad) for grad in grads])


@functools.partial(jax.jit, static_argnums=0)
def begin(optimizers: tuple[Any, ...], params: list[Any]) -> list[Any]:
    """The first states of many runs."""
    return [optimizer.init(each) for optimizer, each in zip(optimizers, params, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 4))
def run_here(optimizers: tuple[Any, ...], params: list[Any], states: list[Any], grads: list[Any], pattern: Any) -> Any:
    """Many runs in one program.

    Returns:
      The parameters after each step, and the last state, for each run.
    """

    def some_steps(carry, part):
        params, states = carry
        passed = []
        for step, present in enumerate(pattern):
            for run, optimizer in enumerate(optimizers):
                given = [grad[step] if there else None for grad, there in zip(part[run], present, strict=True)]
                updates, states[run] = optimizer.update(given, states[run], params[run])
                params[run] = optax.apply_updates(params[run], updates)
            passed.append(list(params))
        return (params, states), jax.tree.map(lambda *arrays: jnp.stack(arrays), *passed)

    steps = jax.tree.leaves(grads)[0].shape[0]
    parts = jax.tree.map(lambda grad: grad.reshape(steps // len(pattern), len(pattern), *grad.shape[1:]), grads)
    (_, states), passed = jax.lax.scan(some_steps, (params, states), parts)
    return jax.tree.map(lambda array: array.reshape(steps, *array.shape[2:]), passed), states


def run_torch(
    name: str, options: dict[str, Any], given: Problem, dtype: str, pattern: Any, hook: Callable[..., None] | None = None
) -> tuple[list[np.ndarray], Any]:
    """PyTorch's parameters after each step, and its optimizer."""
    params = [to_torch(param, dtype).requires_grad_() for param in given.params]
    grads = [to_torch(grad, dtype) for grad in given.grads]
    optimizer, scheduler = in_torch(name, options, params)
    passed = [np.zeros((STEPS, *param.shape), wide(dtype)) for param in given.params]
    for step in range(STEPS):
        for param, grad, present in zip(params, grads, pattern[step % len(pattern)], strict=True):
            param.grad = grad[step].clone() if present else None
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        for kept, param in zip(passed, params, strict=True):
            kept[step] = as_numpy(param)
        if hook is not None:
            hook(step, optimizer, params)
    return passed, optimizer


def to_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.tensor(array.astype(wide(dtype))).to(DTYPES[dtype])


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype.itemsize == 2 else tensor).numpy()


def wide(dtype: str) -> Any:
    return np.complex128 if dtype.startswith("complex") else np.float64


def worst_difference(got: list[Any], want: list[np.ndarray], start: list[np.ndarray]) -> float:
    """Over parameters and steps, the norm of the difference over that of the parameter, then or at the start."""
    worst = 0.0
    for left, right, first in zip(got, want, start, strict=True):
        kind = np.result_type(right.dtype, np.float64)
        left, right, first = (np.asarray(array).astype(kind) for array in (left, right, first))
        rows = len(right)
        size = np.maximum(np.linalg.norm(right.reshape(rows, -1), axis=1), np.linalg.norm(first.ravel()))
        difference = np.linalg.norm((left - right).reshape(rows, -1), axis=1)
        assert np.isfinite(right).all()
        worst = max(worst, float(np.max(difference / np.where(size, size, 1), initial=0.0)))
        assert np.isfinite(worst)
    return worst


def compare(
    name: str, dtype: str, sets: list[tuple[dict[str, Any], bool]], pattern: Any = IN_TURNS
) -> tuple[list[float], list[float]]:
    """The worst differences of the parameters, and of the last state, for each set of options and whether it is injected."""
    optimizers = tuple(here(name, options, inject=inject) for options, inject in sets)
    problems = [problem(f"{name} {dtype} {index}", dtype, len(pattern[0])) for index in range(len(sets))]
    params = [[jnp.asarray(param) for param in each.params] for each in problems]
    passed, states = run_here(optimizers, params, begin(optimizers, params), [each.grads for each in problems], pattern)
    of_params, of_states = [], []
    for (options, injected), given, mine, state in zip(sets, problems, passed, states, strict=True):
        theirs, optimizer = run_torch(name, options, given, dtype, pattern)
        of_params.append(worst_difference(mine, theirs, given.params))
        exported = torch_optim.to_torch_state(state, given.params)
        of_states.append(difference_of_states(exported, optimizer, injected=injected))
    return of_params, of_states


def difference_of_states(got: dict[int, dict[str, np.ndarray]], optimizer: Any, *, injected: bool = False) -> float:
    """The worst difference of an entry, which must be the same ones."""
    want = optimizer.state_dict()["state"]
    assert sorted(got) == sorted(want)
    worst = 0.0
    for index, entry in want.items():
        # Where the momentum may be set while the steps run, there is a buffer for it.
        assert set(got[index]) - set(entry) <= ({"momentum_buffer"} if injected else set())
        for key, tensor in entry.items():
            array = as_numpy(tensor)[None]
            worst = max(worst, worst_difference([got[index][key][None]], [array], [0 * array + SMALLEST]))
    return worst
