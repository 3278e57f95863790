"""Hooks on the forward of the whole model: what was watched is let go at its end, and a loss without the kernel is reported."""

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnservedLossWarning
from ..kernels import losses_computed
from . import running
from .head import Hook
from .settings import Settings


def install(model: PreTrainedModel, settings: Settings) -> None:
    """Hooks the forward in which the loss is made."""
    model.register_forward_pre_hook(Begin(settings))
    model.register_forward_hook(Finish(settings), with_kwargs=True, always_call=True)


class Begin(Hook):
    """Forward pre-hook of the whole model."""

    def __call__(self, model: PreTrainedModel, args: Any) -> None:
        if not torch.compiler.is_compiling():
            running.begin(self.settings.token)


class Finish(Hook):
    """Forward hook of the whole model; called without an output where the forward raised."""

    def __call__(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        forward = running.end(self.settings.token)
        if forward is None:
            return
        for family in forward.families:
            family.release()
        served = forward.served or losses_computed() > forward.losses_before
        if kwargs.get("labels") is not None and not served and _has_loss(output):
            self.settings.step_aside("a loss was computed without the kernel")
            why = forward.reasons[-1] if forward.reasons else "it was not reached"
            msg = (
                f"{type(model).__name__} is patched by liger_compat, but its loss was computed without the kernel: {why}. "
                "The loss is right; it saves nothing. See liger_compat.report(model)."
            )
            warnings.warn(msg, UnservedLossWarning, stacklevel=2)


def _has_loss(output: Any) -> bool:
    """Whether a model's output, an object, a mapping or a tuple, has a loss."""
    first = output[0] if isinstance(output, tuple) and output else getattr(output, "loss", None)
    return isinstance(first, Tensor) and first.dim() <= 1
