"""What is fixed for a whole call, in one place for both backends."""

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
