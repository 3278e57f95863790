"""What each rank does in tests/integration/test_distributed.py; here, because other processes have to import it."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import liger_compat
from compare import distances
from families import build, inputs
from liger_compat.deferred import DeferredLogits


def batch(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Another batch on each rank."""
    return inputs(model, (torch.arange(3, 35) + 40 * rank).view(2, 16))


def ddp(rank: int, family: str, logits: str, options: dict[str, Any]) -> None:
    """A step under DDP, with the outputs read afterwards."""
    results = []
    for name in ("stock", logits):
        model = build(family)
        if name != "stock":
            liger_compat.patch(model, logits=name)
        wrapped = DistributedDataParallel(model, **options)
        for _ in range(2):
            wrapped.zero_grad()
            output = wrapped(**batch(model, rank))
            output.loss.backward()
        results.append((output, {n: p.grad.clone() for n, p in model.named_parameters()}, model))
    (expected, wanted, _), (output, found, model) = results
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    assert distances(found, wanted) < 1e-6
    counters = liger_compat.report(model).counters
    assert counters.kernel_losses == 2
    assert not counters.materialised, counters
    if logits == "overwrite":
        try:
            values = output.logits.sum()
        except liger_compat.OverwrittenLogitsError:
            return
        assert values.isnan(), "gradients were read as logits"  # DDP's own C++ code strips the class, not the NaN
        return
    assert torch.equal(output.logits, expected.logits)
    if logits == "defer":
        assert counters.fused == counters.deferred == 2


def ddp_auxiliary_loss(rank: int) -> None:
    """A second loss on the logits, outside the model."""
    results = []
    for name in ("stock", "defer"):
        model = build("llama")
        if name != "stock":
            liger_compat.patch(model)
        wrapped = DistributedDataParallel(model)
        output = wrapped(**batch(model, rank))
        (output.loss + output.logits.square().mean()).backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert distances(results[1], results[0]) < 2e-6


def fsdp2(rank: int, family: str, units: str, bf16: bool) -> None:
    """A step of training under fully_shard, the head in the root's group or a unit of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)} if bf16 else {}
    results = []
    for name in ("stock", "patched"):
        model = build(family)
        if name != "stock":
            liger_compat.patch(model)
        layers = model.model.layers if hasattr(model, "model") else [*model.encoder.block, *model.decoder.block]
        for layer in layers:
            fully_shard(layer, mesh=mesh, **policy)
        if units == "head resharded":
            fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True, **policy)
        if units == "head kept":
            fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=False, **policy)
        fully_shard(model, mesh=mesh, **({"reshard_after_forward": True} if units == "root resharded" else {}), **policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            output = model(**batch(model, rank))
            losses.append(output.loss.detach())
            output.loss.backward()
            optimizer.step()
        weights = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
        results.append((torch.stack(losses), weights, model, output))
    (expected, wanted, _, _), (found, weights, model, output) = results
    torch.testing.assert_close(found, expected, rtol=2e-2 if bf16 else 1e-5, atol=0)
    assert distances(weights, wanted) < (1e-2 if bf16 else 1e-6)
    counters = liger_compat.report(model).counters
    assert counters.kernel_losses == 3
    assert not counters.materialised, counters
    if units == "head resharded":
        assert counters.deferred == 0, counters
        assert any("freed by FSDP" in why for why in counters.stepped_aside)
        return
    assert counters.fused == 3, counters
    assert isinstance(output.logits, DeferredLogits)
    with pytest.raises(liger_compat.StaleLogitsError):  # FSDP has freed, or filled anew, what they would be computed from
        output.logits.sum()


def fsdp2_reads(rank: int) -> None:
    """Between forward and backward the weight is there, and the logits can be read."""
    from torch.distributed.fsdp import fully_shard

    values = []
    for name in ("stock", "patched"):
        model = build("llama")
        if name != "stock":
            liger_compat.patch(model)
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        output = model(**batch(model, rank))
        values.append(output.logits.detach() + 0)
        output.loss.backward()
    assert torch.equal(*values)


def tensor_parallel(rank: int) -> None:
    """A head whose weight is a DTensor runs as in stock, by the kernel where its logits are gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for order in ("patch first", "patch last"):
        stock, model = build("llama"), build("llama")
        if order == "patch first":
            liger_compat.patch(model)
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        if order == "patch last":
            liger_compat.patch(model)
        call = batch(stock, 0)
        expected, output = stock(**call), model(**call)
        torch.testing.assert_close(output.loss, expected.loss)
        expected.loss.backward()
        output.loss.backward()
        torch.testing.assert_close(model.lm_head.weight.grad.full_tensor(), stock.lm_head.weight.grad)
        counters = liger_compat.report(model).counters
        assert counters.deferred == 0
        assert counters.kernel_losses == 1


def copies(rank: int) -> None:
    """Copies of a patched model in every process count on their own."""
    model = liger_compat.patch(build("llama"))
    twin = copy.deepcopy(model)
    twin(**batch(model, rank))
    assert liger_compat.report(model).counters.kernel_losses == 0
    assert liger_compat.report(twin).counters.kernel_losses == 1
