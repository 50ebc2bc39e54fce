"""One thing that is wrong with a configuration, and what to do about it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """`key` of the configuration, the reason it cannot work, and the cure."""

    key: str
    reason: str
    cure: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}; {self.cure}"
