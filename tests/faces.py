"""The same program in PyTorch, in the implicit face and in the explicit one: what the tests of the semantics share."""

import jax.numpy as jnp
import numpy as np
import torch

from funcgrad import stateful

# The same few operations in float32 in two libraries; Adam's square root and division among them.
TOLERANCE = 1e-5


def assert_same(*faces):
    """Each face is a list of gradients and parameters: None in the same places, else equal."""
    assert len(faces) > 1
    first = [_array(entry) for entry in faces[0]]
    for face in faces[1:]:
        entries = [_array(entry) for entry in face]
        assert [entry is None for entry in entries] == [entry is None for entry in first]
        for one, other in zip(first, entries, strict=True):
            if one is not None:
                assert one.shape == other.shape
                np.testing.assert_allclose(other, one, rtol=TOLERANCE, atol=TOLERANCE)


def _array(entry):
    if entry is None:
        return None
    if isinstance(entry, torch.Tensor):
        entry = entry.detach().clone()
        return entry.to(torch.float64).numpy() if entry.dtype == torch.bfloat16 else entry.numpy()
    return np.asarray(entry, np.complex128 if jnp.iscomplexobj(entry) else np.float64)


def leaf(value, **options):
    return torch.tensor(value, requires_grad=True, **options)


def parameter(value, dtype=None):
    return stateful.Parameter(jnp.asarray(value, dtype))
