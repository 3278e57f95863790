"""What `patch` was asked for, and the one way from a model's logits to the kernel."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..counters import Counters
from ..kernels import overwrite_problem
from ..tracking import Family, family_of, plain_alias


@dataclass
class Settings:
    """Shared by the parts of one patch; copied with them when the model, or only its head, is copied."""

    token: str
    """Tells the parts of this patch from those of others, also in copies of the model."""
    overwrite: bool
    backend: str | None
    counters: Counters = field(default_factory=Counters)
    open_family: weakref.ref[Family] | None = None
    """The family of the forward that runs, for the end of that forward."""
    losses_before: int = 0
    """`counters.kernel_losses` when that forward began."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "open_family": None}  # a weak reference cannot be pickled

    def serve(self, logits: Tensor, compute: Callable[[Tensor, bool], Tensor]) -> Tensor:
        """`compute(logits, overwrite)` with plain logits; afterwards the logits are plain, or unreadable if overwritten."""
        family = family_of(logits)
        plain = logits if family is None else plain_alias(logits)
        overwrite = self.overwrite and self._may_overwrite(plain, family)
        loss = compute(plain, overwrite)
        self.counters.kernel_losses += 1
        if family is not None:
            if overwrite:
                self.counters.overwritten += 1
                family.give_away(plain.untyped_storage().data_ptr())
            else:
                family.release()
        return loss

    def step_aside(self, why: str) -> None:
        """Counts that something ran as in stock transformers."""
        self.counters.stepped_aside[why] += 1

    def _may_overwrite(self, logits: Tensor, family: Family | None) -> bool:
        if not logits.requires_grad or not torch.is_grad_enabled():
            return False  # no gradient is made, so none takes their memory
        problem = overwrite_problem(logits)
        if family is None:
            problem = "they do not come from the output head as it returned them"
        elif not logits.is_contiguous() or logits.dtype is torch.float64:
            problem = "the kernel works on a copy of them"
        if problem is not None:
            self.step_aside(f"logits kept, not overwritten: {problem}")
        return problem is None
