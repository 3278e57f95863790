"""Deferred logits used in every way that tensors are: the result, or the error, is that of ordinary logits."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from beside import IDS, Pair
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

TARGET = IDS.flatten()

LAZY: dict[str, Callable[[Tensor], Any]] = {
    "float": lambda t: t.float(),
    "bfloat16": lambda t: t.bfloat16(),
    "to dtype": lambda t: t.to(torch.float16),
    "to dtype by name": lambda t: t.to(dtype=torch.bfloat16),
    "to device and dtype": lambda t: t.to("cpu", torch.bfloat16),
    "to like": lambda t: t.to(torch.zeros(1, dtype=torch.bfloat16)),
    "to itself": lambda t: t.to("cpu"),
    "type": lambda t: t.type(torch.float32),
    "type_as": lambda t: t.type_as(torch.zeros(1, dtype=torch.float16)),
    "times": lambda t: t * 0.5,
    "times from the left": lambda t: 3 * t,
    "torch.mul": lambda t: torch.mul(t, 2),
    "divided": lambda t: t / 30.0,
    "torch.div": lambda t: torch.div(t, 4),
    "tanh": lambda t: torch.tanh(t),
    "soft cap": lambda t: 30.0 * torch.tanh(t / 30.0),
    "soft cap after a cast": lambda t: torch.tanh(t.float() / 5) * 5,
    "scale then soft cap": lambda t: 7 * torch.tanh(0.3 * t / 7),
    "bias": lambda t: t + torch.linspace(-1, 1, 384).view(1, 384),
    "bias from the left": lambda t: torch.linspace(-1, 1, 384) + t,
    "columns": lambda t: t[..., :300],
    "columns of three": lambda t: t[:, :, :100],
    "view": lambda t: t.view(-1, 384),
    "view of two": lambda t: t.view(2, 16, 384),
    "reshape": lambda t: t.reshape(32, 384),
    "flatten": lambda t: t.flatten(0, 1),
    "view_as": lambda t: t.view_as(torch.zeros(32, 384)),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "squeeze": lambda t: t[:1].squeeze(0),
    "shift": lambda t: t[..., :-1, :],
    "shift and contiguous": lambda t: t[..., :-1, :].contiguous(),
    "shift and flatten": lambda t: t[:, :-1].contiguous().view(-1, 384),
    "last": lambda t: t[:, -1],
    "last kept": lambda t: t[:, -1:, :],
    "one row": lambda t: t[1, 3],
    "steps": lambda t: t[:, ::3],
    "mask": lambda t: t[IDS > 10],
    "mask of rows": lambda t: t[torch.tensor([True, False])],
    "index": lambda t: t[:, torch.tensor([3, 1, 1])],
    "index_select": lambda t: t.index_select(1, torch.tensor([2, 0])),
    "narrow": lambda t: t.narrow(1, 2, 5),
    "select": lambda t: t.select(1, -2),
    "split": lambda t: t.split(5, dim=1),
    "chunk": lambda t: t.chunk(2, dim=0),
    "torch.split": lambda t: torch.split(t, [4, 12], 1),
    "contiguous": lambda t: t.contiguous(),
    "transpose of rows": lambda t: t.transpose(0, 1),
    "transpose of rows and flatten": lambda t: t.transpose(0, 1).contiguous().view(-1, 384),
    "log_softmax": lambda t: F.log_softmax(t, dim=-1),
    "log_softmax in FP32": lambda t: F.log_softmax(t.view(-1, 384), dim=1, dtype=torch.float32),
    "log_softmax of columns": lambda t: t[..., :300].log_softmax(-1),
    "log_softmax of a row": lambda t: torch.log_softmax(t, -1)[:, 3],
    "log_softmax twice": lambda t: t.log_softmax(-1).log_softmax(-1),
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "clone of a slice": lambda t: t[:, 2:].clone(),
    "chain": lambda t: (t[:, 1:].float() / 3).flatten(0, 1)[:, :200] * 2,
}

COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "mean of a dimension": lambda t: t.mean(1),
    "softmax": lambda t: t.softmax(-1),
    "log-probabilities": lambda t: t.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1),
    "entropy": lambda t: -(t.softmax(-1) * t.log_softmax(-1)).sum(-1),
    "max": lambda t: t.max(-1),
    "topk": lambda t: t.topk(3),
    "sort": lambda t: t.sort(dim=-1, descending=True, stable=True),
    "comparison": lambda t: t > 0.1,
    "equality": lambda t: t == t.max(),
    "minus": lambda t: t - 1,
    "minus itself": lambda t: t - t,
    "power": lambda t: t**2,
    "negative": lambda t: -t,
    "abs": lambda t: abs(t),
    "exp": lambda t: t.exp(),
    "divided by a tensor": lambda t: t / torch.tensor(2.0),
    "times True": lambda t: t * True,
    "rounded division": lambda t: torch.div(t, 3, rounding_mode="floor"),
    "matmul": lambda t: t @ torch.ones(384, 2),
    "einsum": lambda t: torch.einsum("btv,v->bt", t, torch.ones(384)),
    "transpose": lambda t: t.transpose(1, 2),
    "permute": lambda t: t.permute(2, 0, 1),
    "T": lambda t: t[0].T,
    "mT": lambda t: t.mT,
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, t + 1]),
    "where": lambda t: torch.where(t > 0, t, 0),
    "gather": lambda t: t.gather(-1, IDS.unsqueeze(-1)),
    "masked_fill": lambda t: t.masked_fill(t > 0, -1.0),
    "out": lambda t: torch.add(t, 1, out=torch.empty(2, 16, 384)) if not t.requires_grad else t + 1,
    "bmm": lambda t: torch.bmm(t, t.transpose(1, 2)),
    "double": lambda t: t.double(),
    "None in an index": lambda t: t[:, None],
    "column": lambda t: t[..., 7],
    "list index": lambda t: t[[0, 1]],
    "new_zeros": lambda t: t.new_zeros(3),
    "zeros_like": lambda t: torch.zeros_like(t),
    "unbind": lambda t: t.unbind(0),
    "iteration": lambda t: list(t),
    "in": lambda t: 5.0 in t,
    "bool": lambda t: bool((t > 1e9).any()),
    "item": lambda t: t[0, 0, 0].item(),
    "float()": lambda t: float(t.sum()),
    "format": lambda t: f"{t[0, 0, 0].item():.3f}",
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().numpy(),
    "asarray": lambda t: np.asarray(t.detach()),
    "array": lambda t: np.array(t.detach().cpu()),
    "data": lambda t: t.data,
    "real": lambda t: t.real,
    "apply_": lambda t: t.detach().clone().apply_(lambda v: v + 1),
    "func.vmap": lambda t: torch.func.vmap(lambda row: row.sum(-1))(t.detach()),
    "cross-entropy of probabilities": lambda t: F.cross_entropy(t.view(-1, 384), torch.full((32, 384), 1 / 384)),
    "nll of something else": lambda t: F.nll_loss(t.view(-1, 384), TARGET),
    "nll after a scale": lambda t: F.nll_loss(F.log_softmax(t.view(-1, 384), -1) * 0.5, TARGET),
    "loss after a scale": lambda t: F.cross_entropy(F.log_softmax(t.view(-1, 384), -1) * 0.5, TARGET),
    "columns of log-probabilities": lambda t: F.cross_entropy(t.view(-1, 384).log_softmax(-1)[:, :350], TARGET),
    "log_softmax of the rows": lambda t: t.log_softmax(1),
    "kl_div": lambda t: F.kl_div(F.log_softmax(t, -1), torch.full((2, 16, 384), 1 / 384), reduction="batchmean"),
    "dropout": lambda t: F.dropout(t, 0.0),
    "linear": lambda t: F.linear(t, torch.ones(2, 384)),
    "is_nonzero": lambda t: (t * 0).any().item(),
}

METADATA: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: t.shape,
    "size": lambda t: t.size(-1),
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "dim": lambda t: t.dim(),
    "ndim": lambda t: t.ndim,
    "numel": lambda t: t.numel(),
    "stride": lambda t: t.stride(),
    "stride of a slice": lambda t: t[:, :-1].stride(),
    "is_contiguous": lambda t: (t.is_contiguous(), t[:, :-1].is_contiguous()),
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf,
    "len": lambda t: len(t),
    "is_floating_point": lambda t: t.is_floating_point(),
    "torch.is_floating_point": lambda t: torch.is_floating_point(t),
    "is_tensor": lambda t: torch.is_tensor(t),
    "isinstance": lambda t: isinstance(t, Tensor),
    "layout": lambda t: t.layout,
    "is_cuda": lambda t: t.is_cuda,
    "element_size": lambda t: t.element_size(),
    "itemsize": lambda t: t.itemsize,
    "nbytes": lambda t: t.nbytes,
    "grad": lambda t: t.detach().grad,
    "_base": lambda t: t._base,
    "is_sparse": lambda t: t.is_sparse,
    "is_quantized": lambda t: t.is_quantized,
    "hash": lambda t: hash(t) == hash(t),
}


def plain(value: Any) -> Any:
    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)


def assert_same(found: Any, expected: Any, *, exact: bool = True) -> None:
    if isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected)
        return
    found, expected = pytree.tree_leaves(plain(found)), pytree.tree_leaves(plain(expected))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if exact:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b)
        else:
            assert a == b


def logits_of(pair: Pair) -> tuple[Tensor, Tensor]:
    stock, found = pair.call()
    return stock.logits, found.logits


@pytest.mark.parametrize("use", LAZY)
def test_lazy_uses(use: str) -> None:
    """Nothing is computed by them, and their values are those of stock."""
    pair = Pair.of()
    stock, found = logits_of(pair)
    result = LAZY[use](found)
    pair.assert_nothing_computed()
    assert_same(result, LAZY[use](stock))


@pytest.mark.parametrize("use", [name for name in LAZY if name not in ("detach", "columns of three")])
def test_a_loss_after_lazy_uses(use: str) -> None:
    """Fused, with the gradients of stock."""
    pair = Pair.of()
    for model in pair.both():
        results = LAZY[use](model(input_ids=IDS).logits)
        results = results if isinstance(results, tuple | list) else [results]
        losses = []
        for result in results:
            rows = result.reshape(-1, result.shape[-1])
            losses.append(F.cross_entropy(rows, torch.arange(rows.shape[0]) % rows.shape[1]))
        sum(losses).backward()
    pair.assert_nothing_computed()
    assert pair.counters.fused == len(results)
    # Casts to 16 bits round; so does a product of fewer rows.
    pair.assert_same_gradients(2e-2 if any(word in use for word in ("float16", "dtype", "like", "type_as")) else 5e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_nll_of_log_probabilities_is_fused(weighted: bool, reduction: str) -> None:
    pair = Pair.of()
    weight = torch.linspace(0.5, 2, 384) if weighted else None
    target = TARGET.masked_fill(TARGET % 5 == 0, -100)
    losses = []
    for model in pair.both():
        rows = F.log_softmax(model(input_ids=IDS).logits.transpose(0, 1).contiguous().view(-1, 384), dim=-1)
        losses.append(F.nll_loss(rows, target, weight, reduction=reduction))
        losses[-1].mean().backward()
    torch.testing.assert_close(losses[1], losses[0])
    pair.assert_nothing_computed()
    assert pair.counters.fused == 1
    pair.assert_same_gradients(5e-6)


def test_log_probabilities_with_gradients() -> None:
    """As losses of preferences compute them: computed once, and not again in backward."""
    pair = Pair.of()
    for model in pair.both():
        chosen = model(input_ids=IDS).logits.log_softmax(-1).gather(-1, IDS.unsqueeze(-1))
        (chosen * torch.linspace(-1, 1, 16).view(1, 16, 1)).sum().backward()
    pair.assert_same_gradients(5e-6)
    assert sum(pair.counters.materialised.values()) == 1


@pytest.mark.parametrize("use", METADATA)
def test_metadata_computes_nothing(use: str) -> None:
    pair = Pair.of()
    stock, found = logits_of(pair)
    assert METADATA[use](found) == METADATA[use](stock)
    pair.assert_nothing_computed()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("use", COMPUTED)
def test_computed_uses(use: str, grad: bool) -> None:
    pair = Pair.of()
    stock, found = logits_of(pair)
    with torch.set_grad_enabled(grad):
        assert_same(COMPUTED[use](found), COMPUTED[use](stock), exact=False)
    if grad:  # and autograd goes through
        for logits in (stock, found):
            tensors = [t for t in pytree.tree_leaves(COMPUTED[use](logits)) if isinstance(t, Tensor) and t.requires_grad]
            if tensors:
                sum(t.float().sum() for t in tensors).backward()
        if tensors and pair.stock.lm_head.weight.grad.any():  # some of these have none
            pair.assert_same_gradients(1e-5)


ERRORS: dict[str, Callable[[Tensor], Any]] = {
    "numpy of a tensor that requires grad": lambda t: t.numpy(),
    "bool of many": lambda t: bool(t),
    "view that does not fit": lambda t: t.view(7, 7),
    "index out of range": lambda t: t[:, 99],
    "shape mismatch": lambda t: t + torch.ones(5),
    "deepcopy of a non-leaf": lambda t: copy.deepcopy(t),
    "target out of range": lambda t: F.cross_entropy(t.view(-1, 384), torch.full((32,), 384)),
    "target of the wrong length": lambda t: F.cross_entropy(t.view(-1, 384), TARGET[:-1]),
}


@pytest.mark.parametrize("use", ERRORS)
def test_errors(use: str) -> None:
    stock, found = logits_of(Pair.of())
    with pytest.raises(Exception) as expected:
        ERRORS[use](stock)
    with pytest.raises(expected.type):
        ERRORS[use](found)


def test_files_hold_plain_tensors() -> None:
    stock, found = logits_of(Pair.of())
    for save, load in (
        (lambda t, f: torch.save(t.detach(), f), lambda f: torch.load(f, weights_only=True)),
        (lambda t, f: torch.save(t, f), lambda f: torch.load(f, weights_only=True)),
        (lambda t, f: pickle.dump(t.detach(), f), pickle.load),
    ):
        file = io.BytesIO()
        save(found, file)
        assert b"liger_compat" not in file.getvalue()
        file.seek(0)
        loaded = load(file)
        assert type(loaded) is Tensor
        assert torch.equal(loaded, stock)
    safetensors = pytest.importorskip("safetensors.torch", reason="na: safetensors is not installed")
    assert torch.equal(safetensors.load(safetensors.save({"logits": found.detach()}))["logits"], stock)
    twin = copy.deepcopy(found.detach())
    assert type(twin) is Tensor
    assert torch.equal(twin, stock)


def test_memory_is_never_read_where_there_is_none() -> None:
    """DLPack, data pointers and shared memory act on the computed logits, or raise; nothing crashes."""
    stock, found = logits_of(Pair.of())
    assert found.data_ptr() != 0
    assert torch.equal(torch.from_dlpack(found.detach()), stock.detach())
    assert torch.equal(torch.utils.dlpack.from_dlpack(found.detach().clone()), stock.detach())
    _, fresh = logits_of(Pair.of())
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.to_dlpack(fresh.detach())
    assert fresh.detach().share_memory_().is_shared()


def test_outputs_as_containers() -> None:
    pair = Pair.of()
    stock, found = pair.call()
    assert torch.equal(found.to_tuple()[1], stock.to_tuple()[1])
    leaves, spec = pytree.tree_flatten(dict(found))
    assert torch.equal(pytree.tree_unflatten(leaves, spec)["logits"], stock.logits)
    as_tuples = [model(input_ids=IDS, labels=IDS, return_dict=False) for model in pair.both()]
    assert torch.equal(as_tuples[1][1], as_tuples[0][1])
    assert "DeferredLogits(shape=(2, 16, 384), dtype=torch.float32, not computed)" in repr(pair.call()[1].logits)
    assert repr(found.logits) == repr(found.logits.lc_plain("repr"))


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_of_logits_break_the_graph_and_work() -> None:
    stock, found = logits_of(Pair.of())
    function = torch.compile(lambda t: (t * 2).softmax(-1).max(-1).values, backend="eager")
    torch.testing.assert_close(function(found), function(stock))
