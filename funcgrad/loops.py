"""Loops over microbatches: scan, unroll, and which of them serves this computation on this device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from funcgrad import checks, trees
from funcgrad.trees import PyTree
from funcgrad.work import arithmetic, holds_convolution, holds_loop, live_bytes, output_bytes

LOOPS = ("auto", "scan", "unroll", "ordered")
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


class Fold(NamedTuple):
    """What a loop does with the outputs of its steps.

    Attributes:
      init: `(output) -> carry`, from an output or its shapes: the carry before the first step.
      add: `(carry, output, index) -> carry`, which keeps the carry's shapes and dtypes.
      handed_on: `(carry) -> input`: what of the carry the next step sees.
    """

    init: Callable[[PyTree], PyTree]
    add: Callable[[PyTree, PyTree, Any], PyTree]
    handed_on: Callable[[PyTree], PyTree] = lambda carry: None


def fold_over(
    step: Callable[[PyTree, Any], PyTree], first: PyTree, fold: Fold, num: int, loop: Loop, *, in_turn: bool = False
) -> tuple[PyTree, PyTree]:
    """Fold the outputs of `num` steps into one carry.

    Inside a trace (`jax.jit`, `jax.make_jaxpr`, ...) `step` is traced once, whatever the loop. Outside, where every
    operation runs at once, it is called as plain Python would, but for `"scan"` and integers: so nothing is compiled anew at
    each call, and what a closure holds is read at each call.

    Args:
      step: `(input, index) -> output`, with `index` an int or a traced `[]` int32.
      first: the first step's input; those of the others are what `fold.handed_on` gives.
      fold: what becomes of the outputs.
      num: how many steps, at least 1.
      loop: `"scan"`, `"unroll"`, `"ordered"` (unrolled, but in turn), `"auto"`, or how many steps a loop body holds.
      in_turn: as for `choose`.

    Returns:
      `(carry, like)`: the last carry, and an output or its shapes.
    """
    if not is_staging() and loop in ("auto", "unroll", "ordered"):
        return _fold_eagerly(step, first, fold, num)
    recorded: dict[Any, tuple[Any, Any]] = {}

    def record(entering: PyTree, index: Any) -> tuple[Any, Any]:
        """The step as a computation, and its output's shapes: once for each type of what enters it, of which there is one.

        But inside jax.shard_map the first may be alike on all devices, and what the first step hands on is not.
        """
        kinds = tuple(map(jax.typeof, (*jax.tree.leaves(entering), index)))
        if kinds not in recorded:
            index = index if isinstance(index, Tracer) else jax.ShapeDtypeStruct((), jnp.int32)
            recorded[kinds] = jax.make_jaxpr(step, return_shape=True)(entering, index)
        return recorded[kinds]

    closed, like = record(first, np.int32(0))

    def body(carry: PyTree, index: Any) -> tuple[PyTree, None]:
        entering = fold.handed_on(carry)
        recorded_step, shapes = record(entering, index)
        flat = jax.extend.core.jaxpr_as_fun(recorded_step)(*jax.tree.leaves(entering), index)
        return fold.add(carry, jax.tree.structure(shapes).unflatten(flat), index), None

    if loop == "auto":
        loop = choose(closed, default_platform(), num, in_turn=in_turn)
    carry = fold.init(like)
    if loop in ("unroll", "ordered") or num == 1:
        for index in range(num):
            in_order = loop == "ordered" and index > 0
            carry, _ = body(carry, np.int32(index) + _zero_after(carry) if in_order else np.int32(index))
        return carry, like
    unroll = min(num, 1 if loop == "scan" else int(loop))
    try:
        carry, _ = lax.scan(body, carry, jnp.arange(num, dtype=jnp.int32), unroll=unroll)
    except (TypeError, ValueError):
        # Inside jax.shard_map the zeros that a carry begins with are alike on all devices, and the sums over a device's own
        # rows are not, which are two types to a scan. After one step the carry has the second.
        carry, _ = body(carry, np.int32(0))
        carry, _ = lax.scan(body, carry, jnp.arange(1, num, dtype=jnp.int32), unroll=unroll)
    return carry, like


# More microbatches than this are not unrolled by themselves: each is compiled anew, and the time for that adds up.
MAX_UNROLLED = 32

# Fewer floating-point operations in a microbatch than this, and calling its program would take longer than running it.
MIN_WORK_OF_A_CALL = 2e6

# With no more microbatches than this, and fewer operations in each, a step of several programs takes notably longer than one
# program: some 0.3 ms, where a microbatch takes less than about 10.
FEW_CALLS = 8
SMALL_WORK = 1e9

# No more microbatches than this may all stand in one loop body.
FEW_SIDE_BY_SIDE = 8

# Bytes that nobody misses.
SMALL_MEMORY = 16 * 2**20


def choose(closed: jax.extend.core.ClosedJaxpr, platform: str, num: int, *, in_turn: bool = False) -> Loop:
    """What `loop="auto"` stands for inside a trace, for `num` microbatches of the computation `closed`.

    Args:
      closed: the computation of one microbatch.
      platform: where it runs.
      num: how many there are.
      in_turn: whether the memory of a scan counts for more than the time.

    A scan compiles once and keeps the activations of one microbatch. On CPU it can be slow, for two reasons.

    Convolutions: the passes that turn them into fast library calls do not reach into loop bodies, and they take 5 to 10 times
    as long there. Unrolled microbatches are fast, because XLA on CPU computes them side by side; for the same reason they need
    the memory of the whole batch, and they compile for as many times as long as there are microbatches. `"ordered"` gives the
    memory of a scan for up to 1.4 times the time (see `_zero_after`); `train_step` has both (see `microbatches_a_call`).

    Small microbatches: each time around, all sums are read and written, and operations that are too small for all cores wait
    for each other. Two microbatches in a loop body save half of the one, and run beside each other (a multilayer perceptron
    takes .83 to .93 times as long, a transformer with two rows in a microbatch .82), four of them, or all of a few, save some
    percent more; but not where the loss has a loop itself, a recurrent network (up to 1.28). Each costs the memory of one
    microbatch more: too much where that is more than 16 MiB, or where all but the first need more than 32 MiB. With `in_turn`
    there are two at most, where one needs less than twice its results, the gradients. Figures: benchmarks/README.md.
    """
    if platform != "cpu":
        return "scan"
    jaxpr = closed.jaxpr
    if holds_convolution(jaxpr):
        return ("ordered" if in_turn else "unroll") if num <= MAX_UNROLLED else "scan"
    if holds_loop(jaxpr):
        return "scan"
    if in_turn:
        return 2 if _gradients_outweigh(jaxpr) else "scan"
    live = live_bytes(jaxpr)
    if live > SMALL_MEMORY:
        return "scan"
    most = num if num <= FEW_SIDE_BY_SIDE else 4
    return most if (most - 1) * live <= 2 * SMALL_MEMORY else 2


def microbatches_a_call(closed: jax.extend.core.ClosedJaxpr, platform: str, num: int) -> int:
    """How many microbatches a program should hold that a step, which stands in no trace, calls again and again; 0: one of all.

    Such a loop, `loop="host"`, has the memory of a scan, compiles once whatever the number of microbatches, and reaches
    convolutions, so it is the best form for these on CPU. Without them a scan is as fast or faster there, and on accelerators
    it keeps the device busy without the host. There are two in a call where there would be two in a loop body, which halves
    what the calls cost. A call costs some 30 microseconds, too much only for very small microbatches; and for a few small ones,
    one program in the `"ordered"` form is faster still (.93 and .95 times as long for the convolutional network of the
    benchmarks, 2 and 8 microbatches) and compiles as fast.
    """
    jaxpr = closed.jaxpr
    least = MIN_WORK_OF_A_CALL if num > FEW_CALLS else SMALL_WORK
    if platform != "cpu" or not holds_convolution(jaxpr) or arithmetic(jaxpr) < least:
        return 0
    return 2 if num % 2 == 0 and not holds_loop(jaxpr) and _gradients_outweigh(jaxpr) else 1


def _gradients_outweigh(jaxpr: jax.extend.core.Jaxpr) -> bool:
    """Whether a second microbatch beside the first costs little memory: less than the gradients, the results, and 16 MiB."""
    # The results are alive, too, so twice their bytes leave as much for the rest.
    return live_bytes(jaxpr) <= min(SMALL_MEMORY, 2 * output_bytes(jaxpr))


def is_staging() -> bool:
    """Whether operations are being recorded (`jax.jit`, `lax.scan`, ...) and not run at once."""
    return isinstance(jnp.zeros(()), Tracer)


def default_platform() -> str:
    """The platform on which a computation runs that says nothing else: "cpu", "gpu", "tpu"."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _fold_eagerly(step: Any, first: PyTree, fold: Fold, num: int) -> tuple[PyTree, PyTree]:
    output = step(first, 0)
    carry = fold.add(fold.init(output), output, 0)
    for index in range(1, num):
        output = step(fold.handed_on(carry), index)
        carry = fold.add(carry, output, index)
    return carry, output


def _zero_after(carry: PyTree) -> jax.Array:
    """An int32 zero, `[]`, that XLA knows only once all of `carry` is computed.

    Added to the index of the next microbatch, it keeps the microbatches of an unrolled loop in order. Without it, XLA on CPU
    computes them side by side, and they need the memory of the whole batch (measured with jax 0.10.2, 8 microbatches of a
    transformer: 231 MB of temporary memory, a scan 31 MB, with this zero 32 MB; an `optimization_barrier` changes nothing).
    It reads one number of each leaf, and asks whether their sum is NaN and positive, which is never so.
    tests/test_memory_use.py guards it.
    """
    floating = [leaf for leaf in jax.tree.leaves(carry) if trees.is_differentiable(leaf) and leaf.size]
    firsts = [jnp.real(leaf[(0,) * leaf.ndim]).astype(jnp.float32) for leaf in floating]
    total = sum(firsts, jnp.zeros((), jnp.float32))
    return (jnp.isnan(total) & (total > 0)).astype(jnp.int32)
