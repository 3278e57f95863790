"""Everything that is run on this project: `nox -l` lists it. A session's docstring is its help."""

import json
import os
import platform
import shutil
import sys
from pathlib import Path

import nox
from packaging.specifiers import SpecifierSet

sys.path.insert(0, str(Path(__file__).parent))  # for matrix; nox itself imports nothing that our kernels/ could shadow
from matrix import environments, upstream_git
from matrix.pins import Pin, load

PINS = load()
NEWEST = PINS.newest_release(".".join(platform.python_version_tuple()[:2]))

# Fewer executed tests than this is a failure: nothing run is never green. Raise them with the tests.
FEWEST_TESTS = {"tests": 1100, "convergence": 250}

# What depends on the release: training beside stock, reports of what broke where, and what is refused.
PATHS = {
    "tests": ["tests"],
    "convergence": ["tests/convergence", "tests/field_reports", "tests/test_patching.py", "tests/test_overwrite.py"],
}

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"  # finds what pip finds; sessions are thin overlays of one base environment
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False  # not applicable, said so with its reason; never a pass
nox.options.sessions = ["lint", "types", "tests"]


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small model, unpatched beside patched, and compare. A CPU is enough."""
    _set_up(session, NEWEST)
    session.run("python", "-I", "-m", "liger_compat", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests on the newest transformers that this Python can run, the Triton kernels in Triton's interpreter."""
    cell = _set_up(session, NEWEST, "accelerate", "peft", *_group("matrix"))
    _pytest(session, cell, "tests", *session.posargs)


@nox.session(python=list(PINS.pythons))
@nox.parametrize("transformers", [pin.ref for pin in PINS.pins])
def convergence(session: nox.Session, transformers: str) -> None:
    """Train small models of many families on one transformers, and compare with the unpatched ones."""
    cell = _set_up(session, PINS[transformers])
    _pytest(session, cell, "convergence", *session.posargs)


@nox.session(python=list(PINS.pythons))
@nox.parametrize("transformers", [pin.ref for pin in PINS.pins])
def sweep(session: nox.Session, transformers: str) -> None:
    """Patch every language model class of one transformers and compare it with COMPATIBILITY.md (-- --update changes that)."""
    _set_up(session, PINS[transformers])
    # From a folder that holds nothing else: at the root our kernels/ would be found.
    folder = Path(session.create_tmp()).resolve()
    shutil.copytree(environments.ROOT / "matrix", folder / "matrix", dirs_exist_ok=True)
    out = folder / "sweep.json"
    with session.chdir(folder):
        session.run("python", "-m", "matrix.sweep.run", str(out), env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    session.run("python", "-m", "matrix.sweep.compare", str(out), *session.posargs)


@nox.session
def scan(session: nox.Session) -> None:
    """Name the commits of upstream that change what we rely on: nox -s scan -- A..B, in a clone (see CONTRIBUTING.md)."""
    session.install("packaging", *_group("matrix"))
    session.run("python", "-m", "matrix", "scan", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install(*_group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the installed wheel."""
    _set_up(session, NEWEST, *_group("types"))
    session.chdir(session.create_tmp())  # at the root the checkout would be found, which has no kernels in it
    config = str(environments.ROOT / "pyproject.toml")
    session.run("python", "-I", "-m", "mypy", "--config-file", config, "-p", "liger_compat")


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist and the wheel into dist/."""
    session.install("build")
    session.run("python", "-m", "build")


def _set_up(session: nox.Session, pin: Pin, *packages: str) -> dict[str, str | None]:
    """Installs a transformers and our wheel over the base; returns what the tests shall find."""
    python = session.run("python", "-c", "import sys; print('%d.%d' % sys.version_info[:2])", silent=True).strip()
    if pin.is_release:
        sha, requirement, needs = None, f"transformers=={pin.ref}", pin.python
    else:
        try:
            sha = pin.commit or upstream_git.resolve_main()
            session.log(f"transformers {pin.ref} is commit {sha} of {upstream_git.repository()}")
            wheel = environments.transformers_wheel(sha)
        except RuntimeError as error:
            session.error(f"{error}\nLIGER_COMPAT_TRANSFORMERS_REPO names the URL or the local clone to take it from.")
        requirement, needs = str(wheel), environments.requires_python(wheel)
    if not SpecifierSet(needs).contains(f"{python}.99"):
        session.skip(f"na: transformers {pin.ref} needs Python {needs}, this is {python}")

    interpreter = str(Path(session.bin) / "python")
    session.log(f"base environment with torch {PINS.torch} (made once for each Python; takes minutes)")
    base = environments.base(interpreter, PINS.torch)
    environments.add_base(interpreter, base)
    session.install("--no-compile", "--progress-bar=off", requirement, *packages)
    if sha is not None:
        environments.record_commit(interpreter, sha)
    wheel = environments.our_wheel(base)
    session.install("--no-deps", "--force-reinstall", str(wheel))
    cell = {"torch": PINS.torch, "backend": None, "commit": sha, "wheel": environments.sha256(wheel)}
    return cell | ({"transformers": pin.ref} if pin.is_release else {})


def _pytest(session: nox.Session, cell: dict[str, str | None], what: str, *args: str) -> None:
    paths = [] if any(not arg.startswith("-") for arg in args) else PATHS[what]
    strict = [] if args else [f"--strict-run={FEWEST_TESTS[what]}"]
    session.run(
        *("python", "-I", "-m", "pytest", "-m", "not gpu", *strict, *paths, *args),
        env={
            "LIGER_COMPAT_CELL": json.dumps(cell | {"backend": "reference"}),
            "TRITON_INTERPRET": "1",
            "HF_HUB_OFFLINE": "1",
            # Two cores share the work of small tensors badly.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        },
    )


def _group(name: str) -> list[str]:
    return nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), name)  # type: ignore[return-value]
