"""accelerate wraps forward on the instance and casts the outputs of every step."""

from typing import Any

import pytest
import torch
from torch import nn

import liger_compat
from compare import distances, gradients
from families import build, inputs

accelerate = pytest.importorskip("accelerate", reason="na: accelerate is not installed")
IDS = torch.arange(3, 35).view(2, 16)


@pytest.fixture
def accelerator() -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def step(model: nn.Module) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(**inputs(model, IDS))
    output.loss.backward()
    return output, gradients(model)


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
@pytest.mark.parametrize("order", ["patch first", "patch last"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_prepare_and_unwrap(family: str, order: str, logits: str, accelerator: Any) -> None:
    stock = accelerator.prepare(build(family))
    model = build(family)
    if order == "patch first":
        model = accelerator.prepare(liger_compat.patch(model, logits=logits))
    else:
        model = liger_compat.patch(accelerator.prepare(model), logits=logits)
    expected, wanted = step(stock)
    output, found = step(model)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
    assert distances(found, wanted) < 1e-2
    assert output.logits.dtype == expected.logits.dtype == torch.float32
    assert liger_compat.report(model).counters.kernel_losses == 1
    if logits != "overwrite":
        assert torch.equal(output.logits, expected.logits)
    else:  # the cast at the end of forward was no read; this is one
        with pytest.raises(liger_compat.OverwrittenLogitsError):
            output.logits.argmax(-1)

    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert liger_compat.is_patched(unwrapped)
    step(unwrapped)
    assert liger_compat.report(unwrapped).counters.kernel_losses == 2
    liger_compat.unpatch(unwrapped)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_dispatched(family: str) -> None:
    stock, model = build(family), build(family)
    for each in (stock, model):
        accelerate.dispatch_model(each, device_map={"": "cpu"}, main_device="cpu", force_hooks=True)
    liger_compat.patch(model)
    (expected, wanted), (output, found) = step(stock), step(model)
    torch.testing.assert_close(output.loss, expected.loss)
    assert distances(found, wanted) < 1e-5
    assert liger_compat.report(model).counters.kernel_losses == 1
