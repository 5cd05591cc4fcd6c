"""Coarse versions on the command line: options, output, and refusals."""

from __future__ import annotations

import hashlib
import io
import itertools
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from ckstore.cli.output import percent_text
from tests.checkpoints import listing

from .conftest import checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]


def weight_of(path: Path | io.BytesIO) -> torch.Tensor:
    tensor = torch.load(path, weights_only=True)["model"]["weight"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.fixture
def coarse(ckstore, place: Path) -> Path:
    """The three files as coarse versions `gpt@0`, `gpt@10` and `gpt@20`."""
    ckstore("ingest", *sorted((place / "in").iterdir()), "--run", "gpt", "--fidelity", "coarse")
    return place


@pytest.mark.parametrize(
    "options",
    [
        ["--fidelity", "coarse"],
        ["--quality", "4"],
        ["--scheme", "lattice"],
        ["--max-abs-error", "1e-2"],
        ["--max-rel-error", "1e-2", "--verify"],
        ["--fidelity", "coarse", "--verify"],
    ],
    ids=" ".join,
)
def test_ingest(ckstore, place: Path, options: list[str]) -> None:
    [said] = ckstore("ingest", "in/step0.pt", "--run", "gpt", *options, "--json").json
    assert (said["fidelity"], said["step"]) == ("coarse", 0)
    assert said["stored"] < said["bytes"] / 2
    asked = {"--quality": "quality", "--max-abs-error": "max_abs_error", "--max-rel-error": "max_rel_error"}
    shown = ckstore("show", "1", "--json").json["coarse"]
    assert shown["scheme"] == "lattice"
    for option, value in itertools.pairwise(options):
        if option in asked:
            assert shown[asked[option]] == float(value)
    assert ckstore("verify").code == 0


def test_gradients_from_a_file(ckstore, place: Path) -> None:
    """They rank the weights: the first rows matter little."""
    torch.manual_seed(0)
    torch.save({"model": {"weight": torch.randn(300, 256)}}, place / "large.pt")
    sums = torch.ones(300, 256)
    sums[:100] = 1e-6
    torch.save({"model/weight": sums}, place / "sums.pt")
    options = ["--run", "sgd", "--scheme", "dynaquant", "--quality", "3"]
    assert ckstore("ingest", "large.pt", *options, "--gradients", "sums.pt").code == 0
    ckstore("checkout", "sgd@latest", "-o", "back.pt")
    pruned = weight_of(place / "back.pt") == 0
    assert pruned[:100].float().mean() > pruned[100:].float().mean() + 0.4


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["in/step0.pt", "--gradients", "none.pt"], 2, "does not exist"),
        (["in/step0.pt", "--gradients", "in/step10.pt"], 2, "is not an array of floats"),
        (["in/step0.pt", "in/step10.pt", "--gradients", "sums.pt"], 2, "single checkpoint"),
        (["in", "--recursive", "--gradients", "sums.pt"], 2, "leave --run"),
    ],
    ids=["missing", "a checkpoint", "two", "a folder"],
)
def test_gradients_that_do_not_fit(ckstore, place: Path, arguments: list[str], code: int, hint: str) -> None:
    torch.save({"model/weight": torch.ones(3)}, place / "sums.pt")
    done = ckstore("ingest", *arguments, "--scheme", "dynaquant", code=code)
    assert hint in done.err
    assert ckstore("log", "--json").json == []


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--fidelity", "exact", "--quality", "2"], "leave --fidelity exact out"),
        (["--fidelity", "exact", "--max-abs-error", "1"], "leave --fidelity exact out"),
        (["--fidelity", "exact", "--scheme", "lattice"], "leave --fidelity exact out"),
        (["--quality", "0"], "Quality must be between 0.125 and 64, not 0.0"),
        (["--max-abs-error", "-1"], "bound"),
        (["--max-abs-error", "nan"], "bound"),
        (["--max-rel-error", "1e-2", "--scheme", "lc"], "lc"),
        (["--fidelity", "coarse", "--verify", "--delete-source"], "Sources are deleted after an exact ingest only"),
        (["--fidelity", "fuzzy"], "fuzzy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_contradictory_options_are_refused(ckstore, place: Path, options: list[str], hint: str) -> None:
    before = listing(place / ".ckstore")
    result = ckstore("ingest", "in/step0.pt", *options, code=2)
    assert hint in result.err
    assert listing(place / ".ckstore") == before
    assert (place / "in" / "step0.pt").exists()


def test_ingest_again(ckstore, coarse: Path) -> None:
    """Coarse again: unchanged. Exactly: exact from then on. Then coarse: still exact."""
    assert "unchanged" in ckstore("ingest", "in/step10.pt", "--run", "gpt", "--fidelity", "coarse").out
    [said] = ckstore("ingest", "in/step10.pt", "--run", "gpt", "--json").json
    assert (said["new"], said["fidelity"], said["step"]) == (True, "exact", 10)
    [said] = ckstore("ingest", "in/step10.pt", "--run", "gpt", "--fidelity", "coarse", "--json").json
    assert (said["new"], said["fidelity"]) == (False, "exact")
    result = ckstore("checkout", "gpt@10", "--require-exact", "-o", "out.pt")
    assert result.err == ""
    assert (coarse / "out.pt").read_bytes() == (coarse / "in" / "step10.pt").read_bytes()


def test_checkout_names_coarse_values_on_stderr(ckstore, coarse: Path) -> None:
    result = ckstore("checkout", "gpt@20", "-o", "out.pt")
    assert "Version 3 is coarse" in result.sentence
    assert "ckstore show 3" in result.sentence
    assert "blake3" not in result.out
    original = coarse / "in" / "step20.pt"
    assert (coarse / "out.pt").stat().st_size == original.stat().st_size
    off = (weight_of(coarse / "out.pt") - weight_of(original)).abs().max().item()
    assert 0 < off < 0.2


def test_the_weights_lead(ckstore, place: Path) -> None:
    """Second moments are off by more than they are large; that says nothing of the model."""
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    state = {"model": {"weight": weight}, "optimizer": {"state": {0: {"exp_avg_sq": weight.square() * 1e-6}}}}
    torch.save(state, place / "step1.pt")
    ckstore("ingest", "step1.pt", "--run", "gpt", "--fidelity", "coarse")
    errors = {item["path"]: item["error"] for item in ckstore("show", "gpt@1", "--json").json["tensors"]}
    weights, moments = errors.pop("model/weight")["relative"], errors.popitem()[1]["relative"]
    assert weights < moments
    sentence = ckstore("checkout", "gpt@1", "-o", "out.pt").sentence
    assert f"weights by up to {percent_text(weights)} of their root mean square, moments" in sentence
    assert f"moments by up to {percent_text(moments)};" in sentence
    ckstore("ingest", "step1.pt", "--run", "exact", "--step", 2)
    thinned = ckstore("thin", "exact").out
    assert "weights by up to" in thinned
    assert thinned.index("weights by up to") < thinned.index("moments by up to")


def test_checkout_refuses_coarse_versions(ckstore, coarse: Path) -> None:
    result = ckstore("checkout", "gpt@20", "-o", "out.pt", "--require-exact", code=4)
    assert "coarse" in result.sentence
    assert "--require-exact" in result.sentence
    assert result.out == ""
    assert not (coarse / "out.pt").exists()


def test_stdout_holds_the_file_and_nothing_else(ckstore, coarse: Path) -> None:
    command = [sys.executable, "-m", "ckstore", "checkout", "gpt@20", "-o", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stderr.decode().count("\n") == 1
    assert "is coarse" in done.stderr.decode()
    ckstore("checkout", "gpt@20", "-o", "out.pt")
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256((coarse / "out.pt").read_bytes()).digest()
    with zipfile.ZipFile(io.BytesIO(done.stdout)) as archive:
        assert archive.testzip() is None
    assert weight_of(io.BytesIO(done.stdout)).shape == (320, 256)


def test_show_prints_the_loss_of_each_tensor(ckstore, coarse: Path) -> None:
    shown = ckstore("show", "gpt@10", "--json").json
    assert shown["fidelity"] == "coarse"
    assert shown["coarse"]["scheme"] == "lattice"
    tensors = {item["path"]: item for item in shown["tensors"]}
    assert tensors.keys() == {"model/weight", "model/frozen", "model/bias", "model/scale", "order/[0]"}
    ckstore("checkout", "gpt@10", "-o", "out.pt")
    difference = (weight_of(coarse / "out.pt").double() - checkpoint(10)["model"]["weight"].double()).abs()
    error = tensors["model/weight"]["error"]
    assert error["max_abs"] == pytest.approx(difference.max().item(), rel=2e-3)
    assert error["rms"] == pytest.approx(difference.square().mean().sqrt().item(), rel=2e-3)
    assert 0 < error["relative"] < 0.1
    assert tensors["model/weight"]["form"].startswith("linear 2^")
    assert tensors["model/bias"]["error"] is None
    assert tensors["model/bias"]["form"] in ("full", "delta")
    assert tensors["model/bias"]["bundled"]
    text = ckstore("show", "gpt@10").out
    rows = {line.split()[-1]: line.split() for line in text.splitlines() if "/" in line}
    assert f"{error['max_abs']:.3g}" in rows["model/weight"]
    assert rows["model/bias"].count("0") == 3
    assert "scheme lattice" in text


def test_show_reports_that_an_exact_version_lost_nothing(ckstore, filled: Path) -> None:
    shown = ckstore("show", "gpt@10", "--json").json
    assert (shown["fidelity"], shown["coarse"]) == ("exact", None)
    assert all(item["error"] is None for item in shown["tensors"])


def test_log_tells_coarse_versions_from_exact_ones(ckstore, coarse: Path) -> None:
    ckstore("ingest", "in/step0.pt", "--run", "exact")
    lines = ckstore("log").out.splitlines()
    assert lines[0].lower().endswith("fidelity")
    assert sorted(line.split()[-1] for line in lines[1:]) == ["coarse"] * 3 + ["exact"]
    assert [row["fidelity"] for row in ckstore("log", "gpt", "--json").json] == ["coarse"] * 3


def test_diff_between_a_coarse_and_an_exact_version(ckstore, coarse: Path) -> None:
    ckstore("ingest", "in/step10.pt", "--run", "exact")
    changes = {item["path"]: item for item in ckstore("diff", "gpt@10", "exact@10", "--json").json}
    assert changes.keys() == {"model/weight", "model/frozen"}
    tensors = {item["path"]: item for item in ckstore("show", "gpt@10", "--json").json["tensors"]}
    for path, change in changes.items():
        assert change["change"] == "values"
        assert change["max_abs"] == pytest.approx(tensors[path]["error"]["max_abs"], rel=2e-3)
        assert change["rms"] == pytest.approx(tensors[path]["error"]["rms"], rel=2e-3)
    assert ckstore("diff", "gpt@10", "gpt@10", "--json").json == []


def test_diff_of_values_that_a_lattice_holds_exactly(ckstore, place: Path) -> None:
    """They are the same, though one version identifies them by content and the other by their decoded values."""
    weight = torch.randint(-3, 4, (300, 256)).float()
    torch.save({"w": weight, "b": torch.ones(3)}, place / "w.pt")
    ckstore("ingest", "w.pt", "--run", "coarse", "--max-abs-error", "0.5", "--step", "1")
    ckstore("ingest", "w.pt", "--run", "exact", "--step", "1")
    assert ckstore("show", "coarse", "--json").json["fidelity"] == "coarse"
    assert ckstore("diff", "coarse", "exact", "--json").json == []


def test_a_coarse_version_next_to_its_exact_twin(ckstore, place: Path) -> None:
    ckstore("ingest", "in/step0.pt", "--run", "gpt")
    ckstore("encode", "1")
    done = ckstore("ingest", "in/step0.pt", "--run", "small", "--fidelity", "coarse")
    assert done.err == "ckstore: in/step0.pt: Against gpt@0, by likeness.\n"
    ckstore("policy", "asked", "--fidelity", "coarse", "--hot", "0")
    ckstore("ingest", "in/step0.pt", "--run", "asked")
    assert [version["fidelity"] for version in ckstore("log", "--json").json] == ["exact", "coarse", "coarse"]
    assert "coarse" in ckstore("show", "small@0").out
    again = ckstore("ingest", "in/step0.pt", "--run", "gpt", "--fidelity", "coarse")
    assert again.out.endswith("unchanged\n")
    assert "Version 1 has this content exactly and keeps it; `ckstore thin 1` makes it coarse." in again.err
    [said] = ckstore("ingest", "in/step0.pt", "--run", "gpt", "--fidelity", "coarse", "--json").json
    assert "keeps it" in said["note"]


def test_thin_says_that_a_twin_keeps_the_values(ckstore, place: Path) -> None:
    for run in "ab":
        ckstore("ingest", "in/step0.pt", "--run", run)
        ckstore("encode", f"{run}@0")
    assert "Other versions keep exact values" in ckstore("thin", "a@0").err
    assert ckstore("log", "--json").json[0]["fidelity"] == "coarse"
    assert ckstore("thin", "b@0").err == ""
