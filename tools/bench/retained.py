"""Measures a store while a training saves hundreds of times under a policy, and checks that kept versions are exact."""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ckstore
from ckstore.policy import Policy, Retention

#: The retention of older versions: see `docs/how-to/retention.md`.
RETENTION = Retention(
    exact_last=15, exact_every=1000, keep_last=50, keep_every=1000, drop=("optimizer/*",), whole_last=3
)

MB = 1_000_000


def training(saves: int, every: int) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Yield step, state and loss, at every save, of a network that learns the outputs of another one."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher, model = (
        torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh(),
            torch.nn.Linear(width, 8),
        )
        for width in (32, 192)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, saves * every + 1):
        data = torch.randn(64, 64)
        loss = (model(data) - teacher(data).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            yield step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, loss.item()


def size_of(path: Path) -> int:
    """Return the bytes of all files of a store."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def equal(found: Any, expected: Any) -> bool:
    """Return whether two nested states are equal, bit for bit."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found.view(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return bool(found == expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=500)
    parser.add_argument("--every", type=int, default=10, help="steps of training between two saves")
    parser.add_argument("--rows", type=int, default=10, help="lines to print")
    parser.add_argument("--work", type=Path, help="directory for the store; by default a temporary one")
    asked = parser.parse_args()
    states: dict[int, dict[str, Any]] = {}
    saved = 0
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=asked.work, prefix="ckstore-bench-") as name,
        ckstore.init(Path(name) / "store") as store,
    ):
        store.set_policy(Policy(retention=RETENTION), "run")
        print(f"policy: {RETENTION}; a save every {asked.every} steps")
        print("| saves | all of them, MB | versions | whole | weights exact | coarse | store, MB | after gc, MB |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for number, (step, state, loss) in enumerate(training(asked.saves, asked.every), 1):
            saved += store.ingest(state, run="run", metrics={"loss": loss}).version.original_bytes
            states[step] = copy.deepcopy(state)
            if number % max(asked.saves // asked.rows, 1) == 0:
                present = size_of(store.path)
                store.retain("run")
                store.gc(grace=0)
                rows = store.versions("run")
                whole = [row for row in rows if not row.dropped and row.fidelity == "exact"]
                exact = [row for row in rows if row.dropped and row.fidelity == "exact"]
                for row in whole:
                    assert equal(store[row.number].state_dict(), states[row.step or 0]), row
                for row in exact:
                    found = store[row.number].state_dict()
                    assert "optimizer" not in found
                    assert equal(found["model"], states[row.step or 0]["model"]), row
                print(
                    f"| {number} | {saved / MB:.1f} | {len(rows)} | {len(whole)} | {len(exact)} "
                    f"| {len(rows) - len(whole) - len(exact)} | {present / MB:.2f} | {size_of(store.path) / MB:.2f} |",
                    flush=True,
                )
                kept = {row.step for row in rows}
                states = {step: one for step, one in states.items() if step in kept}
        problems = store.verify().problems
        print(f"verify: {problems or 'no problems'}; versions marked exact are exact; {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
