"""Logits are right whenever they are read, or the reading is a named error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import IDS, Pair
from torch import Tensor, nn
from torch.nn import functional as F

import liger_compat
from compare import distance
from families import available, inputs
from liger_compat import StaleLogitsError

FAMILIES = available("llama", "t5", "gemma2", "cohere", "bart", "granite", "bert")


def step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_gives_what_stock_gives(family: str, dtype: torch.dtype, when: str) -> None:
    pair = Pair.of(family, dtype=dtype)
    stock, found = pair.call()
    if when == "after backward":
        found.loss.backward()
    assert found.logits.dtype == stock.logits.dtype
    assert torch.equal(found.logits.detach(), stock.logits.detach())
    assert sum(pair.counters.materialised.values()) == 1
    assert torch.equal(found.logits, stock.logits)  # computed once
    assert sum(pair.counters.materialised.values()) == 1


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "optimizer step": step,
    "in place": lambda model: model.lm_head.weight.detach().mul_(1.5) is None,
    "through .data": lambda model: model.lm_head.weight.data.add_(torch.randn_like(model.lm_head.weight)),
    "averaged weights swapped in": lambda model: model.lm_head.weight.data.lerp_(torch.zeros_like(model.lm_head.weight), 0.01),
    "freed": lambda model: model.lm_head.weight.untyped_storage().resize_(0),
}
READS: dict[str, Callable[[Any], Any]] = {
    "logits": lambda out: out.logits.sum(),
    "detached": lambda out: out.logits.detach().sum(),
    "detached before": lambda out: out.kept.sum(),
    "cloned before": lambda out: out.cloned.sum(),
    "derived before": lambda out: out.derived.sum(),
    "argmax": lambda out: out.logits.argmax(-1),
    "slice": lambda out: out.logits[0, -1].tolist(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", CHANGES)
def test_stale_reads_raise(change: str, read: str) -> None:
    pair = Pair.of()
    _, found = pair.call()
    found.kept, found.cloned, found.derived = found.logits.detach(), found.logits.clone(), found.logits.float()[:, :-1]
    found.loss.backward()
    CHANGES[change](pair.deferred)
    with pytest.raises(StaleLogitsError, match='logits="keep"'):
        READS[read](found)


def test_values_that_were_read_in_time_stay() -> None:
    pair = Pair.of()
    stock, found = pair.call()
    found.loss.backward()
    kept = {
        "sum": found.logits + 0,
        "cpu": found.logits.detach().cpu(),
        "argmax": found.logits.argmax(-1),
        "logits": found.logits,
    }
    step(pair.deferred)
    assert torch.equal(kept["sum"], stock.logits)
    assert torch.equal(kept["cpu"], stock.logits)
    assert torch.equal(kept["argmax"], stock.logits.argmax(-1))
    assert torch.equal(kept["logits"], stock.logits)


@pytest.mark.parametrize("lr", [1e-1, 1e-3, 1e-5])
def test_the_witness_sees_small_steps(lr: float) -> None:
    """Where no version counter moves."""
    pair = Pair.of()
    _, found = pair.call()
    found.loss.backward()
    weight = pair.deferred.lm_head.weight
    weight.data -= lr * weight.grad.sign()
    with pytest.raises(StaleLogitsError, match="has changed since the loss"):
        found.logits.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_witness_raises_no_false_alarm(dtype: torch.dtype) -> None:
    """Products of chunks of rows differ in rounding from the product of all."""
    pair = Pair.of(dtype=dtype)
    liger_compat.patch(pair.deferred, chunk_bytes=384 * 4 * 3)
    for seed in range(20):
        torch.manual_seed(seed)
        stock, found = pair.call(torch.randint(3, 300, (4, 40)))
        assert torch.equal(found.logits, stock.logits)


def test_input_overwritten_before_reading() -> None:
    pair = Pair.of()
    hidden = torch.randn(2, 16, 64)
    logits = pair.deferred.lm_head(hidden)
    hidden.zero_()
    with pytest.raises(StaleLogitsError, match="input was changed in place"):
        logits.sum()


def test_reading_in_every_mode() -> None:
    pair = Pair.of()
    stock, found = pair.call()
    with torch.no_grad():
        assert torch.equal(found.logits, stock.logits)
    with torch.inference_mode():
        assert torch.equal(found.logits + 0, stock.logits + 0)
    for output in (stock, found):
        (output.logits.square().mean() + output.loss).backward()
    pair.assert_same_gradients(2e-6)

    ids = torch.arange(3, 203).view(2, 100)
    with torch.inference_mode():
        stock, found = pair.call(ids)
        assert torch.equal(found.logits, stock.logits)
    with torch.no_grad():
        stock, found = pair.call(ids)
        torch.testing.assert_close(found.loss, stock.loss)
        assert not found.logits.requires_grad
        assert torch.equal(found.logits[:, -1], stock.logits[:, -1])


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "div_": lambda t: t.div_(2),
    "in-place operator": lambda t: t.__imul__(0.5),
    "column": lambda t: t.__setitem__((..., slice(0, 5)), -9.0),
    "masked_fill_": lambda t: t.masked_fill_(t > 0.1, 0.25),
    "view": lambda t: t[:, -1].fill_(0.5),
    "view of a view": lambda t: t.view(-1, t.shape[-1])[3].zero_(),
    "row": lambda t: t.select(0, 1).mul_(3),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_seen_and_differentiated(write: str) -> None:
    pair = Pair.of()
    target = IDS.flatten()
    results = []
    for model in pair.both():
        logits = model(input_ids=IDS).logits
        early = logits.view(-1, logits.shape[-1])  # a view, made before the write
        copied = logits * 2  # a copy, made before the write
        WRITES[write](logits)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), target) + early.sum() / 1000 + copied.sum() / 1000
        loss.backward()
        results.append((loss.detach(), logits.detach().clone(), early.detach().clone(), copied.detach().clone()))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    pair.assert_same_gradients(3e-6)


def test_writes_without_autograd() -> None:
    pair = Pair.of()
    results = []
    for model in pair.both():
        with torch.no_grad():
            logits = model(input_ids=torch.arange(3, 203).view(2, 100)).logits
            twin, view = logits.detach(), logits[:, 3]
            view.fill_(7.0)
            logits += 1
            results.append((logits.clone(), twin.clone(), view.clone()))
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)


def test_logits_read_before_the_loss() -> None:
    """Then the loss is computed from them, by the kernel all the same."""
    pair = Pair.of()
    target = IDS.flatten()
    for model in pair.both():
        logits = model(input_ids=IDS).logits
        top = logits.max(-1).values.mean()
        (F.cross_entropy(logits.view(-1, logits.shape[-1]), target) + top).backward()
    pair.assert_same_gradients(2e-6)
    assert pair.counters.kernel_losses == 1
    assert pair.counters.fused == 0
    assert pair.counters.materialised == {"max": 1}


def test_row_by_row_reads_compute_no_full_logits() -> None:
    pair = Pair.of()
    liger_compat.patch(pair.deferred, chunk_bytes=384 * 4 * 3)
    stock, found = pair.call()
    assert torch.equal(found.logits.argmax(-1), stock.logits.argmax(-1))
    assert torch.equal(found.logits[:, :-1].argmax(dim=-1), stock.logits[:, :-1].argmax(dim=-1))
    torch.testing.assert_close(found.logits.detach().logsumexp(-1), stock.logits.detach().logsumexp(-1))
    mask = IDS > 10
    assert torch.equal(found.logits[mask].argmax(-1), stock.logits[mask].argmax(-1))
    pair.assert_nothing_computed()


def test_the_same_product_as_stock() -> None:
    """Reading costs one product, and changes none of its bits."""
    pair = Pair.of(dtype=torch.bfloat16)
    stock, found = pair.call(torch.arange(3, 303).view(3, 100))
    assert torch.equal(found.logits, stock.logits)
    assert distance(found.logits, stock.logits) == 0


def test_evaluation_is_deferred_and_generation_is_not() -> None:
    pair = Pair.of()
    for model in pair.both():
        model.eval()
    with torch.no_grad():
        pair.call(torch.arange(3, 203).view(2, 100))
    pair.assert_nothing_computed()
    deferred = pair.counters.deferred
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    tokens = [model.generate(IDS, **options) for model in pair.both()]
    assert torch.equal(*tokens)
    pair.assert_nothing_computed()
    assert pair.counters.deferred == deferred
    assert inputs(pair.stock, IDS)
