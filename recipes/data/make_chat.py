"""Write nano-chat.jsonl: short conversations in the tool-calling format, from docstrings and invented files.

    python recipes/data/make_chat.py > recipes/data/nano-chat.jsonl

It is small on purpose: it teaches a tiny model the format of a conversation with tools, not how to program.
"""

import builtins
import heapq
import inspect
import itertools
import json
import math
import os.path
import random
import statistics
import string
import textwrap

READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a text file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
MODULES = (builtins, heapq, itertools, math, os.path, statistics, string, textwrap)


def docstring_questions() -> list[dict[str, object]]:
    """Return questions about functions of the standard library, answered by their docstrings."""
    rows = []
    for module in MODULES:
        for name, thing in sorted(vars(module).items()):
            doc = inspect.getdoc(thing)
            if name.startswith("_") or not callable(thing) or not doc:
                continue
            line = doc.split("\n\n")[0].replace("\n", " ").strip()
            if 20 <= len(line) <= 160:
                question = {"role": "user", "content": f"What does {module.__name__}.{name} do?"}
                rows.append({"messages": [question, {"role": "assistant", "content": line}]})
    return rows


def file_lookups(count: int, rng: random.Random) -> list[dict[str, object]]:
    """Return conversations that read a value from a file with one tool call."""
    rows = []
    for _ in range(count):
        path = f"{rng.choice(['src', 'lib', 'app'])}/{rng.choice(['config', 'main', 'util', 'model'])}.py"
        names = rng.sample(["width", "height", "limit", "port", "retries", "depth"], 3)
        values = {name: rng.randrange(100) for name in names}
        text = "".join(f"{name} = {value}\n" for name, value in values.items())
        wanted = rng.choice(names)
        call = {"type": "function", "function": {"name": "read_file", "arguments": {"path": path}}}
        messages = [
            {"role": "user", "content": f"What is {wanted} in {path}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": text},
            {"role": "assistant", "content": f"{wanted} is {values[wanted]}."},
        ]
        rows.append({"messages": messages, "tools": [READ_FILE]})
    return rows


def main() -> None:
    rng = random.Random(0)
    rows = docstring_questions() + file_lookups(150, rng)
    rng.shuffle(rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
