"""Logits that are computed only when somebody reads them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import reads, recognise
from .gradient import Gradients, LazyGradient, refuse_to_differentiate
from .metadata import is_about_gradients, needs_no_values
from .pending import Op, Rows, row_numbers
from .source import Cell, Source, apply, product


class DeferredLogits(Tensor):
    """Logits with their shape, dtype and autograd history, and no values until something reads them.

    Operations of the lazy list make more of them. `torch.nn.functional.cross_entropy` is computed without the logits.
    Anything else sees a plain tensor in its place, made once, with the history that ordinary logits would have.
    """

    _lc_cell: Cell
    _lc_meta: Tensor
    """A meta tensor with the shape, strides and dtype."""
    _lc_base: "DeferredLogits | None"
    """The deferred logits that these are a view of; only where they need a gradient."""
    _lc_plain: Tensor | None
    """What is read in the place of these logits, with autograd history."""

    @classmethod
    def of(cls, cell: Cell, meta: Tensor, base: "DeferredLogits | None" = None) -> "DeferredLogits":
        """A tensor without history; the autograd functions below give it one."""
        with torch._C.DisableTorchFunctionSubclass():
            self: DeferredLogits = Tensor._make_wrapper_subclass(
                cls, meta.shape, meta.stride(), dtype=meta.dtype, device=cell.source.hidden.device
            )
            # C++ code that passes by Python fails with an error instead of reading memory that is not there.
            torch._C._set_throw_on_mutable_data_ptr(self)
        self._lc_cell, self._lc_meta, self._lc_base, self._lc_plain = cell, meta, base, None
        return self

    @property
    def lc_is_lazy(self) -> bool:
        """Whether nothing has to be read for an operation of the lazy list, or for the loss."""
        return self._lc_cell.is_lazy

    @torch._disable_dynamo  # type: ignore[attr-defined]  # a compiled function that reads logits breaks its graph here
    def lc_plain(self, name: str) -> Tensor:
        """The plain tensor in the place of these logits; `name` is who asks."""
        cell = self._lc_cell
        records = torch.is_grad_enabled() and self.requires_grad
        if records and self._lc_base is not None and cell.op is not None:
            if self._lc_plain is None:
                self._lc_plain = cell.op.value(self._lc_base.lc_plain(name))
                cell.source.observer.watch(self._lc_plain)
            return self._lc_plain
        if not cell.is_computed:
            cell.source.observer.materialised(name)
        if not records:
            return cell.value()
        if self._lc_plain is None:
            self._lc_plain = Materialise.apply(self)  # type: ignore[no-untyped-call]
            cell.source.observer.watch(self._lc_plain)
        return self._lc_plain

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if needs_no_values(func, name):
            if is_about_gradients(func):
                args, kwargs = _stand_in(args, name), _stand_in(kwargs, name)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            return _without_lazy_gradients(result) if func is torch.autograd.grad else result
        logits = args[0] if args else None
        if not isinstance(logits, DeferredLogits) and (swapped := recognise.swap(func, args, kwargs)) is not None:
            func, logits, args = swapped, args[1], args[::-1]
        if isinstance(logits, DeferredLogits):
            if func is Tensor.detach:
                return DeferredLogits.of(logits._lc_cell, logits._lc_meta)
            if logits.lc_is_lazy:
                found = _lazily(func, logits, args[1:], kwargs)
                if found is not None:
                    return found
        if func is F.cross_entropy or (func is F.nll_loss and _are_log_probabilities(logits)):
            return _cross_entropy(*args, **kwargs)
        result = func(*_plain(args, name), **_plain(kwargs, name))
        # An operation in place returns what it was called on, not what stands for it.
        return (
            logits if isinstance(logits, DeferredLogits) and result is not None and result is logits._lc_current() else result
        )

    def _lc_current(self) -> Tensor | None:
        return self._lc_plain if self._lc_plain is not None else self._lc_cell._value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Calls from C++: autograd's own aliases stay deferred, everything else sees values."""
        first = args[0] if args else None
        if (
            isinstance(first, DeferredLogits)
            and func in _ALIASES
            and (len(args) == 1 or tuple(args[1]) == tuple(first._lc_meta.shape))
        ):
            return DeferredLogits.of(first._lc_cell, first._lc_meta)
        return func(*_values(args, str(func)), **_values(kwargs or {}, str(func)))

    def __reduce_ex__(self, protocol: Any) -> Any:  # files hold plain tensors
        return self.lc_plain("pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.lc_plain("deepcopy").__deepcopy__(memo)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self.lc_is_lazy:
            return f"DeferredLogits(shape={tuple(self._lc_meta.shape)}, dtype={self._lc_meta.dtype}, not computed)"
        return repr(self.lc_plain("repr"))


def defer(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, observer: Any) -> DeferredLogits:
    """`torch.nn.functional.linear(hidden, weight, bias)`, not computed yet, in `dtype`."""
    recording = torch.is_grad_enabled()
    wanted = (
        recording and hidden.requires_grad,
        recording and weight.requires_grad,
        recording and bias is not None and bias.requires_grad,
    )
    source = Source(hidden.detach(), weight, bias, dtype, wanted, observer)
    if any(wanted):
        return HeadCall.apply(hidden, weight, bias, source)  # type: ignore[no-any-return, no-untyped-call]
    return _head_output(source)


def _head_output(source: Source) -> DeferredLogits:
    return DeferredLogits.of(Cell(source), torch.empty(source.shape, dtype=source.dtype, device="meta"))


class HeadCall(torch.autograd.Function):
    """The output head."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: Source) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.dtype = source.dtype  # not the source itself: what hangs on a node lives as long as somebody holds the loss
        return _head_output(source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        if isinstance(grad, LazyGradient):
            if not grad.lc_is_edited:
                return (*grad.lc_of_operands(), None)
            grad = grad.lc_real()
        return (*HeadCall.gradients(ctx, grad, hidden, weight, bias), None)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Gradients:
        """Those of the operands, from that of real logits."""
        with torch.autocast(hidden.device.type, enabled=False):
            rows, grad = hidden.reshape(-1, hidden.shape[-1]).to(ctx.dtype), grad.reshape(-1, grad.shape[-1])
            wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
            return (
                (grad @ weight.to(ctx.dtype)).to(hidden.dtype).view_as(hidden) if wants_hidden else None,
                (grad.t() @ rows).to(weight.dtype) if wants_weight else None,
                grad.sum(0).to(bias.dtype) if wants_bias and bias is not None else None,
            )


class Pending(torch.autograd.Function):
    """An operation of the lazy list."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, op: Op, result: tuple[Cell, Tensor, DeferredLogits | None]) -> Tensor:
        cell = logits._lc_cell
        ctx.op, ctx.meta = op, logits._lc_meta
        if op.needs_logits:
            ctx.save_for_backward(*cell.source.operands())
            ctx.dtype, ctx.ops = cell.source.dtype, cell.ops
        return DeferredLogits.of(*result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if isinstance(grad, LazyGradient):
            if not grad.lc_is_edited:
                return grad.lc_before(ctx.meta), None, None
            grad = grad.lc_real()

        def logits() -> Tensor:
            hidden, weight, bias = ctx.saved_tensors
            return apply(ctx.ops, product(hidden, weight, bias, ctx.dtype))

        result = ctx.op.adjoint(grad, logits, ctx.meta.shape, ctx.meta.dtype)
        if torch.is_grad_enabled() and ctx.op.needs_logits:  # create_graph=True
            result = refuse_to_differentiate(result)
        return result, None, None


class Materialise(torch.autograd.Function):
    """Deferred logits -> plain ones."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> Tensor:
        # Not the value itself, which must stay without history; but its version counter, so that writes are noticed.
        return logits._lc_cell.value().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _lazily(func: Callable[..., Any], logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(logits, *args, **kwargs)` without computing the logits, or None."""
    if any(isinstance(tensor, DeferredLogits) and func not in _SHAPED_LIKE for tensor in recognise.tensors_in((args, kwargs))):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if func is Tensor.contiguous and not args and not kwargs and logits._lc_meta.is_contiguous():
            return logits
        op = recognise.recognise(func, logits._lc_meta, logits.device, args, kwargs)
        if op is not None:
            return _apply(op, logits)
        several = recognise.pieces(func, logits._lc_meta, args, kwargs)
        if several is not None:
            return (
                tuple(_apply(each, logits) for each in several)
                if func is not torch.chunk
                else [_apply(e, logits) for e in several]
            )
    return reads.read(func, logits, args, kwargs)


def _apply(op: Op, logits: DeferredLogits) -> Tensor:
    cell, meta = logits._lc_cell, logits._lc_meta
    if isinstance(op, Rows) and op.on_rows is not None:
        lead = meta.shape[:-1]
        local = op.on_rows(row_numbers(lead, logits.device))
        new_meta = _strided(op, meta, torch.Size((*local.shape, meta.shape[-1])))
        rows: Tensor | None = local.reshape(-1) if cell.rows is None else cell.rows[local.reshape(-1)]
    else:
        new_meta = op.on_meta(meta)
        if new_meta is meta:
            return logits
        rows = cell.rows
    fold = None if cell.fold is None or (cell.fold.normalised and not op.after_softmax) else op.fold(cell.fold)
    new = Cell(cell.source, cell, op, rows, fold)
    if logits.requires_grad and torch.is_grad_enabled():
        return Pending.apply(logits, op, (new, new_meta, logits if op.views else None))  # type: ignore[no-any-return, no-untyped-call]
    return DeferredLogits.of(new, new_meta)


def _strided(op: Op, meta: Tensor, shape: torch.Size) -> Tensor:
    """The result's meta tensor, with the strides of the real one where that is a view."""
    return op.on_meta(meta) if op.views else meta.new_empty(shape)


def _are_log_probabilities(value: Any) -> bool:
    """Whether that is deferred, and its negative log-likelihood the cross-entropy of the logits it was made from."""
    if not isinstance(value, DeferredLogits) or not value.lc_is_lazy:
        return False
    fold = value._lc_cell.fold
    return fold is not None and fold.normalised and value.dim() <= 2


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's cross-entropy over deferred logits: the model's patch answers."""
    logits = args[0] if args else kwargs["input"]
    if isinstance(logits, DeferredLogits):
        return logits._lc_cell.source.observer.answer(*args, **kwargs)  # type: ignore[no-any-return]
    return F.cross_entropy(*_plain(args, "cross_entropy"), **_plain(kwargs, "cross_entropy"))


def _plain(value: Any, name: str) -> Any:
    """An argument with a plain tensor in the place of every deferred one."""
    return recognise.replace(value, DeferredLogits, lambda logits: logits.lc_plain(name))


def _stand_in(value: Any, name: str) -> Any:
    """An argument with the tensor that is in the graph in the place of a deferred view.

    What is read through a view is made from what it is a view of, so that writes into either are seen by both. Who asks for
    the gradient of the view must ask for that of what is read.
    """

    def of(logits: DeferredLogits) -> Tensor:
        waits = logits._lc_base is None or (logits.lc_is_lazy and name not in _HOOKS)
        return logits if waits else logits.lc_plain(name)

    return recognise.replace(value, DeferredLogits, of)


def _values(value: Any, name: str) -> Any:
    """The same below autograd."""
    with torch.no_grad():
        return _plain(value, name)


def _without_lazy_gradients(result: Any) -> Any:
    return tuple(value.lc_real() if isinstance(value, LazyGradient) else value for value in result)


_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default}
_HOOKS = ("register_hook", "retain_grad")
_SHAPED_LIKE = {Tensor.view_as, Tensor.reshape_as}
