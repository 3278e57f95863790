"""What a patched model has done, counted: the numbers stay right when a patch has silently switched itself off."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Counts of one patched model. Not locked: threads that share a model may lose a count, never more."""

    head_calls: int = 0
    """Calls of an output head that is hooked."""
    kernel_losses: int = 0
    """Losses that our kernel computed."""
    overwritten: int = 0
    """Of those, losses that took the memory of their logits."""
    stepped_aside: Counter[str] = field(default_factory=Counter)
    """Reasons why something ran as in stock transformers instead, with how often."""

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(
            self.head_calls + other.head_calls,
            self.kernel_losses + other.kernel_losses,
            self.overwritten + other.overwritten,
            self.stepped_aside + other.stepped_aside,
        )
