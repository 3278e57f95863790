"""Loss scaling: num_items_in_batch, accumulation, several ranks."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_compat
from compare import assert_same_as_stock, distances, gradients
from families import VOCABULARY, build, inputs
from liger_compat.upstream import inspect_upstream

COUNTS: list[Any] = [
    36,
    torch.tensor(36),
    torch.tensor([36]),
    torch.tensor([[36]]),
    torch.tensor(36.0),
    36.0,
    torch.tensor(36.0).double(),
]


def name_of(count: Any) -> str:
    return f"{type(count).__name__}{list(count.shape)}-{count.dtype}" if isinstance(count, Tensor) else type(count).__name__


def uneven_labels() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCABULARY, (4, 16))
    labels = ids.clone()
    for row, valid in enumerate((3, 7, 11, 15)):
        labels[row, valid + 1 :] = -100
    return ids, labels


def accepts_count(model: torch.nn.Module) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


@pytest.mark.parametrize("count", COUNTS, ids=name_of)
def test_r27_accumulated_gradients_equal_those_of_the_whole_batch(count: Any) -> None:
    model = build("llama")
    if not accepts_count(model):
        pytest.skip("na: this transformers knows no num_items_in_batch")
    liger_compat.patch(model)
    ids, labels = uneven_labels()
    model(input_ids=ids, labels=labels).loss.backward()
    whole = gradients(model)
    model.zero_grad()
    for row in range(4):
        loss = model(input_ids=ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=count).loss
        loss.sum().backward()
    assert distances(gradients(model), whole) < 1e-6


@pytest.mark.parametrize("count", COUNTS, ids=name_of)
@pytest.mark.parametrize("family", ["llama", "bart", "t5"])
def test_r29_scaling_is_that_of_the_release(family: str, count: Any) -> None:
    """Heads that take the count and drop it are reproduced as they are: parity is the promise, not repair."""
    stock, model = build(family), liger_compat.patch(build(family))
    if not accepts_count(stock):
        pytest.skip("na: its forward takes no num_items_in_batch in this transformers")
    assert_same_as_stock(model, stock, **inputs(stock, torch.arange(3, 35).view(2, 16)), num_items_in_batch=count)


@pytest.mark.parametrize("family", ["llama", "mistral", "t5"])
def test_r31_what_trainer_infers_from_the_signature_is_unchanged(family: str) -> None:
    stock, model = build(family), liger_compat.patch(build(family))
    assert inspect.signature(type(model).forward) == inspect.signature(type(stock).forward)
    assert accepts_count(model) == accepts_count(stock)
    for attribute in ("accepts_loss_kwargs", "loss_type", "main_input_name"):
        assert getattr(model, attribute, None) == getattr(stock, attribute, None)
    if not accepts_count(stock):
        with pytest.raises(TypeError, match="num_items_in_batch"):
            model(**inputs(model, torch.arange(3, 35).view(2, 16)), num_items_in_batch=3)


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
@pytest.mark.parametrize("count", [None, torch.tensor(20), torch.tensor([20])], ids=str)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_r36_the_loss_is_an_ordinary_tensor(family: str, count: Any, logits: str) -> None:
    stock, model = build(family), liger_compat.patch(build(family), logits=logits)
    call = inputs(stock, torch.arange(3, 35).view(2, 16))
    if count is not None and accepts_count(stock):
        call["num_items_in_batch"] = count
    stock(**call).loss.sum().backward()
    loss = model(**call).loss
    loss.retain_grad()
    loss *= 3
    loss /= 2
    loss += 1
    loss.sum().backward()
    assert distances({k: v / 1.5 for k, v in gradients(model).items()}, gradients(stock)) < 1e-5


def test_r42_unknown_keywords_are_treated_as_stock_treats_them() -> None:
    upstream = inspect_upstream()
    if upstream.causal_lm_loss is None:
        pytest.skip("na: this transformers has no ForCausalLMLoss")
    model = liger_compat.patch(build("llama"))
    logits, labels = torch.randn(2, 6, VOCABULARY), torch.randint(0, VOCABULARY, (2, 6))
    for extra in (
        {"label_smoothing": 0.1},
        {"weight": torch.rand(VOCABULARY)},
        {"cu_seq_lens_q": torch.tensor([0, 16]), "max_length_q": 16},
    ):
        expected = upstream.causal_lm_loss(logits, labels, VOCABULARY, **extra)
        torch.testing.assert_close(model.loss_function(logits, labels, VOCABULARY, **extra), expected)
        torch.testing.assert_close(liger_compat.for_causal_lm_loss(logits, labels, VOCABULARY, **extra), expected)


def test_loss_of_a_copy_trains_the_copy() -> None:
    model = liger_compat.patch(build("llama"))
    twin = copy.deepcopy(model)
    twin(**inputs(twin, torch.arange(3, 35).view(2, 16))).loss.backward()
    assert not gradients(model)
    assert gradients(twin)
