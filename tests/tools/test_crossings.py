from __future__ import annotations

import pytest

from tools.bench import crossings

pytestmark = pytest.mark.local


def test_crossings_of_every_operation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(crossings, "_TENSORS", 1)
    monkeypatch.setattr(crossings, "_ROWS", 8)
    monkeypatch.setattr("sys.argv", ["crossings", "--most", "0"])
    crossings.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "encoded ingest", "hot ingest", "checkout", "state dict", "slice", "cold slice"
    ]  # fmt: skip
    assert all(int(line.partition(": ")[2].split()[0].replace(",", "")) > 0 for line in said)
