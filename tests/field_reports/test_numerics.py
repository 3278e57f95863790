"""Numerics, through models: the kernels' own tests are in tests/kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_compat
from compare import BOUNDS, assert_same_as_stock, distances, gradients
from families import VOCABULARY, available, build, inputs

IDS = torch.arange(3, 35).view(2, 16)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_r65_the_loss_does_not_depend_on_the_mode(family: str) -> None:
    stock, model = build(family), liger_compat.patch(build(family))
    expected = stock(**inputs(stock, IDS)).loss
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs(model, IDS)).loss, expected.detach())
    with torch.inference_mode():
        torch.testing.assert_close(model(**inputs(model, IDS)).loss, expected.detach())
    model.requires_grad_(False)
    torch.testing.assert_close(model(**inputs(model, IDS)).loss, expected.detach())


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_r67_a_batch_without_labels_that_count(family: str) -> None:
    stock, model = build(family), liger_compat.patch(build(family))
    call = inputs(stock, IDS) | {"labels": torch.full_like(IDS, -100)}
    stock_loss, loss = stock(**call).loss, model(**call).loss
    assert loss.isnan()
    assert stock_loss.isnan()
    loss.backward()
    assert all((grad == 0).all() for grad in gradients(model).values())


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_r69_a_label_out_of_range_is_an_error(family: str, wrong: int) -> None:
    model = liger_compat.patch(build(family))
    call = inputs(model, IDS)
    call["labels"][0, 7] = wrong
    if family == "t5":  # its decoder reads the labels before the loss does
        call["decoder_input_ids"] = IDS
    with pytest.raises(IndexError, match=rf"found {wrong}"):
        model(**call)


@pytest.mark.parametrize("autocast", ["none", "forward", "both"])
@pytest.mark.parametrize("family", available("llama", "t5", "gemma2"))
def test_r82_autocast(family: str, autocast: str) -> None:
    """FP32 weights under BF16 autocast around forward, or around both: stock's losses, gradients and dtypes."""
    results = []
    for model in (build(family), liger_compat.patch(build(family))):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast != "none"):
            output = model(**inputs(model, IDS))
            if autocast == "both":
                output.loss.backward()
        if autocast != "both":
            output.loss.backward()
        results.append((output, gradients(model)))
    (expected, wanted), (output, found) = results
    assert output.loss.dtype == expected.loss.dtype
    assert output.logits.dtype == expected.logits.dtype
    assert torch.equal(output.logits, expected.logits)
    # With autocast a deferred soft cap is computed in FP32, where the model computes it in BF16.
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5 if autocast == "none" else 1e-4, atol=0)
    assert distances(found, wanted) < BOUNDS[torch.float32 if autocast == "none" else torch.bfloat16].tensors


def test_r82_fp16_and_a_gradient_scaler() -> None:
    results = []
    for model in (build("llama"), liger_compat.patch(build("llama"))):
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        with torch.autocast("cpu", torch.float16):
            loss = model(**inputs(model, IDS)).loss
        scaler.scale(loss).backward()
        results.append(gradients(model))
    assert all(grad.isfinite().all() for grad in results[1].values())
    assert distances(results[1], results[0]) < 2e-2


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
@pytest.mark.parametrize("family", available("llama", "mistral", "t5"))
def test_r83_dtypes_of_loss_and_logits_are_those_of_the_release(family: str, logits: str) -> None:
    """Up to 4.45 heads upcast the returned logits, later ones only for the loss."""
    stock, model = (
        build(family, dtype=torch.bfloat16),
        liger_compat.patch(build(family, dtype=torch.bfloat16), logits=logits),
    )
    expected, found = stock(**inputs(stock, IDS)), model(**inputs(model, IDS))
    assert found.loss.dtype == expected.loss.dtype
    assert found.logits.dtype == expected.logits.dtype
    if family == "llama":
        assert found.loss.dtype == torch.float32


@pytest.mark.parametrize("cap", [1.0, 30.0, None])
@pytest.mark.parametrize("family", available("gemma2", "gemma3"))
def test_r86_soft_capped_logits(family: str, cap: float | None) -> None:
    """With logits so large that the cap matters; and without a cap, which must not trip anything."""
    models = []
    for _ in range(2):
        model = build(family, final_logit_softcapping=cap)
        model.lm_head.weight.data.mul_(50)
        models.append(model)
    liger_compat.patch(models[1])
    assert_same_as_stock(models[1], models[0], **inputs(models[0], IDS))


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
def test_r87_any_transform_between_head_and_loss(logits: str) -> None:
    """A cap with a multiplier inside, a temperature, a bias: the model's own code runs, none of it is guessed."""
    from transformers import LlamaForCausalLM

    class Muse(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            output = super().forward(input_ids=input_ids)
            scores = 5.0 * torch.tanh(0.7 * output.logits / 5.0) + self.bias
            target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            output.loss = nn.CrossEntropyLoss()(scores.view(-1, scores.shape[-1]), target.reshape(-1))
            output.logits = scores
            return output

    models = []
    for _ in range(2):
        model = build("llama")
        model.__class__ = Muse
        model.bias = nn.Parameter(torch.linspace(-1, 1, VOCABULARY))
        models.append(model)
    liger_compat.patch(models[1], logits=logits)
    assert_same_as_stock(models[1], models[0], logits=logits != "overwrite", input_ids=IDS, labels=IDS)
    assert liger_compat.report(models[1]).counters.kernel_losses == 1


def test_r89_a_padded_vocabulary() -> None:
    stock, model = build("llama"), liger_compat.patch(build("llama"))
    for each in (stock, model):
        torch.manual_seed(1)
        each.resize_token_embeddings(300, pad_to_multiple_of=64)
    call = inputs(stock, IDS)
    call["labels"][0, 9] = 319
    assert_same_as_stock(model, stock, **call)
    logits, labels = torch.randn(2, 8, 128), torch.full((2, 8), 127)
    with pytest.raises(ValueError, match="one row of vocab_size=64 logits for each of 16 labels"):
        liger_compat.for_causal_lm_loss(logits, labels, 64)
    assert liger_compat.for_causal_lm_loss(logits, labels, 128).isfinite()


def test_r89_inline_models_follow_a_new_head() -> None:
    stock, model = build("t5"), liger_compat.patch(build("t5"))
    for each in (stock, model):
        torch.manual_seed(1)
        each.resize_token_embeddings(400)
        each.set_output_embeddings(nn.Linear(64, 400, bias=False))
    assert_same_as_stock(model, stock, **inputs(stock, IDS))
    assert liger_compat.report(model).counters.kernel_losses == 1
    liger_compat.unpatch(model)
    assert not model.lm_head._forward_hooks


@pytest.mark.filterwarnings("ignore")  # Dynamo looks at everything, deprecated or not
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_r80_compiling_adds_no_graph_break(family: str) -> None:
    def breaks(model: nn.Module) -> int:
        torch._dynamo.reset()
        call = inputs(model, IDS)
        return int(torch._dynamo.explain(model)(**call).graph_break_count)

    stock, model = build(family), build(family)
    assert breaks(liger_compat.patch(model)) <= breaks(stock)
