"""Logits that are computed only when somebody reads them, and a loss that does not."""

from .head_input import mark, unmark, unmark_last
from .loss import can_fuse, cross_entropy
from .tensor import DeferredLogits, defer

__all__ = ["DeferredLogits", "can_fuse", "cross_entropy", "defer", "mark", "unmark", "unmark_last"]
