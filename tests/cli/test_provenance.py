"""The origin of versions and the configuration of trainings: kept, found, compared, and without secrets."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

import ckstore as library
from ckstore import UsageError
from ckstore.runtime import provenance
from ckstore.runtime.provenance import fitting, made, plain_config

from .conftest import Ckstore


@pytest.fixture(autouse=True)
def _with_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(provenance.VARIABLE)
    provenance._git.cache_clear()


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The commit of the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "somebody")
    git("init", "-q")
    Path("train.py").write_text("lr = 1\n")
    git("add", "train.py")
    git("commit", "-qm", "Train")
    return git("rev-parse", "HEAD")


def test_a_version_has_its_origin(store: library.Store, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the next one, for which git is not asked again."""
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "--hub-token", "abc"])
    asked: list[Any] = []
    ask = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: asked.append(given) or ask(*given, **named))
    store.ingest({"w": np.zeros(3)}, run="a", step=1)
    Path("train.py").write_text("lr = 2\n")
    store.ingest({"w": np.ones(3)}, run="a", step=2)
    assert len(asked) == 1
    for step in (1, 2):
        assert store[f"a@{step}"].made | {"host": "", "python": "", "torch": ""} == {
            "commit": commit, "dirty": False, "command": "train.py --hub-token '***'", "host": "", "python": "",
            "torch": "",
        }  # fmt: skip
        assert store[f"a@{step}"].metrics == {}
    provenance._git.cache_clear()
    assert made()["dirty"] is True
    monkeypatch.setenv(provenance.VARIABLE, "0")
    assert made() == {}


def test_a_saver_names_the_program(store: library.Store, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has a command line of its own, which all users see: no options of the store, such as credentials."""
    monkeypatch.setattr(sys, "argv", ["/lib/ckstore/__main__.py", "watch", "--hub-token", "abc"])
    with store.saver("a") as saver:
        saver.save({"w": np.zeros(3)}, step=1).result()
        assert saver._process is not None
        assert cast("list[str]", saver._process.args)[1:] == ["-P", "-m", "ckstore.saving"]
    assert store["a@1"].made["command"] == "ckstore watch --hub-token '***'"


def test_a_command_line_that_the_program_has_set(store: library.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [Path("train.py"), "--steps", 100])
    store.ingest({"w": np.zeros(3)}, run="a", step=0)
    with store.saver("a") as saver:
        saver.save({"w": np.ones(3)}, step=1).result(timeout=60)
    monkeypatch.setattr(sys, "argv", ["train\0.py"])
    with store.saver("a") as saver:
        saver.save({"w": np.ones(3)}, step=2).result(timeout=60)
    commands = [version.made["command"] for version in store.versions()]
    assert commands == ["train.py --steps 100", "train.py --steps 100", r"'train\0.py'"]


def test_an_origin_takes_few_bytes_and_no_time_of_its_own_commit(store: library.Store, commit: str) -> None:
    store.ingest({"w": np.zeros(3)}, run="a", step=1)
    assert len(json.dumps(store["a@1"].made)) < 600
    records = len(store._catalog.log_records())
    assert not store.ingest({"w": np.zeros(3)}, run="a", step=1).is_new
    assert len(store._catalog.log_records()) == records


def test_no_git_and_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "commit" not in made()
    (tmp_path / ".git").mkdir()
    provenance._git.cache_clear()
    assert "commit" not in made()
    monkeypatch.setenv("PATH", "/nonexistent")
    provenance._git.cache_clear()
    assert "commit" not in made()


@dataclass
class Arguments:
    lr: float = 1e-3
    hub_token: str | None = None
    output: Path = Path("out")


def test_configurations_of_all_kinds() -> None:
    assert plain_config(Arguments(hub_token="abc")) == {"lr": 1e-3, "output": "out"}
    assert plain_config(argparse.Namespace(lr=0.1, api_key="abc", out=Path("x"))) == {"lr": 0.1, "out": "x"}
    assert plain_config({"a": {"password": "x", "b": [{"secret": 1, "c": 2}]}}) == {"a": {"b": [{"c": 2}]}}
    assert plain_config({"db": "https://me:pw@host/x"}) == {"db": "https://***@host/x"}
    large = fitting({"lr": 0.1, "text": "x" * (1 << 15)})
    assert large == {"lr": 0.1}


@dataclass
class Tree:
    inside: Any = None
    secret: str = "abc"


class Login(NamedTuple):
    password: str
    name: str


def test_no_secret_of_an_object_inside_is_kept() -> None:
    inside = {"lr": 1e-3, "output": "out"}
    space = argparse.Namespace(token="abc", all=[Arguments(hub_token="abc")], more={"x": SimpleNamespace(my_key="abc")})
    assert plain_config(Tree([{"one": (Arguments(hub_token="abc"),)}])) == {"inside": [{"one": [inside]}]}
    assert plain_config({"space": space}) == {"space": {"all": [inside], "more": {"x": {}}}}
    held = {
        "queue": deque([Arguments(hub_token="abc")]),
        "call": partial(max, key="abc"),
        "set": {"https://a:abc@host"},
    }
    assert plain_config(held) == {"queue": "deque", "call": "partial", "set": "{'https://***@host'}"}
    assert plain_config({"login": Login("abc", "me")}) == {"login": {"name": "me"}}
    tree = Tree()
    tree.inside = [tree]
    assert plain_config(tree) == {"inside": ["Tree"]}


@pytest.mark.parametrize("levels", [70, 5000])
def test_a_configuration_in_many_levels_is_refused(store: library.Store, levels: int) -> None:
    config: dict[str, Any] = {}
    for _ in range(levels):
        config = {"inside": config}
    with pytest.raises(UsageError, match=r"`config` cannot be stored \(.*\); give plain values in few levels"):
        store.ingest({"w": np.zeros(3)}, config=config)


def test_a_configuration_is_found_and_compared(store: library.Store) -> None:
    for step, rate in ((1, 1e-3), (2, 3e-4)):
        config = {"lr": rate, "optimizer": {"name": "adamw"}}
        store.ingest({"w": np.full(3, step)}, run="a", step=step, metrics={"loss": 3.0 - step}, config=config)
    table = store.log()
    assert table.where("config.lr<5e-4 and loss<2").values("step") == [2]
    assert table.sorted_by("config.lr").values("step") == [2, 1]
    assert table.columns("step", "config.optimizer.name")[0] == {"step": 1, "config.optimizer.name": "adamw"}
    assert "config.lr" in table.to_pandas().columns
    with pytest.raises(UsageError, match=r"there are version, .*config\.lr"):
        table.values("config.rate")
    assert store["best:loss"].step == 2
    with pytest.raises(UsageError, match="up to 16,384"):
        store.ingest({"w": np.zeros(3)}, config={"text": "x" * (1 << 15)})
    with pytest.raises(UsageError, match="`config` takes a mapping"):
        store.ingest({"w": np.zeros(3)}, config=3)
    made = store.report("a")
    assert "The last version was made by " in made.to_markdown()
    assert r"lr 0.0003, optimizer {'name': 'adamw'}" in made.to_markdown()
    report = json.loads(made.to_json())
    assert report["runs"][0]["versions"][1]["config"]["lr"] == 3e-4


def test_the_command_line(ckstore: Ckstore, place: Path) -> None:
    Path("a.json").write_text('{"lr": 0.001, "seed": 1, "api_key": "secret"}')
    Path("b.yaml").write_text("lr: 0.002\nseed: 1\n")
    ckstore("ingest", "in/step0.pt", "--run", "gpt", "--config", "a.json")
    ckstore("ingest", "in/step10.pt", "--run", "gpt", "--config", "b.yaml", "--metric", "loss=2")
    said = ckstore("show", "gpt@0").out
    assert "config lr" in said
    assert "made host" in said
    assert "secret" not in said
    table = ckstore("log", "--columns", "step,config.lr").out.splitlines()
    assert [line.split() for line in table] == [["STEP", "CONFIG.LR"], ["0", "0.001"], ["10", "0.002"]]
    assert [row["step"] for row in ckstore("log", "--where", "config.lr>=0.002 and loss<3", "--json").json] == [10]
    assert "  config.lr  0.001 -> 0.002\n" in ckstore("diff", "gpt@0", "gpt@10").out
    assert "config.seed" not in ckstore("diff", "gpt@0", "gpt@10").out
    assert ckstore("metric", "gpt@10", "--json").json == [{"loss": 2}]
    Path("c.json").write_text("{")
    assert (
        "c.json cannot be read as a configuration"
        in ckstore("ingest", "in/step20.pt", "--config", "c.json", code=2).sentence
    )


def test_a_configuration_is_for_all_inputs(ckstore: Ckstore, place: Path) -> None:
    """Metrics differ between the checkpoints of a training; its configuration does not."""
    Path("a.json").write_text('{"lr": 0.001}')
    paths = ["in/step0.pt", "in/step10.pt"]
    refused = ckstore("ingest", *paths, "--run", "gpt", "--metric", "loss=2", code=2).sentence
    assert refused == "--step, --metric and --gradients are for a single checkpoint; leave them out."
    ckstore("ingest", *paths, "--run", "gpt", "--config", "a.json")
    ckstore("ingest", "in", "--recursive", "--config", "a.json")
    assert {row["config"]["lr"] for row in ckstore("log", "--json").json} == {0.001}


def test_fields_that_a_dataclass_hides_are_left_out() -> None:
    @dataclass
    class Inner:
        a: int = 1
        hidden: str = field(default="hunter2", repr=False)

    assert plain_config({"inner": Inner(), "more": [Inner(2)]}) == {"inner": {"a": 1}, "more": [{"a": 2}]}
    assert plain_config(Inner()) == {"a": 1}


def test_values_of_numpy_and_paths_are_plain() -> None:
    given = {"seed": np.int64(3), "lr": np.float32(0.5), "data": Path("/data/key=3/x"), "wide": np.longdouble(2)}
    assert plain_config(given) == {"seed": 3, "lr": 0.5, "data": "/data/key=3/x", "wide": "2.0"}


def test_long_texts_are_searched_for_secrets_once() -> None:
    """A search that began again at each letter took minutes."""
    assert len(plain_config({"x": b"a" * 200_000})["x"]) > 200_000
