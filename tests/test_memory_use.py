"""Temporary memory of compiled programs, from XLA's own analysis: counts of bytes, no measurement."""

import functools

import jax
import models
import optax
import pytest

import funcgrad as fg

pytestmark = pytest.mark.optimized
NUM = 64


@functools.cache
def _model():
    return models.transformer(rows=64, layers=6, width=256, heads=4, tokens=64, vocabulary=128)


@functools.cache
def _temporary_bytes(kind):
    model = _model()
    fun = {
        "whole": jax.value_and_grad(models.mean_loss(model.loss_fn)),
        "hand-written": models.hand_written_scan(model.loss_fn, NUM),
        "funcgrad": fg.value_and_grad(model.loss_fn, num_microbatches=NUM),
        "skipping": fg.value_and_grad(model.loss_fn, num_microbatches=NUM, skip_nonfinite=True),
    }[kind]
    return jax.jit(fun).lower(model.params, model.batch).compile().memory_analysis().temp_size_in_bytes


def _bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_64_microbatches_need_a_twentieth_of_the_full_batch():
    assert _temporary_bytes("funcgrad") <= _temporary_bytes("whole") / 20


def test_never_more_than_a_hand_written_scan():
    assert _temporary_bytes("funcgrad") <= _temporary_bytes("hand-written")


def test_no_second_copy_of_the_gradients():
    """One copy is the loop's sum; what is beside it is smaller than another one."""
    assert _temporary_bytes("funcgrad") < 2 * _bytes(_model().params)


def test_skipping_keeps_one_microbatch_until_all_of_it_is_known_to_be_finite():
    assert _temporary_bytes("skipping") <= _temporary_bytes("funcgrad") + _bytes(_model().params)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adamw(1e-3)], ids=["sgd", "adamw"])
def test_the_training_step_accumulates_in_the_donated_buffer(optimizer):
    """The state's buffer is the loop's sum, so a step needs less temporary memory than value_and_grad does."""
    model = _model()
    state = jax.eval_shape(lambda params: fg.TrainState.create(params, optimizer), model.params)
    step = fg.train_step(model.loss_fn, optimizer, num_microbatches=NUM)
    analysis = step.lower(state, model.batch).compile().memory_analysis()
    assert analysis.temp_size_in_bytes <= _temporary_bytes("hand-written")
    assert analysis.alias_size_in_bytes >= 0.99 * _bytes(state)
    backward = fg.micro_steps(model.loss_fn, optimizer).backward
    rows = jax.tree.map(lambda leaf: leaf[:1], model.batch)
    analysis = backward.lower(state, rows).compile().memory_analysis()
    assert analysis.temp_size_in_bytes <= _temporary_bytes("hand-written")
    assert analysis.alias_size_in_bytes >= 0.99 * _bytes(state.buffer)  # the rest of the state does not pass through it


def test_an_update_makes_no_copies():
    """Where nothing may have been folded in, it is a condition, not a choice between old and new arrays, which takes two.

    jax 0.7.2 copies the mean gradient; 0.10.2 nothing.
    """
    optimizer, model = optax.adamw(1e-3), _model()
    state = jax.eval_shape(lambda params: fg.TrainState.create(params, optimizer), model.params)
    steps = fg.micro_steps(model.loss_fn, optimizer)
    update = steps.update.lower(state).compile().memory_analysis()
    copies = 0 if jax.__version_info__ >= (0, 10) else 1
    assert update.temp_size_in_bytes <= (copies + 0.01) * _bytes(model.params)
    skipping = fg.train_step(model.loss_fn, optimizer, num_microbatches=NUM, skip_nonfinite=True)
    analysis = skipping.lower(state, model.batch).compile().memory_analysis()
    assert analysis.temp_size_in_bytes <= 1.1 * _temporary_bytes("skipping")
