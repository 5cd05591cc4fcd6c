"""The meaning of version names, and the errors of names without one."""

from __future__ import annotations

import pytest

from ckstore.errors import NotFoundError, UsageError
from ckstore.storage.version_names import is_better_low
from tests.storage.version_writer import write_version

pytestmark = pytest.mark.local


def test_every_way_to_name_a_version(filled):
    uid = filled.version(2).uid
    filled.set_tag("best", 1)
    expected = {
        1: [1, "1", " 1 ", "best", "gpt@100"],
        2: ["2", "gpt", "gpt@200", "gpt@latest", uid, uid[:4], uid[:9].upper()],
        3: ["latest", "vision", "vision@5", "vision@latest"],
    }
    for number, names in expected.items():
        for name in names:
            assert filled.resolve(name).number == number, name


def test_the_latest_of_a_run_is_its_highest_step(filled, store):
    write_version(filled, store, "gpt", 150)  # filled in later
    assert filled.resolve("gpt@latest").step == filled.resolve("gpt").step == 200
    write_version(filled, store, "gpt", None)
    assert filled.resolve("gpt@latest").step == 200
    for _ in range(2):
        write_version(filled, store, "stepless", None)
    last = filled.latest().number
    assert filled.resolve("stepless@latest").number == filled.resolve("stepless").number == last


def test_a_superseded_version_has_a_name_that_no_other_one_has(filled, store):
    number = write_version(filled, store, "gpt", 300).number
    filled.mark_versions([number], [])
    assert filled.resolve("gpt@300").number == number
    other = write_version(filled, store, "gpt", 300).number
    assert filled.resolve("gpt@300").number == other


def test_names_that_look_alike(filled, store):
    """Numbers go before ids, and tags before runs."""
    for _ in range(2):
        write_version(filled, store, "gpt", None, uid=f"{filled.last_number() + 1:04}" + "0" * 36)
    assert filled.resolve("0005").number == filled.resolve("00050").number == 5
    filled.set_tag("vision", 1)
    assert filled.resolve("vision").number == 1


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gtp", "gpt"),
        ("bst", "best"),
        ("gpt@150", "gpt@100, gpt@200"),
        ("gtp@100", "(near: gpt@100)"),
        ("gtp@150", "(near: gpt)"),
        ("bst@100", "(near: best)"),
        ("gpt@best", "(near: best)"),
        ("gpt@lates", ""),
        ("on@5", "(near: vis/on@5)"),
        ("on@6", "(near: vis/on)"),
        ("on", "(near: vis/on)"),
        ("gpt@100..gpt@200", ": a range, in place of one version; see `ckstore log`."),
        ("99", ""),
        ("abc", ""),
        ("", ""),
        ("9" * 30, ""),
        (str(1 << 63), ""),
        ("gpt@0", "(near: gpt@100, gpt@200)"),
        ("gpt@" + "9" * 30, "gpt@200"),
        ("@", ""),
        ("%", ""),
        ("gpt@-1", ""),
    ],
)
def test_unknown_names_suggest_near_ones(filled, store, name, near):
    filled.set_tag("best", 1)
    write_version(filled, store, "vis/on", 5)
    with pytest.raises(NotFoundError) as caught:
        filled.resolve(name)
    assert f"Unknown version {name}" in str(caught.value)
    assert near in str(caught.value)
    assert caught.value.exit_code == 13


def test_an_unknown_number(filled):
    with pytest.raises(NotFoundError, match="Unknown version 99"):
        filled.resolve(99)


def test_ids_need_four_characters_and_must_be_unique(filled, store):
    for number, uid in enumerate(["abcde" + "0" * 35, "abcdf" + "0" * 35]):
        write_version(filled, store, "other", number, uid=uid)
    assert filled.resolve("abcde").uid.startswith("abcde")
    with pytest.raises(NotFoundError, match="2 versions have ids that begin with abcd "):
        filled.resolve("abcd")
    with pytest.raises(NotFoundError, match="Unknown version abc"):
        filled.resolve("abc")


def test_tags(filled):
    filled.set_tag("best", 1)
    filled.set_tag("best", 2)
    filled.set_tag("a tag", 3)
    assert filled.tags() == {"a tag": 3, "best": 2}
    filled.delete_tag("best")
    with pytest.raises(NotFoundError, match="Unknown tag best"):
        filled.delete_tag("best")
    with pytest.raises(NotFoundError):
        filled.set_tag("best", 99)
    for name in ("", " ", "latest", "17", "gpt@100", "a\nb", " a"):
        with pytest.raises(UsageError):
            filled.set_tag(name, 1)
    with pytest.raises(UsageError, match=r"^A name of 100,000 characters \(xx") as raised:
        filled.set_tag("x" * 100_000, 1)
    assert len(str(raised.value)) < 200
    assert filled.tags() == {"a tag": 3}
    filled.set_tag("x" * 255, 1)


@pytest.mark.parametrize("lower", [True, False])
def test_losses_and_errors_are_best_if_low(lower: bool) -> None:
    names = {
        True: "val_loss train/cross_entropy xent eval-ce kl_div divergence bits_per_byte bpb smape lpips brier eer WER",
        False: "acc f1 reward policy_entropy peer_score race precision spice klout",
    }
    assert {name: is_better_low(name) for name in names[lower].split()} == dict.fromkeys(names[lower].split(), lower)
