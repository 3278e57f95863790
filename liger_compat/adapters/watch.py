"""Hooks on the forward of the whole model: what was watched is let go at its end, and a loss without the kernel is reported."""

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UnservedLossWarning
from .head import Hook
from .settings import Settings


def install(model: PreTrainedModel, settings: Settings) -> None:
    """Hooks the forward in which the loss is made."""
    model.register_forward_pre_hook(Begin(settings))
    model.register_forward_hook(Finish(settings), with_kwargs=True)


class Begin(Hook):
    """Forward pre-hook of the whole model."""

    def __call__(self, model: PreTrainedModel, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.settings.losses_before = self.settings.counters.kernel_losses


class Finish(Hook):
    """Forward hook of the whole model."""

    def __call__(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        reference = self.settings.open_family
        family = None if reference is None else reference()
        if family is not None:
            family.release()
        counters = self.settings.counters
        if kwargs.get("labels") is not None and counters.kernel_losses == self.settings.losses_before:
            why = max(counters.stepped_aside.items(), key=lambda item: item[1], default=("it was not reached", 0))
            self.settings.step_aside("a loss was computed without the kernel")
            msg = (
                f"{type(model).__name__} is patched by liger_compat, but its loss was computed without the kernel: {why[0]}. "
                "The loss is right; it saves nothing. See liger_compat.report(model)."
            )
            warnings.warn(msg, UnservedLossWarning, stacklevel=2)
