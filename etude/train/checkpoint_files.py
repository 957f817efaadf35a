"""The files of a training checkpoint, each written by the ranks that have its content.

Weights are written while training waits, one parameter at a time. Optimizer and masters, which are several times as
large, are copied, and a thread writes them while the next steps run (torch's distributed checkpoint, as safetensors
files). The checkpoint gets its name when everything is there: a kill before leaves the previous one. What one mesh has
written, any other reads, and one process too.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import Tensor

from etude.errors import EtudeError, InputError
from etude.model.adapters import adapter_views
from etude.model.checkpoint import TRAINING, write_config, write_index, write_model, write_shards
from etude.model.layout import adapter_pieces, checkpoint_pieces
from etude.model.mtp import MTP, carried_mtp, is_published, published_tensors, save_mtp, write_model_with_mtp
from etude.model.peft import write_adapter
from etude.model.transformer import Transformer
from etude.parallel.tensors import is_sharded
from etude.train.optim import MasterAdamW

if TYPE_CHECKING:
    import torch

    from etude.parallel.mesh import TrainingMesh

# Writing from one process is what one process wants.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
OPTIMIZER = "optimizer"  # directory in `training/` of a checkpoint


class TrainingCheckpoints:
    """Writes checkpoints one after the other; every rank has one and calls the same methods.

    As a context manager it completes the last checkpoint at the end, also when training was interrupted or failed: what
    was begun is not lost. With several ranks a failure does not wait, because other ranks may be dead.
    """

    def __init__(self, mesh: TrainingMesh | None = None) -> None:
        self.mesh = mesh
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self.mesh is None and self._thread is not None:
            self._thread.join()

    def write(
        self,
        opened: AbstractContextManager[Path] | None,
        fill: Callable[[Path], None],
        optimizer: MasterAdamW,
        finish: Callable[[Path], None],
        then: Callable[[], None],
    ) -> None:
        """Begin a checkpoint in the directory that the leading rank opens; the others pass None.

        `fill` writes weights, on all ranks, before this returns. When the optimizer is written too, the leading rank
        calls `finish` with the directory, closes it, which gives it its name, and then calls `then`.
        """
        self.wait()
        with ExitStack() as stack:
            directory = stack.enter_context(opened) if opened is not None else None
            if self.mesh is not None:
                directory = self.mesh.share(directory)
            assert directory is not None
            fill(directory)
            state, closing = copy_to_host(optimizer.state_dict()), stack.pop_all()
        leads = opened is not None

        def complete() -> None:
            try:
                with closing:
                    write_state(directory / TRAINING / OPTIMIZER, state, self.mesh)
                    if leads:
                        finish(directory)
                if leads:
                    then()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=complete, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; raise what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


# ------------------------------------------------------------------------------------------------ optimizer


def copy_to_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}


def write_state(directory: Path, state: dict[str, Tensor], mesh: TrainingMesh | None) -> None:
    """Write tensors, each rank its parts."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    directory.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    group = mesh.host_group if mesh else None
    try:
        save(state, storage_writer=writer, process_group=group, no_dist=mesh is None)
    except (CheckpointException, OSError) as error:
        raise EtudeError(
            f"{directory}: the optimizer's state could not be written ({_first_problem(error)}); free some space, then "
            "continue with --resume"
        ) from None


def read_optimizer(checkpoint: Path, optimizer: MasterAdamW, mesh: TrainingMesh | None) -> None:
    """Restore the optimizer from a checkpoint of any mesh, each rank its parts."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    directory = checkpoint / TRAINING / OPTIMIZER
    state = optimizer.state_dict()
    group = mesh.host_group if mesh else None
    try:
        reader = HuggingFaceStorageReader(str(directory))
        load(state, storage_reader=reader, process_group=group, no_dist=mesh is None)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        if mesh is not None and isinstance(error, RuntimeError):  # of a collective: each rank's own are collected
            raise EtudeError(f"{directory}: another rank ended while it was read: {_first_problem(error)}") from error
        raise InputError(f"{directory}: not the optimizer of this model: {_first_problem(error)}") from None
    optimizer.load_state_dict(state)


def _first_problem(error: BaseException) -> str:
    """Return the first failure of a rank in one line."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()))[0] if failures else error
    return f"{type(first).__name__}: {first}".splitlines()[0]


# ------------------------------------------------------------------------------------------------ weights


def write_weights(
    model: Transformer,
    mtp: MTP | None,
    directory: Path,
    dtype: torch.dtype,
    mesh: TrainingMesh | None,
    base: str | None = None,
    carried: Path | None = None,
) -> None:
    """Write a model in Hugging Face format or, with the name of its `base`, its adapters in PEFT's; and MTP layers.

    With `carried`, published MTP layers of that checkpoint, which are not trained here, are written with the model.
    """
    if base is not None:
        tensors = _adapter_tensors(model, dtype, mesh)
        if tensors is not None:
            write_adapter(model, directory, base, tensors)
        if mtp is not None:
            write_mtp(mtp, directory, dtype, mesh)
    elif mesh is not None:
        _write_sharded(model, mtp, directory, dtype, mesh, carried)
    elif carried is not None:
        write_model(model, directory, extra=carried_mtp(carried, model))
    else:
        write_model_with_mtp(model, mtp, directory)


def _adapter_tensors(model: Transformer, dtype: torch.dtype, mesh: TrainingMesh | None) -> Mapping[str, Tensor] | None:
    """Return the adapters by their names in PEFT's file; of a sharded model, on the leading rank only."""
    if mesh is None:
        return adapter_views(model)
    from etude.train.sharding import collect_tensors

    assert model.lora is not None
    pieces = adapter_pieces(model.config, model.lora)
    parts = mesh.gather({name: part.cpu().clone() for name, part in collect_tensors(model, mesh, pieces, dtype)})
    return None if parts is None else {name: tensor for part in parts for name, tensor in part.items()}


def _write_sharded(
    model: Transformer,
    mtp: MTP | None,
    directory: Path,
    dtype: torch.dtype,
    mesh: TrainingMesh,
    carried: Path | None,
) -> None:
    """Write the tensors that each rank collects into files of its own; the leading rank writes the index."""
    from etude.train.sharding import collect_tensors

    collected = collect_tensors(model, mesh, checkpoint_pieces(model.config), dtype)
    files = mesh.gather(write_shards(directory, collected, f"model-{mesh.rank:05d}"))
    published: dict[str, tuple[str, int]] = {}
    shared = None
    if (mtp is not None and is_published(mtp)) or (carried is not None and model.config.mtp_layers):
        shared = _whole(model.embed.weight, dtype), _whole(model.head_weight, dtype)
    if carried is not None:
        if mesh.leads and shared is not None:
            published = write_shards(directory, carried_mtp(carried, model, shared), "model-mtp")
    elif mtp is not None and shared is not None:
        state = _whole_state(mtp, dtype)
        if mesh.leads:
            whole = MTP(mtp.config, len(mtp.layers)).to(dtype)
            whole.load_state_dict(state)
            published = write_shards(directory, published_tensors(whole, *shared), "model-mtp")
    elif mtp is not None:
        write_mtp(mtp, directory, dtype, mesh)
    if files is not None:
        write_index(directory, {name: file for part in (*files, published) for name, file in part.items()})
        write_config(model.config, dtype, directory)


def write_mtp(mtp: MTP, directory: Path, dtype: torch.dtype, mesh: TrainingMesh | None) -> None:
    """Write multi-token-prediction layers into a file of their own."""
    state = _whole_state(mtp, dtype)
    if mesh is None or mesh.leads:
        save_mtp(state, len(mtp.layers), directory)


def _whole_state(mtp: MTP, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the state with whole tensors on the host; parameters have the dtype, buffers their own."""
    parameters = {name for name, _ in mtp.named_parameters()}
    return {
        name: _whole(tensor, dtype if name in parameters else tensor.dtype) for name, tensor in mtp.state_dict().items()
    }


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the host, gathered if it is sharded: every rank must call this."""
    whole = tensor.detach()
    return (whole.full_tensor() if is_sharded(whole) else whole).to("cpu", dtype)
