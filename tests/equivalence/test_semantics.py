"""What PyTorch's `.grad` does, row by row: the same small program in PyTorch, in the implicit face and in the explicit one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import funcgrad as fg
from funcgrad import stateful

# The same few operations in float32 in two libraries; Adam's square root and division among them.
TOLERANCE = 1e-5


def assert_same(*faces):
    """Each face is a list of gradients and parameters: None in the same places, else equal."""
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
        (w**2).sum().backward()
        stateful.evaluate(square, p).backward()
        kept = w.grad, p.grad
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_same([w.grad], [p.grad], [None])
        (w**2).sum().backward()
        stateful.evaluate(square, p).backward()
        assert_same([kept[0], w.grad], [kept[1], p.grad])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_02_zeros_clear_nan(self, bad):
        w, p = leaf([1.0, 2.0]), parameter([1.0, 2.0])
        optimizers = torch.optim.SGD([w], lr=0.1), stateful.Optimizer(optax.sgd(0.1), p)
        times = lambda w, x: jnp.sum(w * x)
        for x in (bad, 3.0):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            (w * x).sum().backward()
            stateful.evaluate(times, p, x).backward()
        assert_same([w.grad], [p.grad], [[3.0, 3.0]])

    def test_02_zeros_are_left_only_where_there_was_a_gradient(self):
        w, p = leaf(1.0), parameter(1.0)
        for optimizer in (torch.optim.SGD([w], lr=0.1), stateful.Optimizer(optax.sgd(0.1), p)):
            optimizer.zero_grad(set_to_none=False)
        assert_same([w.grad], [p.grad], [None])

    def test_04_scope(self):
        module = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(())), "b": torch.nn.Parameter(torch.ones(()))})
        params = stateful.parameters({"a": jnp.ones(()), "b": jnp.array(1.0)})
        optimizers = torch.optim.SGD([module["a"]], lr=0.1), stateful.Optimizer(optax.sgd(0.1), params["a"])
        loss_fn = lambda params: 3 * params["a"] + 3 * params["b"]
        theirs, ours = [], []
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (3 * module["a"] + 3 * module["b"]).backward()
            stateful.evaluate(loss_fn, params).backward()
            theirs += [module["a"].grad.clone(), module["b"].grad.clone()]
            ours += [params["a"].grad, params["b"].grad]
        assert_same(theirs, ours, [3, 3, 3, 6, 3, 9])
        module.zero_grad()
        stateful.zero_grad(params)
        assert_same([module["a"].grad, module["b"].grad], [params["a"].grad, params["b"].grad], [None, None])

    def test_04_step_does_not_clear_and_one_parameter_can_be_cleared(self):
        w, v, p, q = leaf(1.0), leaf(1.0), parameter(1.0), parameter(1.0)
        optimizers = torch.optim.SGD([w, v], lr=0.1), stateful.Optimizer(optax.sgd(0.1), [p, q])
        (2 * w + 3 * v).backward()
        stateful.evaluate(lambda pair: 2 * pair[0] + 3 * pair[1], [p, q]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.step()
        assert_same([w, v, w.grad, v.grad], [p.data, q.data, p.grad, q.grad], [0.6, 0.4, 2.0, 3.0])
        w.grad, p.grad = None, None
        v.grad.zero_()
        q.zero_grad(set_to_none=False)
        assert_same([w.grad, v.grad], [p.grad, q.grad], [None, 0.0])


OPTIMIZERS = {
    "sgd momentum": (lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    "sgd decay": (
        lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.5),
        optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1)),
    ),
    "adam": (lambda w: torch.optim.Adam(w, lr=0.1), optax.adam(0.1)),
    "adamw": (lambda w: torch.optim.AdamW(w, lr=0.1, weight_decay=0.5), optax.adamw(0.1, weight_decay=0.5)),
    "adamax": (lambda w: torch.optim.Adamax(w, lr=0.1), optax.adamax(0.1)),
    "maximize": (
        lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.5, maximize=True),
        optax.chain(optax.scale(-1.0), optax.add_decayed_weights(0.5), optax.sgd(0.1)),
    ),
}


class TestStep:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("second", [0.0, None])
    def test_03_none_skips_a_parameter_and_zero_does_not(self, name, second):
        """Row 16, too: maximize negates before weight decay."""
        make, transformation = OPTIMIZERS[name]
        w, p = leaf(1.0), parameter(1.0)
        optimizers = make([w]), stateful.Optimizer(transformation, p)
        theirs, ours = [], []
        for gradient in (1.0, second, 1.0):
            w.grad = None if gradient is None else torch.tensor(gradient)
            p.grad = None if gradient is None else jnp.array(gradient)
            for optimizer in optimizers:
                optimizer.step()
            theirs.append(w.detach().clone())
            ours.append(p.data)
        assert_same(theirs, ours)
        assert (theirs[0] == theirs[1]) == (second is None)

    def test_03_state_is_per_parameter(self):
        a, b, p, q = leaf(1.0), leaf(1.0), parameter(1.0), parameter(1.0)
        theirs, ours = torch.optim.Adam([a, b], lr=0.1), stateful.Optimizer(optax.adam(0.1), [p, q])
        for step in range(3):
            a.grad, p.grad = torch.tensor(1.0), jnp.array(1.0)
            if step == 2:
                b.grad, q.grad = torch.tensor(1.0), jnp.array(1.0)
            theirs.step()
            ours.step()
        assert_same([a, b], [p.data, q.data])
        counts = [state[0].count for state in ours.state_dict()["state"]]
        assert_same([theirs.state[each]["step"] for each in (a, b)], counts, [3, 1])

    def test_05_requires_grad_stops_new_gradients_and_not_the_old_one(self):
        w, p = leaf(1.0), parameter(1.0)
        optimizers = (
            torch.optim.SGD([w], lr=0.1, momentum=0.9),
            stateful.Optimizer(optax.sgd(0.1, momentum=0.9), p),
        )
        other, other_p = leaf(1.0), parameter(1.0)
        loss_fn = lambda pair: pair[0] + pair[1]
        theirs, ours = [], []
        for step in range(4):
            if step == 1:
                w.requires_grad_(False)
                p.requires_grad = False
            if step == 3:
                w.grad, p.grad = None, None
            (w + other).backward()
            stateful.evaluate(loss_fn, [p, other_p]).backward()
            for optimizer in optimizers:
                optimizer.step()
            theirs += [w.detach().clone(), w.grad]
            ours += [p.data, p.grad]
        assert_same(theirs, ours, [0.9, 1, 0.71, 1, 0.439, 1, 0.439, None])

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

        for _ in range(3):
            assert_same([theirs.step(torch_closure), w], [ours.step(closure).value, p.data])

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
        with pytest.raises(TypeError, match="expected an optax transformation"):
            stateful.Optimizer([(p, 0.1)])


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
        assert_same([w.grad, theirs], [p.grad, ours.value], [12.0, 9.0])

    def test_08_a_gradient_of_a_gradient(self):
        x, p = leaf(3.0), parameter(3.0)
        (gradient,) = torch.autograd.grad(x**3, x, create_graph=True)
        cube = lambda x: x**3
        assert_same([gradient], [stateful.grad(cube, p)], [27.0])
        (x**3).backward()
        gradient.backward()
        stateful.evaluate(cube, p).backward()
        stateful.evaluate(jax.grad(cube), p).backward()
        assert_same([x.grad], [p.grad], [45.0])

    def test_09_what_is_no_leaf_has_no_gradient_unless_asked_for(self):
        w, p = leaf(3.0), parameter(3.0)
        hidden = w * 2
        hidden.retain_grad()
        (hidden**2).backward()
        stateful.evaluate(lambda w: (w * 2) ** 2, p).backward()
        middle = stateful.grad(lambda hidden: hidden**2, stateful.Parameter(p.data * 2))
        assert_same([w.grad, hidden.grad], [p.grad, middle], [24.0, 12.0])

    def test_10_tied_parameters_are_one_buffer(self):
        w = leaf(1.0)
        params = stateful.parameters((shared := jnp.ones(()), {"again": shared}))
        (3 * w + 4 * w).backward()
        stateful.evaluate(lambda params: 3 * params[0] + 4 * params[1]["again"], params).backward()
        assert params[0] is params[1]["again"]
        assert_same([w.grad], [params[0].grad], [7.0])

    def test_11_unused_is_none_and_multiplied_by_zero_is_zeros(self):
        tensors = [leaf(1.0), leaf(1.0), leaf([[1.0, 2.0], [3.0, 4.0]])]
        params = stateful.parameters([jnp.ones(()), jnp.array(1.0), jnp.array([[1.0, 2.0], [3.0, 4.0]])])
        (0 * tensors[1] + torch.nn.functional.embedding(torch.tensor([1]), tensors[2]).sum()).backward()
        stateful.evaluate(lambda params: 0 * params[1] + params[2][jnp.array([1])].sum(), params).backward()
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
        assert_same([each.grad for each in tensors], [each.grad for each in params], [None, 2.0])
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
        assert_same([*theirs, w.grad], [*ours, p.grad])
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


class TestClip:
    @pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
    @pytest.mark.parametrize("max_norm", [0.5, 100.0])
    def test_13_clip_grad_norm(self, max_norm, norm_type):
        values = [[0.3, 0.4], [-2.0]] if norm_type != 2.0 else [[0.3, 0.4]]
        tensors, params = [leaf(value) for value in [*values, [0.0]]], [parameter(value) for value in [*values, [0.0]]]
        for tensor, each, value in zip(tensors, params, [*values, None], strict=True):
            tensor.grad = None if value is None else torch.tensor(value)
            each.grad = None if value is None else jnp.array(value)
        norms = (
            torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type),
            stateful.clip_grad_norm_(params, max_norm, norm_type),
        )
        assert_same([norms[0], *(each.grad for each in tensors)], [norms[1], *(each.grad for each in params)])
        if (max_norm, norm_type) == (0.5, 2.0):
            np.testing.assert_allclose(params[0].grad, [0.2999994, 0.3999992], atol=1e-8)

    def test_13_without_a_gradient_and_not_finite(self):
        w, p = leaf([1.0]), parameter([1.0])
        assert_same([torch.nn.utils.clip_grad_norm_([w], 1.0)], [stateful.clip_grad_norm_(p, 1.0)], [0.0])
        w.grad, p.grad = torch.tensor([np.inf]), jnp.array([np.inf])
        for clip, each in ((torch.nn.utils.clip_grad_norm_, [w]), (stateful.clip_grad_norm_, [p])):
            with pytest.raises(RuntimeError, match=r"total norm of order 2\.0"):
                clip(each, 1.0, error_if_nonfinite=True)
        assert_same([w.grad], [p.grad])

    @pytest.mark.parametrize(("value", "max_norm"), [(300.0, 1.0), (1e-5, 1e-6)])
    def test_13_float16(self, value, max_norm):
        w, p = leaf([1.0] * 4, dtype=torch.float16), parameter([1.0] * 4, jnp.float16)
        w.grad, p.grad = torch.full((4,), value, dtype=torch.float16), jnp.full(4, value, jnp.float16)
        torch.nn.utils.clip_grad_norm_([w], max_norm)
        stateful.clip_grad_norm_(p, max_norm)
        np.testing.assert_allclose(p.grad, w.grad.numpy(), rtol=0.02, atol=6e-8)  # a step of float16 near zero
        stateful.clip_grad_value_(p, np.float64(0.25))
        assert p.grad.dtype == jnp.float16

    def test_13_clip_grad_value(self):
        w, p = leaf([1.0, 1.0, 1.0]), parameter([1.0, 1.0, 1.0])
        w.grad, p.grad = torch.tensor([3.0, -0.5, -4.0]), jnp.array([3.0, -0.5, -4.0])
        torch.nn.utils.clip_grad_value_([w, leaf(1.0)], 1.0)
        stateful.clip_grad_value_([p, parameter(1.0)], 1.0)
        assert_same([w.grad], [p.grad], [[1.0, -0.5, -1.0]])


class TestGradScaler:
    OPTIONS = {"init_scale": 8.0, "growth_interval": 2}

    def _faces(self):
        w, p = leaf(1.0), parameter(1.0)
        return (
            (w, torch.optim.SGD([w], lr=0.1), torch.amp.GradScaler("cpu", **self.OPTIONS), lambda x: w * x),
            (
                p,
                stateful.Optimizer(optax.sgd(0.1), p),
                stateful.GradScaler(**self.OPTIONS),
                lambda x: stateful.evaluate(jnp.multiply, p, x),
            ),
        )

    @pytest.mark.parametrize("explicit_unscale", [False, True])
    def test_14_one_scale_for_the_window(self, explicit_unscale):
        seen = []
        for each, optimizer, scaler, loss in self._faces():
            record = []
            for window in ([1.0, 1.0], [1.0, 3.0], [1.0, np.inf], [2.0, 2.0], [np.nan, 1.0]):
                optimizer.zero_grad()
                for x in window:
                    scaler.scale(loss(x)).backward()
                record.append(float(each.grad))
                if explicit_unscale:
                    scaler.unscale_(optimizer)
                    record.append(float(each.grad))
                scaler.step(optimizer)
                scaler.update()
                record += [float(each.detach() if hasattr(each, "detach") else each.data), scaler.get_scale()]
            seen.append(record)
        np.testing.assert_allclose(seen[1], seen[0], rtol=TOLERANCE)
        if explicit_unscale:
            assert seen[1][:4] == [16.0, 2.0, pytest.approx(0.8), 8.0]
            assert seen[1][7] == 16.0  # grown after two clean windows
            assert seen[1][11] == 8.0  # and halved after an infinity

    def test_14_float16_parameters_are_refused_and_the_scale_stays_finite(self):
        w, p = leaf(1.0, dtype=torch.float16), parameter(1.0, jnp.float16)
        w.grad, p.grad = torch.tensor(1.0, dtype=torch.float16), jnp.array(1.0, jnp.float16)
        theirs, ours = torch.amp.GradScaler("cpu"), stateful.GradScaler()
        theirs.scale(torch.ones(()))
        with pytest.raises(ValueError, match="unscale FP16 gradients"):
            theirs.unscale_(torch.optim.SGD([w], lr=0.1))
        with pytest.raises(ValueError, match="cannot unscale float16 gradients"):
            ours.unscale_(stateful.Optimizer(optax.sgd(0.1), p))
        scales = []
        for each, optimizer, _, loss in self._faces():
            options = {"init_scale": 2.0**126, "growth_interval": 1}
            scaler = (
                torch.amp.GradScaler("cpu", **options) if isinstance(each, torch.Tensor) else stateful.GradScaler(**options)
            )
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(loss(0.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
        assert scales[0] == scales[1]

    def test_14_errors_and_state(self):
        for _, optimizer, scaler, loss in self._faces():
            scaler.scale(loss(1.0)).backward()
            scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
                scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update\(\)"):
                scaler.step(optimizer)
            scaler.update()
            scaler.update(new_scale=4.0)
            assert scaler.get_scale() == 4.0
        (_, _, theirs, _), (_, _, ours, _) = self._faces()
        state = theirs.state_dict()
        assert ours.state_dict() == state
        ours.load_state_dict({**state, "scale": 2.0, "_growth_tracker": 1})
        assert ours.state_dict() == {**state, "scale": 2.0, "_growth_tracker": 1}
        disabled = stateful.GradScaler(enabled=False)
        assert (disabled.scale(3.0), disabled.get_scale(), disabled.state_dict()) == (3.0, 1.0, {})


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
