"""What processes hold of a store in its catalog: numbers of versions that are under way, and leases."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta

from ckstore.errors import IntegrityError
from ckstore.storage import durable
from ckstore.storage.catalog_reader import CatalogReader
from ckstore.storage.schema import LIMIT

#: For how long the lease of a process on another host counts: nobody here can see whether it still runs.
LEASE_SECONDS = 7 * 24 * 3600.0


class CatalogClaims(CatalogReader):
    """A catalog in which numbers are reserved and leases held."""

    def transaction(self) -> AbstractContextManager[None]:
        """Several changes as one: `BEGIN IMMEDIATE`, then all or nothing. Every method below joins it."""
        return self._connection.transaction()

    def reserve_number(self) -> int:
        """A version number that nobody else gets, ever. Reservations of processes that are gone are dropped."""
        with self.transaction():
            host = socket.gethostname()
            for claim in self.reservations():
                if claim.host == host and not durable.is_running(claim.pid):
                    self._connection.execute("DELETE FROM reservations WHERE number = ?", [claim.number])
            # A rebuilt catalog has versions but no memory of numbers.
            self._connection.execute(
                "INSERT INTO reservations SELECT 1 + MAX(COALESCE((SELECT MAX(number) FROM versions), 0),"
                " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'reservations'), 0)), ?, ?, ?",
                [os.getpid(), host, durable.timestamp()],
            )
            number = int(self._connection.rows("SELECT last_insert_rowid()")[0][0])
            if number >= LIMIT:
                raise IntegrityError(f"The store says that it has had {number - 1} versions; run `ckstore recover`.")
            return number

    def skip_numbers(self, last: int) -> None:
        """Hand out no number up to and with `last` from now on."""
        with self.transaction():
            # An explicit number moves the table's own count on.
            self._connection.execute(
                "INSERT OR IGNORE INTO reservations VALUES (?, ?, ?, ?)",
                [last, os.getpid(), socket.gethostname(), durable.timestamp()],
            )
            self._connection.execute("DELETE FROM reservations WHERE number = ?", [last])

    def release_number(self, number: int) -> None:
        """Give up a reservation; the number is not handed out again."""
        with self.transaction():
            self._connection.execute("DELETE FROM reservations WHERE number = ?", [number])

    @contextmanager
    def lease(self, purpose: str, seconds: float = LEASE_SECONDS) -> Iterator[int]:
        """Hold a lease while the block runs: `gc` removes nothing while somebody else holds one.

        It counts for as long as the process runs, or until `end_lease` ends it with its number. Leases of processes of
        this host that are gone are dropped.

        Parameters
        ----------
        purpose : str
            What is being done, for messages.
        seconds : float
            After which the lease no longer counts on other hosts, which cannot see whether its holder runs.
        """
        expires = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        host = socket.gethostname()
        # At random: a holder that was not there when the catalog was rebuilt must not end another one's lease.
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
                # Interrupted: `gc` would wait for it as long as this process runs.
                self._give_up(number)
                raise

    def end_lease(self, number: int) -> None:
        """End a lease, with the changes that it was held for."""
        with self.transaction():
            self._connection.execute("DELETE FROM leases WHERE id = ?", [number])

    def _give_up(self, number: int) -> None:
        if self._connection.rows("SELECT 1 FROM leases WHERE id = ?", [number]):
            self.end_lease(number)

    def take_over_claims(self, present: CatalogReader) -> None:
        """Copy the reservations and leases of the catalog in whose place this one comes: their holders go on."""
        with self.transaction():
            self._connection.execute_many(
                "INSERT OR IGNORE INTO reservations VALUES (?, ?, ?, ?)",
                [(claim.number, claim.pid, claim.host, claim.created) for claim in present.reservations()],
            )
            self._connection.execute_many(
                "INSERT OR IGNORE INTO leases (id, pid, host, created, purpose, expires) VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (claim.number, claim.pid, claim.host, claim.created, claim.purpose, claim.expires)
                    for claim in present.leases()
                ],
            )
