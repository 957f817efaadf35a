"""Nano tasks: miniature coding tasks, their demonstrations and base-model data, for models of a few million parameters.

A task is a pure function of its seed; held-out tasks use function templates or faults that no training task has.
Demonstrations are scripted sessions, token-exact, in pods or simulated without them. `etude_nano.plugin` registers the
task source `nano`. The names below are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude_nano.base_data import Amounts, make_base_data
    from etude_nano.demonstrator import DemonstratorStyle, ScriptedTurn, demonstration_turns, read_files
    from etude_nano.pod_sessions import Demonstration, run_demonstrations, vocabulary_texts
    from etude_nano.simulated_sessions import simulate_demonstration, simulate_demonstrations, simulate_session
    from etude_nano.source import generate_nano, nano_task, nano_tasks, text_digest
    from etude_nano.tokenizer import train_nano_tokenizer

_MODULES = {
    "Amounts": "etude_nano.base_data",
    "Demonstration": "etude_nano.pod_sessions",
    "DemonstratorStyle": "etude_nano.demonstrator",
    "ScriptedTurn": "etude_nano.demonstrator",
    "demonstration_turns": "etude_nano.demonstrator",
    "generate_nano": "etude_nano.source",
    "make_base_data": "etude_nano.base_data",
    "nano_task": "etude_nano.source",
    "nano_tasks": "etude_nano.source",
    "read_files": "etude_nano.demonstrator",
    "run_demonstrations": "etude_nano.pod_sessions",
    "simulate_demonstration": "etude_nano.simulated_sessions",
    "simulate_demonstrations": "etude_nano.simulated_sessions",
    "simulate_session": "etude_nano.simulated_sessions",
    "text_digest": "etude_nano.source",
    "train_nano_tokenizer": "etude_nano.tokenizer",
    "vocabulary_texts": "etude_nano.pod_sessions",
}
__all__ = [
    "Amounts",
    "Demonstration",
    "DemonstratorStyle",
    "ScriptedTurn",
    "demonstration_turns",
    "generate_nano",
    "make_base_data",
    "nano_task",
    "nano_tasks",
    "read_files",
    "run_demonstrations",
    "simulate_demonstration",
    "simulate_demonstrations",
    "simulate_session",
    "text_digest",
    "train_nano_tokenizer",
    "vocabulary_texts",
]
__getattr__ = lazy_exports(__name__, _MODULES)
