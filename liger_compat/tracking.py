"""Logits that are watched from the output head to the loss, and logits whose memory the loss has taken.

`TrackedLogits` is a `torch.Tensor` in all but its class, which is assigned and taken back: nothing is copied, and no
autograd node is added. Its `__torch_function__` answers `torch.nn.functional.cross_entropy`, where `nn.CrossEntropyLoss`
and transformers' losses end too, so the loss of one model is reached without touching `torch` or the model's class.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import OverwrittenLogitsError

Answer = Callable[..., Tensor]
"""Computes `torch.nn.functional.cross_entropy`, called with its arguments."""


class Family:
    """The tensors that descend from one call of the output head, held weakly: a stored loss keeps no logits alive."""

    def __init__(self, answer: Answer, *, overwrites: bool) -> None:
        self.answer = answer
        self.overwrites = overwrites
        self.escaped_by: str | None = None
        """What let the memory out to where it cannot be followed, if anything did."""
        self._members: list[weakref.ref[Tensor]] = []

    def adopt(self, tensor: Tensor) -> None:
        """Watches `tensor`, a plain one, from now on."""
        tracked: Any = tensor
        tracked.__class__ = TrackedLogits
        tracked._liger_compat_family = self
        self._members.append(weakref.ref(tensor))

    def release(self) -> None:
        """Makes every watched tensor a plain `torch.Tensor` again."""
        for tensor in self._drain():
            tensor.__class__ = Tensor

    def give_away(self, storage: int) -> None:
        """Makes every watched tensor with its data at `storage` unreadable, and the others plain again."""
        for tensor in self._drain():
            tensor.__class__ = Tensor
            if tensor.untyped_storage().data_ptr() == storage:
                # NaN in place of the data: where C++ code passes by the class, it finds no gradient either.
                tensor.data = _nan(tensor.shape, tensor.dtype, tensor.device)
                tensor.__class__ = OverwrittenLogits

    def sharing_problem(self, logits: Tensor) -> str | None:
        """Why others than the watched tensors would see the memory of `logits`, a view of one of them, or None."""
        if self.escaped_by is not None:
            return f"{self.escaped_by} let their memory out"
        storage = logits.untyped_storage()
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [tensor for member in self._members if (tensor := member()) is not None] + [logits]
            tensors += [base for tensor in tensors if (base := tensor._base) is not None]
            sharing = {id(tensor) for tensor in tensors if tensor.untyped_storage().data_ptr() == storage.data_ptr()}
        if torch._C._storage_Use_Count(storage._cdata) > len(sharing) + 1:  # and `storage`
            return "a hook, a cache or an autograd node shares their memory"
        return None

    def _drain(self) -> Iterator[Tensor]:
        members, self._members = self._members, []
        for member in members:
            tensor = member()
            if type(tensor) is TrackedLogits:
                del tensor._liger_compat_family
                yield tensor


def family_of(tensor: Any) -> Family | None:
    """The family that a tensor is watched by, or None."""
    return tensor._liger_compat_family if type(tensor) is TrackedLogits else None


class TrackedLogits(Tensor):
    """Logits on their way from the output head to the loss."""

    _liger_compat_family: Family

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            family = family_of(args[0] if args else kwargs.get("input"))
            if family is not None:
                return family.answer(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        family = next((found for value in (*args, *kwargs.values()) if (found := family_of(value)) is not None), None)
        if family is not None:
            if getattr(func, "__name__", "") in _ESCAPES:
                family.escaped_by = func.__name__
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if type(tensor) is not Tensor:
                    continue
                if func in _FOLLOWED or (family.overwrites and _is_alias(tensor, args)):
                    family.adopt(tensor)
                elif tensor.requires_grad:  # its node may have saved the logits, which no count of the storage shows
                    family.escaped_by = getattr(func, "__name__", str(func))
        return result

    # Copies and files hold plain tensors, never this class.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_alias(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return plain_alias(self).__deepcopy__(memo)


class OverwrittenLogits(Tensor):
    """What is left of logits whose memory holds their gradient: shape, dtype and history, and NaN for values."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            allowed = attribute not in _DATA_ATTRIBUTES
        else:
            allowed = name in _WITHOUT_DATA
        if allowed or name in _CASTS:
            with torch._C.DisableTorchFunctionSubclass():
                if allowed:
                    return func(*args, **kwargs)
                # Casts and clones by wrappers (accelerate, FSDP, DDP do it to the outputs of every step) are not a read.
                value = func(args[0].new_full((), float("nan")), *args[1:], **kwargs)
                return _overwritten(args[0].shape, value.dtype, value.device)
        if name in _RESHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return _overwritten(func(args[0], *args[1:], **kwargs).shape, args[0].dtype, args[0].device)
        msg = (
            f"these logits ({tuple(args[0].shape) if args and isinstance(args[0], Tensor) else 'overwritten'}) were read by "
            f"{name}, but their memory was given to their gradient when the loss was computed (liger_compat, "
            'logits="overwrite"). Read them before the loss, leave out the labels, or use patch(model, logits="keep").'
        )
        raise OverwrittenLogitsError(msg)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"OverwrittenLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


def plain_alias(tensor: Tensor) -> Tensor:
    """The same values and history as a tensor of no class of ours."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.view_as(tensor)


def _nan(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(*shape)


def _overwritten(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = _nan(shape, dtype, device)
    tensor.__class__ = OverwrittenLogits
    return tensor


def _is_alias(tensor: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a result shares memory with the tensor it was made from."""
    if not args or not isinstance(args[0], Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr() != 0


# What models do to logits between the head and the loss, and libraries to outputs: casts, scale, softcap, bias, rows.
_FOLLOWED = {
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "float", "to", "type", "type_as", "half", "bfloat16", "double",
        "mul", "multiply", "div", "divide", "true_divide", "tanh", "add", "sub", "subtract",
        "__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__",
        "view", "view_as", "reshape", "flatten", "contiguous", "clone", "squeeze", "unsqueeze", "transpose", "permute",
        "movedim", "__getitem__", "narrow", "select", "split", "chunk", "unbind", "index_select",
    )
    if hasattr(owner, name)
}  # fmt: skip

# What hands out the memory itself, or a pointer to it.
_ESCAPES = {
    "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "set_", "share_memory_",
    "resize_",
}  # fmt: skip

_DATA_ATTRIBUTES = {"data", "real", "imag", "T", "mT", "H", "mH"}
_CASTS = {"clone", "float", "half", "bfloat16", "double", "to", "cpu", "cuda", "type", "type_as", "detach", "contiguous"}
_RESHAPES = {"view", "view_as", "reshape"}
_WITHOUT_DATA = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device", "__len__",
    "is_floating_point", "is_complex", "is_contiguous", "is_same_size", "is_pinned", "is_shared", "has_names",
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "grad", "backward",
    "__hash__", "__dir__", "__set__", "__delete__",
}  # fmt: skip
