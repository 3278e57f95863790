"""What deferred logits save, and what they do not keep alive."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from beside import IDS, Pair
from torch import nn

import liger_compat
from compare import distances, gradients
from families import available, build, inputs
from liger_compat.deferred import DeferredLogits
from liger_compat.demo import peak_memory
from liger_compat.kernels.cross_entropy.reference import CHUNK_BYTES

CPU = torch.device("cpu")
CHUNK = 1 << 18


def wide_model(logits: str | None) -> nn.Module:
    """A model whose logits are what takes the memory: 200 times its hidden states."""
    model = build("llama", vocab_size=12800, num_hidden_layers=1)
    return (
        model if logits is None else liger_compat.patch(model, logits=logits, chunk_bytes=CHUNK if logits == "defer" else None)
    )


def step_memory(logits: str | None, *, train: bool = True) -> int:
    model = wide_model(logits)
    ids = torch.arange(3, 3 + 4 * 96).view(4, 96)
    with torch.set_grad_enabled(train):
        for _ in range(2):  # the second one is measured: gradients are there, caches are warm
            output = None
            with peak_memory(CPU) as peak:
                output = model(**inputs(model, ids))
                if train:
                    output.loss.backward()
    assert output is not None
    return peak()


def test_a_step_takes_gradients_and_a_chunk() -> None:
    logits = 4 * 96 * 12800 * 4
    taken = {mode: step_memory(mode) for mode in (None, "keep", "overwrite", "defer")}
    assert taken["defer"] < 0.5 * logits, taken
    assert taken["overwrite"] < taken["keep"] < taken[None], taken
    assert taken[None] > 3 * logits, taken


@pytest.mark.parametrize("incoming", [1.0, 1 / 3])
def test_the_loss_takes_its_gradients_and_a_chunk(incoming: float) -> None:
    hidden = torch.randn(384, 1024, requires_grad=True)
    weight = torch.randn(12800, 1024, requires_grad=True)
    labels = torch.randint(0, 12800, (384,))
    with peak_memory(CPU) as peak:
        (liger_compat.linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK) * incoming).backward()
    gradients = 4 * (hidden.numel() + weight.numel())
    assert gradients <= peak() < gradients + 4 * CHUNK_BYTES  # of the reference, which copies that much of a gradient
    assert hidden.grad is not None
    assert weight.grad is not None


def test_evaluation_takes_a_chunk() -> None:
    logits = 4 * 96 * 12800 * 4
    assert step_memory("defer", train=False) < 0.2 * logits
    assert step_memory(None, train=False) > 2 * logits


@pytest.mark.parametrize("family", available("llama", "t5", "gemma2"))
def test_a_stored_loss_keeps_nothing(family: str) -> None:
    model = liger_compat.patch(build(family))
    hidden: list[Any] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda head, args: hidden.append(weakref.ref(args[0])))
    total: Any = 0
    for _ in range(3):
        output = model(**inputs(model, IDS))
        output.loss.backward()
        total = total + output.loss
        del output
    gc.collect()
    assert [reference() for reference in hidden] == [None] * 3


class Saved:
    """What a graph has saved: alive as long as the graph is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_stored_logits_keep_no_graph() -> None:
    model = liger_compat.patch(build("llama"))
    saved: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        found = Saved(tensor.detach())  # a graph that holds itself would never go
        saved.add(found)
        return found

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found.tensor):
        for _ in range(3):
            kept.append(model(**inputs(model, IDS)).logits.detach())
            kept.append(model(**inputs(model, IDS)).logits.detach()[:, :-1].float())
            assert saved or kept
    gc.collect()
    assert not saved
    assert all(isinstance(logits, DeferredLogits) for logits in kept)


def test_the_weight_is_not_copied() -> None:
    """Under autocast too: what is kept is the parameter, not its cast."""
    model = liger_compat.patch(build("llama"))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**inputs(model, IDS)).logits.detach()
    assert logits.dtype == torch.bfloat16
    source = logits._lc_cell.source
    assert source.weight is model.lm_head.weight
    assert source.hidden.untyped_storage().nbytes() <= IDS.numel() * 64 * 4


def test_no_cycles() -> None:
    model = liger_compat.patch(build("llama"))
    gc.collect()
    gc.disable()
    try:
        output = model(**inputs(model, IDS))
        output.loss.backward()
        references = [
            weakref.ref(output.logits),
            weakref.ref(output.logits._lc_cell),
            weakref.ref(output.logits._lc_cell.source),
        ]
        del output
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


def test_copies_files_and_averages(tmp_path: Any) -> None:
    pair = Pair.of()
    pair.call()
    twin = copy.deepcopy(pair.deferred)
    torch.save(pair.deferred, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    averaged = torch.optim.swa_utils.AveragedModel(pair.deferred)
    averaged.update_parameters(pair.deferred)
    (stock, _), call = (pair.call(), inputs(pair.stock, IDS))
    stock.loss.backward()
    for model in (twin, loaded, averaged.module):
        output = model(**call)
        assert isinstance(output.logits, DeferredLogits)
        output.loss.backward()
        assert distances(gradients(model), gradients(pair.stock)) < 1e-6
    assert liger_compat.report(twin).counters.fused == 2
