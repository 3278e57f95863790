"""One base environment with torch for each Python, and a thin overlay of it for each transformers.

torch takes minutes and gigabytes, a release of transformers seconds: an overlay is a nox environment with one `.pth` line
that adds the packages of the base, and pip then installs into it only what the base lacks.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from . import upstream_git

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".nox" / "matrix"

# What every transformers release needs and none of them disagrees about, and what our tests need.
_BASE = [
    *("numpy", "packaging", "pyyaml", "regex", "requests", "tqdm", "filelock", "safetensors", "triton"),
    *("pytest>=8.2", "hypothesis>=6.100", "psutil", "build", "setuptools>=77.0.3", "wheel"),
]


def base(python: str, torch: str) -> Path:
    """The base environment made with an interpreter; returns its interpreter. Made once, some minutes."""
    version = _run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    requirements = [f"torch=={torch}", *_BASE]
    home = CACHE / f"base-{version}-{_digest(*requirements)}"
    interpreter = home / "bin" / "python"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        _run(python, "-m", "venv", str(home))
        _run(str(interpreter), "-m", "pip", "install", "--quiet", "--progress-bar=off", *requirements)
        (home / "complete").touch()
    return interpreter


def add_base(overlay: str, base: Path) -> None:
    """Lets the environment of interpreter `overlay` see the packages of the base."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = _run(str(base), "-c", code).strip()
    ours = Path(_run(overlay, "-c", code).strip())
    (ours / "_base.pth").write_text(f"{theirs}\n")


def our_wheel(base: Path) -> Path:
    """The wheel of this checkout, built from its sdist; built once for each state of the sources."""
    digest = _digest(*(f"{path.relative_to(ROOT)}\n{path.read_text()}" for path in _sources()))
    folder = CACHE / f"wheel-{digest}"
    if not list(folder.glob("*.whl")):
        _run(str(base), "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


def transformers_wheel(sha: str) -> Path:
    """A wheel of transformers at a commit of upstream; built once."""
    folder = CACHE / f"transformers-{sha}"
    if not list(folder.glob("*.whl")):
        source = folder / "source"
        upstream_git.extract(sha, source)
        _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source))
        shutil.rmtree(source)
    return next(folder.glob("*.whl"))


def requires_python(wheel: Path) -> str:
    """The Requires-Python of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())["Requires-Python"] or ""


def record_commit(overlay: str, sha: str) -> None:
    """Notes in an installed transformers which commit it is, as pip does for an installation from git (PEP 610)."""
    code = "from importlib.metadata import distribution as d; print(d('transformers')._path)"
    record = {"url": upstream_git.DEFAULT, "vcs_info": {"vcs": "git", "commit_id": sha}}
    (Path(_run(overlay, "-c", code).strip()) / "direct_url.json").write_text(json.dumps(record))


def sha256(file: Path) -> str:
    """The digest that pip records of an installed wheel."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _sources() -> Iterator[Path]:
    for folder in ("liger_compat", "kernels"):
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".typed"))
    yield from (ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        msg = f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        raise RuntimeError(msg)
    return done.stdout
