"""Evaluation commands: how they are run, how their result is read, and the errors of failures."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from ckstore.cli.evaluation import evaluator
from ckstore.errors import CkstoreError, UsageError
from tests.checkpoints import listing


def python(code: str) -> str:
    """Return a command that runs a line of Python, which finds the checkpoint's path in `path`."""
    return f'{sys.executable} -c "import sys; path = sys.argv[1]; {code}" {{}}'


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("2.5", 2.5),
        ("loss=2.5", 2.5),
        ("step 100 loss 2.5e-3", 2.5e-3),
        ("1\\n2\\n3", 3.0),
        ("-.5", -0.5),
        ("+7.", 7.0),
        ("1E5\\n\\n", 1e5),
        ("perplexity: 12.25, done", 12.25),
        ("2.5 (took 3s)", 3.0),
        ("2.5\\nwritten to out_v2.json", 2.5),
        ("0.25 by gpt2", 0.25),
        ("2.5\\nmore information is in the manual", 2.5),
        ("accuracy 71.5%", 71.5),
        ("nan", math.nan),
        ("loss: NaN", math.nan),
        ("3\\n-inf", math.nan),
        ("Infinity", math.nan),
        ("1e999", math.nan),
    ],
)
def test_the_last_number_counts(printed: str, value: float, tmp_path: Path) -> None:
    found = evaluator(python(f"print('{printed}')"))(tmp_path)
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_no_number_is_printed(tmp_path: Path) -> None:
    for said in ("", "fine", "info", "nano infra", "v2"):
        with pytest.raises(CkstoreError, match="no number"):
            evaluator(python(f"print('{said}')"))(tmp_path)
    # Output elsewhere is for people.
    with pytest.raises(CkstoreError, match="no number"):
        evaluator(python("print(2.5, file=sys.stderr)"))(tmp_path)


def test_output_that_is_no_text(tmp_path: Path) -> None:
    assert evaluator(python("sys.stdout.buffer.write(bytes([255, 254, 10]) + b'2.5')"))(tmp_path) == 2.5


def test_an_exit_code(tmp_path: Path) -> None:
    with pytest.raises(CkstoreError, match="exit code 3"):
        evaluator(python("print(1); sys.exit(3)"))(tmp_path)


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    for command in ("no-such-command-here {}", f"{tmp_path} {{}}"):
        with pytest.raises(UsageError, match="cannot be run"):
            evaluator(command)(tmp_path)


@pytest.mark.parametrize("command", ["", "   ", "python eval.py", "{}", "{} --now"])
def test_a_command_without_a_place_for_the_path(command: str) -> None:
    with pytest.raises(UsageError, match=r"no \{\}"):
        evaluator(command)


def test_quotes_that_do_not_match() -> None:
    with pytest.raises(UsageError, match="quotes"):
        evaluator("python -c 'print(1) {}")


def test_the_path_is_one_word(tmp_path: Path) -> None:
    """Whatever is in it: no shell takes it apart, and nothing else in the command is expanded."""
    place = tmp_path / "a b; $HOME * 'c' {}"
    place.write_text("4.5")
    assert evaluator(python("print(open(path).read())"))(place) == 4.5
    code = "import sys; print(len(sys.argv) - 1, sys.argv[2:] == ['$HOME', '*', ';', '&&', '`ls`'])"
    told = python(code.replace("import sys; ", "")).replace("{}", "{} '$HOME' * ';' '&&' '`ls`' | tail")
    with pytest.raises(CkstoreError, match="no number"):
        evaluator(
            told.replace("print(len(sys.argv) - 1, ", "assert ('*' in sys.argv and '|' in sys.argv) or print(1) or (")
        )(place)


def test_the_path_may_be_a_part_of_a_word(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("6.5")
    assert evaluator(python("print(open(path[7:]).read())").replace("{}", "--path={}"))(tmp_path / "model.pt") == 6.5
    both = python("print(int(sys.argv[1] == sys.argv[2]))").replace(" {}", " {} {}")
    assert evaluator(both)(tmp_path) == 1


def test_standard_input_is_empty(tmp_path: Path) -> None:
    assert evaluator(python("print(len(sys.stdin.read()))"))(tmp_path) == 0


# On the command line

LOSS = (
    "import numpy, zipfile; file = zipfile.ZipFile(path);"
    " largest = max(file.infolist(), key=lambda info: info.file_size);"
    " print('loss', numpy.frombuffer(file.read(largest), 'f4').astype('f8').std())"
)


def test_ingest(ckstore, place: Path) -> None:
    [said] = ckstore(
        "ingest", "in/step0.pt", "--run", "gpt", "--max-degradation", "0.5%", "--eval", python(LOSS), "--json"
    ).json
    assert said["fidelity"] == "coarse"
    shown = ckstore("show", "1", "--json").json["coarse"]
    assert 1 <= shown["evaluations"] <= 5
    assert shown["degradation"] <= 0.005
    assert ckstore("verify").code == 0


@pytest.mark.long
def test_without_a_bound_five_percent_are_tolerated(ckstore, place: Path) -> None:
    for run, bound in (("said", ["--max-degradation", "5%"]), ("default", [])):
        ckstore("ingest", "in/step0.pt", "--run", run, *bound, "--eval", python(LOSS))
    said, default = (ckstore("show", run, "--json").json["coarse"] for run in ("said", "default"))
    assert said["degradation"] == default["degradation"]
    assert 0 < default["degradation"] <= 0.05


def test_a_policy_takes_the_quality_that_an_evaluation_finds(ckstore, place: Path) -> None:
    ckstore("ingest", "in/step0.pt", "--run", "gpt", "--step", "1", "--metric", "loss=0.70")
    search = ["--max-rework", "2", "--eval", python(LOSS)]
    refused = ckstore("policy", "gpt", *search, code=2)
    assert "no loss that falls" in refused.err
    ckstore("ingest", "in/step10.pt", "--run", "gpt", "--step", "2", "--metric", "loss=0.69")
    packs = sorted(os.listdir(place / ".ckstore" / "packs"))
    said = ckstore("policy", "gpt", *search, "--json").json[0]
    assert (said["fidelity"], said["scheme"]) == ("coarse", "lattice")
    assert sorted(os.listdir(place / ".ckstore" / "packs")) == packs, "no trial stays"
    strict = python("print(int(open(path, 'rb').read() != open('in/step10.pt', 'rb').read()))")
    assert "No lossy setting" in ckstore("policy", "gpt", "--eval", strict, code=2).err
    assert ckstore("policy", "gpt", "--json").json[0] == said
    assert "coarse policy of a run" in ckstore("policy", *search, code=2).err
    ckstore("ingest", "in/step0.pt", "--run", "gpt", "--step", "3")
    assert "is coarse" in ckstore("policy", "gpt", *search, code=2).err
    assert "no version" in ckstore("policy", "other", *search, code=13).err


@pytest.mark.parametrize(
    ("options", "code", "hint"),
    [
        (["--max-degradation", "1%"], 2, "give its evaluation with --eval"),
        (["--max-rework", "2"], 2, "give its evaluation with --eval"),
        (["--max-rework", "2", "--max-degradation", "1%", "--eval", "true {}"], 2, "not both"),
        (["--max-rework", "2", "--maximise", "--eval", "true {}"], 2, "leave --maximise out"),
        (["--jobs", "2"], 2, "give its evaluation with --eval"),
        (["--jobs", "0", "--eval", "true {}"], 2, "x>=1"),
        (["--max-degradation", "x", "--eval", "true {}"], 2, "not a number such as"),
        (["--max-degradation", "-1%", "--eval", "true {}"], 2, "0 or more"),
        (["--max-degradation", "1%", "--eval", "true"], 2, "no {}"),
        (["--max-degradation", "1%", "--eval", "'"], 2, "quotes"),
        (["--max-degradation", "1%", "--eval", "no-such-command {}"], 2, "cannot be run"),
        (["--max-degradation", "1%", "--eval", "false {}"], 1, "exit code 1"),
        (["--max-degradation", "1%", "--eval", "true {}"], 1, "no number"),
        (["--max-degradation", "1%", "--eval", "echo nan {}/nan"], 2, "finite"),
        (["--max-degradation", "1%", "--eval", "true {}", "--max-abs-error", "1"], 2, "not both"),
        (["--max-degradation", "1%", "--eval", "true {}", "--fidelity", "exact"], 2, "leave the exact policy out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_failed_evaluations_are_one_sentence(ckstore, place: Path, options: list[str], code: int, hint: str) -> None:
    before = listing(place / ".ckstore")
    result = ckstore("ingest", "in/step0.pt", "--run", "gpt", *options, code=code)
    assert hint in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert listing(place / ".ckstore") == before
    assert ckstore("ingest", "in/step0.pt", "--run", "gpt", "--json").json[0]["fidelity"] == "exact"
