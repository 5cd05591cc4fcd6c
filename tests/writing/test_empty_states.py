"""States and files without a tensor, as a forgotten `return` gives, are refused everywhere unless they are meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import InputError, UsageError
from ckstore.integrations.torch import load, save
from tests.checkpoints import listing

EMPTY = [None, 3, True, 2.5, {}, [], (), {"step": 3, "nested": [{"lr": 0.1}]}]


@pytest.mark.parametrize("state", EMPTY, ids=repr)
def test_a_state_without_a_tensor_is_refused(store: ckstore.Store, state: Any) -> None:
    before = listing(store.place)
    with pytest.raises(UsageError, match=r"^The state holds no tensor, it is .*`allow_empty`"):
        store.ingest(state, run="a")
    assert (len(store), listing(store.place)) == (0, before)
    store.ingest(state, run="a", step=1, allow_empty=True)
    store.encode()
    assert state is None or store["a@1"].state_dict() == state
    assert store.verify().problems == []


def test_the_message_names_what_a_function_returned(store: ckstore.Store) -> None:
    for state, said in ((None, "it is None;"), (True, "it is True;"), ({}, "it is a dict without one;")):
        with pytest.raises(UsageError, match=said):
            store.ingest(state)


def test_a_saver_refuses_it_at_once(store: ckstore.Store) -> None:
    with store.saver("a") as saver:
        for state in (None, {}, {"epoch": 3}):
            with pytest.raises(UsageError, match="holds no tensor"):
                saver.save(state, step=1)
        saver.save({"epoch": 3}, step=2, allow_empty=True).result()
        saver.save({"w": np.zeros(0)}, step=3).result()
    assert [version.step for version in store.versions("a")] == [2, 3]


def test_integrations_refuse_it(store: ckstore.Store) -> None:
    jax = pytest.importorskip("ckstore.integrations.jax")
    for state in (None, {}, []):
        with pytest.raises(UsageError, match="holds no tensor"):
            jax.save(store, state, run="a", step=1)
        with pytest.raises(UsageError, match="holds no tensor"):
            save(state, "ckstore:a@1", store)
    assert len(store) == 0


def test_integrations_store_it_if_it_is_meant(store: ckstore.Store, tmp_path: Path) -> None:
    save({"lr": 0.1}, "ckstore:torch@1", store, allow_empty=True)
    assert load("ckstore:torch@1", store) == {"lr": 0.1}
    lightning = pytest.importorskip("ckstore.integrations.lightning")
    with pytest.raises(UsageError, match="`allow_empty`"):
        lightning.StoreIO(store, "lit").save_checkpoint({"lr": 0.1}, tmp_path / "a.ckpt")
    io = lightning.StoreIO(store, "lit", allow_empty=True)
    io.save_checkpoint({"lr": 0.1}, tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt") == {"lr": 0.1}
    jax = pytest.importorskip("ckstore.integrations.jax")
    assert jax.save(store, {}, run="jax", step=1, allow_empty=True).version.step == 1


@pytest.mark.parametrize("name", ["README.md", "none.pt", "object.npy", "packed.npz", "model.bin"])
def test_a_file_without_tensors_is_refused(store: ckstore.Store, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "none.pt":
        torch.save(None, path)
    elif name == "object.npy":
        np.save(path, np.array([{}], object), allow_pickle=True)
    elif name == "packed.npz":
        np.savez_compressed(path, w=np.ones(30))
    else:
        path.write_text("# A model\n" * 20)
    with pytest.raises(InputError, match=rf"{name} holds no tensors.*`force`"):
        store.ingest(path, run="a")
    assert [item.note for item in store.plan(path) if item.refused] == [str(store.ingest_many(path)[0].error)]
    assert len(store) == 0
    store.ingest(path, run="a", force=True)
    store["a"].checkout(tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_a_file_without_tensors_is_a_part_of_a_directory(store: ckstore.Store, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "README.md").write_text("# A model\n")
    torch.save({"w": torch.ones(300)}, tmp_path / "hub" / "model.pt")
    store.ingest(tmp_path / "hub", run="a")
    store["a"].checkout(tmp_path / "back")
    assert (tmp_path / "back" / "README.md").read_text() == "# A model\n"


def test_a_file_without_bytes_is_stored_if_it_is_meant(store: ckstore.Store, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.touch()
    for options in ({}, {"force": True}):
        with pytest.raises(InputError, match=r"empty\.txt is empty"):
            store.ingest(path, run="a", **options)
    store.ingest(path, run="a", allow_empty=True)
    store.encode()
    store["a"].checkout(tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b""
    assert store.verify().problems == []
