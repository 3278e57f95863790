"""What a call must look like; every message says what was expected and what was found."""

import torch
from torch import Tensor

from ..cross_entropy._validation import require_plain, validate_options


def validate(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    num_items_in_batch: Tensor | float | None,
    chunk_bytes: int | None,
) -> None:
    """Raises TypeError or ValueError for a call that `linear_cross_entropy` cannot serve; reads no tensor's values."""
    tensors = {"hidden": hidden, "weight": weight, "target": target} | ({} if bias is None else {"bias": bias})
    for name, tensor in tensors.items():
        require_plain(**{name: tensor})
        if tensor.is_floating_point() == (name == "target") or tensor.dtype is torch.bool:
            kind = "class indices of an integer dtype" if name == "target" else "a floating-point dtype"
            msg = f"expected {name} to have {kind}, found {tensor.dtype}"
            raise TypeError(msg)
        if tensor.device != hidden.device:
            msg = f"expected hidden and {name} on one device, found {hidden.device} and {tensor.device}"
            raise ValueError(msg)
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        msg = f"expected hidden (..., H) and weight (V, H), found {tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(msg)
    if target.shape != hidden.shape[:-1]:
        msg = f"expected target of shape {tuple(hidden.shape[:-1])}, one for each row of hidden, found {tuple(target.shape)}"
        raise ValueError(msg)
    if bias is not None and bias.shape != weight.shape[:1]:
        msg = f"expected bias of shape ({weight.shape[0]},), found {tuple(bias.shape)}"
        raise ValueError(msg)
    if weight.shape[0] == 0:
        msg = f"expected at least one class, found weight of shape {tuple(weight.shape)}"
        raise ValueError(msg)
    if chunk_bytes is not None and chunk_bytes <= 0:
        msg = f"expected chunk_bytes to be positive, or None for the default, found {chunk_bytes}"
        raise ValueError(msg)
    validate_options(weight.shape[0], class_weight, reduction, label_smoothing, softcap, num_items_in_batch)
