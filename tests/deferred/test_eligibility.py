"""Which calls of a head are deferred is decided at each of them, and counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import IDS, Pair
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import liger_compat
from compare import assert_same_as_stock
from families import build, inputs
from liger_compat.deferred import DeferredLogits
from liger_compat.kernels import losses_computed


class OwnForward(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight) * 2


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def own_forward(model: nn.Module) -> None:
    head = OwnForward(64, 384, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head


def backward_hook(model: nn.Module) -> None:
    model.lm_head.register_full_backward_hook(lambda *args: None)


HEADS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a forward of its own": (own_forward, "OwnForward with a forward of its own"),
    "weight norm": (lambda model: nn.utils.parametrizations.weight_norm(model.lm_head), "weight is no parameter"),
    "parametrised": (
        lambda model: parametrize.register_parametrization(model.lm_head, "weight", Double()),
        "weight is no parameter",
    ),
    "pruned": (lambda model: prune.l1_unstructured(model.lm_head, "weight", 0.5), "weight is no parameter"),
    "backward hooks": (backward_hook, "full backward hooks"),
    "ZeRO-3": (lambda model: setattr(model.lm_head.weight, "ds_id", 1), "DeepSpeed ZeRO-3"),
    "FSDP1": (lambda model: setattr(model.lm_head.weight, "_fsdp_flattened", True), "flat parameter of FSDP"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("case", HEADS)
def test_heads_that_are_kept(case: str, when: str) -> None:
    """Changed before or after patching: right, by the kernel, and the reason is told."""
    change, reason = HEADS[case]
    stock, model = build("llama"), build("llama")
    torch.manual_seed(3)
    change(stock)
    if when == "after":
        liger_compat.patch(model)
    torch.manual_seed(3)
    change(model)
    if when == "before":
        liger_compat.patch(model)
        choice = liger_compat.report(model).choice
        if case != "backward hooks":  # these can come and go
            assert choice.logits == "keep"
            assert reason in choice.logits_why
    output, _ = assert_same_as_stock(model, stock, **inputs(stock, IDS))
    assert not isinstance(output.logits, DeferredLogits)
    counters = liger_compat.report(model).counters
    assert counters.kernel_losses == 1
    assert counters.deferred == counters.fused == 0
    if when == "after":
        assert any(reason in why for why in counters.stepped_aside), counters


@pytest.mark.filterwarnings("ignore")  # deprecated, and still used
def test_quantised_head() -> None:
    model = build("llama")
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    liger_compat.patch(quantised)
    with torch.no_grad():
        output = quantised(**inputs(model, IDS.repeat(2, 3)))
    assert not isinstance(output.logits, DeferredLogits)
    assert output.loss.isfinite()
    assert liger_compat.report(quantised).logits == "keep"


def test_heads_that_libraries_wrap_on_the_instance() -> None:
    """accelerate puts its own forward on the instance, around nn.Linear's."""
    pair = Pair.of()
    for model in pair.both():
        inner = model.lm_head.forward
        model.lm_head.forward = lambda hidden, inner=inner: inner(hidden.to("cpu").contiguous())
    for output in pair.call():
        output.loss.backward()
    pair.assert_same_gradients()
    pair.assert_nothing_computed()


def test_hooks_of_others_on_the_head() -> None:
    """They see our types; what they return counts."""
    pair = Pair.of()
    for model in pair.both():
        model.lm_head.register_forward_pre_hook(lambda head, args: (args[0] * 0.5,))
        model.lm_head.register_forward_hook(lambda head, args, output: output * 2)
    for model in pair.both():
        model(**inputs(model, IDS)).loss.backward()
    pair.assert_same_gradients(2e-6)
    assert pair.counters.kernel_losses == 1


def test_resized_and_replaced_heads() -> None:
    pair = Pair.of()
    for model in pair.both():
        torch.manual_seed(1)
        model.resize_token_embeddings(400)
    for output in pair.call():
        output.loss.backward()
    pair.assert_same_gradients()
    for model in pair.both():
        torch.manual_seed(2)
        model.set_output_embeddings(nn.Linear(64, 400, bias=False))
        model.zero_grad()
    for output in pair.call():
        output.loss.backward()
    pair.assert_same_gradients()
    pair.assert_nothing_computed()
    assert pair.counters.fused == 2


def test_moved_and_cast_models() -> None:
    pair = Pair.of()
    for model in pair.both():
        model.to(torch.bfloat16).to("cpu").tie_weights()
    for output in pair.call():
        output.loss.backward()
    pair.assert_same_gradients(2e-2)
    pair.assert_nothing_computed()


def test_a_head_shared_with_another_model() -> None:
    """Both are patched as far as the head goes; the documentation says so."""
    pair = Pair.of()
    other = build("llama")
    other.lm_head = pair.deferred.lm_head
    output = other(**inputs(other, IDS))
    output.loss.backward()
    assert isinstance(output.logits, DeferredLogits)
    liger_compat.unpatch(pair.deferred)
    assert not isinstance(other(**inputs(other, IDS)).logits, DeferredLogits)


def test_meta_and_fake_tensors() -> None:
    with torch.device("meta"):
        model = build("llama")
    liger_compat.patch(model)
    output = model(input_ids=torch.zeros(2, 16, dtype=torch.long, device="meta"))
    assert output.logits.is_meta
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = liger_compat.patch(build("llama"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = model(**inputs(model, IDS))
        assert output.loss.shape == ()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_modes_of_torch() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for mode in (Functions(), Dispatch(), FlopCounterMode(display=False), torch.device("cpu"), torch.profiler.profile()):
        pair = Pair.of()
        with mode:
            for output in pair.call():
                output.loss.backward()
        pair.assert_same_gradients()
        assert torch.equal(*(output.logits for output in pair.call()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["whole", "decoder only", "head only"])
def test_compiled_models(how: str) -> None:
    pair = Pair.of()
    torch._dynamo.reset()
    for model in pair.both():
        if how == "decoder only":
            model.model.compile(backend="eager")
        elif how == "head only":
            model.lm_head.compile(backend="eager")
    models = [torch.compile(model, backend="eager") if how == "whole" else model for model in pair.both()]
    before = losses_computed()
    outputs = [model(**inputs(pair.stock, IDS)) for model in models]
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    for output in outputs:
        output.loss.backward()
    pair.assert_same_gradients(2e-6)
    assert losses_computed() == before + 1
    assert pair.counters.fused == (1 if how == "decoder only" else 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("logits", ["defer", "keep", "overwrite"])
def test_steps_of_a_compiled_model_compile_nothing(logits: str) -> None:
    model = liger_compat.patch(build("llama"), logits=logits)
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    counts = []
    for _ in range(4):
        compiled(**inputs(model, IDS)).loss.backward()
        counts.append(len(graphs))
    assert counts[1] == counts[3]


@pytest.mark.filterwarnings("ignore")
def test_exported_models() -> None:
    pair = Pair.of()
    program = torch.export.export(pair.deferred, (), {"input_ids": IDS, "use_cache": False}, strict=False)
    found = program.module()(input_ids=IDS, use_cache=False)
    torch.testing.assert_close(found.logits, pair.stock(input_ids=IDS).logits)


def test_a_model_that_computes_log_probabilities_itself() -> None:
    """Its loss is served where the log-probabilities need not be there either."""
    stock, model = build("prophetnet"), liger_compat.patch(build("prophetnet"))
    assert_same_as_stock(model, stock, **inputs(stock, IDS))
    counters = liger_compat.report(model).counters
    assert (counters.kernel_losses, counters.fused) == (1, 1)
    for logits in ("keep", "overwrite"):
        with pytest.raises(liger_compat.UnsupportedModelError, match="nll_loss, which only deferred logits pass by"):
            liger_compat.patch(build("prophetnet"), logits=logits)
