"""Copy finished stages of one run into a new one, so that work which both share is done once.

A copy has the artefacts of the stages with their lineage, their metrics and their facts. Files are hard links where the
file system allows it: the files of an artefact are never changed in place.
"""

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from etude.errors import EtudeError
from etude.files import content_digest
from etude.runs.layout import RunLayout
from etude.runs.run import FORMAT, Run, RunSettings, check_usable, read_jsonl, read_stage_states


def copy_stages(source: Path, target: Path, recipe: RunSettings, stages: Collection[str]) -> None:
    """Make the run `target`, which must not exist yet, with the finished stages of the run `source`.

    Every artefact is checked against the digest that its lineage records. The run appears under its name only when it
    is complete: a copy that was killed is made again.
    """
    origin = Run.read(source)
    if missing := [stage for stage in stages if not origin.stage_done(stage)]:
        raise EtudeError(f"{source}: the stage {missing[0]} is not finished, so it cannot be copied")
    check_usable(RunLayout(target))
    if RunLayout(target).recipe.exists():
        raise EtudeError(f"{target} is a run already; stages are copied into new runs only")
    draft = target.with_name(f".copying-{target.name}")
    shutil.rmtree(draft, ignore_errors=True)
    with Run.create_or_resume(draft, recipe) as run:
        lineage = [record for record in read_jsonl(origin.layout.lineage) if record["stage"] in stages]
        for artefact in (each for each in origin.artefacts() if each.stage in stages):
            copy = run.path / artefact.path.relative_to(origin.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copytree(artefact.path, copy, copy_function=link_or_copy, symlinks=True)
            if content_digest(copy) != artefact.digest:
                raise EtudeError(f"{artefact.path} has changed since it was made; it is not shared with {target}")
        metrics = [record for record in origin.metrics() if record["stage"] in stages]
        state = {
            stage: {**entry, "copied_from": str(origin.path)}
            for stage, entry in read_stage_states(origin.layout.state).items()
            if stage in stages
        }
        _write_lines(run.layout.lineage, lineage)
        _write_lines(run.layout.metrics, metrics)
        text = json.dumps({"format": FORMAT, "stages": state}, indent=2)
        run.layout.state.write_text(f"{text}\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)  # of a run that was killed while it was created
    draft.rename(target)


def copied_from(layout: RunLayout) -> dict[str, str]:
    """Return the stages of a run that were copied, each with the run that it was copied from."""
    entries = read_stage_states(layout.state)
    return {stage: str(entry["copied_from"]) for stage, entry in entries.items() if "copied_from" in entry}


def link_or_copy(source: str, target: str) -> None:
    """Make `target` a hard link to `source`, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
