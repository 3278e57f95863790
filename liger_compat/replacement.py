"""One attribute that was replaced, and how to put it back."""

from dataclasses import dataclass
from typing import Any

from .errors import PatchReplacedError


@dataclass(frozen=True)
class Replacement:
    """An instance attribute with what undoing its replacement needs."""

    owner: object
    name: str
    ours: object
    theirs: object
    inherited: bool  # the owner had no attribute of its own: undo deletes, it does not assign

    @classmethod
    def of(cls, owner: object, name: str, ours: object) -> "Replacement":
        """The record of `owner.name = ours`, made before the assignment."""
        return cls(owner, name, ours, vars(owner).get(name), name not in vars(owner))

    def check(self) -> None:
        """Raises PatchReplacedError unless the attribute is still ours."""
        found: Any = vars(self.owner).get(self.name)
        if found is not self.ours:
            msg = (
                f"{type(self.owner).__name__}.{self.name} was set by liger_compat and has been replaced since, by {found!r}. "
                "Undo that first; nothing was changed."
            )
            raise PatchReplacedError(msg)

    def undo(self) -> None:
        """Restores `vars(owner)` as it was."""
        if self.inherited:
            del vars(self.owner)[self.name]
        else:
            vars(self.owner)[self.name] = self.theirs
