"""The claims of running processes: reserved version numbers, and leases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count

from ckstore.errors import IntegrityError
from ckstore.storage import durable
from ckstore.storage.catalog_reader import LAST, CatalogReader
from ckstore.storage.schema import LIMIT

#: Duration of a lease for other hosts, which cannot see whether its process still runs.
LEASE_SECONDS = 7 * 24 * 3600.0


class CatalogClaims(CatalogReader):
    """A catalog with reservations and leases."""

    def transaction(self) -> AbstractContextManager[None]:
        """Combine several changes: `BEGIN IMMEDIATE`, then all or nothing. Every method below joins it."""
        return self._connection.transaction()

    def reserve_number(self) -> int:
        """Return a version number that no version and no other process has.

        Numbers of failed and killed ingests stay reserved until a later version is committed: their packs may be left.
        """
        with self.transaction():
            last = self.last_number()
            self._connection.execute("DELETE FROM reservations WHERE number <= ? AND host = ''", [last])
            host = durable.host()
            for claim in self.reservations():
                if claim.number <= last and claim.host == host and not durable.is_running(claim.pid):
                    self.release_number(claim.number)
            reserved = self.reserved_numbers()
            # The first free one: a catalog that came back from a copy must stay older than the packs of later versions.
            number = next(number for number in count(last + 1) if number not in reserved)
            if number >= LIMIT:
                raise IntegrityError(
                    f"The catalog counts {number - 1} versions, which is too many; run `ckstore recover`."
                )
            self._connection.execute(
                "INSERT INTO reservations VALUES (?, ?, ?, ?)", [number, os.getpid(), host, durable.timestamp()]
            )
            return number

    def skip_numbers(self, last: int) -> None:
        """Reserve no number up to and including `last` from now on."""
        with self.transaction():
            if last > self.last_number():
                self._write(LAST, str(last))

    def release_number(self, number: int) -> None:
        """Drop a reservation; the number is not used again."""
        with self.transaction():
            if number <= self.last_number():
                self._connection.execute("DELETE FROM reservations WHERE number = ?", [number])
            else:
                self._connection.execute("UPDATE reservations SET host = '' WHERE number = ?", [number])

    @contextmanager
    def lease(self, purpose: str, seconds: float = LEASE_SECONDS) -> Iterator[int]:
        """Hold a lease during the block: `gc` removes nothing while another process holds one.

        It ends with the process, or when `end_lease` is called with its number; for other hosts, which cannot see
        whether the process runs, after `seconds`. Leases of dead processes on this host are dropped. `purpose` is for
        messages.
        """
        expires = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        host = durable.host()
        # A random number: a holder from before a rebuild of the catalog must not end another process's lease.
        number = int.from_bytes(os.urandom(8), "little") >> 2
        with self.transaction():
            for claim in self._claims():
                if claim.host == host and not durable.is_running(claim.pid):
                    self._connection.execute("DELETE FROM leases WHERE id = ?", [claim.number])
            self._connection.execute(
                "INSERT INTO leases (id, purpose, pid, host, created, expires) VALUES (?, ?, ?, ?, ?, ?)",
                [number, purpose, os.getpid(), host, durable.timestamp(), expires],
            )
        try:
            yield number
        finally:
            try:
                self._give_up(number)
            except BaseException:
                # After an interrupt, too: otherwise `gc` would wait for the end of this process.
                self._give_up(number)
                raise

    def end_lease(self, number: int) -> None:
        """End a lease, in the transaction of the changes that it protects."""
        with self.transaction():
            self._connection.execute("DELETE FROM leases WHERE id = ?", [number])

    def _give_up(self, number: int) -> None:
        if self._connection.rows("SELECT 1 FROM leases WHERE id = ?", [number]):
            self.end_lease(number)

    def _write(self, name: str, value: str) -> None:
        """Set a row of `meta`."""
        self._connection.execute(
            "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            [name, value],
        )
