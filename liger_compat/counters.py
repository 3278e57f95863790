"""What a patched model has done, counted: the numbers stay right when a patch has silently switched itself off."""

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Counters:
    """Counts of one patched model. Not locked: threads that share a model may lose a count, never more."""

    head_calls: int = 0
    """Calls of an output head that is hooked."""
    deferred: int = 0
    """Of those, calls whose logits were deferred."""
    kernel_losses: int = 0
    """Losses that our kernel computed."""
    fused: int = 0
    """Of those, losses that were computed without the logits."""
    overwritten: int = 0
    """Losses that took the memory of their logits."""
    materialised: Counter[str] = field(default_factory=Counter)
    """Operations that needed deferred logits computed, with how often."""
    stepped_aside: Counter[str] = field(default_factory=Counter)
    """Reasons why something ran as in stock transformers instead, with how often."""

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))
