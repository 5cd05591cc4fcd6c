"""Evaluation command of a checkpoint of the GPT, as a user would write it: prints the loss of the held-out windows."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tools.fidelity.rows import gpt_language
from tools.fidelity.settings import Bench, threads
from tools.fidelity.states import load


def main() -> None:
    """Print the loss, and add it to a log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tier", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True, help="gets a line per evaluation")
    chosen = parser.parse_args()
    torch.set_num_threads(threads(chosen.tier))
    language = gpt_language(Bench(chosen.tier, chosen.work, (), (), lambda line: None))
    loss = language.loss(load(chosen.checkpoint)["model"])
    with chosen.log.open("a") as log:
        log.write(f"{loss}\n")
    print(loss)


if __name__ == "__main__":
    main()
