"""What a Loss does beside PyTorch's backward, which is in tests/equivalence: its memory, and arithmetic."""

import gc
import operator
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import funcgrad as fg
from funcgrad import stateful


def test_gradients_are_added_in_the_same_memory():
    weight = stateful.Parameter(jnp.ones(1000))
    pointers = set()
    for step in range(6):
        if step % 2 == 0:
            weight.zero_grad()
        stateful.evaluate(jnp.sum, weight).backward()
        pointers.add(weight._grad.unsafe_buffer_pointer())
    assert len(pointers) == 1


def test_nothing_is_kept_alive_after_backward():
    x = jnp.ones(3)
    alive = weakref.ref(x)
    loss = stateful.evaluate(lambda weight, x: jnp.sum(weight * x), stateful.Parameter(jnp.ones(3)), x)
    del x
    gc.collect()
    assert alive() is not None
    loss.backward()
    gc.collect()
    assert alive() is None
    assert loss.item() == 3.0


def test_arrays_that_hooks_saw_or_gave_are_never_deleted():
    weight, given, seen = stateful.Parameter(jnp.ones(3)), jnp.full(3, 7.0), []
    handles = [weight.register_hook(seen.append), weight.register_hook(lambda grad: given)]
    stateful.evaluate(jnp.sum, weight).backward()
    for handle in handles:
        handle.remove()
    for _ in range(2):
        stateful.evaluate(jnp.sum, weight).backward()
    assert (seen[0].tolist(), given.tolist(), weight.grad.tolist()) == ([1] * 3, [7] * 3, [9] * 3)


def test_inputs_in_any_container():
    pair = [stateful.Parameter(jnp.ones(())), stateful.Parameter(jnp.array(2.0))]
    product = lambda pair: pair[0] * pair[1]
    for inputs in (pair[0], {"a": pair[0]}, iter(pair[:1])):
        stateful.evaluate(product, pair).backward(inputs=inputs)
    assert (pair[0].grad, pair[1].grad) == (6.0, None)
    with pytest.raises(TypeError, match=r"inputs must hold Parameters; got float32\[\]"):
        stateful.evaluate(product, pair).backward(inputs=[jnp.ones(())])
    stateful.zero_grad(iter(pair))
    assert pair[0].grad is None


def test_weighted_losses_and_multiples():
    weight = stateful.Parameter(jnp.array(2.0))
    loss = stateful.evaluate(lambda weight, x: fg.WeightedLoss(jnp.sum(weight * x), 4), weight, jnp.arange(4.0))
    (3 * loss / 2).backward()
    assert (loss.item(), (loss * 2).item(), weight.grad) == (3.0, 6.0, 2.25)


class TestArithmetic:
    def test_sums_and_multiples(self):
        w, v = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        p, q = stateful.Parameter(jnp.array(2.0)), stateful.Parameter(jnp.array(3.0))
        combine = [
            lambda one, two: one + two,
            lambda one, two: 2 * one - two / 4 + 1,
            lambda one, two: -one + 0 * two,
            lambda one, two: sum([one, two, one]),
            lambda one, two: 5 - (one + two) * 0.5,
            lambda one, two: 1 - one - one / 2,
        ]
        square, product = jnp.square, lambda pair: pair[0] * pair[1]
        for each in combine:
            theirs = each(w**2, w * v)
            ours = each(stateful.evaluate(square, p), stateful.evaluate(product, [p, q]))
            theirs.backward()
            ours.backward()
            assert ours.item() == theirs.item()
            assert p.grad == w.grad.numpy()
            assert (q.grad is None) == (v.grad is None)
            assert q.grad is None or q.grad == v.grad.numpy()

    def test_hooks_see_the_gradient_of_the_sum(self):
        w, p, theirs, ours = torch.tensor(2.0, requires_grad=True), stateful.Parameter(jnp.array(2.0)), [], []
        for _ in range(2):
            w.register_hook(lambda grad: theirs.append(grad.item()))
            p.register_hook(lambda grad: ours.append(grad.item()))
            (w**2 + w**3).backward()
            (stateful.evaluate(jnp.square, p) + stateful.evaluate(lambda p: p**3, p)).backward()
        assert theirs == ours

    def test_the_graphs_of_a_sum_are_used_once(self):
        p = stateful.Parameter(jnp.array(2.0))
        one, two = stateful.evaluate(jnp.square, p), stateful.evaluate(lambda p: p**3, p)
        both = one + two
        both.backward(retain_graph=True)
        two.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            both.backward()
        assert p.grad == 4 + 12 + 12
        one.backward()
        assert (both.item(), p.grad) == (12.0, 32.0)

    def test_a_sum_that_cannot_be_differentiated_adds_nothing(self):
        p = stateful.Parameter(jnp.array(2.0))
        loop = lambda p: jax.lax.while_loop(lambda x: x < 10, lambda x: 2 * x, p)
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            (stateful.evaluate(jnp.square, p) + stateful.evaluate(loop, p)).backward()
        assert p.grad is None

    def test_a_term_without_a_gradient(self):
        p, frozen = stateful.Parameter(jnp.array(2.0)), stateful.Parameter(jnp.array(3.0), requires_grad=False)
        loss = stateful.evaluate(jnp.square, p) + stateful.evaluate(jnp.square, frozen)
        frozen.requires_grad = True  # too late: the graph is of the time when it was evaluated
        loss.backward()
        assert (loss.item(), p.grad, frozen.grad) == (13.0, 4.0, None)

    def test_aux_of_a_sum(self):
        p = stateful.Parameter(jnp.array(2.0))
        one = stateful.evaluate(lambda p: (p, {"twice": 2 * p}), p)
        assert (one + stateful.evaluate(jnp.square, p)).aux == ({"twice": 4.0}, None)

    def test_a_loss_reads_as_a_number(self):
        p = stateful.Parameter(jnp.array(2.0))
        loss = stateful.evaluate(jnp.square, p)
        assert (float(loss), f"{loss:.2f}", f"{loss}", repr(loss / 2)) == (4.0, "4.00", "Loss(4.0)", "Loss(2.0)")
        assert loss.detach() == 4.0
        other = stateful.evaluate(jnp.square, stateful.Parameter(jnp.array(3.0)))
        assert loss == 4.0 < other
        assert min(3.0, loss) == 3.0
        assert max(loss, other) is other
        comparisons = loss <= 4.0, loss > other, loss >= other, loss == other, bool(loss), bool(0 * loss), loss in {loss}
        assert comparisons == (True, False, False, False, True, False, True)
        assert (jnp.array(0.5) * loss * np.float32(2)).item() == (np.float64(1) * loss).item() == 4.0

    @pytest.mark.parametrize("other", ["2", None, 1j, np.ones(2)])
    def test_what_is_no_number(self, other):
        loss = stateful.evaluate(jnp.square, stateful.Parameter(jnp.array(2.0)))
        for operation in (operator.add, operator.sub, operator.mul, operator.truediv):
            with pytest.raises(TypeError, match="Loss"):
                operation(loss, other)

    def test_losses_are_no_numbers_in_products(self):
        loss = stateful.evaluate(jnp.square, stateful.Parameter(jnp.array(2.0)))
        for operation in (lambda: loss * loss, lambda: loss / loss, lambda: loss**2, lambda: 1 / loss):
            with pytest.raises(TypeError, match=r"losses can be added, and multiplied with numbers. .* take the value of one"):
                operation()


class TestTraced:
    """In jit, the first call would be recorded and the others do nothing; the arrays of the trace must not stay."""

    def test_the_implicit_face_stands_outside_of_jit(self):
        p = stateful.Parameter(jnp.array(2.0))
        optimizer = stateful.Optimizer(optax.sgd(0.1), p)
        stateful.evaluate(jnp.square, p).backward()

        def assign(x):
            p.grad = x

        for use in (
            lambda x: stateful.evaluate(jnp.multiply, p, x).backward(),
            lambda x: optimizer.step(),
            lambda x: stateful.clip_grad_norm_(p, x),
            lambda x: stateful.clip_grad_value_(p, 1.0),
            lambda x: p.zero_grad(set_to_none=False),
            assign,
        ):
            with pytest.raises(RuntimeError, match=r"being traced: leave backward, .* fg.train_step"):
                jax.jit(use)(jnp.array(1.0))
            assert (p.data, p.grad) == (2.0, 4.0)


class TestFailure:
    @staticmethod
    def _fail_if_negative(x):
        if x < 0:
            raise ArithmeticError("the callback got a negative number")
        return np.asarray(x)

    def _checked_square(self, p, x):
        x = jax.pure_callback(self._fail_if_negative, jax.ShapeDtypeStruct((), jnp.float32), x)
        return x * p**2

    @pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint])
    def test_a_callback_that_fails_leaves_the_gradients(self, wrap):
        p = stateful.Parameter(jnp.array(2.0))
        loss_fn = wrap(self._checked_square)
        stateful.evaluate(loss_fn, p, 1.0).backward()
        with pytest.raises(Exception, match="the callback got a negative number"):
            stateful.evaluate(loss_fn, p, -1.0).backward()
        stateful.evaluate(loss_fn, p, 2.0).backward()
        assert p.grad == 12.0

    def test_a_callback_in_a_rule_of_differentiation(self):
        @jax.custom_vjp
        def square(p, x):
            return p**2

        square.defvjp(
            lambda p, x: (p**2, (p, x)), lambda saved, cotangent: (self._checked_square(1.0, saved[1]) * cotangent, None)
        )
        p = stateful.Parameter(jnp.array(2.0))
        stateful.evaluate(square, p, 1.0).backward()
        with pytest.raises(Exception, match="the callback got a negative number"):
            stateful.evaluate(square, p, -1.0).backward()
        assert p.grad == 1.0

    def test_a_constant_term_that_fails(self):
        p = stateful.Parameter(jnp.array(2.0))
        loss = stateful.evaluate(jnp.square, p) + stateful.evaluate(self._checked_square, 1.0, -1.0)
        for _ in range(2):
            with pytest.raises(Exception, match="the callback got a negative number"):
                loss.backward()
        assert p.grad is None

    def test_a_sum_that_is_not_finite(self):
        params = [stateful.Parameter(jnp.array(1.0)) for _ in range(2)]
        params[0].grad, params[1].grad = jnp.array(1.0), jnp.array(jnp.inf)
        params[0].register_hook(lambda grad: None)
        loss = stateful.evaluate(lambda pair, x: pair[0] + pair[1] * x, params, -jnp.inf)
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="invalid value"):
            loss.backward()
        assert [parameter.grad for parameter in params] == [1.0, jnp.inf]

    def test_debug_nans_leaves_the_gradients(self):
        p = stateful.Parameter(jnp.array(2.0))
        loss_fn = lambda p, x: p * jnp.log(x)
        stateful.evaluate(loss_fn, p, 2.0).backward()
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="invalid value"):
            stateful.evaluate(loss_fn, p, -1.0).backward()
        assert p.grad == jnp.log(jnp.float32(2))

    def test_a_hook_that_clears_and_one_that_raises(self):
        p = stateful.Parameter(jnp.array(2.0))
        stateful.evaluate(jnp.square, p).backward()
        p.register_hook(lambda grad: p.zero_grad())
        p.register_hook(lambda grad: "no array")
        with pytest.raises(TypeError, match=r"a hook must return a gradient, float32\[\], or None; got str"):
            stateful.evaluate(jnp.square, p).backward()
        assert p.grad == 4.0
