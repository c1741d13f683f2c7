"""torch.optim's update rules as optax transformations: the same steps as PyTorch, to rounding.

Each function has PyTorch's argument names and defaults, but that `lr` is `learning_rate` as in optax, and answers an
`optax.GradientTransformationExtraArgs`. What they share:

- `learning_rate` is a number or an optax schedule, which counts the optimizer's steps; 0 is PyTorch's first.
- `optax.inject_hyperparams` works on all.
- State is kept for each parameter. One whose gradient is None keeps its value and its state bit for bit.
- `update` needs the parameters.
- `schedules` holds the learning rates of `torch.optim.lr_scheduler`.
- Parameters of 16 bits are rounded where PyTorch rounds them; a complex one is two real ones.
"""

from funcgrad.torch_optim import schedules
from funcgrad.torch_optim.adafactor import adafactor
from funcgrad.torch_optim.adagrad import adadelta, adagrad
from funcgrad.torch_optim.adam import adam, adamax, adamw
from funcgrad.torch_optim.clip import clip_grad_norm, clip_grad_value
from funcgrad.torch_optim.lbfgs import lbfgs
from funcgrad.torch_optim.muon import muon
from funcgrad.torch_optim.nadam import nadam, radam
from funcgrad.torch_optim.per_parameter import per_parameter
from funcgrad.torch_optim.rmsprop import rmsprop
from funcgrad.torch_optim.rprop import rprop
from funcgrad.torch_optim.sgd import asgd, sgd
from funcgrad.torch_optim.torch_state import from_torch_state, to_torch_state

__all__ = [
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "clip_grad_norm",
    "clip_grad_value",
    "from_torch_state",
    "lbfgs",
    "muon",
    "nadam",
    "per_parameter",
    "radam",
    "rmsprop",
    "rprop",
    "schedules",
    "sgd",
    "to_torch_state",
]
