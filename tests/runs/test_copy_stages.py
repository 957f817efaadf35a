"""Finished stages of a run, copied into a new one."""

from pathlib import Path

import pytest

from etude.errors import EtudeError
from etude.runs.copy_stages import copied_from, copy_stages
from etude.runs.run import Run, RunSettings

RECIPE = RunSettings(name="first", stages=("one", "two"))
OTHER = RunSettings(name="second", stages=("one", "two"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with Run.create_or_resume(tmp_path / "source", RECIPE) as run:
        for stage in ("one", "two"):
            with run.artefact(f"made-{stage}", kind="made", stage=stage) as directory:
                (directory / "value").write_text(stage)
            run.log(stage, 1, loss=0.5)
        run.finish_stage("one", tokens=7)
        run.save_facts("two", tokens=8)
    return tmp_path / "source"


def test_a_copy_has_the_artefacts_metrics_and_facts_of_the_chosen_stages(source: Path, tmp_path: Path) -> None:
    copy_stages(source, tmp_path / "copy", OTHER, ["one"])
    first, second = Run.read(source), Run.read(tmp_path / "copy")
    assert second.settings.name == "second"
    assert [(each.name, each.digest) for each in second.artefacts()] == [
        (each.name, each.digest) for each in first.artefacts()[:1]
    ]
    assert second.stage_done("one")
    assert not second.stage_done("two")
    assert second.facts("one") == {"tokens": 7}
    assert second.metrics() == first.metrics("one")
    assert copied_from(second.layout) == {"one": str(source)}
    with Run.create_or_resume(tmp_path / "copy", OTHER, resume=True) as run:  # it goes on like any other
        run.finish_stage("two")
    assert not Run.read(source).stage_done("two")


def test_an_unfinished_stage_is_not_copied(source: Path, tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="the stage two is not finished"):
        copy_stages(source, tmp_path / "copy", OTHER, ["one", "two"])
    assert not (tmp_path / "copy").exists()


def test_only_a_directory_that_is_no_run_becomes_a_copy(source: Path, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/lock").write_text("")  # all that a run has which was killed while it was created
    copy_stages(source, tmp_path / "killed", OTHER, ["one"])
    with pytest.raises(EtudeError, match="is a run already"):
        copy_stages(source, tmp_path / "killed", OTHER, ["one"])
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/mine").write_text("")
    with pytest.raises(EtudeError, match="is not a run and not empty"):
        copy_stages(source, tmp_path / "foreign", OTHER, ["one"])
    assert (tmp_path / "foreign/mine").exists()


def test_an_artefact_that_has_changed_is_not_copied(source: Path, tmp_path: Path) -> None:
    (source / "artefacts/made-one/value").write_text("changed")
    with pytest.raises(EtudeError, match="has changed since it was made"):
        copy_stages(source, tmp_path / "copy", OTHER, ["one"])
    assert not (tmp_path / "copy").exists()
    (source / "artefacts/made-one/value").write_text("one")
    copy_stages(source, tmp_path / "copy", OTHER, ["one"])  # what the refused copy left is in no one's way
    assert Run.read(tmp_path / "copy").stage_done("one")
