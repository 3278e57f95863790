"""`python -m matrix`: what is tested, and what upstream changes of it."""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from . import pins, upstream_git
from .contract.compare import KINDS
from .contract.scan import Finding, scan

STYLES = {"breaking": "bold red", "behaviour": "yellow", "additive": "green", "cosmetic": "dim"}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m matrix", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("list", help="what is tested: every pin, with why")
    command.set_defaults(run=list_pins)
    command = commands.add_parser("resolve", help="the commit that upstream's main branch is at")
    command.add_argument("ref", choices=["main"])
    command.set_defaults(run=resolve)
    command = commands.add_parser("scan", help="the commits of a range that change what liger_compat relies on")
    command.add_argument("range", metavar="A..B", help="commits of a local clone, LIGER_COMPAT_TRANSFORMERS_REPO")
    command.add_argument("--kind", choices=KINDS, default="additive", help="the mildest kind that is shown")
    command.add_argument("--json", action="store_true", help="machine-readable, every change in full")
    command.set_defaults(run=scan_range)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def list_pins(options: argparse.Namespace) -> int:
    """Prints the pins."""
    del options
    for pin in pins.load().pins:
        print(f"{pin.ref:<12} {pin.role:<8} {pin.why}")
    return 0


def resolve(options: argparse.Namespace) -> int:
    """Prints the commit of main."""
    del options
    print(upstream_git.resolve_main())
    return 0


def scan_range(options: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if one is breaking."""
    start, dots, end = options.range.partition("..")
    repository = upstream_git.repository()
    if not dots or "://" in repository:
        msg = f"expected A..B and LIGER_COMPAT_TRANSFORMERS_REPO to name a local clone, found {options.range!r} in {repository}"
        raise RuntimeError(msg)
    findings: list[Finding] = []
    looked_at = 0
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("scanning", total=None)

        def count(commit: object) -> None:
            nonlocal looked_at
            del commit
            looked_at += 1
            progress.update(task, completed=looked_at, description=f"scanning: {looked_at} commits")

        findings.extend(scan(repository, start, end or "HEAD", every=count))
    shown = [finding for finding in findings if KINDS.index(finding.kind) <= KINDS.index(options.kind)]
    if options.json:
        print(json.dumps([{"kind": finding.kind, **asdict(finding)} for finding in shown], indent=1))
    else:
        _print(shown)
        kinds = Counter(finding.kind for finding in findings)
        print(f"{looked_at} commits that touch transformers: " + ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS))
    return int(any(finding.kind == "breaking" for finding in findings))


def _print(findings: list[Finding]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        commit = finding.commit
        # Upstream's text is not ours: nothing in it is markup.
        console.print(f"[{STYLES[finding.kind]}]{finding.kind:<9}[/] {commit.sha[:10]} {commit.date} {escape(commit.subject)}")
        groups = Counter((change.kind, change.what, change.rule) for change in finding.changes)
        for (kind, what, rule), number in groups.most_common(5):
            first = next(c for c in finding.changes if (c.kind, c.what, c.rule) == (kind, what, rule))
            others = f" and {number - 1} more" if number > 1 else ""
            console.print(f"    {kind}: {escape(first.fact)}{others} {escape(what)} ({escape(rule)})")
        for path in finding.unreadable:
            console.print(f"    breaking: {escape(path)} is no valid Python")


if __name__ == "__main__":
    sys.exit(main())
