"""PEFT around a patched model, and a patch on a PEFT model."""

import pytest
import torch
from torch import nn

import liger_compat
from compare import assert_same_as_stock, gradients
from families import build, inputs

peft = pytest.importorskip("peft", reason="na: peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:::peft", "ignore:.*is_gradient_checkpointing", "ignore:.*tie_word_embeddings")
IDS = torch.arange(3, 35).view(2, 16)

TARGETS = {
    "attention": {"llama": {"target_modules": ["q_proj"]}, "t5": {"target_modules": ["q"]}},
    "head": {"llama": {"target_modules": ["lm_head"]}, "t5": {"target_modules": ["lm_head"]}},
    "whole head": {
        "llama": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "t5": {"target_modules": ["q"], "modules_to_save": ["lm_head"]},
    },
}


def wrap(model: nn.Module, **options: object) -> nn.Module:
    torch.manual_seed(2)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options))
    for parameter in model.parameters():  # B is 0 at the start: nothing would be seen of it
        parameter.grad = None
    return wrapped


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
@pytest.mark.parametrize("order", ["patch first", "patch last"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_lora(family: str, target: str, order: str, logits: str) -> None:
    options = TARGETS[target][family]
    stock = wrap(build(family, tie_word_embeddings=False), **options)
    model = build(family, tie_word_embeddings=False)
    if order == "patch first":
        model = wrap(liger_compat.patch(model, logits=logits), **options)
    else:
        model = liger_compat.patch(wrap(model, **options), logits=logits)
    assert liger_compat.is_patched(model)
    assert_same_as_stock(model, stock, logits=logits != "overwrite", **inputs(stock, IDS))
    assert any("lora" in name and grad.norm() > 0 for name, grad in gradients(model).items())
    report = liger_compat.report(model)
    assert report.counters.kernel_losses == 1
    with stock.disable_adapter(), model.disable_adapter():
        torch.testing.assert_close(model(**inputs(stock, IDS)).loss, stock(**inputs(stock, IDS)).loss)
    liger_compat.unpatch(model)
    assert not any(
        type(hook).__module__.startswith("liger_compat") for m in model.modules() for hook in m._forward_hooks.values()
    )
    before = liger_compat.kernels.losses_computed()
    model(**inputs(stock, IDS)).loss.backward()
    assert liger_compat.kernels.losses_computed() == before


def test_merged_and_unloaded() -> None:
    stock, model = (wrap(build("t5"), target_modules=["q"]) for _ in range(2))
    liger_compat.patch(model)
    stock, model = stock.merge_and_unload(), model.merge_and_unload()
    for each in (stock, model):
        each.requires_grad_(True)
    assert_same_as_stock(model, stock, **inputs(stock, IDS))
    assert liger_compat.report(model).counters.kernel_losses == 1
