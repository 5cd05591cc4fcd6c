"""Valid and invalid fidelities of a version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.codecs.schemes.dynaquant import DynaQuantSettings
from ckstore.errors import FormatVersionError, IntegrityError, UsageError
from ckstore.policy import Policy


def test_a_policy_is_exact_by_default() -> None:
    assert not Policy().is_coarse
    assert Policy("coarse").is_coarse
    assert not Policy("coarse").is_bounded
    assert Policy("coarse", max_abs_error=1e-3).is_bounded


@pytest.mark.parametrize(
    "given",
    [
        {"fidelity": "fuzzy"},
        {"scheme": "jpeg"},
        {"quality": 0.0},
        {"quality": -1.0},
        {"quality": 1e9},
        {"quality": float("nan")},
        {"max_abs_error": 0.0},
        {"max_abs_error": -1e-3},
        {"max_rel_error": float("nan")},
        {"max_rel_error": float("inf")},
        {"max_abs_error": 1e-3, "scheme": "lc"},
        {"max_rel_error": 1e-3, "scheme": "dynaquant"},
    ],
    ids=str,
)
def test_invalid_policies_are_refused_in_a_sentence(given: dict[str, Any], tmp_path) -> None:
    with pytest.raises(UsageError, match=r"^[A-Z].*(; | must be .*, not ).*\.$|choose one of"):
        Policy(**{"fidelity": "coarse", **given})
    with ckstore.init(tmp_path / "store") as store:
        with pytest.raises(UsageError):
            store.ingest({"w": [1]}, policy=Policy(**{"fidelity": "coarse", **given}))
        assert store._catalog.versions() == []


def test_a_version_reports_its_policy() -> None:
    assert Policy("coarse", quality=4.0).parameters() == {"quality": 4.0}
    assert Policy("coarse", max_rel_error=0.01).parameters() == {"max_rel_error": 0.01}
    assert Policy("coarse", max_abs_error=1e-3, max_rel_error=0.01).parameters() == {
        "max_abs_error": 1e-3,
        "max_rel_error": 0.01,
    }


def test_a_policy_with_settings_is_kept_and_shown(tmp_path: Path) -> None:
    policy = Policy("coarse", "dynaquant", settings=DynaQuantSettings(levels=8, metric="sensitivity"))
    assert Policy.from_text(policy.to_text()) == policy
    assert "levels 8" in str(policy)
    assert "metric sensitivity" in str(policy)
    with ckstore.init(tmp_path / "store") as store:
        store.set_policy(policy)
        assert store.policy() == policy
    with pytest.raises(UsageError, match="dynaquant"):
        Policy("coarse", settings=DynaQuantSettings())


@pytest.mark.parametrize(
    "text", ['{"fidelity":"exact","later":1}', '{"fidelity":"exact","retention":{"keep_last":1,"later":1}}']
)
def test_an_option_of_a_later_ckstore_is_not_damage(text: str) -> None:
    with pytest.raises(FormatVersionError, match="install a later ckstore"):
        Policy.from_text(text)


@pytest.mark.parametrize("text", ["[]", '{"fidelity":"other"}', '{"fidelity":"exact","hot":-1}'])
def test_a_policy_that_is_damaged(text: str) -> None:
    with pytest.raises(IntegrityError, match="is damaged"):
        Policy.from_text(text)
