"""Packs that an ingest wrote are Zarr hierarchies that any Zarr reads where ckstore's codecs are installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import zarr

import ckstore
from ckstore.objects.identity import array_name
from ckstore.objects.records import LatticeRecord


def test_every_array_of_every_pack_reads(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(300, 1001, generator=generator)
    store = ckstore.init(tmp_path / "store")
    for step in range(3):
        values = {"w": weight, "b": weight[0].clone(), "half": weight.to(torch.bfloat16), "n": torch.arange(70_001)}
        torch.save(values, tmp_path / "file.pt")
        store.ingest(tmp_path / "file.pt", run="r", step=step)
        weight = weight + 0.01 * torch.randn(weight.shape, generator=generator)
    read = 0
    for pack in store.catalog.packs():
        with zarr.storage.ZipStore(store.path / "packs" / pack.name, mode="r") as opened:
            group = zarr.open_group(opened, mode="r")
            assert group.attrs["ckstore"]["kind"] == pack.kind
            manifest = store.resolver.manifest(pack.name)
            for slot in range(len(manifest.document["records"])):
                record = manifest.record(slot)
                array = group[array_name(record.id)]
                assert isinstance(array, zarr.Array)
                values = np.asarray(array[...])
                read += 1
                if not isinstance(record, LatticeRecord):
                    assert values.nbytes == sum(record.lengths)
                    continue
                assert values.shape == (record.count,)
                if record.kind == "linear" and record.base is None:
                    chunks = [store.reader.integers(record, chunk) for chunk in range(record.chunks)]
                    assert np.array_equal(values, np.concatenate(chunks))
                if record.context:
                    assert array.attrs["ckstore"]["order"] == "context"
    assert read >= 12
