"""Launchers of the Triton kernels: grids, strides, allocation. The same functions as in `reference.py`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import _kernels
from ._options import Options, accumulator_dtype, row_outputs
from ._tuning import COUNT_BLOCK, launch_for

_INT32_MAX = 2**31 - 1


def count_targets(target: Tensor, weight: Tensor | None, columns: int, options: Options) -> tuple[Tensor, Tensor]:
    """See `reference.count_targets`."""
    acc = torch.float32 if weight is None else weight.dtype
    divisors = torch.empty(2, dtype=acc, device=target.device)
    valid = torch.empty((), dtype=torch.int32, device=target.device)
    with _on_device_of(target):
        _kernels._ce_count_kernel[(1,)](
            target, target.stride(0), weight, divisors, valid, target.numel(), columns, options.ignore_index,
            HAS_WEIGHT=weight is not None, ACC=_triton_dtype(acc), BLOCK=COUNT_BLOCK,
        )  # fmt: skip
    return divisors, valid


def row_losses(logits: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.row_losses`."""
    outputs = row_outputs(logits)
    with _on_device_of(logits):
        _kernels._ce_forward_kernel[(logits.shape[0],)](
            logits, *logits.stride(), target, target.stride(0), weight, _weight_sum(weight), *outputs,
            logits.shape[1], options.ignore_index, **_constants(logits, logits, weight, options),
        )  # fmt: skip
    return outputs


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
    """See `reference.write_gradient`."""
    with _on_device_of(logits):
        _kernels._ce_backward_kernel[(logits.shape[0],)](
            grad, *grad.stride(), grad_loss, _stride_or_zero(grad_loss), logits, *logits.stride(), target,
            target.stride(0), weight, _weight_sum(weight), maximum, total, divisors, logits.shape[1], options.ignore_index,
            Z_LOSS=options.z_loss, **_constants(logits, grad, weight, options),
        )  # fmt: skip


def fused(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, divisors: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.fused`."""
    outputs = row_outputs(logits)
    with _on_device_of(logits):
        _kernels._ce_fused_kernel[(logits.shape[0],)](
            grad, *grad.stride(), logits, *logits.stride(), target, target.stride(0), weight, _weight_sum(weight), divisors,
            *outputs, logits.shape[1], options.ignore_index, Z_LOSS=options.z_loss, **_constants(logits, grad, weight, options),
        )  # fmt: skip
    return outputs


def rescale(grad: Tensor, grad_loss: Tensor) -> None:
    """See `reference.rescale`."""
    launch = launch_for(grad.shape[1])
    with _on_device_of(grad):
        _kernels._ce_rescale_kernel[(grad.shape[0],)](
            grad, *grad.stride(), grad_loss, _stride_or_zero(grad_loss), grad.shape[1],
            WIDE=_is_wide(grad), ACC=_triton_dtype(accumulator_dtype(grad)),
            BLOCK=launch.block, LANES=launch.lanes, num_warps=launch.warps,
        )  # fmt: skip


def _constants(logits: Tensor, grad: Tensor, weight: Tensor | None, options: Options) -> dict[str, Any]:
    launch = launch_for(logits.shape[1])
    return {
        "LABEL_SMOOTHING": options.label_smoothing,
        "LOGIT_SCALE": options.logit_scale,
        "SOFTCAP": options.softcap,
        "HAS_WEIGHT": weight is not None,
        "WIDE": _is_wide(logits) or _is_wide(grad),
        "ACC": _triton_dtype(accumulator_dtype(logits)),
        "BLOCK": launch.block,
        "LANES": launch.lanes,
        "num_warps": launch.warps,
    }


def _weight_sum(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.sum()


def _stride_or_zero(grad_loss: Tensor) -> int:
    return grad_loss.stride(0) if grad_loss.dim() else 0


def _is_wide(matrix: Tensor) -> bool:
    """Whether columns are apart, so that their offsets need a multiplication and may pass 2**31."""
    return matrix.stride(1) != 1 or matrix.shape[1] > _INT32_MAX


def _triton_dtype(dtype: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]


def _on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if tensor.device.type == "cpu":  # TRITON_INTERPRET=1
        return nullcontext()
    return getattr(torch, tensor.device.type).device(tensor.device)  # type: ignore[no-any-return]
