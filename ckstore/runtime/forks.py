"""Forks only while no other thread holds a lock of ours, compiles or imports, so that children inherit no held lock.

A child has only the thread that forked. A lock of another thread would stay held there forever, and SQLite, whose locks
belong to a process, would take the parent's locks for the child's. So a fork waits for such threads. If it waits in
vain, the child can use no store.
"""

from __future__ import annotations

import _imp
import concurrent.futures.thread  # noqa: F401  # Hooks run in reverse: ours waits before theirs take their locks.
import logging  # noqa: F401
import os
import sys
import time
from collections.abc import Callable
from ctypes import py_object, pythonapi
from threading import RLock, get_ident
from typing import Any, Protocol
from weakref import ReferenceType, WeakMethod, ref

from ckstore.errors import CkstoreError

#: Seconds for which a fork waits, as long as a writer waits for another process's lock.
PATIENCE = 30.0
#: Seconds for which a thread yields a lock to a waiting fork, and between checks.
_GIVE_WAY, _LOOK = 0.05, 0.0005


class _Waitable(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Lock:
    """A re-entrant lock that no other thread holds when a process is forked.

    Hold it for moments only, and never while waiting for a thread that takes one.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = RLock()
        with _registry:
            _locks.add(ref(self, _locks.discard))

    def __enter__(self) -> None:
        if _is_pending:
            _give_way()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, as with `threading.RLock`."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Release the lock, as with `threading.RLock`."""
        self._lock.release()

    def is_own(self) -> bool:
        """Return whether this thread holds the lock."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def renew(self) -> None:
        """Replace, in a child, a lock that a thread of the parent holds."""
        self._lock = RLock()


class _Imports:
    """All imports as one lock: held while another thread imports, which would keep modules locked in a child."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        deadline = time.monotonic() + timeout
        while True:
            _imp.acquire_lock()
            if not self._is_busy():
                return True
            _imp.release_lock()
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK)

    def release(self) -> None:
        _imp.release_lock()

    @staticmethod
    def _is_busy() -> bool:
        """Return whether another thread holds a module's lock; call with the global import lock held."""
        locks: dict[str, Any] = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
        own = get_ident()
        return any(getattr(found(), "owner", own) != own for found in list(locks.values()))


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


def wait_for(lock: _Waitable) -> None:
    """Make forks wait for a lock of another library, too; the lock must live as long as the process."""
    _foreign.append(lock)


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
        is_paused = _pause(time.monotonic() + PATIENCE)
        _is_unfit = is_inside or not is_paused
    finally:
        _is_pending = False


def _pause(deadline: float) -> bool:
    """Take all locks; return False if some were not released in time.

    While waiting for one lock it holds no other, which prevents deadlocks.
    """
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
    _is_broken = _is_broken or _is_unfit
    for lock in _all():
        if not lock.is_own():
            lock.renew()
    _give_back()
    _forking, _registry = RLock(), RLock()
    if _descriptors:
        nothing = os.open(os.devnull, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        # The lock is shared with the parent: it would outlive the parent's descriptor, and unlocking would end both.
        for descriptor in _descriptors:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
    for found in _methods.copy():
        method = found()
        if method is not None:
            method()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
