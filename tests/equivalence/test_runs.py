"""Whole runs of 200 steps in float64: PyTorch's loop, the implicit face and the explicit one, compared at every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from comparison import relative_difference
from jax import lax

import funcgrad as fg
from funcgrad import stateful

STEPS = 200
TOLERANCE = 1e-10
GENERATOR = np.random.default_rng(0)
RATE = 0.05


def normal(*shape):
    return GENERATOR.normal(size=shape) / np.sqrt(shape[0])


def tensors(tree):
    return {name: torch.tensor(value, requires_grad=True) for name, value in tree.items()}


def arrays(tree):
    return {name: jnp.asarray(value) for name, value in tree.items()}


def values(tree):
    """The numbers of PyTorch's tensors, of Parameters, or of arrays."""
    take = lambda leaf: (
        leaf.detach().numpy().copy() if isinstance(leaf, torch.Tensor) else np.asarray(getattr(leaf, "data", leaf))
    )
    return {name: take(leaf) for name, leaf in tree.items()}


def compare(*runs):
    """Run the faces side by side; each yields its parameters after every step."""
    steps = 0
    for theirs, *ours in zip(*runs, strict=True):
        steps += 1
        for face in ours:
            assert relative_difference(face, theirs) <= TOLERANCE
    assert steps == STEPS


SGD = lambda params: torch.optim.SGD(params, lr=RATE, momentum=0.9), optax.sgd(RATE, momentum=0.9)
ADAM = lambda params: torch.optim.Adam(params, lr=1e-2), optax.adam(1e-2)


def accumulate_runs(initial, torch_loss, loss_fn, batches, optimizers=SGD, frozen=None):
    """Each step is a window of several microbatches of equal size; half-way, the parameter named `frozen` is frozen."""
    make_torch_optimizer, transformation = optimizers

    def hidden(params, optimizer, evaluate):
        """PyTorch's loop, which is also the implicit face's."""
        for step, window in enumerate(batches()):
            if frozen and step == STEPS // 2:
                params[frozen].requires_grad = False
            optimizer.zero_grad()
            for microbatch in window:
                (evaluate(params, microbatch) / len(window)).backward()
            optimizer.step()
            yield values(params)

    def explicit():
        steps, state = fg.micro_steps(loss_fn, transformation), fg.TrainState.create(arrays(initial), transformation)
        for step, window in enumerate(batches()):
            if frozen and step == STEPS // 2:
                state = state.with_trainable(transformation, {name: name != frozen for name in initial})
            for microbatch in window:
                state, _ = steps.backward(state, microbatch)
            state, _ = steps.update(state)
            yield values(state.params)

    theirs, ours = tensors(initial), stateful.parameters(arrays(initial))
    compare(
        hidden(
            theirs, make_torch_optimizer(theirs.values()), lambda params, rows: torch_loss(params, *map(torch.tensor, rows))
        ),
        hidden(ours, stateful.Optimizer(transformation, ours), lambda params, rows: stateful.evaluate(loss_fn, params, rows)),
        explicit(),
    )


def digit_batches(digits, shape=(-1, 64)):
    images, labels = digits
    images = images.reshape(shape)

    def batches():
        generator = np.random.default_rng(1)
        for _ in range(STEPS):
            rows = generator.choice(len(labels), 32, replace=False)
            yield [(images[rows[part::4]], labels[rows[part::4]]) for part in range(4)]

    return batches


def cross_entropy(logits, labels):
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def torch_mlp_loss(params, x, y):
    return torch.nn.functional.cross_entropy(torch.tanh(x @ params["w"]) @ params["v"], y)


def mlp_loss(params, batch):
    return cross_entropy(jnp.tanh(batch[0] @ params["w"]) @ params["v"], batch[1])


def test_mlp(x64, digits):
    initial = {"w": normal(64, 16), "v": normal(16, 10)}
    accumulate_runs(initial, torch_mlp_loss, mlp_loss, digit_batches(digits))


def test_fine_tuning_with_half_of_the_parameters_frozen_half_way(x64, digits):
    initial = {"w": normal(64, 16), "v": normal(16, 10)}
    accumulate_runs(initial, torch_mlp_loss, mlp_loss, digit_batches(digits), ADAM, frozen="w")


def test_convolutional(x64, digits):
    def torch_loss(params, x, y):
        hidden = torch.tanh(torch.nn.functional.conv2d(x, params["kernel"], stride=2, padding=1))
        return torch.nn.functional.cross_entropy(hidden.flatten(1) @ params["v"], y)

    def loss_fn(params, batch):
        hidden = jnp.tanh(lax.conv_general_dilated(batch[0], params["kernel"], (2, 2), ((1, 1), (1, 1))))
        return cross_entropy(hidden.reshape(len(hidden), -1) @ params["v"], batch[1])

    initial = {"kernel": GENERATOR.normal(size=(4, 1, 3, 3)) / 3, "v": normal(64, 10)}
    accumulate_runs(initial, torch_loss, loss_fn, digit_batches(digits, (-1, 1, 8, 8)))


class TestRecurrent:
    """A character RNN; its gradients are added over two time windows, the hidden state between them detached or not."""

    TEXT = np.frombuffer(("the quick brown fox jumps over the lazy dog " * 40).encode(), np.uint8)
    SYMBOLS, CODES = np.unique(TEXT, return_inverse=True)
    ROWS, TIME = 4, 12

    def _initial(self):
        return {"e": normal(len(self.SYMBOLS), 8), "w": normal(8, 8), "v": normal(8, len(self.SYMBOLS))}

    def _batches(self):
        generator = np.random.default_rng(2)
        for _ in range(STEPS):
            starts = generator.integers(0, len(self.CODES) - self.TIME - 1, self.ROWS)
            yield np.stack([self.CODES[start : start + self.TIME + 1] for start in starts])

    @staticmethod
    def _torch_window(params, hidden, codes):
        losses = []
        for time in range(codes.shape[1] - 1):
            hidden = torch.tanh(params["e"][codes[:, time]] + hidden @ params["w"])
            losses.append(torch.nn.functional.cross_entropy(hidden @ params["v"], codes[:, time + 1]))
        return torch.stack(losses).sum(), hidden

    @staticmethod
    def _window(params, hidden, codes):
        def step(hidden, pair):
            hidden = jnp.tanh(params["e"][pair[0]] + hidden @ params["w"])
            return hidden, cross_entropy(hidden @ params["v"], pair[1])

        hidden, losses = lax.scan(step, hidden, (codes[:, :-1].T, codes[:, 1:].T))
        return losses.sum(), hidden

    def _in_torch(self, initial, detached):
        params = tensors(initial)
        optimizer = torch.optim.Adam(params.values(), lr=1e-2)
        for codes in self._batches():
            optimizer.zero_grad()
            hidden, codes = torch.zeros(self.ROWS, 8, dtype=torch.float64), torch.tensor(codes)
            losses = []
            for part in (codes[:, :7], codes[:, 6:]):
                loss, hidden = self._torch_window(params, hidden, part)
                losses.append(loss)
                hidden = hidden.detach() if detached else hidden
            for loss in losses:
                loss.backward(retain_graph=not detached)
            optimizer.step()
            yield values(params)

    @pytest.mark.parametrize("detached", [True, False])
    def test_both_windows(self, x64, detached):
        initial = self._initial()
        zeros = lambda: jnp.zeros((self.ROWS, 8))

        def both(params, codes):
            first, hidden = self._window(params, zeros(), codes[:, :7])
            return first + self._window(params, hidden, codes[:, 6:])[0]

        def implicit():
            params = stateful.parameters(arrays(initial))
            optimizer = stateful.Optimizer(optax.adam(1e-2), params)
            for codes in self._batches():
                optimizer.zero_grad()
                if detached:
                    loss = stateful.evaluate(self._window, params, zeros(), codes[:, :7])
                    loss.backward()
                    stateful.evaluate(self._window, params, loss.aux, codes[:, 6:]).backward()
                else:
                    stateful.evaluate(both, params, codes).backward()
                optimizer.step()
                yield values(params)

        def explicit():
            optimizer = optax.adam(1e-2)
            # The losses of a step are added, so each call weighs nothing but the whole: the sum is fg.total(buffer).
            window = jax.jit(fg.backward(self._window, has_aux=True, batch_argnums=()))
            whole = jax.jit(fg.backward(both, batch_argnums=()))
            params = arrays(initial)
            opt_state = optimizer.init(params)
            for codes in self._batches():
                buffer = fg.zeros(params)
                if detached:
                    buffer, (_, hidden) = window(buffer, params, zeros(), codes[:, :7])
                    buffer, _ = window(buffer, params, hidden, codes[:, 6:])
                else:
                    buffer, _ = whole(buffer, params, codes)
                updates, opt_state = optimizer.update(fg.total(buffer), opt_state, params)
                params = optax.apply_updates(params, updates)
                yield values(params)

        compare(self._in_torch(initial, detached), implicit(), explicit())


def test_generator_and_discriminator(x64, digits):
    """Two networks and two optimizers; each backward reaches both, and zero_grad keeps them apart."""
    images = digits[0]
    initial = {"generator": normal(4, 64), "discriminator": normal(64, 1)}

    def rounds():
        generator = np.random.default_rng(3)
        for _ in range(STEPS):
            yield images[generator.choice(len(images), 16)], generator.normal(size=(16, 4))

    def torch_logits(params, x):
        return torch.tanh(x @ params["discriminator"])

    def in_torch():
        params = tensors(initial)
        g_optimizer, d_optimizer = (torch.optim.SGD([params[name]], lr=RATE) for name in initial)
        for real, noise in rounds():
            real, noise = torch.tensor(real), torch.tensor(noise)
            d_optimizer.zero_grad()
            fake = (noise @ params["generator"]).detach()
            (torch_logits(params, fake).mean() - torch_logits(params, real).mean()).backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            (-torch_logits(params, noise @ params["generator"]).mean()).backward()
            g_optimizer.step()
            yield values(params)

    def logits(discriminator, x):
        return jnp.tanh(x @ discriminator)

    def d_loss(discriminator, generator, batch):
        real, noise = batch
        return logits(discriminator, noise @ generator).mean() - logits(discriminator, real).mean()

    def g_loss(generator, discriminator, noise):
        return -logits(discriminator, noise @ generator).mean()

    def implicit():
        params = stateful.parameters(arrays(initial))
        generator, discriminator = params["generator"], params["discriminator"]
        g_optimizer, d_optimizer = (stateful.Optimizer(optax.sgd(RATE), each) for each in (generator, discriminator))
        for real, noise in rounds():
            d_optimizer.zero_grad()
            stateful.evaluate(d_loss, discriminator, generator.detach(), (real, noise)).backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            stateful.evaluate(g_loss, generator, discriminator, noise).backward()
            g_optimizer.step()
            yield values(params)

    def explicit():
        optimizer = optax.sgd(RATE)
        d_step = fg.train_step(d_loss, optimizer, batch_argnums=2)
        g_step = fg.train_step(g_loss, optimizer, batch_argnums=2)
        g_state, d_state = (fg.TrainState.create(jnp.asarray(value), optimizer) for value in initial.values())
        for batch in rounds():
            d_state, _ = d_step(d_state, g_state.params, batch)
            g_state, _ = g_step(g_state, d_state.params, batch[1])
            yield values({"generator": g_state.params, "discriminator": d_state.params})

    compare(in_torch(), implicit(), explicit())
