"""A run directory has one writer; however that writer dies, everything with its final name is complete."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude import __version__
from etude.errors import BusyError, EtudeError, InputError
from etude.files import content_digest
from etude.recipe import Recipe, load_recipe
from etude.runs.run import Parent, Run

ROOT = Path(__file__).parents[2]
RECIPE = Recipe.model_validate(
    {"name": "r", "stages": ["tokenizer"], "tokenizer": {"sources": ["stdlib"], "vocab_size": 300}}
)
OTHER = Recipe.model_validate({"name": "r", "stages": ["tokenizer"], "tokenizer": {"sources": ["stdlib"]}})

# Code that a second process runs first: it opens the run `path` under RECIPE for writing.
OPEN_RUN = f"""
import os, sys, time
from pathlib import Path
from etude.recipe.recipe import Recipe
from etude.runs.run import Run
run = Run.create_or_resume(sys.argv[1], Recipe.model_validate({RECIPE.model_dump()!r}), resume=True)
"""


def second_process(path: Path, body: str) -> "subprocess.Popen[str]":
    """Start a process that opens the run for writing and runs `body`; return when it has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN_RUN + textwrap.dedent(body), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline(), "the second process failed before it was ready"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


# --- opening


def test_a_new_run_holds_its_recipe_and_can_be_read(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path / "run", RECIPE):
        pass
    assert load_recipe(tmp_path / "run" / "recipe.toml") == RECIPE
    assert Run.read(tmp_path / "run").settings.name == RECIPE.name


def test_a_run_is_not_started_twice_without_resume(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        run.finish_stage("tokenizer")
    with pytest.raises(InputError, match="--resume"):
        Run.create_or_resume(tmp_path, RECIPE)
    with Run.create_or_resume(tmp_path, RECIPE, resume=True) as run:
        assert run.stage_done("tokenizer")


def test_resuming_under_another_recipe_is_refused_key_by_key(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        run.save_facts("tokenizer", begun=True)
    with pytest.raises(InputError, match=r"another recipe[^\n]*\n +tokenizer\.vocab_size: 300 -> 1024"):
        Run.create_or_resume(tmp_path, OTHER, resume=True)
    assert load_recipe(tmp_path / "recipe.toml") == RECIPE
    with Run.create_or_resume(tmp_path, OTHER, resume=True, allow_changes=True):
        assert load_recipe(tmp_path / "recipe.toml") == OTHER


def test_a_stage_that_has_not_started_may_still_change(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE):
        pass
    with Run.create_or_resume(tmp_path, OTHER, resume=True) as run:
        assert run.settings == OTHER


def test_a_line_that_does_not_fit_on_the_disk_is_not_written_in_part(tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the kernel writes part of the line, then none."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from etude.runs.run import Run; from etude.errors import EtudeError\n"
        "from etude.recipe.recipe import load_recipe\n"
        f"path = Path({str(tmp_path / 'run')!r}); recipe = load_recipe({str(written_recipe(tmp_path))!r})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "with Run.create_or_resume(path, recipe) as run:\n"
        "    run.log('s', 1, note='x' * 100)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))\n"
        "    try: run.log('s', 2, note='y' * 200); sys.exit('no error')\n"
        "    except EtudeError: pass\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "    run.log('s', 3)\n"
        "    assert [r['step'] for r in run.metrics()] == [1, 3]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def written_recipe(directory: Path) -> Path:
    (directory / "r.toml").write_text('name = "r"\nstages = ["tokenizer"]\n[tokenizer]\nsources = ["stdlib"]\n')
    return directory / "r.toml"


@pytest.mark.parametrize(
    "text", ['{"format": 1, "stages": []}', '{"format": 1, "stages": {"tokenizer": 5}}', "[]", "{"]
)
def test_a_damaged_state_file_is_an_error(tmp_path: Path, text: str) -> None:
    with Run.create_or_resume(tmp_path, RECIPE):
        pass
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(EtudeError, match=r"state\.json"):
        Run.read(tmp_path)
    (tmp_path / "state.json").unlink()
    (tmp_path / "lineage.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(EtudeError, match=r"lineage\.jsonl"):
        Run.read(tmp_path).artefacts()


def test_a_directory_with_other_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"not empty \(it has thesis\.tex\)"):
        Run.create_or_resume(tmp_path, RECIPE, resume=True)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(InputError, match="is a file"):
        Run.create_or_resume(tmp_path / "thesis.tex", RECIPE)
    with pytest.raises(InputError, match="is not a run"):
        Run.read(tmp_path)


def test_a_run_open_for_reading_refuses_to_write(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE) as written:
        reader = Run.read(tmp_path)
    for run in (reader, written):  # a closed run has given up its lock
        with pytest.raises(EtudeError, match="reading only"):
            run.log("tokenizer", 0, loss=1.0)
        with pytest.raises(EtudeError, match="reading only"):
            run.finish_stage("tokenizer")


# --- one writer


def test_a_second_writer_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    process = second_process(tmp_path, "run.log('tokenizer', 0, a=1); print('open', flush=True); time.sleep(60)")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(BusyError) as caught:
        Run.create_or_resume(tmp_path, RECIPE, resume=True)
    assert caught.value.exit_code == 3
    for part in (str(tmp_path), f"pid {process.pid}", socket.gethostname(), "since 20"):
        assert part in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert [record["a"] for record in Run.read(tmp_path).metrics()] == [1]  # reading needs no lock
    kill(process)
    with Run.create_or_resume(tmp_path, RECIPE, resume=True):  # the kernel released the lock
        pass


def test_a_second_writer_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE), pytest.raises(BusyError, match=f"pid {os.getpid()}"):
        Run.create_or_resume(tmp_path, RECIPE, resume=True)
    with Run.create_or_resume(tmp_path, RECIPE, resume=True):
        pass


# --- kill -9


def test_metrics_survive_a_writer_killed_at_any_moment(tmp_path: Path) -> None:
    process = second_process(
        tmp_path,
        """
        for step in range(10**9):
            run.log("tokenizer", step, loss=1.0 / (step + 1), note="x" * 3000)
            if step == 50: print("writing", flush=True)
        """,
    )
    kill(process)
    with Run.create_or_resume(tmp_path, RECIPE, resume=True) as run:
        steps = [record["step"] for record in run.metrics()]
        assert len(steps) > 50
        assert steps == list(range(len(steps)))
        run.log("tokenizer", len(steps), loss=0.0)
        assert len(run.metrics()) == len(steps) + 1


def test_an_unfinished_artefact_never_has_its_final_name(tmp_path: Path) -> None:
    process = second_process(
        tmp_path,
        """
        with run.artefact("tokenizer", kind="tokenizer", stage="tokenizer") as directory:
            (directory / "tokenizer.json").write_text("half of")
            print("writing", flush=True)
            time.sleep(60)
        """,
    )
    kill(process)
    assert not (tmp_path / "artefacts" / "tokenizer").exists()
    with Run.create_or_resume(tmp_path, RECIPE, resume=True) as run:
        assert os.listdir(tmp_path / "artefacts") == []  # the draft was removed
        assert run.artefacts() == []
        with run.artefact("tokenizer", kind="tokenizer", stage="tokenizer") as directory:
            (directory / "tokenizer.json").write_text("the whole")
        assert (run.find("tokenizer").path / "tokenizer.json").read_text() == "the whole"


def test_state_is_always_complete(tmp_path: Path) -> None:
    process = second_process(
        tmp_path,
        """
        for step in range(10**9):
            run.save_facts("tokenizer", step=step, ballast="x" * 20000)
            if step == 5: print("writing", flush=True)
        """,
    )
    kill(process)
    with Run.create_or_resume(tmp_path, RECIPE, resume=True) as run:
        assert run.facts("tokenizer")["step"] >= 5
        assert not run.stage_done("tokenizer")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_run_killed_during_creation_can_be_created(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("pid 1 on nowhere since never\n")
    (tmp_path / ".recipe.toml.0123.part").write_text("name = ")
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        assert run.settings == RECIPE


@given(cut=st.integers(1, 200), rubbish=st.sampled_from([b"", b"\x00" * 40, b"\x00\x00\n", b'{"a": \n']))
def test_a_torn_last_line_is_dropped_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, cut: int, rubbish: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn")
    with Run.create_or_resume(path, RECIPE) as run:
        for step in range(4):
            run.log("tokenizer", step, loss=0.5)
    metrics = path / "metrics.jsonl"
    content = metrics.read_bytes()
    whole = content[: max(0, len(content) - cut)]
    metrics.write_bytes(whole + rubbish)
    expected = [json.loads(line) for line in whole.split(b"\n")[:-1]]
    assert Run.read(path).metrics() == expected  # a reader skips it
    assert metrics.read_bytes() == whole + rubbish  # and changes nothing
    with Run.create_or_resume(path, RECIPE, resume=True) as run:
        run.log("tokenizer", 9)
        assert [record["step"] for record in run.metrics()] == [*(old["step"] for old in expected), 9]


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        run.log("tokenizer", 0)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b"garbage\n" + metrics.read_bytes())
    with pytest.raises(EtudeError, match=r"metrics\.jsonl:1 is not a JSON object"):
        Run.read(tmp_path).metrics()


# --- metrics and state


def test_logged_values_become_plain_json(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        run.log("tokenizer", 3, loss=numpy.float32(0.5), nan=float("nan"), top=float("-inf"), path=tmp_path)
        with pytest.raises(ValueError, match="time"):
            run.log("tokenizer", 4, time=0)
        with pytest.raises(TypeError, match="neither a number"):
            run.log("tokenizer", 4, thing=object())
        (record,) = run.metrics()
    assert record["time"] > 1.7e9
    assert (record["stage"], record["step"], record["loss"]) == ("tokenizer", 3, 0.5)
    assert (record["nan"], record["top"], record["path"]) == ("NaN", "-Infinity", str(tmp_path))


def test_rewind_deletes_only_later_steps_of_the_stage(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        for stage in ("init", "nll"):
            for step in range(3):
                run.log(stage, step)
        run.rewind("nll", 0)
        assert [(record["stage"], record["step"]) for record in run.metrics()] == [
            ("init", 0),
            ("init", 1),
            ("init", 2),
            ("nll", 0),
        ]
        assert len(run.metrics("init")) == 3


def test_facts_of_a_stage_add_up(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        run.save_facts("tokenizer", files=3)
        assert not run.stage_done("tokenizer")
        run.finish_stage("tokenizer", vocab_size=300)
    run = Run.read(tmp_path)
    assert run.stage_done("tokenizer")
    assert run.facts("tokenizer") == {"files": 3, "vocab_size": 300}


# --- artefacts


def test_lineage_records_the_parents_of_an_artefact(tmp_path: Path) -> None:
    outside = tmp_path / "corpus.txt"
    outside.write_text("text")
    with Run.create_or_resume(tmp_path / "run", RECIPE) as run:
        parents: list[Path | Parent] = [outside, Parent("stdlib", "abc")]
        with run.artefact("bpe", kind="tokenizer", stage="tokenizer", parents=parents) as directory:
            (directory / "vocab").write_text("a b c")
        with run.checkpoint("init", 0, parents=[run.find("tokenizer")]) as directory:
            (directory / "weights").write_text("0 0 0")
        tokenizer, model = run.artefacts()
    assert tokenizer.parents == (Parent(str(outside), content_digest(outside)), Parent("stdlib", "abc"))
    assert model.parents == (Parent("artefacts/bpe", tokenizer.digest),)
    assert model.path == tmp_path / "run" / "checkpoints" / "init-0"
    assert model.digest == content_digest(model.path)
    assert (model.name, model.kind, model.stage) == ("init-0", "checkpoint", "init")
    assert (model.run, model.etude) == ("r", __version__)


def test_a_run_directory_can_be_moved(tmp_path: Path) -> None:
    with (
        Run.create_or_resume(tmp_path / "here", RECIPE) as run,
        run.artefact("t", kind="tokenizer", stage="tokenizer") as directory,
    ):
        (directory / "vocab").write_text("a")
    (tmp_path / "here").rename(tmp_path / "there")
    assert Run.read(tmp_path / "there").find("tokenizer").path == tmp_path / "there" / "artefacts" / "t"


def test_the_newest_artefact_of_a_kind_is_found(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        with pytest.raises(InputError, match="holds no checkpoint"):
            run.find("checkpoint")
        for step in (1, 2, 1):  # the first is made again: now it is the newest
            with run.checkpoint("init", step) as directory:
                (directory / "weights").write_text(f"{step}")
        assert run.find("checkpoint").name == "init-1"
        assert [artefact.name for artefact in run.artefacts()] == ["init-2", "init-1"]


def test_an_artefact_that_fails_leaves_the_old_one_alone(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        for text in ("old", "new"):
            with run.artefact("t", kind="tokenizer", stage="tokenizer") as directory:
                (directory / "vocab").write_text(text)
        with pytest.raises(ZeroDivisionError), run.artefact("t", kind="tokenizer", stage="tokenizer") as new:
            (new / "vocab").write_text(f"broken {1 / 0}")
        assert (run.find("tokenizer").path / "vocab").read_text() == "new"
        assert os.listdir(tmp_path / "artefacts") == ["t"]


@pytest.mark.parametrize("name", ["", "..", "../up", "a/b", ".hidden"])
def test_an_artefacts_name_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    with (
        Run.create_or_resume(tmp_path / "run", RECIPE) as run,
        pytest.raises(InputError, match="cannot name an artefact"),
        run.artefact(name, kind="tokenizer", stage="tokenizer"),
    ):
        pass
    assert os.listdir(tmp_path) == ["run"]


def test_a_directorys_digest_is_what_sha256sum_says(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("a.txt", "b/c.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    command = "find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert content_digest(tmp_path) == printed.stdout.split()[0]


def test_a_write_error_names_the_file(tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the kernel refuses the write half-way."""
    with Run.create_or_resume(tmp_path, RECIPE) as run:
        run.save_facts("tokenizer", step=1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(EtudeError, match=r"state\.json.*File too large"):
                run.save_facts("tokenizer", ballast="x" * 5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, ignored)
    assert Run.read(tmp_path).facts("tokenizer") == {"step": 1}
