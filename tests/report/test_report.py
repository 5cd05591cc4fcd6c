"""Reports: their contents and formats, of several runs, and in notebooks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckstore import ConflictError, NotFoundError, Store, UsageError
from ckstore.report.measures import MEASURES
from ckstore.report.report import markdown


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with two runs of different models; one has a fork."""
    generator = torch.Generator().manual_seed(0)
    for k in range(3):
        state = {"model": {"w": torch.randn(20, 30, generator=generator), "n": torch.tensor(k)}}
        store.ingest(state, run="a", step=10 * k, metrics={"note": "x", "loss": 1.0 / (k + 1), "acc": float("nan")})
    for _ in range(2):
        state = {"other": torch.randn(5, generator=generator), "model": {"w": torch.randn(9, 9, generator=generator)}}
        store.ingest(state, run="b")
    store.tag("a@10", "best")
    return store


def test_contents_have_every_key_of_the_page(filled: Store) -> None:
    contents = filled.report().contents
    assert set(contents) == {
        "title", "created", "ckstore", "store", "metric", "measures", "freeable", "runs", "lineage"
    }  # fmt: skip
    assert (contents["title"], contents["metric"]) == ("a, b", "loss")
    assert os.path.isabs(contents["store"]) or "://" in contents["store"]
    a, b = contents["runs"]
    assert set(a) == {"name", "versions", "tensors", "values", "histograms", "findings", "sizes"}
    assert [version["tags"] for version in a["versions"]] == [[], ["best"], []]
    assert a["versions"][1]["metrics"] == {"note": "x", "loss": 0.5, "acc": "NaN"}
    assert {tensor["path"]: tensor["role"] for tensor in a["tensors"]} == {"model/w": "weight", "model/n": "other"}
    keys = [measure["key"] for measure in contents["measures"]]
    assert list(a["values"]) == list(b["values"]) == keys
    assert "deviation" not in keys
    expected = [float(filled[number]["model/w"].numpy().std(mean=0)) for number in (1, 2, 3)]
    np.testing.assert_allclose(a["values"]["rms"][0], expected, rtol=1e-5)
    [histogram] = a["histograms"]
    assert [sum(counts) for counts in histogram["counts"]] == [600, 600, 600]
    assert len(histogram["edges"]) == len(histogram["counts"][0]) + 1
    assert a["sizes"]["files"] == sum(version["bytes"] for version in a["versions"])
    assert len(contents["lineage"]) == 5
    json.dumps([run | {"values": {}} for run in contents["runs"]], allow_nan=False)


def test_json_has_lists_with_null(filled: Store) -> None:
    report = json.loads(filled.report("a").to_json())
    change = report["runs"][0]["values"]["change"]
    assert change[0][0] is None
    assert change[0][1] > 0
    assert change[1] == [None] * 3


def test_a_part_of_a_run_and_globs_are_reported(filled: Store) -> None:
    [run] = filled.report(filled.run("a")[10:], globs=["*/w"]).contents["runs"]
    assert [version["step"] for version in run["versions"]] == [10, 20]
    assert [tensor["path"] for tensor in run["tensors"]] == ["model/w"]


def test_unknown_names_are_refused(filled: Store) -> None:
    with pytest.raises(NotFoundError, match="c"):
        filled.report("c")
    with pytest.raises(NotFoundError, match="No version has numbers under note; there are loss"):
        filled.report("a", metric="note")
    with pytest.raises(UsageError, match="'txt' is no format"):
        filled.report("a").save("report.txt")


def test_formats_follow_the_suffix(filled: Store, tmp_path: Path) -> None:
    report = filled.report("a", "b", metric="loss")
    for suffix, begin in ((".md", "# a, b\n"), (".json", '{"title"'), (".html", "<!")):
        path = tmp_path / f"report{suffix}"
        report.save(path)
        assert path.read_text()[: len(begin)].lower() == begin
        with pytest.raises(ConflictError, match="exists"):
            report.save(path)
    report.save(tmp_path / "plain", "md")
    report.save(tmp_path / "plain", "md", force=True)
    assert (tmp_path / "plain").read_text() == report.to_markdown()


def test_names_stay_text_in_markdown_and_html(store: Store) -> None:
    for k in range(2):
        state = {"a|b<script>\n`x`": torch.full((3,), 1.0 + k)}
        store.ingest(state, run="r|<b>", step=k, metrics={"m|<i>": 1.0 + k})
    text = store.report().to_markdown()
    assert "<script>" not in text.replace("\\<", "")
    [line] = [line for line in text.splitlines() if "script" in line]
    assert line.replace("\\|", "").count("|") == 7
    for shown in (store, store.run("r|<b>"), store["latest"]):
        html = shown._repr_html_()
        assert "<b>" not in html
        assert "<i>" not in html
        assert "<svg" in html


def test_markdown_shows_some_versions_of_many(store: Store) -> None:
    for k in range(15):
        store.ingest({"w": torch.full((3,), 1.0 + k)}, run="a", step=k)
    contents: dict[str, Any] = store.report().contents
    assert "12 of 15 versions" in markdown(contents)


def test_notebooks_show_tables_and_a_line(filled: Store) -> None:
    assert filled._repr_html_().count("<svg") == 1
    run = filled.run("a")._repr_html_()
    assert "<td>best</td>" in run
    assert run.count("<polyline") == 1
    version = filled["a@10"]._repr_html_()
    assert "loss: 0.5" in version
    assert "<svg" not in filled["b"]._repr_html_()
    assert filled.report("a")._repr_html_().startswith("<iframe")


@pytest.mark.parametrize("sample", [0, -1])
def test_a_sample_has_an_element(filled: Store, sample: int) -> None:
    for refused in (lambda: filled.report(sample=sample), lambda: filled.run("a").statistics(sample=sample)):
        with pytest.raises(UsageError, match=f"`sample` must be 1 or more, not {sample}."):
            refused()


def test_an_empty_store_has_an_empty_report(store: Store) -> None:
    assert store.report().contents["runs"] == []
    assert store.report().to_markdown() == "# no runs\n"
    assert "<table>" in store._repr_html_()


def test_the_page_on_reports_defines_all_measures() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "report.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| ([^|]+) \|$", text.replace("\\|", "¦"), re.MULTILINE)
    assert [(key, label.replace("¦", "|"), about) for key, label, about in rows] == [
        (one.key, one.label, one.about) for one in MEASURES.values()
    ]
