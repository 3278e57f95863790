"""A deferred model beside its unpatched twin, one call of both, and what the deferred one did."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import liger_compat
from compare import distances, gradients
from families import build, inputs
from liger_compat.counters import Counters
from liger_compat.deferred import DeferredLogits

IDS = torch.arange(3, 35).view(2, 16)


@dataclass
class Pair:
    """Both models."""

    stock: nn.Module
    deferred: nn.Module

    @classmethod
    def of(cls, family: str = "llama", **options: Any) -> "Pair":
        return cls(build(family, **options), liger_compat.patch(build(family, **options)))

    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.stock, self.deferred

    def call(self, ids: Tensor = IDS, **more: Any) -> tuple[Any, Any]:
        """Outputs of both, and a check that the second one's logits are deferred and its loss was computed without them."""
        before = self.counters.fused
        outputs = tuple(model(**inputs(self.stock, ids), **more) for model in self.both())
        assert isinstance(outputs[1].logits, DeferredLogits)
        assert self.counters.fused == before + 1
        return outputs

    @property
    def counters(self) -> Counters:
        return liger_compat.report(self.deferred).counters

    def assert_same_gradients(self, bound: float = 1e-6) -> None:
        assert distances(gradients(self.deferred), gradients(self.stock)) <= bound

    def assert_nothing_computed(self) -> None:
        assert not self.counters.materialised, self.counters
