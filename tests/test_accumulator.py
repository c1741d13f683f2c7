import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_identical
from jax.sharding import Mesh, PartitionSpec

import funcgrad as fg
from funcgrad import accumulator

PARAMS = {"w": jnp.arange(3.0), "b": jnp.array(1.0), "steps": 3, "none": None}
GRADS = {"w": jnp.arange(3.0), "b": jnp.array(2.0), "steps": None, "none": None}


class TestZeros:
    @pytest.mark.parametrize(
        ("own", "asked", "want"),
        [
            ("bfloat16", None, "float32"),
            ("float16", None, "float32"),
            ("float8_e4m3fn", None, "float32"),
            ("float32", None, "float32"),
            ("complex64", None, "complex64"),
            ("float32", "bfloat16", "bfloat16"),
            ("float16", jnp.float16, "float16"),
            ("complex64", "float32", "complex64"),
            ("complex64", "bfloat16", "complex64"),
            ("complex64", "complex64", "complex64"),
        ],
    )
    def test_dtypes(self, own, asked, want):
        buffer = fg.zeros(jnp.ones((2, 3), own), dtype=asked)
        assert (buffer.grads.dtype, buffer.grads.shape) == (want, (2, 3))
        assert (buffer.weight.dtype, buffer.weight.shape) == ("float32", ())

    @pytest.mark.parametrize(
        ("own", "asked", "want", "weight"),
        [
            ("float64", None, "float64", "float64"),
            ("complex128", None, "complex128", "float64"),
            ("float32", "float64", "float64", "float64"),
            ("complex64", "float64", "complex128", "float64"),
            ("float64", "float32", "float32", "float32"),
            ("float32", None, "float32", "float32"),
        ],
    )
    def test_dtypes_in_64_bits(self, x64, own, asked, want, weight):
        buffer = fg.zeros(jnp.ones(2, own), dtype=asked)
        assert (buffer.grads.dtype, buffer.weight.dtype) == (want, weight)

    def test_structure(self):
        buffer = fg.zeros(PARAMS)
        assert jax.tree.map(np.shape, buffer.grads) == {"w": (3,), "b": (), "steps": None, "none": None}
        assert (buffer.count, buffer.skipped, buffer.compensation) == (0, 0, None)
        assert (buffer.count.dtype, buffer.skipped.dtype) == (jnp.int32, jnp.int32)
        assert fg.zeros({"w": jnp.ones(2), "v": jnp.ones(2)}, trainable={"w": True, "v": False}).grads["v"] is None

    def test_shapes_are_enough(self):
        buffer = fg.zeros({"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16)})
        assert_identical(buffer.grads, {"w": jnp.zeros(3)})


class TestBufferIsData:
    """A pytree that goes through JAX's transformations, and through pickle in the middle of a window."""

    def test_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            fg.zeros(1.0).count = 3

    def test_scan_with_jit(self):
        rows = jnp.arange(12.0).reshape(4, 3)
        grads = {"w": rows, "b": jnp.arange(4.0), "steps": None, "none": None}

        @jax.jit
        def run(buffer, grads):
            return jax.lax.scan(lambda buffer, grad: (fg.accumulate(buffer, grad), None), buffer, grads)[0]

        buffer = run(fg.zeros(PARAMS), grads)
        assert_identical(fg.total(buffer)["w"], rows.sum(0))
        assert (fg.mean(buffer)["b"], buffer.count) == (1.5, 4)

    def test_shard_map(self):
        mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

        def run(buffer, rows):
            buffer = fg.accumulate(buffer, rows.sum(), rows.size)
            return jax.tree.map(lambda leaf: jax.lax.psum(leaf, "data"), buffer)

        sharded = jax.shard_map(run, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec())
        assert fg.mean(jax.jit(sharded)(fg.zeros(0.0), jnp.arange(4.0))) == 1.5

    def test_a_donated_buffer_is_used_again(self):
        buffer = fg.zeros({"w": jnp.ones(1000)})
        pointer = buffer.grads["w"].unsafe_buffer_pointer()
        added = jax.jit(fg.accumulate, donate_argnums=0)(buffer, {"w": jnp.ones(1000)})
        assert buffer.grads["w"].is_deleted()
        assert added.grads["w"].unsafe_buffer_pointer() == pointer

    def test_pickle(self):
        buffer = fg.accumulate(fg.zeros(PARAMS), GRADS, 2.0)
        restored = pickle.loads(pickle.dumps(buffer))
        assert_identical(fg.accumulate(restored, GRADS), fg.accumulate(buffer, GRADS))


class TestVerbs:
    def test_none_adds_nothing(self):
        """A parameter that one microbatch did not use has a gradient for the window all the same."""
        buffer = fg.accumulate(fg.zeros(PARAMS), GRADS)
        buffer = fg.accumulate(buffer, {**GRADS, "w": None})
        assert_identical(fg.total(buffer)["w"], GRADS["w"])
        assert fg.mean(buffer)["b"] == 2.0

    @pytest.mark.parametrize("weight", [2, 2.0, np.float32(2), jnp.array(2), np.array(2, np.int64), True + True])
    def test_weights_of_any_type(self, weight):
        buffer = fg.accumulate(fg.zeros(1.0), 3.0 * jnp.ones(()), weight)
        assert (fg.mean(buffer), buffer.weight.dtype) == (1.5, jnp.float32)

    def test_numbers_are_gradients(self):
        assert fg.mean(fg.accumulate(fg.zeros(1.0), 3.0)) == 3.0

    def test_mean_in_low_precision_divides_in_float32(self):
        """A weight of 257 would round to 256, and the mean to 2."""
        buffer = fg.accumulate(fg.zeros(jnp.ones(()), dtype=jnp.bfloat16), jnp.array(512.0), weight=257)
        assert (fg.mean(buffer), fg.mean(buffer).dtype) == (1.9921875, jnp.bfloat16)

    def test_negative_weights_divide_by_themselves(self):
        assert fg.mean(fg.accumulate(fg.zeros(1.0), jnp.array(3.0), -2.0)) == -1.5

    def test_merge_adds_counts(self):
        bad = fg.accumulate(fg.zeros(1.0), jnp.array(np.nan), skip_nonfinite=True)
        good = fg.accumulate(fg.zeros(1.0), jnp.array(6.0), 3)
        merged = fg.merge(bad, good)
        assert (fg.mean(merged), merged.weight, merged.count, merged.skipped) == (2.0, 3, 1, 1)

    def test_all_finite_looks_at_every_leaf(self):
        assert accumulator.all_finite({"a": jnp.ones(3), "n": jnp.arange(3), "k": jax.random.key(0)}, 1.0)
        assert not accumulator.all_finite({"a": jnp.ones(3)}, jnp.inf)
        assert not accumulator.all_finite({"a": jnp.ones(3), "b": jnp.array([1, complex(0, np.nan)])})
        assert accumulator.all_finite({})
