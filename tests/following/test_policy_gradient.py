"""A tiny policy gradient: a trainer publishes its policy, and two workers act by each version that they follow."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckstore

pytestmark = [
    pytest.mark.local,
    pytest.mark.encoded,
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]

#: Versions, more where this variable is set: `CKSTORE_VERSIONS=200`.
VERSIONS = int(os.environ.get("CKSTORE_VERSIONS", "6"))

#: States, actions, units of the hidden layer.
STATES, ACTIONS, HIDDEN = 16, 4, 64

WORKERS = ("one", "two")


class Policy(torch.nn.Module):
    """Chooses an action by the state; the right one is the state's number modulo the actions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(STATES, HIDDEN)
        self.last = torch.nn.Linear(HIDDEN, ACTIONS)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(torch.nn.functional.one_hot(states, STATES).float())))
        return found


def digest(weights: dict[str, Tensor]) -> str:
    """Return a digest of weights as they are published."""
    data = b"".join(weights[name].bfloat16().view(torch.int16).numpy().tobytes() for name in sorted(weights))
    return blake3(data).hexdigest()


def work(name: str, rollouts: Any) -> None:
    """Follow the policy, act by each version, and return its step, its digest and the actions."""
    torch.set_num_threads(1)  # Threads of the parent, for which others would wait, are not in a fork.
    policy, generator = Policy(), torch.Generator().manual_seed(len(name))
    for version in ckstore.follow("store", "policy", name, poll=0.01):
        weights = load_file(version.path / "model.safetensors")
        policy.load_state_dict(weights)
        states = torch.randint(STATES, (256,), generator=generator)
        with torch.no_grad():
            actions = torch.multinomial(policy(states).softmax(-1), 1, generator=generator)[:, 0]
        rollouts.put((name, version.version.step, digest(weights), states.tolist(), actions.tolist()))
        if version.version.step == VERSIONS - 1:
            return


def test_workers_act_by_the_weights_of_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    Path("like").mkdir()
    save_file(policy.state_dict(), "like/model.safetensors")
    Path("like/config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    context = multiprocessing.get_context("fork")  # Importing torch takes longer than all that the workers do.
    rollouts = context.Queue()
    ckstore.init("store").close()
    workers = [context.Process(target=work, args=(name, rollouts), daemon=True) for name in WORKERS]
    for worker in workers:
        worker.start()
    rewards = []
    with ckstore.open("store") as store, store.publish("policy", like="like", dtype="bfloat16") as publisher:
        for step in range(VERSIONS):
            publisher.save(policy.state_dict(), step=step).result()
            # The policy changes once both have acted by it.
            results = [rollouts.get(timeout=60) for _ in WORKERS]
            assert {result[0] for result in results} == set(WORKERS)
            for _, applied, found, states, actions in results:
                assert (applied, found) == (step, digest(policy.state_dict()))
                given, chosen = torch.tensor(states), torch.tensor(actions)
                reward = (chosen == given % ACTIONS).float()
                rewards.append(float(reward.mean()))
                chances = policy(given).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
                (-(reward - reward.mean()) * chances).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    if VERSIONS >= 200:
        assert sum(rewards[-20:]) / 20 > 0.9 > 0.4 > sum(rewards[:4]) / 4
