"""`ckstore patch`: a delta directory, and errors as sentences."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Ckstore


def test_a_delta_is_written(filled: Path, ckstore: Ckstore) -> None:
    assert ckstore("patch", "gpt@0", "gpt@10", "-o", "delta").out.startswith("gpt@0 .. gpt@10 -> delta  ")
    assert (filled / "delta" / "model.safetensors.index.json").exists()
    assert "exists" in ckstore("patch", "gpt@0", "gpt@10", "-o", "delta", code=12).sentence
    ckstore("patch", "gpt@0", "gpt@10", "-o", "delta", "--force")
    assert "is new" in ckstore("patch", "gpt@10", "gpt@20", "-o", "late", code=2).sentence
