"""Gradients of the loss: of the operator, and the form that overwrites the logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _ops
from ._options import Options


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, weight, _, _, *ctx.options = inputs
    _, *statistics = output  # maximum, total, divisors
    ctx.save_for_backward(logits, target, weight, *statistics)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    grad = None
    if grad_loss is not None and ctx.needs_input_grad[0]:
        grad = _ops.cross_entropy_backward(grad_loss, *ctx.saved_tensors, *ctx.options)
    return (grad, *[None] * 10)


def _refuse_double_backward(ctx: Any, *_: object) -> None:
    msg = (
        "double backward through liger_compat's cross_entropy is not implemented: its gradient was asked for with "
        "create_graph=True and is differentiated again. Use torch.nn.functional.cross_entropy where that is needed."
    )
    raise NotImplementedError(msg)


_ops.cross_entropy.register_autograd(_backward, setup_context=_save_for_backward)
_ops.cross_entropy_backward.register_autograd(_refuse_double_backward, setup_context=lambda ctx, inputs, output: None)


class OverwritingCrossEntropy(torch.autograd.Function):
    """The loss, with the gradient of the logits kept in the logits' own memory.

    That gradient is made in the forward pass, for an incoming gradient of 1, and multiplied by the real one in backward
    where that is not 1. FP16 logits are the exception: a gradient made before a loss scale is known would underflow, so
    theirs is made in backward.
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
        implementation = _ops.implementation(backend, buffer)
        late = buffer.dtype is torch.float16
        if late:
            loss, maximum, total = implementation.row_losses(buffer, target, weight, options)
        else:
            loss, maximum, total = implementation.overwrite(buffer, target, weight, divisors, options)
        # Kernels write unseen by autograd. This tells it, so that whoever saved the logits for a backward pass of their
        # own gets PyTorch's error about an in-place change, not a wrong gradient.
        torch.autograd.graph.increment_version(buffer)
        ctx.save_for_backward(buffer, target, weight, maximum, total, divisors)
        ctx.late, ctx.options, ctx.backend, ctx.spent = late, options, backend, False
        return _ops.reduce(loss, maximum, total, divisors, reduction, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            msg = (
                "backward through a cross_entropy that overwrites its logits works once: the gradient took their memory "
                'and has been handed out. Compute the loss without overwrite (logits="keep") to call backward again.'
            )
            raise RuntimeError(msg)
        ctx.spent = True
        buffer, *saved = ctx.saved_tensors
        implementation = _ops.implementation(ctx.backend, buffer)
        if ctx.late:
            implementation.write_gradient(buffer, grad_loss, buffer, *saved, ctx.options)
        else:
            implementation.rescale(buffer, grad_loss)
        return (buffer, *[None] * 6)
