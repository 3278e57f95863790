"""Cross-entropy over given logits, without an FP32 copy of them and without keeping the softmax."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _ops, reference
from ._autograd import CrossEntropy
from ._options import Options, accumulator_dtype
from ._validation import require_plain, validate

__all__ = ["cross_entropy"]


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
) -> Tensor:
    """Cross-entropy of `logits` against class indices, a drop-in for `torch.nn.functional.cross_entropy`.

    Scores are computed and summed in FP32 (FP64 for FP64 logits). The gradient is made with the loss, rounded once, and
    multiplied by the incoming gradient in backward, where one other than a power of 2 rounds 16-bit gradients once more; for
    FP16 and reduction "none" it is made in backward, and rounded once.
    Nothing waits for the device. All options combine.

    Args:
        logits: (V,), (N, V) or (N, V, d1, ...), floating point, any strides. Only read, unless `overwrite`.
        target: the shape of `logits` without V; integers, each in [0, V) or `ignore_index`.
        weight: (V,), a factor for the loss of each class; no gradient flows to it.
        ignore_index: targets of this value add nothing to the loss, and get a gradient of exactly 0.
        reduction: "mean" over the targets that count (weighted, with `weight`), "sum" or "none".
        label_smoothing: the share, in [0, 1], of the target's probability that is spread evenly over all classes.
        softcap: scores are `softcap * tanh(logits / softcap)`; after `logit_scale`. None for none.
        logit_scale: factor on the logits.
        z_loss: adds this times the squared log-sum-exp, averaged (or summed) over the targets that count, without `weight`.
        num_items_in_batch: divisor of the mean in the place of the number of targets that count; one number, for
            gradient accumulation. A tensor is read on the device.
        loss_dtype: dtype of the returned loss. None for what PyTorch's function returns: the dtype of the logits, and FP32
            for 16-bit logits under autocast.
        overwrite: lets the gradient take the memory of `logits`, which are then unreadable. Ignored where no gradient is
            needed, and where something traces or a dispatch mode is on.
        backend: "triton", "reference", or None for Triton where it runs. LIGER_COMPAT_BACKEND sets the default.

    Returns:
        A scalar, or the shape of `target` for reduction "none". NaN for a mean when every target is ignored.

    Raises:
        TypeError: for a target of class probabilities, or tensors that are not plain (DTensor, quantised, sparse).
        ValueError: for shapes that do not fit, unknown options, or logits that cannot be overwritten.
        IndexError: for a target out of range, on a CPU. Elsewhere the device asserts, without a stall.
        RuntimeError: if the backend asked for cannot run here.

    Sources: one-pass log-sum-exp, Milakov and Gimelshein, arXiv:1805.02867; label smoothing, Szegedy et al.,
    arXiv:1512.00567; soft-capped logits, Gemma 2, arXiv:2408.00118; z-loss, PaLM, arXiv:2204.02311, section 5.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    >>> cross_entropy(logits, torch.tensor([0, -100]))
    tensor(0.2395)
    """
    require_plain(logits=logits, target=target)
    call = make_call(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
        num_items_in_batch=num_items_in_batch,
    )
    matrix = logits.movedim(1, -1) if logits.dim() > 2 else logits
    matrix = matrix.reshape(-1, matrix.shape[-1])
    wanted = matrix.requires_grad and torch.is_grad_enabled()
    if transforms_are_active():
        loss = reference.composite(matrix, *call)
    elif is_traced(matrix):
        loss, *_ = _ops.cross_entropy(matrix, *call[:-1], wanted, *call.options, backend)
    elif wanted:
        if overwrite:
            _require_overwritable(logits, matrix)
        loss = CrossEntropy.apply(matrix, *call, backend, overwrite)  # type: ignore[no-untyped-call]
    else:
        loss, *_ = _ops.compute(matrix, *call, backend, wanted=False)
    return finish(loss, logits, target, reduction, loss_dtype)


def transforms_are_active() -> bool:
    """Whether torch.func or forward-mode AD looks on: a custom operator would have no rule for them."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_traced(logits: Tensor) -> bool:
    """Whether somebody records the operators that are called, or answers them with tensors that have no memory."""
    return torch.compiler.is_compiling() or type(logits) not in _PLAIN or torch._C._len_torch_dispatch_stack() > 0


_PLAIN = (Tensor, torch.nn.Parameter)


class Call(NamedTuple):
    """A call of the loss, in the form that the operators take it: see `_ops.cross_entropy`."""

    target: Tensor
    weight: Tensor | None
    divisor: Tensor | None
    reduction: str
    options: Options


def make_call(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float,
    z_loss: float,
    num_items_in_batch: Tensor | float | None,
) -> Call:
    """Checks the arguments of `cross_entropy` and brings them into one form; of `logits` only shape, dtype and device count."""
    validate(logits, target, weight, reduction, label_smoothing, softcap, num_items_in_batch)
    acc = accumulator_dtype(logits)
    return Call(
        target.reshape(-1).to(torch.int64),
        None if weight is None else weight.detach().to(acc),
        divisor_of(num_items_in_batch, acc, logits.device),
        reduction,
        Options(ignore_index, float(label_smoothing), float(softcap or 0.0), float(logit_scale), float(z_loss)),
    )


def finish(loss: Tensor, logits: Tensor, target: Tensor, reduction: str, loss_dtype: torch.dtype | None) -> Tensor:
    """The loss of rows in the shape and dtype that the caller of `cross_entropy` gets."""
    if reduction == "none":
        loss = loss.reshape(target.shape)
    return loss.to(loss_dtype or _loss_dtype(logits))


def divisor_of(num_items: Tensor | float | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """`num_items_in_batch` as a tensor of shape () on `device`, without waiting for it."""
    if num_items is None:
        return None
    if isinstance(num_items, Tensor):
        return num_items.detach().reshape(()).to(device, dtype, non_blocking=True)
    return torch.full((), num_items, dtype=dtype, device=device)  # a fill, where a copy from the host would wait


def _loss_dtype(logits: Tensor) -> torch.dtype:
    """PyTorch's cross-entropy is on autocast's FP32 list, and otherwise returns the dtype of its input."""
    if logits.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(logits.device.type):
        return torch.float32
    return logits.dtype


def _require_overwritable(logits: Tensor, matrix: Tensor) -> None:
    problem = overwrite_problem(logits)
    if problem is None and matrix.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
        problem = f"no view of shape {tuple(logits.shape)} and strides {logits.stride()} is (N, V)"
    if problem is not None:
        msg = f"expected logits that can be overwritten, but {problem}"
        raise ValueError(msg)


def overwrite_problem(logits: Tensor) -> str | None:
    """Why `logits` cannot be overwritten by their gradient, or None when they can."""
    if logits.is_leaf or (logits._base is not None and logits._base.is_leaf):
        return "they are a leaf of the graph, whose values belong to the caller"
    shape = [size for size, stride in zip(logits.shape, logits.stride(), strict=True) if stride == 0 and size > 1]
    if shape:
        return f"they share memory with themselves (strides {logits.stride()})"
    return None
