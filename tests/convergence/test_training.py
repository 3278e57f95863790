"""32 steps of training on real text, unpatched beside patched: everything that a step computes is compared."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import liger_compat
from compare import BOUNDS, distance, distances
from families import available, build, upstream_problem
from training import STEPS, Trace, train

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@cache
def stock(family: str, dtype: torch.dtype, device: torch.device) -> Trace:
    trace = train(build(family, dtype=dtype).to(device))
    assert trace.kernel_losses == 0, "the reference run is not stock"
    assert trace.losses[-1] < 0.9 * trace.losses[0], "the reference run learns nothing"
    return trace


@cache
def exact(family: str, dtype: torch.dtype, device: torch.device) -> Trace:
    """The unpatched run with its cross-entropy computed in FP64.

    A unit of rounding may turn a ReLU or choose another expert, and training makes that larger: where stock itself is beyond
    the bound from this run, the patched model must be no further from it than stock.
    """

    def cross_entropy(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch_cross_entropy(logits.double(), *args, **kwargs).to(logits.dtype)

    torch_cross_entropy = F.cross_entropy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "cross_entropy", cross_entropy)
        return train(build(family, dtype=dtype).to(device))


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", available())
def test_trains_as_stock(family: str, dtype: str, logits: str, device: torch.device) -> None:
    if (problem := upstream_problem(family)) is not None:
        pytest.skip(f"na: {problem}")
    expected = stock(family, DTYPES[dtype], device)
    bounds = BOUNDS[DTYPES[dtype]]

    def is_close(measure: Callable[[Trace, Trace], float], bound: float) -> bool:
        if measure(found, expected) <= bound:
            return True
        reference = exact(family, DTYPES[dtype], device)
        return measure(found, reference) <= max(bound, measure(expected, reference))

    model = liger_compat.patch(build(family, dtype=DTYPES[dtype]).to(device), logits=logits)
    overwritten = liger_compat.report(model).logits == "overwrite" and not _copies_logits(family, dtype)
    found = train(model, read_logits=not overwritten)

    assert found.kernel_losses == STEPS
    assert liger_compat.report(model).counters.kernel_losses == STEPS
    assert is_close(lambda a, b: max(abs(x / y - 1) for x, y in zip(a.losses, b.losses, strict=True)), bounds.loss)
    assert is_close(lambda a, b: distances(a.gradients, b.gradients), bounds.tensors)
    assert is_close(lambda a, b: distances(a.parameters, b.parameters), bounds.tensors)
    if overwritten:
        with pytest.raises(liger_compat.OverwrittenLogitsError, match="overwrite"):
            found.output.logits.sum()
        return
    assert found.logits_before.dtype == expected.logits_before.dtype
    if logits == "defer":
        counters = liger_compat.report(model).counters
        assert counters.deferred == counters.fused == STEPS, counters
        assert sum(counters.materialised.values()) <= 1, counters  # of the last step, whose logits are looked at
    else:
        assert type(found.output.logits) is torch.Tensor
    assert torch.equal(found.logits_before, found.logits_after), "backward() changed outputs.logits"
    assert is_close(lambda a, b: distance(a.logits_before, b.logits_before), bounds.tensors)
    assert is_close(lambda a, b: distance(a.logits_grad, b.logits_grad), bounds.tensors)


@cache
def _copies_logits(family: str, dtype: str) -> bool:
    """Whether the model hands the loss a copy of its logits, which then is what gets overwritten."""
    model = liger_compat.patch(build(family, dtype=DTYPES[dtype]), logits="overwrite")
    return type(train(model, steps=1, read_logits=False).output.logits) is torch.Tensor
