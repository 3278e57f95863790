"""The lazy list: operations on logits that can wait until the logits are computed, or need never be applied to them.

Each knows its value on real logits, how a gradient goes back through it in closed form (autograd is off where that is
needed), and what it means to the loss kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a function after the logits themselves."""


@dataclass(frozen=True)
class Fold:
    """What operations make of the head's output x: `cap tanh((x + bias) scale / cap)`, of which the first `columns`."""

    scale: float = 1.0
    cap: float | None = None
    bias: Tensor | None = None
    columns: int | None = None
    normalised: bool = False
    """Whether a log-softmax came after all that. The loss is the same without it; nothing else can come after it."""


@dataclass(frozen=True)
class Op:
    """One operation, as it was called."""

    func: Callable[..., Any]
    call: Call
    views = False
    """Whether the result shares memory with the logits it is made from."""
    needs_logits = False
    """Whether `adjoint` needs those logits."""
    after_softmax = False
    """Whether the loss still knows what to do with it after a log-softmax."""

    def value(self, logits: Tensor) -> Tensor:
        """The operation on real logits; with autograd where that is on."""
        args, kwargs = self.call
        return self.func(logits, *args, **kwargs)  # type: ignore[no-any-return]

    def on_meta(self, meta: Tensor) -> Tensor:
        """The operation on a meta tensor: shape, strides and dtype of its result."""
        return self.value(meta)

    def on_rows_of_logits(self, rows: Tensor) -> Tensor:
        """The operation on some of the rows, (n, V); rows are picked elsewhere."""
        return self.value(rows)

    def adjoint(self, grad: Tensor, logits: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient of logits of that shape and dtype, given that of the result; `logits()` computes them if need be."""
        raise NotImplementedError

    def fold(self, fold: Fold) -> Fold | None:
        """The chain so far with this operation after it, or None if the kernel has no such form."""
        return fold


@dataclass(frozen=True)
class Cast(Op):
    """A change of dtype."""

    after_softmax = True

    def adjoint(self, grad: Tensor, logits: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return grad.to(dtype)


@dataclass(frozen=True)
class Scale(Op):
    """Multiplication by a Python number."""

    factor: float

    def adjoint(self, grad: Tensor, logits: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self.value(grad)

    def fold(self, fold: Fold) -> Fold | None:
        if fold.cap is None:
            return replace(fold, scale=fold.scale * self.factor) if self.factor else None
        # Behind a tanh the cap grows, and what is inside it stays.
        return replace(fold, scale=fold.scale * self.factor, cap=fold.cap * self.factor) if self.factor > 0 else None


@dataclass(frozen=True)
class Tanh(Op):
    """The middle of a soft cap."""

    needs_logits = True

    def adjoint(self, grad: Tensor, logits: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return grad * (1 - self.value(logits()).square())

    def fold(self, fold: Fold) -> Fold | None:
        return replace(fold, cap=1.0) if fold.cap is None else None


@dataclass(frozen=True)
class LogSoftmax(Op):
    """Over the vocabulary.

    The loss of log-probabilities is computed from the logits. A hook on the log-probabilities sees a gradient that differs
    from stock by a multiple of the probabilities in each row, which is what the log-softmax takes out of any gradient.
    """

    needs_logits = True
    after_softmax = True

    def adjoint(self, grad: Tensor, logits: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return (grad - self.value(logits()).exp() * grad.sum(-1, keepdim=True)).to(dtype)

    def fold(self, fold: Fold) -> Fold | None:
        return replace(fold, normalised=True)


@dataclass(frozen=True)
class AddBias(Op):
    """Addition of a row of numbers to every row of logits; they need no gradient."""

    bias: Tensor

    def on_meta(self, meta: Tensor) -> Tensor:
        return torch.empty_like(meta, dtype=torch.promote_types(meta.dtype, self.bias.dtype))

    def on_rows_of_logits(self, rows: Tensor) -> Tensor:
        return self.func(rows, self.bias.reshape(-1))  # type: ignore[no-any-return]

    def adjoint(self, grad: Tensor, logits: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return grad.to(dtype)

    def fold(self, fold: Fold) -> Fold | None:
        if fold.cap is not None:
            return None
        bias = self.bias.reshape(-1) / fold.scale
        return replace(fold, bias=bias if fold.bias is None else fold.bias + bias)


@dataclass(frozen=True)
class Columns(Op):
    """The first `count` columns of the vocabulary."""

    count: int
    views = True

    def on_rows_of_logits(self, rows: Tensor) -> Tensor:
        return rows[:, : self.count]

    def adjoint(self, grad: Tensor, logits: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return F.pad(grad, (0, shape[-1] - self.count))

    def fold(self, fold: Fold) -> Fold | None:
        return replace(fold, columns=self.count, bias=None if fold.bias is None else fold.bias[: self.count])


@dataclass(frozen=True)
class Rows(Op):
    """An operation on the dimensions before the vocabulary."""

    on_rows: Callable[[Tensor], Tensor] | None
    """The same on a tensor without the last dimension; None if it keeps all rows in their order."""
    views: bool
    after_softmax = True

    def on_rows_of_logits(self, rows: Tensor) -> Tensor:
        return rows

    def adjoint(self, grad: Tensor, logits: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self.on_rows is None:
            return grad.reshape(shape)
        numbers = self.on_rows(row_numbers(shape[:-1], grad.device)).reshape(-1)
        whole = grad.new_zeros(shape[:-1].numel(), shape[-1])
        return whole.index_add_(0, numbers, grad.reshape(-1, shape[-1])).view(shape)


def row_numbers(shape: torch.Size, device: torch.device) -> Tensor:
    """0, 1, ... in the given shape."""
    return torch.arange(shape.numel(), device=device).view(shape)
