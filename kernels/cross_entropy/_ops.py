"""The loss as PyTorch operators: `liger_compat::cross_entropy` and its gradient, opaque to torch.compile, with fakes."""

from types import ModuleType

import torch
from torch import Tensor

from . import _backend, reference
from ._options import Options, accumulator_dtype

calls = 0
"""Losses computed by this process so far, under torch.compile and graph replay as far as Python runs."""

_OPTIONS = "int ignore_index, float label_smoothing, float softcap, float logit_scale, float z_loss, str? backend"


def compute(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    reduction: str,
    options: Options,
    backend: str | None,
    *,
    wanted: bool,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss (() or, unreduced, (N,)), maximum and sum of each row's softmax (N,), divisors (2,), gradient of the logits.

    All but the gradient in the accumulator's dtype. The gradient, for an incoming gradient of 1, is made here where it is
    `wanted`, so that what happens to the logits afterwards cannot change it; it is empty where it must wait for backward.
    With `overwrite` it takes the memory of the logits.

    `logits` (N, V) of any strides, `target` (N,) int64, `weight` (V,) and `divisor` () in the accumulator's dtype.
    """
    divisors = prepare(logits, target, weight, divisor, reduction, options, backend)
    kernel = implementation(backend, logits)
    early = makes_gradient_early(logits, wanted, reduction)
    grad = logits
    if not (early and overwrite):
        grad = torch.empty(logits.shape if early else 0, dtype=logits.dtype, device=logits.device)
    if early:
        loss, maximum, total = kernel.fused(grad, logits, target, weight, divisors, options)
    else:
        loss, maximum, total = kernel.row_losses(logits, target, weight, options)
    return reduce(loss, maximum, total, divisors, reduction, options), maximum, total, divisors, grad


@torch.library.custom_op(
    "liger_compat::cross_entropy",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor? weight, Tensor? divisor, str reduction, bool wanted, {_OPTIONS})"
    " -> (Tensor loss, Tensor maximum, Tensor total, Tensor divisors, Tensor grad)",
)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    reduction: str,
    wanted: bool,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    logit_scale: float,
    z_loss: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`compute`, opaque to whatever traces."""
    options = Options(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    return compute(logits, target, weight, divisor, reduction, options, backend, wanted=wanted)


@cross_entropy.register_fake
def _(
    logits: Tensor, target: Tensor, weight: Tensor | None, divisor: Tensor | None, reduction: str, wanted: bool, *_: object
) -> object:
    rows = logits.new_empty(logits.shape[0], dtype=accumulator_dtype(logits))
    loss = torch.empty_like(rows) if reduction == "none" else rows.new_empty(())
    grad = logits.new_empty(logits.shape if makes_gradient_early(logits, wanted, reduction) else 0)
    return loss, rows, torch.empty_like(rows), rows.new_empty(2), grad


def makes_gradient_early(logits: Tensor, wanted: bool, reduction: str) -> bool:
    """Whether the forward pass makes the gradient of `logits`.

    Not where the incoming gradient must come before rounding: FP16 needs its loss scale, unreduced losses have a factor each.
    """
    return wanted and reduction != "none" and logits.dtype is not torch.float16


@torch.library.custom_op("liger_compat::scaled", mutates_args=())
def scaled(grad: Tensor, grad_loss: Tensor) -> Tensor:
    """A gradient (..., V) times the incoming one, () or (N,), rounded once, in new memory."""
    factor = grad_loss.unsqueeze(1) if grad_loss.dim() else grad_loss
    return torch.where(grad == 0, 0, grad.to(accumulator_dtype(grad)) * factor).to(grad.dtype)


@scaled.register_fake
def _(grad: Tensor, grad_loss: Tensor) -> Tensor:
    return torch.empty_like(grad)


@torch.library.custom_op(
    "liger_compat::cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor grad_loss, Tensor logits, Tensor target, Tensor? weight, Tensor maximum, Tensor total, Tensor divisors,"
    f" {_OPTIONS}) -> Tensor",
)
def cross_entropy_backward(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    maximum: Tensor,
    total: Tensor,
    divisors: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    logit_scale: float,
    z_loss: float,
    backend: str | None,
) -> Tensor:
    """Gradient of the logits: (N, V), contiguous, in their dtype; `grad_loss` is () or (N,) of any stride."""
    options = Options(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    implementation(backend, logits).write_gradient(grad, grad_loss, logits, target, weight, maximum, total, divisors, options)
    return grad


@cross_entropy_backward.register_fake
def _(grad_loss: Tensor, logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


def row_statistics(
    logits: Tensor, *, softcap: float | None, logit_scale: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Maximum and sum of the softmax of each row of logits (N, V), capped and scaled; without history."""
    options = Options(-1, 0.0, softcap or 0.0, logit_scale, 0.0)
    target = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    _, maximum, total = implementation(backend, logits).row_losses(logits.detach(), target, None, options)
    return maximum, total


def gradient_of_logits(
    logits: Tensor,
    grad_loss: Tensor,
    target: Tensor,
    weight: Tensor | None,
    divisors: Tensor,
    options: Options,
    backend: str | None,
) -> Tensor:
    """The gradient of logits (N, V) whose loss was computed in another way; `divisors` are those of that loss."""
    _, maximum, total = implementation(backend, logits).row_losses(logits.detach(), target, weight, options)
    gradient: Tensor = cross_entropy_backward(grad_loss, logits, target, weight, maximum, total, divisors, *options, backend)
    return gradient


def implementation(backend: str | None, logits: Tensor) -> ModuleType:
    """The backend's module. Chosen here, inside the operator, so that torch.compile need not trace the choice."""
    module = _backend.load(backend, logits.device)
    return module if logits.shape[0] else reference  # no rows, no programs: Triton refuses an empty grid


def prepare(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    divisor: Tensor | None,
    reduction: str,
    options: Options,
    backend: str | None,
) -> Tensor:
    """Counts the call, checks the targets and returns what the loss and the z-loss are divided by, shape (2,).

    Raises:
        IndexError: on a CPU, if a target is neither in [0, V) nor ignored. On other devices looking would stall the host,
            so an assertion runs on the device and surfaces at the next synchronisation, as in PyTorch's own loss.
    """
    global calls  # noqa: PLW0603  # a count of the process
    calls += 1
    columns = logits.shape[1]
    divisors, valid = implementation(backend, logits).count_targets(target, weight, columns, options)
    if target.device.type != "cpu":
        torch._assert_async(valid, "liger_compat cross_entropy: a target is outside [0, V) and is not ignore_index")
    elif not valid:
        known = ((target >= 0) & (target < columns)) | (target == options.ignore_index)
        msg = (
            f"expected every target to be in [0, {columns}), the number of logits, or ignore_index="
            f"{options.ignore_index}, found {target[~known][0].item()}"
        )
        raise IndexError(msg)
    divisors = divisors.to(accumulator_dtype(logits))
    if divisor is not None:
        return divisor.repeat(2)
    return divisors if reduction == "mean" else torch.ones_like(divisors)


def reduce(loss: Tensor, maximum: Tensor, total: Tensor, divisors: Tensor, reduction: str, options: Options) -> Tensor:
    """Losses of rows -> the loss asked for. Ignored rows add nothing: their loss and log-sum-exp are 0."""
    if options.z_loss:
        z_loss = options.z_loss * (maximum + total.log()).square()
        if reduction == "none":
            return loss + z_loss
        return loss.sum() / divisors[0] + z_loss.sum() / divisors[1]
    return loss if reduction == "none" else loss.sum() / divisors[0]
