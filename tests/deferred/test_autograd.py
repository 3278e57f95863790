"""Whatever hangs on the gradient of the logits works as on real ones."""

from typing import Any

import pytest
import torch
from beside import IDS, Pair
from torch.utils.checkpoint import checkpoint

import liger_compat
from compare import distance
from families import available, inputs

FAMILIES = available("llama", "t5", "gemma2", "cohere", "bart", "granite")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_computes_no_logits(family: str) -> None:
    pair = Pair.of(family)
    stock, found = pair.call()
    torch.testing.assert_close(found.loss, stock.loss, rtol=1e-6, atol=0)
    stock.loss.backward()
    found.loss.backward()
    pair.assert_same_gradients()
    pair.assert_nothing_computed()


@pytest.mark.parametrize("family", FAMILIES)
def test_retain_grad(family: str) -> None:
    pair = Pair.of(family)
    stock, found = pair.call()
    for output in (stock, found):
        output.logits.retain_grad()
        output.loss.backward()
    assert type(found.logits.grad) is torch.Tensor
    assert distance(found.logits.grad, stock.logits.grad) < 2e-6
    pair.assert_same_gradients()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_that_looks_and_one_that_changes(family: str) -> None:
    pair = Pair.of(family)
    norms = []
    for output in pair.call():
        output.logits.register_hook(lambda grad: norms.append(grad.norm()))
        output.logits.register_hook(lambda grad: 2 * grad)
        output.loss.backward()
    torch.testing.assert_close(*norms)
    pair.assert_same_gradients(2e-6)


def test_a_hook_that_only_fires() -> None:
    """DDP and FSDP hang hooks on outputs that never look at the gradient: nothing is computed for them."""
    pair = Pair.of()
    fired = []
    for output in pair.call():
        output.logits.register_hook(lambda grad: fired.append(grad.shape))
        output.loss.backward()
    assert len(fired) == 2
    pair.assert_same_gradients()
    pair.assert_nothing_computed()


@pytest.mark.parametrize("family", FAMILIES)
def test_autograd_grad_of_the_logits(family: str) -> None:
    stock, found = Pair.of(family).call()
    (wanted,) = torch.autograd.grad(stock.loss, stock.logits)
    (grad,) = torch.autograd.grad(found.loss, found.logits)
    assert type(grad) is torch.Tensor
    assert distance(grad, wanted) < 2e-6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("order", ["loss first", "other first"])
def test_another_loss_on_the_logits(family: str, order: str) -> None:
    pair = Pair.of(family)
    for output in pair.call():
        other = output.logits.float().square().mean()
        (output.loss + other if order == "loss first" else other + output.loss).backward()
    pair.assert_same_gradients(2e-6)
    assert sum(pair.counters.materialised.values()) == 1


def test_two_fused_losses_on_the_same_logits() -> None:
    pair = Pair.of()
    target = IDS.reshape(-1)
    for output in pair.call():
        other = torch.nn.functional.cross_entropy(output.logits.view(-1, output.logits.shape[-1]), target)
        shifted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        (output.loss + 0.5 * other - shifted).backward()
    pair.assert_same_gradients(2e-6)
    pair.assert_nothing_computed()
    assert pair.counters.fused == 3


def test_a_second_derivative_is_a_named_error() -> None:
    pair = Pair.of(attn_implementation="eager")
    stock, found = pair.call()
    grads = torch.autograd.grad(found.loss, list(pair.deferred.parameters()), create_graph=True)
    wanted = torch.autograd.grad(stock.loss, list(pair.stock.parameters()))
    for grad, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-7)
    with pytest.raises(NotImplementedError, match="double backward"):
        sum(grad.square().sum() for grad in grads).backward()


def test_a_weight_changed_between_forward_and_backward() -> None:
    pair = Pair.of()
    for model, output in zip(pair.both(), pair.call(), strict=True):
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.loss.backward()


def test_backward_twice() -> None:
    pair = Pair.of()
    outputs = pair.call()
    for output in outputs:
        output.loss.backward(retain_graph=True)
    pair.assert_same_gradients()
    for output in outputs:
        (3 * output.loss).backward()
    pair.assert_same_gradients()
    for output in outputs:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            output.loss.backward()
    pair.assert_same_gradients()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1 / 30, 0.0, -2.0])
def test_incoming_gradients(scale: float, dtype: torch.dtype) -> None:
    pair = Pair.of(dtype=dtype)
    for output in pair.call():
        (output.loss * scale).backward()
    if scale:
        pair.assert_same_gradients(1e-6 if dtype == torch.float32 else 2e-2)


def test_two_forwards_one_backward() -> None:
    pair = Pair.of()
    first, second = pair.call(), pair.call(IDS.flip(1))
    for a, b in zip(first, second, strict=True):
        (a.loss + b.loss).backward()
    pair.assert_same_gradients()
    pair.assert_nothing_computed()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode() -> None:
    pair = Pair.of()
    with torch.autograd.detect_anomaly():
        for output in pair.call():
            output.loss.backward()
    pair.assert_same_gradients(2e-6)


FROZEN = {
    "the head": lambda name: name.startswith("lm_head"),
    "all but the head": lambda name: not name.startswith("lm_head"),
    "the embedding": lambda name: "embed" in name,
}


@pytest.mark.parametrize("what", FROZEN)
def test_frozen_parts(what: str) -> None:
    pair = Pair.of()
    for model in pair.both():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not FROZEN[what](name))
    for output in pair.call():
        output.loss.backward()
    pair.assert_same_gradients()
    pair.assert_nothing_computed()


def test_everything_frozen() -> None:
    pair = Pair.of()
    for model in pair.both():
        model.requires_grad_(False)
    stock, found = pair.call()
    torch.testing.assert_close(found.loss, stock.loss, rtol=1e-6, atol=0)
    assert not found.loss.requires_grad
    assert not found.logits.requires_grad


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_all_ignored(family: str) -> None:
    pair = Pair.of(family)
    calls = inputs(pair.stock, IDS) | {"labels": torch.full_like(IDS, -100)}
    if family == "t5":
        calls["decoder_input_ids"] = IDS
    found = pair.deferred(**calls)
    found.loss.backward()
    assert found.loss.isnan()
    assert all((p.grad == 0).all() for p in pair.deferred.parameters() if p.grad is not None)
    assert torch.equal(found.logits, pair.stock(**calls).logits)


@pytest.mark.parametrize("hooks", ["save_on_cpu", "pack and unpack"])
def test_saved_tensor_hooks(hooks: str) -> None:
    pair = Pair.of()
    packed: list[Any] = []

    def pack(tensor: torch.Tensor) -> Any:
        packed.append(tensor)
        return tensor

    context = (
        torch.autograd.graph.save_on_cpu()
        if hooks == "save_on_cpu"
        else torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    )
    with context:
        outputs = pair.call()
    for output in outputs:
        output.loss.backward()
    pair.assert_same_gradients()
    pair.assert_nothing_computed()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_model(reentrant: bool) -> None:
    pair = Pair.of()
    for model in pair.both():
        call = inputs(model, IDS)
        hook = torch.zeros((), requires_grad=True)  # reentrant checkpoints want an input that needs a gradient

        def run(zero: torch.Tensor, model: Any = model, call: Any = call) -> torch.Tensor:
            return model(**call).loss + zero

        checkpoint(run, hook, use_reentrant=reentrant).backward()
    pair.assert_same_gradients()
    assert pair.counters.fused >= 1
    pair.assert_nothing_computed()


def test_functional_call_and_transforms() -> None:
    pair = Pair.of()
    call = inputs(pair.stock, IDS)
    other = {name: p.detach() * 0.5 for name, p in pair.stock.named_parameters()}
    losses = [torch.func.functional_call(model, other, (), call).loss for model in pair.both()]
    torch.testing.assert_close(*losses)
    grads = [
        torch.func.grad(lambda p, m=model: torch.func.functional_call(m, p, (), call).loss)(other) for model in pair.both()
    ]
    for name in other:
        torch.testing.assert_close(grads[1][name], grads[0][name], rtol=1e-4, atol=1e-7)


def test_tied_weights() -> None:
    pair = Pair.of("llama_tied")
    for output in pair.call():
        output.loss.backward()
    pair.assert_same_gradients()
    pair.assert_nothing_computed()


def test_a_head_that_is_called_twice() -> None:
    """A model of several prediction steps: every call is deferred, every loss fused."""
    pair = Pair.of()
    hidden = torch.randn(2, 16, 64)
    for model in pair.both():
        leaf = hidden.clone().requires_grad_()
        losses = [
            torch.nn.functional.cross_entropy(model.lm_head(leaf.roll(k, 1)).view(-1, 384), IDS.roll(k, 1).flatten())
            for k in range(3)
        ]
        sum(losses).backward()
        model.lm_head.hidden_grad = leaf.grad
    torch.testing.assert_close(pair.deferred.lm_head.hidden_grad, pair.stock.lm_head.hidden_grad)
    assert pair.counters.fused == 3
    assert liger_compat.report(pair.deferred).counters.deferred == 3
