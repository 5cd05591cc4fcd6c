"""SIGTERM while savers are open: the program goes on to its next save, which is made durable, and ends then."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

_log = logging.getLogger("ckstore")

_savers: set[Any] = set()
_is_asked = False
_is_watching = False


def watch(saver: Any) -> None:
    """Note SIGTERM from now on, as long as a saver is open; where the program has its own handler, that stays.

    Only a program's main thread can do so.
    """
    global _is_watching
    _savers.add(saver)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _note)
        _is_watching = True


def is_asked() -> bool:
    """Whether SIGTERM came."""
    return _is_asked


def leave(saver: Any) -> None:
    """Take note that a saver is closed; after the last one SIGTERM has its effect, also one that came before."""
    global _is_watching
    _savers.discard(saver)
    if _savers or not _is_watching or threading.current_thread() is not threading.main_thread():
        return
    _is_watching = False
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _is_asked:
            signal.raise_signal(signal.SIGTERM)


def follow() -> None:
    """Where SIGTERM came, close all savers, which ends the program; in its main thread alone."""
    if _is_asked and threading.current_thread() is threading.main_thread():
        for saver in list(_savers):
            try:
                saver.close()
            except Exception as error:
                _log.warning("Not everything was saved: %s", error)


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
