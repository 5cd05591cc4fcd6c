"""Tasks of ranks that share nothing but a store; each rank is a process that runs this file."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckstore
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import UnreachableError
from ckstore.formats.paths import path_to_text
from ckstore.integrations import dcp as integration
from ckstore.integrations.dcp import Staging, StopSignal, StoreReader, StoreWriter
from ckstore.objects import units
from ckstore.storage import durable
from ckstore.storage.pack_reader import PackReader
from ckstore.storage.remote.remote_packs import RemotePacks
from tests.forked import of_ranks, run_forked
from tests.network import Network, enter
from tools.models import GPT, windows

#: Seconds that a rank waits for another one.
LIMIT = 8

#: The size of the parts of tensors for most tests, an eighth of the real one: the cuts are the same.
PART = 1 << 19


def run_ranks(
    world: int,
    task: str,
    place: Path,
    *,
    environment: Mapping[str, str] = {},
    hosts: int = 0,
    network: Network | None = None,
    **arguments: Any,
) -> list[Any]:
    """Run a task on ranks with directories of their own; return exit codes, outputs and results."""
    return run_jobs(place, {"node": (world, task, arguments)}, environment, hosts, network)["node"]


def run_jobs(
    place: Path,
    jobs: Mapping[str, tuple[int, str, Mapping[str, Any]]],
    environment: Mapping[str, str] = {},
    hosts: int = 0,
    network: Network | None = None,
) -> dict[str, list[Any]]:
    """Run several jobs at once, each a number of ranks, a task and its arguments.

    Of `hosts`, rank N is on host N modulo their number; the ranks of a host share a cache, otherwise each has its own.
    """
    hosts = hosts if network is None else network.hosts
    environments, files = [], []
    for name, (world, task, arguments) in jobs.items():
        for rank in of_ranks(world):
            own = place / f"{name}-{rank['RANK']}"
            own.mkdir(parents=True, exist_ok=True)
            files.append((name, own / "found"))
            files[-1][1].unlink(missing_ok=True)
            asked = json.dumps([task, {"place": str(place), **arguments}])
            cache = str(place / f"host-{int(rank['RANK']) % hosts}" if hosts else own)
            connected = {} if network is None else network.environment(int(rank["RANK"]))
            environments.append(
                {
                    **rank,
                    **connected,
                    **environment,
                    "ASKED": asked,
                    "TMPDIR": str(own),
                    "CKSTORE_CACHE": cache,
                    "OWN": str(own),
                }
            )
    found: dict[str, list[Any]] = {name: [] for name in jobs}
    ended = run_forked("torch", Path(__file__), *environments)
    for (code, printed), (name, file) in zip(ended, files, strict=True):
        found[name].append((code, printed, json.loads(file.read_text()) if file.exists() else None))
    return found


def state_of(mesh: DeviceMesh, seed: int = 1) -> dict[str, Any]:
    """Return tensors that are cut in all ways, and objects."""
    torch.manual_seed(seed)
    square = torch.randn(257, 300)
    # Four ranks are two groups of FSDP that are two ranks of tensor parallelism each, or replicas.
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) if mesh.size() == 4 else mesh
    return {
        "model": {
            "rows": distribute_tensor(square, mesh, [Shard(0)]),
            "columns": distribute_tensor(square * 2, mesh, [Shard(1)]),
            "cube": distribute_tensor(torch.randn(5, 7, 3001), mesh, [Shard(1)]),
            "few": distribute_tensor(torch.randn(1, 4), mesh, [Shard(0)]),
            "same": distribute_tensor(torch.randn(5, 5), mesh, [Replicate()]),
            "half": distribute_tensor(torch.randn(70_000).bfloat16(), mesh, [Shard(0)]),
            "large": distribute_tensor(torch.randn(3, units.PART // 2), mesh, [Shard(0)]),
            "wide": distribute_tensor(torch.randn(700, units.PART // 698), mesh, [Shard(1)]),
            "grid": distribute_tensor(torch.randn(999, units.PART // 599), grid, [Shard(0), Shard(1)][: grid.ndim]),
            "turned": distribute_tensor(torch.randn(1000, units.PART // 1025), grid, [Shard(1), Shard(0)][: grid.ndim]),
            "hybrid": distribute_tensor(torch.randn(601, 307), grid, [Replicate(), Shard(0)][: grid.ndim]),
            "biases": [distribute_tensor(torch.randn(100 + k), mesh, [Shard(0)]) for k in range(20)],
            "zeros": [distribute_tensor(torch.zeros(300, 300), mesh, [Shard(0)]) for _ in range(3)],
        },
        "plain": {"turned": square.T, "none": torch.zeros(0, 3), "scalar": torch.tensor(5), "flags": torch.eye(3) > 0},
        "complex": distribute_tensor(torch.randn(300, 300, dtype=torch.complex64), mesh, [Shard(0)]),
        "objects": {"name": "run", "pair": (torch.arange(70_000), {"a": 1.5}), "step": 7},
    }  # fmt: skip


def save(place: str, store: str, step: int = 1, seed: int = 1, **options: Any) -> dict[str, Any]:
    """Save a state; return the bytes of messages and of packs that this rank read."""
    read, sent = [0], {"objects": 0, "pieces": 0}
    pread, read_into = PackReader.pread, PackReader.read_into
    tensor_of, isend = distributed_c10d._object_to_tensor, dist.isend

    def counted(self: PackReader, pack: str, offset: int, length: int) -> bytes:
        read[0] += length if ".raw" in pack else 0
        return pread(self, pack, offset, length)

    def counted_into(self: PackReader, pack: str, offset: int, target: memoryview) -> None:
        read[0] += len(target) if ".raw" in pack else 0
        read_into(self, pack, offset, target)

    def packed(*given: Any, **named: Any) -> Any:
        tensor, size = tensor_of(*given, **named)
        sent["objects"] += tensor.numel()
        return tensor, size

    def begun(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        sent["pieces"] += tensor.numel()
        return isend(tensor, *given, **named)

    PackReader.pread, PackReader.read_into = counted, counted_into  # type: ignore[method-assign]
    distributed_c10d._object_to_tensor, dist.isend = packed, begun
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save(state_of(mesh, seed), storage_writer=StoreWriter(store, "a", step, **options))
    return {"read": read[0], **sent}


def save_apart(place: str, in_front: bool) -> dict[str, Any]:
    """Save a small state into stores that only one rank each reaches; return the error."""
    own = Path(os.environ["OWN"], "store")
    with ckstore.open(f"{place}/shared", local=own) if in_front else ckstore.init(own) as store:
        state = {f"weights{dist.get_rank()}": torch.arange(100_000.0) + dist.get_rank()}
        try:
            dcp.save(state, storage_writer=StoreWriter(store, "a", 1))
        except CheckpointException as error:
            return {"error": str(error)}
    return {}


def small_state(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """Return tensors of a megabyte that are cut in two ways."""
    torch.manual_seed(seed)
    shards = {"rows": Shard(0), "columns": Shard(1)}
    return {name: distribute_tensor(torch.randn(500, 600), mesh, [shard]) for name, shard in shards.items()}


def stage(place: str, store: str, steps: list[int], seed: int, away: bool) -> dict[str, Any]:
    """Save steps with `Staging`; with a bucket that is `away`, then die. Return versions before, and warnings."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckstore").addHandler(handler)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    there, pushed, equal = [], [], ""
    with ckstore.open(store) as opened, Staging(opened) as staging:
        there = [row.step for row in opened._catalog.versions()]
        if there:
            found = small_state(mesh, 99)
            dcp.load(found, storage_reader=StoreReader(opened, "a@latest"))
            equal = str(opened["a@latest"].compare(found))
        if away:
            RemotePacks.publish = lambda *given: unreachable()  # type: ignore[method-assign, assignment]
        for step in steps:
            writer = StoreWriter(opened, "a", step, staging=staging)
            dcp.save(small_state(mesh, seed + step), storage_writer=writer)
            if writer.pushed is not None and not away:
                pushed.append(writer.pushed.result(60).step)
        if away:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    return {"there": there, "equal": equal, "pushed": pushed, "words": words}


def unreachable() -> None:
    raise UnreachableError("The bucket is away.")


def save_without_cpu(place: str, store: str) -> dict[str, Any]:
    """Save twice with a default group that says that it is for GPUs alone; then with such a group of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state, made = state_of(mesh), []
    group, new_group = dist.new_group(backend="gloo"), dist.new_group

    def counted(*given: Any, **named: Any) -> Any:
        made.append(named)
        return new_group(*given, **named)

    dist.get_backend_config, dist.new_group = lambda group=None: "cuda:nccl", counted
    for step in (1, 2):
        dcp.save(state, storage_writer=StoreWriter(store, "a", step))
    try:
        dcp.save(state, storage_writer=StoreWriter(store, "a", 3, process_group=group), process_group=group)
    except CheckpointException as error:
        return {"made": made, "error": str(error)}
    return {}


def die(place: str, store: str, rank: int, point: str, how: str, step: int = 1) -> dict[str, Any]:
    """Save a state while one rank is killed or stopped at a point; return how long the others took, and their words."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = state_of(mesh)

    def end() -> None:
        if how == "stop":
            subprocess.Popen(["sh", "-c", f"sleep {4 * LIMIT}; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    if dist.get_rank() == rank:
        if point in ("resolve", "send", "receive"):
            owner, name = {
                "resolve": (DefaultSavePlanner, "resolve_data"),
                "send": (integration._Exchange, "send"),
                "receive": (integration._Exchange, "receive"),
            }[point]
            original, calls = getattr(owner, name), [0]

            def dying(*given: Any) -> Any:
                calls[0] += 1
                if calls[0] == 4:
                    end()
                return original(*given)

            setattr(owner, name, dying)
        elif point.startswith("after "):
            threading.Timer(float(point.removeprefix("after ")), end).start()
        elif point == "finish":
            StoreWriter.finish = lambda *given, **named: end()  # type: ignore[method-assign, assignment]
        else:
            durable.checkpoint = lambda step: end() if step == point else None
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckstore").addHandler(handler)
    began = time.monotonic()
    error = ""
    try:
        dcp.save(state, storage_writer=StoreWriter(store, "a", step, process_group=group), process_group=group)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"seconds": time.monotonic() - began, "error": error, "words": words}


def stop(place: str, store: str, rank: int, after: int) -> dict[str, Any]:
    """Train until one rank has received SIGTERM, and save; all ranks end with that signal's status."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saving = dist.new_group(backend="gloo")
    asked = []
    with (
        StopSignal(grace=60) as signalled,
        ckstore.open(store) as opened,
        opened.saver(f"own{dist.get_rank()}") as saver,
    ):
        for step in range(after + 5):
            dist.barrier()
            if dist.get_rank() == rank and step == after:
                os.kill(os.getpid(), signal.SIGTERM)
                saver.save({"w": torch.ones(3)}, step=step).result()  # Does not end this rank alone.
            asked.append(signalled.is_asked())
            if asked[-1]:
                writer = StoreWriter(store, "a", step, process_group=saving)
                pending: Any = dcp.async_save(state_of(mesh), storage_writer=writer, process_group=saving)
                pending.result(timeout=signalled.remaining)
                break
        Path(os.environ["OWN"], "found").write_text(json.dumps({"asked": asked, "remaining": signalled.remaining}))
    return {}


def made(kind: str) -> tuple[Any, Any]:
    """Return a small transformer that ranks hold in parts, and its optimiser."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(128, 2, 4, 64)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    else:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    if kind == "tp":
        for block in model.h:
            parallelize_module(block, mesh["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["a"]
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(place: str, store: str, run: str, kind: str, steps: int, **options: Any) -> dict[str, Any]:
    """Go on with a run on any mesh, and save each step; all ranks train on the same bytes."""
    saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT))
    model, optimizer = made(kind)
    text = torch.tensor(list(Path(distributed_c10d.__file__).read_bytes()))

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    first, equal, saved, error, seconds, began = 1, "", 0, "", [], time.monotonic()
    with ckstore.open(store) as opened:
        if run in opened:
            found = state(0)
            dcp.load(found, storage_reader=StoreReader(opened, f"{run}@latest"))
            set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
            first = found["step"] + 1
            equal = str(opened[f"{run}@{first - 1}"].compare(state(first - 1)))
        for step in range(first, first + steps):
            generator = torch.Generator().manual_seed(step)
            tokens = windows(text, 4, 65, generator)
            try:
                loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                Path(os.environ["OWN"], f"step-{step}").touch()
                began = time.monotonic()
                writer = StoreWriter(opened, run, step, process_group=saving, **options)
                dcp.save(state(step), storage_writer=writer, process_group=saving)
                seconds.append(time.monotonic() - began)
            except Exception as raised:
                seconds.append(time.monotonic() - began)
                error = f"{type(raised).__name__}: {raised}"[-500:]
                break
            saved = step
    return {"first": first, "equal": equal, "saved": saved, "error": error, "seconds": seconds}


def repeat(place: str, store: str) -> dict[str, Any]:
    """Train, and resume in the middle with states of all that draws numbers; return whether each rank does the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = f"rank{rank}of{world}"
    text = torch.tensor(list(Path(distributed_c10d.__file__).read_bytes()))

    def begin() -> tuple[Any, ...]:
        model, optimizer = made("fsdp")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        torch.manual_seed(rank)
        random.seed(rank)
        return model, optimizer, scheduler, np.random.default_rng(rank)

    def state(model: Any, optimizer: Any, scheduler: Any, drawn: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        draws = {"torch": torch.get_rng_state(), "python": random.getstate(), "data": drawn.bit_generator.state}
        return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), own: draws}

    def go_on(model: Any, optimizer: Any, scheduler: Any, drawn: Any) -> list[Any]:
        for _ in range(2):
            start = int(drawn.integers(1000)) + random.randrange(1000)
            tokens = text[start : start + 65][None]
            logits = torch.nn.functional.dropout(model(tokens[:, :-1]).flatten(0, 1), 0.1)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
            optimizer.step()
            scheduler.step()
        return [value.to_local().clone() for value in model.state_dict().values()]

    first = begin()
    go_on(*first)
    dcp.save(state(*first), storage_writer=StoreWriter(store, "a", 2))
    straight = go_on(*first)
    model, optimizer, scheduler, drawn = again = begin()
    found = state(*again)
    dcp.load(found, storage_reader=StoreReader(store, "a@latest"))
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    scheduler.load_state_dict(found["scheduler"])
    torch.set_rng_state(found[own]["torch"])
    random.setstate(found[own]["python"])
    drawn.bit_generator.state = found[own]["data"]
    with ckstore.open(store) as opened:
        compared = str(opened["a@latest"].compare(state(*again)))
    resumed = go_on(*again)
    equal = [torch.equal(one, other) for one, other in zip(straight, resumed, strict=True)]
    return {"equal": equal, "compared": compared}


def race(place: str, store: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Save with files and with a store in turn; return the seconds, and the memory that the saves add, of this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank())
    parts = [torch.randn(megabytes << 16) for _ in range(4)]
    state = {f"w{n}": DTensor.from_local(part, mesh, [Shard(0)]) for n, part in enumerate(parts)}
    took: dict[str, list[float]] = {"files": [], "store": []}
    memory = []
    with ckstore.open(store) as opened:
        for step in range(rounds):
            for part in parts:
                part += 1
            dist.barrier()
            began = time.monotonic()
            dcp.save(state, checkpoint_id=f"{place}/files-{step}")
            took["files"].append(time.monotonic() - began)
            Path("/proc/self/clear_refs").write_text("5")
            before = memory_of_process("VmRSS")
            dist.barrier()
            began = time.monotonic()
            dcp.save(state, storage_writer=StoreWriter(opened, "race", step, hot=rounds))
            took["store"].append(time.monotonic() - began)
            memory.append(memory_of_process("VmHWM") - before)
    return {**took, "memory": memory}


def memory_of_process(name: str) -> int:
    """Return the bytes of resident memory, present or the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


class _Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "model.large":
            raise RuntimeError("no such value")
        return super().resolve_data(write_item)


def fail(place: str, store: str, rank: int, point: str) -> dict[str, Any]:
    """Fail on one rank at a point, then save again with the same group; return the error of the first."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = state_of(mesh)
    planner = None
    fails = dist.get_rank() == rank
    checkpoint = durable.checkpoint

    def failing(step: str) -> None:
        if step == point:
            raise OSError(28, "No space left on device")

    if point == "resolve":
        planner = _Failing() if fails else DefaultSavePlanner()
    elif point == "version":
        integration.__version__ += "1" * fails
    elif fails:
        durable.checkpoint = failing
    error = ""
    try:
        dcp.save(state, storage_writer=StoreWriter(store, "a", 1), planner=planner)
    except CheckpointException as raised:
        error = str(raised)
    durable.checkpoint = checkpoint
    integration.__version__ = ckstore.__version__
    dcp.save(state, storage_writer=StoreWriter(store, "a", 2))
    return {"error": error}


def compete(place: str, store: str, seed: int) -> dict[str, Any]:
    """Save a step that another job saves at the same time; return the error."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for step in (1, 2, 3):
        error = ""
        try:
            dcp.save(state_of(mesh, seed), storage_writer=StoreWriter(store, "a", step))
        except CheckpointException as raised:
            error = str(raised)
        assert ("holds other content" in error) == bool(error), error
    return {"error": error}


def chunks_of(version: ckstore.Version, model: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return the places in packs, as (pack, offset, length), of the stored chunks of this rank's elements."""
    stored, found = version._stored, set()
    tensors: dict[tuple[Any, ...], Any] = {}
    for name, value in model.items():
        tensors |= (
            {("model", name, n): one for n, one in enumerate(value)}
            if type(value) is list
            else {("model", name): value}
        )
    for path, tensor in tensors.items():
        file, described = stored.paths[path_to_text(path)]
        whole = np.arange(tensor.numel()).reshape(tensor.shape)
        sizes, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        own = whole[tuple(slice(at, at + size) for at, size in zip(first, sizes, strict=True))].reshape(-1)
        cuts = np.flatnonzero(np.diff(own) != 1) + 1
        for run in np.split(own, cuts) if own.size else ():
            for number, chunk, _, _ in stored.contents.cover(file, described.extent, int(run[0]), int(run[-1]) + 1):
                found.add((stored.document.objects[number], chunk))
    places = []
    for identity, chunk in found:
        record = stored.repository.resolver.record(identity)
        size = record.chunk * ITEM_SIZES[record.dtype]
        places.append((record.pack, record.offset + chunk * size, min(size, record.nbytes - chunk * size)))
    return places


def load(place: str, store: str, version: str) -> dict[str, Any]:
    """Load a version of `save` and compare it."""
    fetched: list[tuple[str, int, int]] = []
    fetch = RemotePacks._fetch

    def counted(self: RemotePacks, pack: str, offset: int, length: int) -> bytes:
        fetched.append((pack, offset, length))
        return fetch(self, pack, offset, length)

    messages, tensor_of = [0], distributed_c10d._object_to_tensor

    def packed(*given: Any, **named: Any) -> Any:
        tensor, size = tensor_of(*given, **named)
        messages[0] += tensor.numel()
        return tensor, size

    RemotePacks._fetch = counted  # type: ignore[method-assign]
    distributed_c10d._object_to_tensor = packed
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected, found = state_of(mesh), state_of(mesh, 2)
    dcp.load(found, storage_reader=StoreReader(store, version))
    RemotePacks._fetch = fetch  # type: ignore[method-assign]
    for name, value in expected["model"].items():
        for one, other in zip(
            *((x if isinstance(x, list) else [x]) for x in (value, found["model"][name])), strict=True
        ):
            assert torch.equal(one.to_local(), other.to_local()), name
    with ckstore.open(store) as opened:
        needed = chunks_of(opened[version], found["model"])
        equal = opened[version].compare(found)
        part = found["model"]["large"].to_local()
        if dist.get_rank() == 1 and part.numel():
            part[0, 5] += 1
        found["model"]["columns"].to_local()[3, 0] += 1
        changed = opened[version].compare(found)
    return {"equal": [bool(equal), str(equal)], "changed": changed.differing, "needed": needed, "fetched": fetched,
            "messages": messages[0]}  # fmt: skip


def main() -> None:
    """Run the task of one rank."""
    task, arguments = json.loads(os.environ["ASKED"])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    units.PART = int(os.environ.get("PART", PART))
    if "NETNS" in os.environ:
        enter(os.environ["NETNS"])
    Path(os.environ["OWN"], "process").write_text(str(os.getpid()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = globals()[task](**arguments)
    Path(os.environ["OWN"], "found").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    if task == "die" or found.get("error"):
        threading.Event().wait(0.5)
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
