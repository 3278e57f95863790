"""What a call must look like; every message says what was expected and what was found."""

import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")


def validate(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    num_items_in_batch: Tensor | float | None,
) -> None:
    """Raises TypeError or ValueError for a call that `cross_entropy` cannot serve; reads no tensor's values."""
    if not logits.is_floating_point():
        msg = f"expected logits of a floating-point dtype, found {logits.dtype}"
        raise TypeError(msg)
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        msg = f"expected target to hold class indices of an integer dtype, found {target.dtype} (no probabilities)"
        raise TypeError(msg)
    if logits.dim() == 0:
        msg = "expected logits of shape (V,), (N, V) or (N, V, d1, ...), found a scalar"
        raise ValueError(msg)
    class_dim = 0 if logits.dim() == 1 else 1
    expected = logits.shape[:class_dim] + logits.shape[class_dim + 1 :]
    if target.shape != expected:
        msg = (
            f"expected target of shape {tuple(expected)}, that of logits {tuple(logits.shape)} without its "
            f"{logits.shape[class_dim]} classes, found {tuple(target.shape)}"
        )
        raise ValueError(msg)
    if logits.shape[class_dim] == 0:
        msg = f"expected at least one class, found logits of shape {tuple(logits.shape)}"
        raise ValueError(msg)
    if logits.device != target.device:
        msg = f"expected logits and target on one device, found {logits.device} and {target.device}"
        raise ValueError(msg)
    validate_options(logits.shape[class_dim], weight, reduction, label_smoothing, softcap, num_items_in_batch)


def require_plain(**tensors: Tensor) -> None:
    """Raises TypeError for what is no tensor, or none that kernels can read."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            msg = f"expected {name} to be a torch.Tensor, found {type(tensor).__name__}"
            raise TypeError(msg)
        if not plain(tensor):
            msg = f"expected {name} to be a plain, dense, local tensor, found {_kind(tensor)}"
            raise TypeError(msg)


def plain(tensor: Tensor) -> bool:
    """Whether kernels may read the tensor's memory as it stands: strided, not quantised, no subclass of its own."""
    return (
        (type(tensor) in (Tensor, torch.nn.Parameter) or _is_fake(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def _kind(tensor: Tensor) -> str:
    if tensor.is_quantized or tensor.layout is not torch.strided:
        return f"{tensor.layout} {tensor.dtype}"
    return type(tensor).__name__


def validate_options(
    columns: int,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    num_items_in_batch: Tensor | float | None,
) -> None:
    """The part of `validate` that does not depend on where the logits come from; `weight` is that of the classes."""
    if weight is not None and weight.shape != (columns,):
        msg = f"expected weight of shape ({columns},), one factor a class, found {tuple(weight.shape)}"
        raise ValueError(msg)
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        msg = "expected weight to need no gradient: the loss gives it none"
        raise ValueError(msg)
    if reduction not in REDUCTIONS:
        msg = f"expected reduction to be one of {', '.join(map(repr, REDUCTIONS))}, found {reduction!r}"
        raise ValueError(msg)
    if not 0.0 <= label_smoothing <= 1.0:
        msg = f"expected label_smoothing in [0, 1], found {label_smoothing}"
        raise ValueError(msg)
    if softcap is not None and not softcap > 0.0:
        msg = f"expected softcap to be positive, or None for none, found {softcap}"
        raise ValueError(msg)
    if num_items_in_batch is not None:
        if reduction != "mean":
            msg = f'num_items_in_batch divides a mean: expected reduction "mean", found {reduction!r}'
            raise ValueError(msg)
        if isinstance(num_items_in_batch, Tensor) and num_items_in_batch.numel() != 1:
            msg = f"expected num_items_in_batch to be one number, found shape {tuple(num_items_in_batch.shape)}"
            raise ValueError(msg)
