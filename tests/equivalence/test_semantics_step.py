"""Rows 3, 5 and 16: what a step does with None, with zeros, with a frozen parameter."""

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from faces import assert_same, leaf, parameter

import funcgrad as fg
from funcgrad import stateful, torch_optim

OPTIMIZERS = {
    "sgd momentum": (lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    "sgd decay": (
        lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.5),
        optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1)),
    ),
    "adam": (lambda w: torch.optim.Adam(w, lr=0.1), optax.adam(0.1)),
    "adamw": (lambda w: torch.optim.AdamW(w, lr=0.1, weight_decay=0.5), optax.adamw(0.1, weight_decay=0.5)),
    "adamax": (lambda w: torch.optim.Adamax(w, lr=0.1), optax.adamax(0.1)),
    "rmsprop momentum": (
        lambda w: torch.optim.RMSprop(w, lr=0.1, momentum=0.9),
        optax.rmsprop(0.1, decay=0.99, eps_in_sqrt=False, momentum=0.9),
    ),
    "nadam": (lambda w: torch.optim.NAdam(w, lr=0.1), torch_optim.nadam(0.1)),
    "radam": (lambda w: torch.optim.RAdam(w, lr=0.1), optax.radam(0.1)),
    "asgd": (
        lambda w: torch.optim.ASGD(w, lr=0.1, lambd=0.1),
        optax.chain(
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(lambda count: 0.1 / (1 + 0.1 * 0.1 * count) ** 0.75),
        ),
    ),
    "maximize": (
        lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.5, maximize=True),
        optax.chain(optax.scale(-1.0), optax.add_decayed_weights(0.5), optax.sgd(0.1)),
    ),
}


# The parameter after a gradient of one and after one of zero, from PyTorch 2.13.
AFTER_A_ZERO = {
    "sgd momentum": (0.9, 0.81),
    "sgd decay": (0.85, 0.8075),
    "adam": (0.9, 0.832994),
    "adamw": (0.85, 0.740494),
    "adamax": (0.9, 0.852584),
    "rmsprop momentum": (0.0, -0.9),
    "nadam": (0.894355, 0.888048),
    "radam": (0.9, 0.852632),
    "asgd": (0.89, 0.881166),
}


class TestStep:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("second", [0.0, None])
    def test_03_none_skips_a_parameter_and_zero_does_not(self, name, second):
        """Row 16, too: maximize negates before weight decay."""
        make, transformation = OPTIMIZERS[name]
        w, p = leaf(1.0), parameter(1.0)
        optimizers = make([w]), stateful.Optimizer(transformation, p)
        pure = jnp.array(1.0)
        opt_state = transformation.init(pure)
        theirs, ours, explicit = [], [], []
        for gradient in (1.0, second, 1.0):
            w.grad = None if gradient is None else torch.tensor(gradient)
            p.grad = None if gradient is None else jnp.array(gradient)
            for optimizer in optimizers:
                optimizer.step()
            if gradient is not None:  # the pure update does what it is called for
                updates, opt_state = transformation.update(jnp.array(gradient), opt_state, pure)
                pure = optax.apply_updates(pure, updates)
            theirs.append(w.detach().clone())
            ours.append(p.data)
            explicit.append(pure)
        assert_same(theirs, ours, explicit)
        assert (theirs[0] == theirs[1]) == (second is None)
        if name in AFTER_A_ZERO and second is not None:
            assert_same(theirs[:2], AFTER_A_ZERO[name])

    def test_03_state_is_per_parameter(self):
        a, b, p, q = leaf(1.0), leaf(1.0), parameter(1.0), parameter(1.0)
        theirs, ours = torch.optim.Adam([a, b], lr=0.1), stateful.Optimizer(optax.adam(0.1), [p, q])
        adam = optax.adam(0.1)
        pure, states = [jnp.array(1.0)] * 2, [adam.init(jnp.array(1.0))] * 2
        for step in range(3):
            for index in range(2 if step == 2 else 1):
                updates, states[index] = adam.update(jnp.array(1.0), states[index], pure[index])
                pure[index] = optax.apply_updates(pure[index], updates)
            a.grad, p.grad = torch.tensor(1.0), jnp.array(1.0)
            if step == 2:
                b.grad, q.grad = torch.tensor(1.0), jnp.array(1.0)
            theirs.step()
            ours.step()
        assert_same([a, b], [p.data, q.data], pure)
        counts = [state[0].count for state in ours.state_dict()["state"]]
        assert_same([theirs.state[each]["step"] for each in (a, b)], counts, [state[0].count for state in states], [3, 1])

    def test_05_requires_grad_stops_new_gradients_and_not_the_old_one(self):
        w, p = leaf(1.0), parameter(1.0)
        optimizers = (
            torch.optim.SGD([w], lr=0.1, momentum=0.9),
            stateful.Optimizer(optax.sgd(0.1, momentum=0.9), p),
        )
        other, other_p = leaf(1.0), parameter(1.0)
        loss_fn = lambda pair: pair[0] + pair[1]
        theirs, ours, explicit = [], [], []
        sgd, pure, buffer = optax.sgd(0.1, momentum=0.9), jnp.array(1.0), fg.zeros(jnp.array(1.0))
        opt_state = sgd.init(pure)
        for step in range(4):
            if step == 0:
                buffer = fg.accumulate(buffer, jnp.ones(()))
            if step == 1:  # the explicit face: from here on nothing is folded in
                w.requires_grad_(False)
                p.requires_grad = False
            if step == 3:
                w.grad, p.grad = None, None
            else:
                updates, opt_state = sgd.update(fg.total(buffer), opt_state, pure)
                pure = optax.apply_updates(pure, updates)
            explicit += [pure, None if step == 3 else fg.total(buffer)]
            (w + other).backward()
            stateful.evaluate(loss_fn, [p, other_p]).backward()
            for optimizer in optimizers:
                optimizer.step()
            theirs += [w.detach().clone(), w.grad]
            ours += [p.data, p.grad]
        assert_same(theirs, ours, explicit, [0.9, 1, 0.71, 1, 0.439, 1, 0.439, None])

    def test_closure(self):
        w, p = leaf(3.0), parameter(3.0)
        theirs, ours = torch.optim.SGD([w], lr=0.1), stateful.Optimizer(optax.sgd(0.1), p)

        def torch_closure():
            theirs.zero_grad()
            loss = w**2
            loss.backward()
            return loss

        def closure():
            ours.zero_grad()
            loss = stateful.evaluate(jnp.square, p)
            loss.backward()
            return loss

        pure = jnp.array(3.0)
        for _ in range(3):
            loss, grads = fg.value_and_grad(jnp.square, batch_argnums=())(pure)
            pure -= 0.1 * grads
            assert_same([theirs.step(torch_closure), w], [ours.step(closure).value, p.data], [loss, pure])

    def test_state_dict_goes_on_where_it_was_saved(self):
        p, q = parameter(1.0), parameter(1.0)
        one, two = stateful.Optimizer(optax.adam(0.1), p), stateful.Optimizer(optax.adam(0.1), q)
        for _ in range(3):
            p.grad = jnp.array(1.0)
            one.step()
        q.data = p.data
        two.load_state_dict(one.state_dict())
        for parameter_, optimizer in ((p, one), (q, two)):
            parameter_.grad = jnp.array(-1.0)
            optimizer.step()
        assert p.data == q.data
        with pytest.raises(ValueError, match="the state is of 1 parameters, but this optimizer has 2"):
            stateful.Optimizer(optax.adam(0.1), [p, q]).load_state_dict(one.state_dict())
        with pytest.raises(
            ValueError, match=r"state_dict\['state'\]\[0\] must have the structure of the transformation's state"
        ):
            stateful.Optimizer(optax.sgd(0.1, momentum=0.9), p).load_state_dict(one.state_dict())
        with pytest.raises(ValueError, match="with an entry 'state'; got the entries"):
            one.load_state_dict({})
        moved = stateful.Optimizer(optax.adam(0.1), parameter([1.0, 2.0]))
        with pytest.raises(ValueError, match=r"must have shape \(2,\), as its parameter asks; got float32\[\]"):
            moved.load_state_dict(one.state_dict())

    def test_groups(self):
        w, v, u = leaf(1.0), leaf(2.0), leaf(3.0)
        p, q, r = parameter(1.0), parameter(2.0), parameter(3.0)
        theirs = torch.optim.SGD([{"params": [w, v]}, {"params": [u], "lr": 0.5, "momentum": 0.0}], lr=0.1, momentum=0.9)
        groups = [([p, q], optax.sgd(0.1, momentum=0.9)), (r, optax.sgd(0.5))]
        ours = stateful.Optimizer(groups)
        outside, outside_p = leaf(1.0), parameter(1.0)
        product = lambda tree: tree[0] * tree[1] * tree[2] + tree[3]
        for step in range(4):
            theirs.zero_grad()
            ours.zero_grad()
            (w * v * u + outside).backward()
            stateful.evaluate(product, [p, q, r, outside_p]).backward()
            if step < 2:
                v.grad, q.grad = None, None
            if step == 1:
                assert ours.state_dict()["state"][1] is None
                saved = ours.state_dict()
                ours = stateful.Optimizer(groups)
                ours.load_state_dict(saved)
            theirs.step()
            ours.step()
            assert_same([w, v, u, outside.grad], [p.data, q.data, r.data, outside_p.grad])
        for entry in saved["state"]:
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(entry))
        with pytest.raises(ValueError, match="the optimizer got no group"):
            stateful.Optimizer([])

    def test_parameters_that_an_optimizer_refuses(self):
        w, p = leaf(1.0), parameter(1.0)
        with pytest.raises(ValueError, match="more than one parameter group"):
            torch.optim.SGD([{"params": [w]}, {"params": [w]}], lr=0.1)
        with pytest.raises(ValueError, match="stands in more than one group"):
            stateful.Optimizer([(p, optax.sgd(0.1)), ([p], optax.adam(0.1))])
        with pytest.raises(ValueError, match="empty parameter list"):
            torch.optim.SGD([], lr=0.1)
        with pytest.raises(ValueError, match="got no Parameter"):
            stateful.Optimizer(optax.sgd(0.1), [])
        with pytest.raises(TypeError, match="optimizer must be an optax transformation"):
            stateful.Optimizer([(p, 0.1)])
