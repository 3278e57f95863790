"""The mode "overwrite" takes the memory of logits only where nobody else can see it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import liger_compat
from compare import assert_same_as_stock, distances, gradients
from families import build, inputs
from liger_compat.tracking import OverwrittenLogits, TrackedLogits

IDS = torch.arange(3, 35).view(2, 16)

KEPT: dict[str, Callable[[Tensor], Any]] = {
    "the logits": lambda logits: logits,
    "detached": lambda logits: logits.detach(),
    "data": lambda logits: logits.data,
    "array": lambda logits: logits.detach().numpy(),
    "dlpack": lambda logits: torch.from_dlpack(logits.detach()),
    "a view": lambda logits: logits[:, 2:5],
    "storage": lambda logits: (logits.untyped_storage(), logits)[1],
}


@pytest.mark.parametrize("when", ["before the patch", "after it"])
@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_what_a_hook_keeps_stays_right(family: str, what: str, when: str) -> None:
    """It still has the logits, or, being a tensor that is watched, says that they are gone."""
    stock, model = build(family), build(family)
    kept: list[Any] = []

    def keep(head: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(KEPT[what](output))

    stock.get_output_embeddings().register_forward_hook(keep)
    if when == "before the patch":
        model.get_output_embeddings().register_forward_hook(keep)
    liger_compat.patch(model, logits="overwrite")
    if when == "after it":
        model.get_output_embeddings().register_forward_hook(keep)
    assert_same_as_stock(model, stock, logits=False, **inputs(stock, IDS))
    assert liger_compat.report(model).counters.overwritten == (what not in ("array", "dlpack", "storage"))
    expected, found = kept
    if isinstance(found, OverwrittenLogits):
        with pytest.raises(liger_compat.OverwrittenLogitsError):
            found.sum()
    else:
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected))


def test_two_threads_share_a_model() -> None:
    stock, model = build("llama"), liger_compat.patch(build("llama"), logits="overwrite")
    expected = {n: stock(**inputs(stock, IDS + n)).loss for n in range(4)}
    found: dict[int, list[Any]] = {n: [] for n in range(4)}

    def work(n: int) -> None:
        for _ in range(5):
            found[n].append(model(**inputs(stock, IDS + n)))

    threads = [threading.Thread(target=work, args=(n,)) for n in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, outputs in found.items():
        assert len(outputs) == 5
        for output in outputs:
            torch.testing.assert_close(output.loss, expected[n])
            assert type(output.logits) is not TrackedLogits


def test_a_forward_that_raises_leaves_nothing_watched() -> None:
    model = liger_compat.patch(build("llama"), logits="overwrite")
    kept: list[Tensor] = []
    model.get_output_embeddings().register_forward_hook(lambda head, args, output: kept.append(output))
    with pytest.raises(IndexError, match="target"):
        model(input_ids=IDS, labels=IDS + 10_000)
    assert type(kept[0]) is Tensor
    assert_same_as_stock(model, build("llama"), logits=False, **inputs(model, IDS))


class AfterTheLoss(transformers.T5ForConditionalGeneration):
    """Handles its logits once more when it has its loss, without reading them."""

    def forward(self, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(labels=labels, **kwargs)
        logits = output.logits.contiguous().to("cpu").view_as(output.logits)
        output.logits = logits.reshape(-1, logits.shape[-1]).view(output.logits.shape)
        return output


class ClassesSecond(transformers.T5ForConditionalGeneration):
    """Its loss has the classes as the second of three dimensions."""

    def forward(self, labels: Tensor | None = None, **kwargs: Any) -> Any:
        assert labels is not None
        output = super().forward(decoder_input_ids=labels.clamp(0), **kwargs)
        output.loss = F.cross_entropy(output.logits.transpose(1, 2), labels)
        return output


@pytest.mark.parametrize("cls", [AfterTheLoss, ClassesSecond])
def test_forwards_that_do_something_else(cls: type) -> None:
    stock, model = build("t5"), build("t5")
    stock.__class__ = model.__class__ = cls
    liger_compat.patch(model, logits="overwrite")
    assert_same_as_stock(model, stock, logits=False, **inputs(stock, IDS))
    counters = liger_compat.report(model).counters
    assert counters.kernel_losses == 1
    assert counters.overwritten == (cls is AfterTheLoss)


def test_a_head_that_is_called_by_its_user() -> None:
    model = liger_compat.patch(build("llama"), logits="overwrite")
    hidden = model.model(IDS).last_hidden_state
    logits = model.lm_head(hidden)
    F.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
    torch.testing.assert_close(logits.detach(), F.linear(hidden, model.lm_head.weight).detach())


def test_a_dispatch_mode_keeps_the_logits() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    stock, model = build("llama"), liger_compat.patch(build("llama"), logits="overwrite")
    with Passing():
        assert_same_as_stock(model, stock, **inputs(stock, IDS))
    assert liger_compat.report(model).counters.overwritten == 0


@pytest.mark.parametrize("use", [lambda t: t.square().mean(), lambda t: t.logsumexp(-1).mean(), lambda t: t.std()])
def test_a_node_that_saved_the_logits_keeps_them(use: Callable[[Tensor], Tensor]) -> None:
    stock, model = build("llama"), liger_compat.patch(build("llama"), logits="overwrite")
    for each in (stock, model):
        made: list[Tensor] = []
        each.lm_head.register_forward_hook(lambda head, args, output, made=made: made.append(use(output)))
        (each(**inputs(stock, IDS)).loss + made[0]).backward()
    assert distances(gradients(model), gradients(stock)) < 1e-5
    assert liger_compat.report(model).counters.overwritten == 0
