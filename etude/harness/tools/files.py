"""Reading, writing, deleting and listing files of the pod."""

from collections.abc import Mapping
from typing import Any

from etude.harness.tools.context import Workbench
from etude.harness.tools.tool import Outcome, Tool


async def _read_file(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    outcome = await bench.have_done("read_file", given)
    bench.note_seen(outcome)
    return outcome


async def _write(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    guard = {"only_new": bench.environment.strict, "seen": sorted(bench.seen)}
    outcome = await bench.have_done("write", {**given, **guard})
    bench.note_seen(outcome)
    return outcome


async def _delete_file(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    return await bench.have_done("delete_file", given)


async def _list_dir(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    return await bench.have_done("list_dir", given)


READ_FILE = Tool(
    "read_file",
    "Read a text file. Each line is shown as LINE_NUMBER|CONTENT; the number and the bar are not part of the file. At "
    "most 2000 lines or 50 KB at once; a notice tells the {offset} to go on with.",
    {
        "type": "object",
        "properties": {
            "target_file": {"type": "string", "description": "Path, absolute or from the workspace root."},
            "offset": {"type": "integer", "description": "First line to read; a negative number counts from the end."},
            "limit": {"type": "integer", "minimum": 1, "description": "How many lines to read."},
        },
        "required": ["target_file"],
    },
    _read_file,
    reads_only=True,
)

WRITE = Tool(
    "write",
    "Write a whole file, making the directories above it. A file that exists is replaced: read it first, and prefer "
    "editing for changes.",
    {
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "description": "Path, absolute or from the workspace root."},
            "contents": {"type": "string", "description": "All that the file is to contain."},
        },
        "required": ["file_path", "contents"],
    },
    _write,
)

DELETE_FILE = Tool(
    "delete_file",
    "Delete a file.",
    {
        "type": "object",
        "properties": {
            "target_file": {"type": "string", "description": "Path, absolute or from the workspace root."},
            "explanation": {"type": "string", "description": "One sentence: why."},
        },
        "required": ["target_file"],
    },
    _delete_file,
)

LIST_DIR = Tool(
    "list_dir",
    "List what is in a directory, without names that begin with a dot. Directories end with /.",
    {
        "type": "object",
        "properties": {
            "target_directory": {"type": "string", "description": "Path, absolute or from the workspace root."},
            "ignore_globs": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Globs of names to leave out, such as *.pyc.",
            },
        },
        "required": ["target_directory"],
    },
    _list_dir,
    reads_only=True,
)
