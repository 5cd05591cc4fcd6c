"""The page of a report: the file, and its picture in a browser.

Browsers are driven by playwright, where it and Chromium are installed; `CKSTORE_CHROMIUM` names another one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.report.report import page
from tests.report.synthetic import contents, finding

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!-- &amp; \u2028 \ud800 🦆"

CHROMIUM = os.environ.get("CKSTORE_CHROMIUM") or shutil.which("chromium") or ""

#: A browser that is root's, has no screen, and asks nobody for anything.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def embedded(document: str) -> dict[str, Any]:
    [block] = re.findall(r'<script type="application/json" id="contents">(.*?)</script>', document)
    found: dict[str, Any] = json.loads(block)
    return found


def hostile() -> dict[str, Any]:
    found = contents((HOSTILE, "gpt"), tensors=6, versions=3)
    found |= {"title": HOSTILE, "store": HOSTILE, "metric": HOSTILE}
    for run in found["runs"]:
        run["tensors"][0]["path"] = HOSTILE
        run["tensors"][3]["dtype"] = HOSTILE
        run["findings"] = [finding(HOSTILE, "error", 0)]
        for version in run["versions"]:
            version["tags"] = [HOSTILE]
            version["metrics"] = {HOSTILE: version["number"]}
    return found


def test_text_of_the_store_stays_in_the_block_of_json() -> None:
    document = page(hostile())
    assert document.count("<img") == 0
    assert document.isascii() or HOSTILE not in document
    assert embedded(document)["runs"][0]["name"] == HOSTILE
    before, block, after = document.partition('<script type="application/json" id="contents">')
    assert block
    assert "owned" not in before + after.partition("</script>")[2]


def test_the_policy_allows_the_page_its_own_scripts_and_styles_alone() -> None:
    document = page(contents())
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', document)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for rule, tag in (("script-src", "script"), ("style-src", "style")):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", document, re.DOTALL)
        assert rules[rule].split() == [
            f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts
        ]  # fmt: skip
        assert len(texts) == 2
    assert not re.search(r"\b(?:src|href)=", re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL))


def test_measures_keep_five_digits() -> None:
    given = contents(tensors=3, versions=2)
    odd = np.array([np.nan, np.inf, -np.inf, 0, 1.2345678, -9.87654e-38], "<f4")
    given["runs"][0]["values"] = {"rms": odd.reshape(3, 2), "bits": odd[::-1].reshape(3, 2)}
    values = embedded(page(given))["runs"][0]["values"]
    planes = np.frombuffer(zlib.decompress(b64decode(values["packed"])), np.uint8).reshape(3, -1)
    bits = sum(plane.astype("<u4") << 8 * (place + 1) for place, plane in enumerate(planes))
    assert values["keys"] == ["rms", "bits"]
    np.testing.assert_allclose(np.asarray(bits, "<u4").view("<f4"), np.concatenate([odd, odd[::-1]]), rtol=2e-5)


def test_a_report_on_thirty_versions_of_200_weights_and_their_moments_is_below_a_megabyte() -> None:
    assert len(page(contents(tensors=600, versions=30))) < 1_000_000


@contextmanager
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pages are not drawn")
    if not CHROMIUM:
        pytest.skip("Chromium is not installed: pages are not drawn")
    with api.sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield program
        finally:
            program.close()


@contextmanager
def drawn(
    program: Any, directory: Path, given: dict[str, Any], width: int = 1280, theme: str = "light"
) -> Iterator[Any]:
    """Open the page of contents; it must log no error and request nothing but itself."""
    file = directory / "report.html"
    file.write_text(page(given), encoding="utf-8")
    tab = program.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    seen: list[str] = []
    tab.on("console", lambda message: seen.append(message.text))
    tab.on("pageerror", lambda error: seen.append(str(error)))
    tab.on("request", lambda request: seen.append(request.url))
    tab.goto(file.as_uri())
    tab.wait_for_selector("html[data-drawn]", timeout=60_000)
    yield tab
    assert set(seen) == {file.as_uri()}
    tab.close()


def sections(tab: Any) -> list[str]:
    found: list[str] = tab.eval_on_selector_all("section", "all => all.map(one => one.id)")
    return found


ALL = ["findings", "metrics", "layers", "selected", "optimiser", "storage", "lineage", "tensors", "measures"]


def test_pages_fit_both_widths_and_themes(tmp_path: Path) -> None:
    given = contents(("gpt", "gpt-with-a-" + "long-" * 30 + "name", "c"), tensors=60)
    backgrounds = set()
    with browser() as program:
        for width in (1280, 400):
            for theme in ("light", "dark"):
                with drawn(program, tmp_path, given, width, theme) as tab:
                    assert tab.evaluate("document.documentElement.scrollWidth") == width
                    assert sections(tab) == ALL
                    backgrounds.add(tab.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
                    assert tab.locator(".uplot").count() == 7
                    assert tab.locator("canvas.heat").count() == 3
    assert len(backgrounds) == 2


def test_cells_with_nan_are_red_and_hatched(tmp_path: Path) -> None:
    """In both themes the hatches of cells without a value show through the red."""
    given = contents(tensors=12)
    [run] = given["runs"]
    run["values"]["nonfinite"][:] = 0
    run["values"]["nonfinite"][0, 3] = 0.5
    run["values"]["rms"][0, 3] = np.nan
    pixels = "one => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.join()"
    with browser() as program:
        for theme in ("light", "dark"):
            with drawn(program, tmp_path, given, theme=theme) as tab:
                tab.get_by_role("button", name="root mean square").first.click()
                image = tab.locator("canvas.heat").evaluate(pixels)
                cells = np.array(image.split(","), int).reshape(-1, 12, 4)
                reds = [(y, x) for y, x in np.ndindex(cells.shape[:2]) if tuple(cells[y, x][:3]) == (179, 38, 30)]
                assert [x for _, x in reds] == [3]
                assert 100 < cells[reds[0]][3] < 200
                style = "one => getComputedStyle(one)"
                assert "gradient" in tab.locator("canvas.heat").evaluate(f"{style}.backgroundImage")
                fault = tab.locator("#layers .legend .fault")
                assert "gradient" in fault.evaluate(f"{style}.backgroundImage")
                assert "rgba(179, 38, 30" in fault.evaluate(f"{style}.boxShadow")


def test_legends_have_numbers_before_a_tap(tmp_path: Path) -> None:
    with browser() as program, drawn(program, tmp_path, contents(("a", "b")), width=400) as tab:
        values = tab.locator(".u-legend .u-value").all_inner_texts()
        assert len(values) > 4
        assert all(re.search(r"\d", value) for value in values)


def test_names_of_tensors_stay_in_view_on_a_phone(tmp_path: Path) -> None:
    with browser() as program, drawn(program, tmp_path, contents(tensors=12), width=400) as tab:
        places = []
        for left in (0, 300):
            tab.locator("#tensors .table").evaluate(f"one => one.scrollTo({left}, 0)")
            cells = ("thead th", "tbody tr th", "tbody tr td:nth-child(5)")
            places.append([tab.locator(f"#tensors {cell}").first.bounding_box()["x"] for cell in cells])
        assert places[0][:2] == places[1][:2]
        assert places[1][2] < places[0][2] - 250


def test_measures_are_defined_in_the_page(tmp_path: Path) -> None:
    with browser() as program, drawn(program, tmp_path, contents()) as tab:
        tab.locator("#layers a").click()
        rows = tab.locator("#measures tbody tr").all_inner_texts()
        assert rows[0].split("\t") == ["relative change", "About relative change.", "change"]


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    with browser() as program, drawn(program, tmp_path, hostile()) as tab:
        assert tab.locator("img").count() == 0
        assert tab.title().startswith("</script><img")
        assert tab.locator("h1").get_attribute("title").startswith("</script><img")
        for press in ("findings .link", "tensors tbody .link"):
            tab.locator(f"#{press}").first.click()
        assert tab.locator("img").count() == 0


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (contents(tensors=0, versions=0), ["findings", "layers", "tensors"]),
        (contents(tensors=0, versions=3), ["findings", "metrics", "layers", "storage", "lineage", "tensors"]),
        (contents(tensors=9, versions=1), [*ALL[:-3], *ALL[-2:]]),
    ],
    ids=["nothing", "no tensors", "one version"],
)
def test_little_is_drawn_too(tmp_path: Path, given: dict[str, Any], shown: list[str]) -> None:
    with browser() as program, drawn(program, tmp_path, given) as tab:
        assert sections(tab) == shown


def test_versions_without_numbers_are_drawn(tmp_path: Path) -> None:
    given = contents(tensors=9, versions=3)
    for run in given["runs"]:
        run["values"] = dict.fromkeys(run["values"], np.full((9, 3), np.nan, "<f4"))
        run["histograms"] = []
        for version in run["versions"]:
            version |= {"step": None, "metrics": {"loss": "NaN"}}
    with browser() as program, drawn(program, tmp_path, given) as tab:
        assert sections(tab) == ["findings", "layers", "storage", "lineage", "tensors"]
        assert "no numbers" in tab.locator("#layers").inner_text()


def test_tensors_are_chosen_by_pointer_keyboard_and_finding(tmp_path: Path) -> None:
    given = contents(tensors=60)
    given["runs"][0]["findings"] = [finding("It did not move.", "warning", 9)]
    with browser() as program, drawn(program, tmp_path, given) as tab:
        chips = tab.locator("#selected .chips button")
        assert chips.count() == 2  # That of the finding, and one with a distribution.
        tab.locator("canvas.heat").click(position={"x": 200, "y": 23})
        assert chips.count() == 3
        tab.locator("canvas.heat").focus()
        for key in ("ArrowDown", "ArrowRight", "Enter"):
            tab.keyboard.press(key)
        assert chips.count() == 4
        assert "relative change" in tab.locator("#layers [aria-live]").inner_text()
        tab.locator("#tensors [type=search]").fill("second dense")
        assert tab.locator("#tensors tbody tr").count() == 5
        tab.get_by_role("button", name="effective rank").first.click()
        assert "effective rank" in tab.locator("#layers .legend").inner_text()
        tab.locator("#findings .link").click()
        assert chips.count() == 1
        assert tab.locator("#selected .python").inner_text() == (
            'ckstore.open("runs").run("gpt").statistics(["rank"], ["model/transformer.h.0.mlp.down.bias"])'
        )


@pytest.mark.local
def test_the_python_line_of_a_tensor_returns_its_numbers_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / 'mein "Lauf" \\ ½'
    with ckstore.init(place) as store:
        for step in (1, 2):
            store.ingest({"it's \\ a": [{"w": np.arange(6, dtype="f4") + step}]}, run='r"\\', step=step)
    monkeypatch.chdir(tmp_path)
    with ckstore.open(place.name, "r") as store:
        given = store.report().contents
    monkeypatch.chdir("/")
    with browser() as program, drawn(program, tmp_path, given) as tab:
        assert 'Store mein "Lauf"' in tab.locator("header .about").inner_text()
        lines = [tab.locator(f"{part} .python").first.inner_text() for part in ("#selected", "#tensors")]
    for line in lines:
        table = eval(line, {"ckstore": ckstore})
        assert [row["step"] for row in table] == [1, 2]
        assert set(table.values("path")) == {given["runs"][0]["tensors"][0]["path"]}


def test_distributions_of_runs_share_a_range(tmp_path: Path) -> None:
    given = contents(("a", "b"), tensors=12)
    for found in given["runs"][1]["histograms"]:
        found["edges"] = [3 * edge for edge in found["edges"]]
    with browser() as program, drawn(program, tmp_path, given) as tab:
        labels = tab.eval_on_selector_all("#selected .pictures canvas", "all => all.map((one) => one.ariaLabel)")
        assert [label.partition(", from ")[2] for label in labels] == [labels[0].partition(", from ")[2]] * 2
        assert float(labels[0].rpartition(" to ")[2]) > 6


def test_sliders_and_full_ranges(tmp_path: Path) -> None:
    with browser() as program, drawn(program, tmp_path, contents(tensors=12)) as tab:
        tab.locator("#selected [type=range]").press("Home")
        assert tab.locator("#selected output").inner_text() == "step 100"
        label = tab.locator("#metrics .choice").first
        assert label.inner_text().strip() == "full range (1 outlier)"
        label.locator("input").check()
        assert tab.locator("#metrics .uplot").count() == 2


def test_a_thousand_tensors_at_200_versions_take_a_second(tmp_path: Path) -> None:
    """In processor time of the page's thread, which other programs do not lengthen."""
    with browser() as program, drawn(program, tmp_path, contents(tensors=1000, versions=2)) as tab:
        client = tab.context.new_cdp_session(tab)
        client.send("Performance.enable", {"timeDomain": "threadTicks"})
        (tmp_path / "report.html").write_text(page(contents(tensors=1000, versions=200)))
        before = {one["name"]: one["value"] for one in client.send("Performance.getMetrics")["metrics"]}
        tab.reload()
        tab.wait_for_selector("html[data-drawn]", timeout=60_000)
        after = {one["name"]: one["value"] for one in client.send("Performance.getMetrics")["metrics"]}
        assert tab.locator("canvas.heat").get_attribute("width") == "200"
        seconds = after["TaskDuration"] - before["TaskDuration"]
        drawn_after = tab.locator("html").get_attribute("data-drawn")
        print(f"{seconds:.2f} s of processor time, drawn after {drawn_after} ms")
        assert 0 < seconds < 1
