"""Whether somebody else has replaced what a model computes its loss with: a user, or another library, by name."""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from . import inspection
from .adapters.loss_function import describe, original
from .upstream import Upstream


def find_conflict(model: PreTrainedModel, upstream: Upstream) -> str | None:
    """What was replaced and by whom, or None."""
    return global_conflict() or _forward_conflict(model) or _module_conflict(model) or _loss_function_conflict(model, upstream)


def global_conflict() -> str | None:
    """What was replaced for the whole process, or None."""
    for name, value in (
        ("torch.nn.functional.cross_entropy", torch.nn.functional.cross_entropy),
        ("torch.nn.CrossEntropyLoss", nn.CrossEntropyLoss),
    ):
        if not _is_from(value, "torch"):
            return f"{name} is {describe(value)}, for the whole process"
    return None


def _forward_conflict(model: PreTrainedModel) -> str | None:
    cls = next((cls for cls in type(model).__mro__ if "forward" in vars(cls)), None)
    if cls is None:
        return None
    own = inspect.unwrap(vars(cls)["forward"])
    if not _is_from(own, cls.__module__.partition(".")[0]):
        return f"{cls.__name__}.forward is {describe(own)}"
    on_instance = vars(model).get("forward")
    if on_instance is not None and own not in _chain(on_instance):
        return f"the forward of this model is {describe(_chain(on_instance)[-1])}"
    return None


def _chain(function: Any) -> list[Any]:
    """A callable and what it wraps, through partials, bound methods and functools.wraps."""
    chain = [function]
    while (
        inner := getattr(function, "__wrapped__", getattr(function, "func", getattr(function, "__func__", None)))
    ) is not None:
        function = inner
        chain.append(function)
    return chain


def _module_conflict(model: PreTrainedModel) -> str | None:
    forward = inspect.unwrap(type(model).forward)
    if isinstance(forward, FunctionType):
        for name in ("CrossEntropyLoss", "cross_entropy"):
            value = forward.__globals__.get(name)
            if name in inspection.names(forward) and value is not None and not _is_from(value, "torch"):
                return f"{name} in {forward.__module__} is {describe(value)}"
    return None


def _loss_function_conflict(model: PreTrainedModel, upstream: Upstream) -> str | None:
    if upstream.causal_lm_loss is None or not inspection.calls_loss_function(model):
        return None
    resolved = original(model)
    if not _is_from(resolved, "transformers") or not isinstance(resolved, FunctionType):
        whose = "by its user" if "_loss_function" in vars(model) else "in transformers' LOSS_MAPPING"
        return f"its loss function was set to {describe(resolved)} {whose}"
    helper = getattr(resolved, "__globals__", {}).get("fixed_cross_entropy")
    if helper is not None and not _is_from(helper, "transformers"):
        return f"transformers' fixed_cross_entropy is {describe(helper)}, for the whole process"
    return None


def _is_from(thing: Callable[..., Any], package: str) -> bool:
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.partition(".")[0] == package
