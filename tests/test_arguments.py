"""Wrong arguments of the Python API: each gives one sentence, and no error out of the depths."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.errors import CkstoreError, UsageError
from tests.checkpoints import settled

pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::ResourceWarning")]


class Anything:
    """An object that is no value of a checkpoint."""

    def __repr__(self) -> str:
        return "<anything>"


WRONG: tuple[Any, ...] = (
    None, Anything(), Anything, 3.5, -1, 0, True, 10**400, 10**5000, float("nan"), float("-inf"), "", "\0", "\ud800",
    b"x", [], {}, [Anything()], {"a": Anything()}, {1: 2}, [[]], np.zeros(2), np.float32("nan"), len, "1..x", slice(2),
)  # fmt: skip

STATE = {"w": np.arange(8.0)}

#: Calls of methods that need arguments, with good ones; all others are called without.
STORE: dict[str, dict[str, Any]] = {
    "average": {"versions": [1, 2], "target": "mean.pt", "force": True},
    "diff": {"before": 1, "after": 2},
    "follow": {"name": "a", "directory": "served", "once": True},
    "forget": {"versions": 1, "dry_run": True},
    "ingest": {"source": STATE, "run": "b", "hot": 0},
    "ingest_many": {"inputs": "a.npy", "run": "b"},
    "map": {"function": repr},
    "plan": {"paths": "a.npy"},
    "pull": {"other": None},
    "push": {"other": None},
    "retain": {},
    "rename_run": {"run": "a", "name": "b"},
    "run": {"name": "a"},
    "set_metrics": {"version": 1, "metrics": {"x": 1}},
    "set_policy": {"policy": None},
    "sign": {"version": 1, "key": "key.pem"},
    "tag": {"version": 1, "name": "x"},
    "thin": {"versions": 1, "dry_run": True},
    "untag": {"name": "x"},
    "watch": {"folders": ".", "once": True, "settle": 0.0},
}
#: Errors of these are documented: `saver` and `publish` start a process for each good value, `close` takes nothing.
LEFT = {"close"}

VERSION: dict[str, dict[str, Any]] = {
    "checkout": {"target": "out.pt", "force": True},
    "compare": {"state": {}},
    "patches": {"base": 1},
    "require_signed": {"key": "key.pem"},
    "salvage": {"target": "saved", "force": True},
    "write": {"out": None},
    "write_patch": {"base": 1, "target": "delta", "force": True},
}


def public(kind: type, left: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    return [
        name for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_" and name not in left
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two versions, and a checkpoint."""
    directory = tmp_path_factory.mktemp("arguments")
    with ckstore.init(directory / "store") as store:
        for step in (1, 2):
            store.ingest({"w": np.arange(8.0) + step}, run="a", step=step, hot=0, metrics={"loss": step})
        store.tag(2, "kept")
    np.save(directory / "a.npy", np.zeros(3))
    return directory


@pytest.fixture
def opened(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ckstore.Store]:
    import shutil

    shutil.copytree(place, tmp_path / "in")
    monkeypatch.chdir(tmp_path / "in")
    with ckstore.open("store") as store:
        yield store


#: Values that make a good call wait.
SLOW = {"settle": (3.5, 10**400, 3), "poll": ()}


def tried(call: Callable[..., Any], good: dict[str, Any], parameters: list[str]) -> list[str]:
    """Return a line for each wrong argument with another error than one of ckstore."""
    found = []
    for name in parameters:
        for wrong in WRONG:
            if isinstance(wrong, int | float | np.integer) and wrong in SLOW.get(name, ()):
                continue
            try:
                result = call(**{**good, name: wrong})
                if isinstance(result, GeneratorType | map):
                    for _ in range(3):
                        next(result, None)
                if isinstance(result, ckstore.Store | ckstore.Saver):
                    result.close()
            except CkstoreError as error:
                if "\n" in str(error) or len(str(error)) > 600:
                    found.append(f"{name}={type(wrong).__name__}: a long sentence: {str(error)[:200]}")
            except Exception as error:
                if not _is_of_the_caller(error):
                    found.append(f"{name}={_shown(wrong)}: {type(error).__name__}: {str(error)[:200]}")
    return found


def _is_of_the_caller(error: Exception) -> bool:
    """Return whether a function of the caller raised the error: `len` takes no version, and no bytes."""
    return isinstance(error, TypeError) and ("len()" in str(error) or "Anything()" in str(error))


def _shown(value: Any) -> str:
    try:
        return repr(value)[:50]
    except ValueError:
        return "a long integer"


def parameters_of(call: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, one in inspect.signature(call).parameters.items() if one.kind in kinds]


@pytest.mark.parametrize("method", public(ckstore.Store, LEFT | {"saver", "publish"}))
def test_methods_of_a_store(opened: ckstore.Store, method: str) -> None:
    call = getattr(opened, method)
    good = dict(STORE.get(method, {}))
    with ckstore.open("other", create=True) as other:
        if "other" in good:
            good["other"] = other
        assert tried(call, good, parameters_of(call)) == []


def test_names_of_versions(opened: ckstore.Store) -> None:
    assert tried(lambda name: opened[name], {}, ["name"]) == []
    assert tried(lambda name: name in opened, {}, ["name"]) == []
    assert opened[np.int64(2)].number == 2  # type: ignore[index]
    assert [version.number for version in opened.select(np.arange(1, 3))] == [1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("method", public(ckstore.Version))
def test_methods_of_a_version(opened: ckstore.Store, method: str) -> None:
    version = opened["a@2"]
    call, good = getattr(version, method), dict(VERSION.get(method, {}))
    if "out" in good:
        with open("written", "wb") as out:
            good["out"] = out
            assert tried(call, good, parameters_of(call)) == []
    else:
        assert tried(call, good, parameters_of(call)) == []


def test_paths_of_tensors_and_steps(opened: ckstore.Store) -> None:
    version, run = opened["a@2"], opened.run("a")
    assert tried(lambda path: version[path], {}, ["path"]) == []
    assert tried(lambda path: path in version, {}, ["path"]) == []
    assert tried(lambda step: run[step], {}, ["step"]) == []
    for part in ("start", "stop", "step"):
        assert tried(lambda part=part, **bound: run[slice(*(bound.get(n) for n in ("start", "stop", "step")))], {},
                     [part]) == []  # fmt: skip


@pytest.mark.parametrize("method", public(ckstore.Run))
def test_methods_of_a_run(opened: ckstore.Store, method: str) -> None:
    call = getattr(opened.run("a"), method)
    assert tried(call, {"tail": {"count": 1}, "checkout": {"target": "out"}}.get(method, {}), parameters_of(call)) == []


@pytest.mark.parametrize("function", ["open", "init", "recover"])
def test_functions(opened: ckstore.Store, function: str) -> None:
    call = getattr(ckstore, function)
    parameters = parameters_of(call)
    assert tried(call, {"path": "store"}, parameters) == []


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        (ckstore.Policy, {}),
        (ckstore.Policy, {"fidelity": "coarse"}),
        (ckstore.Retention, {}),
        (ckstore.Retention, {"exact_last": 3, "keep_last": 5}),
        (ckstore.Search, {"evaluate": lambda path: 1.0}),
        (ckstore.IngestOptions, {}),
    ],
)
def test_settings(kind: Callable[..., Any], good: dict[str, Any]) -> None:
    assert tried(kind, good, parameters_of(kind)) == []


def test_a_saver(opened: ckstore.Store) -> None:
    for wrong in ({"workers": "2"}, {"workers": 2.5}, {"workers": 0}, {"nbytes": "x"}, {"nbytes": -1}, {"run": 3}):
        with pytest.raises(UsageError):
            opened.saver(**wrong)  # type: ignore[arg-type]
    with opened.saver("c") as saver:
        parameters = [name for name in parameters_of(saver.save) if name != "state"]
        assert tried(saver.save, {"state": STATE, "replace": True}, parameters) == []


def test_wrong_policies_name_the_remedy(opened: ckstore.Store) -> None:
    with pytest.raises(UsageError, match=r"takes a ckstore.Policy, not 'coarse'; write ckstore.Policy\('coarse'\)"):
        opened.set_policy("coarse", run="a")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"write ckstore.Policy\(retention=…\)"):
        opened.set_policy(ckstore.Retention(keep_last=3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"`retention` takes a ckstore.Retention, not {'keep_last': 3}"):
        ckstore.Policy(retention={"keep_last": 3})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'x' is not a duration such as 36h, 2d or 1w"):
        ckstore.Retention(keep_last="x")  # type: ignore[arg-type]
    assert opened.policies() == {}


def test_a_policy_of_a_run_without_a_version(opened: ckstore.Store, caplog: pytest.LogCaptureFixture) -> None:
    policy = ckstore.Policy("coarse")
    with caplog.at_level(logging.INFO, "ckstore"):
        opened.set_policy(policy, run="a")
        opened.set_policy(policy)
        opened.set_policy(None, run="none")
        assert caplog.messages == []
        opened.set_policy(policy, run="aa")
    assert caplog.messages == ["Run aa has no version yet (near: a); its policy counts from the first one."]
    assert opened.policy("aa") == policy


def test_metrics_are_numbers_of_any_kind(opened: ckstore.Store) -> None:
    torch = pytest.importorskip("torch")
    given = {
        "tensor": torch.tensor(0.5), "array": np.array(3), "scalar": np.float32(0.25),
        "bf16": torch.tensor(2.0).bfloat16(),
        "flag": np.bool_(True), "nan": torch.tensor(float("nan")), "inf": float("inf"), "list": [torch.tensor(1)],
    }  # fmt: skip
    kept = {"tensor": 0.5, "array": 3, "scalar": 0.25, "bf16": 2.0, "flag": True, "nan": "NaN", "inf": "Infinity",
            "list": [1]}  # fmt: skip
    assert dict(opened.ingest(STATE, run="m", step=1, metrics=given).version.metrics) == kept
    opened.set_metrics("a@1", given)
    assert dict(opened["a@1"].metrics) == {"loss": 1, **kept}
    with opened.saver("m") as saver:
        assert dict(saver.save(STATE, step=2, metrics=given).result().version.metrics) == kept
    settled(opened)
    assert opened["best:tensor"].number
    for wrong in (torch.zeros(2), np.zeros(2), Anything(), 1j):
        with pytest.raises(UsageError, match="Metrics must be plain numbers and strings"):
            opened.set_metrics("a@1", {"x": wrong})


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000, [10**400]], ids=["above", "below", "long", "inside"])
def test_metrics_beyond_a_float_are_refused(opened: ckstore.Store, value: Any) -> None:
    for call in (
        lambda: opened.ingest(STATE, run="m", metrics={"loss": value}),
        lambda: opened.set_metrics("a@1", {"loss": value}),
        lambda: opened.ingest_many("a.npy", ckstore.IngestOptions(metrics={"loss": value})),
    ):
        with pytest.raises(UsageError, match=r"beyond the largest float|thousands of digits"):
            call()
    assert opened["best:loss"].number == 1
    opened.set_metrics("a@1", {"loss": 10**300})
    assert opened["best:loss"].number == 2
