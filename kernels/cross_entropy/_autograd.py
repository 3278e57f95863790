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
    if type(grad) is not Tensor:  # traced by torch.compile
        return _ops.scaled(grad, grad_loss)  # type: ignore[no-any-return]
    if torch.is_grad_enabled():  # create_graph=True: the result must not look like a constant
        return _ops.scaled(grad.detach().requires_grad_(), grad_loss)  # type: ignore[no-any-return]
    if "Batched" in str(torch._C._dispatch_keys(grad_loss)):  # is_grads_batched=True, whose tensors have no name in Python
        return torch.where(grad == 0, 0, grad * grad_loss).to(grad.dtype)
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


class CrossEntropy(torch.autograd.Function):
    """The loss where nothing traces, without the host time of an operator.

    With `overwrite`, the gradient of the logits takes their memory, in forward or, where it must wait, in backward.
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
        overwrite: bool,
    ) -> Tensor:
        # An alias: callers may give `logits` other memory once the loss is known, as liger_compat's models do.
        buffer = logits.detach()
        ctx.options, ctx.overwrite = (*options, backend), overwrite
        ctx.early = _ops.makes_gradient_early(logits, wanted=True, reduction=reduction)
        loss, *statistics, grad = _ops.compute(
            buffer, target, weight, divisor, reduction, options, backend, wanted=True, overwrite=overwrite
        )
        if ctx.early:
            ctx.save_for_backward(grad)
        else:
            ctx.save_for_backward(buffer if overwrite else logits, target, weight, *statistics)
        if overwrite:
            # Kernels write unseen by autograd. This tells it, so that whoever saved the logits for a backward pass of
            # their own gets PyTorch's error about an in-place change, not a wrong gradient.
            torch.autograd.graph.increment_version(buffer)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        first, *saved = ctx.saved_tensors
        *options, backend = ctx.options
        if ctx.early:
            grad = multiplied(first, grad_loss, backend)
        elif ctx.overwrite and not graph_is_kept():
            grad = first
            _ops.implementation(backend, grad).write_gradient(grad.data, grad_loss, grad, *saved, Options(*options))
        else:
            if torch.is_grad_enabled():
                first = first.detach().requires_grad_()
            grad = _ops.cross_entropy_backward(grad_loss, first, *saved, *ctx.options)
        return (grad, *[None] * 7)
