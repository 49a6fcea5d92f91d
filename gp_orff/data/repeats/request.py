"""What is asked of repeated positions."""

from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class Repeats:
    """How records at one place are treated, and how many of them are copies.

    Args:
        distance: positions that close are merged, in the units of x. None: those that the prior
            cannot tell apart; 0: none.
        copies: the records that were left out, since others have their place and their values.
        width: the size of a site, over that of positions which the prior cannot tell apart.
    """

    distance: float | None = None
    copies: int = 0
    width: float = 1.0

    def __post_init__(self):
        number = isinstance(self.distance, Real) and not isinstance(self.distance, bool)
        if self.distance is not None and not (number and 0 <= self.distance < float("inf")):
            raise ValueError(
                f"expected merge= as a distance in the units of x, or None, got {self.distance!r}; "
                "0 keeps all records as they are"
            )

    def __add__(self, other: "Repeats") -> "Repeats":
        distance = self.distance if other.distance is None else other.distance
        return Repeats(distance, self.copies + other.copies, max(self.width, other.width))

    @property
    def changes(self) -> bool:
        """Whether the field may change within a site by more than is negligible."""
        return bool(self.distance) or self.width > 1

    @property
    def note(self) -> str:
        """A sentence on the copies; empty without any."""
        if not self.copies:
            return ""
        return (
            f"copies: {self.copies} records have the place and the values of others, and count "
            "once with them; merge=0 counts all"
        )


BY_THE_PRIOR = Repeats()  # merges positions that the prior cannot tell apart
