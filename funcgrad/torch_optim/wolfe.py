"""The line search of PyTorch's L-BFGS: strong Wolfe conditions, by cubic interpolation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Fixed in PyTorch: its optimizer does not hand its own tolerance to the search.
SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9
TOLERANCE_CHANGE = 1e-9
EXTRAPOLATING, BRACKETED, FOUND = 0, 1, 2


class Point(NamedTuple):
    """A point on the line.

    Attributes:
      t: how far from the start, in parts of the direction, `[]`.
      loss: the value there, `[]`.
      grad: the gradient there, `[size]`.
      slope: the gradient along the direction, `[]`.
    """

    t: jax.Array
    loss: jax.Array
    grad: jax.Array
    slope: jax.Array


class _Search(NamedTuple):
    """What the search carries: the bracket's two points, the newest point, and where it stands."""

    ends: tuple[Point, Point]
    new: Point
    iteration: jax.Array
    status: jax.Array
    stuck: jax.Array


def strong_wolfe(
    evaluate: Callable[[jax.Array], Point], start: Point, direction: jax.Array, t: jax.Array, max_iterations: jax.Array
) -> tuple[Point, jax.Array]:
    """A step length under strong Wolfe conditions, found as PyTorch finds it.

    Args:
      evaluate: the point at `t`.
      start: the point at 0.
      direction: `[size]`.
      t: the first length to try.
      max_iterations: how many more lengths to try.

    Returns:
      The point taken, and how often `evaluate` was asked.
    """
    # A field that Python would hold as a number has the type of the others here.
    zero = jnp.zeros((), jnp.int32)
    search = _Search((start, start), evaluate(t), zero, jnp.asarray(EXTRAPOLATING, jnp.int32), jnp.asarray(False))
    search = _bracket(evaluate, start, search, max_iterations)
    # Without a bracket, the start and the last point are it.
    exhausted = search.iteration == max_iterations
    search = search._replace(ends=_choose(exhausted, (start, search.new), search.ends))
    search = _zoom(evaluate, start, search, direction, max_iterations)
    low, high = search.ends
    return _choose(low.loss <= high.loss, low, high), search.iteration + 1


def _bracket(evaluate: Callable[[jax.Array], Point], start: Point, search: _Search, max_iterations: jax.Array) -> _Search:
    """Longer and longer steps, until the conditions hold or two points have such a point between them."""

    def going(search: _Search) -> jax.Array:
        return (search.status == EXTRAPOLATING) & (search.iteration < max_iterations)

    def step(search: _Search) -> _Search:
        previous, new = search.ends[1], search.new
        too_high = _is_too_high(start, new) | ((search.iteration > 1) & (new.loss >= previous.loss))
        is_found = ~too_high & _is_flat(start, new)
        between = too_high | (~is_found & (new.slope >= 0))
        status = jnp.where(between, BRACKETED, jnp.where(is_found, FOUND, EXTRAPOLATING)).astype(jnp.int32)
        ends = _choose(is_found, (new, new), (previous, new))

        def extrapolate() -> tuple[Point, jax.Array]:
            t = _cubic(previous, new, new.t + 0.01 * (new.t - previous.t), new.t * 10)
            return evaluate(t), search.iteration + 1

        new, iteration = jax.lax.cond(status == EXTRAPOLATING, extrapolate, lambda: (new, search.iteration))
        return search._replace(ends=ends, new=new, iteration=iteration, status=status)

    return jax.lax.while_loop(going, step, search)


def _zoom(
    evaluate: Callable[[jax.Array], Point], start: Point, search: _Search, direction: jax.Array, max_iterations: jax.Array
) -> _Search:
    """The bracket made smaller, until the conditions hold at its lower end."""
    largest = jnp.max(jnp.abs(direction))

    def going(search: _Search) -> jax.Array:
        first, second = search.ends
        is_wide = ~(jnp.abs(second.t - first.t) * largest < TOLERANCE_CHANGE)
        return (search.status != FOUND) & (search.iteration < max_iterations) & is_wide

    def step(search: _Search) -> _Search:
        first, second = search.ends
        t, stuck = _inside(first, second, search.stuck)
        new = evaluate(t)
        first_is_low = first.loss <= second.loss
        low, high = _choose(first_is_low, (first, second), (second, first))
        is_worse = _is_too_high(start, new) | (new.loss >= low.loss)
        is_found = ~is_worse & _is_flat(start, new)
        crosses = ~is_found & (new.slope * (high.t - low.t) >= 0)
        # The new point takes the place of the higher one, or of the lower one, which then may take that of the higher one.
        low, high = _choose(is_worse, (low, new), (new, _choose(crosses, low, high)))
        ends = _choose(first_is_low, (low, high), (high, low))
        status = jnp.where(is_found, FOUND, search.status).astype(jnp.int32)
        return _Search(ends, new, search.iteration + 1, status, stuck)

    return jax.lax.while_loop(going, step, search)


def _inside(first: Point, second: Point, stuck: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next length to try in the bracket, and whether it is close to its border, where a second such is moved away."""
    least, most = jnp.minimum(first.t, second.t), jnp.maximum(first.t, second.t)
    t = _cubic(first, second, least, most)
    margin = 0.1 * (most - least)
    is_close = jnp.minimum(most - t, t - least) < margin
    moves = is_close & (stuck | (t >= most) | (t <= least))
    moved = jnp.where(jnp.abs(t - most) < jnp.abs(t - least), most - margin, least + margin)
    return jnp.where(moves, moved, t), is_close & ~moves


def _cubic(first: Point, second: Point, least: jax.Array, most: jax.Array) -> jax.Array:
    """The minimum of the cubic through two points, kept in bounds; their middle where there is none."""
    left, right = _choose(first.t <= second.t, (first, second), (second, first))
    # Over the points as they came: the rounding of a difference has a sign.
    d1 = first.slope + second.slope - 3 * (first.loss - second.loss) / (first.t - second.t)
    square = d1**2 - first.slope * second.slope
    d2 = jnp.sqrt(jnp.maximum(square, 0))
    position = right.t - (right.t - left.t) * ((right.slope + d2 - d1) / (right.slope - left.slope + 2 * d2))
    return jnp.where(square >= 0, jnp.minimum(jnp.maximum(position, least), most), (least + most) / 2)


def _is_too_high(start: Point, point: Point) -> jax.Array:
    return point.loss > start.loss + SUFFICIENT_DECREASE * point.t * start.slope


def _is_flat(start: Point, point: Point) -> jax.Array:
    return jnp.abs(point.slope) <= -CURVATURE * start.slope


def _choose(condition: jax.Array, left: Any, right: Any) -> Any:
    return jax.tree.map(lambda one, other: jnp.where(condition, one, other), left, right)
