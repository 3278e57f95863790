"""Reads of logits, row by row, that metrics do: answered a chunk of rows at a time, without all of the logits."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels import rows_in_chunks

if TYPE_CHECKING:
    from .tensor import DeferredLogits

_OF_ROWS: dict[Any, Callable[[Tensor], Tensor]] = {
    function: reduce
    for name, reduce in {"argmax": lambda rows: rows.argmax(-1), "logsumexp": lambda rows: rows.logsumexp(-1)}.items()
    for function in (getattr(torch, name), getattr(Tensor, name))
}


def read(func: Callable[..., Any], logits: "DeferredLogits", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result of a call that reduces the vocabulary, or None if it is another call, or one that autograd records."""
    if (
        func not in _OF_ROWS
        or len(args) + len(kwargs) != 1
        or (args or tuple(kwargs.values()))[0] not in (-1, logits.dim() - 1)
    ):
        return None
    if "dim" not in kwargs and kwargs:
        return None
    records = torch.is_grad_enabled() and logits.requires_grad and func not in (torch.argmax, Tensor.argmax)
    return None if records else by_rows(logits, _OF_ROWS[func])


def by_rows(logits: "DeferredLogits", reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """`reduce` (n, V) -> (n, ...) applied to all rows, a chunk at a time; without history."""
    cell = logits._lc_cell
    lead = logits._lc_meta.shape[:-1]
    if cell.is_computed:
        result = reduce(cell.value().reshape(-1, logits._lc_meta.shape[-1]))
        return result.reshape(*lead, *result.shape[1:])
    source = cell.source
    source.check()
    parts = []
    for chunk in rows_in_chunks(lead.numel(), source.weight.shape[0], source.dtype, source.hidden.device):
        rows = source.compute_rows(chunk if cell.rows is None else cell.rows[chunk])
        with torch.no_grad():
            for each in cell.ops:
                rows = each.on_rows_of_logits(rows)
            parts.append(reduce(rows))
        del rows  # before the next chunk is made
    result = torch.cat(parts) if parts else reduce(source.compute_rows(slice(0, 0)))
    return result.reshape(*lead, *result.shape[1:])
