"""Runs for smoke tests of the tools: models of one layer, trained for a few steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools import runs


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tools.runs` train every run in less than a second."""
    from tools.training import ImageSettings, TextSettings

    #: Large enough for an object of its own, which a scheme quantises: 65,536 elements.
    usual = TextSettings(width=128, layers=1, heads=2, context=16, batch=2, steps=6, every=2)
    small = replace(usual, context=5, every=1, width=16)
    monkeypatch.setattr(runs, "text_settings", lambda name, tier: small if name == "embedding" else usual)
    monkeypatch.setattr(runs, "image_settings", lambda tier: ImageSettings((8, 16, 96), 1, epochs=2, batch=700))
