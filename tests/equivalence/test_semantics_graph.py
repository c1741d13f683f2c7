"""Rows 6 to 12 and 17: which gradients there are, and what hooks see."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from faces import assert_same, leaf, parameter

import funcgrad as fg
from funcgrad import stateful


class TestGraph:
    def test_06_detach(self):
        for detached in (False, True):
            d, g, p, q = leaf(2.0), leaf(3.0), parameter(2.0), parameter(3.0)
            ((d * g.detach()) if detached else (d * g)).backward()
            stateful.evaluate(lambda pair: pair[0] * pair[1], [p, q.detach() if detached else q]).backward()
            pure = lambda d, g: d * (jax.lax.stop_gradient(g) if detached else g)
            explicit = jax.grad(pure, (0, 1))(2.0, 3.0)
            assert_same([d.grad, g.grad], [p.grad, q.grad], [3.0, None if detached else 2.0])
            assert explicit == (3.0, 0.0 if detached else 2.0)  # JAX says zero, not None

    def test_07_a_graph_is_used_once(self):
        w, p = leaf(3.0), parameter(3.0)
        theirs, ours = w * w, stateful.evaluate(lambda w: w * w, p)
        for loss in (theirs, ours):
            loss.backward(retain_graph=True)
        assert_same([w.grad], [p.grad], [6.0])
        for loss in (theirs, ours):
            loss.backward()
        assert_same([w.grad], [p.grad], [12.0])
        for loss in (theirs, ours, 2 * ours):
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
        add = fg.backward(lambda w: w * w, batch_argnums=())
        buffer = fg.zeros(p.data)
        for _ in range(2):  # a function has no graph that could be used up
            buffer, loss = add(buffer, p.data)
        assert_same([w.grad, theirs], [p.grad, ours.value], [fg.total(buffer), loss], [12.0, 9.0])

    def test_08_a_gradient_of_a_gradient(self):
        x, p = leaf(3.0), parameter(3.0)
        (gradient,) = torch.autograd.grad(x**3, x, create_graph=True)
        cube = lambda x: x**3
        once = fg.grad(cube, batch_argnums=())
        buffer, _ = fg.backward(cube, batch_argnums=())(fg.zeros(p.data), p.data)
        buffer, _ = fg.backward(once, batch_argnums=())(buffer, p.data)
        assert_same([gradient], [stateful.grad(cube, p)], [once(p.data)], [27.0])
        (x**3).backward()
        gradient.backward()
        stateful.evaluate(cube, p).backward()
        stateful.evaluate(jax.grad(cube), p).backward()
        assert_same([x.grad], [p.grad], [fg.total(buffer)], [45.0])

    def test_09_what_is_no_leaf_has_no_gradient_unless_asked_for(self):
        w, p = leaf(3.0), parameter(3.0)
        hidden = w * 2
        hidden.retain_grad()
        (hidden**2).backward()
        stateful.evaluate(lambda w: (w * 2) ** 2, p).backward()
        middle = stateful.grad(lambda hidden: hidden**2, stateful.Parameter(p.data * 2))
        squared = lambda hidden: hidden**2
        explicit = [fg.grad(lambda w: squared(w * 2), batch_argnums=())(p.data), fg.grad(squared, batch_argnums=())(p.data * 2)]
        assert_same([w.grad, hidden.grad], [p.grad, middle], explicit, [24.0, 12.0])

    def test_10_tied_parameters_are_one_buffer(self):
        w = leaf(1.0)
        params = stateful.parameters((shared := jnp.ones(()), {"again": shared}))
        (3 * w + 4 * w).backward()
        loss_fn = lambda params: 3 * params[0] + 4 * params[1]["again"]
        stateful.evaluate(loss_fn, params).backward()
        assert params[0] is params[1]["again"]
        tied = fg.grad(lambda shared: loss_fn((shared, {"again": shared})), batch_argnums=())(shared)
        assert_same([w.grad], [params[0].grad], [tied], [7.0])
        # A pure function sees two leaves, though it be the same array: their gradients are for the caller to add.
        assert fg.grad(loss_fn, batch_argnums=())((shared, {"again": shared})) == (3.0, {"again": 4.0})

    def test_11_unused_is_none_and_multiplied_by_zero_is_zeros(self):
        tensors = [leaf(1.0), leaf(1.0), leaf([[1.0, 2.0], [3.0, 4.0]])]
        params = stateful.parameters([jnp.ones(()), jnp.array(1.0), jnp.array([[1.0, 2.0], [3.0, 4.0]])])
        (0 * tensors[1] + torch.nn.functional.embedding(torch.tensor([1]), tensors[2]).sum()).backward()
        loss_fn = lambda params: 0 * params[1] + params[2][jnp.array([1])].sum()
        stateful.evaluate(loss_fn, params).backward()
        explicit = fg.grad(loss_fn, batch_argnums=())([each.data for each in params])
        assert_same(explicit, [0.0, 0.0, [[0, 0], [1, 1]]])  # JAX says zero in all three cases
        assert_same([each.grad for each in tensors], [each.grad for each in params], [None, 0.0, [[0, 0], [1, 1]]])

    def test_11_gradients_asked_for(self):
        tensors, params = [leaf(1.0), leaf(2.0)], [parameter(1.0), parameter(2.0)]
        loss_fn = lambda params: params[1] ** 2
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(tensors[1] ** 2, tensors)
        with pytest.raises(RuntimeError, match=r"the loss does not depend on params\[0\]. Give allow_unused=True"):
            stateful.grad(loss_fn, params)
        for options in ({"allow_unused": True}, {"materialize_grads": True}):
            assert_same(torch.autograd.grad(tensors[1] ** 2, tensors, **options), stateful.grad(loss_fn, params, **options))
        assert_same(stateful.grad(loss_fn, params, materialize_grads=True), jax.grad(loss_fn)([each.data for each in params]))
        assert_same([each.grad for each in tensors], [each.grad for each in params], [None, None])
        tensors[1].requires_grad_(False)
        params[1].requires_grad = False
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(tensors[0] * tensors[1], tensors)
        with pytest.raises(RuntimeError, match=r"params\[1\] requires no gradient"):
            stateful.grad(lambda params: params[0] * params[1], params)

    def test_inputs(self):
        tensors, params = [leaf(2.0), leaf(3.0)], [parameter(2.0), parameter(3.0)]
        (tensors[0] * tensors[1]).backward(inputs=[tensors[1]])
        stateful.evaluate(lambda params: params[0] * params[1], params).backward(inputs=[params[1]])
        chosen = fg.grad(lambda params: params[0] * params[1], batch_argnums=(), trainable=[False, True])
        assert_same([each.grad for each in tensors], [each.grad for each in params], chosen([2.0, 3.0]), [None, 2.0])
        with pytest.raises(RuntimeError, match="cannot be empty"):
            (tensors[0] * tensors[1]).backward(inputs=[])
        with pytest.raises(RuntimeError, match="inputs must name at least one parameter"):
            stateful.evaluate(lambda params: params[0] * params[1], params).backward(inputs=[])

    def test_a_loss_that_depends_on_nothing(self):
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(()).backward()
        with pytest.raises(RuntimeError, match="does not depend on any parameter that requires a gradient"):
            stateful.evaluate(lambda w: 2 * jax.lax.stop_gradient(w), parameter(1.0)).backward()

    @pytest.mark.parametrize("value", [1 + 2j, -3 - 1j])
    def test_complex_gradients_are_the_conjugate_of_jaxs(self, value):
        w, p = leaf(value, dtype=torch.complex64), parameter(value, jnp.complex64)
        loss_fn = lambda w: jnp.real(w * w) + jnp.abs(w) ** 2
        ((w * w).real + w.abs() ** 2).backward()
        stateful.evaluate(loss_fn, p).backward()
        assert_same([w.grad], [p.grad], [jnp.conj(jax.grad(loss_fn)(p.data))])
        optimizers = torch.optim.SGD([w], lr=0.1), stateful.Optimizer(optax.sgd(0.1), p)
        for optimizer in optimizers:
            optimizer.step()
        assert_same([w], [p.data])


class TestHooks:
    def test_12_what_hooks_see(self):
        w, p = leaf(1.0), parameter(1.0)
        theirs, ours = [], []
        handles = [
            (w.register_hook(lambda grad: theirs.append(grad.clone())), p.register_hook(lambda grad: ours.append(grad))),
            (w.register_hook(lambda grad: 2 * grad), p.register_hook(lambda grad: 2 * grad)),
            (
                w.register_post_accumulate_grad_hook(lambda w: theirs.append(w.grad.clone())),
                p.register_post_accumulate_grad_hook(lambda p: ours.append(p.grad)),
            ),
        ]
        triple = lambda w: 3 * w
        for step in range(4):
            (3 * w).backward()
            stateful.evaluate(triple, p).backward()
            if step >= 1:
                for handle in handles[step - 1]:
                    handle.remove()
        explicit, buffer = [], fg.zeros(jnp.ones(()))
        for step in range(4):  # the explicit face: the gradient and the sum are values, at hand where they are made
            grad = fg.grad(triple, batch_argnums=())(1.0)
            if step < 2:
                explicit.append(grad)
            buffer = fg.accumulate(buffer, 2 * grad if step < 3 else grad)
            explicit.append(fg.total(buffer))
        assert_same([*theirs, w.grad], [*ours, p.grad], [*explicit, fg.total(buffer)])
        assert [float(each) for each in ours] == [3, 6, 3, 12, 18, 21]

    def test_a_hook_that_clears_and_a_gradient_that_is_asked_for(self):
        w, p = leaf([1.0] * 3), parameter([1.0] * 3)
        square = lambda w: jnp.sum(w * w)
        (w * w).sum().backward()
        stateful.evaluate(square, p).backward()

        def clear(_):
            w.grad = None

        handles = w.register_hook(clear), p.register_hook(lambda _: p.zero_grad())
        (w * w).sum().backward()
        stateful.evaluate(square, p).backward()
        assert_same([w.grad], [p.grad])
        for handle in handles:
            handle.remove()
        w.register_hook(lambda grad: 10 * grad)
        p.register_hook(lambda grad: 10 * grad)
        assert_same(torch.autograd.grad((w * w).sum(), w), [stateful.grad(square, p)])
        frozen, frozen_p = torch.ones(()), stateful.Parameter(jnp.ones(()), requires_grad=False)
        for each in (frozen, frozen_p):
            with pytest.raises(RuntimeError, match="cannot register a hook on a"):
                each.register_hook(lambda grad: grad)

    def test_a_backward_that_raises_leaves_every_gradient_as_it_was(self):
        params = [parameter(1.0), parameter(1.0)]
        loss_fn = lambda params: 2 * params[0] + 3 * params[1]
        stateful.evaluate(loss_fn, params).backward()

        def fail(*_):
            raise KeyError("a hook")

        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            handle = getattr(params[1], register)(fail)
            with pytest.raises(KeyError, match="a hook"):
                stateful.evaluate(loss_fn, params).backward()
            assert [float(each.grad) for each in params] == [2, 3]
            handle.remove()
        handle = params[0].register_hook(lambda grad: jnp.ones(3))
        with pytest.raises(RuntimeError, match=r"a hook must return a gradient like float32\[\],? or None; got float32\[3\]"):
            stateful.evaluate(loss_fn, params).backward()
        assert [float(each.grad) for each in params] == [2, 3]


class TestDivergentConventions:
    """Row 17: points where the two libraries choose another derivative. Keep inputs off them."""

    @pytest.mark.parametrize(
        ("torch_fn", "jax_fn", "theirs", "ours"),
        [
            (torch.abs, jnp.abs, 0.0, 1.0),
            (lambda x: torch.clamp(x, min=0), lambda x: jnp.clip(x, 0), 1.0, 0.5),
            (lambda x: torch.linalg.norm(x), lambda x: jnp.linalg.norm(x), 0.0, np.nan),
        ],
        ids=["abs", "clamp", "norm"],
    )
    def test_17_at_zero(self, torch_fn, jax_fn, theirs, ours):
        w, p = leaf([0.0]), parameter([0.0])
        torch_fn(w).sum().backward()
        stateful.evaluate(lambda w: jax_fn(w).sum(), p).backward()
        np.testing.assert_array_equal(w.grad.numpy(), [theirs])
        np.testing.assert_array_equal(np.asarray(p.grad), [ours])

    def test_17_defaults(self):
        x = np.linspace(-2, 2, 5).astype(np.float32)
        assert_same([torch.nn.functional.gelu(torch.tensor(x))], [jax.nn.gelu(x, approximate=False)])
        assert not np.allclose(torch.nn.functional.gelu(torch.tensor(x)), jax.nn.gelu(x), atol=1e-5)
        assert_same([torch.var(torch.tensor(x))], [jnp.var(x, ddof=1)])
