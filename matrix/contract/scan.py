"""Which commits of upstream change what liger_compat relies on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from . import facts
from .blobs import Blobs, Commit, history
from .compare import Change, compare, gravest


@dataclass(frozen=True)
class Finding:
    """A commit that touches what liger_compat relies on."""

    commit: Commit
    changes: tuple[Change, ...]
    """Empty for a commit that changes such files, but no fact."""
    unreadable: tuple[str, ...] = ()
    """Files that are no valid Python, whose facts are unknown."""

    @property
    def kind(self) -> str:
        """The gravest of its changes."""
        return "breaking" if self.unreadable else gravest(change.kind for change in self.changes)


def scan(repository: str, start: str, end: str, *, every: Callable[[Commit], None] = lambda commit: None) -> Iterator[Finding]:
    """The findings among the commits after `start` up to `end`, oldest first; `every` is told each commit that is looked at.

    Raises:
        RuntimeError: if a commit is not in the repository.
    """
    with Blobs(repository) as blobs:

        @lru_cache(maxsize=50_000)
        def of_blob(path: str, blob: str) -> facts.Facts:
            return facts.of_file(path, blobs.read(blob))

        for commit in history(repository, start, end):
            every(commit)
            changes: list[Change] = []
            unreadable: list[str] = []
            relevant = [file for file in commit.files if facts.is_relevant(file.path)]
            for file in relevant:
                try:
                    before, after = ({} if blob is None else of_blob(file.path, blob) for blob in (file.before, file.after))
                except SyntaxError:
                    unreadable.append(file.path)
                    continue
                changes += compare(file.path, before, after)
            if relevant:
                yield Finding(commit, tuple(changes), tuple(unreadable))
