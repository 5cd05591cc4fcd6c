"""Calls functions as other users, in processes forked from one that has imported all of ckstore.

The interpreter's files may be readable by root alone, so that other users could import nothing.
"""

from __future__ import annotations

import os
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, ParamSpec, TypeVar

import ckstore

P = ParamSpec("P")
T = TypeVar("T")


class User(NamedTuple):
    """A user of the system, perhaps without a name."""

    uid: int
    groups: tuple[int, ...]
    umask: int = 0o022


class Users:
    """The process that forks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def call(self, user: User, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return the result of a function of a module, called as a user; raise its error."""
        self._connection.send((user, function, arguments, named))
        result, error, trace = self._connection.recv()
        if error is not None:
            error.add_note(trace)
            raise error
        return result  # type: ignore[no-any-return]


@contextmanager
def other_users(prepare: Callable[[], object]) -> Iterator[Users]:
    """Start the process; there, `prepare` makes the imports and compilations that calls need."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, prepare))
    process.start()
    theirs.close()
    with ours:
        yield Users(ours)
    process.join()


def _serve(connection: Connection, prepare: Callable[[], object]) -> None:
    for info in pkgutil.walk_packages(ckstore.__path__, "ckstore."):
        if not info.name.startswith("ckstore.integrations") and not info.name.endswith("__main__"):
            import_module(info.name)
    prepare()
    while True:
        try:
            user, function, arguments, named = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if not child:
            connection.send(_outcome(user, function, arguments, named))
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            connection.send((None, ChildProcessError(f"{function.__name__} ended its process"), ""))


def _outcome(user: User, function: Callable[..., Any], arguments: Any, named: Any) -> tuple[Any, Any, str]:
    try:
        os.umask(user.umask)
        os.setgroups(user.groups)
        os.setgid(user.uid)
        os.setuid(user.uid)
        return function(*arguments, **named), None, ""
    except BaseException as error:
        return None, error, traceback.format_exc()
