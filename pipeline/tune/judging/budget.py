"""How long judging may take: an average per op and bucket, a share of it for one that is hard to decide."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 4.0  # one key may take this many times the average, while the total lasts
_RESERVE = 0.5  # of the average is kept for each key that is still to come


@dataclass
class Budget:
    """Seconds. All ranks must be told the same, so that they stop together."""

    per_key: float
    keys: int
    spent: float = 0.0
    judged: int = 0

    @property
    def total(self) -> float:
        """The bound of the whole judging."""
        return self.per_key * self.keys

    def allow(self) -> float:
        """What the next key may take, so that every later one still gets its reserve."""
        reserve = _RESERVE * self.per_key
        left = self.total - self.spent - reserve * max(0, self.keys - self.judged - 1)
        return max(reserve, min(_SHARE * self.per_key, left))

    def take(self, seconds: float) -> None:
        """Note what a key took."""
        self.spent += seconds
        self.judged += 1
