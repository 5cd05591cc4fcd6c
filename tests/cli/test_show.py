"""`ckstore show`: files with their digests, and how the version is stored."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from blake3 import blake3

from ckstore import init as init_store
from ckstore.objects.records import KINDS
from ckstore.policy import Policy
from tests.checkpoints import draw
from tests.coarse_checks import stored

from .test_log import KEYS


def test_json(ckstore, filled: Path) -> None:
    ckstore("ingest", "in/step0.pt", "--run", "fork", "--parent", "best", "--metric", "loss=1.5")
    shown = ckstore("show", "best", "--json").json
    assert shown.keys() == KEYS | {"children", "contents", "storage", "coarse", "tensors", "metrics_from"}
    assert (shown["version"], shown["children"], shown["tags"]) == (3, [4], ["best"])
    data = (filled / "in" / "step20.pt").read_bytes()
    assert shown["contents"] == [
        {
            "path": "step20.pt",
            "kind": "torch-zip",
            "bytes": len(data),
            "tensors": 6,
            "blake3": blake3(data).hexdigest(),
        }
    ]
    storage = shown["storage"]
    assert sum(storage[kind] for kind in KINDS) == storage["objects"]
    assert storage["delta"] + storage["patches"] == storage["stored_against_others"] > 0
    # The frozen weight lies in an earlier version's pack.
    assert storage["here"] < storage["objects"]
    assert ckstore("show", "fork", "--json").json["metrics"] == {"loss": 1.5}


def test_text(ckstore, filled: Path) -> None:
    out = ckstore("show", "gpt@20").out
    shown = ckstore("show", "3", "--json").json
    assert re.match(r"version +3  \(gpt@20\)\n", out)
    assert shown["contents"][0]["blake3"] in out
    assert shown["id"] in out
    assert "best" in out
    here, objects, against = (shown["storage"][name] for name in ("here", "objects", "stored_against_others"))
    assert re.search(rf"objects +{objects}: {here} new, {objects - here} shared with other versions\n", out)
    assert re.search(rf"as differences +{against} of {objects}\n", out)
    assert ckstore("show", shown["id"][:8]).out == out


def test_sha256_is_computed_on_demand(ckstore, filled: Path) -> None:
    digest = hashlib.sha256((filled / "in" / "step20.pt").read_bytes()).hexdigest()
    out = ckstore("show", "gpt@20", "--sha256").out
    assert digest in out
    assert out.count("SHA256") == 1
    assert digest not in ckstore("show", "gpt@20").out
    [found] = ckstore("show", "gpt@20", "--sha256", "--json").json["contents"]
    assert found["sha256"] == digest
    assert found | ckstore("show", "gpt@20", "--json").json["contents"][0] == found


def test_unknown(ckstore, filled: Path) -> None:
    assert "near: best" in ckstore("show", "bset", code=13).sentence
    assert "near: gpt@10" in ckstore("show", "gpt@12", code=13).sentence


def test_protected_values_count(tmp_path: Path) -> None:
    with init_store(tmp_path / "store") as store:
        version = stored(store, {"w": draw(300, 256)}, policy=Policy("coarse", scheme="dynaquant"))
        said = version.storage()
        record = store._repository.resolver.record(version._stored.document.objects[0])
        assert said["codebook"] == 1
        assert said["coarse_bytes"] == record.nbytes
