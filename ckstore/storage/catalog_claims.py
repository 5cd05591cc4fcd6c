"""The claims of processes in a catalog: reserved version numbers, and leases."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta

from ckstore.errors import CkstoreError, IntegrityError
from ckstore.storage import durable
from ckstore.storage.catalog_reader import CatalogReader
from ckstore.storage.schema import LIMIT

#: Duration of a lease for other hosts, which cannot see whether its process still runs.
LEASE_SECONDS = 7 * 24 * 3600.0


class CatalogClaims(CatalogReader):
    """A catalog with reservations and leases."""

    def transaction(self) -> AbstractContextManager[None]:
        """Combine several changes: `BEGIN IMMEDIATE`, then all or nothing. Every method below joins it."""
        return self._connection.transaction()

    def reserve_number(self) -> int:
        """Return a unique version number. Drop the reservations of dead processes."""
        with self.transaction():
            host = socket.gethostname()
            for claim in self.reservations():
                if claim.host == host and not durable.is_running(claim.pid):
                    self._connection.execute("DELETE FROM reservations WHERE number = ?", [claim.number])
            # A rebuilt catalog has versions, but no reservations.
            self._connection.execute(
                "INSERT INTO reservations SELECT 1 + MAX(COALESCE((SELECT MAX(number) FROM versions), 0),"
                " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'reservations'), 0)), ?, ?, ?",
                [os.getpid(), host, durable.timestamp()],
            )
            number = int(self._connection.rows("SELECT last_insert_rowid()")[0][0])
            if number >= LIMIT:
                raise IntegrityError(
                    f"The catalog counts {number - 1} versions, which is too many; run `ckstore recover`."
                )
            return number

    def skip_numbers(self, last: int) -> None:
        """Reserve no number up to and including `last` from now on."""
        with self.transaction():
            # An explicit number advances the table's counter.
            self._connection.execute(
                "INSERT OR IGNORE INTO reservations VALUES (?, ?, ?, ?)",
                [last, os.getpid(), socket.gethostname(), durable.timestamp()],
            )
            self._connection.execute("DELETE FROM reservations WHERE number = ?", [last])

    def release_number(self, number: int) -> None:
        """Drop a reservation; the number is not used again."""
        with self.transaction():
            self._connection.execute("DELETE FROM reservations WHERE number = ?", [number])

    @contextmanager
    def lease(self, purpose: str, seconds: float = LEASE_SECONDS) -> Iterator[int]:
        """Hold a lease during the block: `gc` removes nothing while another process holds one.

        It ends with the process, or when `end_lease` is called with its number; for other hosts, which cannot see
        whether the process runs, after `seconds`. Leases of dead processes on this host are dropped. `purpose` is for
        messages.
        """
        expires = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        host = socket.gethostname()
        # A random number: a holder from before a rebuild of the catalog must not end another process's lease.
        number = secrets.randbits(62)
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

    def take_over_claims(self, present: CatalogReader) -> bool:
        """Copy reservations and leases from the catalog that this one replaces: they remain in force.

        Return False if they cannot be read.
        """
        try:
            reservations, leases = present.reservations(), present.leases()
        except CkstoreError:
            return False
        with self.transaction():
            self._connection.execute_many(
                "INSERT OR IGNORE INTO reservations VALUES (?, ?, ?, ?)",
                [(claim.number, claim.pid, claim.host, claim.created) for claim in reservations],
            )
            self._connection.execute_many(
                "INSERT OR IGNORE INTO leases (id, pid, host, created, purpose, expires) VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (claim.number, claim.pid, claim.host, claim.created, claim.purpose, claim.expires)
                    for claim in leases
                ],
            )
        return True
