"""Compare the results of two directories, paired by task.

Tasks are paired by their digest, so that a task that was changed is not compared with its earlier version, whatever it
is called. What else differs between the two (tools, prompt, window, sampling, code) is named: a difference of the
scores may come from it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.bench.directory import BenchDirectory, read_all_results
from etude.bench.results import PolicyResults, difference
from etude.errors import InputError, suggest
from etude.evaluation.paired import assumed_variance, detectable_difference, measured_variance

# Keys of a policy in bench.json that should be the same if only the model is compared.
SHOWN = {"tools": "tool schemas", "prompt": "prompt", "window": "context window", "dialect": "dialect"}
MODEL_KEYS = ("where", "model", "digest")
# Keys of the sampling that are compared elsewhere, or are the variants that one wants to compare.
NOT_COMPARED = ("max_turn_tokens", "effort", "thinking_budget", "fields")


@dataclass(frozen=True)
class ComparedResult:
    """One policy's results in one directory."""

    name: str  # DIRECTORY#POLICY
    policy: Mapping[str, Any]  # its entry in bench.json
    spec: Mapping[str, Any]  # bench.json
    results: PolicyResults  # with tasks by digest
    task_names: Mapping[str, str]  # by digest

    @property
    def samples(self) -> dict[str, list[float]]:
        """Return the outcome of every counted trial by the digest of its task."""
        groups = self.results.evaluation.groups
        return {group.task: [float(bool(slot.record["solved"])) for slot in group.slots] for group in groups}


def read_pairs(before: str, after: str) -> list[tuple[ComparedResult, ComparedResult]]:
    """Return the results to compare, from `DIRECTORY[#POLICY]`.

    Without names, the only policies of the two are compared, or else those with the same names.
    """
    old, new = _read(before), _read(after)
    if len(old) == 1 and len(new) == 1:
        return [(next(iter(old.values())), next(iter(new.values())))]
    shared = [name for name in old if name in new]
    if "#" in before or "#" in after or not shared:
        raise InputError(
            f"{before} has {', '.join(old)}, and {after} has {', '.join(new)}; name one of each, as in "
            f"{before.partition('#')[0]}#{next(iter(old))} {after.partition('#')[0]}#{next(iter(new))}"
        )
    return [(old[name], new[name]) for name in shared]


def read_results_of(text: str) -> list[ComparedResult]:
    """Return the results of all policies of `DIRECTORY`, or of the one of `DIRECTORY#POLICY`."""
    return list(_read(text).values())


def _read(text: str) -> dict[str, ComparedResult]:
    """Read the results of all policies of a directory by name, or of the one that is named after a #."""
    directory, text_policy = _split(text)
    spec, found = read_all_results(BenchDirectory(directory))
    digests = _unique_digests(spec["tasks"])
    results = {
        each.name: ComparedResult(
            f"{directory}#{each.name}",
            policy,
            spec,
            by_digest(each, digests),
            {digest: name for name, digest in digests.items()},
        )
        for each, policy in zip(found, spec["policies"], strict=True)
    }
    if not text_policy:
        return results
    if text_policy not in results:
        raise InputError(f"{text}: no policy {text_policy}; {suggest(text_policy, list(results))}")
    return {text_policy: results[text_policy]}


def _split(text: str) -> tuple[Path, str]:
    if Path(text).is_dir():
        return Path(text), ""
    directory, _, policy = text.rpartition("#")
    return (Path(directory), policy) if directory else (Path(text), "")


def _unique_digests(tasks: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of tasks by name; the copies of a task are numbered."""
    seen = Counter[str]()
    found = {}
    for name, digest in tasks.items():
        found[name] = f"{digest}-{seen[digest]}" if seen[digest] else digest
        seen[digest] += 1
    return found


def by_digest(results: PolicyResults, digests: Mapping[str, str]) -> PolicyResults:
    """Return results whose tasks have their digests as names."""
    evaluation = results.evaluation
    groups = tuple(replace(group, task=digests[group.task]) for group in evaluation.groups)
    dropped = {digests[task]: why for task, why in evaluation.dropped.items()}
    return replace(results, evaluation=replace(evaluation, groups=groups, dropped=dropped))


# ------------------------------------------------------------------------------------------- the comparison


def compare_results(before: ComparedResult, after: ComparedResult) -> dict[str, Any]:
    """Return the paired difference of two results as JSON; InputError if they have no task in common."""
    old, new = before.samples, after.samples
    shared = sorted(old.keys() & new.keys())
    if not shared:
        common = before.task_names.keys() & after.task_names.keys()
        why = "none of their common tasks is finished by both" if common else "they have no task in common"
        raise InputError(f"{before.name} and {after.name}: {why}; a comparison needs the same tasks")
    found = difference(replace(before.results, name=before.name), replace(after.results, name=after.name))
    variance = measured_variance([({0: old}, {0: new})], "the variance of these results")
    if variance is None or not variance.of_task(1):  # one task, or no difference anywhere: no measure of the noise
        variance = assumed_variance()
    samples = min(len(arm[task]) for arm in (old, new) for task in shared)
    return found | {
        "ties": found["tasks"] - found["better"] - found["worse"],
        "samples": [min(len(arm[task]) for task in shared) for arm in (old, new)],
        "minimum_detectable": detectable_difference(variance, len(shared), samples, 1),
        "variance": variance.origin,
        "differs": differing_conditions(before, after),
        "models": [{key: each.policy.get(key, "") for key in MODEL_KEYS} for each in (before, after)],
        "tasks_not_shared": task_differences(before, after),
        "per_task": [
            {
                "task": before.task_names[task],
                "from": sum(old[task]) / len(old[task]),
                "to": sum(new[task]) / len(new[task]),
            }
            for task in sorted(shared, key=lambda task: before.task_names[task])
        ],
    }


def differing_conditions(before: ComparedResult, after: ComparedResult) -> dict[str, list[Any]]:
    """Return what differs between two results, besides the model, and may explain a difference: values of both."""
    pairs: dict[str, list[Any]] = {}
    for key, words in SHOWN.items():
        pairs[words] = [each.policy.get(key) for each in (before, after)]
    for key in ("summaries", "budget"):
        pairs[key] = [each.policy.get("session", {}).get(key) for each in (before, after)]
    for key in before.policy.get("sampling", {}).keys() | after.policy.get("sampling", {}).keys():
        if key not in NOT_COMPARED:
            pairs[f"sampling: {key}"] = [each.policy.get("sampling", {}).get(key) for each in (before, after)]
    pairs["samples per task"] = [each.spec["samples"] for each in (before, after)]
    pairs["harness code"] = [each.spec.get("harness") for each in (before, after)]
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


def task_differences(before: ComparedResult, after: ComparedResult) -> dict[str, list[str]]:
    """Return the tasks that only one result has, and those with the same name and other contents."""
    old, new = before.task_names, after.task_names
    only_old = {old[digest] for digest in old.keys() - new.keys()}
    only_new = {new[digest] for digest in new.keys() - old.keys()}
    return {
        "changed": sorted(only_old & only_new),
        "only_from": sorted(only_old - only_new),
        "only_to": sorted(only_new - only_old),
    }


# ------------------------------------------------------------------------------------------- words


def comparison_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the comparison in sentences."""
    from etude.bench.report import describe_difference, points

    lines = [describe_difference(found)]
    lines.append(f"wins {found['better']}, losses {found['worse']}, ties {found['ties']}")
    size = points(found["minimum_detectable"]).lstrip("+")
    lines.append(
        f"minimum detectable effect with these tasks and samples: {size} points (80 % power, 5 % two-sided; "
        f"{found['variance']})"
    )
    for name, (old, new) in found["differs"].items():
        lines.append(f"differs: {name}: {_short(old)} -> {_short(new)}")
    apart = found["tasks_not_shared"]
    for key, words in (
        ("changed", "tasks have the same name and other contents, and are not compared"),
        ("only_from", f"tasks are only in {found['from']}"),
        ("only_to", f"tasks are only in {found['to']}"),
    ):
        if apart[key]:
            lines.append(
                f"{len(apart[key])} {words}: {', '.join(apart[key][:3])}{' ...' if len(apart[key]) > 3 else ''}"
            )
    return lines


def _short(value: Any) -> str:
    """Format a value; digests are cut."""
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items() if each not in (None, "", [], {}))
    text = str(value)
    return text[:12] if len(text) == 64 else text
