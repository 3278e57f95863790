"""The forwards of patched models that run now, on each thread: what was watched in one ends with it."""

import threading
from dataclasses import dataclass, field

from ..kernels import losses_computed
from ..tracking import Family


@dataclass
class Forward:
    """One forward of a patched model."""

    token: str
    """Of the patch."""
    served: bool = False
    """Whether the kernel has computed a loss in it."""
    losses_before: int = field(default_factory=losses_computed)
    """Of the process: a forward that is compiled computes its loss unseen."""
    families: list[Family] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why something ran as in stock transformers, last one last."""


class _Stack(threading.local):
    """A model may run inside another one, and a replica of one on every thread."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []


_stack = _Stack()


def begin(token: str) -> None:
    """A model's forward begins."""
    # Another one of the same patch was left by an exception that no hook sees, such as a KeyboardInterrupt.
    _stack.forwards = [forward for forward in _stack.forwards if forward.token != token]
    _stack.forwards.append(Forward(token))


def end(token: str) -> Forward | None:
    """It has ended: what happened in it, or None if its begin was not seen."""
    forward = next((each for each in _stack.forwards if each.token == token), None)
    if forward is not None:
        _stack.forwards.remove(forward)
    return forward


def current() -> Forward | None:
    """The innermost forward that runs on this thread, or None."""
    return _stack.forwards[-1] if _stack.forwards else None
