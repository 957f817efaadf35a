"""The process of one run of a sweep: `python -m etude.pipeline.sweep_process RECIPE RUN`. It ends with the sweep."""

import argparse
import sys
from pathlib import Path

from etude.errors import EtudeError
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.copy_stages import copy_stages
from etude.system.processes import die_with_parent, parent_process


def main() -> None:
    """Copy the stages that the run shares with another, then run the others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--stage", help="the last stage to run")
    parser.add_argument("--copy-from", type=Path, help="a run with finished stages")
    parser.add_argument("--copy", default="", help="these stages")
    given = parser.parse_args()
    die_with_parent(parent_process())
    recipe = load_recipe(given.recipe)
    if given.copy_from is not None:
        try:
            copy_stages(given.copy_from, given.run, recipe, given.copy.split(","))
        except EtudeError as error:  # the run makes these stages itself
            print(f"not copied from {given.copy_from}: {error}", file=sys.stderr)
    if given.stage is None:
        run_recipe(recipe, given.run, resume=True)
        return
    for stage in recipe.stages[: recipe.stages.index(given.stage) + 1]:
        run_recipe(recipe, given.run, resume=True, only=stage)


if __name__ == "__main__":
    try:
        main()
    except (EtudeError, OSError) as error:
        print(f"etude: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, EtudeError) else 1)
