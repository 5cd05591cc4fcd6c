"""Seconds from the save of a publisher to a follower's hook, through an object store whose answers are delayed.

Weights are bfloat16; a share of them moves with each step. Publisher and follower are processes of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import save_file

import ckstore
from ckstore.following.follow import Followed
from ckstore.saving.publisher import Publisher
from tests.fault_proxy import FaultProxy
from tests.object_store import object_store
from tools.bench.followers import cpu, moved


class Delayed(FaultProxy):
    """A proxy that delays each answer by the same time."""

    seconds = 0.03

    def fault(self, *, conditional: bool) -> str | None:
        """Delay each request."""
        return "delay"

    def delay(self) -> float:
        """Return the seconds of a delay."""
        return self.seconds


@contextmanager
def delayed(target: str) -> Iterator[str]:
    """Run the proxy in a process; yield its URL."""
    server = Delayed(target, {})
    pid = os.fork()
    if not pid:
        server.serve_forever()
    server.server_close()
    try:
        yield server.url
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def cpu_of(publisher: Publisher) -> float:
    """Return the seconds of CPU of a publisher's process."""
    assert publisher._process is not None
    fields = Path(f"/proc/{publisher._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(work: Path, megabytes: float, share: float, steps: int) -> Iterator[dict[str, float]]:
    """Publish and follow some steps; yield a row for each."""
    generator = np.random.default_rng(0)
    count = int(megabytes * 1e6) // 2 // 4096 * 4096
    weights = (generator.standard_normal(count, np.float32).view("u4") >> 16).astype(np.uint16)
    state = {f"layer.{number}": torch.empty(count // 4, dtype=torch.bfloat16) for number in range(4)}

    def fill() -> None:
        for value, part in zip(state.values(), np.split(weights, 4), strict=True):
            value.copy_(torch.from_numpy(part.view(np.int16)).view(torch.bfloat16))

    fill()
    (work / "like").mkdir()
    save_file(state, work / "like" / "model.safetensors")
    (work / "like" / "config.json").write_text(json.dumps({}))
    found: list[tuple[float, Followed]] = []
    arrived, stop = threading.Semaphore(0), threading.Event()

    def follow(url: str) -> None:
        with ckstore.open(url, "r", cache=work / "cache") as reader:
            for item in reader.follow("policy", work / "local", stop=stop):
                found.append((time.perf_counter(), item))
                arrived.release()

    with object_store() as server, delayed(server.options["endpoint"]) as proxy:
        os.environ.update(server.anywhere)
        os.environ["AWS_ENDPOINT_URL"] = proxy
        url, gb = f"{server.url}/policy", 2 * count / 1e9
        with (
            ckstore.open(url, create=True, cache=work / "trainer") as store,
            store.publish("policy", like=work / "like") as publisher,
        ):
            thread = threading.Thread(target=follow, args=(url,))
            for step in range(steps + 1):
                used = 0.0
                if step:
                    weights = moved(weights, share, generator)
                    fill()
                    used = cpu_of(publisher)
                own, start = cpu(), time.perf_counter()
                future = publisher.save(state, step=step)
                report = future.result()
                committed, saved = time.perf_counter(), cpu() - own
                if not step:
                    thread.start()
                arrived.acquire()
                at, item = found[-1]
                if step:
                    yield {
                        "seconds": round(at - start, 2), "commit": round(committed - start, 2),
                        "after the commit": round(at - committed, 2), "of it the update": round(item.seconds, 2),
                        "stored": report.version.stored_bytes, "read": item.bytes_read,
                        "publish CPU s/GB": round((cpu_of(publisher) - used + saved) / gb, 2),
                        "follow CPU s/GB": round((cpu() - own - saved) / gb, 2),
                    }  # fmt: skip
            stop.set()
            thread.join()


def main() -> None:
    """Print a row of JSON for each step."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.latencies", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=250)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory(dir=given.work) as work:
        for row in measured(Path(work), given.megabytes, given.share, given.steps):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
