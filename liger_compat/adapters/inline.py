"""Models that compute PyTorch's cross-entropy in their forward, and losses we do not know: reached through the logits.

No attribute of `torch`, of the model or of its class is replaced: the output head's logits answer the loss themselves.
"""

from transformers import PreTrainedModel

from .. import inspection
from ..upstream import Upstream
from . import head, loss_function

NAME = "inline"


def examine(model: PreTrainedModel, upstream: Upstream, logits: str) -> tuple[bool, str]:
    """Whether the logits of `model` can be followed to a cross-entropy."""
    del upstream
    why = head.problem(model)
    if why is not None:
        return False, why
    if inspection.calls_cross_entropy(model, head.output_head(model)):
        return True, "its forward computes torch.nn.functional.cross_entropy itself"
    if inspection.calls_loss_function(model):
        if inspection.reaches_cross_entropy(loss_function.original(model)):
            return True, "its forward calls self.loss_function, which computes torch.nn.functional.cross_entropy"
        return False, "its loss function does not compute a cross-entropy"
    if inspection.calls_nll_loss(model):
        if logits == "defer" and head.deferral_problem(model) is None:
            return True, "its forward computes torch.nn.functional.nll_loss of log-probabilities itself"
        return False, "its forward computes log-probabilities and their nll_loss, which only deferred logits pass by"
    return False, "its forward computes no cross-entropy"
