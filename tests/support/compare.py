"""Distances between runs, and the bounds on them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_compat.deferred import DeferredLogits


@dataclass(frozen=True)
class Bounds:
    """Relative distances that two right runs may have, by the dtype of the model."""

    loss: float
    tensors: float
    """Of all gradients or parameters together, and of each against all together: a gradient that is zero in exact
    arithmetic (a key's bias) is nothing but rounding."""


# FP32: rounding. BF16: a loss computed in BF16 has two to three digits, and its steps spread over training.
BOUNDS = {torch.float32: Bounds(loss=2e-6, tensors=1e-5), torch.bfloat16: Bounds(loss=2e-2, tensors=5e-2)}


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative L2 distance."""
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-30)).item()


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative L2 distance of all tensors together; infinite when the names differ."""
    if found.keys() != expected.keys():
        return float("inf")
    squares = sum((found[name].double() - expected[name].double()).square().sum() for name in expected)
    total = sum(tensor.double().square().sum() for tensor in expected.values())
    return float(squares / total) ** 0.5


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_as_stock(patched: nn.Module, stock: nn.Module, *, logits: bool = True, **call: object) -> tuple[Any, Any]:
    """One training step of both on the same call: loss (value, dtype, shape), all gradients, logits before and after.

    Returns both outputs.
    """
    bounds = BOUNDS[next(stock.parameters()).dtype]
    expected, found = stock(**call), patched(**call)
    torch.testing.assert_close(found.loss, expected.loss, rtol=bounds.loss, atol=0, equal_nan=True)
    for step in range(2):
        if logits:
            assert type(found.logits) in (Tensor, DeferredLogits)
            assert found.logits.dtype == expected.logits.dtype
            assert torch.equal(found.logits, expected.logits), ("before", "after")[step] + " backward()"
        if step == 0:
            expected.loss.sum().backward()
            found.loss.sum().backward()
    assert distances(gradients(patched), gradients(stock)) <= bounds.tensors
    return found, expected
