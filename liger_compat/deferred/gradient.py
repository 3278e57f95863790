"""The gradient of deferred logits: finished where it is needed, and computed only if somebody looks at it.

The loss already has the gradients of hidden states, weight and bias. It hands them to the head's autograd node inside a
tensor that stands for the gradient of the logits; hooks, `retain_grad`, a second loss on the logits and everything else get
the real one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .pending import Op
from .source import Cell, Source

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass
class Finished:
    """The gradients of a head's operands through one loss."""

    source: Source
    rows: Tensor | None
    """Numbers of the rows of the hidden states that the first gradient is of; None for all."""
    gradients: Gradients
    """Of those rows (n, H), of the weight and of the bias."""
    of_logits: Callable[[], Tensor]
    """Computes the gradient of the logits that the loss was given."""

    def of_operands(self) -> Gradients:
        """The gradients of hidden states, weight and bias, in their shapes."""
        of_rows, *others = self.gradients
        hidden = self.source.hidden
        if of_rows is not None and self.rows is not None:
            whole = of_rows.new_zeros(hidden.shape[:-1].numel(), hidden.shape[-1])
            of_rows = whole.index_add_(0, self.rows, of_rows)
        return None if of_rows is None else of_rows.view(hidden.shape), others[0], others[1]


@dataclass
class Sum:
    """Two of them: a second loss on the same logits."""

    parts: tuple["LazyGradient", "LazyGradient"]

    def of_operands(self) -> Gradients:
        """Their sums."""
        both = zip(*(part._lc_finished.of_operands() for part in self.parts), strict=True)
        hidden, weight, bias = (a if b is None else b if a is None else a + b for a, b in both)
        return hidden, weight, bias

    def of_logits(self) -> Tensor:
        """Their sum."""
        return self.parts[0].real() + self.parts[1].real()


class LazyGradient(Tensor):
    """Has the shape and dtype of deferred logits."""

    _lc_finished: Finished | Sum
    _lc_back: tuple[tuple[Op, Cell, Tensor], ...]
    """Pending operations between these logits and those that the loss was given, last first, each with what it was applied to."""
    _lc_real: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls, meta: Tensor, device: torch.device, finished: Finished | Sum, back: tuple[tuple[Op, Cell, Tensor], ...] = ()
    ) -> "LazyGradient":
        """A gradient of the shape and dtype of `meta`."""
        with torch._C.DisableTorchFunctionSubclass():
            self: LazyGradient = Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, device=device)
        self._lc_finished, self._lc_back, self._lc_real = finished, back, None
        return self

    def through(self, op: Op, cell: Cell, meta: Tensor) -> "LazyGradient":
        """The gradient of the logits of `cell`, of the shape and dtype of `meta`, that `op` was applied to."""
        return LazyGradient.of(meta, self.device, self._lc_finished, (*self._lc_back, (op, cell, meta)))

    def of_operands(self) -> Gradients:
        """The gradients of hidden states, weight and bias."""
        return self._lc_finished.of_operands()

    def real(self) -> Tensor:
        """The gradient itself, computed once."""
        if self._lc_real is None:
            gradient = self._lc_finished.of_logits()
            for op, cell, meta in self._lc_back:
                gradient = op.adjoint(gradient, cell.pristine, meta.shape, meta.dtype)
            self._lc_real = gradient.view(self.shape)
        return self._lc_real

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, LazyGradient):
            if func in _ALIASES and (len(args) == 1 or tuple(args[1]) == tuple(first.shape)):
                return LazyGradient.of(first, first.device, first._lc_finished, first._lc_back)
            if func is torch.ops.aten.add.Tensor and isinstance(args[1], LazyGradient) and not kwargs:
                if first.shape == args[1].shape:
                    return LazyGradient.of(first, first.device, Sum((first, args[1])))
        return func(*_real(args), **_real(kwargs or {}))


def _real(value: Any) -> Any:
    """An argument with every lazy gradient in it computed."""
    if isinstance(value, LazyGradient):
        return value.real()
    if isinstance(value, list | tuple):
        return type(value)(_real(item) for item in value)
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return value


_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default}
