"""What a microbatch hands on to the next one: running statistics, a hidden state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import FLOAT32_TOLERANCE, relative_difference, watch_losses

import funcgrad as fg

LOOPS = ["scan", "unroll", "ordered", "auto", 2]
X = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
PARAMS = {"w": jnp.array([0.5, -1.0, 2.0])}


def loss_fn(params, x, carry):
    """The carry is used in the loss, and updated from the rows and the parameters."""
    mean = 0.9 * carry["mean"] + 0.1 * jnp.mean(x @ params["w"])
    return jnp.mean((x @ params["w"] - carry["mean"]) ** 2), (
        {"mean": mean, "count": carry["count"] + len(x)},
        {"seen": carry["mean"]},
    )


def start():
    return {"mean": jnp.array(0.25), "count": jnp.array(0, jnp.int32)}


def by_hand(parts, loss_fn=loss_fn):
    carry, grads, losses, rows = start(), jax.tree.map(jnp.zeros_like, PARAMS), 0.0, 0
    for part in parts:
        (loss, (new, _)), grad = jax.value_and_grad(loss_fn, has_aux=True)(PARAMS, part, jax.lax.stop_gradient(carry))
        grads = jax.tree.map(lambda total, grad, part=part: total + grad * len(part), grads, grad)
        losses, rows, carry = losses + loss * len(part), rows + len(part), new
    return losses / rows, carry, jax.tree.map(lambda total: total / rows, grads)


@pytest.mark.parametrize(
    ("loop", "wrap"),
    [("auto", lambda fun: fun), *((loop, jax.jit) for loop in LOOPS if loop != "auto")],
    ids=["eager", *(str(loop) for loop in LOOPS if loop != "auto")],
)
@pytest.mark.parametrize("options", [{"num_microbatches": 4}, {"microbatch_size": 3}, {"num_microbatches": 1}], ids=str)
def test_value_and_grad(wrap, loop, options):
    fun = fg.value_and_grad(
        loss_fn, has_aux=True, carry_argnum=2, order="contiguous", aux={"seen": "last"}, loop=loop, **options
    )
    (loss, (carry, aux)), grads = wrap(fun)(PARAMS, X, start())
    size = options.get("microbatch_size", 8 // options.get("num_microbatches", 1))
    parts = [X[begin : begin + size] for begin in range(0, 8, size)]
    expected = by_hand(parts)
    assert relative_difference((loss, carry, grads), expected) <= FLOAT32_TOLERANCE
    assert (carry["count"], carry["count"].dtype) == (8, jnp.int32)
    assert relative_difference(aux["seen"], by_hand(parts[:-1])[1]["mean"] if len(parts) > 1 else 0.25) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("loop", [*LOOPS, "host"])
def test_training_steps_hand_the_carry_back(loop):
    optimizer = optax.sgd(0.1)
    options = {"has_aux": True, "carry_argnum": 2, "aux": "mean"}
    step = fg.train_step(loss_fn, optimizer, num_microbatches=4, order="contiguous", loop=loop, **options)
    state, carry = fg.TrainState.create(PARAMS, optimizer), start()
    given = carry
    for _ in range(2):
        state, metrics = step(state, X, carry)
        carry = metrics["carry"]
    steps, other, handed_on = fg.micro_steps(loss_fn, optimizer, has_aux=True, carry_argnum=2), None, start()
    other = fg.TrainState.create(PARAMS, optimizer)
    for _ in range(2):
        for begin in range(0, 8, 2):
            other, (_, (handed_on, _)) = steps.backward(other, X[begin : begin + 2], handed_on)
        other, _ = steps.update(other)
    assert relative_difference((state.params, carry), (other.params, handed_on)) <= 1e-5
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_a_skipped_microbatch_hands_on_what_it_was_given():
    bad = X.at[2].set(jnp.nan)
    options = {"has_aux": True, "carry_argnum": 2, "skip_nonfinite": True}
    expected = by_hand([X[:2], X[4:6], X[6:]])
    fun = fg.value_and_grad(loss_fn, num_microbatches=4, order="contiguous", **options)
    for each in (fun, jax.jit(fun)):
        (loss, (carry, _)), grads = each(PARAMS, bad, start())
        assert relative_difference((loss, carry, grads), expected) <= FLOAT32_TOLERANCE
    backward, buffer, carry = fg.backward(loss_fn, **options), fg.zeros(PARAMS), start()
    for begin in range(0, 8, 2):
        buffer, (_, (carry, _)) = backward(buffer, PARAMS, bad[begin : begin + 2], carry)
    assert relative_difference((carry, fg.mean(buffer)), expected[1:]) <= FLOAT32_TOLERANCE


def test_a_line_search_sees_the_loss_with_the_carry():
    seen = []
    watching = watch_losses(seen)
    step = fg.train_step(loss_fn, watching, microbatch_size=3, order="contiguous", has_aux=True, carry_argnum=2)
    with jax.disable_jit():
        step(fg.TrainState.create(PARAMS, watching), X, start())
    np.testing.assert_allclose(*seen[0], rtol=1e-6)


def test_a_key_may_be_carried():
    def drawing(w, x, key):
        key, now = jax.random.split(key)
        return jnp.mean(w * x * jax.random.normal(now, x.shape)), (key, None)

    fun = jax.jit(fg.value_and_grad(drawing, has_aux=True, carry_argnum=2, num_microbatches=2, skip_nonfinite=True))
    (_, (key, _)), _ = fun(1.0, jnp.ones(4), jax.random.key(0))
    expected = jax.random.split(jax.random.split(jax.random.key(0))[0])[0]
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(expected))


@pytest.mark.parametrize(
    ("function", "options", "error", "text"),
    [
        (
            lambda w, x, c: jnp.mean(w * x),
            {"has_aux": False},
            ValueError,
            r"returns \(loss, \(carry, aux\)\), so pass has_aux=True",
        ),
        (
            lambda w, x, c: (jnp.mean(w * x), c),
            {},
            TypeError,
            r"must return \(loss, \(carry, aux\)\); got float32\[\] beside the loss",
        ),
        (
            lambda w, x, c: (jnp.mean(w * x), (jnp.stack([c, c]), None)),
            {},
            ValueError,
            r"keep its shapes and dtypes .*: carry came in as float32\[\], and the function returns float32\[2\]",
        ),
        (
            lambda w, x, c: (jnp.mean(w * x), ({"c": c}, None)),
            {},
            ValueError,
            r"the carry that the function returns must have the structure of the carry that came in as args\[2\]",
        ),
        (
            lambda w, x, c: (jnp.mean(w * x), (c, None)),
            {"key_argnums": 2},
            ValueError,
            "named in carry_argnum and in key_argnums",
        ),
        (lambda w, x, c: (jnp.mean(w * x), (c, None)), {"carry_argnum": 0}, ValueError, "named in carry_argnum and in argnums"),
        (lambda w, x, c: (jnp.mean(w * x), (c, None)), {"carry_argnum": 5}, ValueError, "carry_argnum names argument 5"),
    ],
)
def test_what_is_wrong(function, options, error, text):
    options = {"has_aux": True, "carry_argnum": 2, "num_microbatches": 2, **options}
    with pytest.raises(error, match=text):
        fg.value_and_grad(function, **options)(1.0, jnp.ones(4), jnp.array(0.0))


def test_a_skipped_microbatch_hands_on_nothing_in_a_line_search_either():
    x = jnp.arange(24.0).reshape(8, 3) / 24

    def shifted(params, x, carry):
        return jnp.mean((x @ params["w"] - 0.1 * carry - 1) ** 2), (jnp.mean(x), None)

    seen = []
    options = {"has_aux": True, "carry_argnum": 2, "num_microbatches": 4, "skip_nonfinite": True}
    step = fg.train_step(shifted, watch_losses(seen), **options)
    with jax.disable_jit():
        step(fg.TrainState.create(PARAMS, watch_losses(seen)), x.at[1].set(jnp.nan), jnp.zeros(()))
    (offered, asked), *_ = seen
    assert jnp.isfinite(offered)
    np.testing.assert_allclose(offered, asked, rtol=1e-6)


def test_the_carry_is_a_constant_to_who_differentiates_the_result():
    """As the gradients that come back say; a line search, too, asks for one gradient, not two."""
    fun = fg.value_and_grad(loss_fn, has_aux=True, carry_argnum=2, microbatch_size=3)
    _, grads = fun(PARAMS, X, start())
    outer = jax.grad(lambda params: fun(params, X, start())[0][0])(PARAMS)
    assert relative_difference(outer, grads) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("loop", ["host", "scan"])
def test_shapes_are_enough_to_lower_and_to_plan(loop):
    shape = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    options = {"has_aux": True, "carry_argnum": 2, "loop": loop}
    state = fg.TrainState.create(PARAMS, optax.sgd(0.1))
    step = fg.train_step(loss_fn, optax.sgd(0.1), num_microbatches=2, **options)
    arguments = shape(X), shape(start())
    assert step.lower(state, *arguments).compile().memory_analysis().temp_size_in_bytes > 0
    found = fg.plan(loss_fn, shape(PARAMS), *arguments, optimizer=optax.sgd(0.1), candidates=(1, 2), **options)
    assert found.best == 1


@pytest.mark.parametrize("loop", ["host", "scan"])
def test_an_array_of_the_state_as_the_carry(loop):
    """A teacher's parameters begin as the pupil's own, which the step overwrites."""
    average = lambda params, x, carry: (jnp.mean((x @ params["w"]) ** 2), ({"w": 0.9 * carry["w"] + 0.1 * params["w"]}, None))
    step = fg.train_step(average, optax.sgd(0.1), has_aux=True, carry_argnum=2, num_microbatches=2, loop=loop)
    state = fg.TrainState.create(PARAMS, optax.sgd(0.1))
    state, metrics = step(state, X, state.params)
    assert relative_difference(metrics["carry"], PARAMS) <= FLOAT32_TOLERANCE
    assert state.step == 1


def test_a_carry_argnum_that_is_none():
    for wrong in ((2,), 1.5, "2"):
        with pytest.raises(TypeError, match="carry_argnum must be"):
            fg.value_and_grad(loss_fn, has_aux=True, carry_argnum=wrong, num_microbatches=2)
