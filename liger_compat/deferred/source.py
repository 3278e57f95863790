"""What deferred logits are computed from, and whether that is still what it was."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import StaleLogitsError
from ..kernels import row_statistics
from .pending import Fold, Op


@dataclass
class Witness:
    """The log-sum-exp that the loss found in the rows of the head's output: reading them later must find the same."""

    lse: Tensor
    """(N,) in FP32; NaN for rows that the loss did not look at."""
    fold: Fold
    """The operations that were pending then."""


@dataclass
class Source:
    """One call of the output head, without its autograd graph."""

    hidden: Tensor
    """(..., H), detached."""
    weight: Tensor
    """(V, H): the parameter itself, not a copy in another dtype, so that keeping it costs nothing."""
    bias: Tensor | None
    dtype: torch.dtype
    """Of the logits: autocast's at the call, else that of `hidden`."""
    wanted: tuple[bool, bool, bool]
    """Whether hidden, weight and bias need a gradient."""
    observer: Any
    """Is told what happens: `materialised(name)`, `family()`."""
    versions: tuple[Any, ...] = ()
    witness: Witness | None = None

    def __post_init__(self) -> None:
        self.versions = self._versions()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias."""
        return self.hidden, self.weight, self.bias

    def compute(self) -> Tensor:
        """The logits, with the product that the head would have computed.

        Raises:
            StaleLogitsError: if what they are computed from has changed, so that they would be other logits.
        """
        self.check()
        logits = product(*self.operands(), self.dtype)
        self.compare(logits.reshape(-1, logits.shape[-1]), slice(None))
        return logits

    def check(self) -> None:
        """Raises StaleLogitsError if a tensor was changed or freed since the head was called, as far as it says so."""
        freed = [name for name, tensor in self._tensors() if tensor.numel() and not tensor.untyped_storage().size()]
        if freed:
            raise StaleLogitsError(_message(f"the head's {freed[0]} was freed (by FSDP, or by an offload)"))
        for (name, _), then, now in zip(self._tensors(), self.versions, self._versions(), strict=True):
            if then != now:
                raise StaleLogitsError(_message(f"the head's {name} was changed in place (by an optimizer step?)"))

    def compute_rows(self, rows: Tensor | slice) -> Tensor:
        """Some rows of the head's output, (n, V); `check` comes first. Raises StaleLogitsError as `compute` does."""
        logits = product(self.hidden.reshape(-1, self.hidden.shape[-1])[rows], self.weight, self.bias, self.dtype)
        self.compare(logits, rows)
        return logits

    def compare(self, logits: Tensor, rows: Tensor | slice) -> None:
        """Raises StaleLogitsError if rows computed now are not those that the loss saw.

        Version counters do not see writes through `.data`, swapped averages, or what FSDP fills into a parameter.
        """
        if self.witness is None:
            return
        then, now = self.witness.lse[rows], log_sum_exp(logits, self.witness.fold)
        # Rounding of the products differs with their shape: by units of FP32, or of the dtype of the logits.
        unit = torch.finfo(self.dtype).eps if self.dtype.itemsize == 2 else 16 * torch.finfo(torch.float32).eps
        difference = (now - then).abs()
        same = (difference <= unit * (1 + then.abs())) | (now == then) | then.isnan()
        if not same.all():
            # Terms of a product may be large and cancel: rounding follows them, not what is left.
            hidden = self.hidden.reshape(-1, self.hidden.shape[-1])[rows].float().norm(dim=-1)
            same |= difference <= unit * hidden * self.weight.detach().float().norm(dim=-1).max()
        if not same.all():
            raise StaleLogitsError(_message("the head's weight or its input has changed since the loss was computed"))

    def _tensors(self) -> list[tuple[str, Tensor]]:
        found = [("input", self.hidden), ("weight", self.weight)]
        return found if self.bias is None else [*found, ("bias", self.bias)]

    def _versions(self) -> tuple[Any, ...]:
        # The storage and the dtype too: `parameter.data = ...`, as averages are swapped in, counts no version.
        return tuple(
            (None if tensor.is_inference() else tensor._version, tensor.untyped_storage()._cdata, tensor.dtype)
            for _, tensor in self._tensors()
        )


@dataclass
class Cell:
    """The value of deferred logits once somebody has asked for it, shared by a tensor and those detached from it.

    Holds no autograd graph: logits that somebody keeps keep no activations.
    """

    source: Source
    parent: "Cell | None" = None
    op: Op | None = None
    rows: Tensor | None = None
    """Numbers of the head's rows, flat, that these logits are; None for all in their order."""
    fold: Fold | None = field(default_factory=Fold)
    """The pending operations as the kernel can take them; None if it cannot."""
    _value: Tensor | None = None
    _version: int = 0

    @property
    def is_computed(self) -> bool:
        return self._value is not None

    @property
    def is_lazy(self) -> bool:
        """Whether nobody has read these logits, or those that they are a view of: what is read once may be written to."""
        return self._value is None and (self.op is None or not self.op.views or self.parent is None or self.parent.is_lazy)

    @property
    def ops(self) -> tuple[Op, ...]:
        """The pending operations, first to last."""
        return () if self.parent is None or self.op is None else (*self.parent.ops, self.op)

    def value(self) -> Tensor:
        """The logits, graph-free, always the same tensor."""
        if self._value is None:
            if self.parent is None or self.op is None:
                self._value = self.source.compute()
            elif self.op.views:  # shows what is written into the logits that it was taken from
                self._value = apply([self.op], self.parent.value())
            else:  # a copy from before any write
                self._value = apply([self.op], self.parent.pristine())
            self._version = self._value._version
        return self._value

    def pristine(self) -> Tensor:
        """The logits as they were made, also if somebody has written into them since."""
        if self._value is not None and self._value._version == self._version:
            return self._value
        return apply(self.ops, self.source.compute())


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The head's output, graph-free, as it computes it in `dtype`."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def apply(ops: Sequence[Op], logits: Tensor) -> Tensor:
    """Pending operations on real logits, graph-free."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for op in ops:
            logits = op.value(logits)
        return logits


def log_sum_exp(rows: Tensor, fold: Fold) -> Tensor:
    """Of each row of the head's output (N, V), after the pending operations; (N,) in FP32."""
    if fold.columns is not None:
        rows = rows[:, : fold.columns]
    if fold.bias is not None:
        rows = rows + fold.bias
    maximum, total = row_statistics(rows, softcap=fold.cap, logit_scale=fold.scale)
    return maximum + total.log()


def _message(why: str) -> str:
    return (
        f"these logits were deferred, and {why} before they were read, so that they would be other logits. Read them before "
        "that (`.argmax(-1)` or `.cpu()` do, `.detach()` and `.clone()` do not), or use "
        'liger_compat.patch(model, logits="keep").'
    )
