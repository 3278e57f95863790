"""Whoever stands between the logits and what is made of them, or between their gradients, is heeded as with stock."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import IDS, Pair
from torch import Tensor
from torch.nn import functional as F

import liger_compat
from compare import distances, gradients
from families import build
from liger_compat.adapters.settings import Settings
from liger_compat.deferred.recognise import recognise
from liger_compat.deferred.tensor import defer

ROWS = torch.arange(384)

EDITS: dict[str, Callable[[Tensor], Any]] = {
    "halved in place": lambda g: g.mul_(0.5),
    "clamped in place": lambda g: g.clamp_(-1e-4, 1e-4) is None,
    "written into": lambda g: g.__setitem__((slice(None), slice(10)), 0),
    "an alias written into": lambda g: g.detach().mul_(0.5) is None,
    "another one": lambda g: g * 0.5,
    "looked at": lambda g: g.norm() is None,
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_hooks_that_edit_the_gradient(family: str, edit: str) -> None:
    pair = Pair.of(family)
    for output in pair.call():
        output.logits.register_hook(lambda g: r if isinstance(r := EDITS[edit](g), Tensor) else None)
        output.loss.backward()
    pair.assert_same_gradients(1e-5)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda t: t[:, :-1],
    "columns": lambda t: t[..., :300],
    "tanh": torch.tanh,
    "log_softmax": lambda t: t.log_softmax(-1),
    "log_softmax of a view": lambda t: t[:, 1:].log_softmax(-1),
    "scaled": lambda t: t * 3,
}


@pytest.mark.parametrize("part", PARTS)
def test_gradients_of_what_is_made_of_logits(part: str) -> None:
    pair = Pair.of()
    seen: list[list[Tensor | None]] = []
    for model in pair.both():
        made = PARTS[part](model(input_ids=IDS).logits)
        made.retain_grad()
        made.register_hook(lambda g: g * (torch.arange(g.shape[-1]) % 2))
        loss = (made.square() * torch.arange(made.shape[-1])).mean()
        (asked,) = torch.autograd.grad(loss, made, retain_graph=True)
        loss.backward()
        seen.append([asked, made.grad])
    for found, expected in zip(*reversed(seen), strict=True):
        torch.testing.assert_close(found, expected)
    pair.assert_same_gradients(5e-6)


@pytest.mark.parametrize("part", PARTS)
def test_the_gradient_of_a_part_through_the_fused_loss(part: str) -> None:
    pair = Pair.of()
    found = []
    for model in pair.both():
        made = PARTS[part](model(input_ids=IDS).logits)
        rows = made.reshape(-1, made.shape[-1])
        found.append(torch.autograd.grad(F.cross_entropy(rows, torch.arange(rows.shape[0])), made)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)
    assert pair.counters.fused == 1


def test_arguments_that_are_used_again() -> None:
    """A bias, a mask or an index is what it was at the call, whatever its owner does to it later."""
    pair = Pair.of()
    results: list[list[Tensor]] = []
    for model in pair.both():
        logits = model(input_ids=IDS).logits
        bias, index, mask = torch.zeros(384), torch.tensor([0]), IDS > 10
        made = [logits + bias, logits[index], logits[mask], logits.index_select(0, index)]
        bias.fill_(5)
        index += 1
        mask.logical_not_()
        results.append([m.detach() for m in made])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("part", ["tanh", "log_softmax", "scaled"])
def test_what_was_made_before_a_write(part: str) -> None:
    pair = Pair.of()
    made = []
    for model in pair.both():
        logits = model(input_ids=IDS).logits
        made.append(PARTS[part](logits))
        logits.mul_(0)
    torch.testing.assert_close(made[1], made[0])


PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "of a soft cap": lambda out: torch.tanh(out.logits / 2).mul(2.0).square().mean(),
    "of log-probabilities": lambda out: out.logits.log_softmax(-1)[IDS > 10].square().mean(),
    "of the loss": lambda out: out.loss,
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_gradient_penalty_is_a_named_error(penalty: str) -> None:
    pair = Pair.of(attn_implementation="eager")
    stock, found = pair.call()
    (wanted,) = torch.autograd.grad(PENALTIES[penalty](stock), pair.stock.model.norm.weight)
    (grad,) = torch.autograd.grad(PENALTIES[penalty](found), pair.deferred.model.norm.weight, create_graph=True)
    torch.testing.assert_close(grad.detach(), wanted, rtol=1e-4, atol=1e-8)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.square().sum().backward()


def test_a_penalty_on_the_gradient_of_logits_is_a_named_error() -> None:
    stock, found = Pair.of().call()
    (wanted,) = torch.autograd.grad(stock.loss, stock.logits)
    (grad,) = torch.autograd.grad(found.loss, found.logits, create_graph=True)
    torch.testing.assert_close(grad.detach(), wanted, rtol=1e-4, atol=1e-8)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.square().sum().backward()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_selective_checkpointing(backend: str) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = functools.partial(create_selective_checkpoint_contexts, kept)
    ids = IDS[:1, :8]
    stock, model = build("llama"), liger_compat.patch(build("llama"), backend=backend)
    for each in (stock, model):
        embedded = each.get_input_embeddings()(ids)
        run = lambda x, each=each: each(inputs_embeds=x, labels=ids).loss  # noqa: E731
        checkpoint(run, embedded, use_reentrant=False, context_fn=context).backward()
    assert distances(gradients(model), gradients(stock)) < 1e-5


@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
@pytest.mark.parametrize("scale", [float("inf"), 0.0, float("nan")])
def test_ignored_rows_get_zeros_whatever_comes_in(scale: float, logits: str) -> None:
    """A micro-batch without labels, divided by their number, must not poison every weight."""
    labels = torch.full_like(IDS, -100)
    for family in ("llama", "bert"):
        grads = []
        for model in (build(family), liger_compat.patch(build(family), logits=logits)):
            rows = model(input_ids=IDS).logits.view(-1, 384)
            (F.cross_entropy(rows, labels.view(-1), reduction="sum") * scale).backward()
            grads.append(gradients(model))
        for name, grad in grads[0].items():
            torch.testing.assert_close(grads[1][name], grad, equal_nan=True)


def test_several_incoming_gradients_at_once() -> None:
    pair = Pair.of()
    found = [
        torch.autograd.grad(output.loss, model.model.norm.weight, torch.tensor([1.0, 2.0]), is_grads_batched=True)[0]
        for model, output in zip(pair.both(), pair.call(), strict=True)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-8)


def test_setting_data() -> None:
    stock, found = Pair.of().call()
    for output in (stock, found):
        output.logits.data = torch.zeros_like(output.logits.data)
    assert not found.logits.any()


@pytest.mark.filterwarnings("ignore")
def test_log_softmax_under_the_autocast_of_a_gpu() -> None:
    logits = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    for enabled, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        torch.set_autocast_enabled("cuda", enabled)
        try:
            op = recognise(F.log_softmax, logits, torch.device("cuda"), (-1,), {})
        finally:
            torch.set_autocast_enabled("cuda", False)
        assert op.on_meta(logits).dtype == dtype


def test_large_terms_that_cancel_are_not_stale() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(512, 1600) * 3
    hidden[:, :4] *= 60
    weight = torch.nn.Parameter(torch.randn(3000, 1600) * 0.02)
    weight.data[:, :4] = torch.randn(4) * 0.1 + torch.randn(3000, 4) * 0.001
    logits = defer(hidden, weight, None, torch.float32, Settings("token", "defer", None, None))
    liger_compat.cross_entropy(logits, torch.randint(0, 3000, (512,)))
    for row in range(0, 512, 3):
        logits[row : row + 1].argmax(-1)
    weight.data.mul_(1.001)
    with pytest.raises(liger_compat.StaleLogitsError):
        logits.argmax(-1)


@pytest.mark.parametrize("change", [lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data * 2), lambda m: m.half()])
def test_a_swapped_weight_is_noticed_without_a_loss(change: Callable[[Any], Any]) -> None:
    model = Pair.of().deferred
    logits = model(input_ids=IDS).logits
    change(model)
    with pytest.raises(liger_compat.StaleLogitsError):
        logits.std()


def test_log_probabilities_in_other_losses() -> None:
    pair = Pair.of()
    found = []
    for model in pair.both():
        logits = model(input_ids=IDS[:, :12]).logits  # (2, 12, 384): with 12 classes in the second dimension
        found.append(F.nll_loss(logits.log_softmax(-1), torch.arange(2 * 384).view(2, 384) % 12))
    torch.testing.assert_close(found[1], found[0])
    stock, deferred = (model(input_ids=IDS).logits.view(-1, 384).log_softmax(-1) for model in pair.both())
    losses = [liger_compat.cross_entropy(rows, IDS.flatten(), z_loss=0.1) for rows in (stock, deferred)]
    torch.testing.assert_close(losses[1], losses[0])


def test_a_hook_that_replaces_the_input_of_the_head() -> None:
    for family in ("llama", "bart"):
        pair = Pair.of(family)
        pair.deferred.lm_head.register_forward_pre_hook(lambda head, args: (args[0] * 1.0,))
        call = {"input_ids": IDS, "labels": IDS}
        stock, found = pair.stock(**call), pair.deferred(**call, output_hidden_states=True)
        torch.testing.assert_close(found.loss, stock.loss)
        hidden = found.hidden_states if family == "llama" else found.decoder_hidden_states
        assert type(torch.nn.Linear(64, 7)(hidden[-1])) is Tensor
        assert "logits not deferred: another hook has changed the input of the head" in pair.counters.stepped_aside
