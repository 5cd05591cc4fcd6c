"""The program's side of a saver: copies state dicts, and lets a separate process store them."""

from __future__ import annotations

import io
import logging
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ckstore.errors import CkstoreError, UsageError
from ckstore.formats.torch.live_state import LiveState, OnUnknown, describe_state_dict
from ckstore.runtime.arguments import checked
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.memory import available
from ckstore.saving import termination
from ckstore.saving.process import AREAS, Save, Settings, start
from ckstore.saving.staging import Area, Packed
from ckstore.scanning.inputs import require_tensors
from ckstore.writing.gradients import check_tree
from ckstore.writing.request import checked_config, checked_metrics, checked_step, plain_metrics

if TYPE_CHECKING:
    import subprocess

    from ckstore.repository import Address
    from ckstore.writing.ingest import IngestReport
    from ckstore.writing.tuning import Search

#: Seconds for the process to stop encoding; it may be killed at any moment.
_PATIENCE = 3.0

#: Seconds between checks that the process is alive: other processes may hold the connection open.
_LOOK = 1.0

_log = logging.getLogger("ckstore")


class _Report(Future["IngestReport"]):
    """A future that notes whether its outcome was queried."""

    is_told = False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.is_told = True
        return error

    def result(self, timeout: float | None = None) -> IngestReport:
        self.exception(timeout)
        return super().result()


class Saver:
    """Stores the states of a run in a separate process, while the program goes on; made by `Store.saver`.

    Threads may share a saver, forked processes may not.

    Parameters
    ----------
    store
        Address of the store.
    run
        Name of the run.
    workers
        Number of threads that encode older versions while the process is idle.
    nbytes
        Size of the expected states: their memory is allocated at once. 0 allocates at the first save.
    like
        Directory and dtype of a publisher.

    Examples
    --------
    >>> with store.saver("gpt") as saver:
    ...     for step in (400, 500):
    ...         saving = saver.save({"weight": np.zeros(8)}, step=step)
    >>> store["latest"]
    <ckstore.Version 5 gpt@500>
    """

    def __init__(
        self, store: Address, run: str, workers: int, nbytes: int = 0, like: tuple[str, str | None] | None = None
    ) -> None:
        self.run = run
        self._process_id = os.getpid()
        self._areas = [Area() for _ in range(AREAS)]
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
        memory = None if like is None else available()
        arguments = tuple(map(str, sys.argv))  # Programs set it, with numbers and paths, too.
        settings = Settings(
            os.getpid(), other.fileno(), areas, store, run, workers, like=like, memory=memory, arguments=arguments
        )
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
            _log.warning("A save failed: %s", failed)

    @property
    def is_stopping(self) -> bool:
        """Whether SIGTERM was received: the program ends once the next save is durable."""
        return termination.is_asked()

    @property
    def _has_untold(self) -> bool:
        """Return whether a failure was neither raised by a later call nor queried through its future."""
        return not all(one.is_told for one in self._failed)

    # A collection over all of a training's objects takes a tenth of a second and finds nothing here. Objects of this
    # call are freed when it returns, and trigger none.
    @collection_seldom()
    @checked()
    def save(
        self,
        state: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        config: Any = None,
        replace: bool = False,
        search: Search | None = None,
        gradients: Mapping[str, Any] | None = None,
        on_unknown: OnUnknown = "raise",
        allow_empty: bool = False,
        busy: Literal["wait", "skip"] = "wait",
    ) -> Future[IngestReport]:
        """Copy a state dict, and store it as the run's next version in the background.

        Parameters
        ----------
        state, step, metrics, config, replace, gradients, on_unknown, allow_empty
            As for `Store.ingest`; the caller may change them once the call returns.
        search
            As for `Store.ingest`. The separate process imports the evaluation, from another module than the program's
            main one.
        busy
            If one save is in flight and another is staged: `wait` until the first is durable, or `skip` this one.

        Returns
        -------
        Future
            Future of the `IngestReport`, done once the version is durable; cancelled if the save was skipped.

        Raises
        ------
        CkstoreError or OSError
            An earlier save failed; this one was not started, but the next will be, unless the process has died. After
            SIGTERM: this save or one of another saver failed.
        UsageError
            An argument is invalid or holds an unsupported object, the state holds no tensor, the process cannot import
            the evaluation, the saver is closed, memory lacks room for a copy, or a future's callback saves. Nothing was
            staged.
        InputError
            Another thread changed the state dict during the copy.

        Examples
        --------
        >>> with store.saver("gpt") as saver:
        ...     saving = saver.save({"weight": np.zeros(8)}, step=400, metrics={"val_loss": 2.6})
        >>> saving.result().version
        <ckstore.VersionRow 4 gpt@400>
        """
        self._check_thread()
        checked, kept, pickled = checked_step(step), plain_metrics(checked_metrics(metrics)), _pickled(search)
        settings = None if config is None else checked_config(config)
        with self._saving:
            self._check()
            described = describe_state_dict(state, on_unknown)
            if not allow_empty:
                require_tensors(state, described.tensors)
            packed = [Packed(described)]
            if gradients is not None:
                packed.append(Packed(_described(gradients), packed[0].stop))
            area = self._free_area(packed[-1].stop, wait=busy == "wait")
            if area is None:
                skipped: Future[IngestReport] = Future()
                skipped.cancel()
                skipped.set_running_or_notify_cancel()  # Otherwise `concurrent.futures.wait` never returns.
                return skipped
            try:
                self._check()
                for one in packed:
                    area.stage(one)
            except BaseException:
                self._set_free(area)
                raise
            self._number += 1
            (start, stop), *rest = ((one.start, one.stop) for one in packed)
            save = Save(
                self._number, self._areas.index(area), start, stop, checked, kept, settings, replace,
                rest[0] if rest else None, pickled,
            )  # fmt: skip
            future = self._send(save)
        termination.follow()
        return future

    def close(self) -> None:
        """Wait until all saves are durable, and end the process; closing twice is harmless.

        The end of the program closes its savers. Its exit status is 1 if a save failed, no later call raised that and
        the future was not queried.

        Hot versions stay hot.

        Raises
        ------
        CkstoreError or OSError
            A save failed, and no later call has raised its error.
        UsageError
            A future's callback closes the saver.

        Examples
        --------
        >>> saver = store.saver("gpt")
        >>> saving = saver.save({"weight": np.zeros(8)}, step=400)
        >>> saver.close()
        >>> saving.done()
        True
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
            with suppress(OSError):  # The process may have ended.
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
        """Raise `UsageError` in a forked child, and in a future's callback, which would wait for its own thread."""
        if os.getpid() != self._process_id:
            raise UsageError(
                "The saver belongs to the parent of this forked process; make a new one with `Store.saver`."
            )
        if threading.current_thread() is self._receiver:
            raise UsageError("A future's callback can neither save nor close; signal the thread that saves.")

    def _check(self) -> None:
        """Raise the error of an earlier save, or `UsageError` if the saver is closed."""
        if self._is_closed:
            raise UsageError("The saver is closed; make a new one with `Store.saver`.")
        with self._changed:
            error = self._error
            if not self._is_gone:
                self._error = None
            if error is not None:
                self._failed.clear()
        if error is not None:
            raise error

    def _free_area(self, nbytes: int, *, wait: bool) -> Area | None:
        """Return a free area with at least `nbytes` of memory; None if all are in use and `wait` is False.

        If memory is too short for a second area, wait for the first.
        """
        with self._changed:
            while True:
                for area in sorted(self._free, key=lambda one: -one.nbytes):
                    try:
                        area.reserve(nbytes)
                    except UsageError:
                        if len(self._free) == AREAS:
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
                with suppress(OSError):  # The receiver notices a closed connection, too.
                    self._connection.send(save)
                return future
        self._fail_all()
        return future

    def _receive(self, settings: Settings, other: Connection) -> None:
        """Start the process and receive its answers: the process ends with the thread that started it."""
        try:
            self._process = start(settings)
        except OSError as error:
            self._error = CkstoreError(f"The saver's process could not start ({error}); call `Store.ingest`.")
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
        """Record the outcome of a save."""
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
        except BaseException as error:  # Futures handle an `Exception`, but `sys.exit` would end this thread.
            _log.error("The callback of a save raised %r; the saver goes on.", error)
        with self._changed:
            del self._under_way[number]
            self._changed.notify_all()
        if not self._is_closed and not self._is_gone:
            area.populate()  # Later saves copy faster into mapped pages.

    def _fail_all(self) -> None:
        """Record that the process has died: all saves in flight fail, and all later ones."""
        with self._changed:
            self._is_gone = True
            left = list(self._under_way)
            if self._error is None and not (self._is_closed and not left):
                code = None if self._process is None else self._process.returncode
                self._error = CkstoreError(
                    f"The saver's process has died (exit code {code}); its unfinished saves are not in the store. "
                    "Make a new saver with `Store.saver`."
                )
            self._changed.notify_all()
        for number in left:
            assert self._error is not None
            self._answer(number, self._error)

    def _give_back(self) -> None:
        for area in self._areas:
            area.close()


def _described(gradients: Mapping[str, Any]) -> LiveState:
    """Describe gradients; raise `UsageError` for anything but tensors."""
    if isinstance(gradients, str | os.PathLike):
        raise UsageError("A saver takes gradients in memory, by path; give their file to `Store.ingest`.")
    described = describe_state_dict(gradients, "pickle")
    check_tree(described.tree)
    return described


class _Pickler(pickle.Pickler):
    """Pickles objects that another process can import."""

    def reducer_override(self, node: Any) -> Any:
        if getattr(node, "__module__", None) == "__main__":
            raise pickle.PicklingError(f"{getattr(node, '__qualname__', node)} is part of the main module")
        return NotImplemented


def _pickled(search: Search | None) -> bytes | None:
    """Return a search for the process; raise `UsageError` if that cannot import its evaluation."""
    if search is None:
        return None
    text = io.BytesIO()
    try:
        _Pickler(text).dump(search)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"The saver's process cannot import the evaluation ({error}); give a function of a module, or `search` to"
            " `Store.ingest`."
        ) from error
    return text.getvalue()
