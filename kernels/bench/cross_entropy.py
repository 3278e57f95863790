"""Time of the loss over given logits, against a copy of them: one read and one write. `python kernels/bench/cross_entropy.py`.

Contenders run interleaved in one process; a figure is the median of its rounds. 10 % of the targets are ignored.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import liger_compat

SHAPES = [
    (8192, 128256, torch.bfloat16),
    (4096, 32000, torch.bfloat16),
    (8192, 151936, torch.bfloat16),
    (4096, 262144, torch.bfloat16),
    (8192, 128256, torch.float32),
    (512, 32000, torch.bfloat16),
]
"""N, V and dtype. The last one is small: it shows what the host costs."""


def step(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor, incoming: float = 1.0) -> None:
    """Forward and backward, to the gradient of the logits."""
    found = loss(logits, target)
    torch.autograd.grad(found, logits, torch.full_like(found, incoming))


def stock(logits: Tensor, target: Tensor) -> Tensor:
    """As transformers computes it."""
    return F.cross_entropy(logits.float(), target)


def keep(logits: Tensor, target: Tensor) -> Tensor:
    return liger_compat.cross_entropy(logits, target, loss_dtype=torch.float32)


class Alias(torch.autograd.Function):
    """The logits as a tensor that is not a leaf, in the same memory."""

    @staticmethod
    def forward(ctx: object, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def overwrite(logits: Tensor, target: Tensor) -> Tensor:
    """On logits that are gradients from the second round on, which takes the same time."""
    return liger_compat.cross_entropy(Alias.apply(logits), target, loss_dtype=torch.float32, overwrite=True)


def forward(logits: Tensor, target: Tensor) -> None:
    with torch.no_grad():
        keep(logits, target)


def measure(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 3):
        for name, run in contenders.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if number >= 3:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Prints a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds, and over a copy of the logits")
    for rows, columns, dtype in SHAPES:
        compare(rows, columns, dtype, rounds)


def compare(rows: int, columns: int, dtype: torch.dtype, rounds: int) -> None:
    """Prints the line of one shape."""
    logits = torch.randn(rows, columns, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(0, columns, (rows,), device="cuda")
    target[torch.rand(rows, device="cuda") < 0.1] = -100
    copy = torch.empty_like(logits)
    found = measure(
        {
            "copy": lambda: copy.copy_(logits.detach()),
            "stock": lambda: step(stock, logits, target),
            "keep": lambda: step(keep, logits, target),
            "keep, incoming 1/3": lambda: step(keep, logits, target, 1 / 3),
            "forward": lambda: forward(logits, target),
            "overwrite": lambda: step(overwrite, logits, target),
        },
        rounds,
    )
    cells = "  ".join(f"{name} {ms:.3f} ({ms / found['copy']:.2f})" for name, ms in found.items())
    print(f"({rows}, {columns}) {str(dtype).removeprefix('torch.')}: {cells}")


if __name__ == "__main__":
    main()
