"""One attribute that was replaced, and how to put it back."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from .errors import PatchReplacedError


@dataclass(frozen=True)
class Replacement:
    """An attribute of a module inside the patched model, with what undoing its replacement needs.

    The module is found again by what was set on it: a reference would be a cycle, and keep a deleted model's memory until the
    garbage collector runs.
    """

    path: str
    """Where the module was; libraries wrap modules, and it may be elsewhere by now."""
    name: str
    ours: object
    theirs: object
    inherited: bool  # the owner had no attribute of its own: undo deletes, it does not assign

    @classmethod
    def of(cls, owner: nn.Module, path: str, name: str, ours: object) -> "Replacement":
        """The record of `owner.name = ours`, made before the assignment."""
        return cls(path, name, ours, vars(owner).get(name), name not in vars(owner))

    def check(self, model: nn.Module) -> None:
        """Raises PatchReplacedError unless the attribute is still ours, or was deleted (with its module, perhaps)."""
        if self._owner(model) is not None:
            return
        owner = dict(model.named_modules()).get(self.path)
        found: Any = None if owner is None else vars(owner).get(self.name)
        if found is not None:
            msg = (
                f"{type(owner).__name__}.{self.name} was set by liger_compat and has been replaced since, by {found!r}. "
                "Undo that first; nothing was changed."
            )
            raise PatchReplacedError(msg)

    def undo(self, model: nn.Module) -> None:
        """Restores `vars` of the module as it was."""
        owner = self._owner(model)
        if owner is None:
            return
        if self.inherited:
            del vars(owner)[self.name]
        else:
            vars(owner)[self.name] = self.theirs

    def _owner(self, model: nn.Module) -> nn.Module | None:
        """The module whose attribute is ours, wherever in the model it is by now: libraries wrap modules."""
        return next((module for module in model.modules() if vars(module).get(self.name) is self.ours), None)
