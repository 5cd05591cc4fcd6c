"""The program around the verbs: help, errors as one sentence, exit codes, and modules that stay unimported."""

from __future__ import annotations

import os
import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import click
import pytest

from ckstore.cli import main
from ckstore.cli.program import VERBS, program
from ckstore.cli.verb import EXIT_CODES, Verb
from ckstore.errors import CkstoreError, LockedError
from ckstore.storage.catalog import Catalog

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "zarr", "numpy", "numcodecs", "sqlite_utils")


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckstore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def errors(of: type[CkstoreError]) -> set[type[CkstoreError]]:
    return {of}.union(*(errors(child) for child in of.__subclasses__()))


@pytest.mark.parametrize("name", VERBS)
def test_help_shows_examples_and_ends_with_exit_codes(ckstore, name: str) -> None:
    lines = ckstore(name, "--help").out.splitlines()
    assert lines[0].startswith(f"Usage: ckstore {name}")
    command = program.get_command(click.Context(program), name)
    assert isinstance(command, Verb)
    assert "Examples:" in lines
    assert any(line.strip().startswith(("ckstore ", 'eval "$(ckstore')) for line in lines[lines.index("Examples:") :])
    codes = [
        int(match[1]) for line in lines[lines.index("Exit codes:") + 1 :] if (match := re.match(r"  (\d+) ", line))
    ]
    assert tuple(codes) == command.exit_codes
    assert len(codes) == len(lines) - lines.index("Exit codes:") - 1


def test_every_exit_code_of_the_library_is_explained(ckstore) -> None:
    assert {error.exit_code for error in errors(CkstoreError)} <= EXIT_CODES.keys()
    out = ckstore("--help").out
    assert all(f"\n  {name} " in out for name in VERBS)
    assert out.rstrip().endswith(EXIT_CODES[130])


def test_no_arguments_is_help(ckstore) -> None:
    assert "Usage: ckstore" in ckstore(code=2).err


def test_version(ckstore) -> None:
    assert re.fullmatch(r"ckstore \d+\.\d+\.\d+\n", ckstore("--version").out)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["lgo"], "Unknown verb lgo; did you mean log?"),
        (["zzz"], "Unknown verb zzz; see `ckstore --help`."),
        *(
            ([typed], f"Unknown verb {typed}; did you mean {verb}?")
            for typed, verb in {
                "list": "log",
                "rename": "runs RUN --rename NAME",
                "metrics": "metric",
                "restore": "checkout",
                "add": "ingest",
                "rm": "forget",
                "history": "log",
                "compact": "encode",
                "run": "runs, runs RUN --rename NAME or forget --run RUN",
                "fork": "ingest PATH --parent VERSION",
                "get": "checkout",
            }.items()
        ),
        (["log", "--nope"], "No such option"),
        (["log", "--top", "3", "loss"], "write `ckstore log --sort best:METRIC -n N`."),
        (["diff", "1", "2", "--config"], "write `ckstore diff BEFORE AFTER`."),
        (["forget", "--keep-daily", "7"], "write `ckstore forget --keep-every 1d:N`."),
        (["policy", "--keep-daily", "7"], "write `ckstore policy --keep-every 1d:N`."),
        (["diff", "gpt@1..gpt@2"], "gpt@1..gpt@2 is a range; write `ckstore diff gpt@1 gpt@2`."),
        (["log", "--since", "2d"], "write `ckstore log --where 'age<2d'`."),
        (["log", "-n", "x"], "see `ckstore log --help`."),
        (["log", "--store", "s"], "Put --store before the verb: `ckstore --store PATH log`."),
        (["show"], "see `ckstore show --help`."),
        (["verify", "--sample", "2"], "--sample"),
        (["rebase", "--max-restore-cost", "0.5"], "--max-restore-cost"),
    ],
)
def test_usage_errors_are_one_sentence(ckstore, arguments: list[str], sentence: str) -> None:
    result = ckstore(*arguments, code=2)
    assert sentence in result.sentence
    assert result.out == ""


@pytest.mark.parametrize("arguments", [["log"], ["ingest", "x.pt"], ["show", "1"], ["verify"], ["recover"], ["stats"]])
def test_no_store(ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKSTORE", raising=False)
    assert "ckstore init" in ckstore(*arguments, code=10).sentence
    assert "is not a store" in ckstore("--store", "elsewhere", *arguments, code=10).sentence
    assert list(tmp_path.iterdir()) == []


def test_the_store_is_found(ckstore, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = filled / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert len(ckstore("log", "--json").json) == 3
    ckstore("init", "other")
    monkeypatch.setenv("CKSTORE", str(below / "other"))
    assert ckstore("log", "--json").json == []
    assert len(ckstore("--store", filled / ".ckstore", "log", "--json").json) == 3


@pytest.mark.local  # Whether a URL has a store is known only once it is opened.
def test_a_variable_that_names_no_store(ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKSTORE", str(tmp_path))
    assert "$CKSTORE" in ckstore("log", code=10).sentence


@pytest.mark.local
def test_a_locked_store(ckstore, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "open", classmethod(lambda cls, path, mode="r": cls(path, mode, 0.05)))
    other = sqlite3.connect(filled / ".ckstore" / "catalog.sqlite", isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        assert "locked by another process" in ckstore("tag", "1", "first", code=LockedError.exit_code).sentence
    finally:
        other.close()
    ckstore("tag", "1", "first")


@pytest.mark.local
def test_a_store_of_a_later_version(ckstore, filled: Path) -> None:
    database = sqlite3.connect(filled / ".ckstore" / "catalog.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    assert "later ckstore" in ckstore("log", code=14).sentence


@pytest.mark.local
def test_a_damaged_catalog(ckstore, filled: Path) -> None:
    (filled / ".ckstore" / "catalog.sqlite").write_bytes(b"no database at all" * 100)
    assert "ckstore recover" in ckstore("log", code=4).sentence


def test_an_interrupt(ckstore, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckstore.intake.intake.Intake.ingest", interrupted)
    result = ckstore("ingest", "in/step0.pt", code=130)
    assert result.err.split("ckstore: ")[-1] == "interrupted; the store is consistent.\n"


def test_errors_of_the_system_are_one_sentence(ckstore, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "catalog.sqlite")

    monkeypatch.setattr("ckstore.store.Store.log", refused)
    said = ckstore("log", code=1).sentence
    assert said.startswith(f"{filled}/catalog.sqlite cannot be written by ")
    assert said.endswith(" (Permission denied), though its mode allows it; look for access control lists, or a flag.")


def test_main_exits_with_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["nothing"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("ckstore: ")


def test_ckstore_runs_as_a_module(filled: Path) -> None:
    done = process("log", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert '"run": "gpt"' in done.stdout
    missing = process("show", "nowhere")
    assert (missing.returncode, missing.stdout) == (13, "")
    assert missing.stderr.count("\n") == 1


def test_colours_are_for_terminals(filled: Path) -> None:
    assert "\x1b" not in process("log").stdout + process("nothing").stderr


def test_a_closed_pipe_is_quiet(filled: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ckstore", "log"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("arguments", "code"), [("log", 0), ("nothing", 2)])
def test_output_may_be_closed_from_the_start(filled: Path, arguments: str, code: int) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m ckstore {arguments} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (code, int(code != 0))


@pytest.mark.parametrize(
    ("arguments", "code"), [("checkout best -o out.pt", 0), ("ingest in/step0.pt", 0), ("verify", 0), ("nothing", 2)]
)
def test_errors_and_bars_may_have_nowhere_to_go(filled: Path, arguments: str, code: int) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m ckstore {arguments} 2>&-"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=False)
    assert (done.returncode, bool(done.stdout)) == (code, code == 0)
    assert code or "checkout" not in arguments or Path("out.pt").read_bytes() == Path("in/step20.pt").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code"), [(["log"], 0), (["gc"], 0), (["--help"], 0), ([], 2), (["nowhere"], 2), (["show", "no"], 13)]
)
def test_a_process_looks_for_no_garbage_when_it_ends(filled: Path, arguments: list[str], code: int) -> None:
    program = (
        "import atexit, gc, sys\natexit.register(lambda: print(gc.get_freeze_count() > len(gc.get_objects())))\n"
        f"sys.argv[1:] = {arguments!r}\nfrom ckstore.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, "True")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["log"], ["log", "--json"], ["tag"], ["tag", "gpt@10", "good"], ["--help"]])
def test_quick_verbs_import_nothing_that_computes(filled: Path, arguments: list[str]) -> None:
    packing = set()
    if "CKSTORE" in os.environ:  # A remote store, whose mirror is made here; a record of its log is packed.
        assert process("log").returncode == 0
        packing = {"numcodecs", "numpy"} if arguments[1:] == ["gpt@10", "good"] else set()
    assert set(heavy_imports(arguments)) == packing


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "best"],
        ["ls", "best"],
        ["metric", "best", "a=1"],
        ["policy"],
        ["stats"],
        ["forget", "1"],
        ["gc"],
        ["push"],
    ],
    ids=" ".join,
)
def test_verbs_that_touch_no_tensor_load_no_framework(filled: Path, arguments: list[str]) -> None:
    if arguments == ["push"]:
        assert process("init", "other").returncode == 0
        arguments = ["push", "other"]
    assert not {"torch", "zarr"} & set(heavy_imports(arguments))


def test_init_imports_nothing_that_computes(tmp_path: Path) -> None:
    # A catalog is made by migrations, which are sqlite-utils', which imports NumPy.
    assert set(heavy_imports(["init", str(tmp_path / "store")])) <= {"sqlite_utils", "numpy"}


def heavy_imports(arguments: list[str]) -> list[str]:
    code = (
        "import sys\nfrom ckstore.cli.program import run\n"
        f"code = run({arguments!r})\nassert code == 0\n"
        f"print('\\n' + ' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.long
@pytest.mark.parametrize("module", ["ckstore.cli.program", "click", "ckstore.store", "ckstore.kernels"])
def test_an_interruption_while_modules_are_imported(place: Path, module: str) -> None:
    """An interruption is one sentence at any import; only `ckstore` and `ckstore.cli` are loaded before its handler."""
    assert process("policy", "--hot", "0").returncode == 0  # A hot version needs no kernel.
    code = f"""
        import importlib.abc, os, signal, sys
        class Interrupting(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)
        import ckstore.cli
        assert sorted(name for name in sys.modules if name.startswith("ckstore")) == ["ckstore", "ckstore.cli"]
        sys.meta_path.insert(0, Interrupting())
        sys.argv = ["ckstore", "ingest", "in/step10.pt"]
        ckstore.cli.main()
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}  # The tests' own path imports modules of ours.
    command = [sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stderr.strip() == "ckstore: interrupted; the store is consistent."  # behind ^C, click begins a line
    assert done.returncode == 130


@pytest.mark.long
@pytest.mark.parametrize("mebibytes", [100, 300, 500, 600])
def test_a_limit_on_address_space(place: Path, mebibytes: int) -> None:
    """With too little, the process would end at any allocation."""
    script = f'ulimit -c 0; ulimit -v {mebibytes << 10}; exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "ckstore"]
    assert subprocess.run([*command, "log"], capture_output=True, check=False).returncode == 0
    command += ["ingest", "in/step10.pt", "--run", "new"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        assert mebibytes > 300
        return
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ckstore: ")
    assert "ulimit -v" in done.stderr.splitlines()[-1]


def test_the_public_names() -> None:
    import ckstore

    assert set(ckstore.__all__) <= set(dir(ckstore))
    assert all(getattr(ckstore, name).__name__ == name for name in ckstore.__all__)
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        ckstore.opne  # noqa: B018
