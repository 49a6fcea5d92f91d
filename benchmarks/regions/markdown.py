"""Results as Markdown: numbers, tables, and where they come from. Needs nothing but Python."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """One file of results."""

    results: Mapping
    command: str
    commit: str
    date: str
    machine: Mapping
    versions: Mapping
    seconds: float | None = None
    note: str = ""

    @classmethod
    def read(cls, path: Path) -> "Measured":
        return cls(**json.loads(path.read_text()))

    @property
    def place(self) -> str:
        """The machine and what it ran."""
        cores = f"{self.machine['cores']} cores"
        cpu = f"{cores} of {self.machine['cpu']}" if "cpu" in self.machine else cores
        words = [cpu, self.machine.get("gpu")]
        words += [f"torch {self.versions['torch']}"] if "torch" in self.versions else []
        return ", ".join(filter(None, words))

    @property
    def source(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"*`{self.command}`, commit {self.commit}{note}, {self.place}*"


@dataclass(frozen=True)
class Results:
    """A folder of them."""

    folder: Path

    def one(self, name: str) -> Measured:
        return Measured.read(self.folder / f"{name}.json")

    def parts(self, name: str) -> list[Measured]:
        """Those of a benchmark that is measured in parts.

        Raises:
            FileNotFoundError: there are none.
        """
        found = sorted((self.folder / name).glob("*.json"))
        if not found:
            raise FileNotFoundError(self.folder / name)
        return [Measured.read(path) for path in found]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    """To so many significant digits, never fewer than those before the point."""
    if value is None:
        return ""
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return decimal(value, max(0, decimals))


def decimal(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:.{decimals}f}".replace("-", "−")


def power(count: int) -> str:
    """10⁵, 2·10³; others in groups of three."""
    exponent = len(str(count)) - 1
    first, rest = divmod(count, 10**exponent)
    if exponent < 3 or rest:
        return grouped(count)
    ten = "10" + str(exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return ten if first == 1 else f"{first}·{ten}"


def grouped(count: float) -> str:
    """27 384, but 2000."""
    words = f"{count:,.0f}" if abs(count) >= 10_000 else f"{count:.0f}"
    return words.replace(",", " ").replace("-", "−")


def percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"
