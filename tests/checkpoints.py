"""Generated checkpoint files, the SHA-256 of each file in a directory, and stores to ingest them into."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckstore.repository import Repository
from ckstore.storage import root
from ckstore.storage.remote.bucket import ObstoreBucket

if TYPE_CHECKING:
    import torch

    from ckstore import Store

#: safetensors' names of the dtypes.
SAFETENSORS_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip

_RESTORE = """
import sys
from pathlib import Path
flush = sys.argv[3] == "flush"
if flush:
    import torch
    assert torch.set_flush_denormal(True)
import ckstore
with ckstore.open(sys.argv[1], "r") as store:
    for row in store._catalog.versions():
        store[row.number].checkout(Path(sys.argv[2], str(row.number)))
        assert not flush or (torch.tensor([1e-40]) * 1.0).item() == 0.0, "this process does not flush"
"""


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], npt.NDArray[Any]]]) -> None:
    """Write a safetensors file of (dtype, shape, array with the exact bytes to write)."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, array) in tensors.items():
        header[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def described(path: Path) -> dict[str, Any]:
    """Return the parts of a checkpoint file or directory by relative path: digests, links, modes, times of files."""
    if not path.is_dir():
        return {"": _entry(path)}
    return {str(entry.relative_to(path)): _entry(entry) for entry in sorted(path.rglob("*"))}


def _entry(path: Path) -> tuple[Any, ...]:
    if path.is_symlink():
        return "link", os.readlink(path)
    status = path.stat()
    if path.is_dir():
        return "directory", status.st_mode
    return "file", sha256(path), status.st_mode, status.st_mtime_ns


def listing(store: Path | str) -> dict[str, int]:
    """Return names (digests) and sizes of a store's packs and log records: a refused ingest changes none of them."""
    with Repository(root.place(store), "r") as repository:
        files = repository.packs.files()
        return {f"{folder}/{name}": size for folder, name, size in files if folder in ("packs", "log")}


def contents(store: Path | str) -> dict[str, tuple[Any, bytes]]:
    """Return names, times and bytes of all files in a store's directory, or in its part of a bucket."""
    place = root.place(store)
    if isinstance(place, str):
        bucket = ObstoreBucket(place, {})
        return {item.name: (item.modified, bucket.read(item.name)) for item in bucket.list("")}
    return {
        str(entry.relative_to(place)): (entry.stat().st_mtime_ns, entry.read_bytes() if entry.is_file() else b"")
        for entry in sorted(place.rglob("*"))
    }


def lose_catalog(store: Path | str) -> None:
    """Remove the index of a store, or of its mirror."""
    with Repository(root.place(store), "r") as repository:
        path = repository.path
    (path / "catalog.sqlite").unlink()


def packs_of(store: Path | str) -> list[str]:
    """Return the names of a store's packs, in order."""
    return sorted(name.removeprefix("packs/") for name in listing(store) if name.startswith("packs/"))


def pack_bytes(store: Path | str) -> int:
    """Return the bytes of all files in a store's pack directory."""
    return sum(size for name, size in listing(store).items() if name.startswith("packs/"))


def present_packs(store: Store) -> dict[str, int]:
    """Return an open store's packs and their bytes, without packs kept only until readers follow."""
    found = ((name.removeprefix("packs/"), size) for name, size in listing(store.place).items() if "packs/" in name)
    return {name: size for name, size in found if name not in store._catalog.gone()}


def change_pack(store: Path | str, name: str, data: bytes | None) -> bytes:
    """Replace the bytes of a pack, or delete it; return the previous bytes."""
    with Repository(root.place(store), "r") as repository:
        pack = repository.path / "packs" / name
        if not isinstance(repository.place, str):
            before = pack.read_bytes() if pack.exists() else b""
            pack.unlink(missing_ok=True)
            if data is not None:
                pack.write_bytes(data)
            return before
        bucket = ObstoreBucket(repository.place, {})
        before = b""
        with suppress(FileNotFoundError):
            before = bucket.read(f"packs/{name}")
        bucket.delete([f"packs/{name}"])
        if data is not None:
            bucket.put(f"packs/{name}", data)
        # As on a machine that has read nothing yet.
        pack.unlink(missing_ok=True)
        shutil.rmtree(repository.path / "blocks", ignore_errors=True)
        return before


def flip(store: Path | str, pack: str, where: Callable[[int], int]) -> None:
    """Flip one bit of a pack, of the byte that `where` makes of its length."""
    data = bytearray(change_pack(store, pack, None))
    data[where(len(data))] ^= 4
    change_pack(store, pack, bytes(data))


def settled(store: Store) -> Store:
    """Return the store after its background thread has finished encoding; a run's latest versions stay hot."""
    while (encoder := store._taking()._encoder) is not None and (thread := encoder._thread) is not None:
        thread.join(0.1)
    return store


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory where there is such a file system: durability is tested elsewhere, and costs most here."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="ckstore-test-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def restored_elsewhere(store: Path | str, out: Path, *, flush: bool) -> dict[str, str]:
    """Restore all versions in another process, which may flush subnormals; return their SHA-256 by number."""
    command = [sys.executable, "-c", _RESTORE, str(store), str(out), "flush" if flush else "keep"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {path.name: sha256(path) for path in out.iterdir()}


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Return normal numbers, the same for the same seed."""
    import torch  # Programs that draw nothing start sooner without it.

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def moving(step: int) -> dict[str, torch.Tensor]:
    """Return a weight that moves a little, and a table that changes altogether."""
    import torch

    return {"w": draw(300, 256) + 1e-3 * draw(300, 256, seed=step + 1), "table": torch.arange(100_000) * (step + 1)}


def series(directory: Path, count: int) -> list[Path]:
    """Save checkpoints of one run, each with tensors on linear and on ordinal lattices."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weight, found = torch.randn(300, 300, generator=generator), []
    for step in range(count):
        found.append(directory / f"step{step}.pt")
        torch.save({"w": weight, "b": weight[0].clone(), "step": step}, found[-1])
        weight = weight + 1e-3 * torch.randn(300, 300, generator=generator)
    return found
