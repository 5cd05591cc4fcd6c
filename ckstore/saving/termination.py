"""The end of a program with open savers: its saves become durable, or its exit status reports a failure.

After SIGTERM the program runs until its next save, then ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

_log = logging.getLogger("ckstore")

#: Open savers, and the finalizer of each. Unlike `atexit`, it also runs in a forked `multiprocessing.Process`.
_savers: dict[Any, Finalize] = {}
_asked: float | None = None
_has_failed = False
_is_watching = False


def watch(saver: Any) -> None:
    """Close a saver at the end of the program, and note SIGTERM while it is open.

    Only the program's main thread can note SIGTERM, and only if the program has no handler of its own.
    """
    global _is_watching
    _savers[saver] = Finalize(None, _end, (saver,), exitpriority=0)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _note)
        _is_watching = True


def is_watching() -> bool:
    """Return whether SIGTERM is noted."""
    return _is_watching


def is_asked() -> bool:
    """Return whether SIGTERM was received."""
    return _asked is not None


def ask() -> float:
    """Note SIGTERM, also that of another process of this job; return the time of the first one."""
    global _asked
    if _asked is None:
        _asked = time.monotonic()
    return _asked


def leave(saver: Any, error: BaseException | None) -> None:
    """Note that a saver is closed; after the last one SIGTERM regains its effect, and a noted one ends the program.

    After a failed save the noted signal is ignored: the error is raised, and ends the program.
    """
    global _is_watching, _has_failed
    if (finalizer := _savers.pop(saver, None)) is not None:
        finalizer.cancel()
    _has_failed |= is_asked() and error is not None
    if _savers or not _is_watching or threading.current_thread() is not threading.main_thread():
        return
    _is_watching = False
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if is_asked() and not _has_failed:
            signal.raise_signal(signal.SIGTERM)
            raise SystemExit(128 + signal.SIGTERM)  # The first process of a container survives the signal.


def follow() -> None:
    """Close all savers if SIGTERM was received, which ends the program; only in its main thread.

    A program of several ranks ends once all of them know.

    Raise the error of a failed save: the program must not end as if it had succeeded.
    """
    if not is_asked() or threading.current_thread() is not threading.main_thread():
        return
    if any(getattr(saver, "waits", False) for saver in _savers):
        return
    failed: list[Exception] = []
    for saver in list(_savers):
        try:
            saver.close()
        except Exception as error:
            failed.append(error)
    for other in failed[1:]:
        _log.warning("A save failed: %s", other)
    if failed:
        raise failed[0]


def _end(saver: Any) -> None:
    """Close a saver that the program left open."""
    try:
        saver.close()
    except SystemExit:
        _fail()
    except BaseException as error:  # Ctrl-C interrupts the wait for saves in flight.
        if saver._has_untold or not isinstance(error, Exception):
            _log.error("A save failed, and so does the program: %s", str(error) or type(error).__name__)
            _fail()


def _fail() -> None:
    """Set the exit status to 1, after all other finalizers of the program.

    No code inside the interpreter can set the status while it ends. The C library's `exit` calls its handlers in
    reverse order, after the interpreter; a second `exit` from a handler runs the remaining ones, and sets the status.
    """
    if parent_process() is not None:
        Finalize(None, _fail_child, exitpriority=-1000)  # After all other finalizers of the process.
        return
    library = ctypes.CDLL(None)
    register = library["__cxa_atexit"]
    register.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    register(ctypes.cast(library.exit, ctypes.c_void_p), 1, None)


def _fail_child() -> None:
    """End a process of `multiprocessing` with status 1, before Python 3.13 unless it ends with another error.

    Python 3.13 ignores errors of its finalizers, and ends the process without the C library's handlers.
    """
    if sys.version_info >= (3, 13):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    error = sys.exception()
    if error is None or (isinstance(error, SystemExit) and not error.code):
        raise SystemExit(1)


def _note(number: int, frame: object) -> None:
    ask()


def _forget() -> None:
    """Drop the savers in a forked process, so that SIGTERM ends it."""
    global _is_watching
    _savers.clear()
    if _is_watching:
        _is_watching = False
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
