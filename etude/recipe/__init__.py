"""The recipe of a run: every package's settings in one TOML file, checked to the last key when it is read."""

from etude.recipe.recipe import Recipe, load_recipe, stage_settings

__all__ = ["Recipe", "load_recipe", "stage_settings"]
