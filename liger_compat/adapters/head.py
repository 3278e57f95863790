"""Hooks on the output head, so that logits are watched on their way to the loss."""

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .. import inspection
from ..counters import Counters
from ..errors import UnservedLossWarning
from ..kernels import cross_entropy
from ..loss import torch_cross_entropy_problem
from ..tracking import Family, family_of, plain_alias
from .settings import Settings


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """The module that makes the logits, or None."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def problem(model: PreTrainedModel) -> str | None:
    """Why the logits of `model` cannot be watched, or None when they can."""
    head = output_head(model)
    if head is None:
        return "get_output_embeddings() returns no module"
    return inspection.head_problem(model, head)


def install(model: PreTrainedModel, settings: Settings) -> None:
    """Hooks the output head of a model, whose own forward or that of a model around it makes the loss."""
    _hook(output_head(model), settings)
    model.register_forward_pre_hook(FollowHead(settings))


def install_watch(model: PreTrainedModel, settings: Settings) -> None:
    """Hooks the forward of the whole model, in which the loss is made."""
    model.register_forward_pre_hook(Begin(settings))
    model.register_forward_hook(Finish(settings), with_kwargs=True)


def remove(model: nn.Module, token: str) -> None:
    """Removes every hook of one patch, wherever it has got to: libraries copy heads and wrap them."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _of(hook, token) is not None]:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)


def counters_in(model: nn.Module, token: str) -> list[Counters]:
    """The counters of every hook of one patch: a copy of a head that another library made counts on its own."""
    return [
        ours.settings.counters
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
        if (ours := _of(hook, token)) is not None
    ]


class Hook:
    """Base of our hooks; at module level and without a reference to the model, so that models pickle and copy."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings


class TrackLogits(Hook):
    """Forward hook of the output head: its output is watched until the loss is computed."""

    def __call__(self, head: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        family = family_of(output)
        if family is not None:  # a head inside a head (PEFT wraps them): the outermost one answers
            family.answer = self._answer
        else:
            self.settings.counters.head_calls += 1
            why = _why_not(output)
            if why is not None:
                self.settings.step_aside(why)
                return
            family = Family(self._answer, overwrites=self.settings.overwrite)
            family.adopt(output)
        self.settings.open_family = weakref.ref(family)

    def _answer(self, family: Family, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        why = torch_cross_entropy_problem(plain_alias(input), *args, **kwargs)
        if why is not None:
            self.settings.step_aside(f"cross-entropy left to PyTorch: {why}")
            return F.cross_entropy(plain_alias(input), *args, **kwargs)
        return self.settings.serve(input, lambda logits, overwrite: self._loss(logits, overwrite, *args, **kwargs))

    def _loss(
        self,
        logits: Tensor,
        overwrite: bool,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        return cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            overwrite=overwrite,
            backend=self.settings.backend,
        )


class FollowHead(Hook):
    """Forward pre-hook of a model: its head may be another module than last time (resized, wrapped, replaced)."""

    def __call__(self, model: PreTrainedModel, args: Any) -> None:
        if not torch.compiler.is_compiling():
            _hook(output_head(model), self.settings)


class Begin(Hook):
    """Forward pre-hook of the whole model."""

    def __call__(self, model: PreTrainedModel, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.settings.losses_before = self.settings.counters.kernel_losses


class Finish(Hook):
    """Forward hook of the whole model: logits without a loss become plain, and a loss without the kernel is reported."""

    def __call__(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        reference = self.settings.open_family
        family = None if reference is None else reference()
        if family is not None:
            family.release()
        if kwargs.get("labels") is not None and self.settings.counters.kernel_losses == self.settings.losses_before:
            why = max(
                self.settings.counters.stepped_aside.items(),
                key=lambda item: item[1],
                default=("it was not reached", 0),
            )
            self.settings.step_aside("a loss was computed without the kernel")
            msg = (
                f"{type(model).__name__} is patched by liger_compat, but its loss was computed without the kernel: {why[0]}. "
                "The loss is right; it saves nothing. See liger_compat.report(model)."
            )
            warnings.warn(msg, UnservedLossWarning, stacklevel=2)


def _hook(head: nn.Module | None, settings: Settings) -> None:
    if head is not None and all(_of(hook, settings.token) is None for hook in head._forward_hooks.values()):
        head.register_forward_hook(TrackLogits(settings))


def _of(hook: Any, token: str) -> Hook | None:
    """A hook, if it is one of that patch."""
    return hook if isinstance(hook, Hook) and hook.settings.token == token else None


def _why_not(output: Any) -> str | None:
    """Why the output of a head is not watched, or None if it is."""
    if type(output) is not Tensor:
        return f"the output head returned a {type(output).__name__}"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit is tracing"
    return None
