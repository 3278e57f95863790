"""Cross-entropy of the output of a linear layer, without ever holding all of its logits."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cross_entropy import divisor_of, reference, transforms_are_active
from ..cross_entropy._options import Options, accumulator_dtype
from . import _ops
from ._validation import validate

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items_in_batch: Tensor | float | None = None,
    chunk_bytes: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` with a part of the logits in memory at a time.

    Gradients are made in the forward pass where they are needed, and multiplied by the incoming gradient in backward; for
    FP16, which needs the loss scale first, and reduction "none", they are made in backward. Softmax and loss are computed in
    FP32. Under autocast the products are computed in its dtype, as `torch.nn.functional.linear` would.

    Args:
        hidden: (..., H), floating point.
        weight: (V, H), of an output head.
        target: (...,), integers, each in [0, V) or `ignore_index`.
        bias: (V,).
        class_weight: (V,), as `weight` of `cross_entropy`.
        ignore_index: as in `cross_entropy`, like all that follow but the last two.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].
        softcap: of the logits, after `logit_scale`; None for none.
        logit_scale: factor on the logits.
        z_loss: factor on the squared log-sum-exp.
        num_items_in_batch: divisor of the mean.
        backend: "triton", "reference", or None for Triton where it runs.
        chunk_bytes: memory for logits, in bytes. None for LIGER_COMPAT_CHUNK_BYTES, else 512 MiB (32 MiB on a CPU). Less
            memory means more chunks, each of which reads and writes the weight's gradient.

    Returns:
        The loss in FP32 (FP64 for FP64 operands): a scalar, or the shape of `target` for reduction "none".

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `cross_entropy`.

    Sources: chunking of the rows and gradients in the forward pass follow the idea of Liger-Kernel's fused linear
    cross-entropy, arXiv:2410.10989.

    >>> hidden, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    >>> linear_cross_entropy(hidden, weight, torch.tensor([0, -100]))
    tensor(0.2395)
    """
    validate(hidden, weight, target, bias, class_weight, reduction, label_smoothing, softcap, num_items_in_batch, chunk_bytes)
    options = Options(ignore_index, float(label_smoothing), float(softcap or 0.0), float(logit_scale), float(z_loss))
    acc = accumulator_dtype(hidden)
    matrix = hidden.reshape(-1, hidden.shape[-1])
    rows = target.reshape(-1).to(torch.int64)
    class_weight = None if class_weight is None else class_weight.detach().to(acc)
    divisor = divisor_of(num_items_in_batch, acc, hidden.device)
    if transforms_are_active():
        loss = reference.composite(F.linear(matrix, weight, bias), rows, class_weight, divisor, reduction, options)
    else:
        wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (matrix, weight, bias)]
        operands = (matrix, weight, bias, rows, class_weight)
        settings = (*options, backend, compute_dtype(hidden), chunk_bytes)
        loss = _ops.linear_cross_entropy(*operands, divisor, reduction, wanted, *settings)[0]
    return loss.reshape(target.shape) if reduction == "none" else loss


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Dtype in which `torch.nn.functional.linear` would compute here: that of `hidden`, or autocast's."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype
