"""Tasks of a job's ranks in the tests of distributed checkpoints; each rank is a process that runs this file."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckstore
from ckstore.integrations.dcp import StoreReader, StoreWriter
from tests.forked import of_ranks, run_forked
from tools.models import GPT, windows

REPOSITORY = Path(__file__).resolve().parents[1]

#: Steps at which `train` saves.
STEPS = (4, 8, 12, 16)


def run_ranks(world: int, task: str, **arguments: Any) -> None:
    """Run a task on `world` ranks and wait for them; a failure shows the rank's output."""
    asked = json.dumps([task, arguments])
    found = run_forked("torch", Path(__file__), *({**rank, "ASKED": asked} for rank in of_ranks(world)))
    assert [code for code, _ in found] == [0] * world, "\n".join(printed for _, printed in found)[-6000:]


def train(mesh: DeviceMesh, place: str) -> None:
    """Train a GPT under FSDP2; each save goes to a directory, to a file with all of it, and to a store."""
    torch.manual_seed(0)
    model = GPT(128, 3, 4, 64)
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    text = torch.tensor(list((REPOSITORY / "ckstore" / "store.py").read_bytes()))
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    for step in range(1, STEPS[-1] + 1):
        tokens = windows(text, 4, 65, generator)
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step not in STEPS:
            continue
        names = get_state_dict(model, optimizer)
        state = {"model": names[0], "optimizer": names[1], "step": step}
        dcp.save(state, checkpoint_id=f"{place}/dcp/step-{step}")
        dcp.save(state, storage_writer=StoreWriter(f"{place}/writer", "sync", step, hot=0))
        whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if mesh.get_local_rank() == 0:
            Path(place, "pt").mkdir(exist_ok=True)
            torch.save({"model": whole[0], "optimizer": whole[1], "step": step}, f"{place}/pt/step-{step}.pt")
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        writer = StoreWriter(f"{place}/writer", kind.value, step)
        saved = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        saved.result()


def save(mesh: DeviceMesh, place: str) -> None:
    """Save tensors that are cut in all ways, and objects."""
    world = mesh.size()
    torch.manual_seed(1)
    square = torch.randn(257, 300)
    state: dict[str, Any] = {
        "rows": distribute_tensor(square, mesh, [Shard(0)]),
        "columns": distribute_tensor(square, mesh, [Shard(1)]),
        "few": distribute_tensor(torch.randn(1, 4), mesh, [Shard(0)]),
        "same": distribute_tensor(torch.randn(5, 5), mesh, [Replicate()]),
        "half": distribute_tensor(torch.randn(70_000).bfloat16(), mesh, [Shard(0)]),
        "large": distribute_tensor(torch.randn(3, 1 << 21), mesh, [Shard(0)]),
        "plain": {"turned": square.T, "none": torch.zeros(0, 3), "scalar": torch.tensor(5), "flags": torch.eye(3) > 0},
        "list": [torch.ones(2), torch.zeros(2)],
        "objects": {"name": "run", "pair": (torch.arange(3), {"a": 1.5}), "step": 7},
        "step": 7,
    }
    dcp.save(state, checkpoint_id=f"{place}/cut-{world}")
    dcp.save(state, checkpoint_id=f"{place}/files-{world}",
             storage_writer=dcp.FileSystemWriter(f"{place}/files-{world}", single_file_per_rank=False))  # fmt: skip
    dcp.save(state, storage_writer=StoreWriter(f"{place}/store", "cut", world))
    tensors = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    writer = HuggingFaceStorageWriter(f"{place}/hf-{world}", save_distributed=True)
    dcp.save(tensors, storage_writer=writer, planner=DefaultSavePlanner())
    if mesh.get_local_rank() == 0:
        torch.save(state, f"{place}/local-{world}.pt")


def load(mesh: DeviceMesh, place: str, directory: str, store: str, version: str) -> None:
    """Load a version with other ranks than saved it, and with `FileSystemReader`; both are the same."""
    described = FileSystemReader(directory).read_metadata()

    def empty() -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, value in described.state_dict_metadata.items():
            if isinstance(value, TensorStorageMetadata):
                zeros = torch.zeros(value.size, dtype=value.properties.dtype)
                state[name] = distribute_tensor(zeros, mesh, [Shard(0)]) if value.size and value.size[0] else zeros
            else:
                state[name] = None
        return state

    expected, found = empty(), empty()
    dcp.load(expected, storage_reader=FileSystemReader(directory))
    dcp.load(found, storage_reader=StoreReader(store, version))
    for name, value in expected.items():
        one, other = (part.to_local() if isinstance(part, DTensor) else part for part in (value, found[name]))
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else repr(one) == repr(other)
        assert same, name
    assert len(expected) > 5


def reject(mesh: DeviceMesh, place: str) -> None:
    """Check that a live DTensor of several ranks is refused with a remedy, and leaves nothing."""
    state = {"model": {"rows": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}}
    refused = pytest.raises(
        ckstore.UsageError, match=r"model/rows is a DTensor whose parts are on 2 ranks; save with .*StoreWriter"
    )
    with ckstore.open(f"{place}/store") as store, refused:
        store.ingest(state, run="live")


def keep(mesh: DeviceMesh, place: str) -> None:
    """Check that a live DTensor of one rank is stored as it is."""
    with ckstore.open(f"{place}/store") as store:
        store.ingest({"rows": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}, run="live", step=1)


def main() -> None:
    """Run the task of one rank."""
    task, arguments = json.loads(os.environ["ASKED"])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    globals()[task](mesh, **arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
