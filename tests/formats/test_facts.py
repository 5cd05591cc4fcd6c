"""Steps and epochs in contents."""

from __future__ import annotations

from ckstore.formats.detect import parse
from tests.formats.reading import in_memory


def test_trainer_state() -> None:
    assert parse(in_memory(b'{"global_step": 12}'), "a/trainer_state.json").facts == {"step": 12}
    assert parse(in_memory(b'{"global_step": 12}'), "other.json").facts == {}
    for content in (b"{", b"[1]", b"[" * 100_000, b"\xff\xfe"):
        assert parse(in_memory(content), "trainer_state.json").facts == {}
    for number in ("1.5", "-1"):
        content = f'{{"global_step": {number}}}'.encode()
        assert parse(in_memory(content), "trainer_state.json").facts == {"unused": f"global_step {number}"}
