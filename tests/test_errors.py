"""Every mistake is an error at trace time: it says what was expected, what came, where, and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_identical

import funcgrad as fg

OPTIMIZER = optax.adam(1e-2)
PARAMS = {"w": np.ones(3, np.float32), "b": np.float32(1)}
BATCH = {"x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)}


def loss_fn(params, batch, *rest):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def returning(make):
    """A loss function whose output is `make(loss)`."""
    return lambda params, batch, *rest: make(loss_fn(params, batch))


def replaced(**leaves):
    return {**BATCH, **leaves}


EMPTY = {name: leaf[:0] for name, leaf in BATCH.items()}
KEY = jax.random.key(0)
CARRIED = {"has_aux": True, "carry_argnum": 2}
CARRY = {"mean": np.zeros(3, np.float32), "var": np.ones(3, np.float32)}
# name: (loss function, options, arguments after params, the error, its text)
CALLS = {
    "num_microbatches does not divide": (
        loss_fn,
        {"num_microbatches": 3},
        (BATCH,),
        ValueError,
        r"num_microbatches=3 does not divide the batch of 8 rows. Use a number that divides 8, or microbatch_size=3",
    ),
    "more microbatches than rows": (
        loss_fn,
        {"num_microbatches": 16},
        (BATCH,),
        ValueError,
        r"num_microbatches=16 does not divide the batch of 8 rows",
    ),
    "axes of different length": (
        loss_fn,
        {"num_microbatches": 2},
        (replaced(y=np.ones(4, np.float32)),),
        ValueError,
        r"same length along their batch axis: args\[1\]\['x'\] has 8 rows, args\[1\]\['y'\] has 4. Give in_axes=None",
    ),
    "a scalar leaf": (
        loss_fn,
        {"num_microbatches": 2},
        (replaced(y=np.float32(1)),),
        ValueError,
        r"must have a batch axis; args\[1\]\['y'\] is a scalar, float32\[\]. Give in_axes=None",
    ),
    "an axis that is not there": (
        loss_fn,
        {"num_microbatches": 2, "in_axes": 1},
        (BATCH,),
        ValueError,
        r"in_axes gives axis 1 for args\[1\]\['y'\], which is float32\[8\]",
    ),
    "in_axes of a wrong type": (
        loss_fn,
        {"num_microbatches": 2, "in_axes": "rows"},
        (BATCH,),
        TypeError,
        r"in_axes must hold integers and None, as for jax.vmap; got 'rows' for args\[1\]\['x'\]",
    ),
    "in_axes that is no prefix": (
        loss_fn,
        {"num_microbatches": 2, "in_axes": {"x": 0}},
        (BATCH,),
        ValueError,
        r"in_axes must be one entry, or a pytree prefix with an entry for each of \['x'\], \['y'\]; got {'x': 0}",
    ),
    "no leaf with a batch axis": (
        loss_fn,
        {"num_microbatches": 2, "in_axes": None},
        (BATCH,),
        ValueError,
        r"the batch \(args\[1\]\) has no leaf with a batch axis. Name the arguments that hold rows in batch_argnums",
    ),
    "an empty batch": (
        loss_fn,
        {"num_microbatches": 2},
        (EMPTY,),
        ValueError,
        r"the batch is empty: args\[1\]\['x'\] has 0 rows",
    ),
    "an empty batch, by size": (
        loss_fn,
        {"microbatch_size": 2},
        (EMPTY,),
        ValueError,
        r"the batch is empty: args\[1\]\['x'\] has 0 rows",
    ),
    "a batch argument that is not there": (
        loss_fn,
        {"num_microbatches": 2, "batch_argnums": 3},
        (BATCH,),
        ValueError,
        r"batch_argnums names argument 3, but the function was called with 2 positional arguments",
    ),
    "a loss that is not a scalar": (
        returning(lambda loss: loss * jnp.ones(2)),
        {"num_microbatches": 2},
        (BATCH,),
        TypeError,
        r"the loss must be a real scalar, float32\[\] for example; got float32\[2\]. Return a mean over the rows, or fg.Weig",
    ),
    "a loss that is complex": (
        returning(lambda loss: loss * 1j),
        {"num_microbatches": 2},
        (BATCH,),
        TypeError,
        r"the loss must be a real scalar, float32\[\] for example; got complex64\[\]",
    ),
    "a loss that is an integer": (
        returning(lambda loss: loss.astype(int)),
        {"num_microbatches": 2},
        (BATCH,),
        TypeError,
        r"the loss must be a real scalar, float32\[\] for example; got int32\[\]",
    ),
    "no loss": (
        returning(lambda loss: None),
        {"num_microbatches": 2},
        (BATCH,),
        TypeError,
        r"the loss must be a real scalar, float32\[\] for example; got NoneType",
    ),
    "a WeightedLoss with a vector for its total": (
        returning(lambda loss: fg.WeightedLoss(loss * jnp.ones(4), 4)),
        {"num_microbatches": 2},
        (BATCH,),
        TypeError,
        r"WeightedLoss.total must be a real scalar, float32\[\] for example; got float32\[4\]. Sum it over the rows",
    ),
    "a WeightedLoss with a vector for its weight": (
        returning(lambda loss: fg.WeightedLoss(loss, jnp.ones(4))),
        {"num_microbatches": 2},
        (BATCH,),
        TypeError,
        r"WeightedLoss.weight must be a real scalar, float32\[\] for example; got float32\[4\]. Sum it over the rows",
    ),
    "has_aux without a pair": (
        loss_fn,
        {"num_microbatches": 2, "has_aux": True},
        (BATCH,),
        TypeError,
        r"with has_aux=True the loss function must return a pair \(loss, aux\); got float32\[\]",
    ),
    "has_aux with three values": (
        returning(lambda loss: (loss, 1, 2)),
        {"num_microbatches": 2, "has_aux": True},
        (BATCH,),
        TypeError,
        r"with has_aux=True the loss function must return a pair \(loss, aux\); got a tuple of 3",
    ),
    "a pair without has_aux": (
        returning(lambda loss: (loss, {})),
        {"num_microbatches": 2},
        (BATCH,),
        TypeError,
        r"must return a scalar or a WeightedLoss; got a tuple of 2. If it returns \(loss, aux\), pass has_aux=True",
    ),
    "the mean of an integer": (
        returning(lambda loss: (loss, {"correct": jnp.array(3)})),
        {"num_microbatches": 2, "has_aux": True},
        (BATCH,),
        TypeError,
        r"aux\['correct'\] is int32\[\], which has no mean in its own dtype. Reduce it with \"sum\"",
    ),
    "aux that does not fit": (
        returning(lambda loss: (loss, {"correct": loss})),
        {"num_microbatches": 2, "has_aux": True, "aux": {"wrong": "sum"}},
        (BATCH,),
        ValueError,
        r"aux must be one entry, or a pytree prefix with an entry for each of \['correct'\]; got {'wrong': 'sum'}",
    ),
    "a key that is not named": (
        loss_fn,
        {"num_microbatches": 2},
        (BATCH, {"dropout": KEY}),
        ValueError,
        r"args\[2\]\['dropout'\] is a PRNG key \(key<fry>\[\]\), and every microbatch would draw the same numbers.*key_argnums",
    ),
    "a key in the batch that every microbatch sees whole": (
        loss_fn,
        {"num_microbatches": 2, "in_axes": {"x": 0, "y": 0, "key": None}},
        (replaced(key=KEY),),
        ValueError,
        r"args\[1\]\['key'\] is a PRNG key",
    ),
    "key_argnums without a key": (
        loss_fn,
        {"num_microbatches": 2, "key_argnums": 2},
        (BATCH, np.ones(3, np.float32)),
        ValueError,
        r"key_argnums names args\[2\], which holds no PRNG key: float32\[3\]",
    ),
    "a key that is also the batch": (
        loss_fn,
        {"num_microbatches": 2, "key_argnums": 1},
        (BATCH,),
        ValueError,
        r"argument 1 is named in key_argnums and in batch_argnums",
    ),
    "an argument named twice": (
        loss_fn,
        {"num_microbatches": 2, "batch_argnums": (1, -1)},
        (BATCH,),
        ValueError,
        r"batch_argnums=\(1, -1\) names an argument twice",
    ),
    "aux that is text": (
        returning(lambda loss: (loss, {"name": "train"})),
        {"num_microbatches": 2, "has_aux": True},
        (BATCH,),
        TypeError,
        r"aux\['name'\] must be numeric to be reduced over microbatches; got str",
    ),
    "aux with a value for each row, and a smaller last microbatch": (
        lambda params, batch, *rest: (loss_fn(params, batch), {"rows": batch["x"][:, 0]}),
        {"microbatch_size": 7, "has_aux": True},
        (BATCH,),
        ValueError,
        r"aux\['rows'\] has the shape \(7,\) in the microbatches and \(1,\) in the smaller last one",
    ),
    "aux to be joined that is a scalar": (
        returning(lambda loss: (loss, {"mean": loss})),
        {"num_microbatches": 2, "has_aux": True, "aux": "concat"},
        (BATCH,),
        ValueError,
        r"aux\['mean'\] is float32\[\], but \"concat\" joins leaves that have a row for each row of the microbatch, here 4",
    ),
    "a carry of another structure": (
        lambda params, batch, carry: (loss_fn(params, batch), ({"mean": carry["mean"]}, None)),
        {"num_microbatches": 2, **CARRIED},
        (BATCH, CARRY),
        ValueError,
        r"carry that the function returns must have the structure of the carry that came in as args\[2\]: missing \['var'\]",
    ),
    "a carry of another kind": (
        lambda params, batch, carry: (loss_fn(params, batch), (list(carry.values()), None)),
        {"num_microbatches": 2, **CARRIED},
        (BATCH, CARRY),
        ValueError,
        r"structure of the carry that came in as args\[2\]: missing \['mean'\], \['var'\]; unexpected \[0\], \[1\]",
    ),
    "a carry of another shape": (
        lambda params, batch, carry: (loss_fn(params, batch), ({**carry, "var": jnp.ones(4)}, None)),
        {"num_microbatches": 2, **CARRIED},
        (BATCH, CARRY),
        ValueError,
        r"keep its shapes and dtypes .*: carry\['var'\] came in as float32\[3\], and the function returns float32\[4\]",
    ),
    "a carry of another dtype": (
        lambda params, batch, carry: (loss_fn(params, batch), ({**carry, "mean": carry["mean"].astype(jnp.float16)}, None)),
        {"num_microbatches": 2, **CARRIED},
        (BATCH, CARRY),
        ValueError,
        r"keep its shapes and dtypes .*: carry\['mean'\] came in as float32\[3\], and the function returns float16\[3\]",
    ),
    "a carry without aux": (
        lambda params, batch, carry: (loss_fn(params, batch), carry),
        {"num_microbatches": 2, **CARRIED},
        (BATCH, [CARRY]),
        TypeError,
        r"with carry_argnum the function must return \(loss, \(carry, aux\)\); got a list of 1 beside the loss",
    ),
    "one argument with two uses": (
        loss_fn,
        {"num_microbatches": 2, "batch_argnums": (0, 1)},
        (BATCH,),
        ValueError,
        r"argument 0 is named in argnums and in batch_argnums",
    ),
}


@pytest.mark.parametrize("name", CALLS)
class TestCalls:
    def test_value_and_grad(self, name):
        fun, options, args, error, message = CALLS[name]
        for wrapped in (fg.value_and_grad(fun, **options), jax.jit(fg.value_and_grad(fun, **options))):
            with pytest.raises(error, match=message):
                wrapped(PARAMS, *args)

    def test_train_step_leaves_the_state_as_it_was(self, name):
        fun, options, args, error, message = CALLS[name]
        state = fg.TrainState.create(PARAMS, OPTIMIZER)
        before = jax.tree.map(np.asarray, state)
        with pytest.raises(error, match=message):
            fg.train_step(fun, OPTIMIZER, **options)(state, *args)
        assert_identical(state, before)


SPLIT_OR_REDUCED = {name for name in CALLS if name.startswith(("num_", "more ", "aux ")) or name == "the mean of an integer"}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in SPLIT_OR_REDUCED])
class TestCallsOfOneMicrobatch:
    @staticmethod
    def _case(name):
        fun, options, args, error, message = CALLS[name]
        options = {key: value for key, value in options.items() if key not in ("num_microbatches", "microbatch_size")}
        return fun, options, args, pytest.raises(error, match=message)

    def test_micro_steps_leave_the_state_as_it_was(self, name):
        fun, options, args, raises = self._case(name)
        state = fg.TrainState.create(PARAMS, OPTIMIZER)
        before = jax.tree.map(np.asarray, state)
        with raises:
            fg.micro_steps(fun, OPTIMIZER, **options).backward(state, *args)
        assert_identical(state, before)

    def test_backward(self, name):
        fun, options, args, raises = self._case(name)
        with raises:
            fg.backward(fun, **options)(fg.zeros(PARAMS), PARAMS, *args)


def test_a_leaf_of_the_batch_that_is_no_array():
    batch = replaced(name="train")
    with pytest.raises(TypeError, match=r"must be an array; args\[1\]\['name'\] is a str. Give in_axes=None"):
        fg.grad(loss_fn, num_microbatches=2)(PARAMS, batch)
    whole = {"x": 0, "y": 0, "name": None}
    assert fg.grad(loss_fn, num_microbatches=2, in_axes=whole)(PARAMS, batch)["w"].shape == (3,)
    state = fg.TrainState.create(PARAMS, OPTIMIZER)
    with pytest.raises(TypeError, match=r"\['name'\]"):  # jax.jit itself refuses the argument
        fg.train_step(loss_fn, OPTIMIZER)(state, batch)
    assert not state.params["w"].is_deleted()


# option: (value, the error, its text)
OPTIONS = [
    ({"num_microbatches": 0}, ValueError, r"num_microbatches must be at least 1; got 0"),
    ({"num_microbatches": -2}, ValueError, r"num_microbatches must be at least 1; got -2"),
    ({"num_microbatches": 2.0}, TypeError, r"num_microbatches must be an integer, at least 1; got 2.0"),
    ({"num_microbatches": True}, TypeError, r"num_microbatches must be an integer, at least 1; got True"),
    ({"num_microbatches": None}, TypeError, r"num_microbatches must be an integer, at least 1; got None"),
    ({"microbatch_size": 0}, ValueError, r"microbatch_size must be at least 1; got 0"),
    ({"microbatch_size": 1.5}, TypeError, r"microbatch_size must be an integer, at least 1; got 1.5"),
    ({"num_microbatches": 2, "microbatch_size": 4}, ValueError, r"num_microbatches=2 or microbatch_size=4, not both"),
    ({"order": "random"}, ValueError, r"order must be one of 'strided', 'contiguous'; got 'random'"),
    ({"loop": "while"}, ValueError, r"loop must be one of 'auto', 'scan', 'unroll', 'ordered', or an integer.*; got 'while'"),
    ({"loop": 0}, ValueError, r"loop must be at least 1; got 0"),
    ({"loop": 2.5}, ValueError, r"loop must be one of 'auto', 'scan', 'unroll', 'ordered', or an integer.*; got 2.5"),
    ({"aux": "median"}, ValueError, r"aux must be one of 'mean', 'sum', .*, or aux a pytree prefix of these; got 'median'"),
    ({"aux": {"a": "mean", "b": None}}, ValueError, r"aux\['b'\] must be one of 'mean', 'sum'.*; got None"),
    ({"batch_argnums": "x"}, TypeError, r"batch_argnums must be an integer or a sequence of integers; got 'x'"),
    ({"key_argnums": 1.5}, TypeError, r"key_argnums must be an integer or a sequence of integers; got 1.5"),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_option_values(options, error, message):
    for transform in (fg.value_and_grad, fg.grad):
        with pytest.raises(error, match=message):
            transform(loss_fn, **options)
    with pytest.raises(error, match=message):
        fg.train_step(loss_fn, OPTIMIZER, **options)


class TestTrainable:
    @pytest.mark.parametrize(
        ("trainable", "error", "message"),
        [
            (False, ValueError, r"nothing to train: trainable=False selects nothing. Leaves: params\['b'\]: float32\[\]"),
            (lambda path, leaf: False, ValueError, r"there is nothing to train"),
            (
                {"w": True},
                ValueError,
                r"trainable must be one entry, or a pytree prefix with an entry for each of \['b'\], \['w'\]",
            ),
            (
                {"w": True, "b": "yes"},
                TypeError,
                r"trainable must give True or False for each leaf; got 'yes' for params\['b'\]",
            ),
            (lambda path, leaf: None, TypeError, r"trainable must give True or False for each leaf; got None"),
        ],
    )
    def test_values(self, trainable, error, message):
        with pytest.raises(error, match=message):
            fg.zeros(PARAMS, trainable=trainable)
        with pytest.raises(error, match=message):
            fg.grad(loss_fn, num_microbatches=2, trainable=trainable)(PARAMS, BATCH)
        with pytest.raises(error, match=message):
            jax.jit(fg.value_and_grad(loss_fn, num_microbatches=2, trainable=trainable))(PARAMS, BATCH)
        with pytest.raises(error, match=message):
            fg.backward(loss_fn, trainable=trainable)(fg.zeros(PARAMS), PARAMS, BATCH)
        with pytest.raises(error, match=message):
            fg.TrainState.create(PARAMS, OPTIMIZER, trainable=trainable)
        state = fg.TrainState.create(PARAMS, OPTIMIZER)
        before = jax.tree.map(np.asarray, state)
        with pytest.raises(error, match=message):
            state.with_trainable(OPTIMIZER, trainable)
        for step in (fg.train_step, fg.micro_steps):
            step = step(loss_fn, OPTIMIZER, trainable=trainable)
            with pytest.raises(error, match=message):
                getattr(step, "backward", step)(state, BATCH)
        assert_identical(state, before)

    def test_no_leaf_has_a_gradient(self):
        with pytest.raises(ValueError, match=r"no leaf is floating or complex. Leaves: params\['n'\]: int32\[3\]"):
            fg.zeros({"n": np.ones(3, np.int32)})

    def test_the_state_says_it(self):
        state = fg.TrainState.create(PARAMS, OPTIMIZER)
        with pytest.raises(ValueError, match=r"trainable says False for params\['b'\], but the buffer was made with True"):
            fg.train_step(loss_fn, OPTIMIZER, trainable={"w": True, "b": False})(state, BATCH)


class TestBuffers:
    buffer = fg.zeros(PARAMS)

    @pytest.mark.parametrize(
        ("grads", "error", "message"),
        [
            ({"w": np.ones(3)}, ValueError, r"grads must have the structure of the buffer's grads: missing \['b'\]"),
            ({"w": np.ones(3), "c": np.ones(())}, ValueError, r"missing \['b'\]; unexpected \['c'\]"),
            ([np.ones(()), np.ones(3)], ValueError, r"grads must have the structure of the buffer's grads"),
            ({"w": np.ones(4), "b": np.ones(())}, ValueError, r"grads\['w'\] must have shape \(3,\), as in the buffer; got"),
            ({"w": np.ones(()), "b": np.ones(())}, ValueError, r"grads\['w'\] must have shape \(3,\)"),
            ({"w": np.ones(3, int), "b": 1.0}, TypeError, r"grads\['w'\] must fit the buffer's float32\[3\]; got int"),
            (
                {"w": np.ones(3, complex), "b": 1.0},
                TypeError,
                r"grads\['w'\] must fit the buffer's float32\[3\]; got complex64\[3\]",
            ),
            ({"w": "grad", "b": 1.0}, ValueError, r"grads\['w'\] must have shape \(3,\), as in the buffer; got str"),
            (fg.zeros(PARAMS), TypeError, r"expected gradients, got a GradBuffer. Add two buffers with fg.merge\(a, b\)"),
        ],
    )
    def test_gradients_that_do_not_fit(self, grads, error, message):
        with pytest.raises(error, match=message):
            fg.accumulate(self.buffer, grads)
        with pytest.raises(error, match=message):
            jax.jit(lambda buffer: fg.accumulate(buffer, grads))(self.buffer)

    def test_a_gradient_for_what_is_not_trained(self):
        buffer = fg.zeros(PARAMS, trainable={"w": True, "b": False})
        with pytest.raises(ValueError, match=r"grads\['b'\] has a gradient, float32\[\], but the buffer has none for it"):
            fg.accumulate(buffer, {"w": np.ones(3), "b": np.ones(())})

    @pytest.mark.parametrize("weight", [np.ones(3), [1.0], 1j, jax.random.key(0), None])
    def test_weights(self, weight):
        with pytest.raises(TypeError, match=r"weight must be a real scalar, float32\[\] for example; got .*. Sum it over"):
            fg.accumulate(self.buffer, PARAMS, weight)

    @pytest.mark.parametrize("verb", [fg.mean, fg.total, fg.zero_grad, lambda g: fg.merge(g, g), lambda g: fg.accumulate(g, g)])
    def test_gradients_where_a_buffer_belongs(self, verb):
        with pytest.raises(TypeError, match=r"fg\.\w+ takes a GradBuffer; got dict. Make one with fg.zeros\(params\)"):
            verb(fg.mean(self.buffer))

    def test_a_buffer_used_as_if_it_were_gradients(self):
        """optax refuses it, too, when the updates meet the parameters."""
        with pytest.raises(TypeError, match=r"expected gradients, got a GradBuffer"):
            fg.accumulate(self.buffer, self.buffer)
        optimizer = optax.sgd(0.1)
        updates, _ = optimizer.update(self.buffer, optimizer.init(PARAMS), PARAMS)
        with pytest.raises(ValueError, match=r"GradBuffer"):
            optax.apply_updates(PARAMS, updates)

    def test_merging_buffers_of_other_parameters(self):
        with pytest.raises(ValueError, match=r"the right buffer's grads must have the structure of the left buffer's grads"):
            fg.merge(self.buffer, fg.zeros({"w": np.ones(3)}))
        with pytest.raises(ValueError, match=r"\['w'\] must have shape \(3,\), as in the left buffer; got float32\[4\]"):
            fg.merge(self.buffer, fg.zeros({"w": np.ones(4, np.float32), "b": np.float32(1)}))
        frozen = fg.zeros(PARAMS, trainable={"w": True, "b": False})
        with pytest.raises(ValueError, match=r"both buffers must train the same leaves; only one of the two has grads\['b'\]"):
            fg.merge(self.buffer, frozen)

    @pytest.mark.parametrize(
        ("buffer", "error", "message"),
        [
            (PARAMS, TypeError, r"expected a GradBuffer, from fg.zeros\(params\); got dict"),
            (fg.zeros({"w": np.ones(3)}), ValueError, r"buffer.grads must have the structure of params: missing \['b'\]"),
            (
                fg.zeros({"w": np.ones(4, np.float32), "b": np.float32(1)}),
                ValueError,
                r"the buffer holds float32\[4\] for params\['w'\], which is float32\[3\]",
            ),
        ],
    )
    def test_backward_with_a_buffer_of_other_parameters(self, buffer, error, message):
        with pytest.raises(error, match=message):
            fg.backward(loss_fn)(buffer, PARAMS, BATCH)

    def test_a_gradient_held_for_an_integer(self):
        buffer = fg.zeros({"w": np.ones(3, np.float32)})
        with pytest.raises(TypeError, match=r"the buffer holds a gradient for params\['w'\], which has none: it is int32\[3\]"):
            fg.backward(lambda p, x: jnp.mean(x))(buffer, {"w": np.ones(3, np.int32)}, np.ones(2))

    @pytest.mark.parametrize(
        ("dtype", "message"),
        [
            (jnp.int32, r"dtype must be a floating or complex dtype, float32 for example; got int32"),
            (jnp.complex64, r"dtype=complex64 is complex, but params\['b'\] is float32"),
        ],
    )
    def test_dtypes(self, dtype, message):
        with pytest.raises(TypeError, match=message):
            fg.zeros(PARAMS, dtype=dtype)


class TestSteps:
    def test_a_state_that_is_none(self):
        step = fg.train_step(loss_fn, OPTIMIZER)
        for call in (step, step.lower, fg.micro_steps(loss_fn, OPTIMIZER).backward):
            with pytest.raises(TypeError, match=r"the first argument of a step must be a TrainState; got dict"):
                call(PARAMS, BATCH)

    def test_a_state_that_was_overwritten(self):
        steps = fg.micro_steps(loss_fn, OPTIMIZER)
        old = fg.TrainState.create(PARAMS, OPTIMIZER)
        new, _ = steps.backward(old, BATCH)
        for call in (
            lambda: steps.backward(old, BATCH),
            lambda: steps.update(old),
            lambda: fg.train_step(loss_fn, OPTIMIZER)(old, BATCH),
        ):
            with pytest.raises(ValueError, match=r"this state was overwritten by an earlier step.*donate=False"):
                call()
        assert steps.update(new)[0].step == 1

    def test_a_state_of_another_optimizer(self):
        state = fg.TrainState.create(PARAMS, OPTIMIZER)
        for step, args in (
            (fg.train_step(loss_fn, optax.sgd(0.1)), (BATCH,)),
            (fg.micro_steps(loss_fn, optax.sgd(0.1)).update, ()),
        ):
            with pytest.raises(ValueError, match=r"the state's opt_state is not of this optimizer"):
                step(state, *args)
        assert not state.params["w"].is_deleted()

    def test_an_optimizer_that_needs_more_than_gradients(self):
        optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
        state = fg.TrainState.create(PARAMS, optimizer)
        with pytest.raises(TypeError, match="value") as caught:
            fg.micro_steps(loss_fn, optimizer).update(state)
        assert "update(state, value=loss)" in "".join(caught.value.__notes__)

    def test_an_optimizer_that_is_none(self):
        for make in (fg.train_step, fg.micro_steps):
            with pytest.raises(TypeError, match=r"optimizer must be an optax transformation.*; got float32\[\]"):
                make(loss_fn, 0.1)
        with pytest.raises(TypeError, match=r"optimizer must be an optax transformation"):
            fg.TrainState.create(PARAMS, 0.1)

    def test_an_array_that_looks_like_a_part_of_the_batch_is_pointed_at(self):
        fun = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)
        with pytest.raises((TypeError, ValueError)) as caught:
            fg.grad(fun, num_microbatches=2)(PARAMS, BATCH["x"], BATCH["y"])
        assert "args[2] has 8 rows, like the batch, but is passed whole" in "".join(caught.value.__notes__)
        fun = lambda params, x, *, y: jnp.mean((x @ params["w"] - y) ** 2)
        with pytest.raises((TypeError, ValueError)) as caught:
            fg.grad(fun, num_microbatches=2)(PARAMS, BATCH["x"], y=BATCH["y"])
        assert "kwargs['y'] has 8 rows" in "".join(caught.value.__notes__)

    def test_and_warned_of_where_rows_come_singly_and_no_shape_tells(self):
        fun = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)
        for wrap in (lambda fun: fun, jax.jit):
            with pytest.warns(UserWarning, match=r"args\[2\] has 8 rows, like the batch, but is passed whole") as caught:
                wrap(fg.grad(fun, num_microbatches=8))(PARAMS, BATCH["x"], BATCH["y"])
            assert caught[0].filename == __file__

    def test_a_state_of_shapes(self):
        shapes = jax.eval_shape(lambda: PARAMS)
        with pytest.raises(TypeError, match=r"params must hold arrays. For a state's shapes: jax.eval_shape"):
            fg.TrainState.create(shapes, OPTIMIZER)

    def test_numbers_for_parameters(self):
        with pytest.raises(ValueError, match=r"no leaf is an array that is floating or complex.*jnp.asarray\(number\)"):
            fg.TrainState.create({"w": 1.0}, OPTIMIZER)
