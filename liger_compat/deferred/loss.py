"""Cross-entropy of deferred logits: computed from hidden states and weight, a chunk of logits at a time."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import Operands, chunked_backward, chunked_forward, gradient_of_logits, multiplied
from .gradient import Finished, LazyGradient, refuse_to_differentiate
from .pending import Fold
from .source import Cell, Witness
from .tensor import DeferredLogits


def can_fuse(logits: Tensor, *, z_loss: float = 0.0) -> bool:
    """Whether `cross_entropy` can serve these logits."""
    if not isinstance(logits, DeferredLogits) or not logits.lc_is_lazy:
        return False
    fold = logits._lc_cell.fold
    return fold is not None and not (fold.normalised and z_loss)  # log-probabilities have a log-sum-exp of 0


def cross_entropy(
    logits: DeferredLogits, target: Tensor, class_weight: Tensor | None, divisor: Tensor | None, reduction: str, settings: Any
) -> Tensor:
    """The loss, () or (N,), in the accumulator's dtype, of logits (N, V) that `can_fuse` accepts.

    `settings` are those of the chunked kernel without scale and cap, which come from what is pending on the logits.
    """
    if logits.requires_grad and torch.is_grad_enabled():
        return Loss.apply(logits, target, class_weight, divisor, reduction, settings)  # type: ignore[no-any-return, no-untyped-call]
    loss: Tensor = _forward(logits._lc_cell, target, class_weight, divisor, reduction, settings, (False, False, False))[1].loss
    return loss


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
        source = cell.source
        operands, result, folded = _forward(cell, target, class_weight, divisor, reduction, settings, source.wanted)
        gradients = (None, None, None) if result.gradients is None else result.gradients
        # Every tensor goes through autograd's saved tensors: it frees them after backward, however long the loss is kept,
        # and notices when the weight was changed in place in between. The parameter itself is saved for that.
        ctx.save_for_backward(
            *source.operands(), *operands, cell.rows, result.maximum, result.total, result.divisors, *gradients
        )
        ctx.meta, ctx.settings, ctx.folded, ctx.ops, ctx.wanted = logits._lc_meta, settings, folded, cell.ops, source.wanted
        ctx.early = result.gradients is not None
        loss: Tensor = result.loss
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        saved = ctx.saved_tensors
        operands, folded_operands, (rows, maximum, total, divisors, *gradients) = saved[:3], Operands(*saved[3:8]), saved[8:]
        if ctx.early:
            gradients = [each if each is None else multiplied(each, grad_loss, ctx.settings.backend) for each in gradients]
        else:
            gradients = chunked_backward(folded_operands, maximum, total, divisors, grad_loss, ctx.folded, ctx.wanted)
        columns = operands[1].shape[0]
        finished = Finished(
            (gradients[0], _pad(gradients[1], columns), _pad(gradients[2], columns)),
            rows,
            operands,
            ctx.folded.compute_dtype,
            ctx.ops,
            partial(
                gradient_of_logits,
                grad_loss=grad_loss,
                target=folded_operands.target,
                weight=folded_operands.class_weight,
                divisors=divisors,
                options=ctx.settings.options,
                backend=ctx.settings.backend,
            ),
        )
        if torch.is_grad_enabled():  # create_graph=True
            gradient = refuse_to_differentiate(finished.of_logits(len(ctx.ops)).view(ctx.meta.shape))
        else:
            gradient = LazyGradient.of(ctx.meta, grad_loss.device, finished, len(ctx.ops))
        return gradient, *[None] * 5


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
    source, fold = cell.source, cell.fold or Fold()
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


def _pad(gradient: Tensor | None, columns: int) -> Tensor | None:
    """A gradient of the first columns of the vocabulary -> of all."""
    if gradient is None or gradient.shape[0] == columns:
        return gradient
    return F.pad(gradient, (0, 0) * (gradient.dim() - 1) + (0, columns - gradient.shape[0]))
