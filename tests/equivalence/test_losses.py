"""Losses that PyTorch divides by a sum of weights: one call for the whole batch there, microbatches here, the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparison import FLOAT64_TOLERANCE, relative_difference

import funcgrad as fg

CLASSES, ROWS, IGNORED = 5, 12, -100
GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(ROWS, CLASSES))
LABELS = np.array([0, 1, 2, 3, 4, 0, IGNORED, IGNORED, IGNORED, 2, 1, IGNORED])
CLASS_WEIGHTS = np.array([1.0, 2.0, 0.5, 3.0, 1.5])
INITIAL = GENERATOR.normal(size=CLASSES)


def torch_loss(weighted, smoothing):
    params = torch.tensor(INITIAL, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        torch.tensor(LOGITS) * params,
        torch.tensor(LABELS),
        weight=torch.tensor(CLASS_WEIGHTS) if weighted else None,
        label_smoothing=smoothing,
        ignore_index=IGNORED,
    )
    loss.backward()
    return loss.item(), params.grad.numpy()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("options", [{"num_microbatches": num} for num in (1, 2, 3, 4, 6, 12)] + [{"microbatch_size": 5}])
def test_cross_entropy(x64, weighted, smoothing, options):
    class_weights = jnp.asarray(CLASS_WEIGHTS) if weighted else jnp.ones(CLASSES)

    def loss_fn(params, batch):
        kept = batch["labels"] != IGNORED
        labels = jnp.where(kept, batch["labels"], 0)
        losses = -jax.nn.log_softmax(batch["logits"] * params) * class_weights
        picked = jnp.take_along_axis(losses, labels[:, None], axis=1)[:, 0]
        totals = (1 - smoothing) * picked + smoothing / CLASSES * losses.sum(1)
        return fg.WeightedLoss(jnp.sum(totals * kept), jnp.sum(class_weights[labels] * kept))

    got = jax.jit(fg.value_and_grad(loss_fn, **options))(jnp.asarray(INITIAL), {"logits": LOGITS, "labels": LABELS})
    assert relative_difference(got, torch_loss(weighted, smoothing)) <= FLOAT64_TOLERANCE
