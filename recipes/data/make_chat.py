"""Writes nano-chat.jsonl: short conversations in the tool-calling format, from docstrings and made-up files.

    python recipes/data/make_chat.py > recipes/data/nano-chat.jsonl

Small on purpose: it shows a tiny model how a conversation with tools is spelt, not how to program.
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


def questions() -> list[dict[str, object]]:
    rows = []
    for module in MODULES:
        for name, thing in sorted(vars(module).items()):
            doc = inspect.getdoc(thing)
            if name.startswith("_") or not callable(thing) or not doc:
                continue
            line = doc.split("\n\n")[0].replace("\n", " ").strip()
            if 20 <= len(line) <= 160:
                asked = {"role": "user", "content": f"What does {module.__name__}.{name} do?"}
                rows.append({"messages": [asked, {"role": "assistant", "content": line}]})
    return rows


def look_ups(count: int, chance: random.Random) -> list[dict[str, object]]:
    rows = []
    for _ in range(count):
        path = f"{chance.choice(['src', 'lib', 'app'])}/{chance.choice(['config', 'main', 'util', 'model'])}.py"
        names = chance.sample(["width", "height", "limit", "port", "retries", "depth"], 3)
        values = {name: chance.randrange(100) for name in names}
        text = "".join(f"{name} = {value}\n" for name, value in values.items())
        asked = chance.choice(names)
        call = {"type": "function", "function": {"name": "read_file", "arguments": {"path": path}}}
        messages = [
            {"role": "user", "content": f"What is {asked} in {path}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": text},
            {"role": "assistant", "content": f"{asked} is {values[asked]}."},
        ]
        rows.append({"messages": messages, "tools": [READ_FILE]})
    return rows


def main() -> None:
    chance = random.Random(0)
    rows = questions() + look_ups(150, chance)
    chance.shuffle(rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
