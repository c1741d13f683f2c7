"""Laws of the accumulator and of splitting, over random pytrees, dtypes and sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_identical
from hypothesis import given
from hypothesis import strategies as st

import funcgrad as fg
from funcgrad import microbatch

# Sums of up to 6 parts, each within +-100, are kept in float32, whatever the dtype of the parts.
ROUNDING = 1e-4
DTYPES = ["bfloat16", "float16", "float32", "complex64"]

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
leaves = st.one_of(st.tuples(st.sampled_from(DTYPES), shapes), st.none())
templates = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("abc"), children, min_size=1, max_size=3),
        st.tuples(children, children),
    ),
    max_leaves=5,
).map(lambda template: {"first": ("float32", (2,)), "rest": template})  # there is always something to train
weights = st.sampled_from([0.0, 0.25, 1.0, 3.0, 7.5])
seeds = st.integers(0, 2**32 - 1)


def is_leaf(entry):
    return entry is None or (isinstance(entry, tuple) and isinstance(entry[0], str))


def fill(template, seed, special=None):
    """A pytree of random arrays; `special` is put into one element in four."""
    generator = np.random.default_rng(seed)

    def make(entry):
        if entry is None:
            return None
        dtype, shape = entry
        values = generator.uniform(-100, 100, shape)
        if dtype == "complex64":
            values = values + 1j * generator.uniform(-100, 100, shape)
        if special is not None:
            values = np.where(generator.random(shape) < 0.25, special, values)
        return jnp.asarray(values, dtype)

    return jax.tree.map(make, template, is_leaf=is_leaf)


def folded(template, parts, special=None, **options):
    buffer = fg.zeros(fill(template, 0))
    for seed, weight in parts:
        buffer = fg.accumulate(buffer, fill(template, seed, special), weight, **options)
    return buffer


def assert_close(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=ROUNDING)


parts = st.lists(st.tuples(seeds, weights), min_size=1, max_size=6)


@given(templates, parts, st.tuples(seeds, seeds), st.sampled_from([-2.0, 0.5, 3.0]))
def test_accumulate_is_linear(template, before, pair, factor):
    """From any buffer: adding a + c b is adding a, and c times what b adds."""
    buffer = folded(template, before)
    left, right = (jax.tree.map(lambda leaf: leaf.astype(_wide(leaf)), fill(template, seed)) for seed in pair)
    combined = jax.tree.map(lambda one, other: one + factor * other, left, right)
    added = jax.tree.map(jnp.subtract, fg.total(fg.accumulate(buffer, right)), fg.total(buffer))
    separate = jax.tree.map(lambda one, two: one + factor * two, fg.total(fg.accumulate(buffer, left)), added)
    assert_close(fg.total(fg.accumulate(buffer, combined)), separate)


def _wide(leaf):
    return jnp.promote_types(leaf.dtype, jnp.float32)


@given(templates, parts, st.randoms(use_true_random=False))
def test_the_order_of_microbatches_does_not_matter(template, parts, random):
    shuffled = random.sample(parts, len(parts))
    assert_close(folded(template, parts), folded(template, shuffled))


@given(templates, parts, st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_any_grouping_by_merge_does_not_matter(template, parts, groups):
    whole = folded(template, parts)
    buffers = [
        folded(template, [part for part, group in zip(parts, groups, strict=False) if group == each]) for each in range(3)
    ]
    for merged in (
        fg.merge(fg.merge(buffers[0], buffers[1]), buffers[2]),
        fg.merge(buffers[2], fg.merge(buffers[0], buffers[1])),
    ):
        assert_close(merged, whole)
        assert (merged.count, merged.weight) == (whole.count, whole.weight)


@given(templates, parts, parts, st.sampled_from([None, np.nan, np.inf, -np.inf]))
def test_zero_grad_then_accumulate_is_a_fresh_start(template, before, after, special):
    used = fg.zero_grad(folded(template, before, special))
    fresh = fg.zeros(fill(template, 0))
    assert_identical(used, fresh)
    for seed, weight in after:
        used, fresh = (fg.accumulate(buffer, fill(template, seed), weight) for buffer in (used, fresh))
    assert_identical(used, fresh)


@given(templates, parts, seeds, st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_skipped_microbatch_is_an_exact_no_op(template, parts, seed, bad):
    buffer = folded(template, parts)
    grads = fill(template, seed)
    grads["first"] = grads["first"].at[0].set(bad)
    after = fg.accumulate(buffer, grads, 2.0, skip_nonfinite=True)
    assert after.skipped == buffer.skipped + 1
    assert_identical((after.grads, after.weight, after.count), (buffer.grads, buffer.weight, buffer.count))
    after = fg.accumulate(buffer, fill(template, seed), bad, skip_nonfinite=True)
    assert_identical((after.grads, after.weight, after.count), (buffer.grads, buffer.weight, buffer.count))


@given(templates, parts)
def test_skip_nonfinite_changes_nothing_where_all_is_finite(template, parts):
    assert_identical(folded(template, parts, skip_nonfinite=True), folded(template, parts))


@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from(microbatch.ORDERS),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_split_then_join_is_the_identity(size, number, order, other_axes, axis, extra):
    """`number` microbatches of `size` rows, and `extra` rows more in a smaller last one."""
    rows, axis, extra = size * number + min(extra, size - 1), min(axis, len(other_axes)), min(extra, size - 1)
    shape = (*other_axes[:axis], rows, *other_axes[axis:])
    array = np.arange(np.prod(shape)).reshape(shape)
    split = microbatch.split(rows, 1 if extra else number, size if extra else None, order)
    for source, indices in ((array, range(split.num)), (jnp.asarray(array), range(split.num)), (array, jnp.arange(split.num))):
        parts = [split.take(source, axis, index) for index in indices]
        parts += [split.take_tail(source, axis)] * (split.tail > 0)
        assert [part.shape[axis] for part in parts] == [size] * number + [extra] * (extra > 0)
        assert_identical(split.join(parts, axis), jnp.asarray(array))


@pytest.mark.parametrize("order", microbatch.ORDERS)
def test_orders(order):
    split = microbatch.split(7, 1, 3, order)
    parts = [split.take(np.arange(7), 0, index).tolist() for index in range(2)]
    assert parts == ([[0, 2, 4], [1, 3, 5]] if order == "strided" else [[0, 1, 2], [3, 4, 5]])
    assert split.take_tail(np.arange(7), 0).tolist() == [6]
