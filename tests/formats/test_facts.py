"""Steps and epochs from names and contents."""

from __future__ import annotations

import pytest

from ckstore.formats.detect import parse
from ckstore.formats.facts import step_of
from tests.formats.reading import in_memory


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_000120.pt", 120),
        ("checkpoint-1500", 1500),
        ("runs/checkpoint-1500/", 1500),
        ("epoch=70-step=4331.ckpt", 4331),
        ("step=4331-epoch=70.ckpt", 4331),
        ("model_epoch_12.pth", 12),
        ("checkpoint_epoch_1.pt", 1),
        ("model-nn-epoch15.pt", 15),
        ("opt-nn-checkpoint_epoch5.tar", 5),
        ("iter_0001000", 1000),
        ("global_step1000", 1000),
        ("checkpoint.pth.tar", None),
        ("checkpoint_20.pth.tar", 20),
        ("last.ckpt", None),
        ("pytorch_model-00001-of-00002.bin", None),
        ("model-00002-of-00003.safetensors", None),
        ("gpt2-10.safetensors", 10),
        ("model.12", 12),
        ("model.12.pt", 12),
        ("a/step9/model.pt", None),
        ("", None),
        ("99999999999999999999999999.pt", None),
    ],
)
def test_step_of(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_trainer_state() -> None:
    assert parse(in_memory(b'{"global_step": 12}'), "a/trainer_state.json").facts == {"step": 12}
    assert parse(in_memory(b'{"global_step": 12}'), "other.json").facts == {}
    for content in (b"{", b"[1]", b'{"global_step": 1.5}', b"[" * 100_000, b"\xff\xfe", b'{"global_step": -1}'):
        assert parse(in_memory(content), "trainer_state.json").facts == {}
