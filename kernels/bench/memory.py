"""Peak memory of a head and its loss, forward and backward, unpatched and in every mode. `python kernels/bench/memory.py`."""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import liger_compat


def stock(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """As transformers computes it."""
    return F.cross_entropy(head(hidden).float(), labels)


def keep(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return liger_compat.cross_entropy(head(hidden), labels, loss_dtype=torch.float32)


def overwrite(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return liger_compat.cross_entropy(head(hidden), labels, loss_dtype=torch.float32, overwrite=True)


def defer(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return liger_compat.linear_cross_entropy(hidden, head.weight, labels)


def measure(mode: Callable[..., Tensor], rows: int, size: int, columns: int) -> tuple[float, float]:
    """GB over hidden states, weight and labels: at the peak, and of the two gradients."""
    torch.manual_seed(0)
    head = nn.Linear(size, columns, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, columns, (rows,), device="cuda")
    for _ in range(2):
        hidden.grad = head.weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mode(hidden, head, labels).backward()
    gradients = hidden.grad.nbytes + head.weight.grad.nbytes
    return (torch.cuda.max_memory_allocated() - before) / 1e9, gradients / 1e9


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=3, default=(8192, 4096, 128256), metavar=("N", "H", "V"))
    rows, size, columns = parser.parse_args().shape
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, N={rows} H={size} V={columns}")
    for mode in (stock, keep, overwrite, defer):
        peak, gradients = measure(mode, rows, size, columns)
        print(f"{mode.__name__:<10} {peak:7.2f} GB at the peak, of which gradients {gradients:.2f} GB")


if __name__ == "__main__":
    main()
