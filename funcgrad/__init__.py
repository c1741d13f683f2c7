"""funcgrad: PyTorch's hidden gradient state, made explicit for JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from funcgrad.accumulator import GradBuffer, accumulate, mean, merge, total, zero_grad, zeros
from funcgrad.coupled import coupled_value_and_grad
from funcgrad.loss import WeightedLoss
from funcgrad.memory import Plan, plan
from funcgrad.state import TrainState
from funcgrad.train import Steps, micro_steps, train_step
from funcgrad.transform import backward, grad, value_and_grad

__all__ = [
    "GradBuffer",
    "Plan",
    "Steps",
    "TrainState",
    "WeightedLoss",
    "accumulate",
    "backward",
    "coupled_value_and_grad",
    "grad",
    "mean",
    "merge",
    "micro_steps",
    "plan",
    "total",
    "train_step",
    "value_and_grad",
    "zero_grad",
    "zeros",
]


if TYPE_CHECKING:
    from funcgrad import nnx as nnx
else:  # for a type checker, any name would do

    def __getattr__(name: str) -> Any:
        """`funcgrad.nnx`, imported when it is asked for: nothing else needs flax."""
        if name == "nnx":
            return importlib.import_module("funcgrad.nnx")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
