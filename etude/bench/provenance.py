"""What produced a result: digests of the agent's code, of what the model was shown, and how it was sampled."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import etude
from etude.bench.policies import BenchPolicy, PolicyProfile
from etude.files import files_digest
from etude.harness.profile import AgentProfile
from etude.harness.prompt import Recap, SessionRequest, opening_messages
from etude.harness.summary import SUMMARY_PROMPT, SUMMARY_RETRY_PROMPT
from etude.harness.tools.executor import exposed_tools

# Packages and modules that decide what happens in a trial and how it is scored.
TRIAL_CODE = ("chat/**/*.py", "harness/**/*.py", "rewards/**/*.py", "rollouts/**/*.py", "tasks/*.py")


@cache
def harness_digest() -> str:
    """Return a digest of the source of everything that runs and scores a trial."""
    top = Path(etude.__file__).parent
    files = {path.relative_to(top).as_posix(): path for pattern in TRIAL_CODE for path in top.glob(pattern)}
    return files_digest(sorted(files.items()))


def provenance(policy: BenchPolicy, profile: PolicyProfile) -> dict[str, Any]:
    """Return what a policy is shown and how it is sampled, for its entry in bench.json."""
    session = profile.session
    return {
        "tools": tools_digest(session),
        "prompt": prompt_digest(session),
        "sampling": {
            "temperature": session.temperature,
            "max_turn_tokens": session.budget.max_turn_tokens,
            "effort": policy.effort,
            "thinking_budget": policy.thinking_budget,
            "fields": policy.request_fields,
        },
    }


def tasks_digest(tasks: Mapping[str, str]) -> str:
    """Return one digest of all tasks, given their own digests; their names do not matter."""
    return _digest(sorted(tasks.values()))


def tools_digest(session: AgentProfile) -> str:
    """Return a digest of the schemas of the tools that the model is shown."""
    return _digest([tool.schema for tool in exposed_tools(session.tool_set).values()])


def prompt_digest(session: AgentProfile) -> str:
    """Return a digest of all text around the task's instruction: system message, recap, requests for a summary."""
    recap = Recap("SUMMARY", "PLAN", 1)
    messages = opening_messages(SessionRequest("REQUEST"), session.tool_set, "ROOT", recap)
    asked = () if session.summaries.mode == "off" else (SUMMARY_PROMPT, SUMMARY_RETRY_PROMPT)
    return _digest([*((message.role, message.content) for message in messages), *asked])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def merge_harness(recorded: Mapping[str, Any]) -> list[str]:
    """Return the digests of the harnesses that a comparison was run with: those recorded, and this one."""
    return [*dict.fromkeys([*recorded.get("harness", ()), harness_digest()])]
