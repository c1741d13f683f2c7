import jax
import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("funcgrad", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("funcgrad")


# LLVM's optimizations take half of the tests' time, and few tests ask for more than XLA's own: those marked `optimized`.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def optimization(request):
    """All optimizations, as users' programs have them, for a test that is marked so."""
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("optimized") is None)


@pytest.fixture
def x64():
    """Turns on 64-bit types for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="session")
def digits():
    """scikit-learn's digits, scaled to [0, 1]: images [1797, 64] float64, labels [1797] int64."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.asarray(images) / 16, np.asarray(labels)
