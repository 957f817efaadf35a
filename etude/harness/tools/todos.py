"""The to-do list, kept by the model and carried over by a summary."""

from collections.abc import Mapping, Sequence
from typing import Any

from etude.harness.tools.context import Todo, ToolContext
from etude.harness.tools.tool import Tool, ToolError, ToolOutcome

MARKS = {"pending": " ", "in_progress": ">", "completed": "x", "cancelled": "-"}
MAX_TODOS = 100


async def _todo_write(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    todos = {todo.id: todo for todo in context.todos} if arguments["merge"] else {}
    ids = [item["id"] for item in arguments["todos"]]
    if twice := sorted({id for id in ids if ids.count(id) > 1}):
        raise ToolError("bad_arguments", f"todos: the id {twice[0]!r} is given twice")
    for item in arguments["todos"]:
        old = todos.get(item["id"])
        content = item.get("content") or (old.content if old else "")
        status = item.get("status") or (old.status if old else "pending")
        if not content:
            raise ToolError("bad_arguments", f"todos: {item['id']!r} is new and has no content")
        todos[item["id"]] = Todo(item["id"], content, status)
    in_progress = [todo.id for todo in todos.values() if todo.status == "in_progress"]
    if len(in_progress) > 1:
        raise ToolError(
            "bad_arguments", f"todos: only one may be in_progress, not {', '.join(in_progress)}; nothing was changed"
        )
    if len(todos) > MAX_TODOS:
        raise ToolError("bad_arguments", f"todos: there would be {len(todos)}; at most {MAX_TODOS} are kept")
    context.todos = tuple(todos.values())
    count = {status: sum(todo.status == status for todo in context.todos) for status in MARKS}
    return ToolOutcome(plan_text(context.todos) or "The list is empty.", facts=count)


def plan_text(todos: Sequence[Todo]) -> str:
    """Return the list as text, empty if there are no to-dos."""
    return "\n".join(f"[{MARKS[todo.status]}] {todo.id}: {todo.content}" for todo in todos)


TODO_WRITE = Tool(
    "todo_write",
    "Keep a list of things to do in a task of several steps. Only one may be in_progress; mark each completed as soon "
    "as it is done.",
    {
        "type": "object",
        "properties": {
            "merge": {
                "type": "boolean",
                "description": "true: change or add the given ones by id; false: replace the whole list.",
            },
            "todos": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string"},
                        "content": {"type": "string"},
                        "status": {"type": "string", "enum": list(MARKS)},
                    },
                    "required": ["id"],
                },
            },
        },
        "required": ["merge", "todos"],
    },
    _todo_write,
)
