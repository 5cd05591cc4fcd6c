"""`ckstore thin`: selection, output and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import listing


def restores(ckstore, place: Path, step: int) -> bool:
    """Return whether a version comes back bit for bit."""
    ckstore("checkout", f"gpt@{step}", "-o", "out.pt", "--force")
    return (place / "out.pt").read_bytes() == (place / "in" / f"step{step}.pt").read_bytes()


def test_thin(ckstore, filled: Path) -> None:
    result = ckstore("thin", "gpt@10")
    assert result.err == ""
    first, last = result.out.splitlines()
    assert first.startswith("gpt@10 (version 2)  weights by up to ")
    assert "% of their root mean square; none by more than" in first
    assert last.startswith("Thinned 1 version: ")
    assert "ckstore undo` makes them exact again" in last
    assert [restores(ckstore, filled, step) for step in (0, 10, 20)] == [True, False, True]
    assert "Version 2 is coarse" in ckstore("checkout", "gpt@10", "-o", "out.pt", "--force").err
    assert "`ckstore undo`" in ckstore("gc").err
    assert ckstore("undo").out == "gpt@10 (version 2)\nBrought back 1 version.\n"
    assert [restores(ckstore, filled, step) for step in (0, 10, 20)] == [True, True, True]
    assert "freed " in ckstore("thin", "gpt@10", "--prune").out
    assert ckstore("undo", code=13).sentence.startswith("Nothing to undo")
    assert ckstore("verify").code == 0
    assert [restores(ckstore, filled, step) for step in (0, 10, 20)] == [True, False, True]
    rows = ckstore("log", "gpt", "--json").json
    assert {row["step"]: row["fidelity"] for row in rows} == {0: "exact", 10: "coarse", 20: "exact"}
    assert ckstore("checkout", "gpt@10", "--require-exact", "-o", "no.pt", code=4).out == ""


def test_a_tagged_version(ckstore, filled: Path) -> None:
    before = listing(filled / ".ckstore")
    for extra in ([], ["--dry-run"]):
        result = ckstore("thin", "--run", "gpt", *extra, code=12)
        assert "Version 3 is tagged best; remove the tag first: `ckstore tag --delete best`" in result.sentence
    assert listing(filled / ".ckstore") == before
    assert ckstore("thin", "--run", "gpt", "--keep-tagged").out.splitlines()[-1].startswith("Thinned 2 versions")


def test_json(ckstore, filled: Path) -> None:
    ckstore("tag", "--delete", "best")
    [said] = ckstore("thin", "gpt@0..gpt@20", "--json").json
    assert [item["version"] for item in said["versions"]] == [1, 2, 3]
    assert {(item["run"], item["step"]) for item in said["versions"]} == {("gpt", 0), ("gpt", 10), ("gpt", 20)}
    assert all(0 < item["max_abs_error"] < 0.2 and 0 < item["relative_error"] < 0.2 for item in said["versions"])
    assert (said["skipped"], said["reanchored"], said["dry_run"]) == ([], 0, False)
    assert said["freed"] > 100_000
    shown = ckstore("show", "2", "--json").json["coarse"]
    assert (shown["scheme"], shown["thinned"]) == ("lattice", True)
    [said] = ckstore("thin", "gpt@0..gpt@20", "--json").json
    assert (said["versions"], said["skipped"], said["freed"]) == ([], [1, 2, 3], 0)


def test_a_dry_run(ckstore, filled: Path) -> None:
    before = listing(filled / ".ckstore")
    dry = ckstore("thin", "gpt@0", "gpt@10", "--dry-run")
    assert dry.out.splitlines()[-1].startswith("Would thin 2 versions: ")
    [expected] = ckstore("thin", "gpt@0", "gpt@10", "--dry-run", "--json").json
    assert listing(filled / ".ckstore") == before
    assert restores(ckstore, filled, 10)
    [said] = ckstore("thin", "gpt@0", "gpt@10", "--json").json
    assert said == expected | {"dry_run": False}
    assert listing(filled / ".ckstore") != before


def test_quality_is_of_moments_and_short_floats(ckstore, place: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    errors = []
    for quality in ("0.5", "8"):  # Of other values each: equal ones would keep the finer lattice, which takes no bytes.
        half = torch.randn(300, 256, generator=generator).bfloat16()
        torch.save({"half": half, "step": 5}, "half.pt")
        ckstore("ingest", "half.pt", "--run", f"q{quality}")
        [said] = ckstore("thin", f"q{quality}", "--quality", quality, "--json").json
        errors.append(said["versions"][0]["relative_error"])
    assert 0 < 4 * errors[0] < errors[1]


def test_an_end_of_a_range_may_have_been_forgotten(ckstore, filled: Path) -> None:
    ckstore("tag", "--delete", "best")
    ckstore("forget", "gpt@0", "gpt@20")
    [said] = ckstore("thin", "gpt@0..gpt@20", "--json").json
    assert [item["step"] for item in said["versions"]] == [10]


def test_nothing_to_do(ckstore, filled: Path) -> None:
    (filled / "opaque.bin").write_bytes(bytes(range(256)) * 300)
    ckstore("ingest", "opaque.bin", "--run", "bytes", "--force")
    assert ckstore("thin", "bytes").out.splitlines() == [
        "1 version had no exact values to drop.",
        "Nothing to do: every version that is named is kept or coarse already.",
    ]
    before = listing(filled / ".ckstore")
    assert "Nothing to do" in ckstore("thin", "--run", "gpt", "--keep-last", "9").out
    assert listing(filled / ".ckstore") == before


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        ([], 2, "Name versions"),
        (["gpt@0", "--run", "gpt"], 2, "not both"),
        (["gpt@11"], 13, "gpt@1"),
        (["--run", "nobody"], 13, "nobody"),
        (["gpt@0", "gpt@99"], 13, "gpt@99"),
        (["gpt@20..gpt@0"], 2, "backwards"),
        (["gpt@0", "--quality", "0"], 2, "Quality must be between 0.125 and 64, not 0.0"),
        (["gpt@0", "--keep-every", "0"], 2, "--keep-every"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_refused(ckstore, filled: Path, arguments: list[str], code: int, hint: str) -> None:
    before = listing(filled / ".ckstore")
    for extra in ([], ["--dry-run"]):
        result = ckstore("thin", *arguments, *extra, code=code)
        assert hint in result.err
        assert result.out == ""
    assert listing(filled / ".ckstore") == before
