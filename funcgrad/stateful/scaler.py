"""GradScaler: PyTorch's dynamic loss scaling, one scale for a window."""

from typing import Any

import jax.numpy as jnp

from funcgrad import accumulator, trees
from funcgrad.stateful.loss import Loss
from funcgrad.stateful.optimizer import Optimizer
from funcgrad.stateful.parameter import with_gradients

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
_READY, _UNSCALED, _STEPPED = "ready", "unscaled", "stepped"


class GradScaler:
    """Multiplies the loss, so that small float16 gradients do not vanish, and divides the gradients before the step.

    Where a gradient is infinite or NaN, in whichever microbatch, the step of the whole window is left out and the scale is
    reduced; after `growth_interval` windows without, it grows. The pure expression of the check is
    `fg.train_step(..., skip_nonfinite=True)`, which leaves out the one microbatch and needs no scale with float32 sums.

    Args:
      init_scale: the first scale.
      growth_factor, backoff_factor: what the scale is multiplied with, upwards (above 1) and downwards (below 1).
      growth_interval: the windows without infinities after which the scale grows.
      enabled: False makes every method pass through.

    Raises:
      ValueError: a factor is on the wrong side of 1.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from funcgrad import stateful
      >>> weight = stateful.Parameter(jnp.array(1.0))
      >>> optimizer, scaler = stateful.Optimizer(optax.sgd(0.5), weight), stateful.GradScaler(init_scale=8.0)
      >>> scaler.scale(stateful.evaluate(lambda weight: 2 * weight, weight)).backward()
      >>> print(weight.grad)
      16.0
      >>> scaler.step(optimizer)
      >>> scaler.update()
      >>> print(weight.grad, weight.data)
      2.0 0.0

    Reference:
      `torch.amp.GradScaler <https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling>`_
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ):
        if enabled and not growth_factor > 1.0:
            raise ValueError(f"growth_factor must be above 1; got {growth_factor}")
        if enabled and not backoff_factor < 1.0:
            raise ValueError(f"backoff_factor must be below 1; got {backoff_factor}")
        self._enabled = enabled
        self._scale, self._growth_tracker = float(init_scale), 0
        self._growth_factor, self._backoff_factor, self._growth_interval = growth_factor, backoff_factor, growth_interval
        self._has_scaled = False
        self._stages: dict[Optimizer, str] = {}
        self._all_finite: dict[Optimizer, Any] = {}

    def scale(self, outputs: Any) -> Any:
        """A loss, an array, or a list or tuple of them, times the scale.

        Raises:
          ValueError: it is something else.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(output) for output in outputs)
        if not (isinstance(outputs, Loss) or trees.is_array(outputs)):
            raise ValueError(f"outputs must be a loss or an array, or a list or tuple of them; got {trees.describe(outputs)}")
        self._has_scaled = True
        return outputs * self._scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, for clipping before the step; `step` does it otherwise.

        Raises:
          AssertionError: no loss was scaled yet.
          RuntimeError: it was done since the last update, or the step was.
          ValueError: a parameter is float16.
        """
        if not self._enabled:
            return
        self._check_scaled("unscale_")
        stage = self._stages.get(optimizer, _READY)
        if stage == _UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update()")
        if stage == _STEPPED:
            raise RuntimeError("unscale_() is being called after step()")
        holders = with_gradients(optimizer.parameters)
        if any(parameter._data.dtype == jnp.float16 for parameter in holders):
            raise ValueError("cannot unscale float16 gradients: keep the parameters in float32 and compute in float16")
        for parameter in holders:
            assert parameter._grad is not None
            wide = parameter._grad.astype(trees.at_least_float32(parameter._grad.dtype))
            parameter.set_grad((wide * (1.0 / self._scale)).astype(parameter._grad.dtype))
        if holders:
            self._all_finite[optimizer] = accumulator.all_finite([parameter._grad for parameter in holders])
        self._stages[optimizer] = _UNSCALED

    def step(self, optimizer: Optimizer) -> Any:
        """Unscale, if that was not done, and step, if all gradients are finite. Waits for the device.

        Raises:
          AssertionError: no loss was scaled yet, or there is no gradient.
          RuntimeError: it was done since the last update.
        """
        if not self._enabled:
            return optimizer.step()
        self._check_scaled("step")
        stage = self._stages.get(optimizer, _READY)
        if stage == _STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        if stage == _READY:
            self.unscale_(optimizer)
        if optimizer not in self._all_finite:
            raise AssertionError("no gradient of this optimizer was checked: call backward() on the scaled loss before step()")
        answer = optimizer.step() if bool(self._all_finite[optimizer]) else None
        self._stages[optimizer] = _STEPPED
        return answer

    def update(self, new_scale: float | None = None) -> None:
        """Set the scale for the next window: smaller after an infinity, larger after enough windows without.

        Args:
          new_scale: this one instead.

        Raises:
          AssertionError: no loss was scaled yet, or no gradient was checked since the last update.
        """
        if not self._enabled:
            return
        self._check_scaled("update")
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._all_finite:
            raise AssertionError("no gradient was checked since the last update(): call step() before update()")
        elif not all(bool(finite) for finite in self._all_finite.values()):
            self._scale, self._growth_tracker = self._scale * self._backoff_factor, 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                grown = self._scale * self._growth_factor
                self._scale, self._growth_tracker = grown if grown <= _FLOAT32_MAX else self._scale, 0
        self._stages, self._all_finite = {}, {}

    def _check_scaled(self, name: str) -> None:
        if not self._has_scaled:
            raise AssertionError(f"{name} was called before scale: multiply the loss with scale(loss) before its backward")

    def get_scale(self) -> float:
        """The scale; 1 if not enabled."""
        return self._scale if self._enabled else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Scale, factors and count, under PyTorch's names; empty if not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, PyTorch's too.

        Raises:
          RuntimeError: it is empty, of a scaler that was not enabled.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the state is empty: it was saved from a GradScaler that was not enabled")
        self._scale, self._growth_tracker = float(state_dict["scale"]), int(state_dict["_growth_tracker"])
        self._growth_factor, self._backoff_factor = state_dict["growth_factor"], state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
