"""The saver as a program sees it: state dicts are copied, and stored by a process beside it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ckstore.errors import CkstoreError, UsageError
from ckstore.formats.torch.state_dict import OnUnknown, describe_state_dict
from ckstore.operations.request import checked_step, plain_metrics
from ckstore.runtime.collector import collection_seldom
from ckstore.saving import termination
from ckstore.saving.process import Save, Settings, start
from ckstore.saving.staging import Area, Packed

if TYPE_CHECKING:
    import subprocess

    from ckstore.operations.ingest import IngestReport
    from ckstore.repository import Address

#: One save in flight, and one that is staged.
_AREAS = 2

#: Seconds that the process gets to leave what it compacts; it may be ended at any moment.
_PATIENCE = 3.0

#: Seconds between looks whether the process is still there: others may hold the connection open.
_LOOK = 1.0

_log = logging.getLogger("ckstore")


class _Report(Future["IngestReport"]):
    """Knows whether somebody was told how the save went."""

    is_told = False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.is_told = True
        return error

    def result(self, timeout: float | None = None) -> IngestReport:
        self.exception(timeout)
        return super().result()


class Saver:
    """Stores the states of a run from a process of its own; made by `Store.saver`.

    Threads may share it; a forked process makes its own.

    Parameters
    ----------
    store
        The store's address.
    run
        Name of the run.
    workers
        Threads of the process that encode older versions while nothing is to be saved.
    nbytes
        Size of the states to come, for which memory is had at once; 0 leaves that to the first save.
    """

    def __init__(self, store: Address, run: str, workers: int, nbytes: int = 0) -> None:
        self.run = run
        self._process_id = os.getpid()
        self._areas = [Area() for _ in range(_AREAS)]
        self._free = list(self._areas)
        self._under_way: dict[int, tuple[_Report, Area]] = {}
        self._failed: list[_Report] = []
        self._number = 0
        self._error: BaseException | None = None
        self._is_gone = False
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._saving = threading.Lock()
        self._changed = threading.Condition()
        try:
            self._areas[0].reserve(nbytes)
        except CkstoreError:
            self._give_back()
            raise
        self._connection, other = Pipe()
        areas = tuple(area.descriptor for area in self._areas)
        settings = Settings(os.getpid(), other.fileno(), areas, store, run, workers)
        self._receiver = threading.Thread(
            target=self._receive, args=(settings, other), name="ckstore-saver", daemon=True
        )
        self._receiver.start()
        termination.watch(self)

    def __repr__(self) -> str:
        return f"<ckstore.Saver of {self.run}{' (closed)' if self._is_closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                raise
            _log.warning("Not everything was saved: %s", failed)

    @property
    def is_stopping(self) -> bool:
        """SIGTERM came: the next save ends the program once it is durable."""
        return termination.is_asked()

    @property
    def _has_untold(self) -> bool:
        """A save failed, no later one has raised that, and nobody has asked its future."""
        return not all(one.is_told for one in self._failed)

    # A look for garbage among all that a training has made takes a tenth of a second, and finds nothing here. What this
    # makes is gone when it returns, so that none falls due by it.
    @collection_seldom()
    def save(
        self,
        state: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        replace: bool = False,
        on_unknown: OnUnknown = "raise",
        busy: Literal["wait", "skip"] = "wait",
    ) -> Future[IngestReport]:
        """Copy a state dict, and have it stored as the run's next version while the program goes on.

        Parameters
        ----------
        state, step, metrics, replace, on_unknown
            As for `Store.ingest`. Everything may change as soon as the call returns.
        busy
            What is done while one save is in flight and a second one waits for it: `wait` until the first is durable,
            or `skip` this one.

        Returns
        -------
        Future
            Of the `IngestReport`: done when the version is durable, and not before. Cancelled where the save was
            skipped.

        Raises
        ------
        CkstoreError or OSError
            An earlier save failed, and this one was not begun; the next one will be. Where the process is gone, no
            other one will. After SIGTERM: this one failed, or one of another saver.
        UsageError
            The state dict holds what cannot be stored, step or metrics are not plain, the saver is closed, or there
            is not enough memory for a copy, or a future's callback saves; nothing was staged.
        InputError
            The state dict was changed while it was copied, by another thread.
        """
        self._check_thread()
        if busy not in ("wait", "skip"):
            raise UsageError(f"`busy` is `wait` or `skip`, not {busy!r}.")
        checked, kept = checked_step(step), plain_metrics(metrics or {})
        with self._saving:
            self._check()
            packed = Packed(describe_state_dict(state, on_unknown))
            area = self._free_area(packed.stop, wait=busy == "wait")
            if area is None:
                skipped: Future[IngestReport] = Future()
                skipped.cancel()
                skipped.set_running_or_notify_cancel()  # Else `concurrent.futures.wait` waits for it for ever.
                return skipped
            try:
                self._check()
                area.stage(packed)
            except BaseException:
                self._set_free(area)
                raise
            self._number += 1
            save = Save(
                self._number, self._areas.index(area), packed.start, packed.stop, checked, kept, replace
            )  # fmt: skip
            future = self._send(save)
        termination.follow()
        return future

    def close(self) -> None:
        """Wait until everything that was saved is durable, and end the process; closing twice is harmless.

        It happens when the program ends, too: where a save failed then, no later one has raised that and nobody has
        asked its future, the program's exit status is 1.

        Older versions of the run that are not encoded yet stay as they are, for `ckstore compact`.

        Raises
        ------
        CkstoreError or OSError
            A save failed, and no later one has raised that.
        UsageError
            A future's callback closes.
        """
        if os.getpid() != self._process_id:
            return
        self._check_thread()
        with self._saving:
            if self._is_closed:
                return
            self._is_closed = True
            with self._changed:
                self._changed.wait_for(lambda: not self._under_way)
            with suppress(OSError):  # It is gone already.
                self._connection.send(None)
            self._receiver.join(_PATIENCE)
            if self._receiver.is_alive() and self._process is not None:
                self._process.kill()
            self._receiver.join()
            self._connection.close()
            self._give_back()
            error, self._error = self._error, None
        termination.leave(self, error)
        if error is not None:
            raise error

    def _check_thread(self) -> None:
        """Raise `UsageError` in a child, and in a future's callback: the thread that calls it would wait for itself."""
        if os.getpid() != self._process_id:
            raise UsageError(
                "The saver belongs to the process that this one was forked off; make one with `Store.saver`."
            )
        if threading.current_thread() is self._receiver:
            raise UsageError("A future's callback can neither save nor close; let it tell the thread that saves.")

    def _check(self) -> None:
        """Raise what went wrong before, or what keeps the saver from saving."""
        if self._is_closed:
            raise UsageError("The saver is closed; make another one with `Store.saver`.")
        with self._changed:
            error = self._error
            if not self._is_gone:
                self._error = None
            if error is not None:
                self._failed.clear()
        if error is not None:
            raise error

    def _free_area(self, nbytes: int, *, wait: bool) -> Area | None:
        """An area with so much memory; None where there is none and nobody waits for one.

        Where there is not enough for a second one, the first one is waited for.
        """
        with self._changed:
            while True:
                for area in sorted(self._free, key=lambda one: -one.nbytes):
                    is_enough = area.nbytes >= nbytes
                    try:
                        area.reserve(nbytes)
                    except UsageError:
                        if len(self._free) == _AREAS:
                            raise
                        continue
                    self._free.remove(area)
                    break
                else:
                    if not wait:
                        return None
                    self._changed.wait()
                    continue
                break
        if not is_enough:
            area.populate()
        return area

    def _set_free(self, area: Area) -> None:
        with self._changed:
            self._free.append(area)
            self._changed.notify_all()

    def _send(self, save: Save) -> Future[IngestReport]:
        future = _Report()
        future.set_running_or_notify_cancel()
        with self._changed:
            self._under_way[save.number] = future, self._areas[save.area]
            if not self._is_gone:
                with suppress(OSError):  # The other end is gone, which the receiver finds out, too.
                    self._connection.send(save)
                return future
        self._fail_all()
        return future

    def _receive(self, settings: Settings, other: Connection) -> None:
        """Start the process and take its answers: it ends with the thread that started it."""
        try:
            self._process = start(settings)
        except OSError as error:
            self._error = CkstoreError(f"The saver's process does not start ({error}); call `Store.ingest`.")
        finally:
            other.close()
        self._areas[0].populate()
        with suppress(EOFError, OSError):
            while self._process is not None:
                while not self._connection.poll(_LOOK):
                    if self._process.poll() is not None:
                        raise EOFError
                number, answer = self._connection.recv()
                self._answer(number, answer)
        if self._process is not None:
            self._process.wait()
        self._fail_all()

    def _answer(self, number: int, answer: IngestReport | BaseException) -> None:
        """Take note that a save is done."""
        with self._changed:
            future, area = self._under_way[number]
            self._free.append(area)
            if isinstance(answer, BaseException):
                self._error = self._error or answer
                self._failed.append(future)
            self._changed.notify_all()
        try:
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        except BaseException as error:  # Futures take care of an `Exception`: `sys.exit` would end this thread.
            _log.error("A callback of a save has raised %r; the saver goes on.", error)
        with self._changed:
            del self._under_way[number]
            self._changed.notify_all()

    def _fail_all(self) -> None:
        """Take note that the process is gone: what is under way fails, and so does every other save."""
        with self._changed:
            self._is_gone = True
            left = list(self._under_way)
            if self._error is None and not (self._is_closed and not left):
                code = None if self._process is None else self._process.returncode
                self._error = CkstoreError(
                    f"The saver's process is gone (exit code {code}); saves that were not done are not in the store. "
                    "Make another saver with `Store.saver`."
                )
            self._changed.notify_all()
        for number in left:
            assert self._error is not None
            self._answer(number, self._error)

    def _give_back(self) -> None:
        for area in self._areas:
            area.close()
