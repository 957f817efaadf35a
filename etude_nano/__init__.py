"""Nano tasks: miniature coding tasks, their demonstrations and base-model data, for models of a few million parameters.

A task is a pure function of its seed and split; no function occurs in tasks of two splits.
Demonstrations are scripted sessions, token-exact, in pods or simulated without them. `etude_nano.plugin` registers the
task source `nano`. The names below are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude_nano.base_data import Amounts as Amounts
    from etude_nano.base_data import make_base_data as make_base_data
    from etude_nano.demonstrator import DemonstratorStyle as DemonstratorStyle
    from etude_nano.demonstrator import ScriptedTurn as ScriptedTurn
    from etude_nano.demonstrator import demonstration_turns as demonstration_turns
    from etude_nano.demonstrator import read_files as read_files
    from etude_nano.pod_sessions import Demonstration as Demonstration
    from etude_nano.pod_sessions import run_demonstrations as run_demonstrations
    from etude_nano.pod_sessions import vocabulary_texts as vocabulary_texts
    from etude_nano.simulated_sessions import simulate_demonstration as simulate_demonstration
    from etude_nano.simulated_sessions import simulate_session as simulate_session
    from etude_nano.source import generate_nano as generate_nano
    from etude_nano.source import nano_task as nano_task
    from etude_nano.source import nano_tasks as nano_tasks
    from etude_nano.source import text_digest as text_digest
    from etude_nano.tokenizer import train_nano_tokenizer as train_nano_tokenizer

__getattr__ = lazy_exports(__name__)
