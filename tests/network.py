"""Hosts as network namespaces on one bridge, with a bucket or a directory that they share; needs root and `ip`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.object_store import ObjectStore, make_bucket, s3_of

#: Name of the bridge, and addresses: the bridge has the first one, and the server of the bucket.
_BRIDGE, _NETWORK = "ckstore0", "10.77.0"
_PORT, _MEETING = 9077, 29577

#: Large packets, so that headers add little to the bytes that are counted.
_PACKET = "65000"

#: The flag of a network namespace.
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Network:
    """Hosts by number, and a server of a bucket.

    Attributes
    ----------
    hosts
        Their number.
    server
        The process of the bucket.
    bucket
        The bucket, at the bridge.
    """

    hosts: int
    server: subprocess.Popen[bytes]
    bucket: ObjectStore

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank, which runs on the host of its number modulo that of hosts."""
        return {
            "NETNS": _host(rank % self.hosts), "MASTER_ADDR": f"{_NETWORK}.10", "MASTER_PORT": str(_MEETING),
            "GLOO_SOCKET_IFNAME": "eth0", **self.bucket.anywhere,
        }  # fmt: skip

    def received(self) -> int:
        """Return the bytes that the server has received from all hosts, with the headers of packets."""
        return int(Path(f"/sys/class/net/{_BRIDGE}/statistics/rx_bytes").read_text())

    def cut_off(self, host: int) -> None:
        """Take a host off the network."""
        _ip("link", "set", f"ckv{host}", "down")

    def reconnect(self, host: int) -> None:
        """Put a host on the network again."""
        _ip("link", "set", f"ckv{host}", "up")

    def stop_server(self, seconds: float) -> None:
        """Let the server hang for some time."""
        self.server.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.server.send_signal(signal.SIGCONT)


def enter(namespace: str) -> None:
    """Move this process, which has one thread, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Hosts and a server, which exist during the block."""
    _remove()
    try:
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{_NETWORK}.1/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "mtu", _PACKET, "up")
        for host in range(hosts):
            name = _host(host)
            _ip("netns", "add", name)
            # A server that waits for a core looks like a lost packet, which would be sent again after microseconds.
            _ip("netns", "exec", name, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_early_retrans")
            _ip("link", "add", f"ckv{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"ckv{host}", "mtu", _PACKET, "master", _BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{_NETWORK}.{10 + host}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "mtu", _PACKET, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        with _server() as (server, bucket):
            yield Network(hosts, server, bucket)
    finally:
        _remove()


@contextmanager
def _server() -> Iterator[tuple[subprocess.Popen[bytes], ObjectStore]]:
    listens: Mapping[str, str] = {"BIND_HOST": "0.0.0.0", "GATEWAY_PORT": str(_PORT), "SERVICES": "s3"}
    server = subprocess.Popen(
        [sys.executable, "-m", "ministack"], env={**os.environ, **listens},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        bucket = s3_of(f"http://{_NETWORK}.1:{_PORT}")
        make_bucket(server, bucket)
        yield server, bucket
    finally:
        server.send_signal(signal.SIGCONT)
        server.kill()
        server.wait(30)


def _host(number: int) -> str:
    return f"ckstore-{number}"


def _remove() -> None:
    for host in range(16):
        if Path(f"/run/netns/{_host(host)}").exists():
            _ip("netns", "del", _host(host))
    for link in (_BRIDGE, *(f"ckv{host}" for host in range(16))):  # A process may keep its namespace.
        if Path(f"/sys/class/net/{link}").exists():
            with suppress(subprocess.CalledProcessError):
                _ip("link", "del", link)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
