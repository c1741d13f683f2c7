"""The learning rates of `torch.optim.lr_scheduler` as optax schedules: `count -> learning rate`, the first count being 0."""

from funcgrad.torch_optim.schedules.base import Schedule
from funcgrad.torch_optim.schedules.cosine import cosine_annealing_lr, cosine_annealing_warm_restarts
from funcgrad.torch_optim.schedules.cyclic import cyclic_lr, one_cycle_lr
from funcgrad.torch_optim.schedules.factors import (
    constant_lr,
    exponential_lr,
    linear_lr,
    multi_step_lr,
    polynomial_lr,
    step_lr,
)
from funcgrad.torch_optim.schedules.functions import lambda_lr, multiplicative_lr
from funcgrad.torch_optim.schedules.joined import chained_scheduler, sequential_lr
from funcgrad.torch_optim.schedules.plateau import ReduceLROnPlateauState, reduce_lr_on_plateau

__all__ = [
    "ReduceLROnPlateauState",
    "Schedule",
    "chained_scheduler",
    "constant_lr",
    "cosine_annealing_lr",
    "cosine_annealing_warm_restarts",
    "cyclic_lr",
    "exponential_lr",
    "lambda_lr",
    "linear_lr",
    "multi_step_lr",
    "multiplicative_lr",
    "one_cycle_lr",
    "polynomial_lr",
    "reduce_lr_on_plateau",
    "sequential_lr",
    "step_lr",
]
