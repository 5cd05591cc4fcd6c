"""The log of a remote store: one object for each change, put if absent, chained by digests.

An object holds the line of its own record, the last one, and lines of those right before it, so that a mirror that was
away catches up with few requests: record 39 comes with 33 to 38, record 48 with 1 to 47, as far as `LARGEST` bytes go.
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
from typing import Any

from blake3 import blake3

from ckstore.errors import ConflictError, FormatVersionError, IntegrityError
from ckstore.storage import durable, zstd
from ckstore.storage.log import RECORD as NOTE
from ckstore.storage.remote.bucket import Bucket, ForeignNameError, patiently, put_or_find
from ckstore.storage.remote.changes import read_calls
from ckstore.storage.schema import ID, TIME, expanded_limit, fields, hexadecimal, items, read_json, whole

FORMAT = 1
#: Records that one object holds lines of at most, and of the others: those whose numbers this divides.
_MANY, _FEW = 256, 16
#: Bytes of the lines of older records in one object, at most.
LARGEST = 1 << 20
#: Objects of the log that are read at once.
_READS = 8
#: Of so many puts of a record that fail in a row, one lists the log: the second one.
_LISTED = 4
_LAST = 10**12 - 1
_NUMBER = re.compile("[0-9]{12}")
#: zstd's level: records are written in a moment in which others wait.
_LEVEL = 3

_DIGEST = 20

STORE_ID = hexadecimal(32)
RECORD = fields(
    {
        "format": whole(1),
        "store": STORE_ID,
        "number": whole(1, _LAST),
        "nonce": hexadecimal(32),
        "before": ID,
        "created": TIME,
        "calls": read_calls,
        "notes": items(NOTE),
    }
)


@dataclass(frozen=True, slots=True)
class Head:
    """How far a mirror is: number and digest of the last record that it has; 0 and zeros before the first one."""

    number: int = 0
    digest: str = "0" * 40


class BehindError(ConflictError):
    """Another writer has put a record first.

    Parameters
    ----------
    message
        One sentence.
    records
        Records behind the head, each with the head that it makes, in order, as far as they were read.
    """

    def __init__(
        self,
        message: str = "Another writer was first; try again.",
        records: Sequence[tuple[Head, Mapping[str, Any]]] = (),
    ) -> None:
        super().__init__(message)
        self.records = records


def digest_of(line: bytes) -> str:
    """What the record behind this one says of it."""
    return str(blake3(line).hexdigest(length=20))


class RemoteLog:
    """The log of one store.

    Parameters
    ----------
    bucket
        Where it lies.
    store
        The store's id: of a store that is deleted and made again, records of the former one are never taken.
    lines
        Directory that keeps lines at hand for the objects to come.
    """

    def __init__(self, bucket: Bucket, store: str, lines: Path) -> None:
        self.store = store
        self._bucket = bucket
        self._prefix = f"log/{store}/"
        self._lines = lines
        self._listing: tuple[int, Future[list[int]]] | None = None

    def foresee(self, number: int) -> None:
        """Begin to list the log, for a mirror that begins with the record of this number."""
        pool = ThreadPoolExecutor(1)
        self._listing = number, pool.submit(self._numbers, number)
        pool.shutdown(wait=False)

    def append(
        self, head: Head, calls: Sequence[Any], notes: Sequence[Mapping[str, Any]], created: str, *, lost: int = 0
    ) -> Head:
        """Put the next record, of changes that were made from the time `created` on; returns the head that it makes.

        Where one is there, it is read: it may be ours, of a put whose response was lost, and else it is the one that
        has to be applied. Who has `lost` races just before will probably lose this one, too, and reads while it puts;
        since it may be behind by more than one record, and would run after the others for ever, it lists the log now
        and then instead.

        Raises
        ------
        BehindError
            Another record is there.
        UnreachableError
            Nobody knows whether it was put.
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
            with suppress(FileNotFoundError):  # It was put after it was read.
                if reading:
                    return reading.pop().result()[-1:]
            lines = self._lines_after(head) if lists else self._lines_of(head.number + 1)[-1:]
            if not lines:
                raise FileNotFoundError(name)
            return lines

        with ThreadPoolExecutor(1) as pool:
            if lost and not lists:
                reading.append(pool.submit(self._lines_of, head.number + 1))
            found = patiently(lambda: put_or_find(self._bucket, name, data, there))
        if found is not None and found[0] != line:
            raise BehindError(records=self._followed(head, found))
        durable.checkpoint("record-there")
        self._keep(head.number + 1, line)
        return Head(head.number + 1, digest_of(line))

    def after(self, head: Head) -> list[tuple[Head, dict[str, Any]]]:
        """The records behind a head, each with the head that it makes, in order.

        One request where there are none.

        Raises
        ------
        IntegrityError
            A record is damaged or missing, or the store is another one by now.
        FormatVersionError
            A record was written by a later ckstore.
        """
        return self._followed(head, self._lines_after(head))

    def _lines_after(self, head: Head) -> list[bytes]:
        """The lines of the records behind a head."""
        listing, self._listing = self._listing, None
        is_foreseen = listing is not None and listing[0] == head.number
        numbers = listing[1].result() if listing is not None and is_foreseen else self._numbers(head.number)
        if head.number and head.number not in numbers:
            raise IntegrityError(
                f"Record {head.number} of the log is gone: the store was deleted or made again; see `ckstore recover`."
            )
        return self._lines_between(head.number, max(numbers, default=0))

    def _numbers(self, known: int) -> list[int]:
        """The numbers of the records that there are, from a known one on."""
        # From the head's own record on: that it is still there shows that the store is still the same one.
        try:
            return self._reached(known, sorted(self.modified(known)))
        except ForeignNameError:
            return self._asked(known)

    def _reached(self, known: int, numbers: Sequence[int]) -> list[int]:
        """The numbers but those far behind all others: no writer leaves a gap of records that none has the lines of."""
        for index, (before, number) in enumerate(pairwise((known, *numbers))):
            if number - before > _MANY and (index or not self._is_ours(number)):
                return list(numbers[:index])
        return list(numbers)

    def _is_ours(self, number: int) -> bool:
        """Whether what has the name of a record is one of this store."""
        try:
            record = json.loads(self._lines_of(number)[-1])
            return bool(record["number"] == number and record["store"] == self.store)
        except (IntegrityError, FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _asked(self, known: int) -> list[int]:
        """The known number, if its record is there, and that of the last record, where they cannot be listed."""
        low, step = known, 1
        while self._is_there(low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_there(middle) else (low, middle)
        # Where an object is lost, the log does not end: those behind it may have its line.
        last = max(filter(self._is_there, range(low + 1, low + _FEW)), default=low)
        return [number for number in sorted({known, last}) if number and self._is_there(number)]

    def _is_there(self, number: int) -> bool:
        try:
            patiently(lambda: self._bucket.read(self._name(number)))
        except FileNotFoundError:
            return False
        return True

    def strays(self) -> list[str]:
        """A sentence about names in the log that are not those of its records, if there are any."""
        try:
            names = [item.name for item in patiently(lambda: list(self._bucket.list(self._prefix)))]
        except ForeignNameError as error:
            return [str(error)]
        ours = {self._name(number) for number in self._numbers(0)}
        found = [name for name in names if name not in ours]
        return [f"{name} is no record of the log, and is passed over; delete it." for name in found]

    def _followed(self, head: Head, lines: Sequence[bytes]) -> list[tuple[Head, dict[str, Any]]]:
        """The records of lines behind a head, each with the head that it makes; they are kept at hand."""
        found = []
        for line in lines:
            record = _read(line, head, self.store)
            head = Head(head.number + 1, digest_of(line))
            self._keep(head.number, line)
            found.append((head, record))
        return found

    def modified(self, first: int) -> dict[int, datetime]:
        """When records were written, from a number on, by the server's clock; other names are passed over."""
        # Behind a name that begins with a dot or a slash, which clients refuse to read.
        after = self._name(first - 1) if first > 1 else f"{self._prefix}0"
        found = patiently(lambda: list(self._bucket.list(self._prefix, after=after)))
        named = ((_NUMBER.fullmatch(item.name.removeprefix(self._prefix)), item.modified) for item in found)
        return {int(match[0]): modified for match, modified in named if match}

    def _lines_between(self, known: int, last: int) -> list[bytes]:
        """The lines of the records from behind `known` to `last`."""
        found: list[bytes] = []
        numbers = [last] if last > known else []
        while numbers and (earlier := numbers[-1] - 1 - _earlier(numbers[-1])) > known:
            numbers.append(earlier)
        with ThreadPoolExecutor(_READS) as pool:
            # The last one is read here: mostly it is all, and at a program's end no thread begins any more.
            reading = {number: pool.submit(self._lines_of, number) for number in numbers[1:]}
            while last > known:
                try:
                    # Where lines are long, an object holds fewer, and others than were foreseen are read.
                    lines = reading[last].result() if last in reading else self._lines_of(last)
                except FileNotFoundError as error:
                    raise self._lost(last) from error
                found = lines[-(last - known) :] + found
                last -= len(lines)
        return found

    def _lines_of(self, number: int) -> list[bytes]:
        """The lines in the object of a record, its own last; raises `FileNotFoundError`."""
        data = patiently(lambda: self._bucket.read(self._name(number)))
        try:
            return _unpacked(data).split(b"\n")
        except (ValueError, RuntimeError) as error:
            raise self._lost(number) from error

    def _lost(self, number: int) -> IntegrityError:
        return IntegrityError(f"Record {number} of the log is missing or damaged; restore {self._name(number)}.")

    def _before(self, head: Head) -> list[bytes]:
        """Lines at hand of a head's record and those right before it that come with the next one.

        A line that was damaged here must not get to others: each is what the one behind it says.
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
        """Have a line at hand; now and then those go that no object will hold."""
        path = self._lines / f"{number:012d}"
        temporary = durable.temporary_path(self._lines)
        temporary.write_bytes(line)
        temporary.replace(path)
        if number % _MANY == 0:
            for path in self._lines.iterdir():
                if path.name.isdigit() and int(path.name) <= number - _MANY:
                    path.unlink(missing_ok=True)

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number:012d}"


def _earlier(number: int) -> int:
    """Of how many records right before it the object of a record holds the lines, as far as they are short."""
    return (number - 1) % (_MANY if number % _FEW == 0 else _FEW)


def _packed(data: bytes) -> bytes:
    """An object of the log: a digest of what follows, the length of the lines, and the lines as a zstd frame."""
    body = len(data).to_bytes(8, "little") + zstd.compress(data, _LEVEL)
    return bytes(blake3(body).digest(length=_DIGEST)) + body


def _unpacked(data: bytes) -> bytes:
    """Undo `_packed`; raises `ValueError` or `RuntimeError` for a damaged object."""
    digest, body = data[:_DIGEST], data[_DIGEST:]
    length = int.from_bytes(body[:8], "little")
    if blake3(body).digest(length=_DIGEST) != digest or length > expanded_limit(len(body)):
        raise ValueError("its digest is not that of its bytes")
    return zstd.expand(body[8:], length)


def _read(line: bytes, head: Head, store: str) -> dict[str, Any]:
    number = head.number + 1
    try:
        plain = read_json(line, fields({"format": whole(1)}))
        if plain["format"] > FORMAT:
            raise FormatVersionError(
                f"Record {number} of the log has format {plain['format']}, this ckstore reads {FORMAT}; install a later"
                " one."
            )
        RECORD([plain])
    except ValueError as error:
        if isinstance(error, FormatVersionError):
            raise
        raise IntegrityError(f"Record {number} of the log is damaged ({error}); restore it from a copy.") from error
    record: dict[str, Any] = plain
    if record["number"] != number or record["before"] != head.digest or record["store"] != store:
        raise IntegrityError(
            f"Record {number} of the log does not follow record {head.number} as it is known here; run"
            " `ckstore recover`."
        )
    return record
