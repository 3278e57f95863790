"""Cross-entropy of deferred logits: computed from hidden states and weight, a chunk of logits at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import Operands, chunked_backward, chunked_forward, gradient_of_logits, rescale
from .gradient import Finished, LazyGradient
from .source import Cell, Witness
from .tensor import DeferredLogits


def can_fuse(logits: Tensor) -> bool:
    """Whether `cross_entropy` can serve these logits."""
    return isinstance(logits, DeferredLogits) and logits.lc_is_lazy and logits._lc_cell.fold is not None


def cross_entropy(
    logits: DeferredLogits, target: Tensor, class_weight: Tensor | None, divisor: Tensor | None, reduction: str, settings: Any
) -> Tensor:
    """The loss, () or (N,), in the accumulator's dtype, of logits (N, V) that `can_fuse` accepts.

    `settings` are those of the chunked kernel without scale and cap, which come from what is pending on the logits.
    """
    if logits.requires_grad and torch.is_grad_enabled():
        return Loss.apply(logits, target, class_weight, divisor, reduction, settings)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(logits._lc_cell, target, class_weight, divisor, reduction, settings, wanted=(False, False, False))[1].loss


class Loss(torch.autograd.Function):
    """The loss as a function of the deferred logits, so that whatever hangs on their gradient works as on real ones."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: DeferredLogits,
        target: Tensor,
        class_weight: Tensor | None,
        divisor: Tensor | None,
        reduction: str,
        settings: Any,
    ) -> Tensor:
        cell = logits._lc_cell
        operands, result, folded = _forward(cell, target, class_weight, divisor, reduction, settings, cell.source.wanted)
        gradients = (None, None, None) if result.gradients is None else result.gradients
        # Everything goes through autograd's saved tensors: it frees them after backward, however long the loss is kept,
        # and notices when the weight was changed in place in between. The parameter itself is saved for that.
        ctx.save_for_backward(
            logits, cell.source.weight, *operands, result.maximum, result.total, result.divisors, *gradients
        )
        ctx.cell, ctx.meta, ctx.settings, ctx.folded = cell, logits._lc_meta, settings, folded
        ctx.early = result.gradients is not None
        return result.loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        logits, _, hidden, weight, bias, target, class_weight, maximum, total, divisors, *gradients = ctx.saved_tensors
        cell, settings = ctx.cell, ctx.settings

        def of_logits(values: Tensor) -> Tensor:
            return gradient_of_logits(
                values, grad_loss, target, class_weight, divisors, settings.options, settings.backend
            )

        if torch.is_grad_enabled():
            # create_graph=True: the gradient of real logits, whose own gradient is a named error.
            values = logits.lc_plain("create_graph")
            return of_logits(values.reshape(-1, values.shape[-1])).view(ctx.meta.shape), *[None] * 5
        if ctx.early:
            # In the memory that they have. A second backward finds them scaled, and makes them anew.
            ctx.early = False
            rescale(gradients, grad_loss, settings.backend)
        else:
            operands = Operands(hidden, weight, bias, target, class_weight)
            gradients = chunked_backward(operands, maximum, total, divisors, grad_loss, ctx.folded, cell.source.wanted)
        whole = (gradients[0], _pad(gradients[1], cell), _pad(gradients[2], cell))
        finished = Finished(cell.source, cell.rows, whole, lambda: of_logits(_matrix(cell)))
        return LazyGradient.of(ctx.meta, grad_loss.device, finished), *[None] * 5


def _forward(
    cell: Cell,
    target: Tensor,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    reduction: str,
    settings: Any,
    wanted: tuple[bool, bool, bool],
) -> Any:
    """The operands, what the kernel made of them, and the settings with what was pending on the logits."""
    source, fold = cell.source, cell.fold
    source.check()
    hidden = source.hidden.reshape(-1, source.hidden.shape[-1])
    bias = source.bias
    if fold.columns is not None:
        bias = None if bias is None else bias[: fold.columns]
    if fold.bias is not None:
        bias = fold.bias if bias is None else bias + fold.bias
    operands = Operands(
        hidden if cell.rows is None else hidden[cell.rows],
        source.weight.detach()[: fold.columns],
        None if bias is None else bias.detach(),
        target,
        class_weight,
    )
    options = settings.options._replace(logit_scale=fold.scale, softcap=fold.cap or 0.0)
    folded = settings._replace(options=options, compute_dtype=source.dtype)
    result = chunked_forward(operands, divisor, reduction, folded, wanted)
    lse = (result.maximum + result.total.log()).masked_fill(target == options.ignore_index, float("nan"))
    if cell.rows is not None:
        lse = torch.full_like(hidden[:, 0], float("nan"), dtype=lse.dtype).index_copy(0, cell.rows, lse)
    source.witness = Witness(lse, fold)
    return operands, result, folded


def _matrix(cell: Cell) -> Tensor:
    values = cell.pristine()
    return values.reshape(-1, values.shape[-1])


def _pad(gradient: Tensor | None, cell: Cell) -> Tensor | None:
    """A gradient of the first columns of the vocabulary -> of all."""
    missing = cell.source.weight.shape[0] - (gradient.shape[0] if gradient is not None else 0)
    if gradient is None or not missing:
        return gradient
    return F.pad(gradient, (0, 0) * (gradient.dim() - 1) + (0, missing))
