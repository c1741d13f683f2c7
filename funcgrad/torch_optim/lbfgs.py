"""L-BFGS with PyTorch's rules: one update is a whole `step(closure)`, up to 20 iterations of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from funcgrad.torch_optim import arguments
from funcgrad.torch_optim.rule import gradients_of, nothing
from funcgrad.torch_optim.wolfe import Point, strong_wolfe

PyTree = Any
# PyTorch's: a pair of steps of less curvature is not kept.
LEAST_CURVATURE = 1e-10


class LBFGSState(NamedTuple):
    """State of `lbfgs`, under PyTorch's names; `[size]` is all parameters in one vector.

    Attributes:
      calls: of `update`, int32 `[]`, which a schedule is asked with.
      func_evals: evaluations of the loss so far, int32 `[]`.
      n_iter: iterations so far, int32 `[]`.
      d: the last direction, `[size]`.
      t: the last step length, `[]`.
      old_dirs: differences of gradients, `[history, size]`, the newest at `(added - 1) % history`.
      old_stps: the steps that made them, `[history, size]`.
      ro: one over the product of both, `[history]`.
      added: how many have been added so far, int32 `[]`.
      H_diag: the scale of the first guess of the inverse Hessian, `[]`.
      prev_flat_grad: the gradient at the start of the last iteration, `[size]`.
    """

    calls: jax.Array
    func_evals: jax.Array
    n_iter: jax.Array
    d: jax.Array
    t: jax.Array
    old_dirs: jax.Array
    old_stps: jax.Array
    ro: jax.Array
    added: jax.Array
    H_diag: jax.Array
    prev_flat_grad: jax.Array


class _Loop(NamedTuple):
    """What one `step(closure)` carries: the parameters, the loss and gradient there, and where it stands."""

    x: jax.Array
    loss: jax.Array
    grad: jax.Array
    state: LBFGSState
    iteration: jax.Array
    evaluations: jax.Array
    done: jax.Array


class _Options(NamedTuple):
    rate: jax.Array
    max_iter: Any
    max_eval: Any
    tolerance_grad: Any
    tolerance_change: Any
    searches: bool


def lbfgs(  # noqa: PLR0917 - PyTorch's order
    learning_rate: optax.ScalarOrSchedule = 1.0,
    max_iter: Any = 20,
    max_eval: Any = None,
    tolerance_grad: Any = 1e-7,
    tolerance_change: Any = 1e-9,
    history_size: int = 100,
    line_search_fn: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`torch.optim.LBFGS`: `update` is one `optimizer.step(closure)`.

    It goes from the gradient `g` in the direction `-H @ g`, with `H` the inverse Hessian that the last `history_size` changes
    of the gradient tell, by `learning_rate` (at the very first iteration by `learning_rate * min(1, 1 / sum(abs(g)))`), or with
    `line_search_fn="strong_wolfe"` by a length that fulfils the strong Wolfe conditions; and goes on so for `max_iter`
    iterations or until nothing changes any more.

    `update(grads, state, params, value=..., value_fn=...)` needs the loss, and the function of the parameters that gives it,
    which is the closure: `funcgrad.train_step` hands both. Call it inside `jax.jit`; it is a loop. As the gradients of all
    later iterations come from `value_fn`, no transformation of gradients can stand before it, but for the conjugate that
    complex parameters need (docs/torch_optim.md). A gradient that is None counts as zeros throughout the step, as in PyTorch.
    The history takes `2 * history_size` times the memory of the parameters.

    `optax.lbfgs` is another rule: one iteration an update, a history of 10, another line search.

    Args:
      learning_rate: a number or a schedule; the length of a step, or the first that the line search tries.
      max_iter: the most iterations of an update.
      max_eval: the most evaluations of the loss in an update, the one handed in included; None: `max_iter * 5 // 4`.
      tolerance_grad: stop where no element of the gradient is larger.
      tolerance_change: stop where neither a parameter nor the loss changes by more.
      history_size: how many changes of the gradient are kept.
      line_search_fn: None or `"strong_wolfe"`.

    Returns:
      The transformation.

    Raises:
      ValueError: an argument is out of its range; in `init`, where nothing can be trained; in `update`, where parameters,
        `value` or `value_fn` are missing.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from funcgrad.torch_optim.lbfgs import lbfgs
      >>> loss = lambda x: jnp.sum((x - jnp.array([1.0, 2.0])) ** 2)
      >>> optimizer, params = lbfgs(line_search_fn="strong_wolfe"), jnp.zeros(2)
      >>> @jax.jit
      ... def step(params, state):
      ...     value, grads = jax.value_and_grad(loss)(params)
      ...     updates, state = optimizer.update(grads, state, params, value=value, value_fn=loss)
      ...     return optax.apply_updates(params, updates), state
      >>> print(step(params, optimizer.init(params))[0].round(4))
      [1. 2.]

    Reference:
      `torch.optim.LBFGS <https://docs.pytorch.org/docs/stable/generated/torch.optim.LBFGS.html>`_; Nocedal and Wright,
      Numerical Optimization, chapter 7.
    """
    arguments.check_learning_rate(learning_rate)
    arguments.check("history_size", history_size, lambda size: size >= 1, "at least 1")
    if line_search_fn not in (None, "strong_wolfe"):
        raise ValueError(f"line_search_fn must be None or 'strong_wolfe'; got {line_search_fn!r}")
    max_eval = max_iter * 5 // 4 if max_eval is None else max_eval

    def init(params: PyTree) -> Any:
        leaves, history = _trained(params), int(history_size)
        if not any(leaf is not None and jnp.size(leaf) for leaf in leaves):
            raise ValueError("lbfgs needs at least one floating number to train; got none")

        vector = _flatten(leaves)

        def zeros(*shape: int) -> jax.Array:  # each its own, so that the state can be donated
            return jnp.zeros(shape, vector.dtype)

        return LBFGSState(
            calls=jnp.zeros((), jnp.int32),
            func_evals=jnp.zeros((), jnp.int32),
            n_iter=jnp.zeros((), jnp.int32),
            d=zeros(vector.size),
            t=zeros(),
            old_dirs=zeros(history, vector.size),
            old_stps=zeros(history, vector.size),
            ro=zeros(history),
            added=jnp.zeros((), jnp.int32),
            H_diag=jnp.ones((), vector.dtype),
            prev_flat_grad=zeros(vector.size),
        )

    def update(
        updates: PyTree, state: Any, params: PyTree = None, *, value: Any = None, value_fn: Any = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        if params is None or value is None or value_fn is None:
            raise ValueError("lbfgs needs more: call update(grads, state, params, value=loss, value_fn=loss_of_params)")
        grads, leaves = gradients_of(updates, params), _trained(params)
        treedef, x = jax.tree.structure(params), _flatten(leaves)
        rate = learning_rate(state.calls) if callable(learning_rate) else learning_rate
        rate = jnp.reshape(jnp.asarray(rate, x.dtype), ())
        options = _Options(rate, max_iter, max_eval, tolerance_grad, tolerance_change, line_search_fn is not None)
        trained = [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if leaf is not None]
        present = [(_size(leaf), grad is not None) for leaf, grad in trained]

        def evaluate(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            def loss_of(x: jax.Array) -> jax.Array:
                return value_fn(treedef.unflatten(_unflatten(x, leaves, jax.tree.leaves(params))))

            loss, grad = jax.value_and_grad(loss_of)(x)
            if not all(there for _, there in present):
                grad = jnp.where(jnp.concatenate([jnp.full(size, there) for size, there in present]), grad, 0)
            return loss.astype(x.dtype), grad

        dense = [jnp.zeros_like(leaf) if grad is None else jnp.asarray(grad, jnp.result_type(leaf)) for leaf, grad in trained]
        start = jnp.asarray(value, x.dtype), _flatten(dense).astype(x.dtype)
        new, state = _step(x, start, state, evaluate, options)
        changes = _unflatten(new - x, leaves, [nothing(leaf) for leaf in jax.tree.leaves(params)])
        return treedef.unflatten(changes), state._replace(calls=optax.safe_increment(state.calls))

    return optax.GradientTransformationExtraArgs(init, update)


def _step(
    x: jax.Array, loss_and_grad: tuple[jax.Array, jax.Array], state: LBFGSState, evaluate: Callable[..., Any], options: _Options
) -> tuple[jax.Array, LBFGSState]:
    """One `step(closure)`: the new parameters and state."""
    loss, grad = loss_and_grad
    one = jnp.ones((), jnp.int32)
    state = state._replace(func_evals=state.func_evals + 1)
    start = _Loop(x, loss, grad, state, one - 1, one, _is_small(grad, options))

    def going(loop: _Loop) -> jax.Array:
        return ~loop.done & (loop.iteration < options.max_iter)

    def iterate(loop: _Loop) -> _Loop:
        loop = loop._replace(iteration=loop.iteration + 1, state=_direction(loop.grad, loop.state, options))
        slope = _dot(loop.grad, loop.state.d)
        stalled = slope > -options.tolerance_change
        return jax.lax.cond(stalled, lambda: loop._replace(done=stalled), lambda: _move(loop, slope, evaluate, options))

    end = jax.lax.while_loop(going, iterate, start)
    return end.x, end.state


def _direction(grad: jax.Array, state: LBFGSState, options: _Options) -> LBFGSState:
    """The state with the last change of the gradient added to the history, and the next direction and step length."""
    n_iter = state.n_iter + 1
    is_first = n_iter == 1
    y, s = grad - state.prev_flat_grad, state.d * state.t
    ys = _dot(y, s)
    added = jnp.where(is_first, 0, state.added)
    keeps = ~is_first & (ys > LEAST_CURVATURE)
    place = added % len(state.ro)

    # Where nothing is kept, the row is written back: a condition would copy the whole history.
    def put(rows: jax.Array, row: jax.Array) -> jax.Array:
        return rows.at[place].set(jnp.where(keeps, row, rows[place]))

    state = state._replace(
        n_iter=n_iter,
        old_dirs=put(state.old_dirs, y),
        old_stps=put(state.old_stps, s),
        ro=put(state.ro, 1 / ys),
        added=added + keeps,
        H_diag=jnp.where(is_first, 1, jnp.where(keeps, ys / _dot(y, y), state.H_diag)),
        prev_flat_grad=grad,
    )
    inverse = 1 / jnp.sum(jnp.abs(grad))
    first_length = jnp.where(inverse < 1, inverse, 1) * options.rate  # Python's min, which passes over NaN
    return state._replace(d=_times_inverse_hessian(-grad, state), t=jnp.where(is_first, first_length, options.rate))


def _times_inverse_hessian(vector: jax.Array, state: LBFGSState) -> jax.Array:
    """The guess of the inverse Hessian times a vector: the two loops over the history."""
    history = len(state.ro)
    known = jnp.minimum(state.added, history)

    def row(index: jax.Array) -> jax.Array:  # of the pair with this age, the oldest being 0
        return (state.added - known + index) % history

    def backward(turn: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        vector, factors = carried
        place = row(known - 1 - turn)
        factor = _dot(state.old_stps[place], vector) * state.ro[place]
        return vector - factor * state.old_dirs[place], factors.at[place].set(factor)

    def forward(turn: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        vector, factors = carried
        place = row(turn)
        factor = _dot(state.old_dirs[place], vector) * state.ro[place]
        return vector + (factors[place] - factor) * state.old_stps[place], factors

    vector, factors = jax.lax.fori_loop(0, known, backward, (vector, jnp.zeros_like(state.ro)))
    return jax.lax.fori_loop(0, known, forward, (vector * state.H_diag, factors))[0]


def _move(loop: _Loop, slope: jax.Array, evaluate: Callable[..., Any], options: _Options) -> _Loop:
    """A step in the direction of `loop.state`, and whether it was the last one."""
    d, t, previous = loop.state.d, loop.state.t, loop.loss
    small = jnp.asarray(False)
    if options.searches:

        def on_line(t: jax.Array) -> Point:
            loss, grad = evaluate(loop.x + t * d)
            return Point(t, loss, grad, _dot(grad, d))

        start = Point(jnp.zeros_like(t), loop.loss, loop.grad, slope)
        point, asked = strong_wolfe(on_line, start, d, t, options.max_eval - loop.evaluations)
        t, loss, grad = point.t, point.loss, point.grad
        x, small = loop.x + t * d, _is_small(grad, options)
    else:
        x = loop.x + t * d
        # The loss after the last iteration is the next call's to tell.
        goes_on = loop.iteration != options.max_iter
        loss, grad = jax.lax.cond(goes_on, lambda: evaluate(x), lambda: (loop.loss, loop.grad))
        asked, small = goes_on.astype(jnp.int32), goes_on & _is_small(grad, options)
    evaluations = loop.evaluations + asked
    done = small | (evaluations >= options.max_eval) | (jnp.max(jnp.abs(d * t)) <= options.tolerance_change)
    done |= jnp.abs(loss - previous) < options.tolerance_change
    state = loop.state._replace(t=t, func_evals=loop.state.func_evals + asked)
    return _Loop(x, loss, grad, state, loop.iteration, evaluations, done)


def _is_small(grad: jax.Array, options: _Options) -> jax.Array:
    return jnp.max(jnp.abs(grad)) <= options.tolerance_grad


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    # Not a dot product, which some devices compute in fewer bits.
    return jnp.sum(left * right)


def _trained(params: PyTree) -> list[Any]:
    """The leaves that are floating or complex, None in the place of others."""
    return [leaf if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) else None for leaf in jax.tree.leaves(params)]


def _flatten(leaves: list[Any]) -> jax.Array:
    """The leaves that are not None in one real vector, `[size]`: a complex number is two real ones."""
    leaves = [jnp.asarray(leaf) for leaf in leaves if leaf is not None]
    pairs = [jnp.stack([leaf.real, leaf.imag], axis=-1) if jnp.iscomplexobj(leaf) else leaf for leaf in leaves]
    return jnp.concatenate(list(map(jnp.ravel, pairs)))


def _size(leaf: Any) -> int:
    """How many real numbers it is."""
    return jnp.size(leaf) * (2 if jnp.iscomplexobj(leaf) else 1)


def _unflatten(vector: jax.Array, leaves: list[Any], others: list[Any]) -> list[Any]:
    """The parts of `vector` in the shapes and types of `leaves`; where that is None, the one of `others`."""
    result, begin = [], 0
    for leaf, other in zip(leaves, others, strict=True):
        if leaf is None:
            result.append(other)
            continue
        size = _size(leaf)
        part = vector[begin : begin + size]
        part = jax.lax.complex(part[::2], part[1::2]) if jnp.iscomplexobj(leaf) else part
        result.append(part.reshape(jnp.shape(leaf)).astype(jnp.result_type(leaf)))
        begin += size
    return result
