"""Runs in place of a program that `tests.forked` forks: it passes streams and request on, and ends as that does.

It imports little, as it is started for each command.
"""

import json
import os
import socket
import sys


def ask(address, arguments, cwd, environment, streams):
    """Ask a server for a program on three streams; the connection."""
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(address)
    socket.send_fds(asking, [b"\n"], streams)
    asked = {"arguments": arguments, "cwd": str(cwd), "environment": dict(environment)}
    asking.sendall(json.dumps(asked).encode())
    asking.shutdown(socket.SHUT_WR)
    return asking


def asked(asking):
    """Read the request and the streams from a connection."""
    _, streams, _, _ = socket.recv_fds(asking, 1, 3)
    with asking.makefile("rb") as file:
        return json.load(file), streams


def exit_code(asking):
    """Return the exit code of the program that was asked for, once it has ended."""
    with asking.makefile() as file:
        return int(file.read())


if __name__ == "__main__":
    python, address, *arguments = sys.argv[1:]
    #: Options of Python that a forked program has as well.
    script = next((number for number, word in enumerate(arguments) if number and word not in ("-u", "-W", "ignore")), 0)
    if arguments[0] == "python" and not arguments[script].endswith(".py"):
        os.execv(python, [python, *arguments[1:]])
    with ask(address, arguments, os.getcwd(), os.environ, [0, 1, 2]) as asking:
        code = exit_code(asking)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
