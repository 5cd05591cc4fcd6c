"""How a program with open savers ends: its saves are made durable, or its exit status tells that one is not.

At SIGTERM it goes on to its next save, and ends then.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

_log = logging.getLogger("ckstore")

#: Open savers, and what closes each when the program ends. Unlike `atexit`, it also does so in a forked
#: `multiprocessing.Process`.
_savers: dict[Any, Finalize] = {}
_is_asked = False
_has_failed = False
_is_watching = False


def watch(saver: Any) -> None:
    """Close a saver when the program ends, and note SIGTERM from now on, as long as it is open.

    Only a program's main thread can note SIGTERM; where the program has its own handler, that stays.
    """
    global _is_watching
    _savers[saver] = Finalize(None, _end, (saver,), exitpriority=0)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _note)
        _is_watching = True


def is_asked() -> bool:
    """Whether SIGTERM came."""
    return _is_asked


def leave(saver: Any, error: BaseException | None) -> None:
    """Take note that a saver is closed; after the last one SIGTERM has its effect, also one that came before.

    It has none where a save failed: the error is raised, and ends the program.
    """
    global _is_watching, _has_failed
    if (finalizer := _savers.pop(saver, None)) is not None:
        finalizer.cancel()
    _has_failed |= _is_asked and error is not None
    if _savers or not _is_watching or threading.current_thread() is not threading.main_thread():
        return
    _is_watching = False
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _is_asked and not _has_failed:
            signal.raise_signal(signal.SIGTERM)


def follow() -> None:
    """Where SIGTERM came, close all savers, which ends the program; in its main thread alone.

    Raises
    ------
    CkstoreError or OSError
        A save failed: the program does not end as if it were there.
    """
    if not _is_asked or threading.current_thread() is not threading.main_thread():
        return
    failed: list[Exception] = []
    for saver in list(_savers):
        try:
            saver.close()
        except Exception as error:
            failed.append(error)
    for other in failed[1:]:
        _log.warning("Not everything was saved: %s", other)
    if failed:
        raise failed[0]


def _end(saver: Any) -> None:
    """Make durable what a program has saved that ends without closing a saver."""
    try:
        saver.close()
    except BaseException as error:  # Ctrl-C ends the wait for what is not durable yet.
        if saver._has_untold or not isinstance(error, Exception):
            _log.error("Not everything was saved, so that the program fails: %s", str(error) or type(error).__name__)
            _fail()


def _fail() -> None:
    """Let the exit status be 1; all else that a program does at its end is still done.

    Nothing that runs in the interpreter while it ends has a say in the status. The C library's `exit` calls what was
    registered last, after the interpreter is gone; another `exit` from there goes on with the rest and that status.
    """
    if parent_process() is not None:
        Finalize(None, _fail_child, exitpriority=-1000)  # After what others do at the end of such a process.
        return
    library = ctypes.CDLL(None)
    register = library["__cxa_atexit"]
    register.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    register(ctypes.cast(library.exit, ctypes.c_void_p), 1, None)


def _fail_child() -> None:
    """End a process of `multiprocessing` with 1, unless it ends with another error."""
    if sys.exception() is None:
        raise SystemExit(1)


def _note(number: int, frame: object) -> None:
    global _is_asked
    _is_asked = True


def _forget() -> None:
    """A forked process has no savers, and whoever sends it SIGTERM wants it to end."""
    global _is_watching
    _savers.clear()
    if _is_watching:
        _is_watching = False
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
