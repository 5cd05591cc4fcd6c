"""Names that a terminal would obey: every verb escapes them, in its output and in its errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckstore.cli.output import printable
from ckstore.cli.program import VERBS, run
from tests.cli.conftest import Ckstore

#: An escape sequence, a bell, a return to the line's start, a line break, a delete, a C1 sequence, reversed text.
EVIL = "a\x1b[31m\x07\rb\nc\x7fd\x9b2Je\u202ef\u2028g"
NAME = f"{EVIL}.pt"
#: Names of runs and tags are printable.
RUN, TAG = "gpt", "best"


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("evil")
    folder = made / f"checkpoint{EVIL}"
    folder.mkdir()
    torch.save({EVIL: torch.arange(8.0), "frozen": torch.ones(4)}, folder / NAME)
    (folder / "link").symlink_to(NAME)
    (folder / f"note{EVIL}.txt").write_text("a note")
    torch.save({EVIL: torch.arange(9.0)}, made / f"next{EVIL}.pt")
    store = ("--store", str(made / "store"))
    metric = ("--metric", f"{EVIL}=1")
    assert run(["init", str(made / "store")]) == run(["init", str(made / "other")]) == 0
    assert run([*store, "ingest", str(folder), "--run", RUN, "--step", "1", "--tag", TAG, *metric]) == 0
    assert run([*store, "ingest", str(made / f"next{EVIL}.pt"), "--run", RUN, "--step", "2"]) == 0
    return made


@pytest.fixture
def evil(_made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of such names in the working directory, and a store of two versions of them."""
    shutil.copytree(_made, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CKSTORE", "store")


def damaged(ckstore: Ckstore) -> list[tuple[object, ...]]:
    """Remove the packs; return verbs that fail then."""
    shutil.rmtree("store/packs")
    return [("verify",), ("checkout", 1, "-o", "out"), ("recover",)]


def bad(ckstore: Ckstore) -> list[tuple[object, ...]]:
    """Make a folder whose only file is damaged; return verbs that refuse it."""
    path = Path(f"bad{EVIL}") / NAME
    path.parent.mkdir()
    path.write_bytes(Path(f"next{EVIL}.pt").read_bytes()[:-40])
    return [
        ("ingest", path), ("ingest", path.parent), ("watch", path.parent, "--run", RUN, "--once", "--settle", 0),
        ("ingest", path.parent, "--recursive", "--dry-run"),
    ]  # fmt: skip


CALLS: dict[str, list[tuple[object, ...]] | Callable[[Ckstore], list[tuple[object, ...]]]] = {
    "init": [("init", "store"), ("init", f"new{EVIL}")],
    "ingest": [
        ("ingest", f"next{EVIL}.pt", "--run", RUN, "--step", 3), ("ingest", f"none{EVIL}"),
        ("ingest", f"next{EVIL}.pt", "--run", RUN, "--step", 1), ("ingest", ".", "--recursive", "--dry-run"),
    ],
    "watch": bad,
    "checkout": [("checkout", RUN, "-o", NAME), ("checkout", RUN, "-o", NAME), ("checkout", "1", "--include", EVIL)],
    "log": [("log",), ("log", "--json"), ("log", f"{RUN}none")],
    "show": [("show", 1), ("show", 1, "--json"), ("show", EVIL)],
    "ls": [("ls", 1, "-l"), ("ls", 1, "--json"), ("ls", RUN), ("ls", 1, f"{EVIL}x")],
    "diff": [("diff", 1, 2), ("diff", 1, 2, "--json")],
    "tag": [("tag",), ("tag", 2, TAG), ("tag", "--json"), ("tag", "--delete", TAG), ("tag", 2, f"tag{EVIL}")],
    "metric": [("metric", 1), ("metric", 1, f"{EVIL}=2"), ("metric", 2, "--delete", EVIL)],
    "policy": [("policy", RUN, "--keep-last", 1), ("policy",), ("policy", "--apply"), ("policy", f"{RUN}{EVIL}")],
    "stats": [("stats",), ("stats", "--json")],
    "verify": damaged,
    "encode": [("encode",)],
    "thin": [("thin", RUN, "--dry-run"), ("thin", EVIL)],
    "forget": [("forget", 1, "--dry-run"), ("forget", 1)],
    "gc": [("gc",)],
    "rebase": [("rebase", RUN)],
    "push": [("push", "other", RUN), ("push", f"none{EVIL}")],
    "pull": [("pull", f"none{EVIL}")],
    "recover": [("recover",)],
    "completion": [("completion", EVIL)],
}  # fmt: skip


@pytest.mark.parametrize("verb", [*VERBS, f"none{EVIL}"])
@pytest.mark.usefixtures("evil")
def test_every_verb_escapes_control_characters(verb: str, ckstore: Ckstore) -> None:
    calls = CALLS.get(verb, [(verb,)])
    for call in calls if isinstance(calls, list) else calls(ckstore):
        done = ckstore(*call, code=None)
        said = done.out + done.err
        assert said
        assert not {character for character in said if not character.isprintable()} - {"\n"}, (call, said)
        assert "Traceback" not in said


def test_printable_characters_stay() -> None:
    assert printable("Größe – 模型 é") == "Größe – 模型 é"
    assert printable(EVIL) == r"a\x1b[31m\x07\rb\nc\x7fd\x9b2Je\u202ef\u2028g"
