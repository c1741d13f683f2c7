import jax
import jax.numpy as jnp
import numpy as np
import pytest

from funcgrad import trees

TREE = {"a": jnp.ones((2, 3)), "b": [None, 3, True], "c": ("text", jnp.sin), "k": jax.random.key(0)}


@pytest.mark.parametrize(
    ("leaf", "dtype", "array", "differentiable", "text"),
    [
        (np.ones(2), "float32", True, True, "float32[2]"),  # x64 is off
        (np.ones((2, 3), np.float16), "float16", True, True, "float16[2,3]"),
        (jnp.ones((), jnp.bfloat16), "bfloat16", True, True, "bfloat16[]"),
        (np.float64(1), "float32", True, True, "float32[]"),
        (1.5, "float32", False, True, "float32[]"),
        (1j, "complex64", False, True, "complex64[]"),
        (3, "int32", False, False, "int32[]"),
        (True, "bool", False, False, "bool[]"),
        (jax.ShapeDtypeStruct((4,), jnp.float32), "float32", True, True, "float32[4]"),
        (np.zeros(2, jax.dtypes.float0), jax.dtypes.float0, True, False, None),
        (jax.random.key(0), jax.random.key(0).dtype, True, False, "key<fry>[]"),
        ("text", None, False, False, "str"),
        (np.str_("text"), None, False, False, "str_"),
        (np.array(["text"]), None, False, False, "ndarray"),
        (jnp.sin, None, False, False, None),
        (np.dtype("float32"), None, False, False, None),
    ],
)
def test_leaves(leaf, dtype, array, differentiable, text):
    assert trees.dtype_of(leaf) == dtype
    assert trees.is_array(leaf) == array
    assert trees.is_differentiable(leaf) == differentiable
    assert text is None or trees.describe(leaf) == text


def test_keys():
    assert trees.is_key(jax.random.key(0))
    assert trees.is_key(jax.random.split(jax.random.key(0), 3))
    assert not trees.is_key(jax.random.PRNGKey(0))
    assert not trees.is_key("text")


def test_names():
    names = [name for name, _ in trees.leaves_with_names(TREE, "tree")]
    assert names == ["tree['a']", "tree['b'][1]", "tree['b'][2]", "tree['c'][0]", "tree['c'][1]", "tree['k']"]
    assert "tree['b'][0]" in dict(trees.leaves_with_names(TREE, "tree", none_is_leaf=True))


def test_partition_then_combine_is_the_identity():
    mask = [True, False, True, False, True, False]
    chosen, rest = trees.partition(TREE, mask)
    assert [leaf is None for leaf in (chosen["b"][1], rest["a"], rest["c"][1], chosen["k"])] == [True] * 4
    joined = trees.combine(chosen, rest)
    assert jax.tree.structure(joined) == jax.tree.structure(TREE)
    assert all(one is other for one, other in zip(jax.tree.leaves(joined), jax.tree.leaves(TREE), strict=True))


def test_prefixes_are_spread_as_by_vmap():
    assert trees.broadcast_prefix(0, TREE, "axes") == [0] * 6
    prefix = {"a": 0, "b": None, "c": (1, 2), "k": 3}
    assert trees.broadcast_prefix(prefix, TREE, "axes") == [0, None, None, 1, 2, 3]
    with pytest.raises(
        ValueError,
        match=r"axes must be one entry, or a pytree prefix with an entry for each of \['a'\], \['b'\]\[1\].*; got \[0\]",
    ):
        trees.broadcast_prefix([0], TREE, "axes")


def test_sums_are_kept_at_least_in_float32(x64):
    wide = [trees.at_least_float32(dtype) for dtype in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")]
    assert wide == ["float32", "float32", "float32", "float64", "complex64", "complex128"]
    assert [trees.real_dtype(dtype) for dtype in ("bfloat16", "complex64", "complex128")] == ["bfloat16", "float32", "float64"]


def test_cast_like():
    cast = trees.cast_like(
        {"a": jnp.ones(2), "b": None, "c": jnp.ones(())}, {"a": jnp.ones(2, jnp.float16), "b": None, "c": 1.0}
    )
    assert (cast["a"].dtype, cast["b"], cast["c"].dtype) == (jnp.float16, None, jnp.float32)


def test_structures():
    trees.check_same_structure({"a": 1, "b": None}, {"a": None, "b": 2}, "params", "grads")
    with pytest.raises(ValueError, match=r"grads must have the structure of params: missing \['b'\]\[1\]; unexpected \['c'\]"):
        trees.check_same_structure({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1], "c": 2}, "params", "grads")
    with pytest.raises(ValueError, match=r"grads must have the structure of params: expected PyTreeDef.*, got PyTreeDef"):
        trees.check_same_structure([1, 2], (1, 2), "params", "grads")
