"""What is compared: a training step with Adam in every form that a user would write or pick."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import optax

import funcgrad as fg

LEARNING_RATE = 1e-3
HAND_WRITTEN = ("scan", "unroll", "stream")


class Contender(NamedTuple):
    """One form of the step.

    Attributes:
      run: makes one step and returns what has to be waited for.
      temporary: gives the bytes of temporary memory, from the compiler; None where there is no telling.
    """

    run: Callable[[], Any]
    temporary: Callable[[], int] | None = None


def jax_contenders(model: models.Model, num: int) -> dict[str, Callable[[], Contender]]:
    """All forms in JAX, each to be made when it is wanted."""
    return {
        "full batch": functools.partial(_jitted, model, jax.value_and_grad(models.mean_loss(model.loss_fn))),
        "scan": functools.partial(_jitted, model, models.hand_written_scan(model.loss_fn, num)),
        "unroll": functools.partial(_jitted, model, _unrolled(model.loss_fn, num)),
        "stream": functools.partial(_stream, model, num),
        "optax.MultiSteps": functools.partial(_multi_steps, model, num),
        "funcgrad in jit": functools.partial(_jitted, model, fg.value_and_grad(model.loss_fn, num_microbatches=num)),
        "train_step": functools.partial(_train_step, model, num),
        "micro_steps": functools.partial(_micro_steps, model, num),
    }


def _jitted(model: models.Model, value_and_grad: Callable[..., Any]) -> Contender:
    """A step with this gradient function in the user's own jit, which reuses parameters and optimizer state."""
    optimizer = optax.adam(LEARNING_RATE)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.tree.map(jnp.copy, model.params)
    held = [params, optimizer.init(params)]

    def run() -> Any:
        held[0], held[1], loss = step(*held, model.batch)
        return held, loss

    return Contender(run, lambda: _temporary(step.lower(*held, model.batch)))


def _unrolled(loss_fn: Callable[..., Any], num: int) -> Callable[..., Any]:
    """A Python loop over strided microbatches, as a user would write it."""
    total = models.total_loss(loss_fn)

    def value_and_grad(params: Any, batch: Any) -> Any:
        sums = None
        for index in range(num):
            microbatch = jax.tree.map(lambda leaf, index=index: leaf[index::num], batch)
            (value, weight), grads = jax.value_and_grad(total, has_aux=True)(params, microbatch)
            new = (grads, value, weight)
            sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
        assert sums is not None
        grads, value, weight = sums
        return value / weight, jax.tree.map(lambda grad: grad / weight, grads)

    return value_and_grad


def _stream(model: models.Model, num: int) -> Contender:
    """Microbatches driven from the host by hand: a donated sum, then the update."""
    optimizer, total = optax.adam(LEARNING_RATE), models.total_loss(model.loss_fn)

    @functools.partial(jax.jit, donate_argnums=1)
    def add(params: Any, sums: Any, microbatch: Any) -> Any:
        (value, weight), grads = jax.value_and_grad(total, has_aux=True)(params, microbatch)
        return jax.tree.map(jnp.add, sums, (grads, value, weight))

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(params: Any, opt_state: Any, sums: Any) -> Any:
        grads, value, weight = sums
        updates, opt_state = optimizer.update(jax.tree.map(lambda grad: grad / weight, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.tree.map(jnp.zeros_like, sums), value / weight

    params = jax.tree.map(jnp.copy, model.params)
    held = [params, optimizer.init(params), (jax.tree.map(jnp.zeros_like, params), jnp.float32(0), jnp.float32(0))]
    microbatches = _microbatches(model, num)

    def run() -> Any:
        for microbatch in microbatches:
            held[2] = add(held[0], held[2], microbatch)
        held[0], held[1], held[2], loss = update(*held)
        return held, loss

    return Contender(
        run, lambda: max(_temporary(add.lower(held[0], held[2], microbatches[0])), _temporary(update.lower(*held)))
    )


def _multi_steps(model: models.Model, num: int) -> Contender:
    optimizer, mean = optax.MultiSteps(optax.adam(LEARNING_RATE), every_k_schedule=num), models.mean_loss(model.loss_fn)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, microbatch: Any) -> Any:
        loss, grads = jax.value_and_grad(mean)(params, microbatch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.tree.map(jnp.copy, model.params)
    held, microbatches = [params, optimizer.init(params)], _microbatches(model, num)

    def run() -> Any:
        losses = []
        for microbatch in microbatches:
            held[0], held[1], loss = step(*held, microbatch)
            losses.append(loss)
        return held, losses

    return Contender(run, lambda: _temporary(step.lower(*held, microbatches[0])))


def host_and_bare(num: int = 32) -> tuple[Contender, Contender]:
    """A step of a very small model, driven from the host by `train_step`, and by a bare loop over a compiled program."""
    model = models.mlp(rows=2 * num, inputs=4, width=4)
    return _train_step(model, num, loop="host"), _stream(model, num)


def _train_step(model: models.Model, num: int, loop: str = "auto") -> Contender:
    optimizer = optax.adam(LEARNING_RATE)
    step = fg.train_step(model.loss_fn, optimizer, num_microbatches=num, loop=loop)
    held = [fg.TrainState.create(model.params, optimizer)]

    def run() -> Any:
        held[0], metrics = step(held[0], model.batch)
        return held, metrics

    return Contender(run, lambda: _temporary(step.lower(held[0], model.batch)))


def _micro_steps(model: models.Model, num: int) -> Contender:
    optimizer = optax.adam(LEARNING_RATE)
    steps, held = fg.micro_steps(model.loss_fn, optimizer), [fg.TrainState.create(model.params, optimizer)]
    microbatches = _microbatches(model, num)

    def run() -> Any:
        losses = []
        for microbatch in microbatches:
            held[0], loss = steps.backward(held[0], microbatch)
            losses.append(loss)
        held[0], metrics = steps.update(held[0])
        return held, losses, metrics

    lowered = lambda: (steps.backward.lower(held[0], microbatches[0]), steps.update.lower(held[0]))
    return Contender(run, lambda: max(map(_temporary, lowered())))


def _microbatches(model: models.Model, num: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, index=index: leaf[index::num], model.batch) for index in range(num)]


def _temporary(lowered: Any) -> int:
    return lowered.compile().memory_analysis().temp_size_in_bytes
