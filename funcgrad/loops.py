"""Loops over microbatches: scan, unroll, and which of them serves this computation on this device."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from funcgrad import checks
from funcgrad.trees import PyTree

LOOPS = ("auto", "scan", "unroll")
Loop = str | int


def check_loop(loop: Any) -> Loop:
    """The option `loop`, checked.

    Raises:
      ValueError: it is neither one of the names nor an integer of at least 1.
    """
    if isinstance(loop, str) or not isinstance(loop, int | np.integer) or isinstance(loop, bool):
        checks.check_choice("loop", loop, LOOPS, ", or an integer, the microbatches in a loop body")
        return loop
    return checks.positive_integer("loop", loop)


def fold_over(
    step: Callable[[Any], PyTree],
    init: Callable[[PyTree], PyTree],
    fold: Callable[[PyTree, PyTree, Any], PyTree],
    num: int,
    loop: Loop,
) -> tuple[PyTree, PyTree]:
    """Fold the outputs of `step(0)`, ..., `step(num - 1)` into one carry.

    Inside a trace (`jax.jit`, `jax.make_jaxpr`, ...) `step` is traced once, whatever the loop. Outside, where every
    operation runs at once, `"auto"` and `"unroll"` call it as plain Python would, so nothing is compiled anew at each
    call, and what a closure holds is read at each call.

    Args:
      step: `(index) -> output`, with `index` an int or a traced `[]` int32.
      init: `(output) -> carry`, from an output or its shapes: the carry before the first step.
      fold: `(carry, output, index) -> carry`, which keeps the carry's shapes and dtypes.
      num: how many steps, at least 1.
      loop: `"scan"`, `"unroll"`, `"auto"`, or how many steps a loop body holds.

    Returns:
      `(carry, like)`: the last carry, and an output or its shapes.
    """
    if not is_staging() and loop in ("auto", "unroll"):
        return _fold_eagerly(step, init, fold, num)
    closed, like = jax.make_jaxpr(step, return_shape=True)(jax.ShapeDtypeStruct((), jnp.int32))
    treedef = jax.tree.structure(like)
    run_flat = jax.extend.core.jaxpr_as_fun(closed)

    def body(carry: PyTree, index: Any) -> tuple[PyTree, None]:
        return fold(carry, treedef.unflatten(run_flat(index)), index), None

    if loop == "auto":
        loop = choose(closed, default_platform())
    carry = init(like)
    if loop == "unroll" or num == 1:
        for index in range(num):
            carry, _ = body(carry, np.int32(index))
        return carry, like
    unroll = min(num, 1 if loop == "scan" else int(loop))
    try:
        carry, _ = lax.scan(body, carry, jnp.arange(num, dtype=jnp.int32), unroll=unroll)
    except TypeError:
        # Inside jax.shard_map the zeros that a carry begins with are alike on all devices, and the sums over a device's own
        # rows are not, which are two types to a scan. After one step the carry has the second.
        carry, _ = body(carry, np.int32(0))
        carry, _ = lax.scan(body, carry, jnp.arange(1, num, dtype=jnp.int32), unroll=unroll)
    return carry, like


def choose(closed: jax.extend.core.ClosedJaxpr, platform: str) -> str:
    """What `loop="auto"` stands for inside a trace.

    A scan compiles once and keeps the activations of one microbatch. Only on CPU, and only for convolutions, is it slow:
    the passes that turn a convolution into a fast library call do not reach into loop bodies there, and it then takes 5 to
    20 times as long. An unrolled loop is fast, but compiles for as many times as long as there are microbatches, and on
    CPU needs the memory of the whole batch.
    """
    return "unroll" if platform == "cpu" and holds_convolution(closed.jaxpr) else "scan"


def holds_convolution(jaxpr: jax.extend.core.Jaxpr) -> bool:
    """Whether `jaxpr`, or one nested in it, convolves."""
    return any(
        eqn.primitive.name == "conv_general_dilated" or any(map(holds_convolution, _inner_jaxprs(eqn.params)))
        for eqn in jaxpr.eqns
    )


def is_staging() -> bool:
    """Whether operations are being recorded (`jax.jit`, `lax.scan`, ...) and not run at once."""
    return isinstance(jnp.zeros(()), Tracer)


def default_platform() -> str:
    """The platform on which a computation runs that says nothing else: "cpu", "gpu", "tpu"."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _fold_eagerly(step: Any, init: Any, fold: Any, num: int) -> tuple[PyTree, PyTree]:
    output = step(0)
    carry = fold(init(output), output, 0)
    for index in range(1, num):
        output = step(index)
        carry = fold(carry, output, index)
    return carry, output


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[jax.extend.core.Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jax.extend.core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jax.extend.core.Jaxpr):
                yield item
