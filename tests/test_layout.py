"""Where things lie: the kernels ship in our namespace, and nobody's `kernels` is shadowed."""

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import liger_compat
from liger_compat import kernels

ROOT = Path(__file__).parents[1]
KERNELS = sorted(path.name for path in (ROOT / "kernels").iterdir() if (path / "__init__.py").exists())


def test_kernels_is_not_a_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_under_pytest_kernels_is_not_ours() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is None or (spec.origin is not None and ROOT not in Path(spec.origin).parents)
    assert str(ROOT) not in sys.path


def test_an_installed_kernels_distribution_is_found(tmp_path: Path) -> None:
    """Whatever the installation (a wheel, or editable): `import kernels` is Hugging Face's, `liger_compat.kernels` ours."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("whose = 'theirs'")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import liger_compat; import kernels; "
        "print(kernels.whose, liger_compat.kernels.losses_computed())"
    )
    for folder in (ROOT, tmp_path):
        done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, check=True, capture_output=True, text=True)
        assert done.stdout.split() == ["theirs", "0"]


def test_every_kernel_is_mapped_and_ships() -> None:
    tomllib = pytest.importorskip("tomllib", reason="na: Python 3.10 has no tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    mapped = {f"liger_compat.kernels.{name}": f"kernels/{name}" for name in KERNELS}
    assert settings["package-dir"] == mapped
    assert set(mapped) <= set(settings["packages"])
    for name in KERNELS:
        module = importlib.import_module(f"liger_compat.kernels.{name}")
        assert hasattr(kernels, name), "a kernel has the name of its public function"
        assert module.__all__
    files = {str(file) for file in metadata.files("liger_compat") or []}
    if "liger_compat/__init__.py" in files:  # a wheel
        for name in KERNELS:
            ours = {f"liger_compat/kernels/{name}/{path.name}" for path in (ROOT / "kernels" / name).glob("*.py")}
            assert ours <= files
        assert "liger_compat/py.typed" in files


def test_metadata() -> None:
    found = metadata.metadata("liger_compat")
    assert found["Version"] == liger_compat.__version__
    assert found["License-Expression"] == "Apache-2.0"
    needed = {line.split(";")[0].strip() for line in metadata.requires("liger_compat") or [] if "extra" not in line}
    assert needed == {"torch>=2.4", "transformers>=4.40", "packaging>=22"}
