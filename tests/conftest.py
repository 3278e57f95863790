"""What every test runs under: no network, known randomness, and no skip that nobody expects."""

import os
import warnings

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from cell import cell, device

__all__ = ["cell", "device"]  # fixtures of every test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-run",
        type=int,
        metavar="N",
        help="fail unless at least N tests were run and every skip says 'na: ' and why: nothing run is never green",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Deprecations of transformers are next month's breaks, and errors here; these are its own business or torch's.
    for message in (
        "`torch.jit.script",
        "`torch.jit.trace",
        "torch.jit.*is deprecated",
        ".*is deprecated. Please use.*",
        ".*get_mempolicy.*",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith("na: "):
            _unexpected.append(f"{report.nodeid}: {reason}")


_unexpected: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    fewest = session.config.getoption("--strict-run")
    if fewest is None or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    passed = len(reporter.stats.get("passed", []))
    problems = [f"unexpectedly skipped: {skip}" for skip in _unexpected]
    if passed < fewest:
        problems.append(f"expected at least {fewest} passed tests, found {passed}")
    for problem in problems:
        reporter.write_line(f"ERROR {problem}", red=True)
    if problems:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> None:
    """Models made from small configurations draw remarks about sizes; errors still show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    transformers.logging.set_verbosity_error()
