"""Utilities that depend only on `etude.errors`: usable cores, child processes, progress lines, compiled C programs.

Internal: import from the modules. Nothing is re-exported, because small processes import this package.
"""
