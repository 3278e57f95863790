"""Which calls of torch functions on logits are on the lazy list, and as what."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .pending import AddBias, Cast, Columns, LogSoftmax, Op, Rows, Scale, Tanh


def _both(*names: str) -> set[Any]:
    """Functions of those names of torch and methods of Tensor."""
    return {getattr(owner, name) for owner in (torch, Tensor) for name in names if hasattr(owner, name)}


_CASTS = {
    getattr(Tensor, name): dtype
    for name, dtype in {
        "float": torch.float32,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
        "double": torch.float64,
    }.items()
}
_PRODUCTS = _both("mul", "multiply", "__mul__", "__rmul__")
_QUOTIENTS = _both("div", "divide", "true_divide", "__truediv__")
_SUMS = _both("add", "__add__", "__radd__")
_CLONES = _both("clone")
_TANH = _both("tanh") | {torch.nn.functional.tanh}
_LOG_SOFTMAX = _both("log_softmax") | {torch.nn.functional.log_softmax}
_SWAPS = _both("transpose", "swapaxes", "swapdims")
_RESHAPES = _both("view", "view_as", "reshape", "reshape_as", "flatten", "squeeze", "unsqueeze")
_SELECTS = _both("narrow", "select", "index_select")
_PIECES = _both("split", "chunk")


def recognise(
    func: Callable[..., Any], logits: Tensor, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Op | None:
    """The operation `func(logits, *args, **kwargs)` as one of the lazy list, or None.

    `logits` is a meta tensor with the shape, strides and dtype of the real one, which is on `device`.
    """
    if func in _CASTS or func in (Tensor.to, Tensor.type, Tensor.type_as):
        return _cast(func, logits, device, args, kwargs)
    if func in _LOG_SOFTMAX:
        return _log_softmax(logits, device, *args, **kwargs)
    if func in _RESHAPES:
        return _reshape(func, logits, args, kwargs)
    if func is Tensor.__getitem__:
        return _index(logits, args[0])
    if func in _SWAPS:
        return _swap_rows(func, logits, args, kwargs)
    if func in _SELECTS:
        return _select(func, logits, args, kwargs)
    return _elementwise(func, logits, args, kwargs) or copy(func, logits, args, kwargs)


def swap(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What `func(other, logits)` is as a function of (logits, other), if the order does not matter."""
    if len(args) != 2 or kwargs:
        return None
    return torch.add if func in _SUMS else torch.mul if func in _PRODUCTS else None


def pieces(func: Callable[..., Any], logits: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Op] | None:
    """What `split` or `chunk` makes of the rows, as one operation a piece, or None."""
    if func not in _PIECES or len(args) > 2:
        return None
    dim = _row_dim(logits, args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if dim is None:
        return None
    found: list[Op] = []
    start = 0
    for piece in func(logits, *args, **kwargs):
        found.append(_narrow(dim, start, piece.shape[dim]))
        start += piece.shape[dim]
    return found


def copy(func: Callable[..., Any], logits: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op | None:
    """`contiguous()` of logits that are not, and `clone()`: wrappers such as DDP clone the outputs of every step."""
    if args or kwargs or not (func in _CLONES or (func is Tensor.contiguous and not logits.is_contiguous())):
        return None
    return Rows(func, ((), {}), on_rows=None, views=False)


def _elementwise(func: Callable[..., Any], logits: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op | None:
    call = (args, kwargs)
    if func in _TANH and not args and not kwargs:
        return Tanh(func, call)
    if len(args) != 1 or kwargs:
        return None
    if func in _SUMS:
        return _add_bias(func, logits, args[0])
    if func in _PRODUCTS | _QUOTIENTS and type(args[0]) in (int, float):
        factor = float(args[0])
        if func in _QUOTIENTS:
            return Scale(func, call, 1 / factor) if factor else None
        return Scale(func, call, factor)
    return None


def _cast(
    func: Callable[..., Any], logits: Tensor, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Op | None:
    if func in _CASTS:
        dtype = _CASTS[func] if not args and not kwargs else None
    elif func is Tensor.type_as:
        dtype = args[0].dtype
    elif func is Tensor.type:
        dtype = args[0] if len(args) == 1 and not kwargs else None
    else:
        dtype = _target_of_to(logits.dtype, device, args, kwargs)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype is torch.float64 is not logits.dtype:
        return None
    return Cast(Tensor.to, ((dtype,), {}))


def _target_of_to(
    dtype: torch.dtype, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.dtype | None:
    """The dtype that `to` leads to, if it stays on the device."""
    if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
        return args[0].dtype if args[0].device == device else None
    try:
        new_device, new_dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):
        return None
    if memory_format is not None or new_device not in (None, device):
        return None
    return new_dtype or dtype


def _add_bias(func: Callable[..., Any], logits: Tensor, other: Any) -> Op | None:
    if type(other) not in (Tensor, torch.nn.Parameter) or other.requires_grad or not other.is_floating_point():
        return None
    if other.dim() > logits.dim() or other.shape[-1:] != logits.shape[-1:] or other.numel() != logits.shape[-1]:
        return None
    bias = other.detach().clone()  # its owner may write into it before these logits are read
    return AddBias(func, ((bias,), {}), bias)


def _log_softmax(
    logits: Tensor, device: torch.device, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Op | None:
    if dtype is None and device.type != "cpu" and torch.is_autocast_enabled(device.type) and logits.dtype.itemsize == 2:
        dtype = torch.float32  # autocast's own rule, on every device but the CPU
    if dim not in (-1, logits.dim() - 1) or dtype not in (None, logits.dtype, torch.float32):
        return None
    return LogSoftmax(torch.log_softmax, ((-1,), {"dtype": dtype}))


def _swap_rows(func: Callable[..., Any], logits: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op | None:
    first, second = (_row_dim(logits, dim) for dim in args) if len(args) == 2 and not kwargs else (None, None)
    if first is None or second is None:
        return None
    return Rows(func, (args, kwargs), on_rows=partial(_transpose, first=first, second=second), views=True)


def _transpose(rows: Tensor, first: int, second: int) -> Tensor:
    return rows.transpose(first, second)


def _reshape(func: Callable[..., Any], logits: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op | None:
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return None  # view(dtype)
    try:
        result = func(logits, *args, **kwargs)
    except RuntimeError:
        return None  # as on real logits, which will say it better
    if result.dim() == 0 or result.shape[-1] != logits.shape[-1]:
        return None
    return Rows(func, (args, kwargs), on_rows=None, views=_share_memory(result, logits))


def _index(logits: Tensor, key: Any) -> Op | None:
    keys: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
    keys = tuple(k.clone() if type(k) is Tensor else k for k in keys)
    key = keys if isinstance(key, tuple) else keys[0]
    if not all(k is Ellipsis or type(k) in (int, slice) or _is_index(k) for k in keys):
        return None
    used = sum(k.dim() if isinstance(k, Tensor) and k.dtype is torch.bool else 1 for k in keys if k is not Ellipsis)
    fill = [slice(None)] * (logits.dim() - used)
    where = next((i for i, k in enumerate(keys) if k is Ellipsis), None)
    full = [*keys, *fill] if where is None else [*keys[:where], *fill, *keys[where + 1 :]]
    if used > logits.dim() or not full or not isinstance(full[-1], slice):
        return None
    *rows, columns = full
    if columns == slice(None):
        views = all(type(k) in (int, slice) for k in rows)
        return Rows(Tensor.__getitem__, ((key,), {}), on_rows=partial(_getitem, key=tuple(rows)), views=views)
    if rows != [slice(None)] * len(rows) or columns.start not in (None, 0) or columns.step not in (None, 1):
        return None
    count = len(range(logits.shape[-1])[columns])
    return Columns(Tensor.__getitem__, ((key,), {}), count) if count else None


def _getitem(rows: Tensor, key: tuple[Any, ...]) -> Tensor:
    return rows[key]


def _is_index(key: Any) -> bool:
    return type(key) is Tensor and key.dtype in (torch.bool, torch.int64) and not (key.dtype is torch.bool and key.dim() == 0)


def _select(func: Callable[..., Any], logits: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op | None:
    dim = _row_dim(logits, args[0] if args else kwargs.get("dim"))
    if dim is None:
        return None
    args = tuple(value.clone() if type(value) is Tensor else value for value in args)
    kwargs = {name: value.clone() if type(value) is Tensor else value for name, value in kwargs.items()}
    rest = args[1:] if args else ()
    options = {name: value for name, value in kwargs.items() if name != "dim"}
    name = func.__name__
    return Rows(func, (args, kwargs), on_rows=partial(_apply, func, dim, rest, options), views=name != "index_select")


def _apply(func: Callable[..., Any], dim: int, rest: tuple[Any, ...], options: dict[str, Any], rows: Tensor) -> Tensor:
    return func(rows, dim, *rest, **options)  # type: ignore[no-any-return]


def _narrow(dim: int, start: int, length: int) -> Op:
    return Rows(
        Tensor.narrow, ((dim, start, length), {}), on_rows=partial(_apply, Tensor.narrow, dim, (start, length), {}), views=True
    )


def _row_dim(logits: Tensor, dim: Any) -> int | None:
    """`dim` counted from the front, if it is a dimension of rows."""
    if type(dim) is not int or not -logits.dim() <= dim < logits.dim() - 1 or dim == -1:
        return None
    return dim % logits.dim()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in an argument, through lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def replace(value: Any, kind: type[Tensor], by: Callable[[Any], Tensor]) -> Any:
    """An argument with `by(tensor)` in the place of every tensor of one class in it."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, list | tuple) and any(isinstance(tensor, kind) for tensor in tensors_in(value)):
        return type(value)(replace(item, kind, by) for item in value)
    if isinstance(value, dict):
        return {key: replace(item, kind, by) for key, item in value.items()}
    return value


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
