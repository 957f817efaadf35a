"""The `etude pods` command. `main.app` is the Typer application; `etude.cli` loads it when it is first needed."""
