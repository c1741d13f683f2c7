"""Rows 13 and 14: clipping, and the scaling of losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from faces import TOLERANCE, assert_same, leaf, parameter

import funcgrad as fg
from funcgrad import stateful


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
        grads = [None if value is None else jnp.array(value) for value in [*values, None]]
        norm = jnp.linalg.norm(jnp.concatenate(jax.tree.leaves(grads)), norm_type)
        clipped = jax.tree.map(lambda grad: grad * jnp.minimum(1, max_norm / (norm + 1e-6)), grads)
        assert_same([norms[0], *(each.grad for each in tensors)], [norms[1], *(each.grad for each in params)], [norm, *clipped])
        if norm_type == 2.0:  # optax has no 1e-6, which is one part in 5e5 here
            assert_same(optax.clip_by_global_norm(max_norm).update(grads[0], optax.EmptyState())[:1], clipped[:1])
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
        explicit, _ = optax.clip(1.0).update(jnp.array([3.0, -0.5, -4.0]), optax.EmptyState())
        assert_same([w.grad], [p.grad], [explicit], [[1.0, -0.5, -1.0]])


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

    WINDOWS = ([1.0, 1.0], [1.0, 3.0], [1.0, np.inf], [2.0, 2.0], [np.nan, 1.0])

    def _explicit(self):
        """The explicit face: the scale, too, is a value that is passed along."""
        param, scale, clean, record = jnp.array(1.0), 8.0, 0, []
        scaled = lambda param, x, scale: scale * param * x
        for window in self.WINDOWS:
            buffer = fg.zeros(param)
            for x in window:
                buffer, _ = fg.backward(scaled, batch_argnums=())(buffer, param, x, scale)
            unscaled = fg.total(buffer) / scale
            record += [fg.total(buffer), unscaled]
            if jnp.isfinite(unscaled):
                param, clean = param - 0.1 * unscaled, clean + 1
                scale, clean = (scale * 2, 0) if clean == 2 else (scale, clean)
            else:
                scale, clean = scale / 2, 0
            record += [param, scale]
        return record

    @pytest.mark.parametrize("explicit_unscale", [False, True])
    def test_14_one_scale_for_the_window(self, explicit_unscale):
        seen = []
        for each, optimizer, scaler, loss in self._faces():
            record = []
            for window in self.WINDOWS:
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
            np.testing.assert_allclose(self._explicit(), seen[0], rtol=TOLERANCE)
            assert seen[1][:4] == [16.0, 2.0, pytest.approx(0.8), 8.0]
            assert seen[1][7] == 16.0  # grown after two clean windows
            assert seen[1][11] == 8.0  # and halved after an infinity

    def test_14_float16_parameters_are_refused_and_the_scale_stays_finite(self):
        w, p = leaf(1.0, dtype=torch.float16), parameter(1.0, jnp.float16)
        w.grad, p.grad = torch.tensor(1.0, dtype=torch.float16), jnp.array(1.0, jnp.float16)
        theirs, ours = torch.amp.GradScaler("cpu"), stateful.GradScaler()
        theirs.scale(torch.ones(()))
        ours.scale(jnp.ones(()))
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

    def test_14_before_a_loss_was_scaled(self):
        for _, optimizer, scaler, loss in self._faces():
            for name in ("unscale_", "step", "update"):
                with pytest.raises(AssertionError, match=rf"{name}.*scale"):
                    getattr(scaler, name)(*[optimizer] * (name != "update"))
            for bad in (None, 3.0):
                with pytest.raises(ValueError, match="outputs must be a"):
                    scaler.scale(bad)
            scaler.scale(loss(1.0))
            with pytest.raises(
                AssertionError, match=r"(No inf checks were recorded|no gradient of this optimizer was checked)"
            ):
                scaler.step(optimizer)
            with pytest.raises(AssertionError, match=r"(No inf checks were recorded|no gradient was checked)"):
                scaler.update()

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
        ours.scale(jnp.ones(()))
        assert ours.scale([jnp.ones(()), (jnp.full((), 2.0),)]) == [2.0, (4.0,)]
        for options, text in (({"growth_factor": 1.0}, "growth_factor must be above 1"), ({"backoff_factor": 1.0}, "below 1")):
            with pytest.raises(ValueError, match=text):
                stateful.GradScaler(**options)
        with pytest.raises(RuntimeError, match="the state is empty"):
            ours.load_state_dict({})
        disabled = stateful.GradScaler(enabled=False)
        assert (disabled.scale(3.0), disabled.get_scale(), disabled.state_dict()) == (3.0, 1.0, {})
        p = parameter(1.0)
        p.grad = jnp.array(jnp.inf)
        optimizer = stateful.Optimizer(optax.sgd(0.1), p)
        disabled.unscale_(optimizer)
        disabled.step(optimizer)
        disabled.update()
        disabled.load_state_dict({})
        assert p.data == -jnp.inf
