"""Detect how Node, Go and Rust projects are installed and tested, from their files alone. Pure functions."""

import json
import re
from collections.abc import Mapping, Sequence

from etude.tasks.installation.proposal import Proposal, SetupStep, TestProposal, unique

NPM = "npm install --no-audit --no-fund --no-progress"
_NODE_TEST = re.compile(r"\bnode\b.*\s--test\b")


def detect_node(files: Mapping[str, str], paths: Sequence[str]) -> Proposal | None:
    """Return the proposal for a project with a package.json; None if it declares no package."""
    try:
        package = json.loads(files.get("package.json", ""))
    except ValueError:
        return None
    if not isinstance(package, dict):
        return None
    alternatives = [f"npm ci {NPM.partition(' install ')[2]}"] if "package-lock.json" in files else []
    if "pnpm-lock.yaml" in paths:
        alternatives.append("npx --yes pnpm@9 install --frozen-lockfile")
    if "yarn.lock" in paths:
        alternatives.append("npx --yes yarn@1 install --frozen-lockfile")
    steps = [SetupStep("packages", (*alternatives, NPM, f"{NPM} --legacy-peer-deps"), True)]
    scripts = package.get("scripts", {})
    scripts = scripts if isinstance(scripts, dict) else {}
    if "build" in scripts and package.get("private") is not True:
        steps.append(SetupStep("build", ("npm run build",)))
    tests = [
        each for name in ("test", "test:unit", "unit", "test:ci") for each in _node_tests(str(scripts.get(name, "")))
    ]
    sources = [name for name in ("package.json", "package-lock.json", "yarn.lock", "pnpm-lock.yaml") if name in paths]
    chosen = list(dict.fromkeys(tests))
    return Proposal("node", base="host", steps=tuple(steps), tests=tuple(chosen), sources=tuple(sources))


def _node_tests(script: str) -> list[TestProposal]:
    """Return the parts of a script that run a known test runner, made to print a report."""
    found = []
    for part in (each.strip() for each in re.split(r"&&|;", script)):
        words = re.sub(r"^(?:[A-Z_]+=\S+\s+|cross-env\s+|npx\s+|c8\s+|nyc\s+)+", "", part)
        runner = words.split(" ")[0] if words else ""
        rest = words.partition(" ")[2]
        if _NODE_TEST.search(words):
            found.append(TestProposal(re.sub(r"\s--test\b", " --test --test-reporter=tap", words, count=1), "node"))
        elif runner == "jest" or words.startswith("node_modules/.bin/jest"):
            found.append(TestProposal(f"npx jest --json {rest}".strip(), "jest"))
        elif runner == "vitest":
            kept = re.sub(r"^(run|watch)\b|--coverage\S*", "", rest).strip()
            found.append(TestProposal(f"npx vitest run --reporter=json {kept}".strip(), "jest"))
        elif runner in ("mocha", "_mocha"):
            kept = re.sub(r"(--reporter|-R)[= ]\S+", "", rest).strip()
            found.append(TestProposal(f"npx mocha --reporter json {kept}".strip(), "mocha"))
        elif runner == "ava":
            found.append(TestProposal(f"npx ava --tap {rest}".strip(), "tap"))
        elif runner in ("tape", "tap"):
            extra = " --reporter=tap" if runner == "tap" else ""
            found.append(TestProposal(f"npx {runner}{extra} {rest}".strip(), "tap"))
    return found


def detect_go(files: Mapping[str, str], paths: Sequence[str]) -> Proposal:
    """Return the proposal for a Go module."""
    steps = (SetupStep("modules", ("go mod download && go build ./... && go vet ./...", "go mod download"), True),)
    tests = (TestProposal("go test -json ./...", "go"),)
    has_tests = any(path.endswith("_test.go") for path in paths)
    return Proposal("go", steps=steps, tests=tests if has_tests else (), sources=unique([*files.keys() & {"go.mod"}]))


def detect_rust(files: Mapping[str, str], paths: Sequence[str]) -> Proposal:
    """Return the proposal for a Cargo package or workspace."""
    locked = " --locked" if "Cargo.lock" in paths else ""
    steps = (SetupStep("crates", unique([f"cargo test --no-run{locked}", "cargo test --no-run"]), True, "build"),)
    return Proposal(
        "rust",
        steps=steps,
        tests=(TestProposal("cargo test --offline --no-fail-fast", "cargo"),),
        env={"CARGO_HOME": "/srv/cargo"},
        sources=unique([*files.keys() & {"Cargo.toml"}]),
    )


def required_programs(proposal: Proposal) -> tuple[str, ...]:
    """Return the programs that a project's set-up and tests need from the image."""
    return {"node": ("node", "npm"), "go": ("go",), "rust": ("cargo", "rustc"), "python": ("python",)}[
        proposal.ecosystem
    ]
