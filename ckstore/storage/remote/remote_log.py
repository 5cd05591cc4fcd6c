"""The log of a remote store: one object for each change, put if absent, chained by digests.

An object holds the line of its own record, the last one, and lines of those right before it, so that a mirror that is
behind catches up with few requests: record 39 comes with 33 to 38, record 48 with 1 to 47, up to `LARGEST` bytes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from blake3 import blake3
from msgspec import Meta

from ckstore.errors import ConflictError, FormatVersionError, IntegrityError
from ckstore.storage import durable, zstd
from ckstore.storage.interface import Storage
from ckstore.storage.log_files import check_record
from ckstore.storage.remote.bucket import ForeignNameError
from ckstore.storage.remote.calls import check_calls
from ckstore.storage.remote.retries import patiently, put_or_find
from ckstore.storage.schema import FORMAT, Id, Positive, Time, check, decode, expanded_limit, fields, refuse_later

#: Largest number of records with lines in one object; most objects reach back to the last multiple of the second.
_MANY, _FEW = 256, 16
#: Largest size of the lines of older records in one object, in bytes.
LARGEST = 1 << 20
#: Number of objects of the log that are read in parallel.
_READS = 8
#: After this many lost races, a writer lists the log; first after the second.
_LISTED = 4
_LAST = 10**12 - 1
_NUMBER = re.compile("[0-9]{12}")
#: zstd's level: other writers wait while a record is written.
_LEVEL = 3

_DIGEST = 20

StoreId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
#: The type of all that states its format version, of any version.
FORMAT_FIELD = fields({"format": Positive})
_FOLLOWS = fields({"before": Id})
_RECORD = fields(
    {
        "format": Positive,
        "store": StoreId,
        "number": Annotated[int, Meta(ge=1, le=_LAST)],
        "nonce": StoreId,
        "before": Id,
        "created": Time,
        "calls": list[Any],
        "notes": list[dict[str, Any]],
    },
    {"writers": Positive},
)


@dataclass(frozen=True, slots=True)
class Head:
    """A mirror's position: number and digest of its last record; 0 and zeros before the first one."""

    number: int = 0
    digest: str = "0" * 40


class BehindError(ConflictError):
    """Another writer has put a record first.

    `records` were read after the head, in order, each with the head that it makes.
    """

    def __init__(
        self,
        message: str = "Another writer committed first; try again.",
        records: Sequence[tuple[Head, Mapping[str, Any]]] = (),
    ) -> None:
        super().__init__(message)
        self.records = records


def digest_of(line: bytes) -> str:
    """Return the digest by which the next record refers to this one."""
    return str(blake3(line).hexdigest(length=20))


class RemoteLog:
    """The log of one store, named by its id: records of a former store at the same place are refused.

    The directory `lines` caches lines for later objects.
    """

    def __init__(self, storage: Storage, store: str, lines: Path) -> None:
        self.store = store
        self._storage = storage
        self._prefix = f"log/{store}/"
        self._lines = lines
        self._listing: tuple[int, Future[list[int]]] | None = None

    def prefetch(self, number: int) -> None:
        """Start listing the log, for a mirror that begins with the record of this number."""
        pool = ThreadPoolExecutor(1)
        self._listing = number, pool.submit(self._numbers, number)
        pool.shutdown(wait=False)

    def append(
        self, head: Head, calls: Sequence[Any], notes: Sequence[Mapping[str, Any]], created: str, *, lost: int = 0
    ) -> Head:
        """Put the next record, of changes made since the time `created`; return the head that it makes.

        An existing record is read: after a lost response it may be ours, otherwise the mirror must apply it. A writer
        that has `lost` several races reads while it puts, since it will probably lose again. It may be behind by more
        than one record and never catch up; so every few races it lists the log instead.

        Raises
        ------
        BehindError
            Another record exists.
        UnreachableError
            The outcome is unknown.
        """
        nonce = secrets.token_hex(16)
        record = {
            "format": FORMAT, "store": self.store, "number": head.number + 1, "nonce": nonce, "before": head.digest,
            "created": created, "calls": calls, "notes": list(notes),
        }  # fmt: skip
        line = json.dumps(record, separators=(",", ":")).encode()  # Metrics keep their order.
        data = _packed(b"\n".join([*self._before(head), line]))
        name = self._name(head.number + 1)
        durable.checkpoint("record-put")

        lists = lost % _LISTED == 1
        reading: list[Future[list[bytes]]] = []

        def there() -> list[bytes]:
            with suppress(FileNotFoundError):  # It was put after this read.
                if reading:
                    return reading.pop().result()[-1:]
            lines = self._lines_after(head) if lists else self._lines_of(head.number + 1)[-1:]
            if not lines:
                raise FileNotFoundError(name)
            return lines

        with ThreadPoolExecutor(1) as pool:
            if lost and not lists:
                reading.append(pool.submit(self._lines_of, head.number + 1))
            found = patiently(lambda: put_or_find(self._storage, name, data, there))
        if found is not None and found[0] != line:
            raise BehindError(records=self._followed(head, found))
        durable.checkpoint("record-there")
        self._keep(head.number + 1, line)
        return Head(head.number + 1, digest_of(line))

    def after(self, head: Head) -> list[tuple[Head, dict[str, Any]]]:
        """Return the records after a head, in order, each with the head that it makes.

        Takes one request if there are none.

        Raises
        ------
        IntegrityError
            A record is damaged or missing, or another store is at this place now.
        FormatVersionError
            A record was written by a later ckstore.
        """
        return self._followed(head, self._lines_after(head))

    def between(self, known: int, head: Head) -> list[tuple[Head, dict[str, Any]]]:
        """Return the records after a number up to a head, in order, each with the head that it makes.

        Raise `IntegrityError` unless they lead to that head, or if a record is damaged or missing.
        """
        found: list[tuple[Head, dict[str, Any]]] = []
        lines = self._lines_between(known, head.number)
        # The digests in the lines lead from the head back to the first one.
        before = Head(known, self._digest_before(known, lines[0])) if lines else head
        for line in lines:
            record = _read(line, before, self.store)
            before = Head(before.number + 1, digest_of(line))
            found.append((before, record))
        if before != head:
            raise IntegrityError(f"Record {head.number} of the log is not the known one; run `ckstore recover`.")
        return found

    def _lines_after(self, head: Head) -> list[bytes]:
        """Return the lines of the records after a head."""
        listing, self._listing = self._listing, None
        is_prefetched = listing is not None and listing[0] == head.number
        numbers = listing[1].result() if listing is not None and is_prefetched else self._numbers(head.number)
        if head.number and head.number not in numbers:
            raise IntegrityError(
                f"Record {head.number} of the log is gone: the store was deleted or made again; see `ckstore recover`."
            )
        return self._lines_between(head.number, max(numbers, default=0))

    def _numbers(self, known: int) -> list[int]:
        """Return the numbers of the existing records, from a known one on."""
        # Includes the head's own record: its presence shows that the store is still the same.
        try:
            return self._reached(known, sorted(self.modified(known)))
        except ForeignNameError:
            return self._asked(known)

    def _reached(self, known: int, numbers: Sequence[int]) -> list[int]:
        """Return the numbers without stragglers: no writer leaves a gap of records that no other object contains."""
        for index, (before, number) in enumerate(pairwise((known, *numbers))):
            if number - before > _MANY and (index or not self._is_ours(number)):
                return list(numbers[:index])
        return list(numbers)

    def _is_ours(self, number: int) -> bool:
        """Return whether the object with a record's name is a record of this store."""
        try:
            record = json.loads(self._lines_of(number)[-1])
            return bool(record["number"] == number and record["store"] == self.store)
        except (IntegrityError, FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _asked(self, known: int) -> list[int]:
        """Return the known number, if its record exists, and the last number, without listing the log."""
        low, step = known, 1
        while self._is_there(low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_there(middle) else (low, middle)
        # The log does not end at a lost object: later ones may contain its line.
        last = max(filter(self._is_there, range(low + 1, low + _FEW)), default=low)
        return [number for number in sorted({known, last}) if number and self._is_there(number)]

    def _is_there(self, number: int) -> bool:
        try:
            self._storage.read(self._name(number))
        except FileNotFoundError:
            return False
        return True

    def strays(self) -> list[str]:
        """Return a sentence on names in the log that are not its records, if there are any."""
        try:
            names = [item.name for item in self._storage.list(self._prefix)]
        except ForeignNameError as error:
            return [str(error)]
        ours = {self._name(number) for number in self._numbers(0)}
        found = [name for name in names if name not in ours]
        return [f"{name} is not a record of the log, and is ignored; delete it." for name in found]

    def _followed(self, head: Head, lines: Sequence[bytes]) -> list[tuple[Head, dict[str, Any]]]:
        """Return the records of lines after a head, each with the head that it makes; cache the lines."""
        found = []
        for line in lines:
            record = _read(line, head, self.store)
            head = Head(head.number + 1, digest_of(line))
            self._keep(head.number, line)
            found.append((head, record))
        return found

    def modified(self, first: int) -> dict[int, datetime]:
        """Return the times of records by number, from `first` on, by the server's clock; ignore other names."""
        # Starts after names that begin with a dot or a slash, which clients refuse to read.
        after = self._name(first - 1) if first > 1 else f"{self._prefix}0"
        found = self._storage.list(self._prefix, after=after)
        named = ((_NUMBER.fullmatch(item.name.removeprefix(self._prefix)), item.modified) for item in found)
        return {int(match[0]): modified for match, modified in named if match}

    def _lines_between(self, known: int, last: int) -> list[bytes]:
        """Return the lines of the records after `known` up to `last`."""
        found: list[bytes] = []
        numbers = [last] if last > known else []
        while numbers and (earlier := numbers[-1] - 1 - _earlier(numbers[-1])) > known:
            numbers.append(earlier)
        with ThreadPoolExecutor(_READS) as pool:
            # This thread reads the last one: usually it is the only one, and no thread starts at a program's end.
            reading = {number: pool.submit(self._lines_of, number) for number in numbers[1:]}
            while last > known:
                try:
                    # With long lines, an object contains fewer of them than expected: read others.
                    lines = reading[last].result() if last in reading else self._lines_of(last)
                except FileNotFoundError as error:
                    raise self._lost(last) from error
                found = lines[-(last - known) :] + found
                last -= len(lines)
        return found

    def _lines_of(self, number: int) -> list[bytes]:
        """Return the lines in the object of a record, its own last; raise `FileNotFoundError`."""
        data = self._storage.read(self._name(number))
        try:
            return _unpacked(data).split(b"\n")
        except ValueError as error:
            raise self._lost(number) from error

    def _digest_before(self, number: int, line: bytes) -> str:
        """Return the digest of the record of a number, from the next one's line."""
        try:
            plain = decode(line, dict[str, Any])
            check(plain, _FOLLOWS)
        except ValueError as error:
            raise self._lost(number + 1) from error
        return str(plain["before"])

    def _lost(self, number: int) -> IntegrityError:
        return IntegrityError(f"Record {number} of the log is missing or damaged; restore {self._name(number)}.")

    def _before(self, head: Head) -> list[bytes]:
        """Return the cached lines of a head's record and of those before it that the next object includes.

        A locally damaged line must not spread: each is checked against the digest in the next one.
        """
        number, digest = head.number + 1, head.digest
        count = _earlier(number)
        found: list[bytes] = []
        filled = 0
        for earlier in range(number - 1, number - 1 - count, -1):
            try:
                line = (self._lines / f"{earlier:012d}").read_bytes()
            except OSError:
                break
            filled += len(line)
            if filled > LARGEST or digest_of(line) != digest:
                break
            digest = json.loads(line)["before"]
            found.insert(0, line)
        return found

    def _keep(self, number: int, line: bytes) -> None:
        """Cache a line; occasionally delete lines that no later object includes."""
        durable.write_cached(self._lines / f"{number:012d}", line)
        if number % _MANY == 0:
            for path in self._lines.iterdir():
                if path.name.isdigit() and int(path.name) <= number - _MANY:
                    path.unlink(missing_ok=True)

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number:012d}"


def _earlier(number: int) -> int:
    """Return the number of earlier records whose lines an object includes, if they are short."""
    return (number - 1) % (_MANY if number % _FEW == 0 else _FEW)


def _packed(data: bytes) -> bytes:
    """Return an object of the log: a digest of the rest, the length of the lines, and the lines as a zstd frame."""
    body = len(data).to_bytes(8, "little") + zstd.compress(data, _LEVEL)
    return bytes(blake3(body).digest(length=_DIGEST)) + body


def _unpacked(data: bytes) -> bytes:
    """Undo `_packed`; raise `ValueError` for a damaged object."""
    digest, body = data[:_DIGEST], data[_DIGEST:]
    length = int.from_bytes(body[:8], "little")
    if blake3(body).digest(length=_DIGEST) != digest or length > expanded_limit(len(body)):
        raise ValueError("its digest does not match its bytes")
    return zstd.expand(body[8:], length)


def _read(line: bytes, head: Head, store: str) -> dict[str, Any]:
    number = head.number + 1
    try:
        plain = decode(line, dict[str, Any])
        check(plain, FORMAT_FIELD)
        refuse_later(f"Record {number} of the log", plain["format"], FORMAT)
        check(plain, _RECORD)
        check_calls(plain["calls"])
        for note in plain["notes"]:
            check_record(note)
    except ValueError as error:
        if isinstance(error, FormatVersionError):
            raise
        raise IntegrityError(f"Record {number} of the log is damaged ({error}); restore it from a copy.") from error
    record: dict[str, Any] = plain
    if record["number"] != number or record["before"] != head.digest or record["store"] != store:
        raise IntegrityError(
            f"Record {number} of the log does not follow the known record {head.number}; run `ckstore recover`."
        )
    return record
