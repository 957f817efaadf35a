"""An endpoint that solves nano tasks with their solutions."""

from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from stub_endpoint import StubEndpoint, StubTurn, call, says


class SolvingEndpoint(StubEndpoint):
    """Solves nano tasks with their solutions; `fails` are the numbers of the requests, from 1, that fail."""

    tasks: Path
    fails: tuple[int, ...] = ()
    status = 500
    headers: Mapping[str, str] = {}
    first_command = ""  # run before the solution

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        asked = "\n".join(str(message["content"]) for message in body["messages"] if message["role"] == "user")
        (task,) = (each for each in self.tasks.glob("nano-*") if (each / "instruction.md").read_text().strip() in asked)
        if len(self.keys) + 1 in self.fails:
            self.keys.append("")
            message = f"out of order, {request.headers.get('authorization')}"
            return JSONResponse({"error": {"message": message}}, self.status, self.headers)
        self.lines = self.turns(task)
        return await super().chat(request)

    def turns(self, task: Path) -> list[StubTurn]:
        """Return the turns of a session on a task."""
        return [*([runs(self.first_command)] if self.first_command else []), *script(task)]


def runs(command: str) -> StubTurn:
    return says("", call("run_terminal_cmd", command=command))


def script(task: Path) -> list[StubTurn]:
    final, repo = task / "solution/final.txt", task / "solution/repo"
    files = sorted(path for path in repo.rglob("*") if path.is_file())
    writes = [f"cat > {path.relative_to(repo)} <<'END'\n{path.read_text()}END" for path in files]
    return [*(map(runs, writes)), says(final.read_text() if final.exists() else "Done.")]
