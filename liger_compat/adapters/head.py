"""Hooks on the output head: its logits are deferred, or watched on their way to the loss."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import inspection
from ..counters import Counters
from ..deferred import DeferredLogits, defer, mark, unmark, unmark_last
from ..kernels.cross_entropy import transforms_are_active
from ..kernels.linear_cross_entropy import compute_dtype
from ..tracking import family_of
from .settings import Settings

FEW_ROWS = 64
"""Without gradients, as many rows of logits or fewer are computed at once: generation asks for them, and reads them."""


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


def deferral_problem(model: PreTrainedModel) -> str | None:
    """Why the logits of `model` cannot be deferred, as far as the head itself says, or None when they can."""
    return problem(model) or _head_problem(output_head(model))


def install(model: PreTrainedModel, settings: Settings) -> None:
    """Hooks the output head of a model, whose own forward or that of a model around it makes the loss."""
    _hook(output_head(model), settings)
    model.register_forward_pre_hook(FollowHead(settings))


def remove(model: nn.Module, settings: Settings) -> None:
    """Removes every hook of one patch, wherever it has got to: libraries copy heads, wrap and replace them."""
    for module in {*model.modules(), *settings.hooked}:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if of_patch(hook, settings.token) is not None]:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def counters_in(model: nn.Module, token: str) -> list[Counters]:
    """The counters of every hook of one patch: a copy of a head that another library made counts on its own."""
    return [
        ours.settings.counters
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
        if (ours := of_patch(hook, token)) is not None
    ]


class Hook:
    """Base of our hooks; at module level and without a reference to the model, so that models pickle and copy."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings


class DeferLogits(Hook):
    """Forward pre-hook of the output head: what its forward computes is deferred."""

    def __call__(self, head: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self.settings.logits != "defer":
            return
        hidden = args[0] if args else None
        why = _head_problem(head) or _call_problem(head, hidden)
        if isinstance(hidden, Tensor) and why is None:
            mark(hidden, self._defer)
        else:
            self.settings.step_aside(f"logits not deferred: {why}")

    def _defer(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Decided here once more: the forward of the head may have moved its input."""
        if type(weight) is not nn.Parameter or weight.device != hidden.device or weight.dtype != hidden.dtype:
            self.settings.step_aside("logits not deferred: the weight is not where or what the hidden states are")
            return None
        self.settings.counters.deferred += 1
        return defer(hidden, weight, bias, compute_dtype(hidden), self.settings)


class TrackLogits(Hook):
    """Forward hook of the output head: logits that are not deferred are watched until the loss is computed."""

    def __call__(self, head: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if args:
            unmark(args[0])
        if unmark_last():
            self.settings.step_aside("logits not deferred: another hook has changed the input of the head")
        family = family_of(output)
        if family is not None:  # a head inside a head (PEFT wraps them): the outermost one answers
            family.answer = self.settings.answer
            return
        self.settings.counters.head_calls += 1
        if isinstance(output, DeferredLogits):
            output._lc_cell.source.observer = self.settings
            return
        why = _output_problem(output)
        if why is None:
            self.settings.track(output)
        else:
            self.settings.step_aside(why)


class FollowHead(Hook):
    """Forward pre-hook of a model: its head may be another module than last time (resized, wrapped, replaced)."""

    def __call__(self, model: PreTrainedModel, args: Any) -> None:
        if not torch.compiler.is_compiling():
            _hook(output_head(model), self.settings)


def of_patch(hook: Any, token: str) -> Hook | None:
    """A hook, if it is one of that patch."""
    return hook if isinstance(hook, Hook) and hook.settings.token == token else None


def _hook(head: nn.Module | None, settings: Settings) -> None:
    if head is not None and all(of_patch(hook, settings.token) is None for hook in head._forward_hooks.values()):
        settings.hooked.add(head)
        # First of all hooks: what those of others keep of the logits descends from what is watched.
        head.register_forward_hook(TrackLogits(settings), prepend=True)
        if settings.logits == "defer":
            head.register_forward_pre_hook(DeferLogits(settings))


def _head_problem(head: Any) -> str | None:
    """Why no call of a head can be deferred, or None."""
    if type(head).forward is not nn.Linear.forward:
        return f"the head is a {type(head).__name__} with a forward of its own"
    weight = head._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        return f"the head's weight is {'no parameter' if weight is None else f'a {type(weight).__name__}'}"
    if not weight.is_floating_point():
        return f"the head's weight is {weight.dtype}"
    if hasattr(weight, "ds_id"):
        return "the head's weight is sharded by DeepSpeed ZeRO-3"
    if getattr(weight, "_fsdp_flattened", False):
        return "the head's weight is part of a flat parameter of FSDP"
    return None


def _call_problem(head: Any, hidden: Any) -> str | None:
    """Why this call of a head cannot be deferred, or None."""
    if type(hidden) is not Tensor:
        return f"its input is a {type(hidden).__name__}"
    if hidden.device.type == "meta" or head.weight.device != hidden.device:
        return f"its input is on {hidden.device} and its weight on {head.weight.device}"
    if hidden.dim() < 2 or not hidden.numel() or head.weight.shape[0] < 2:
        return f"its input has shape {tuple(hidden.shape)}"
    if head._backward_hooks or head._backward_pre_hooks:
        return "the head has full backward hooks"
    if _reshards(head):
        return "the head's weight is freed by FSDP after its forward"
    if not torch.is_grad_enabled() and (hidden.shape[:-1].numel() <= FEW_ROWS or hidden.shape[-2] == 1):
        return "few rows, and no gradient is wanted"
    return _mode_problem()


def _mode_problem() -> str | None:
    if transforms_are_active():
        return "a torch.func transform or forward-mode AD is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit is tracing"
    return None


def _output_problem(output: Any) -> str | None:
    """Why the output of a head is not watched, or None if it is."""
    if type(output) is not Tensor:
        return f"the output head returned a {type(output).__name__}"
    return _mode_problem()


def _reshards(head: Any) -> bool:
    """Whether the head is a unit of FSDP2 that frees its weight after forward; unknown counts as yes."""
    state = getattr(head, "_get_fsdp_state", None)
    if state is None:
        return False
    group = getattr(state(), "_fsdp_param_group", None)
    return group is not None and getattr(group, "post_forward_mesh_info", True) is not None
