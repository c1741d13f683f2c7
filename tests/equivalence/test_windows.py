"""What goes on from window to window, PyTorch's loops and funcgrad side by side in float64.

Time windows: PyTorch's loop adds the gradients of the windows' *means*, each weighed by its share of the time, which is the
gradient of the mean over all of the time. A loss function that returns its window's mean does the same here, because the
microbatch's rows, which the mean is weighed by, are then time steps (`in_axes` names the time axis). A loop that adds the
means unweighed is `WeightedLoss(mean, 1.0)`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from comparison import relative_difference
from jax import lax

import funcgrad as fg

TOLERANCE = 1e-11


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For arrays as small as these, PyTorch's threads cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


INPUTS, HIDDEN, OUTPUTS, ROWS, TIME = 3, 4, 2, 5, 12


def rnn(params, h, x):
    h = jnp.tanh(x @ params["weight_ih_l0"].T + params["bias_ih_l0"] + h @ params["weight_hh_l0"].T + params["bias_hh_l0"])
    return h, h


def gru(params, h, x):
    """PyTorch's: the reset gate multiplies what comes from the state after its matrix product."""
    from_input = x @ params["weight_ih_l0"].T + params["bias_ih_l0"]
    from_state = h @ params["weight_hh_l0"].T + params["bias_hh_l0"]
    (ir, iz, inew), (hr, hz, hnew) = (jnp.split(part, 3, axis=-1) for part in (from_input, from_state))
    reset, update = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    h = (1 - update) * jnp.tanh(inew + reset * hnew) + update * h
    return h, h


def lstm(params, carry, x):
    h, c = carry
    gates = x @ params["weight_ih_l0"].T + params["bias_ih_l0"] + h @ params["weight_hh_l0"].T + params["bias_hh_l0"]
    enter, forget, new, leave = jnp.split(gates, 4, axis=-1)
    c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(enter) * jnp.tanh(new)
    h = jax.nn.sigmoid(leave) * jnp.tanh(c)
    return (h, c), h


CELLS = {"RNN": rnn, "GRU": gru, "LSTM": lstm}


def recurrent_loss(kind, params, batch, carry):
    """The mean over the batch and the window's time; x is [batch, time, inputs]."""
    x, y = batch
    carry, hidden = lax.scan(functools.partial(CELLS[kind], params), carry, jnp.swapaxes(x, 0, 1))
    return jnp.mean((jnp.swapaxes(hidden, 0, 1) @ params["out"] - y) ** 2), (carry, None)


def at_rest(kind):
    """The state before the first window."""
    zeros = lambda: jnp.zeros((ROWS, HIDDEN))
    return (zeros(), zeros()) if kind == "LSTM" else zeros()


def sequences(count=1):
    """x and y, [batch, time, features], a pair for each stretch of time."""
    generator = np.random.default_rng(1)
    return [(generator.normal(size=(ROWS, TIME, INPUTS)), generator.normal(size=(ROWS, TIME, OUTPUTS))) for _ in range(count)]


def torch_model(kind):
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(INPUTS, HIDDEN, batch_first=True, dtype=torch.float64)
    return module, torch.nn.Parameter(torch.randn(HIDDEN, OUTPUTS, dtype=torch.float64))


def torch_leaves(module, out):
    return {**dict(module.named_parameters()), "out": out}


def values(tensors):
    """The numbers of named tensors, as arrays of JAX."""
    return {name: jnp.array(tensor.detach().numpy()) for name, tensor in tensors.items()}


def torch_carry(state):
    """PyTorch's state has an axis for layers."""
    take = lambda tensor: jnp.array(tensor.detach().numpy()[0])
    return tuple(map(take, state)) if isinstance(state, tuple) else take(state)


def detach(state):
    return tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()


def torch_windows(model, sequence, state, size, *, detached, weigh=lambda steps: steps / TIME):
    """Window after window, gradients added to `.grad`: `(loss, state)`.

    Detached, each window's backward comes at once; else the graph is retained, and each loss goes back to the beginning.
    """
    (module, out), (x, y) = model, (torch.tensor(part) for part in sequence)
    losses = []
    for x_window, y_window in zip(x.split(size, 1), y.split(size, 1), strict=True):
        hidden, state = module(x_window, state)
        losses.append(torch.nn.functional.mse_loss(hidden @ out, y_window) * weigh(x_window.shape[1]))
        if detached:
            losses[-1].backward()
            state = detach(state)
    if not detached:
        for loss in losses:
            loss.backward(retain_graph=True)
    return sum(loss.item() for loss in losses), detach(state)


def torch_gradients(kind, size, **options):
    """`(loss, carry, grads)` of one sequence, and the parameters."""
    model = torch_model(kind)
    loss, state = torch_windows(model, sequences()[0], None, size, **options)
    leaves = torch_leaves(*model)
    return (loss, torch_carry(state), values({name: leaf.grad for name, leaf in leaves.items()})), values(leaves)


@pytest.mark.parametrize(
    ("options", "size", "detached"),
    [
        ({"microbatch_size": 5}, 5, True),  # 5, 5 and 2 steps
        ({"num_microbatches": 3}, 4, True),
        ({"num_microbatches": 1}, 5, False),
    ],
    ids=["truncated, ragged", "truncated", "full"],
)
@pytest.mark.parametrize("kind", CELLS)
def test_back_propagation_through_time(x64, kind, options, size, detached):
    expected, params = torch_gradients(kind, size, detached=detached)
    loss_fn = functools.partial(recurrent_loss, kind)
    fun = jax.jit(fg.value_and_grad(loss_fn, has_aux=True, carry_argnum=2, in_axes=1, order="contiguous", **options))
    (loss, (carry, _)), grads = fun(params, sequences()[0], at_rest(kind))
    assert relative_difference((loss, carry, grads), expected) <= TOLERANCE


def test_what_is_cut_off_matters():
    """Else the comparisons above would hold for any windows."""
    truncated, full = (torch_gradients("GRU", 5, detached=detached)[0][2] for detached in (True, False))
    assert relative_difference(truncated, full) > 1e-2


def test_means_that_are_added_unweighed(x64):
    expected, params = torch_gradients("RNN", 5, detached=True, weigh=lambda steps: 1 / 3)

    def loss_fn(params, batch, carry):
        mean, rest = recurrent_loss("RNN", params, batch, carry)
        return fg.WeightedLoss(mean, 1.0), rest

    fun = fg.value_and_grad(loss_fn, has_aux=True, carry_argnum=2, in_axes=1, order="contiguous", microbatch_size=5)
    (loss, (carry, _)), grads = jax.jit(fun)(params, sequences()[0], at_rest("RNN"))
    assert relative_difference((loss, carry, grads), expected) <= TOLERANCE


def test_training_with_the_state_handed_on_from_step_to_step(x64):
    """Each step is the next stretch of the same sequences, in windows of 5, 5 and 2 time steps, with Adam."""
    module, out = torch_model("LSTM")
    leaves, optimizer = torch_leaves(module, out), optax.adam(1e-2)
    theirs, theirs_state = torch.optim.Adam(leaves.values(), lr=1e-2), None
    loss_fn = functools.partial(recurrent_loss, "LSTM")
    options = {"has_aux": True, "carry_argnum": 2, "in_axes": 1}
    step = fg.train_step(loss_fn, optimizer, microbatch_size=5, order="contiguous", **options)
    steps = fg.micro_steps(loss_fn, optimizer, **options)
    whole, singly = (fg.TrainState.create(values(leaves), optimizer) for _ in range(2))
    carry = handed_on = at_rest("LSTM")
    for sequence in sequences(4):
        theirs.zero_grad()
        loss, theirs_state = torch_windows((module, out), sequence, theirs_state, 5, detached=True)
        theirs.step()
        whole, metrics = step(whole, sequence, carry)
        carry = metrics["carry"]
        for begin in (0, 5, 10):
            window = tuple(part[:, begin : begin + 5] for part in sequence)
            singly, (_, (handed_on, _)) = steps.backward(singly, window, handed_on)
        singly, counted = steps.update(singly)
        expected = values(leaves), torch_carry(theirs_state)
        assert relative_difference((whole.params, carry), expected) <= TOLERANCE
        assert relative_difference((singly.params, handed_on), expected) <= TOLERANCE
        assert abs(metrics["loss"] - loss) <= TOLERANCE * loss
        assert (metrics["weight"], counted["weight"]) == (TIME, TIME)


class TestBatchNorm:
    """Two layers of batch normalization, whose statistics go through the microbatches of each window and on to the next."""

    FEATURES, HIDDEN, CLASSES, ROWS, SIZE, STEPS = 6, 5, 3, 22, 6, 4

    def _windows(self):
        generator = np.random.default_rng(2)
        for _ in range(self.STEPS):
            x = generator.normal(size=(self.ROWS, self.FEATURES)) * 2 + 1
            yield x, generator.integers(0, self.CLASSES, self.ROWS)

    def _module(self, momentum):
        torch.manual_seed(0)
        norm = lambda width: torch.nn.BatchNorm1d(width, momentum=momentum)
        linear = lambda inputs, outputs: torch.nn.Linear(inputs, outputs, bias=False)
        first, second = linear(self.FEATURES, self.HIDDEN), linear(self.HIDDEN, self.CLASSES)
        return torch.nn.Sequential(first, norm(self.HIDDEN), torch.nn.Tanh(), second, norm(self.CLASSES)).double()

    @staticmethod
    def _normalize(params, stats, x, momentum):
        """PyTorch's: normalized by the biased variance, remembered unbiased; without momentum, an average over all."""
        count = stats["num_batches_tracked"] + 1
        rate = 1 / count if momentum is None else momentum
        mean, var = jnp.mean(x, axis=0), jnp.var(x, axis=0)
        new = {"running_mean": mean, "running_var": var * len(x) / (len(x) - 1)}
        new = {name: (1 - rate) * stats[name] + rate * value for name, value in new.items()}
        return (x - mean) / jnp.sqrt(var + 1e-5) * params["weight"] + params["bias"], {**new, "num_batches_tracked": count}

    def _loss_fn(self, momentum):
        def loss_fn(params, batch, stats):
            x, labels = batch
            x, first = self._normalize(params["1"], stats["1"], x @ params["0"]["weight"].T, momentum)
            x = jnp.tanh(x) @ params["3"]["weight"].T
            x, second = self._normalize(params["4"], stats["4"], x, momentum)
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(x, labels)
            return losses.mean(), ({"1": first, "4": second}, None)

        return loss_fn

    @staticmethod
    def _tree(named):
        """`{"1.weight": ...}` as `{"1": {"weight": ...}}`, in arrays of JAX."""
        tree = {}
        for name, tensor in named:
            layer, leaf = name.split(".")
            tree.setdefault(layer, {})[leaf] = jnp.array(tensor.detach().numpy())
        return tree

    def _microbatches(self, batch, order):
        num, rest = divmod(self.ROWS, self.SIZE)
        rows = np.arange(num * self.SIZE)
        dealt = [rows[i::num] for i in range(num)] if order == "strided" else list(rows.reshape(num, -1))
        for index in [*dealt, np.arange(self.ROWS - rest, self.ROWS)]:
            yield tuple(part[index] for part in batch)

    def _backward_in_torch(self, module, batch, order):
        module.zero_grad()
        total = 0.0
        for x, labels in self._microbatches(batch, order):
            loss = torch.nn.functional.cross_entropy(module(torch.tensor(x)), torch.tensor(labels)) * len(x) / self.ROWS
            loss.backward()
            total += loss.item()
        return total

    def _expected(self, module, optimizer):
        """Parameters, statistics, and what SGD remembers of the gradients: the first one, then sums of them."""
        named = list(module.named_parameters())
        momenta = self._tree((name, optimizer.state[leaf]["momentum_buffer"]) for name, leaf in named)
        return self._tree(named), self._tree(module.named_buffers()), momenta

    @pytest.mark.parametrize(("order", "momentum"), [("strided", 0.1), ("contiguous", None)])
    def test_statistics_gradients_and_parameters(self, x64, order, momentum):
        module, optimizer = self._module(momentum), optax.sgd(0.1, momentum=0.9)
        theirs = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        options = {"has_aux": True, "carry_argnum": 2, "microbatch_size": self.SIZE, "order": order}
        step = fg.train_step(self._loss_fn(momentum), optimizer, **options)
        state = fg.TrainState.create(self._tree(module.named_parameters()), optimizer)
        carry = self._tree(module.named_buffers())
        for batch in self._windows():
            loss = self._backward_in_torch(module, batch, order)
            theirs.step()
            state, metrics = step(state, batch, carry)
            carry = metrics["carry"]
            got = state.params, carry, state.opt_state[0].trace
            assert relative_difference(got, self._expected(module, theirs)) <= TOLERANCE
            assert abs(metrics["loss"] - loss) <= TOLERANCE * loss
        assert carry["1"]["num_batches_tracked"] == self.STEPS * 4
