"""What a model's code does about its loss, read from the bytecode of its `forward`: no model is run, no source needed."""

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_CROSS_ENTROPY = frozenset({"CrossEntropyLoss", "cross_entropy", "fixed_cross_entropy"})


def calls_loss_function(model: nn.Module) -> bool:
    """Whether `forward` mentions the loss API, `self.loss_function`."""
    return any("loss_function" in names(function) for function in _forward_functions(model))


def calls_nll_loss(model: nn.Module) -> bool:
    """Whether `forward` computes the negative log-likelihood of log-probabilities itself."""
    return any(names(function) >= {"log_softmax", "nll_loss"} for function in _forward_functions(model))


def calls_cross_entropy(model: nn.Module, head: nn.Module | None) -> bool:
    """Whether `forward`, or that of a module around the output head, computes PyTorch's cross-entropy itself."""
    for module in (model, *(_ancestors(model, head) if head is not None else ())):
        for function in _forward_functions(module):
            used = names(function)
            if used & _CROSS_ENTROPY or any(isinstance(getattr(module, name, None), nn.CrossEntropyLoss) for name in used):
                return True
    return False


def reaches_cross_entropy(function: Callable[..., Any]) -> bool:
    """Whether a loss function, or one that it calls, computes PyTorch's cross-entropy."""
    seen: set[Any] = set()
    pending = [inspect.unwrap(function)]
    while pending:
        current = pending.pop()
        if current in seen or not isinstance(current, FunctionType):
            continue
        seen.add(current)
        used = names(current)
        if used & _CROSS_ENTROPY:
            return True
        pending.extend(inspect.unwrap(value) for name in used if callable(value := current.__globals__.get(name)))
    return False


def head_problem(model: nn.Module, head: nn.Module) -> str | None:
    """Why the module that `get_output_embeddings()` returns does not produce the logits by being called, or None if it does."""
    name = type(head).__name__
    if isinstance(head, nn.Embedding):
        return f"its output embeddings are the {name} that embeds its inputs"
    if type(head).forward is nn.Module.forward:
        return f"its output embeddings are a {name}, which is never called"
    parents = _ancestors(model, head)
    if not parents:
        return f"its output embeddings, a {name}, are not one of its modules"
    keys = [key for parent in parents for key, child in parent.named_children() if child is head]
    mentions = [
        used_as_object
        for parent in parents
        for function in _forward_functions(parent)
        for key in keys
        if (used_as_object := _used_as_object(function, key)) is not None
    ]
    if mentions and not any(mentions):
        return f"it reads the weight of its output embeddings, a {name}, and never calls them"
    return None


@lru_cache(maxsize=4096)
def names(function: Callable[..., Any]) -> frozenset[str]:
    """Every global and attribute name in a function, inner functions included."""
    return frozenset(name for code in _codes(function) for name in code.co_names)


def _codes(function: Callable[..., Any]) -> Iterator[CodeType]:
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        yield code
        pending.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))


@lru_cache(maxsize=4096)
def _used_as_object(function: Callable[..., Any], name: str) -> bool | None:
    """Whether attribute `name` is used other than for attributes of its own; None if it does not occur."""
    found = None
    for code in _codes(function):
        instructions = list(dis.get_instructions(code))
        for instruction, following in pairwise(instructions):
            if instruction.argval == name and instruction.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
                if following.opname not in {"LOAD_ATTR", "LOAD_METHOD"}:
                    return True
                found = False
    return found


def _forward_functions(module: nn.Module) -> list[FunctionType]:
    """`forward` of the class, and the methods of the class and of its bases that it calls."""
    found: list[FunctionType] = []
    pending = ["forward"]
    done = set()
    while pending:
        name = pending.pop()
        done.add(name)
        for cls in type(module).__mro__:
            function = inspect.unwrap(vars(cls)[name]) if callable(vars(cls).get(name)) else None
            if not isinstance(function, FunctionType) or cls is nn.Module:
                continue
            found.append(function)
            used = names(function)
            pending.extend(used - done - set(pending))
            if "super" not in used:
                break
    return found


def _ancestors(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules of `model` that contain `module`, outermost first."""
    return [parent for parent in model.modules() if parent is not module and any(m is module for m in parent.modules())]
