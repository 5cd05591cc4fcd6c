"""A bounded cache that drops the least recently used entries first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from ckstore.runtime.forks import Lock

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Lru(Generic[Key, Value]):
    """Values by key, the least recently used ones dropped beyond a limit of the sum of their weights; safe for threads.

    A dropped value takes along those whose keys `joined` names.

    Examples
    --------
    >>> cache = Lru[str, int](2)
    >>> [cache.put(name, number) for number, name in enumerate("abc")], cache.get("a"), cache.get("c")
    ([0, 1, 2], None, 2)
    """

    def __init__(self, limit: int, joined: Callable[[Key, Value], Iterable[Key]] | None = None) -> None:
        self.limit = limit
        self._joined = joined
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._sum = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Key]:
        with self._lock:
            return iter(list(self._values))

    @property
    def weight(self) -> int:
        """Return the sum of all weights."""
        return self._sum

    def get(self, key: Key) -> Value | None:
        """Return a value and mark it as used; None if it is not cached."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Key, value: Value, weight: int = 1) -> Value:
        """Cache a value of a weight unless the key has one; return the cached value."""
        with self._lock:
            present = self._values.get(key)
            if present is not None:
                return present[0]
            self._values[key] = value, weight
            self._sum += weight
            while self._sum > self.limit:
                oldest, (dropped, weight) = self._values.popitem(last=False)
                self._sum -= weight
                for other in () if self._joined is None else self._joined(oldest, dropped):
                    self._drop(other)
            return value

    def drop(self, key: Key) -> None:
        """Drop a value, if cached."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        found = self._values.pop(key, None)
        if found is not None:
            self._sum -= found[1]

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()
            self._sum = 0
