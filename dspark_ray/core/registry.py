"""A name → factory table. Registering is also being tested: contract tests run over `names()`."""

from collections.abc import Callable
from typing import Generic, TypeVar

from dspark_ray.core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Named plug-ins of one kind, e.g. `DRAFTERS = Registry("drafter")`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator; a name can be taken once."""

        def add(entry: T) -> T:
            assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry, or a `ConfigError` that lists what exists."""
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} {name!r}; choose one of: {', '.join(self.names())}")
        return self._entries[name]

    def names(self) -> list[str]:
        return sorted(self._entries)
