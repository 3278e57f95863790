"""Loss and gradients of a linear layer followed by cross-entropy, a chunk of rows of logits at a time.

A chunk of logits is computed, turned into its own gradient in place by the cross-entropy kernel, and fed to both gradient
products; the next chunk takes its memory. Nothing here records autograd history or waits for the device.

Legend: N rows, H hidden size, V classes. `hidden` (N, H), `weight` (V, H), `bias` (V,) or None, `target` (N,) int64,
`class_weight` (V,) in the accumulator's dtype or None.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..cross_entropy import _ops
from ..cross_entropy._options import Options, row_outputs

CHUNK_BYTES = 1 << 29
"""Logits that are held at a time; few large chunks, because each of them reads and writes the gradient of the weight."""
CHUNK_BYTES_ON_CPU = 1 << 25


class Operands(NamedTuple):
    """The tensors of a call; see the module's legend."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None


class Settings(NamedTuple):
    """What a call is computed with."""

    options: Options
    backend: str | None
    compute_dtype: torch.dtype
    """Dtype of the logits and of all products: that of `hidden`, or autocast's."""
    chunk_bytes: int | None


Wanted = tuple[bool, bool, bool]
"""Whether the gradients of hidden, weight and bias are wanted."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Forward(NamedTuple):
    """What a forward pass yields: the loss, what a later backward needs, and gradients for an incoming gradient of 1."""

    loss: Tensor
    maximum: Tensor
    total: Tensor
    divisors: Tensor
    gradients: Gradients | None
    """None where they must wait for the incoming gradient: of each row, or a loss scale that FP16 needs."""


def forward(operands: Operands, divisor: Tensor | None, reduction: str, settings: Settings, wanted: Wanted) -> Forward:
    """The loss, () or (N,), in FP32, and its gradients where they can be made already."""
    hidden, weight, bias, target, class_weight = operands
    options, backend = settings.options, settings.backend
    early = any(wanted) and reduction != "none" and settings.compute_dtype is not torch.float16
    with _no_autocast(hidden):
        w = weight.to(settings.compute_dtype)
        b = None if bias is None else bias.to(settings.compute_dtype)
        like = hidden.new_empty((), dtype=settings.compute_dtype).expand(hidden.shape[0], weight.shape[0])  # no memory
        divisors = _ops.prepare(like, target, class_weight, divisor, reduction, options, backend)
        loss, maximum, total = row_outputs(like)
        gradients = _allocate(operands, wanted) if early else None
        for rows in _chunks(operands, settings):
            h = hidden[rows].to(settings.compute_dtype)
            logits = torch.nn.functional.linear(h, w, b)
            kernel = _ops.implementation(backend, logits)
            if gradients is None:
                results = kernel.row_losses(logits, target[rows], class_weight, options)
            else:
                grad = _memory_for_gradient(logits)
                results = kernel.fused(grad, logits, target[rows], class_weight, divisors, options)
                _accumulate(gradients, grad, h, w, rows)
                del grad
            loss[rows], maximum[rows], total[rows] = results
            del logits  # before the next chunk is made
        loss = _ops.reduce(loss, maximum, total, divisors, reduction, options)
        return Forward(loss, maximum, total, divisors, None if gradients is None else _finish(gradients, bias))


def backward(
    operands: Operands,
    maximum: Tensor,
    total: Tensor,
    divisors: Tensor,
    grad_loss: Tensor,
    settings: Settings,
    wanted: Wanted,
) -> Gradients:
    """The gradients for an incoming one, () or (N,): logits are computed again, the incoming gradient precedes rounding."""
    hidden, weight, bias, target, class_weight = operands
    grad_rows = grad_loss.expand(hidden.shape[0])
    with _no_autocast(hidden):
        w = weight.to(settings.compute_dtype)
        b = None if bias is None else bias.to(settings.compute_dtype)
        gradients = _allocate(operands, wanted)
        for rows in _chunks(operands, settings):
            h = hidden[rows].to(settings.compute_dtype)
            logits = torch.nn.functional.linear(h, w, b)
            kernel = _ops.implementation(settings.backend, logits)
            grad = _memory_for_gradient(logits)
            kernel.write_gradient(
                grad,
                grad_rows[rows],
                logits,
                target[rows],
                class_weight,
                maximum[rows],
                total[rows],
                divisors,
                settings.options,
            )
            _accumulate(gradients, grad, h, w, rows)
            del logits, grad  # before the next chunk is made
        return _finish(gradients, bias)


def _memory_for_gradient(logits: Tensor) -> Tensor:
    """That of the chunk itself; not where a dispatch mode may keep what operators return (selective checkpointing does)."""
    return torch.empty_like(logits) if torch._C._len_torch_dispatch_stack() > 0 else logits


def _allocate(operands: Operands, wanted: Wanted) -> Gradients:
    """Gradients to be written. That of the bias, a sum over all rows, is summed in FP32."""
    hidden, weight, bias, *_ = operands
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None,
        (torch.empty_like if hidden.shape[0] else torch.zeros_like)(weight) if wanted[1] else None,
        torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
        if bias is not None and wanted[2]
        else None,
    )


def _finish(gradients: Gradients, bias: Tensor | None) -> Gradients:
    grad_hidden, grad_weight, grad_bias = gradients
    return grad_hidden, grad_weight, None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)


def _accumulate(gradients: Gradients, grad_logits: Tensor, h: Tensor, w: Tensor, rows: slice) -> None:
    grad_hidden, grad_weight, grad_bias = gradients
    if grad_hidden is not None:
        _product(grad_logits, w, grad_hidden[rows], add=False)
    if grad_weight is not None:
        _product(grad_logits.t(), h, grad_weight, add=rows.start > 0)
    if grad_bias is not None:
        grad_bias += grad_logits.sum(0, dtype=grad_bias.dtype)


def _product(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """`out = a @ b`, or `out += a @ b`, rounded to the dtype of `out` once."""
    if out.dtype is a.dtype:
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif add:
        out += torch.mm(a, b)
    else:
        out.copy_(torch.mm(a, b))


def rows_in_chunks(
    count: int, columns: int, dtype: torch.dtype, device: torch.device, chunk_bytes: int | None = None
) -> Iterator[slice]:
    """`count` rows of logits in as few chunks as the budget allows, of about equal size."""
    default = CHUNK_BYTES_ON_CPU if device.type == "cpu" else CHUNK_BYTES
    budget = chunk_bytes or int(os.environ.get("LIGER_COMPAT_CHUNK_BYTES", default))
    most = max(1, budget // (columns * dtype.itemsize))
    number = -(-count // most)
    step = -(-count // number) if number else 1
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _chunks(operands: Operands, settings: Settings) -> Iterator[slice]:
    hidden, weight = operands.hidden, operands.weight
    return rows_in_chunks(hidden.shape[0], weight.shape[0], settings.compute_dtype, hidden.device, settings.chunk_bytes)


def _no_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
