"""An object store in memory: every request is counted, and may fail, get lost, or wait for its turn."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock

from ckstore.errors import UnreachableError
from ckstore.storage.interface import Listed
from ckstore.storage.remote.bucket import READ_PRICE


class Objects(MutableMapping[str, tuple[bytes, datetime]]):
    """Bytes and times by name, in the order of names; a list of few takes no time for the others."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[bytes, datetime]] = {}
        self._names: list[str] = []

    def __getitem__(self, name: str) -> tuple[bytes, datetime]:
        return self._found[name]

    def __setitem__(self, name: str, value: tuple[bytes, datetime]) -> None:
        if name not in self._found:
            insort(self._names, name)
        self._found[name] = value

    def __delitem__(self, name: str) -> None:
        del self._found[name]
        del self._names[bisect_left(self._names, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def named(self, prefix: str, after: str = "") -> Iterator[str]:
        """Yield the names with a prefix that come after a name."""
        first = max(bisect_left(self._names, prefix), bisect_right(self._names, after))
        names = (self._names[index] for index in range(first, len(self._names)))
        return itertools.takewhile(lambda name: name.startswith(prefix), names)


class SimulatedServer:
    """Objects by name, with a clock of its own that goes on by a second with each request.

    Attributes
    ----------
    latency
        Seconds that each request takes.
    bandwidth
        Bytes a second of the one link that all clients share; 0 for one that takes no time.
    client
        Makes the client of a store by its URL.
    """

    def __init__(self) -> None:
        self.objects = Objects()
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.lock = Lock()
        self._clock = itertools.count()
        self.ignores_conditions = False
        self.latency = self.bandwidth = 0.0
        self.client: Callable[[str], SimulatedBucket] = lambda url: SimulatedBucket(self)
        self._free = 0.0

    def transfer(self, kind: str, nbytes: int) -> None:
        """Count bytes, and take the time that they need; the link carries the next ones at the same time."""
        with self.lock:
            self.bytes[kind] += nbytes
            if not self.bandwidth:
                return
            self._free = max(self._free, time.monotonic()) + nbytes / self.bandwidth
            wait = self._free - time.monotonic()
        time.sleep(max(wait, 0.0))

    def now(self) -> datetime:
        """Return the next moment."""
        return datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=next(self._clock))


class SimulatedBucket:
    """A client of a server.

    Parameters
    ----------
    server
        The server behind the link.
    turn
        Called with the kind and name of each request; its result is held while the request is carried out.
    loses
        Called likewise; where it says so, the request is carried out and its response lost.
    """

    read_price = READ_PRICE

    def __init__(
        self,
        server: SimulatedServer,
        turn: Callable[[str, str], AbstractContextManager[object]] | None = None,
        loses: Callable[[str, str], bool] | None = None,
    ) -> None:
        self.server = server
        self.turn = turn or (lambda kind, name: nullcontext())
        self.loses = loses or (lambda kind, name: False)

    def _request(self, kind: str, name: str) -> AbstractContextManager[object]:
        self.server.requests[kind] += 1
        if self.server.latency:
            time.sleep(self.server.latency)
        return self.turn(kind, name)

    def _respond(self, kind: str, name: str) -> None:
        if self.loses(kind, name):
            raise UnreachableError(f"The response to {kind} {name} was lost.")

    def put(self, name: str, data: bytes | Path) -> None:
        content = data if isinstance(data, bytes) else data.read_bytes()
        self.server.transfer("put", len(content))
        with self._request("put", name), self.server.lock:
            self.server.objects[name] = content, self.server.now()
        self._respond("put", name)

    def put_absent(self, name: str, data: bytes) -> bool:
        self.server.transfer("put", len(data))
        with self._request("put_absent", name), self.server.lock:
            absent = name not in self.server.objects or self.server.ignores_conditions
            if absent:
                self.server.objects[name] = data, self.server.now()
        self._respond("put_absent", name)
        return absent

    def read(self, name: str) -> bytes:
        with self._request("read", name), self.server.lock:
            if name not in self.server.objects:
                raise FileNotFoundError(name)
            data = self.server.objects[name][0]
        self.server.transfer("read", len(data))
        self._respond("read", name)
        return data

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        with self._request("read_range", name), self.server.lock:
            if name not in self.server.objects:
                raise FileNotFoundError(name)
            data = self.server.objects[name][0][offset : offset + length]
        self.server.transfer("read", len(data))
        if len(data) != length:
            raise EOFError(name)
        return data

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        with self._request("list", prefix), self.server.lock:
            objects = self.server.objects
            found = [Listed(name, len(objects[name][0]), objects[name][1]) for name in objects.named(prefix, after)]
        return iter(found)

    def above(self) -> Iterator[SimulatedBucket]:
        return iter(())

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with self._request("delete", name), self.server.lock:
                self.server.objects.pop(name, None)
