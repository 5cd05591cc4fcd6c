from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import InputError
from ckstore.formats.torch.live_state import StateDictSource, describe_state_dict
from ckstore.scanning.hashing import hash_version, held_windows
from ckstore.scanning.inputs import STATE_DICT, scan_state_dict
from tests.equality import assert_same, storage_of


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(10)
    weight = torch.randn(300, 400)
    flat = torch.randn(90_000)
    return {
        "model": OrderedDict(
            weight=weight, tied=weight, transposed=torch.randn(400, 200).t(),
            parameter=torch.nn.Parameter(torch.randn(4)), first=flat[:80_000], second=flat[80_000:],
            bf16=torch.randn(70_000).bfloat16(), empty=torch.empty(0, 2),
        ),
        "optimizer": {"state": {0: {"step": torch.tensor(4.0)}, 1: {}}, "lr": 0.1, "betas": (0.9, 1)},
        "step": 17, "names": ["a", None, True], "text": "é/%", 3: {"3": 4},
    }  # fmt: skip


def test_a_state_dict_comes_back_as_it_was(state: dict[str, Any], tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        row = store.ingest(state, run="live").version
        assert (row.step, row.run, row.files) == (17, "live", 1)
        version = store["live@17"]
        found = version.state_dict()
        assert_same(found, state)
        model = found["model"]
        assert storage_of(model["weight"]) == storage_of(model["tied"])
        assert storage_of(model["first"]) == storage_of(model["second"])
        version.checkout(tmp_path / "out.pt")
        assert_same(torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=True), state)
        version.checkout(tmp_path)
        assert (tmp_path / STATE_DICT).read_bytes() == (tmp_path / "out.pt").read_bytes()


@pytest.mark.encoded
def test_ingesting_its_checkout_adds_nothing(state: dict[str, Any], tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(state)
        store["latest"].checkout(tmp_path / "out.pt")
        row = store.ingest(tmp_path / "out.pt", run="file").version
        assert row.stored_bytes < 20_000
        assert row.original_bytes > 1_000_000


@pytest.mark.encoded
def test_the_next_state_is_stored_as_a_delta(state: dict[str, Any], tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(state, step=1)
        state["model"]["weight"] += 1e-5 * torch.randn(300, 400)
        store.ingest(state, step=2)
        assert store["latest"].stored_bytes < 400_000
        assert_same(store["latest"].state_dict()["model"]["tied"], state["model"]["weight"])


def test_memory_is_read_once_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    read_into = StateDictSource.read_into

    def noted(self: StateDictSource, offset: int, target: memoryview) -> None:
        lengths.append(len(target))
        read_into(self, offset, target)

    monkeypatch.setattr(StateDictSource, "read_into", noted)
    scanned = scan_state_dict({"w": torch.zeros(3 << 20)})
    hash_version(scanned, force=False)
    assert 12 << 20 <= sum(lengths) <= 13 << 20
    assert max(lengths) <= 4 << 20


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("is_still", [False, True])
def test_a_state_that_changes_while_it_is_read_is_refused(rounded: bool, is_still: bool) -> None:
    state = {"w": torch.randn(70_000), "b": torch.randn(7)}
    described = describe_state_dict(state)
    described.is_still = is_still
    scanned = scan_state_dict(described)
    hash_version(scanned, force=False)
    unit, bundle = scanned.units
    scanned.checked(unit, rounded=rounded)
    scanned.checked(bundle, rounded=rounded)
    state["w"][7] += 1
    with pytest.raises(InputError, match="changed while it was read"):
        scanned.checked(unit, rounded=rounded)


@pytest.mark.parametrize("is_still", [False, True])
def test_values_at_odd_addresses_are_read_aligned(is_still: bool) -> None:
    """Kernels refuse others."""
    array = np.zeros((4 << 16) + 1, np.uint8)[1:].view(np.float32)
    assert not array.flags.aligned
    described = describe_state_dict({"w": array})
    described.is_still = is_still
    scanned = scan_state_dict(described)
    for [number] in held_windows(scanned):
        assert scanned.whole(scanned.units[number]).flags.aligned
    scanned.held.clear()
    assert scanned.whole(scanned.units[0]).flags.aligned


def test_copies_of_non_contiguous_tensors_do_not_accumulate() -> None:
    """A transposed array is copied to be read, and the copy goes with its last byte."""
    state = {str(number): np.full((500, 600), float(number), np.float32).T for number in range(20)}
    scanned = scan_state_dict(state)
    block = memoryview(bytearray(1 << 18))
    tracemalloc.start()
    for offset in range(0, scanned.size - len(block), len(block)):
        scanned.files[0].source.read_into(offset, block)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * state["0"].nbytes


@pytest.mark.parametrize("hot", [0, 1])
@pytest.mark.parametrize("kind", ["tensor", "uncounted", "middle", "array", "scattered"])
def test_a_state_dict_that_changes_while_it_is_read_is_refused(kind: str, hot: int, tmp_path: Path) -> None:
    """Fused optimisers change tensors without torch counting it, and so do writes through NumPy."""
    large = torch.randn(1200, 1200)
    values: dict[str, Any] = {
        "tensor": large, "uncounted": large, "middle": large, "array": large.numpy(), "scattered": large[::2, ::2]
    }  # fmt: skip
    state = {"first": torch.ones(300, 300), "w": values[kind]}

    def train(_: int) -> None:
        if kind == "tensor":
            large[0, 0] += 1
        elif kind == "middle":
            large.numpy()[500:600] += 1
        else:
            large.numpy()[:] += 1

    with ckstore.init(tmp_path / "store") as store:
        with pytest.raises(InputError, match="The tensor at w changed while it was read; change nothing"):
            store.ingest(state, step=1, hot=hot, progress=train)
        assert store._catalog.versions() == []
        store.ingest(state, step=1, hot=hot)
        assert store.verify().problems == []


def test_tensors_of_inference_mode_are_taken(tmp_path: Path) -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": tensor})
        assert store["latest"].state_dict()["w"].equal(torch.ones(3))


@pytest.mark.long
def test_a_state_is_described_while_another_thread_imports_torch() -> None:
    script = (
        "import sys, threading, time\n"
        "import numpy as np\n"
        "from ckstore.formats.torch.live_state import describe_state_dict\n"
        "importing = threading.Thread(target=__import__, args=('torch',))\n"
        "importing.start()\n"
        "while 'torch' not in sys.modules: time.sleep(0.001)\n"
        "assert not hasattr(sys.modules['torch'], 'Tensor')\n"
        "print(len(describe_state_dict({'w': np.zeros(3)}, 'raise').extents))\n"
        "importing.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
