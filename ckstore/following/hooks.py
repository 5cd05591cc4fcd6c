"""Hooks of a follower: a command that tells an engine of a version."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.following.follow import Followed


def described(item: Followed) -> dict[str, Any]:
    """Return a version as hooks get it: JSON on stdin and the bodies of requests."""
    row = item.version
    return {
        "model_path": os.path.abspath(item.path), "id": row.uid, "version": row.number, "run": row.run,
        "step": row.step, "metrics": dict(row.metrics),
    }  # fmt: skip


def run_command(command: str, item: Followed) -> str | None:
    """Run a command of the shell with a version as JSON on stdin, and its parts in the environment.

    Return the reason for a failure, None for exit code 0.
    """
    facts = described(item)
    variables = {f"CKSTORE_{name.upper()}": str(facts[name]) for name in ("model_path", "id", "version", "run", "step")}
    try:
        done = subprocess.run(
            command, shell=True, check=False, input=json.dumps(facts).encode(), env={**os.environ, **variables}
        )
    except OSError as error:
        raise UsageError(f"{command} cannot be run ({error.strerror}); see --exec.") from error
    return None if done.returncode == 0 else f"{command} failed with exit code {done.returncode}"
