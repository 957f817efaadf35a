"""What a run service gives to processes on other machines: recipe, plugins, model, tasks and object stores.

Directories travel as archives and are named by a digest of their content, so each machine fetches them once. Objects
are read from, and below a few prefixes written to, the stores of the run that other machines cannot reach themselves.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from etude.config import is_plugin_file, read_toml
from etude.errors import EtudeError, InputError
from etude.files import write_atomically
from etude.model.config import ADAPTER_CONFIG, PROFILE_FILE, base_directory
from etude.rollouts.settings import rollout_store, weight_store
from etude.runs.address import run_token
from etude.runs.client import RunInfo
from etude.runs.layout import RunLayout
from etude.runs.member import machine_id
from etude.runs.trees import Entry, Tree, pack_tree, read_tree, tree_digest
from etude.weights.object_store import ROLLOUTS, WEIGHTS, ObjectStore

Endpoint = tuple[str, str, Callable[[Request], Awaitable[Any]]]
WRITABLE = ("traces", "evaluation-traces", "partial")  # of the rollout store
TASK_SETS = {"training": "train", "evaluation": "held_out"}
MAX_OBJECT = 4 << 30  # bytes of an object that is written through the service
BASE = "base"  # of a model with adapters: directory of the base model in the tree of the model


class RunFiles:
    """The files of one run."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.instance = secrets.token_hex(16)
        write_atomically(layout.instance, self.instance)
        self.stores = {WEIGHTS: ObjectStore(weight_store(layout)), ROLLOUTS: ObjectStore(rollout_store(layout))}
        self._trees: dict[tuple[str, str], tuple[str, Tree]] = {}
        self._tasks: tuple[int, dict[str, dict[str, Path]]] = (0, {})

    def info(self) -> RunInfo:
        """Return the handshake."""
        layout, recipe = self.layout, read_toml(self.layout.recipe)
        plugins = [name for name in recipe.get("plugins", ()) if is_plugin_file(name)]
        return RunInfo(
            run=layout.run_id(),
            name=layout.run.name,
            root=layout.service_root,
            directory=str(layout.run),
            machine=machine_id(),
            instance=self.instance,
            recipe=layout.recipe.read_text(encoding="utf-8"),
            plugin_files={name: Path(name).read_text(encoding="utf-8") for name in plugins},
            stores={name: "" if store.directory else store.url for name, store in self.stores.items()},
            directories={name: str(store.directory) for name, store in self.stores.items() if store.directory},
            sampler_token=sampler_token(run_token(layout)),
        )

    def endpoints(self) -> list[Endpoint]:
        return [
            ("GET", "/tasks/{set}", self.task),
            ("GET", "/tasks/{set}/names", self.task_names),
            ("GET", "/trees/{kind:path}", self.tree),
            ("GET", "/store/{store}", self.names),
            ("GET", "/store/{store}/{name:path}", self.get),
            ("PUT", "/store/{store}/{name:path}", self.put),
            ("DELETE", "/store/{store}/{name:path}", self.remove),
        ]

    # ------------------------------------------------------------------------------------------ tasks

    def _task_set(self, name: str) -> dict[str, Path]:
        """Return the tasks of a set by name; the orchestrator may add some while the run goes on."""
        if name not in TASK_SETS:
            raise InputError(f"this run has no task set {name!r}")
        stamp = self.layout.tasks.stat().st_mtime_ns
        if stamp != self._tasks[0]:
            self._tasks = stamp, self.layout.task_lists()
        return self._tasks[1].get(TASK_SETS[name], {})

    async def task(self, request: Request) -> Any:
        """Return where a task is on this machine; null if there is none of that name."""
        path = self._task_set(request.path_params["set"]).get(request.query_params["name"])
        return None if path is None else {"path": str(path)}

    async def task_names(self, request: Request) -> Any:
        return list(self._task_set(request.path_params["set"]))[: int(request.query_params["count"])]

    # ------------------------------------------------------------------------------------------ trees

    async def tree(self, request: Request) -> Any:
        """Return the digest of a tree, or with the digest its archive."""
        key = request.path_params["kind"], request.query_params.get("name", "")
        if key not in self._trees:
            found = await asyncio.to_thread(self._read_tree, *key)
            self._trees[key] = await asyncio.to_thread(tree_digest, found), found
        digest, tree = self._trees[key]
        if (wanted := request.query_params.get("digest")) is None:
            return {"digest": digest}
        if wanted != digest:
            raise InputError(f"{key[0]} {key[1]} has changed while it was fetched")
        return StreamingResponse(pack_tree(tree), media_type="application/octet-stream")

    def _read_tree(self, kind: str, name: str) -> Tree:
        if kind == "model":
            return model_tree(self.layout)
        if kind == "tokenizer":
            return {name: entry for name, entry in model_tree(self.layout).items() if not _is_weights(name)}
        path = self._task_set(kind.removeprefix("task/")).get(name) if kind.startswith("task/") else None
        if path is None:
            raise InputError(f"this run has no {kind} {name}")
        return read_tree(path)

    # ------------------------------------------------------------------------------------------ object stores

    def _store(self, request: Request) -> ObjectStore:
        name = request.path_params["store"]
        if name not in self.stores:
            raise InputError(f"this run has no object store {name!r}")
        return self.stores[name]

    async def names(self, request: Request) -> Any:
        prefix = request.query_params.get("prefix", "")
        return await asyncio.to_thread(self._store(request).names, checked_name(prefix) if prefix else "")

    async def get(self, request: Request) -> Any:
        store, name = self._store(request), checked_name(request.path_params["name"])
        path = store.directory / name if store.directory else None
        return FileResponse(path) if path is not None and path.is_file() else Response(status_code=404)

    async def put(self, request: Request) -> Any:
        store, name = self._store(request), self._writable_name(request)
        if int(request.headers.get("content-length", "0")) > MAX_OBJECT:
            raise InputError(f"{name}: at most {MAX_OBJECT} bytes")
        await asyncio.to_thread(store.put, name, await request.body())

    async def remove(self, request: Request) -> Any:
        await asyncio.to_thread(self._store(request).remove, self._writable_name(request))

    def _writable_name(self, request: Request) -> str:
        name = checked_name(request.path_params["name"])
        if request.path_params["store"] != ROLLOUTS or name.partition("/")[0] not in WRITABLE or "/" not in name:
            raise InputError(f"{name}: only objects below {', '.join(WRITABLE)} can be written through the run service")
        return name


def checked_name(name: str) -> str:
    """Return the name of an object; InputError if it leads out of the store."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or any(part == ".." or part.startswith(".") for part in parts):
        raise InputError(f"{name!r:.200} is not the name of an object")
    return "/".join(parts)


def sampler_token(token: str) -> str:
    """Return the token of a run's samplers: who has it does not have the token of the run service."""
    return hmac.new(token.encode(), b"samplers", hashlib.sha256).hexdigest()[:48]


def model_tree(layout: RunLayout) -> Tree:
    """Return the model that the run starts from; one with adapters holds its base model too."""
    if not layout.model.is_dir():
        raise EtudeError(f"{layout.model} does not exist yet")
    tree: dict[str, Entry] = read_tree(layout.model)
    if (base := base_directory(layout.model)) != layout.model:
        tree |= {f"{BASE}/{name}": entry for name, entry in read_tree(base).items()} | {BASE: base}
        found = json.loads((layout.model / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tree[ADAPTER_CONFIG] = json.dumps(found | {"base_model_name_or_path": BASE}).encode()
    recipe = read_toml(layout.recipe).get("plugins", ())
    for name in (PROFILE_FILE, f"{BASE}/{PROFILE_FILE}"):
        if isinstance(file := tree.get(name), Path):  # its plugin files come with the recipe
            profile = json.loads(file.read_bytes())
            kept = [each for each in profile.get("plugins", ()) if not (is_plugin_file(each) and each in recipe)]
            tree[name] = json.dumps(profile | {"plugins": kept}).encode()
    return tree


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".safetensors.index.json"))
