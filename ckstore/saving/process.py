"""The saver's process: stores staged states, and encodes older versions of the run while idle.

`python -m ckstore.saving` reads its settings from its input, and inherits the connection and the areas. It imports
neither torch nor the program's modules.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, cast

from ckstore.errors import CkstoreError, UsageError
from ckstore.runtime.background import settle
from ckstore.runtime.memory import INGEST_BYTES
from ckstore.runtime.threads import limit_workers

#: Increase of the process's niceness, chosen with `tools/bench/speed --only saver`.
NICE = 10

#: Areas of a saver: one save in flight, and one staged.
AREAS = 2

#: Seconds between checks that the program is alive, on systems that do not end the process with its parent.
_LOOK = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the process, passed at its start.

    `parent` is the id of the program's process; `connection` and `areas` are file descriptors. `workers` counts
    encoding threads, `nice` is the increase of the process's niceness. `like` are the directory and the dtype of a
    publisher, whose versions are encoded at once, `memory` the free bytes before its first save, None if unknown.
    `arguments` are the program's, which versions name.
    """

    parent: int
    connection: int
    areas: tuple[int, ...]
    store: tuple[Any, ...]
    run: str
    workers: int
    nice: int = NICE
    like: tuple[str, str | None] | None = None
    memory: int | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Save:
    """One staged state dict and its gradients, if any: their area, and the position of the pickle of each.

    The rest are the options of the ingest; `search` is a pickle.
    """

    number: int
    area: int
    start: int
    stop: int
    step: int | None
    metrics: dict[str, Any]
    config: dict[str, Any] | None
    replace: bool
    gradients: tuple[int, int] | None
    search: bytes | None


def start(settings: Settings) -> subprocess.Popen[bytes]:
    """Start the process with this process's module path; it does not import the program's main module."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ckstore.saving"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(settings.connection, *settings.areas),
        start_new_session=True,
    )
    # All users see a command line; options of a bucket are its keys.
    with suppress(BrokenPipeError), cast("IO[bytes]", process.stdin) as stream:
        stream.write(json.dumps(asdict(settings)).encode() + b"\n")
    return process


def main() -> None:
    """Serve a program until it closes its end of the connection."""
    # A line, since a process that another thread forks at the start keeps the input open.
    settings = Settings(**json.loads(sys.stdin.buffer.readline()))
    sys.argv = list(settings.arguments)
    settle(settings.parent, settings.nice)
    limit_workers(settings.workers)
    with Connection(settings.connection) as connection, suppress(EOFError, BrokenPipeError):
        serve(settings, connection)


def serve(settings: Settings, connection: Connection) -> None:
    """Store staged states in order; send (number, report or error) once each is durable."""
    import google_crc32c  # noqa: F401 - imported early, since every save needs it

    from ckstore.commit.naming import policy_of
    from ckstore.repository import Address
    from ckstore.retention.encoder import BackgroundEncoder
    from ckstore.saving.staging import StagedStates
    from ckstore.scanning.published import Template
    from ckstore.writing.ingest import ingest
    from ckstore.writing.request import IngestOptions

    areas = [StagedStates(descriptor) for descriptor in settings.areas]
    place, options, mirrors = settings.store
    address = Address(place, tuple((name, value) for name, value in options), mirrors)
    template = None if settings.like is None else Template(Path(settings.like[0]), settings.like[1])
    nbytes = 0 if template is None else template.nbytes
    with address.open("a", cache_bytes(nbytes, settings.memory)) as repository:
        encoder = BackgroundEncoder(repository)
        saved = None
        try:
            while True:
                keep = max(1, policy_of(repository.catalog, settings.run).kept_hot)
                encoder.begin(settings.run, keep, saved)
                while not connection.poll(_LOOK):
                    if os.getppid() != settings.parent:
                        return
                save: Save | None = connection.recv()
                if save is None:
                    break
                encoder.wait(settings.run)
                encoder.pause()
                saved = None
                try:
                    area = areas[save.area]
                    options = IngestOptions(
                        settings.run, save.step, metrics=save.metrics, config=save.config, replace=save.replace,
                        hot=keep if template is None else 0, allow_empty=True,
                        search=None if save.search is None else _unpickled(save.search),
                        gradients=None if save.gradients is None else area.read(*save.gradients),
                    )  # fmt: skip
                    state = area.read(save.start, save.stop)
                    source = state if template is None else template.scanned(state)
                    answer: Any = ingest(repository, source, options)
                    saved = answer.version
                except Exception as error:
                    answer = _portable(error)
                finally:
                    encoder.resume()
                connection.send((save.number, answer))
        finally:
            encoder.close(finish=False)


def cache_bytes(nbytes: int, memory: int | None) -> int:
    """Return the limit of a cache that keeps the values of a version, against which the next is encoded.

    If memory is too short for these and two staged states, chunks are decoded again for each version.
    """
    from ckstore.encoding.estimator import KEPT
    from ckstore.repository import CACHE_BYTES

    kept = ceil(KEPT * nbytes)
    is_short = memory is not None and memory < kept + AREAS * nbytes + INGEST_BYTES
    return CACHE_BYTES + (0 if is_short else kept)


def _unpickled(search: bytes) -> Any:
    """Return a search; raise `UsageError` if its evaluation cannot be imported."""
    try:
        return pickle.loads(search)
    except Exception as error:
        raise UsageError(
            f"The saver's process cannot import the evaluation ({error}); give a function of a module on its path, or"
            " `search` to `Store.ingest`."
        ) from error


def _portable(error: Exception) -> Exception:
    """Return the error itself if it survives pickling, else an error with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return CkstoreError(f"{type(error).__name__}: {error}")
    return error
