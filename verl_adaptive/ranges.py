"""The range of an option, declared once, in its type: ``decay: Share = 0.9``.

The check, its message and the reference of options (``verl-adaptive parts``) all come from there.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

__all__ = ["Count", "Finite", "Floor", "NonNegative", "Positive", "PositiveShare", "Range", "Share", "Whole"]


@dataclass(frozen=True)
class Range:
    """The numbers from one bound to another.

    Attributes:
        interval: as in mathematics, ``(0, 1]``; ``inf`` for no bound, which is not in the range itself.
        why: the reason, or the unit, for people.

    >>> str(Range("(0, 1]")), str(Range("[2, inf)")), 0.0 in Range("(0, 1]"), math.inf in Range("[0, inf)")
    ('in (0, 1]', '2 or greater', False, False)
    """

    interval: str
    why: str = ""

    def _bounds(self) -> tuple[bool, float, float, bool]:
        found = re.fullmatch(r"([\[(])([^,]+), ([^,]+)([\])])", self.interval)
        if found is None:
            raise ValueError(f"{self.interval!r} is no interval, such as (0, 1]")
        return found[1] == "(", float(found[2]), float(found[3]), found[4] == ")"

    def __contains__(self, value: float) -> bool:
        above, low, high, below = self._bounds()
        return (low < value if above else low <= value) and (value < high if below else value <= high)

    def __str__(self) -> str:
        above, low, high, _ = self._bounds()
        if not math.isinf(high):
            return f"in {self.interval}"
        if math.isinf(low):
            return "finite"
        return f"above {low:g}" if above else f"{low:g} or greater"

    def hint(self, value: float, null: bool = False) -> str:
        """What to write instead of a number that is outside; ``null``: or nothing."""
        finite = ", and finite" if math.isinf(value) and str(self) != "finite" else ""
        return f"must be {self}{finite}{', or null' if null else ''}{f': {self.why}' if self.why else ''}"


Finite = Annotated[float, Range("(-inf, inf)")]
Share = Annotated[float, Range("[0, 1]")]
PositiveShare = Annotated[float, Range("(0, 1]")]
#: Of what no prompt must be without.
Floor = Annotated[float, Range("(0, 1]", "at 0 a prompt could be lost for good")]
NonNegative = Annotated[float, Range("[0, inf)")]
Positive = Annotated[float, Range("(0, inf)")]
Whole = Annotated[int, Range("[0, inf)")]
Count = Annotated[int, Range("[1, inf)")]
