"""What both backends agree on: the options of a call, the precision, and what a row yields."""

from typing import NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """The numeric options of the loss, as `cross_entropy` documents them; `softcap` is 0 for none."""

    ignore_index: int
    label_smoothing: float
    softcap: float
    logit_scale: float
    z_loss: float


def accumulator_dtype(logits: Tensor) -> torch.dtype:
    """The dtype that scores and losses are computed in: FP32, and FP64 for FP64 logits."""
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def row_outputs(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised loss, maximum and sum of each row of `logits`."""
    loss = torch.empty(logits.shape[0], dtype=accumulator_dtype(logits), device=logits.device)
    return loss, torch.empty_like(loss), torch.empty_like(loss)
