"""Bytes and seconds of followers 1, 10 and 100 versions behind, next to other ways to distribute weights.

Weights are bfloat16. With each step a share of the elements, drawn at random, moves by one unit in the last place. A
chain of deltas is replayed as trainers publish it: for each version the XOR of all bytes with those of the version
before, as one zstd frame of level 1. `one patch` is the least: a patch of all elements that differ, which only this
reader could use. `hf_xet` uploads the new file next to the old one, to a directory; it sends chunks that are new.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

import ckstore
from ckstore.codecs.lattice import CHUNK
from ckstore.codecs.patches import find_changes

Weights = npt.NDArray[np.uint16]


def write(directory: Path, weights: Weights) -> None:
    """Write a model's directory of one shard."""
    directory.mkdir(exist_ok=True)
    tensors = {f"layer.{number}": part for number, part in enumerate(np.split(weights, 4))}
    header: dict[str, Any] = {}
    position = 0
    for name, part in tensors.items():
        offsets = [position, position + part.nbytes]
        header[name] = {"dtype": "BF16", "shape": [part.size // 1024, 1024], "data_offsets": offsets}
        position += part.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in tensors.values():
            file.write(part.tobytes())
    (directory / "config.json").write_text("{}")


def moved(weights: Weights, share: float, generator: np.random.Generator) -> Weights:
    """Return weights after a step."""
    after = weights.copy()
    chosen = generator.choice(weights.size, int(share * weights.size), replace=False)
    after[chosen] += generator.choice(np.array([1, 65535], np.uint16), chosen.size)
    return after


def one_patch(after: Weights, before: Weights) -> int:
    """Return the bytes of a patch of each chunk."""
    pieces = range(0, after.size, CHUNK)
    found = (find_changes(after[at : at + CHUNK], before[at : at + CHUNK], is_float=True).patch() for at in pieces)
    return sum(len(patch or b"") for patch in found)


def xet_bytes(before: Path, after: Path, work: Path) -> int:
    """Return the bytes that an upload of a file sends where another one was uploaded."""
    import hf_xet

    for path in (before, after):
        commit = hf_xet.XetSession().new_upload_commit(endpoint=f"local://{work}/xet")
        commit.start_upload_file(str(path))
        sent: int = commit.wait_to_finish().dedup_metrics.xorb_bytes_uploaded
    shutil.rmtree(work / "xet")
    return sent


def cpu() -> float:
    """Return the seconds of CPU of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(work: Path, megabytes: float, share: float, behind: list[int]) -> list[dict[str, Any]]:
    """Publish one version more than the largest number of versions behind; return a row for each number."""
    generator = np.random.default_rng(0)
    count = int(megabytes * 1e6) // 2 // 4096 * 4096
    weights = (generator.standard_normal(count, np.float32).view("u4") >> 16).astype(np.uint16)
    last = max(behind)
    frames: list[int] = []
    stored: list[int] = []
    rows = []
    kept: dict[int, Weights] = {}
    with ckstore.open(work / "store", create=True) as store:
        seconds = cpus = 0.0
        for step in range(last + 1):
            if step:
                before, weights = weights, moved(weights, share, generator)
                frames.append(len(zstandard.ZstdCompressor(level=1).compress((before ^ weights).tobytes())))
            write(work / "model", weights)
            start, used = time.perf_counter(), cpu()
            report = store.ingest(work / "model", run="policy", step=step, hot=0)
            if step:
                seconds, cpus = seconds + time.perf_counter() - start, cpus + cpu() - used
                stored.append(report.version.stored_bytes)
            if last - step in behind:
                kept[last - step] = weights
                for _ in store.follow(f"policy@{step}", work / f"behind-{last - step}", once=True):
                    pass
    full = weights.nbytes
    for number in sorted(behind):
        held = work / f"behind-{number}" / "model.safetensors"
        xet = xet_bytes(held, work / "model" / "model.safetensors", work)
        used = cpu()
        (item,) = ckstore.follow(work / "store", "policy", work / f"behind-{number}", once=True)
        rows.append(
            {
                "share": share, "behind": number, "full copy": full, "hf_xet": xet, "xor + zstd": sum(frames[-number:]),
                "one patch": one_patch(weights, kept[number]), "follow": item.bytes_read,
                "seconds": round(item.seconds, 3), "CPU s/GB": round((cpu() - used) / full * 1e9, 2),
                "publish s/GB": round(cpus / last / full * 1e9, 2),
                "bits stored": round(8 * sum(stored) / len(stored) / (share * count), 2),
            }
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    lines = [f"| {' | '.join(rows[0])} |", "| --- " * len(rows[0]) + "|"]
    lines += ["| " + " | ".join(f"{value:,}" for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="tools/bench/follow", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--shares", default="0.005,0.01,0.02,0.1")
    parser.add_argument("--behind", default="1,10,100")
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for share in map(float, given.shares.split(",")):
        with TemporaryDirectory(dir=given.work) as work:
            rows += measured(Path(work), given.megabytes, share, [int(one) for one in given.behind.split(",")])
            shutil.rmtree(Path(work) / "store")
    print(table(rows))


if __name__ == "__main__":
    main()
