"""Upstream's git: what `main` is now, and the source of a commit."""

import os
import re
import subprocess
import tarfile
from functools import cache
from pathlib import Path

DEFAULT = "https://github.com/huggingface/transformers"


def repository() -> str:
    """A URL, or the path of a local clone: LIGER_COMPAT_TRANSFORMERS_REPO, else upstream's public repository."""
    return os.environ.get("LIGER_COMPAT_TRANSFORMERS_REPO") or DEFAULT


@cache
def resolve_main() -> str:
    """The commit of `main` (of the checked-out branch, where a clone has none of that name), once a run.

    Raises:
        RuntimeError: if it cannot be found.
    """
    for ref in ("refs/heads/main", "HEAD"):
        lines = _git("ls-remote", repository(), ref).splitlines()
        sha = lines[0].partition("\t")[0] if lines else ""
        if re.fullmatch("[0-9a-f]{40}", sha):
            return sha
    msg = f"expected {repository()} to have a branch main, found none"
    raise RuntimeError(msg)


def extract(sha: str, destination: Path) -> None:
    """Writes what building a wheel of transformers at `sha` needs to `destination`.

    Raises:
        RuntimeError: if the commit cannot be had.
    """
    destination.mkdir(parents=True, exist_ok=True)
    source = repository()
    if "://" in source:
        source = str(destination.with_name(f"{destination.name}.git"))
        _git("init", "--quiet", "--bare", source)
        _git("--git-dir", source, "fetch", "--quiet", "--depth=1", repository(), sha)
    archive = destination.with_name(f"{destination.name}.tar")
    _git("-C", source, "archive", f"--output={archive}", sha, "src", "setup.py", "README.md", "pyproject.toml")
    with tarfile.open(archive) as files:
        files.extractall(destination, filter="data")
    archive.unlink()


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        msg = f"git {' '.join(args)} failed: {done.stderr.strip()}"
        raise RuntimeError(msg)
    return done.stdout
