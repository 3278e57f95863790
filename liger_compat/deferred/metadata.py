"""What can be asked of logits that are not computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def needs_no_values(func: Callable[..., Any], name: str) -> bool:
    """Whether a call on a tensor, by its function and its name, is about shape, dtype or history only."""
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _DATA_ATTRIBUTES
    return func in _WITHOUT_VALUES


def is_about_gradients(func: Callable[..., Any]) -> bool:
    """Whether such a call looks at, asks for or waits for the gradient of a tensor."""
    return func in _ABOUT_GRADIENTS


_ABOUT_GRADIENTS = {
    torch.autograd.grad,
    torch.autograd.backward,
    Tensor.backward,
    Tensor.register_hook,
    Tensor.retain_grad,
    *(vars(Tensor.__base__)[name].__get__ for name in ("grad", "retains_grad", "grad_fn")),
}
_DATA_ATTRIBUTES = {"names", "data", "real", "imag", "T", "mT", "H", "mH"}
_WITHOUT_VALUES = {torch.autograd.grad, torch.autograd.backward, torch.is_floating_point, torch.is_complex, torch.numel} | {
    getattr(Tensor, name)
    for name in (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device", "__len__",
        "is_floating_point", "is_complex", "is_contiguous", "is_inference", "is_signed", "is_conj", "is_neg", "has_names",
        "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward", "__hash__",
        "is_same_size", "dim_order",
    )
    if hasattr(Tensor, name)
}  # fmt: skip
