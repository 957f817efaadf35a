"""Serve two scripted policies for given tasks behind an OpenAI-compatible chat API: controls for `etude bench run`.

    python benchmarks/scripted_endpoint.py tasks/cachetools [DIR...] [--port 8124]
    etude bench run --policy http://127.0.0.1:8124/v1#reference --policy http://127.0.0.1:8124/v1#nothing \\
      --tasks tasks/cachetools --out runs/controls

`reference` recognizes a task by its instruction and applies its solution by commands, as an agent would; `nothing` only
says that it is done. A benchmark whose tools, pods and verifiers work gives them 100 % and 0 %.
"""

import argparse
import base64
import io
import json
import sys
import tarfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from etude.tasks.harbor import find_tasks, read_task

MODELS = ("reference", "nothing")
TOOL = "run_terminal_cmd"
COPY = "/tmp/reference"  # of the solution in the pod
PART = 30_000  # characters of the archive in one command


def commands_of(directory: Path) -> list[str]:
    """Return the commands that apply a task's solution."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        archive.add(directory / "solution", ".")
    text = base64.b64encode(raw.getvalue()).decode()
    parts = [text[at : at + PART] for at in range(0, len(text), PART)]
    commands = [f"mkdir -p {COPY}", *(f"printf %s {part} >> {COPY}.b64" for part in parts)]
    commands.append(f"base64 -d {COPY}.b64 | tar xz -C {COPY}")
    commands.append(f"sed -i s#/solution#{COPY}#g {COPY}/solve.sh && sh {COPY}/solve.sh && rm -r {COPY} {COPY}.b64")
    return commands


def reply(model: str, messages: list[Mapping[str, Any]], solutions: Mapping[str, Path]) -> dict[str, Any]:
    """Return the next message of a model: its next command, or the end."""
    said = sum(message["role"] == "assistant" for message in messages)
    asked = "\n".join(json.dumps(message["content"]) for message in messages if message["role"] == "user")
    found = [text for text in solutions if json.dumps(text)[1:-1] in asked]
    commands = commands_of(solutions[max(found, key=len)]) if found and model == "reference" else []
    if said >= len(commands):
        return {"role": "assistant", "content": "Done." if found else "This task is unknown."}
    function = {"name": TOOL, "arguments": json.dumps({"command": commands[said]})}
    call = {"id": f"call_{said}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def handler(solutions: Mapping[str, Path]) -> type[BaseHTTPRequestHandler]:
    class ScriptedPolicyHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send({"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = reply(body["model"], body["messages"], solutions)
            finish = "tool_calls" if "tool_calls" in message else "stop"
            usage = {"prompt_tokens": len(json.dumps(body)) // 4, "completion_tokens": len(json.dumps(message)) // 4}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            self.send({"choices": [choice], "usage": usage, "model": body["model"]})

        def send(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            """Write nothing."""

    return ScriptedPolicyHandler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=Path)
    parser.add_argument("--port", type=int, default=8124)
    arguments = parser.parse_args()
    found = [path for top in arguments.tasks for path in find_tasks(top)]
    solutions = {read_task(path).instruction.strip(): path for path in found}
    print(f"{len(solutions)} tasks; http://127.0.0.1:{arguments.port}/v1#{' and #'.join(MODELS)}", flush=True)
    ThreadingHTTPServer(("127.0.0.1", arguments.port), handler(solutions)).serve_forever()


if __name__ == "__main__":
    main()
