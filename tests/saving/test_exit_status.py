"""A program whose last save fails ends with a failing exit status, unless it has asked for the result."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import ckstore
from tests.test_full_disk import MOUNTED

REPOSITORY = Path(__file__).parents[2]

#: The second state at a step is a conflict: its save fails.
HEAD = """
    import atexit, sys
    atexit.register(print, "registered before")
    import os, signal
    import numpy as np
    import ckstore

    def state(value):
        return {"w": np.full((300, 300), value, np.float32), "step": 1}

    def work(place, *values):
        saver = ckstore.open(place).saver("b")
        for value in values:
            saver.save(state(value))

    if __name__ == "__main__":
        saver = ckstore.open(sys.argv[1], create=True).saver("a")
        saver.save(state(1))
"""

#: The message of a save that failed at the end.
FAILED = "A save failed, and so does the program: a@1"


def run(program: str, place: Path) -> subprocess.CompletedProcess[str]:
    ckstore.init(place / "store").close()  # In a new process that takes a second: sqlite-utils imports pandas.
    script = place / "program.py"
    script.write_text(textwrap.dedent(HEAD) + textwrap.indent(textwrap.dedent(program), "    "))
    return subprocess.run(
        [sys.executable, str(script), str(place / "store"), str(place)],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


def test_an_unclosed_saver_finishes_at_the_end(tmp_path: Path) -> None:
    """Handlers that were registered before and after, buffers that are not flushed, and files that are not closed."""
    program = """
        atexit.register(print, "registered later")
        saver.save(state(2))
        unclosed = open(sys.argv[2] + "/unclosed", "w")
        unclosed.write("all of it")
        sys.stdout.write("not flushed, ")
    """
    done = run(program, tmp_path)
    assert done.returncode == 1, done.stderr
    assert FAILED in done.stderr
    assert done.stdout == "not flushed, registered later\nregistered before\n"
    assert (tmp_path / "unclosed").read_text() == "all of it"


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("saver.save(state(2)); sys.exit()", 1),
        ("saver.save(state(2)); raise ZeroDivisionError", 1),
        ("saver.save(state(2)).exception()", 0),
        ("saver.save(state(2)).add_done_callback(lambda future: future.exception())", 0),
        ("saver.save(state(2)).add_done_callback(lambda future: None)", 1),
    ],
)
def test_a_handler_of_an_error_decides_the_exit_code(program: str, code: int, tmp_path: Path) -> None:
    done = run(program, tmp_path)
    assert done.returncode == code, done.stderr
    assert (FAILED in done.stderr) == (code == 1)


def test_an_error_that_a_later_save_raised_is_handled(tmp_path: Path) -> None:
    program = """
        from concurrent.futures import wait
        wait([saver.save(state(2))])
        try:
            saver.save(state(3))
        except ckstore.ConflictError:
            saver.save({**state(4), "step": 2})
    """
    done = run(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_leaving_the_block_of_a_saver_by_exit_raises(tmp_path: Path) -> None:
    done = run("with saver:\n    saver.save(state(2))\n    sys.exit()\n", tmp_path)
    assert done.returncode == 1
    assert "ConflictError: a@1" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_multiprocessing(method: str, tmp_path: Path) -> None:
    """Saves of one are made durable at its end, too."""
    program = """
        import multiprocessing
        saver.close()
        context = multiprocessing.get_context(METHOD)
        for values in ((1,), (1, 2)):
            process = context.Process(target=work, args=(sys.argv[1], *values))
            process.start()
            process.join()
            print(process.exitcode)
    """
    done = run(program.replace("METHOD", repr(method)), tmp_path)
    printed = [line for line in done.stdout.splitlines() if line != "registered before"]
    assert (done.returncode, printed) == (0, ["0", "1"]), done.stderr
    assert FAILED.replace("a@1", "b@1") in done.stderr
    with ckstore.open(tmp_path / "store") as store:
        assert [(row.run, row.step) for row in store._catalog.versions()] == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("saves_after", [False, True])
def test_sigterm_does_not_end_a_program_as_saved(saves_after: bool, tmp_path: Path) -> None:
    program = """
        saver.save({"w": np.zeros(3), "step": 0}).result()
        if SAVES_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)
            saver.save(state(2))
            print("never")
        else:
            saver.save(state(2))
            os.kill(os.getpid(), signal.SIGTERM)
    """
    done = run(program.replace("SAVES_AFTER", str(saves_after)), tmp_path)
    assert (done.returncode, done.stdout) == (1, "registered before\n"), done.stderr
    assert ("ConflictError: a@1" if saves_after else FAILED) in done.stderr
    with ckstore.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store["a@1"].state_dict()["w"], np.full((300, 300), 1, np.float32))


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("asks", [False, True])
def test_a_full_disk(asks: bool, tmp_path: Path) -> None:
    alone = ["unshare", "-rm", "sh", "-ec", MOUNTED, "sh", str(tmp_path)]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    program = """
        import sys
        import numpy as np
        import ckstore

        saver = ckstore.open(sys.argv[1] + "/store", create=True).saver("a")
        for step in (1, 2, 3):
            future = saver.save({"w": np.random.default_rng(step).normal(size=(500, 500)), "step": step})
            if ASKS:
                print(future.exception())
    """
    command = [*alone, sys.executable, "-c", textwrap.dedent(program).replace("ASKS", str(asks)), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == (0 if asks else 1), done.stderr
    assert "No space" in (done.stdout if asks else done.stderr)
