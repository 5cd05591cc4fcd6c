"""The search for a setting: `ckstore ingest --max-degradation --eval` on the GPT, with an evaluation command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ckstore
from tools.fidelity.rows import gpt_language
from tools.fidelity.settings import Bench
from tools.fidelity.states import as_state, load

#: The tolerated relative rise of the evaluation loss.
TOLERANCE = 0.005

#: The versions that are ingested.
_VERSIONS = 4

_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Searched:
    """The result of the search for one version.

    Attributes
    ----------
    step
        Of the version.
    fidelity
        `exact` if no setting was good enough.
    evaluations
        The number of runs of the command, for the original and for candidates.
    rise
        Relative rise of the evaluation loss of the stored version.
    ratio
        Bytes of the file over the bytes that the version added to the store.
    """

    step: int
    fidelity: str
    evaluations: int
    rise: float
    ratio: float


def measure(bench: Bench) -> list[Searched]:
    """Ingest the last versions of the run, each with a search that may lose half a percent."""
    language = gpt_language(bench)
    found = []
    with bench.scratch() as scratch:
        root, log = scratch / "store", scratch / "evaluations"
        ckstore.init(root).close()
        log.touch()
        evaluation = [
            sys.executable, "-m", "tools.fidelity.evaluate", "--tier", bench.name, "--work", str(bench.work.resolve()),
            "--log", str(log.resolve()), "{}",
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        for path in bench.run("gpt")[-_VERSIONS:]:
            before = len(log.read_text().splitlines())
            subprocess.run(
                [
                    sys.executable, "-m", "ckstore", "--store", root, "ingest", path,
                    "--max-degradation", f"{TOLERANCE:.1%}", "--eval", shlex.join(evaluation),
                ],
                env=environment, stdout=subprocess.DEVNULL, check=True,
            )  # fmt: skip
            with ckstore.open(root, "r") as store:
                version = store["latest"]
                restored = as_state(version.state_dict())
            exact = load(path)
            found.append(
                Searched(
                    exact["step"],
                    version.row.fidelity,
                    len(log.read_text().splitlines()) - before,
                    language.loss(restored["model"]) / language.loss(exact["model"]) - 1,
                    version.row.original_bytes / version.row.stored_bytes,
                )
            )
            bench.report(str(found[-1]))
    return found
