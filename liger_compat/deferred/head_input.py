"""The input of an output head, for the time of its call: `torch.nn.functional.linear` of it with the head's weight is deferred.

The head's own forward runs, so whatever a library does there (gather, move or cast the weight) has been done by then, and
nothing else reads the weight. The class is assigned and taken back: the tensor is the caller's own.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Answer = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
"""(hidden, weight, bias) -> the deferred logits, or None to compute them."""


class HeadInput(Tensor):
    """Hidden states on their way through the output head."""

    _lc_answer: Answer

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        hidden = args[0] if args else kwargs.get("input")
        if func is F.linear and isinstance(hidden, HeadInput):
            answer = hidden._lc_answer
            unmark(hidden)
            result = answer(hidden, *_linear(*args, **kwargs))
            if result is not None:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in _FOLLOWED and isinstance(hidden, HeadInput) and type(result) is Tensor:
            mark(result, hidden._lc_answer)  # libraries move and cast what a module is given
        return result


def mark(hidden: Tensor, answer: Answer) -> None:
    """Makes a plain tensor the input of a head."""
    marked: Any = hidden
    marked.__class__ = HeadInput
    marked._lc_answer = answer
    _last.marked = hidden


def unmark(hidden: Any) -> None:
    """Makes it a plain tensor again."""
    if type(hidden) is HeadInput:
        del hidden._lc_answer
        hidden.__class__ = Tensor  # type: ignore[assignment]
        if _last.marked is hidden:
            _last.marked = None


def unmark_last() -> bool:
    """Makes what was marked last on this thread plain again; whether it still was marked: no head has seen it."""
    marked, _last.marked = _last.marked, None
    still = type(marked) is HeadInput
    unmark(marked)
    return still


class _Last(threading.local):
    marked: Tensor | None = None


_last = _Last()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # noqa: A002
    return weight, bias


_FOLLOWED = {getattr(Tensor, name) for name in ("to", "contiguous", "clone", "float", "half", "bfloat16", "type", "type_as")}
