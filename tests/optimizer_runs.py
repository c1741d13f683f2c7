"""Runs of an optimizer over given gradients, here and in PyTorch, for tests that compare them."""

import contextlib

import jax
import numpy as np
import optax
import torch


def gradients(shapes, steps, seed=0):
    """Gradients of each leaf, `[steps, *shape]`, some of them exactly zero, and the parameters to begin with.

    Whole leaves are zero at some steps, single elements at others, and the first leaf's first gradient is.
    """
    rng = np.random.default_rng(seed)
    shapes = dict(sorted(shapes.items()))  # JAX's order, in PyTorch too
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    grads = {}
    for index, (name, shape) in enumerate(shapes.items()):
        values = rng.normal(size=(steps, *shape)) * rng.lognormal(size=(steps,) + (1,) * len(shape))
        values[(np.arange(steps) + index) % 11 == 0] = 0.0
        grads[name] = values * (rng.random(values.shape) > 0.1)
    return params, grads


@contextlib.contextmanager
def one_thread():
    """PyTorch without its threads, which wait for each other longer than small tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def torch_run(make, params, grads, absent=None, dtype=np.float64):
    """The parameters after all steps of `make(parameters)`.

    Args:
      make: gives an optimizer of PyTorch.
      params, grads: as `gradients` gives them.
      absent: `[steps]` booleans: when the last leaf has no gradient.
      dtype: of all numbers.
    """
    leaves = {name: torch.tensor(np.asarray(value, dtype), requires_grad=True) for name, value in params.items()}
    optimizer = make(list(leaves.values()))
    last = max(leaves)
    with one_thread():
        for step in range(len(grads[last])):
            for name, leaf in leaves.items():
                is_absent = absent is not None and absent[step] and name == last
                leaf.grad = None if is_absent else torch.tensor(np.asarray(grads[name][step], dtype))
            optimizer.step()
    return {name: leaf.detach().numpy() for name, leaf in leaves.items()}


def our_run(optimizer, params, grads, absent):
    """The same here, traced: a scan over the steps."""
    last = max(params)  # of JAX's order, by name

    def step(carried, now):
        grads, is_absent = now
        without = {name: None if name == last else grad for name, grad in grads.items()}

        def advance(grads):
            params, state = carried
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.cond(is_absent, lambda: advance(without), lambda: advance(grads)), None

    return jax.lax.scan(step, (params, optimizer.init(params)), (grads, absent))[0][0]
