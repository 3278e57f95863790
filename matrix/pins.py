"""The rows of pins.toml."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]  # pytest and nox depend on it there

FILE = Path(__file__).parent / "pins.toml"
ROLES = ("floor", "edge", "step", "last-v4", "newest", "commit", "head")


@dataclass(frozen=True)
class Pin:
    """One transformers that is tested."""

    ref: str
    """A release, an abbreviated commit, or "main"; the name that a session is asked for by."""
    role: str
    why: str
    commit: str | None = None
    """The whole commit, for the role "commit"."""
    python: str = ">=3.10"
    """What the release says it needs. For commits and "main" that is read from what is built."""
    ci: bool = False
    """Whether it runs with every change: one pin for each way of computing the loss."""

    @property
    def is_release(self) -> bool:
        """Whether it comes from the package index, not from git."""
        return self.role not in ("commit", "head")

    def runs_on(self, python: str) -> bool:
        """Whether the release says that it runs on a Python, "3.11" for example."""
        return SpecifierSet(self.python).contains(f"{python}.99")


@dataclass(frozen=True)
class Pins:
    """The whole file."""

    torch: str
    pythons: tuple[str, ...]
    pins: tuple[Pin, ...]

    def __getitem__(self, ref: str) -> Pin:
        return next(pin for pin in self.pins if pin.ref == ref)

    def newest_release(self, python: str) -> Pin:
        """The newest release in the file that runs on a Python."""
        return [pin for pin in self.pins if pin.is_release and pin.runs_on(python)][-1]


@cache
def load(file: Path = FILE) -> Pins:
    """Reads and checks the file.

    Raises:
        ValueError: for a role that does not exist, a ref that occurs twice, or a commit without its hash.
    """
    data = tomllib.loads(file.read_text())
    pins = tuple(Pin(**row) for row in data["pin"])
    for pin in pins:
        if pin.role not in ROLES:
            msg = f"{file.name}: expected the role of {pin.ref} to be one of {', '.join(ROLES)}, found {pin.role!r}"
            raise ValueError(msg)
        if (pin.role == "commit") != (pin.commit is not None and pin.commit.startswith(pin.ref)):
            msg = f"{file.name}: expected {pin.ref} to have a commit that starts with it if and only if that is its role"
            raise ValueError(msg)
    refs = [pin.ref for pin in pins]
    if len(set(refs)) != len(refs):
        msg = f"{file.name}: expected every ref once, found {', '.join(sorted(refs))}"
        raise ValueError(msg)
    return Pins(data["torch"], tuple(data["pythons"]), pins)


def table(pins: Pins) -> str:
    """The README's table of what is tested, in Markdown."""
    rows = [
        f"| {pin.ref} | {pin.python if pin.is_release else 'as it says'} | {'with every change; ' if pin.ci else ''}{pin.why} |"
        for pin in pins.pins
    ]
    return "\n".join(["| transformers | Python | why |", "| --- | --- | --- |", *rows, ""])


def main() -> None:
    """Writes the table to the README."""
    readme = FILE.parents[1] / "README.md"
    before, _, rest = readme.read_text().partition("<!-- pins -->\n")
    _, _, after = rest.partition("<!-- /pins -->")
    readme.write_text(f"{before}<!-- pins -->\n{table(load())}<!-- /pins -->{after}")


if __name__ == "__main__":
    main()
