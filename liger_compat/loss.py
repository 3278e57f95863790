"""Losses with the signatures that transformers and PyTorch give them, computed by the kernel."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import kernels
from .deferred import DeferredLogits, can_fuse
from .deferred import cross_entropy as deferred_cross_entropy
from .kernels import ChunkSettings, is_plain
from .kernels.cross_entropy import finish, make_call
from .tracking import TrackedLogits, plain_alias


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items_in_batch: Tensor | float | None = None,
    loss_dtype: torch.dtype | None = None,
    overwrite: bool = False,
    backend: str | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """See below."""
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "z_loss": z_loss,
        "num_items_in_batch": num_items_in_batch,
    }
    if isinstance(logits, DeferredLogits):
        if logits.dim() <= 2 and can_fuse(logits, z_loss=z_loss) and softcap is None and logit_scale == 1.0:
            call = make_call(logits, target, weight, **options)
            settings = ChunkSettings(call.options, backend, logits.dtype, chunk_bytes)
            matrix: Any = logits.reshape(-1, logits.shape[-1])
            loss = deferred_cross_entropy(matrix, call.target, call.weight, call.divisor, call.reduction, settings)
            return finish(loss, logits, target, reduction, loss_dtype)
        logits = logits.lc_plain("cross_entropy")
    if isinstance(logits, TrackedLogits):
        logits = plain_alias(logits)
    return kernels.cross_entropy(logits, target, weight, loss_dtype=loss_dtype, overwrite=overwrite, backend=backend, **options)


cross_entropy.__doc__ = f"""{kernels.cross_entropy.__doc__}
    Deferred logits of a patched model are not computed for it; `chunk_bytes` is then as in `linear_cross_entropy`.
    """


def for_causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    overwrite: bool = False,
    backend: str | None = None,
    chunk_bytes: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Next-token loss, a drop-in for `transformers.loss.loss_utils.ForCausalLMLoss` that makes no FP32 copy of the logits.

    Args:
        logits: (..., T, V) in any floating-point dtype. Only read, unless `overwrite`.
        labels: (..., T), integers, `labels[t]` being the token at position t; they are shifted here. Any device.
        vocab_size: V, by which the logits are cut into rows. None for their last size.
        num_items_in_batch: the loss is the sum over labels divided by this; None for the mean over labels that count.
        ignore_index: labels of this value do not count.
        shift_labels: (..., T), labels shifted already; `labels` are then unused.
        overwrite: as in `liger_compat.cross_entropy`.
        backend: as in `liger_compat.cross_entropy`.
        chunk_bytes: as in `liger_compat.linear_cross_entropy`, for deferred logits.
        kwargs: accepted and ignored, as upstream does: models pass whatever their forward received.

    Returns:
        The loss in FP32: a scalar, or the shape of `num_items_in_batch` where that has one.

    Raises:
        ValueError: if the logits do not have one row of V for each label.
        IndexError: for a label out of range, as in `liger_compat.cross_entropy`.
    """
    del kwargs
    if shift_labels is None:
        if labels is None:
            msg = "expected labels or shift_labels, found neither"
            raise ValueError(msg)
        # The labels move, not the logits: the last position has no next token and is ignored.
        shift_labels = F.pad(labels.to(logits.device), (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    columns = logits.shape[-1] if vocab_size is None else vocab_size
    if logits.numel() != target.numel() * columns:
        msg = (
            f"expected one row of vocab_size={columns} logits for each of {target.numel()} labels, found logits of shape "
            f"{tuple(logits.shape)}"
        )
        raise ValueError(msg)
    if logits.dtype is torch.float64:
        logits = logits.float()  # as upstream does
    matrix = logits.reshape(-1, columns)
    # A count of several numbers or in FP64 divides after the sum, and gives the loss its shape and dtype, as upstream.
    scalar = not isinstance(num_items_in_batch, Tensor) or (
        num_items_in_batch.dim() == 0 and num_items_in_batch.dtype is not torch.float64
    )
    loss = cross_entropy(
        matrix,
        target,
        ignore_index=ignore_index,
        reduction="mean" if scalar else "sum",
        num_items_in_batch=num_items_in_batch if scalar else None,
        loss_dtype=torch.float32,
        overwrite=overwrite,
        backend=backend,
        chunk_bytes=chunk_bytes,
    )
    if isinstance(num_items_in_batch, Tensor) and not scalar:
        loss = loss / num_items_in_batch.to(loss.device)  # DataParallel hands out a row, and gets one back
    return loss


def torch_cross_entropy_problem(
    input: Tensor,  # noqa: A002  PyTorch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> str | None:
    """Why a call of `torch.nn.functional.cross_entropy` with these arguments is left to PyTorch, or None if it is not."""
    del ignore_index, reduction, label_smoothing
    if size_average is not None or reduce is not None:
        return "it uses the deprecated size_average or reduce"
    if not (is_plain(input) or isinstance(input, DeferredLogits | TrackedLogits)) or not is_plain(target):
        return f"it is on {type(input).__name__} and {type(target).__name__}, not plain tensors"
    if target.dtype is not torch.int64:
        return f"its target is {target.dtype}, not class indices in int64"
    if input.device != target.device:
        return "its tensors are on different devices"
    if weight is not None and weight.requires_grad:
        return "its class weights need a gradient"
    return None
