"""Gradients of the loss: of the operator, and the form that overwrites the logits."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _ops
from ._options import Options


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, weight, _, reduction, wanted, *ctx.options = inputs
    _, *statistics, grad = output
    ctx.early = _ops.makes_gradient_early(logits, wanted, reduction)
    if ctx.early:
        ctx.save_for_backward(grad)
    else:
        ctx.save_for_backward(logits, target, weight, *statistics)  # maximum, total, divisors
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    grad = None
    if grad_loss is not None and ctx.needs_input_grad[0]:
        if ctx.early:
            (made,) = ctx.saved_tensors
            grad = multiplied(made, grad_loss, ctx.options[-1])
        else:
            grad = _ops.cross_entropy_backward(grad_loss, *ctx.saved_tensors, *ctx.options)
    return (grad, *[None] * 11)


def multiplied(grad: Tensor, grad_loss: Tensor, backend: str | None) -> Tensor:
    """A gradient (..., V) that was made and saved in forward, times the incoming one, () or one a row, rounded once.

    In its own memory, unless another backward pass may follow, which will need it as it is.
    """
    if type(grad) is not Tensor or torch.is_grad_enabled():  # traced by torch.compile, or create_graph=True
        return _ops.scaled(grad, grad_loss)  # type: ignore[no-any-return]
    if graph_is_kept():
        grad = grad.clone()
    if grad.numel():
        # `.data`: unseen by autograd, which would take the saved tensor for changed by somebody else.
        matrix = grad.data.view(-1, grad.shape[-1])
        _ops.implementation(backend, matrix).rescale(matrix, grad_loss)
    return grad


def graph_is_kept() -> bool:
    """Whether the backward pass that runs keeps its graph for another one. PyTorch 2.4 does not tell; then it may."""
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return tell is None or tell()


def refuse_double_backward(ctx: Any, *_: object) -> NoReturn:
    """Raises NotImplementedError."""
    msg = (
        "double backward through liger_compat's cross-entropy is not implemented: its gradient, asked for with "
        "create_graph=True, cannot be differentiated. Use torch.nn.functional.cross_entropy where that is needed."
    )
    raise NotImplementedError(msg)


_ops.cross_entropy.register_autograd(_backward, setup_context=_save_for_backward)
for _gradient in (_ops.cross_entropy_backward, _ops.scaled):
    _gradient.register_autograd(refuse_double_backward, setup_context=lambda ctx, inputs, output: None)


class OverwritingCrossEntropy(torch.autograd.Function):
    """The loss, with the gradient of the logits kept in the logits' own memory.

    That gradient is made in the forward pass and multiplied by the incoming one in backward, or made in backward, as that of
    the operator.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        divisor: Tensor | None,
        reduction: str,
        options: Options,
        backend: str | None,
    ) -> Tensor:
        # An alias: callers may give `logits` other memory once the loss is known, as liger_compat's models do.
        buffer = logits.detach()
        divisors = _ops.prepare(buffer, target, weight, divisor, reduction, options, backend)
        kernel = _ops.implementation(backend, buffer)
        ctx.early = _ops.makes_gradient_early(buffer, wanted=True, reduction=reduction)
        if ctx.early:
            loss, maximum, total = kernel.fused(buffer, buffer, target, weight, divisors, options)
            ctx.save_for_backward(buffer)
        else:
            loss, maximum, total = kernel.row_losses(buffer, target, weight, options)
            ctx.save_for_backward(buffer, target, weight, maximum, total, divisors)
        # Kernels write unseen by autograd. This tells it, so that whoever saved the logits for a backward pass of their
        # own gets PyTorch's error about an in-place change, not a wrong gradient.
        torch.autograd.graph.increment_version(buffer)
        ctx.options = (*options, backend)
        return _ops.reduce(loss, maximum, total, divisors, reduction, options)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: the gradient would look like a constant
            refuse_double_backward(ctx)
        buffer, *saved = ctx.saved_tensors
        *options, backend = ctx.options
        if ctx.early:
            grad = multiplied(buffer, grad_loss, backend)
        elif graph_is_kept():
            grad = _ops.cross_entropy_backward(grad_loss, buffer, *saved, *ctx.options)
        else:
            grad = buffer
            _ops.implementation(backend, grad).write_gradient(grad.data, grad_loss, grad, *saved, Options(*options))
        return (grad, *[None] * 6)
