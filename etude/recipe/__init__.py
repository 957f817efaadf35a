"""The recipe of a run: the settings of all packages in one TOML file, checked strictly when it is read.

`load_recipe` returns a frozen `Recipe` or raises one InputError with a line per problem. `stage_settings` maps every
stage to its settings class, in pipeline order. No package below `etude.pipeline` imports this one.
"""

from etude.recipe.recipe import Recipe, load_recipe

__all__ = ["Recipe", "load_recipe"]
