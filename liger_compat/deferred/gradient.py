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
from torch.utils._pytree import tree_leaves

from .pending import Op
from .recognise import replace
from .source import apply, product

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass
class Finished:
    """The gradients of a head's operands through one loss, and what the gradient of its logits can be computed from."""

    gradients: Gradients
    """Of some rows of the hidden states (n, H), of the weight and of the bias."""
    rows: Tensor | None
    """Numbers of those rows; None for all."""
    operands: tuple[Tensor, Tensor, Tensor | None]
    dtype: torch.dtype
    ops: tuple[Op, ...]
    """What was pending on the logits when the loss was computed."""
    of_values: Callable[[Tensor], Tensor]
    """The gradient of the logits that the loss was given, (N, V), from those logits."""

    def of_operands(self) -> Gradients:
        """The gradients of hidden states, weight and bias, in their shapes."""
        of_rows, *others = self.gradients
        hidden = self.operands[0]
        if of_rows is not None and self.rows is not None:
            whole = of_rows.new_zeros(hidden.shape[:-1].numel(), hidden.shape[-1])
            of_rows = whole.index_add_(0, self.rows, of_rows)
        return None if of_rows is None else of_rows.view(hidden.shape), others[0], others[1]

    def of_logits(self, done: int) -> Tensor:
        """The gradient of the logits that `done` of the pending operations had been applied to."""
        hidden, weight, bias = self.operands
        stages = [product(hidden, weight, bias, self.dtype)]
        for op in self.ops:
            stages.append(apply([op], stages[-1]))
        values = stages.pop()
        gradient = self.of_values(values.reshape(-1, values.shape[-1])).view(values.shape)
        for op in reversed(self.ops[done:]):
            before = stages.pop()
            gradient = op.adjoint(gradient, _always(before), before.shape, before.dtype)
        return gradient


@dataclass
class Sum:
    """Two of them: a second loss on the same logits."""

    parts: tuple["LazyGradient", "LazyGradient"]

    def of_operands(self) -> Gradients:
        """Their sums."""
        both = zip(*(part._lc_finished.of_operands() for part in self.parts), strict=True)
        hidden, weight, bias = (a if b is None else b if a is None else a + b for a, b in both)
        return hidden, weight, bias

    def of_logits(self, done: int) -> Tensor:
        """Their sum. Both are of the same logits, wherever their losses were computed."""
        return self.parts[0].lc_real(done) + self.parts[1].lc_real(done)


class LazyGradient(Tensor):
    """Has the shape and dtype of deferred logits."""

    _lc_finished: Finished | Sum
    _lc_done: int
    """How many of the pending operations had been applied to these logits."""
    _lc_seen: "_Seen"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, meta: Tensor, device: torch.device, finished: Finished | Sum, done: int) -> "LazyGradient":
        """A gradient of the shape and dtype of `meta`."""
        with torch._C.DisableTorchFunctionSubclass():
            self: LazyGradient = Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, device=device)
        self._lc_finished, self._lc_done, self._lc_seen = finished, done, _Seen()
        return self

    @property
    def lc_is_edited(self) -> bool:
        """Whether somebody has written into the gradient, or may have, which then is no longer what was finished."""
        return self._lc_seen.edited

    def lc_before(self, meta: Tensor) -> "LazyGradient":
        """The gradient of the logits, of the shape and dtype of `meta`, that the last of those operations was applied to."""
        return LazyGradient.of(meta, self.device, self._lc_finished, self._lc_done - 1)

    def lc_of_operands(self) -> Gradients:
        """The gradients of hidden states, weight and bias."""
        return self._lc_finished.of_operands()

    def lc_real(self, done: int | None = None) -> Tensor:
        """The gradient itself, computed once; or that of the logits after fewer operations."""
        if done is not None and done != self._lc_done:
            return self._lc_finished.of_logits(done)
        if self._lc_seen.value is None:
            self._lc_seen.value = self._lc_finished.of_logits(self._lc_done).view(self.shape)
        return self._lc_seen.value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        if isinstance(first, LazyGradient):
            if func in _ALIASES and (len(args) == 1 or tuple(args[1]) == tuple(first.shape)):
                alias = LazyGradient.of(first, first.device, first._lc_finished, first._lc_done)
                alias._lc_seen = first._lc_seen
                return alias
            other = args[1] if func is torch.ops.aten.add.Tensor and not kwargs else None
            if (
                isinstance(other, LazyGradient)
                and other.shape == first.shape
                and not (first.lc_is_edited or other.lc_is_edited)
            ):
                return LazyGradient.of(first, first.device, Sum((first, other)), first._lc_done)
        result = func(*_real(args), **_real(kwargs or {}))
        # Below autograd no version is counted. Who writes, or gets a view that can be written into, is taken to have written.
        for lazy in (each for each in (*args, *(kwargs or {}).values()) if isinstance(each, LazyGradient)):
            value = lazy.lc_real()
            if func._schema.is_mutable or any(_share_memory(part, value) for part in tree_leaves(result)):
                lazy._lc_seen.edited = True
        return result


@dataclass
class _Seen:
    """The real gradient once somebody has looked at it; shared by aliases."""

    value: Tensor | None = None
    edited: bool = False


def _share_memory(part: Any, value: Tensor) -> bool:
    return isinstance(part, Tensor) and part.untyped_storage()._cdata == value.untyped_storage()._cdata


class Refuse(torch.autograd.Function):
    """A gradient that was computed without a graph, as a tensor that cannot be differentiated: it must not look constant."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        msg = (
            "double backward through deferred logits is not implemented: a gradient was asked for with create_graph=True and "
            'is differentiated again. Use liger_compat.patch(model, logits="keep"), and torch.nn.functional.cross_entropy '
            "outside the model, where that is needed."
        )
        raise NotImplementedError(msg)


def refuse_to_differentiate(gradient: Tensor) -> Tensor:
    """The same gradient, which raises NotImplementedError when it is differentiated."""
    return Refuse.apply(gradient.detach().requires_grad_())  # type: ignore[no-any-return, no-untyped-call]


def _always(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def _real(value: Any) -> Any:
    """An argument with every lazy gradient in it computed."""
    return replace(value, LazyGradient, LazyGradient.lc_real)


_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default}
