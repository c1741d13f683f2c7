"""The implicit face: PyTorch's loop, with its hidden `.grad`, on top of the pure core."""

from funcgrad.stateful.clip import clip_grad_norm_, clip_grad_value_
from funcgrad.stateful.evaluate import evaluate, grad
from funcgrad.stateful.loss import Loss
from funcgrad.stateful.optimizer import Optimizer
from funcgrad.stateful.parameter import Handle, Parameter, arrays, parameters, zero_grad
from funcgrad.stateful.scaler import GradScaler

__all__ = [
    "GradScaler",
    "Handle",
    "Loss",
    "Optimizer",
    "Parameter",
    "arrays",
    "clip_grad_norm_",
    "clip_grad_value_",
    "evaluate",
    "grad",
    "parameters",
    "zero_grad",
]
