"""Terms for behaviour that a verifier does not see. Penalties are at most 1 in size, so that weights are comparable.

Each answers a problem seen in RL runs of coding agents: malformed calls made on purpose because they were not counted,
to-dos written and forgotten, reasoning moved into comments, all work done in the terminal, unrequested edits, false
claims.
"""

import re
from typing import Any

from etude.globs import Globs
from etude.rewards.diff import comments, line_changes
from etude.rewards.reward import TermResult, VerifiedTrial, term

EDITS = frozenset({"search_replace", "write", "delete_file"})
TERMINAL = frozenset({"run_terminal_cmd"})
MIN_CALLS = 4  # of a session to which terminal_only applies
LONG_COMMENT = 30  # words; longer runs of comment lines count as reasoning
# Reasoning aloud, where a comment would state a fact.
REASONING = re.compile(
    r"\b(wait|hmm+|actually|let me|let's|i think|maybe i|i should|i need to|not sure|on second thought)\b", re.I
)
CLAIM = re.compile(
    r"\b(all (the )?(\w+ )?(tests|checks)( now)? pass|tests? (are|is)? ?(now )?(passing|green)|"
    r"(tests?|checks?|suite) (now )?pass(es)?\b|verified (that )?it works)",
    re.I,
)
NEGATION = re.compile(r"\b(not|n't|no|fail\w*|without|could ?n.t|unable)\b", re.I)
TEST_COMMAND = re.compile(r"\b(pytest|unittest|tox|nox|check|test)\w*")


def tool_of(trial: VerifiedTrial, name: str) -> str:
    """Return a tool's own name for the name under which the tool set exposes it."""
    names: dict[str, Any] = trial.trace.facts.get("tool_names", {})
    return str(names.get(name, name))


@term
def malformed_calls(trial: VerifiedTrial) -> TermResult:
    """Penalise the share of calls that could not be parsed or run. Uncounted ones would be learned."""
    calls = sum(len(step.executed_calls) for step in trial.trace.steps)
    errors = trial.trace.errors
    bad = errors["malformed_call"] + errors["unknown_tool"] + errors["bad_arguments"]
    return TermResult(-bad / calls if bad else 0.0, {"bad": bad, "calls": calls})


@term
def unfinished_todos(trial: VerifiedTrial) -> TermResult:
    """Penalise the share of to-dos that are neither completed nor cancelled at the end."""
    todos: dict[str, str] = {}
    for step in trial.trace.steps:
        for outcome in step.outcomes:
            if "todos" in outcome.facts:  # the whole list after the call
                todos = {todo["id"]: todo["status"] for todo in outcome.facts["todos"]}
    left = sorted(id for id, status in todos.items() if status in ("pending", "in_progress"))
    return TermResult(-len(left) / len(todos) if left else 0.0, {"left": left, "of": len(todos)})


@term
def thought_in_comments(trial: VerifiedTrial) -> TermResult:
    """Penalise long reasoning in new code comments: 0.5 for each passage, at most 1."""
    found = []
    for change, lines in _python_changes(trial):
        new = {number for number, _ in lines}
        added = {number: text.lstrip("# ") for number, text in comments(change).items() if number in new}
        for passage in _runs(added):
            words = len(passage.split())
            if words > LONG_COMMENT or (REASONING.search(passage) and words > 4):
                found.append(passage[:200])
    return TermResult(-min(1.0, len(found) / 2), {"passages": found})


@term
def terminal_only(trial: VerifiedTrial) -> TermResult:
    """Penalise using only the terminal in a session of several calls, if other tools were offered."""
    names = [tool_of(trial, call.name) for step in trial.trace.steps for call, _ in step.executed_calls]
    offered = {tool_of(trial, tool["function"]["name"]) for tool in trial.trace.tools}
    alone = len(names) >= MIN_CALLS and set(names) <= TERMINAL and bool(offered & (EDITS | {"read_file"}))
    return TermResult(-1.0 if alone else 0.0, {"calls": len(names)})


@term
def unasked_edits(trial: VerifiedTrial) -> TermResult:
    """Penalise changes where the task asks for none (`may_edit = false`)."""
    # Absolute paths are carried files, such as the final message; those of the workspace are relative.
    paths = [change.path for change in trial.verifier_result.changes if not change.path.startswith("/")]
    changed = [] if trial.task.may_edit else paths
    return TermResult(-1.0 if changed else 0.0, {"changed": changed[:20]})


@term
def untrue_claims(trial: VerifiedTrial) -> TermResult:
    """Penalise a final message that says tests pass if the session's last test command failed or there was none."""
    claim = next((m[0] for m in CLAIM.finditer(trial.trace.final) if not _is_negated(trial.trace.final, m)), "")
    last = None  # exit code of the last command that looks like a test
    for step in trial.trace.steps:
        for call, outcome in step.executed_calls:
            command = str((call.arguments or {}).get("command", ""))
            if tool_of(trial, call.name) in TERMINAL and TEST_COMMAND.search(command):
                last = outcome.facts.get("exit_code", last)
    ran = last is not None
    wrong = bool(claim) and (not ran or last != 0)
    return TermResult(-1.0 if wrong else 0.0, {"said": claim, "last_test_exit": last})


@term
def diff_scope(trial: VerifiedTrial) -> TermResult:
    """Penalise the share of changed files outside the task's `metadata.scope`; 0 for tasks without it.

    Generated tasks whose solution only changes existing files have those as their scope.
    """
    changed = [change.path for change in trial.verifier_result.changes if not change.path.startswith("/")]
    scope = trial.task.metadata.get("scope")
    outside = [path for path in changed if not Globs(scope).matches(path)] if scope else []
    return TermResult(-len(outside) / len(changed) if outside else 0.0, {"outside": outside[:20]})


@term
def leftovers(trial: VerifiedTrial) -> TermResult:
    """Penalise debugging code left behind: prints, breakpoints, scratch files; 0.25 each, at most 1."""
    found = []
    for change in line_changes(trial.verifier_result.changes):
        is_test = "test" in change.path.lower()
        if change.path.endswith(".py") and not is_test:
            found += [f"{change.path}:{number}" for number, text in change.added if _DEBUG.search(text)]
    for file in trial.verifier_result.changes:
        if file.before is None and _SCRATCH.search(file.path):
            found.append(file.path)
    return TermResult(-min(1.0, len(found) / 4), {"found": found[:20]})


_DEBUG = re.compile(r"\bbreakpoint\(\)|\bpdb\.set_trace\(|^\s*print\(\s*[f]?[\"'](debug|dbg|here|xxx|>>>)", re.I)
_SCRATCH = re.compile(r"(^|/)(scratch|debug|tmp|temp|repro|reproduce)\w*\.(py|sh|txt)$|\.(orig|rej|bak)$", re.I)


def _python_changes(trial: VerifiedTrial) -> list[tuple[str, tuple[tuple[int, str], ...]]]:
    texts = {file.path: file.text("after").decode("utf-8", "replace") for file in trial.verifier_result.changes}
    found = line_changes(trial.verifier_result.changes)
    return [(texts[change.path], change.added) for change in found if change.path.endswith(".py")]


def _runs(lines: dict[int, str]) -> list[str]:
    """Return comments on consecutive lines, joined."""
    runs: list[str] = []
    last = None
    for number in sorted(lines):
        if last is not None and number == last + 1:
            runs[-1] += " " + lines[number]
        else:
            runs.append(lines[number])
        last = number
    return runs


def _is_negated(text: str, claim: re.Match[str]) -> bool:
    """Return whether the sentence around a claim negates it."""
    start = max(text.rfind(mark, 0, claim.start()) for mark in ".!?\n;") + 1
    ends = [end for mark in ".!?\n;" if (end := text.find(mark, claim.end())) >= 0]
    return bool(NEGATION.search(text[start : min(ends, default=len(text))]))
