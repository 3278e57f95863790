"""Logits and metrics."""

import inspect

import pytest
import torch
from torch import Tensor

import liger_compat
from compare import assert_same_as_stock
from families import available, build, inputs

IDS = torch.arange(3, 35).view(2, 16)


@pytest.mark.parametrize("family", available("llama", "t5", "gemma2"))
def test_r58_logits_are_always_returned(family: str) -> None:
    stock, model = build(family), liger_compat.patch(build(family))
    for mode in (True, False):
        expected, found = stock.train(mode)(**inputs(stock, IDS)), model.train(mode)(**inputs(model, IDS))
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))


def test_r59_a_request_for_metrics_is_ignored_as_stock_ignores_it() -> None:
    stock, model = build("llama"), liger_compat.patch(build("llama"))
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(stock.forward).parameters.values()):
        pytest.skip("na: its forward takes no further keywords in this transformers")
    assert_same_as_stock(model, stock, **inputs(stock, IDS), return_token_accuracy=True, use_token_scaling=False)


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
def test_r62_logits_to_keep(logits: str) -> None:
    stock, model = build("llama"), liger_compat.patch(build("llama"), logits=logits)
    name = next((n for n in ("logits_to_keep", "num_logits_to_keep") if n in inspect.signature(stock.forward).parameters), None)
    if name is None:
        pytest.skip("na: its forward cannot trim logits in this transformers")
    kept = liger_compat.report(model).logits != "overwrite"
    call = {"input_ids": IDS, "labels": IDS[:, -5:], name: 5}
    assert_same_as_stock(model, stock, logits=kept, **call)
    assert liger_compat.report(model).counters.kernel_losses == 1


def test_r62_views_need_not_be_contiguous() -> None:
    whole = torch.randn(2, 8, 11, requires_grad=True)
    labels = torch.randint(0, 11, (2, 5))
    loss = liger_compat.for_causal_lm_loss(whole[:, 3:], labels, 11)
    torch.testing.assert_close(loss, liger_compat.for_causal_lm_loss(whole[:, 3:].contiguous(), labels, 11))


@pytest.mark.parametrize("family", available("llama", "mixtral"))
def test_r63_the_loss_function_returns_one_tensor(family: str) -> None:
    model = liger_compat.patch(build(family))
    output = model(**inputs(model, IDS))
    assert isinstance(output.loss, Tensor)
    if hasattr(model, "loss_function"):
        assert isinstance(model.loss_function(torch.randn(2, 5, 7), torch.zeros(2, 5, dtype=torch.long), 7), Tensor)


def test_r64_unknown_options_raise_when_patching() -> None:
    model = build("llama")
    with pytest.raises(TypeError, match="skip_logits"):
        liger_compat.patch(model, skip_logits=True)
    with pytest.raises(liger_compat.InvalidOptionError, match="'defer', 'keep', 'overwrite', found 'drop'"):
        liger_compat.patch(model, logits="drop")
    with pytest.raises(liger_compat.InvalidOptionError, match="'triton', 'reference' or None, found 'cuda'"):
        liger_compat.patch(model, backend="cuda")
    assert not liger_compat.is_patched(model)
