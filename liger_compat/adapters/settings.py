"""What `patch` was asked for, and the one way from a model's logits to the kernel."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..counters import Counters
from ..deferred import DeferredLogits, can_fuse
from ..kernels import is_traced, overwrite_problem
from ..loss import cross_entropy, torch_cross_entropy_problem
from ..tracking import Family, family_of, plain_alias
from . import running


@dataclass
class Settings:
    """Shared by the parts of one patch; copied with them when the model, or only its head, is copied."""

    token: str
    """Tells the parts of this patch from those of others, also in copies of the model."""
    logits: str
    """The mode: "defer", "keep" or "overwrite"."""
    backend: str | None
    chunk_bytes: int | None
    counters: Counters = field(default_factory=Counters)
    hooked: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """Output heads with hooks of this patch; a model may have replaced one since."""

    @property
    def options(self) -> tuple[str, str | None, int | None]:
        """What `patch` was called with: logits, backend, chunk_bytes."""
        return self.logits, self.backend, self.chunk_bytes

    def __getstate__(self) -> dict[str, Any]:
        # A weak set cannot be pickled, and copies have heads of their own, which are found among their modules.
        return {**vars(self), "hooked": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, hooked=weakref.WeakSet())

    def track(self, logits: Tensor) -> None:
        """Watches plain logits until the loss is computed."""
        family = Family(self.answer, overwrites=self.logits == "overwrite")
        family.adopt(logits)
        forward = running.current()
        if forward is not None:
            forward.families.append(family)

    # What deferred logits report to (`deferred.source.Source.observer`).
    watch = track

    def materialised(self, name: str) -> None:
        """Counts that deferred logits were computed for an operation of that name."""
        self.counters.materialised[name] += 1

    def answer(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002  PyTorch's name
        """`torch.nn.functional.cross_entropy` over logits of the model."""
        why = torch_cross_entropy_problem(input, *args, **kwargs)
        if why is not None:
            self.step_aside(f"cross-entropy left to PyTorch: {why}")
            return F.cross_entropy(_plain(input), *args, **kwargs)
        rows = input.dim() <= 2  # of more dimensions the second has the classes
        return self.serve(input, lambda logits, overwrite: self._loss(logits, overwrite, *args, **kwargs), rows=rows)

    def serve(self, logits: Tensor, compute: Callable[[Tensor, bool], Tensor], *, rows: bool = True) -> Tensor:
        """`compute(logits, overwrite)` with plain or deferred logits; afterwards plain ones are plain, or unreadable.

        `rows` says whether the classes are the last dimension.
        """
        if torch.compiler.is_compiling():
            return compute(logits, False)  # a counter that is traced is a constant, and compiles the model anew at each step
        if isinstance(logits, DeferredLogits):
            if can_fuse(logits):
                loss = compute(logits, False)
                self._count(fused=1)
                return loss
            logits = logits.lc_plain("a loss over logits that were read before")
        family = family_of(logits)
        plain = logits if family is None else plain_alias(logits)
        overwrite = self.logits == "overwrite" and self._may_overwrite(plain, family, rows=rows)
        loss = compute(plain, overwrite)
        self._count(overwritten=int(overwrite))
        if family is not None:
            if overwrite:
                family.give_away(plain.untyped_storage().data_ptr())
            else:
                family.release()
        return loss

    def step_aside(self, why: str) -> None:
        """Counts that something ran as in stock transformers."""
        if torch.compiler.is_compiling():
            return
        self.counters.stepped_aside[why] += 1
        forward = running.current()
        if forward is not None:
            forward.reasons.append(why)

    def _count(self, *, fused: int = 0, overwritten: int = 0) -> None:
        self.counters.kernel_losses += 1
        self.counters.fused += fused
        self.counters.overwritten += overwritten
        forward = running.current()
        if forward is not None:
            forward.served = True

    def _may_overwrite(self, logits: Tensor, family: Family | None, *, rows: bool) -> bool:
        if not logits.requires_grad or not torch.is_grad_enabled():
            return False  # no gradient is made, so none takes their memory
        problem = overwrite_problem(logits)
        if family is None or running.current() is None:
            problem = "they do not come from the output head as it returned them"
        elif not rows or not logits.is_contiguous() or logits.dtype is torch.float64:
            problem = "the kernel works on a copy of them"
        elif is_traced(logits):
            problem = "a dispatch mode of torch is on"
        elif problem is None:
            problem = family.sharing_problem(logits)
        if problem is not None:
            self.step_aside(f"logits kept, not overwritten: {problem}")
        return problem is None

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
            backend=self.backend,
            chunk_bytes=self.chunk_bytes,
        )


def _plain(logits: Tensor) -> Tensor:
    """Logits as PyTorch shall see them."""
    return logits.lc_plain("cross_entropy") if isinstance(logits, DeferredLogits) else plain_alias(logits)
