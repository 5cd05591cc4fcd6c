"""`ckstore policy`: later versions follow the policy, also after a recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckstore as library
from ckstore.errors import IntegrityError
from ckstore.policy import Policy
from ckstore.recovery.recover import recover
from tests.checkpoints import listing


def test_a_run_overrides_the_store_and_a_call_overrides_both(ckstore, filled: Path) -> None:
    ckstore("policy", "--quality", "3")
    ckstore("policy", "exact", "--fidelity", "exact")
    ckstore("ingest", "in/step0.pt", "--run", "coarse", "--step", "7")
    ckstore("ingest", "in/step0.pt", "--run", "exact", "--step", "7")
    ckstore("ingest", "in/step0.pt", "--run", "fine", "--step", "7", "--fidelity", "exact")
    with library.open(filled / ".ckstore", "r") as store:
        assert store.policy() == store.policy("any") == Policy("coarse", quality=3.0)
        assert store["exact@7"].fidelity == store["fine@7"].fidelity == "exact"
    listed = ckstore("policy", "--json").json
    assert listed == [
        {"run": None, "fidelity": "coarse", "hot": 1, "scheme": "lattice", "quality": 3.0},
        {"run": "exact", "fidelity": "exact", "hot": 1},
    ]


def test_a_policy_outlives_a_recovery_and_is_cleared(ckstore, filled: Path) -> None:
    ckstore("policy", "gpt", "--max-rel-error", "0.01")
    ckstore("policy", "--quality", "1")
    ckstore("policy", "--clear")
    recover(filled / ".ckstore")
    with library.open(filled / ".ckstore", "r") as store:
        assert store.policy("gpt") == Policy("coarse", max_rel_error=0.01)
        assert store.policy("other") == Policy()
    assert "max-rel-error 0.01" in ckstore("policy", "gpt").out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--fidelity", "exact", "--quality", "2"),
        ("--quality", "0"),
        ("--quality", "2", "--clear"),
        ("--scheme", "lc", "--max-abs-error", "1"),
        ("--exact-every", "10"),
        ("--exact-last", "5", "--keep-last", "3"),
        ("--exact-last", "5", "--exact-best", "loss"),
        ("--keep-last", "0"),
        ("--clear", "--apply"),
        ("--keep-last", "3", "--clear"),
    ],
)
def test_invalid_policies_are_refused(ckstore, filled: Path, arguments: tuple[str, ...]) -> None:
    ckstore("policy", *arguments, code=2)
    assert ckstore("policy", "--json").json == [{"run": None, "fidelity": "exact", "hot": 1}]


def test_a_policy_applies_to_older_versions(ckstore, filled: Path) -> None:
    store = filled / ".ckstore"
    before = listing(store)
    predicted = ckstore("policy", "gpt", "--exact-last", "1", "--keep-last", "2", "--dry-run", "--json").json
    gone = [{"version": 1, "run": "gpt", "step": 0}]
    coarse = [{"version": 2, "run": "gpt", "step": 10}]
    assert predicted == [
        {"forgotten": gone, "thinned": coarse, "dropped": [], "tagged": [], "freed": 0, "dry_run": True}
    ]
    assert listing(store) == before
    assert ckstore("policy", "--apply").out.startswith("Nothing to do")
    said = ckstore("policy", "gpt", "--exact-last", "1", "--keep-last", "2").out
    assert said == "New versions of run gpt: exact. Older versions: exact-last 1, keep-last 2.\n"
    # Options of fidelity leave retention alone, and the other way round.
    ckstore("policy", "gpt", "--hot", "1")
    ckstore("policy", "gpt", "--fidelity", "exact")
    [listed] = ckstore("policy", "gpt", "--json").json
    assert listed == {
        "run": "gpt", "fidelity": "exact", "hot": 1, "retention": {"exact_last": 1, "keep_last": 2},
    }  # fmt: skip
    done = ckstore("policy", "gpt", "--apply", "--json").json[0]
    assert (done["forgotten"], done["thinned"], done["dry_run"]) == (gone, coarse, False)
    assert done["freed"] > 0
    ckstore("verify")
    ckstore("policy", "gpt", "--clear")
    assert "retention" not in ckstore("policy", "gpt", "--json").json[0]
    for options in (("--dry-run",), ("--apply",)):
        assert "Unknown run nothing" in ckstore("policy", "nothing", *options, code=13).sentence


def test_times_are_shown_as_they_were_given(ckstore, filled: Path) -> None:
    said = ckstore("policy", "--keep-last", "30d", "--keep-every", "1h:24,1d:7").out
    assert said == "New versions of the store: exact. Older versions: keep-last 30d, keep-every 1h:24,1d:7.\n"


def test_versions_that_stay_because_of_tags_are_named(ckstore, filled: Path) -> None:
    ckstore("tag", "gpt@0", "first")
    for options in (("--dry-run",), ()):
        ckstore("policy", "gpt", "--keep-last", "1", *options)
        said = ckstore("policy", "gpt", *(options or ("--apply",)), *(("--keep-last", "1") if options else ())).out
        assert "gpt@0 (version 1)  stays: it is tagged\n" in said
    assert [row["step"] for row in ckstore("log", "--json").json] == [0, 20]


def test_an_ingest_carries_it_out(ckstore, place: Path) -> None:
    ckstore("policy", "gpt", "--exact-last", "1", "--keep-last", "2")
    said = ckstore("ingest", "in/step0.pt", "in/step10.pt", "in/step20.pt", "--run", "gpt").err
    assert said.endswith("ckstore: The policy of run gpt forgot 1, thinned 1 of its older versions.\n")
    found = [(item["step"], item["fidelity"]) for item in ckstore("log", "gpt", "--json").json]
    assert sorted(found) == [(10, "coarse"), (20, "exact")]


def test_a_damaged_older_version_is_reported_and_the_latest_is_stored(
    ckstore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> None:
        raise IntegrityError("Pack 1 is missing; restore it from a copy.")

    monkeypatch.setattr("ckstore.intake.intake.retain", damaged)
    result = ckstore("ingest", "in/step0.pt", "--run", "gpt")
    assert result.sentence == "Older versions of run gpt remain unchanged: Pack 1 is missing; restore it from a copy."
    assert result.out.startswith("gpt@0 -> version 1")


def test_older_versions_lose_dropped_tensors(ckstore, filled: Path) -> None:
    options = ("gpt", "--drop", "model/frozen", "--whole-last", "1")
    predicted = ckstore("policy", *options, "--dry-run").out.splitlines()
    assert predicted == [
        "gpt@0 (version 1)  without model/frozen",
        "gpt@10 (version 2)  without model/frozen",
        "Would forget 0 versions, thin 0, drop tensors of 2.",
    ]
    assert "dropped" not in ckstore("log").out.lower()
    said = ckstore("policy", *options).out
    assert said.endswith("Older versions: drop model/frozen, whole-last 1.\n")
    done = ckstore("policy", "gpt", "--apply", "--json").json[0]
    assert [item["step"] for item in done["dropped"]] == [0, 10]
    assert ckstore("policy", "gpt", "--apply").out.startswith("Nothing to do")
    recover(filled / ".ckstore")
    assert [item["dropped"] for item in ckstore("log", "--json").json] == [["model/frozen"], ["model/frozen"], []]
    assert ckstore("log").out.splitlines()[0].split()[-1] == "DROPPED"
    shown = ckstore("show", "gpt@0").out
    assert "model/frozen: 4 of 5 tensors are left" in shown
    assert "model/frozen" not in [item["path"] for item in ckstore("ls", "gpt@0", "--json").json]
    refused = ckstore("checkout", "gpt@0", "-o", "out.pt", code=13).sentence
    assert "has dropped model/frozen" in refused
    assert "format pt" in refused
    assert not (filled / "out.pt").exists()
    ckstore("checkout", "gpt@0", "-o", "out.pt", "--format", "pt")
    said = ckstore("checkout", "gpt@0", "-o", "salvaged", "--salvage", code=4).err
    assert "Version 1 is not damaged, but it has dropped model/frozen" in said
    assert ckstore("diff", "gpt@0", "gpt@20").err == "ckstore: Version 1 has dropped model/frozen.\n"
    ckstore("verify")
    ckstore("gc")
