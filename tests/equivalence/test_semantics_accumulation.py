"""Rows 1, 2, 4 and 15 of what PyTorch's `.grad` does: adding, clearing, and in which dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from faces import assert_same, leaf, parameter

import funcgrad as fg
from funcgrad import stateful


class TestAccumulation:
    def test_01_backward_adds(self):
        w, p = leaf([1.0] * 5), parameter([1.0] * 5)
        buffer = fg.zeros(p.data)
        theirs, ours, explicit = [], [], []
        add = fg.backward(jnp.sum, batch_argnums=())
        for _ in range(4):
            w.sum().backward()
            stateful.evaluate(jnp.sum, p).backward()
            buffer, _ = add(buffer, p.data)
            theirs.append(w.grad.clone())
            ours.append(p.grad)
            explicit.append(fg.total(buffer))
        assert_same(theirs, ours, explicit)
        assert [float(grad[0]) for grad in ours] == [1, 2, 3, 4]  # and each kept its value

    def test_01_division_in_the_loss(self):
        """An effective batch of 64 as 2 x 32: PyTorch's loop divides, the mean of the buffer does it by itself."""
        x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        w, p = leaf(np.ones(3, np.float32)), parameter(np.ones(3, np.float32))
        loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
        buffer = fg.zeros(p.data)
        for rows in (x[:32], x[32:]):
            (((torch.tensor(rows) @ w) ** 2).mean() / 2).backward()
            (stateful.evaluate(loss_fn, p, rows) / 2).backward()
            buffer, _ = fg.backward(loss_fn)(buffer, p.data, rows)
        assert_same([w.grad], [p.grad], [fg.mean(buffer)], [jax.grad(loss_fn)(p.data, x)])

    def test_15_the_sum_is_in_the_parameters_dtype(self):
        w, p = leaf(1.0, dtype=torch.bfloat16), parameter(1.0, jnp.bfloat16)
        identity = lambda w: w * 1
        for _ in range(300):
            (w * 1).backward()
            stateful.evaluate(identity, p).backward()
        assert_same([w.grad], [p.grad], [256.0])
        buffer = fg.zeros(p.data)
        for _ in range(300):
            buffer = fg.accumulate(buffer, jnp.ones((), jnp.bfloat16))
        assert fg.total(buffer) == 300  # what the explicit face is for


class TestZeroGrad:
    def test_02_none_is_the_default_and_an_old_reference_keeps_its_value(self):
        w, p = leaf([1.0, 2.0]), parameter([1.0, 2.0])
        optimizers = torch.optim.SGD([w], lr=0.1), stateful.Optimizer(optax.sgd(0.1), p)
        square = lambda w: jnp.sum(w**2)
        add = fg.backward(square, batch_argnums=())
        buffer, _ = add(fg.zeros(p.data), p.data)
        (w**2).sum().backward()
        stateful.evaluate(square, p).backward()
        kept = w.grad, p.grad, fg.total(buffer)
        for optimizer in optimizers:
            optimizer.zero_grad()
        buffer = fg.zero_grad(buffer)
        assert_same([w.grad], [p.grad], [None])
        assert_same([fg.total(buffer), buffer.count], [[0.0, 0.0], 0])  # None is a count of zero
        (w**2).sum().backward()
        stateful.evaluate(square, p).backward()
        buffer, _ = add(buffer, p.data)
        assert_same([kept[0], w.grad], [kept[1], p.grad], [kept[2], fg.total(buffer)])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_02_zeros_clear_nan(self, bad):
        w, p = leaf([1.0, 2.0]), parameter([1.0, 2.0])
        optimizers = torch.optim.SGD([w], lr=0.1), stateful.Optimizer(optax.sgd(0.1), p)
        times = lambda w, x: jnp.sum(w * x)
        buffer = fg.zeros(p.data)
        for x in (bad, 3.0):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            (w * x).sum().backward()
            stateful.evaluate(times, p, x).backward()
            buffer, _ = fg.backward(times, batch_argnums=())(fg.zero_grad(buffer), p.data, x)
        assert_same([w.grad], [p.grad], [fg.total(buffer)], [[3.0, 3.0]])

    def test_02_zeros_are_left_only_where_there_was_a_gradient(self):
        w, p = leaf(1.0), parameter(1.0)
        for optimizer in (torch.optim.SGD([w], lr=0.1), stateful.Optimizer(optax.sgd(0.1), p)):
            optimizer.zero_grad(set_to_none=False)
        assert_same([w.grad], [p.grad], [None])
        assert_same([fg.zero_grad(fg.zeros(p.data)).count], [0])

    def test_04_scope(self):
        module = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(())), "b": torch.nn.Parameter(torch.ones(()))})
        params = stateful.parameters({"a": jnp.ones(()), "b": jnp.array(1.0)})
        optimizers = torch.optim.SGD([module["a"]], lr=0.1), stateful.Optimizer(optax.sgd(0.1), params["a"])
        loss_fn = lambda params: 3 * params["a"] + 3 * params["b"]
        theirs, ours, explicit = [], [], []
        buffers = {name: fg.zeros(params[name].data) for name in "ab"}  # two owners, two buffers
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            buffers["a"] = fg.zero_grad(buffers["a"])
            (3 * module["a"] + 3 * module["b"]).backward()
            stateful.evaluate(loss_fn, params).backward()
            grads = fg.grad(loss_fn, batch_argnums=())({name: params[name].data for name in "ab"})
            buffers = {name: fg.accumulate(buffers[name], grads[name]) for name in "ab"}
            theirs += [module["a"].grad.clone(), module["b"].grad.clone()]
            ours += [params["a"].grad, params["b"].grad]
            explicit += [fg.total(buffers["a"]), fg.total(buffers["b"])]
        assert_same(theirs, ours, explicit, [3, 3, 3, 6, 3, 9])
        module.zero_grad()
        stateful.zero_grad(params)
        assert_same([module["a"].grad, module["b"].grad], [params["a"].grad, params["b"].grad], [None, None])

    def test_04_step_does_not_clear_and_one_parameter_can_be_cleared(self):
        w, v, p, q = leaf(1.0), leaf(1.0), parameter(1.0), parameter(1.0)
        optimizers = torch.optim.SGD([w, v], lr=0.1), stateful.Optimizer(optax.sgd(0.1), [p, q])
        loss_fn = lambda pair: 2 * pair[0] + 3 * pair[1]
        pair = [p.data, q.data]
        buffer, _ = fg.backward(loss_fn, batch_argnums=())(fg.zeros(pair), pair)
        (2 * w + 3 * v).backward()
        stateful.evaluate(loss_fn, [p, q]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.step()
        for _ in range(2):
            updates, _ = optax.sgd(0.1).update(fg.total(buffer), optax.sgd(0.1).init(pair), pair)
            pair = optax.apply_updates(pair, updates)
        explicit = [*pair, *fg.total(buffer)]
        assert_same([w, v, w.grad, v.grad], [p.data, q.data, p.grad, q.grad], explicit, [0.6, 0.4, 2.0, 3.0])
        w.grad, p.grad = None, None
        v.grad.zero_()
        q.zero_grad(set_to_none=False)
        assert_same([w.grad, v.grad], [p.grad, q.grad], [None, 0.0])
        alone = [fg.zero_grad(fg.zeros(leaf)) for leaf in pair]  # a buffer for each leaf is cleared by itself, too
        assert_same([fg.total(each) for each in alone], [0.0, 0.0])
