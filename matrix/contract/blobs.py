"""Upstream's git, read without a work tree."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_NOTHING = "0" * 40


@dataclass(frozen=True)
class File:
    """A file that a commit changed, by the ids of its contents; None where there is none."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Commit:
    """A commit and what it changed."""

    sha: str
    date: str
    subject: str
    files: tuple[File, ...]


def history(repository: str, start: str, end: str, path: str = "src/transformers") -> Iterator[Commit]:
    """The commits after `start` up to `end`, oldest first, along first parents; paths below src/.

    Raises:
        RuntimeError: if git cannot tell, because a commit is not there.
    """
    command = ["git", "-C", repository, "log", "--first-parent", "--reverse", "--raw", "--no-renames", "--no-abbrev", "-m"]
    command += ["--format=%x00%H%x09%as%x09%s", f"{start}..{end}", "--", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        msg = f"git log {start}..{end} in {repository} failed: {done.stderr.strip()}"
        raise RuntimeError(msg)
    for entry in done.stdout.split("\0")[1:]:
        head, *lines = entry.splitlines()
        sha, date, subject = head.split("\t", 2)
        yield Commit(sha, date, subject, tuple(_file(line) for line in lines if line.startswith(":")))


def _file(line: str) -> File:
    fields, _, path = line.partition("\t")
    _, _, before, after, _ = fields.split()
    return File(path.removeprefix("src/"), *(None if blob == _NOTHING else blob for blob in (before, after)))


class Blobs:
    """Contents of files by id, from one git process."""

    def __init__(self, repository: str) -> None:
        self._process = subprocess.Popen(
            ["git", "-C", repository, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pipe(self._process.stdin).close()
        self._pipe(self._process.stdout).close()
        self._process.wait()

    def read(self, blob: str) -> str:
        """The text of a blob (or of COMMIT:PATH).

        Raises:
            KeyError: if the repository does not have it.
        """
        stdin, stdout = self._pipe(self._process.stdin), self._pipe(self._process.stdout)
        stdin.write(f"{blob}\n".encode())
        stdin.flush()
        header = stdout.readline().split()
        if header[-1] == b"missing":
            raise KeyError(blob)
        text = stdout.read(int(header[2]))
        stdout.read(1)
        return text.decode(errors="replace")

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> Any:
        return pipe
