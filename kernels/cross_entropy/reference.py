"""The cross-entropy loss in plain PyTorch: the oracle of the Triton kernels, and the default where they do not run.

It works on a few rows at a time and therefore never holds an FP32 copy of all logits. `_launch.py` has the same functions.
Tensors: `logits` (N, V), `target` (N,) int64, `weight` (V,) in the accumulator's dtype or None. No function here records
autograd history; `_autograd.py` does that around them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ._options import Options, accumulator_dtype, row_outputs

CHUNK_BYTES = 1 << 22
"""Size of the FP32 copy of logits that is held at a time; small enough for the caches of a CPU."""


def count_targets(target: Tensor, weight: Tensor | None, columns: int, options: Options) -> tuple[Tensor, Tensor]:
    """What the mean of the loss and of the z-loss divide by, shape (2,), and whether every target is in range, shape ()."""
    counts = target != options.ignore_index
    known = (target >= 0) & (target < columns)
    number = counts.sum().to(torch.float32 if weight is None else weight.dtype)
    mass = number if weight is None else torch.where(counts, weight[target.clamp(0, columns - 1)], 0).sum()
    return torch.stack((mass, number)), (known | ~counts).all()


def row_losses(logits: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the loss, the maximum and the sum of the softmax; 0, 0 and 1 where the target is ignored. All (N,)."""
    loss, maximum, total = row_outputs(logits)
    for rows in _chunks(logits):
        scores = _scores(logits[rows], options)
        loss[rows], maximum[rows], total[rows] = _chunk_losses(scores, target[rows], weight, options)
    return loss, maximum, total


def write_gradient(
    grad: Tensor,
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    maximum: Tensor,
    total: Tensor,
    divisors: Tensor,
    options: Options,
) -> None:
    """Writes the gradient of the logits to `grad` (N, V); `grad_loss` is () or (N,), applied before rounding."""
    factors = grad_loss.to(total.dtype).expand(logits.shape[0]).unsqueeze(1) / divisors
    for rows in _chunks(logits):
        scores = _scores(logits[rows], options)
        grad[rows] = _chunk_gradient(scores, target[rows], weight, maximum[rows], total[rows], factors[rows], options)


def fused(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, divisors: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """`row_losses`, and to `grad`, which may be `logits`, the gradient for an incoming gradient of 1."""
    loss, maximum, total = row_outputs(logits)
    factors = (1 / divisors).expand(logits.shape[0], 2)
    for rows in _chunks(logits):
        scores = _scores(logits[rows], options)
        loss[rows], maximum[rows], total[rows] = _chunk_losses(scores, target[rows], weight, options)
        grad[rows] = _chunk_gradient(scores, target[rows], weight, maximum[rows], total[rows], factors[rows], options)
    return loss, maximum, total


def rescale(grad: Tensor, grad_loss: Tensor) -> None:
    """Multiplies a gradient (N, V) by the incoming one, () or (N,), in place. Zeros stay, of ignored rows, also by inf."""
    if grad_loss.device.type == "cpu" and (grad_loss == 1).all():
        return  # as the kernel finds out on the device
    grad_loss = grad_loss.expand(grad.shape[0]).unsqueeze(1)
    for rows in _chunks(grad):
        part = grad[rows].to(accumulator_dtype(grad))
        grad[rows] = torch.where(part == 0, 0, part * grad_loss[rows])


def composite(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    reduction: str,
    options: Options,
) -> Tensor:
    """The whole loss out of differentiable operations, for `torch.func` transforms; holds FP32 copies of all logits."""
    counts = target != options.ignore_index
    loss, maximum, total = _chunk_losses(_scores(logits, options), target, weight, options)
    z_loss = options.z_loss * (maximum + total.log()).square()
    if reduction == "none":
        return loss + z_loss
    if reduction == "mean" and divisor is None:
        mass = counts.sum() if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0).sum()
        return loss.sum() / mass + z_loss.sum() / counts.sum()
    total = loss.sum() + z_loss.sum()
    return total if divisor is None else total / divisor


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))


def _scores(logits: Tensor, options: Options) -> Tensor:
    """The scores that enter the softmax. May be `logits` itself: never written to."""
    scores = logits.to(accumulator_dtype(logits))
    if options.logit_scale != 1.0:
        scores = scores * options.logit_scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores


def _chunk_losses(scores: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    counts = target != options.ignore_index
    target = torch.where(counts, target, 0).unsqueeze(1)
    maximum = scores.amax(1, keepdim=True)
    below = scores - maximum
    # Not lse - score: where both are large and close, their difference has lost its digits.
    at_target = below.gather(1, target).squeeze(1)
    total = below.exp().sum(1)
    maximum = maximum.squeeze(1)
    loss = total.log() - at_target
    if weight is not None:
        loss = loss * weight[target.squeeze(1)]
    if options.label_smoothing:
        if weight is None:
            smooth = scores.shape[1] * (maximum + total.log()) - scores.sum(1)
        else:
            smooth = weight.sum() * (maximum + total.log()) - (scores * weight).sum(1)
        loss = (1 - options.label_smoothing) * loss + options.label_smoothing / scores.shape[1] * smooth
    return torch.where(counts, loss, 0), torch.where(counts, maximum, 0), torch.where(counts, total, 1)


def _chunk_gradient(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    maximum: Tensor,
    total: Tensor,
    factors: Tensor,
    options: Options,
) -> Tensor:
    """Gradient of the logits; `factors` (n, 2) multiplies the loss and the z-loss of each row."""
    columns = scores.shape[1]
    counts = (target != options.ignore_index).unsqueeze(1)
    target = torch.where(counts, target.unsqueeze(1), 0)
    on_target = factors[:, :1]
    if weight is not None:
        on_target = on_target * weight[target]
    on_target = (1 - options.label_smoothing) * on_target
    on_all = options.label_smoothing / columns * factors[:, :1]
    mass = columns if weight is None else weight.sum()
    maximum, total = maximum.unsqueeze(1), total.unsqueeze(1)
    on_probability = on_target + on_all * mass
    if options.z_loss:
        on_probability = on_probability + 2 * options.z_loss * factors[:, 1:] * (maximum + total.log())

    grad = (scores - maximum).exp_().mul_(on_probability / total)
    if options.label_smoothing:
        grad -= on_all if weight is None else on_all * weight
    grad.scatter_add_(1, target, -on_target)
    if options.softcap:
        grad *= 1 - (scores / options.softcap).square()
    if options.logit_scale != 1.0:
        grad *= options.logit_scale
    return grad.masked_fill_(~counts, 0)
