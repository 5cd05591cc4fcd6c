"""Forks only while no other thread holds a lock of ours or imports, so that children inherit no held lock.

A child has only the thread that forked. A lock of another thread would stay held there forever, and SQLite, whose locks
belong to a process, would take the parent's locks for the child's. So a fork waits for such threads. If it waits in
vain, the child can use no store.
"""

from __future__ import annotations

import _imp
import _thread
import atexit
import concurrent.futures.thread  # noqa: F401  # Hooks run in reverse: ours waits before theirs take their locks.
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import py_object, pythonapi
from threading import RLock, get_ident
from typing import Any, Protocol
from weakref import ReferenceType, WeakMethod, ref

from ckstore.errors import CkstoreError

#: Seconds for which a fork waits, as long as a writer waits for another process's lock.
PATIENCE = 30.0
#: Seconds for which a thread yields a lock to a waiting fork, and between checks.
_GIVE_WAY, _LOOK = 0.05, 0.0005
#: Seconds to wait for an import by another thread, which a child can do without unless it imports the same module.
_IMPORT = 1.0


class _Waitable(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Lock(_thread.RLock):  # type: ignore[misc]
    """A re-entrant lock that no other thread holds when a process is forked.

    Hold it for moments only, and never while waiting for a thread that takes one. Entering and leaving are C code: an
    interrupt cannot come between taking the lock and the block.
    """

    def __init__(self) -> None:
        with _registry:
            _locks.add(ref(self, _locks.discard))

    def is_own(self) -> bool:
        """Return whether this thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]

    def renew(self) -> None:
        """Release, in a child, a lock that a thread of the parent holds."""
        self._at_fork_reinit()  # type: ignore[attr-defined]


def _patient(lock: Lock) -> bool:
    """Enter a lock while a fork waits."""
    _give_way()
    return bool(_thread.RLock.__enter__(lock))


class _Imports:
    """All imports as one lock: held while another thread imports, which would keep modules locked in a child."""

    def __init__(self) -> None:
        # Locks of modules, and their owners, that earlier forks waited for in vain: a program may run in an import.
        self._ignored: set[tuple[int, object]] = set()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        deadline = time.monotonic() + timeout
        patience = time.monotonic() + _IMPORT
        while True:
            _imp.acquire_lock()
            busy = self._busy() - self._ignored
            if not busy or patience <= time.monotonic() < deadline:
                self._ignored |= busy
                return True
            _imp.release_lock()
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK)

    def release(self) -> None:
        _imp.release_lock()

    @staticmethod
    def _busy() -> set[tuple[int, object]]:
        """Return the locks of modules that other threads hold, with their owners, while imports are held."""
        locks: dict[str, Any] = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
        own = get_ident()
        owners = {(id(lock), getattr(lock, "owner", own)) for found in list(locks.values()) if (lock := found())}
        return {(lock, owner) for lock, owner in owners if owner != own}


_locks: set[ReferenceType[Lock]] = set()
_methods: set[WeakMethod[Callable[[], None]]] = set()
#: Held while a lock is made: otherwise a fork would miss it.
_registry = RLock()
_imports = _Imports()
#: Locks of other libraries.
_foreign: list[_Waitable] = []
#: Descriptors with file locks that children must not share.
_descriptors: set[int] = set()

#: Held by the forking thread, and the locks that it holds during the fork.
_forking = RLock()
_held: list[_Waitable] = []
_is_pending = False
_is_unfit = False
_generation = 0
#: Whether this process was forked during an operation that could not pause.
_is_broken = False

_descriptors_lock = Lock()


def generation() -> int:
    """Return the number of forks between the process that imported this module and the present one."""
    return _generation


def check() -> None:
    """Raise `CkstoreError` in a process that was forked while its parent could not pause."""
    if _is_broken:
        raise CkstoreError(
            "This process was forked while its parent was using a store, so it cannot use any; start it with the method"
            " spawn or forkserver, or fork while no store is in use."
        )


def in_child(method: Callable[[], None]) -> None:
    """Call a bound method in every forked child, as long as its object lives."""
    with _registry:
        _methods.add(WeakMethod(method, _methods.discard))


def leave(inherited: object) -> None:
    """Keep an object of the parent alive forever in a child: its deletion would affect the parent."""
    pythonapi.Py_IncRef(py_object(inherited))


def open_unshared(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file whose lock, if any, children do not share; close it with `close_unshared`."""
    with _descriptors_lock:
        descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
        _descriptors.add(descriptor)
        return descriptor


def close_unshared(descriptor: int) -> None:
    """Close a descriptor of `open_unshared`."""
    with _descriptors_lock:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def _give_way() -> None:
    """Yield to a waiting fork for a moment, unless this thread holds a lock that the fork needs."""
    until = time.monotonic() + _GIVE_WAY
    if _forking._is_owned() or any(lock.is_own() for lock in _all()):  # type: ignore[attr-defined]
        return
    while _is_pending and time.monotonic() < until:
        time.sleep(_LOOK)


def _all() -> list[Lock]:
    return [lock for found in _locks.copy() if (lock := found()) is not None]


def _before() -> None:
    """Wait until this thread holds all locks."""
    global _is_pending, _is_unfit
    _forking.acquire()
    _is_unfit = True
    try:
        is_inside = any(lock.is_own() for lock in _all())
        _is_pending = True
        setattr(Lock, "__enter__", _patient)  # noqa: B010 - while a fork waits
        is_paused = _pause()
        _is_unfit = is_inside or not is_paused
    finally:
        _is_pending = False
        if "__enter__" in vars(Lock):
            del Lock.__enter__


def _pause() -> bool:
    """Take all locks; return False if some were not released in time.

    While waiting for one lock it holds no other, which prevents deadlocks.
    """
    deadline = time.monotonic() + PATIENCE
    awaited: _Waitable | None = None
    while True:
        wanted: list[_Waitable] = [_imports, _registry, *_foreign, *_all()]
        missed = None
        for lock in wanted:
            if lock is not awaited:
                if not lock.acquire(timeout=0):
                    missed = lock
                    break
                _held.append(lock)
        if missed is None:
            return True
        _give_back()
        if not missed.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _held.extend(lock for lock in wanted if lock.acquire(timeout=0))
            return False
        awaited = missed
        _held.append(missed)


def _give_back() -> None:
    while _held:
        _held.pop().release()


def _after_in_parent() -> None:
    _give_back()
    _forking.release()


def _after_in_child() -> None:
    global _forking, _registry, _generation, _is_broken
    _generation += 1
    was_fit, _is_broken = not (_is_broken or _is_unfit), True  # Until everything below is done.
    is_done = True
    for lock in _all():
        if not lock.is_own():
            lock.renew()
    while _held:
        with suppress(RuntimeError):  # Its library has renewed it in the child already.
            _held.pop().release()
    _forking, _registry = RLock(), RLock()
    for found in _methods.copy():
        method = found()
        try:
            if method is not None:
                method()
        except Exception:
            is_done = False
            logging.getLogger("ckstore").exception("A forked process could not leave an object to its parent.")
    _unshare()
    _is_broken = not (was_fit and is_done)


def _unshare() -> None:
    """Replace the descriptors with file locks: the child would keep the parent's locks, or end them."""
    if not _descriptors:
        return
    try:
        nothing = os.open(os.devnull, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        for descriptor in _descriptors:
            os.close(descriptor)
    else:
        for descriptor in _descriptors:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
    # Logging's own hook waits for this lock, and its holder may import, while the imports are held here.
    _foreign.append(logging._lock)  # type: ignore[attr-defined]
    atexit.register(_methods.clear)
