"""Training runs that can be compared."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from families import inputs
from liger_compat.demo import batches
from liger_compat.kernels import losses_computed

STEPS = 32


@dataclass
class Trace:
    """Everything that a training run computed: the losses of all steps, and the rest of the last one."""

    losses: list[float] = field(default_factory=list)
    logits_before: Tensor | None = None
    logits_after: Tensor | None = None
    logits_grad: Tensor | None = None
    output: Any = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    kernel_losses: int = 0


def train(model: nn.Module, *, steps: int = STEPS, rows: int = 4, columns: int = 48, read_logits: bool = True) -> Trace:
    """`steps` steps of AdamW on real text."""
    trace = Trace()
    before = losses_computed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    for step, batch in zip(range(steps), batches(rows, columns), strict=False):
        optimizer.zero_grad()
        output = model(**inputs(model, batch))
        last = step == steps - 1
        if last and read_logits:
            output.logits.retain_grad()
            trace.logits_before = output.logits.detach() + 0
        output.loss.backward()
        if last and read_logits:
            trace.logits_after = output.logits.detach() + 0
            trace.logits_grad = output.logits.grad
        trace.losses.append(output.loss.item())
        if last:
            trace.output = output
            trace.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    trace.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace.kernel_losses = losses_computed() - before
    return trace
