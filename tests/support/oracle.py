"""The loss in FP64, from PyTorch's own parts and from nothing of ours."""

import torch
from torch import Tensor
from torch.nn import functional as F


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
    num_items_in_batch: float | None = None,
) -> Tensor:
    scores = logits.double() * logit_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    loss = F.cross_entropy(
        scores,
        target,
        None if weight is None else weight.double(),
        ignore_index=ignore_index,
        reduction="sum" if num_items_in_batch is not None else reduction,
        label_smoothing=label_smoothing,
    )
    counts = target != ignore_index
    penalty = torch.where(counts, z_loss * torch.logsumexp(scores, -1).square(), 0)
    if num_items_in_batch is not None:
        return (loss + penalty.sum()) / num_items_in_batch
    return loss + {"none": penalty, "sum": penalty.sum(), "mean": penalty.sum() / counts.sum()}[reduction]
