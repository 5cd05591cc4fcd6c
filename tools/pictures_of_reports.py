"""Pictures of reports for the documentation: PNG files of pages in headless Chromium."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import ckstore
from tools import runs
from tools.bench import series

REPOSITORY = Path(__file__).resolve().parents[1]

#: Public series, as examples of others' checkpoints.
PUBLIC = ("espcn", "willmore_pinn")

#: Highest learning rates of the three runs that are compared.
RATES = {"gpt": 1e-3, "gpt-fast": 4e-3, "gpt-slow": 2.5e-4}

#: A browser that is root's, has no screen, and asks nobody for anything.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

WIDTH = 1280


def write_reports(work: Path) -> Iterator[Path]:
    """Yield reports as HTML files in a directory, each named after its picture."""
    from tools import training

    with ckstore.init(work / "runs") as store:
        settings = runs.text_settings("gpt", "tiny")
        for name, rate in RATES.items():
            place = work / name
            place.mkdir()
            training.gpt(replace(settings, rate=rate), place, print)
            for path in sorted(place.glob(runs.RUNS["gpt"])):
                store.ingest(path, run=name)
        for found in series.find(list(PUBLIC), None, work):
            for path in found.versions:
                store.ingest(path, run=found.name)
        present = {run.name for run in store.runs()}
        reports = {"report": ("gpt",), "compare": tuple(RATES)} | {name: (name,) for name in PUBLIC if name in present}
        for name, chosen in reports.items():
            file = work / f"{name}.html"
            report = store.report(*chosen)
            report.contents["store"] = "/data/runs"  # In place of the temporary directory.
            report.save(file)
            yield file


def picture(browser: Browser, report: Path, theme: str) -> bytes:
    """Return a PNG of a report down to the distributions, in a palette of 256 colours."""
    tab = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=theme)
    tab.goto(report.as_uri())
    tab.wait_for_selector("html[data-drawn]")
    box = tab.locator("#selected").bounding_box()
    assert box is not None
    end = box["y"] + box["height"] + 20
    shot = tab.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end})
    tab.close()
    file = io.BytesIO()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "pictures")
    out = parser.parse_args().out
    program = os.environ.get("CKSTORE_CHROMIUM") or shutil.which("chromium")
    if program is None:
        parser.error("Chromium is not installed; name another browser of its kind in CKSTORE_CHROMIUM.")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        for report in write_reports(Path(work)):
            target = out / f"{report.stem}.png"
            target.write_bytes(picture(browser, report, "dark" if report.stem == PUBLIC[-1] else "light"))
            print(f"{target.name}: {target.stat().st_size:,} bytes of {report.stat().st_size:,} as HTML")
        browser.close()


if __name__ == "__main__":
    main()
