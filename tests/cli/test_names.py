"""Names of runs and tags on the command line and in Python: every way in follows the one rule."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore as library
from ckstore.errors import ConflictError, UsageError
from ckstore.integrations.dcp import StoreWriter
from ckstore.integrations.lightning import StoreIO
from ckstore.integrations.torch import save
from ckstore.integrations.transformers import StoreCallback
from tests.checkpoints import listing
from tests.cli.conftest import Ckstore

BAD = ("17", "0c7a", "latest", "best:loss", "a..b", "gpt@3", "..", "-x")
STATE = {"w": np.arange(8.0)}
STORE = library.Store


def numbered(*folders: str) -> None:
    for folder in folders:
        Path(folder).mkdir(parents=True)
        for step in (50, 100):
            np.savez(f"{folder}/step{step}.npz", w=np.arange(8.0) + step + len(folder))


@pytest.mark.parametrize(
    "line",
    [
        ("ingest", "in/step10.pt", "--run={}"),
        ("ingest", "in/step10.pt", "--tag={}"),
        ("ingest", "in/step0.pt", "in/step10.pt", "--run={}", "--dry-run"),
        ("watch", "in", "--run={}", "--once"),
        ("tag", "--", "gpt@10", "{}"),
        ("policy", "--fidelity", "coarse", "--", "{}"),
    ],
    ids=" ".join,
)
def test_no_verb_makes_such_a_name(ckstore: Ckstore, filled: Path, line: tuple[str, ...]) -> None:
    before = listing(filled / ".ckstore")
    for name in BAD:
        sentence = ckstore(*[part.format(name) for part in line], code=2).sentence
        assert f"{name!r} cannot name a " in sentence
        assert "; choose another, such as " in sentence
    assert listing(filled / ".ckstore") == before


#: Each with the name of a run or a tag.
WAYS: dict[str, Callable[[STORE, Any], Any]] = {
    "ingest": lambda store, name: store.ingest(STATE, run=name),
    "ingest_many": lambda store, name: store.ingest_many("in/step10.pt", run=name),
    "ingest_many with options": lambda store, name: store.ingest_many("in/step10.pt", library.IngestOptions(run=name)),
    "ingest_many of a plan": lambda store, name: store.ingest_many(
        [library.Planned(Path("in/step10.pt"), 1, run=name)]
    ),
    "ingest_many with a tag": lambda store, name: store.ingest_many("in/step10.pt", tag=name),
    "plan": lambda store, name: store.plan("in/step10.pt", run=name),
    "watch": lambda store, name: list(store.watch("in", run=name, once=True, stop=threading.Event())),
    "saver": lambda store, name: store.saver(name),
    "tag": lambda store, name: store.tag("gpt@10", name),
    "set_policy": lambda store, name: store.set_policy(library.Policy("coarse"), name),
    "Lightning": StoreIO,
    "transformers": StoreCallback,
    "torch.distributed": StoreWriter,
}


@pytest.mark.parametrize("way", WAYS)
def test_no_method_makes_such_a_name(filled: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckstore.integrations.lightning._PARENTS", ())
    with library.open(".ckstore") as store:
        before = listing(filled / ".ckstore")
        # A plan leaves inputs without a run out.
        for name in (*BAD, *([] if way == "ingest_many of a plan" else [""]), 17, b"gpt"):
            with pytest.raises(UsageError, match=r"cannot name a |takes a text, not |is text, not "):
                WAYS[way](store, name)
        assert listing(filled / ".ckstore") == before


def test_no_name_of_a_state_makes_such_a_name(filled: Path) -> None:
    for name in ("17", "best:loss"):
        with library.open(".ckstore") as store, pytest.raises(UsageError, match="cannot name a run"):
            save({}, f"ckstore:{name}@3", store)


def test_numbered_folders_get_a_prefix(ckstore: Ckstore, place: Path) -> None:
    numbered("num/0", "num/1", "num/0c7a", "num/best:x", "num/a..b", "num/fine")
    shown = ckstore("ingest", "num", "--recursive", "--dry-run").out
    assert "num-0@50" in shown
    assert "'0' is a number and cannot name a run" in shown
    plan = ckstore("ingest", "num", "--recursive", "--dry-run", "--json").json
    assert {item["run"] for item in plan} == {"num-0", "num-1", "num-0c7a", "num-best:x", "a-b", "fine"}
    said = ckstore("ingest", "num", "--recursive").err
    assert "The run of num/0 is named num-0: '0' is a number and cannot name a run." in said
    assert "The run of num/a..b is named a-b: 'a..b' has .. and cannot name a run." in said
    assert "fine" not in said
    with library.open(".ckstore") as store:
        assert store["1"].number == 1
        assert {run.name for run in store.runs()} == {item["run"] for item in plan}
    assert "unchanged" in ckstore("ingest", "num", "--recursive").out.splitlines()[-1]


def test_a_folder_named_like_a_number_gets_a_prefix(ckstore: Ckstore, place: Path) -> None:
    numbered("0")
    assert "is named run-0: '0' is a number" in ckstore("ingest", "0", "--recursive").err


def test_a_run_and_a_tag_have_different_names(ckstore: Ckstore, filled: Path) -> None:
    before = listing(filled / ".ckstore")
    assert "gpt is a run, which a tag of that name would hide" in ckstore("tag", "gpt@10", "gpt", code=2).sentence
    for verb in ("ingest", "watch"):
        line = [verb, "in" if verb == "watch" else "in/step10.pt", "--run", "best"]
        sentence = ckstore(*line, *["--once"] * (verb == "watch"), code=2).sentence
        assert sentence == "best is a tag; choose another run, or remove the tag: `ckstore tag --delete best`."
    assert "gpt is a run" in ckstore("ingest", "in/step10.pt", "--run", "gpt", "--tag", "gpt", code=2).sentence
    assert "new is a run" in ckstore("ingest", "in/step10.pt", "--run", "new", "--tag", "new", code=2).sentence
    assert listing(filled / ".ckstore") == before


def test_a_tag_that_is_set_while_a_new_run_is_stored(filled: Path) -> None:
    with library.open(".ckstore") as store, library.open(".ckstore") as other:
        done = []

        def progress(_: int) -> None:
            if not done:
                done.append(other.tag("gpt@10", "new"))

        with pytest.raises((UsageError, ConflictError), match="new is a tag; choose another run"):
            store.ingest(STATE, run="new", hot=0, progress=progress)
        assert done
        assert [run.name for run in store.runs()] == ["gpt"]
        assert store.verify().problems == []
