"""Whole stages on real corpora: a killed run resumes to the same result, and every artefact is checked."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from etude.chat.tokenizer import Tokenizer
from etude.data.corpus import CorpusOptions, build_corpus
from etude.errors import EtudeError, InputError
from etude.model import load
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run

RECIPE = """
name = "tiny"
stages = ["tokenizer", "init", "corpus", "pretrain", "mtp", "extend", "sft"]
[tokenizer]
sources = ["code"]
vocab_size = 320
[init.config]
model_type = "qwen3"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
tie_word_embeddings = true
max_position_embeddings = 32
initializer_range = 0.1
[[corpus.build]]
name = "code"
sources = ["code"]
held_out = ["away"]
[[corpus.build]]
name = "chat"
sources = ["chat.jsonl"]
chat = true
[pretrain]
mix = [{ corpus = "code" }]
length = 32
tokens = 2560
rows = 2
micro_batches = 2
learning_rate = 1e-2
checkpoint_every = 4
evaluate_every = 10
held_out = { corpus = "code", window = 16 }
[mtp]
mix = [{ corpus = "code" }]
length = 32
tokens = 320
rows = 2
checkpoint_every = 2
held_out = { corpus = "code" , window = 16 }
[extend]
mix = [{ corpus = "code" }]
length = 64
tokens = 512
rows = 2
rope_theta = 40000.0
min_document = 64
held_out = { corpus = "code", window = 64 }
[sft]
mix = [{ corpus = "chat" }]
length = 64
tokens = 512
rows = 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stages")
    for package in ("one", "two", "away"):
        (place / "code" / package).mkdir(parents=True)
        for name in ("a", "b"):
            text = "".join(f"def {package}_{name}_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(12))
            (place / f"code/{package}/{name}.py").write_text(text)
    rows = [
        {"messages": [{"role": "user", "content": f"add {i}"}, {"role": "assistant", "content": f"the sum is {2 * i}"}]}
        for i in range(30)
    ]
    (place / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "tiny.toml").write_text(RECIPE)
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> Run:
    run_recipe(load_recipe(place / "tiny.toml"), place / "whole")
    return Run.read(place / "whole")


def losses(run: Run, stage: str) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.metrics(stage) if "loss" in record]


def test_the_stages_leave_checkpoints_that_transformers_loads(whole: Run) -> None:
    names = [artefact.name for artefact in whole.artefacts()]
    assert {"init-0", "pretrain-20", "mtp-5", "extend-4", "sft-4"} <= set(names)
    final = whole.find("checkpoint")
    assert final.name == "sft-4"
    ours = load(final.path)
    assert ours.config.max_length == 64
    assert ours.config.rope.theta == 40000.0
    text = "def f(x):\n    return x"
    for checkpoint in whole.artefacts("checkpoint"):
        # vLLM loads every such file as weights, and a config without `architectures` as an embedding model.
        assert [file.name for file in checkpoint.path.glob("*.safetensors")] == ["model.safetensors"]
        assert json.loads((checkpoint.path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
        tokens = Tokenizer.load(checkpoint.path).encode(text)
        assert transformers.AutoTokenizer.from_pretrained(checkpoint.path).encode(text) == tokens
        theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
        ids = torch.tensor([tokens])
        with torch.no_grad():
            torch.testing.assert_close(theirs(ids).logits, load(checkpoint.path)(ids), atol=1e-4, rtol=0)
    assert (final.path / "training/mtp.safetensors").exists()
    assert final.parents[0].path == "checkpoints/extend-4"


def test_training_learns_and_measures(whole: Run) -> None:
    steps = losses(whole, "pretrain")
    assert [step for step, _ in steps] == list(range(1, 21))
    assert steps[-1][1] < steps[0][1] - 0.5
    scores = [record for record in whole.metrics("pretrain") if record.get("evaluation")]
    assert [record["step"] for record in scores] == [0, 10, 20]
    assert scores[-1]["held_out_nats"] < scores[0]["held_out_nats"]
    assert len(whole.metrics("extend")[0]["loss_by_position"]) == 8
    assert "mtp_1_overlap" in whole.metrics("sft")[-1]
    drafts = [record["held_out_overlap"] for record in whole.metrics("mtp") if record.get("evaluation")]
    assert len(drafts) == 2
    assert 0 < drafts[0] < drafts[1] < 1
    facts = whole.facts("mtp")
    assert facts["last_mtp_1_kl"] < facts["first_mtp_1_kl"]


def test_a_longer_context_takes_the_new_rope_and_remembers_the_old_length() -> None:
    from etude.model.config import ModelConfig, with_rope

    base = {"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    base |= {"num_attention_heads": 2, "max_position_embeddings": 32}
    for spelling in ({"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}):
        config = ModelConfig.from_hugging_face(base | spelling)
        wider = with_rope(config, length=128, theta=9e5)
        assert (wider.rope.theta, wider.max_length) == (9e5, 128)
        yarn = with_rope(wider, length=256, scaling={"rope_type": "yarn", "factor": 2.0})
        assert (yarn.rope.kind, yarn.rope.original_length, yarn.rope.theta) == ("yarn", 128, 9e5)


def test_a_given_models_own_mtp_layers_give_way_to_this_runs(place: Path, whole: Run, tmp_path: Path) -> None:
    final = whole.find("checkpoint").path
    text = RECIPE.replace(
        'stages = ["tokenizer", "init", "corpus", "pretrain", "mtp", "extend", "sft"]', 'stages = ["mtp", "extend"]'
    )
    mtp, extend = text.index("[mtp]"), text.index("[sft]")
    corpus = whole.path / "artefacts/corpus-code"
    body = text[mtp:extend].replace('corpus = "code"', f'corpus = "{corpus}"')
    body = body.replace("[mtp]", f'[mtp]\nmodel = "{final}"\nlayers = 2').replace(
        "[extend]", f'[extend]\nmodel = "{final}"'
    )
    (tmp_path / "r.toml").write_text('name = "r"\nstages = ["mtp", "extend"]\n' + body)
    run_recipe(load_recipe(tmp_path / "r.toml"), tmp_path / "run")
    names = load_file(Run.read(tmp_path / "run").find("checkpoint").path / "training/mtp.safetensors")
    assert any(name.startswith("layers.1.") for name in names)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sft.mix=[{corpus='code'}]", "sft learns from conversations; corpus code has none"),
        ("pretrain.held_out.window=64", "pretrain.held_out.window 64 exceeds"),
        ("extend.rope_scaling={orignal=3}", "rope_scaling.orignal would not be used"),
        ("pretrain.betas=[1.0, 0.9]", "betas must be"),
        ("pretrain.decay='constant'\x00pretrain.final_lr_fraction=0.5", "final_lr_fraction would not be used"),
        ("pretrain.held_out.long_rows=3", "long_rows would not be used"),
        ("sft.length=8", "no loss token within the first 8 tokens"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(
    place: Path, whole: Run, tmp_path: Path, override: str, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        run_recipe(load_recipe(place / "tiny.toml", override.split("\x00")), tmp_path / "run")
    assert words in str(caught.value)


def test_only_the_newest_and_the_middle_checkpoint_are_kept(whole: Run) -> None:
    kept = sorted(a.name for a in whole.artefacts("checkpoint") if a.stage == "pretrain")
    assert kept == ["pretrain-10", "pretrain-16", "pretrain-20"]
    (mtp,) = [a for a in whole.artefacts("mtp") if a.name == "mtp-5"]
    assert mtp.parents[0].path == "checkpoints/pretrain-10"


def test_the_main_model_is_untouched_by_the_mtp_stage(whole: Run) -> None:
    """extend starts from what pretrain ended with, not from the checkpoint the MTP layers were trained on."""
    extended = next(a for a in whole.artefacts("checkpoint") if a.stage == "extend")
    assert extended.parents[0].path == "checkpoints/pretrain-20"


def start(place: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "etude.cli", "run", str(place / "tiny.toml"), "--out", str(out), "--resume"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("until", ["checkpoints/pretrain-8", "artefacts/mtp-2", "checkpoints/extend-4"])
def test_a_killed_run_resumes_to_the_same_bits(place: Path, whole: Run, tmp_path: Path, until: str) -> None:
    process = start(place, tmp_path / "cut")
    deadline = time.monotonic() + 120
    while not (tmp_path / "cut" / until).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run_recipe(load_recipe(place / "tiny.toml"), tmp_path / "cut", resume=True)
    cut = Run.read(tmp_path / "cut")
    for stage in ("pretrain", "mtp", "extend", "sft"):
        assert losses(cut, stage) == losses(whole, stage)
    ours, theirs = (load_file(run.find("checkpoint").path / "model.safetensors") for run in (cut, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def resumable(place: Path, tmp_path: Path, step: int = 4) -> Path:
    """A run interrupted after its checkpoint of this step of pretrain."""
    out = tmp_path / "run"
    recipe = load_recipe(place / "tiny.toml")

    class Enough(Exception):
        pass

    with pytest.MonkeyPatch.context() as patch:
        from etude.train import phase

        save_checkpoint = phase.save_checkpoint

        def stop(run: Run, work: Any, writer: Any) -> None:
            save_checkpoint(run, work, writer)
            if work.trainer.step_count == step:
                writer.wait()
                raise Enough

        patch.setattr(phase, "save_checkpoint", stop)
        with pytest.raises(Enough):
            run_recipe(recipe, out)
    return out


def damage(file: Path, kind: str) -> None:
    """Damage a file: "cut" its last byte off, flip a "bit" in its middle, or "remove" it."""
    data = bytearray(file.read_bytes())
    if kind == "cut":
        file.write_bytes(data[:-1])
    elif kind == "bit":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()


@pytest.fixture(scope="module")
def interrupted(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run interrupted after its second checkpoint of pretrain, pretrain-8."""
    return resumable(place, tmp_path_factory.mktemp("interrupted"), step=8)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.safetensors", "cut"),
        ("training/optimizer/shard-00001-model-00001-of-00001.safetensors", "bit"),
        ("training.json", "remove"),
    ],
)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    place: Path, whole: Run, interrupted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    shutil.copytree(interrupted, tmp_path / "run")
    damage(tmp_path / "run/checkpoints/pretrain-8" / name, kind)
    run_recipe(load_recipe(place / "tiny.toml"), tmp_path / "run", resume=True)
    said = capfd.readouterr().err
    assert "checkpoints/pretrain-8: the checkpoint is damaged" in said
    assert "kept as damaged-pretrain-8, and training goes back to pretrain-4" in said
    resumed = Run.read(tmp_path / "run")
    assert losses(resumed, "pretrain") == losses(whole, "pretrain")
    ours, theirs = (load_file(run.find("checkpoint").path / "model.safetensors") for run in (resumed, whole))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_run_stops_if_every_checkpoint_is_damaged(place: Path, interrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(interrupted, tmp_path / "run")
    for name, kind in (("pretrain-4", "cut"), ("pretrain-8", "remove")):
        damage(tmp_path / "run/checkpoints" / name / "model.safetensors", kind)
    for _ in range(2):  # nothing was moved: it says so again
        with pytest.raises(InputError, match=r"every checkpoint is damaged \(pretrain-4, pretrain-8: "):
            run_recipe(load_recipe(place / "tiny.toml"), tmp_path / "run", resume=True)


def contents(directory: Path) -> dict[str, object]:
    """Return the content of every file: of tensors by name, because safetensors orders its metadata at random."""
    found: dict[str, object] = {}
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        tensors = load_file(file) if file.suffix == ".safetensors" else None
        name = str(file.relative_to(directory))
        found[name] = file.read_bytes() if tensors is None else {k: v.numpy().tobytes() for k, v in tensors.items()}
    return found


def test_a_moved_run_resumes_to_the_same_bits(place: Path, whole: Run, interrupted: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(interrupted, copy)
    copy.rename(tmp_path / "moved")
    run_recipe(load_recipe(place / "tiny.toml"), tmp_path / "moved", resume=True)
    moved = Run.read(tmp_path / "moved")
    assert losses(moved, "sft") == losses(whole, "sft")
    assert contents(moved.find("checkpoint").path) == contents(whole.find("checkpoint").path)
    for file in moved.path.rglob("*"):
        assert not file.is_file() or str(interrupted).encode() not in file.read_bytes(), file
    assert not copy.exists()


def test_a_full_disk_stops_with_a_line_and_the_run_goes_on_later(place: Path, whole: Run, tmp_path: Path) -> None:
    """A limit on file size stands in for the full disk: weights no longer fit, everything smaller does."""
    limit = (
        "import resource, signal, sys, etude.cli; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60000, resource.RLIM_INFINITY));"
        f"sys.argv = ['etude', 'run', {str(place / 'tiny.toml')!r}, '--out', {str(tmp_path / 'run')!r}];"
        "etude.cli.main()"
    )
    stopped = subprocess.run([sys.executable, "-c", limit], capture_output=True, text=True)
    assert stopped.returncode == 1, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert "could not be written" in stopped.stderr
    run_recipe(load_recipe(place / "tiny.toml"), tmp_path / "run", resume=True)
    assert losses(Run.read(tmp_path / "run"), "sft") == losses(whole, "sft")


def test_a_corrupted_shard_is_named(place: Path, tmp_path: Path) -> None:
    out = resumable(place, tmp_path)
    shard = next((out / "artefacts/corpus-code/train").glob("*.tokens"))
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match=shard.name):
        run_recipe(load_recipe(place / "tiny.toml"), out, resume=True)


def test_a_corpus_changed_under_a_resumed_run_is_refused(place: Path, tmp_path: Path) -> None:
    out = resumable(place, tmp_path)
    corpus = out / "artefacts/corpus-code"
    shutil.rmtree(corpus)
    tokenizer = Tokenizer.load(out / "artefacts/tokenizer")
    shutil.copytree(place / "code", tmp_path / "code")
    (tmp_path / "code/one/a.py").write_text("x = 1\ny = 2\n" * 40)
    build_corpus([str(tmp_path / "code")], tokenizer, corpus, CorpusOptions(held_out=("away",)))
    with pytest.raises(InputError, match="corpus code has changed"):
        run_recipe(load_recipe(place / "tiny.toml"), out, resume=True)


def test_a_diverging_run_stops_with_its_batch(place: Path, tmp_path: Path) -> None:
    recipe = load_recipe(place / "tiny.toml", ["pretrain.learning_rate=1e30", "pretrain.max_grad_norm=0.0"])
    with pytest.raises(EtudeError, match="training stopped: loss"):
        run_recipe(recipe, tmp_path / "run")
    (kept,) = (tmp_path / "run/failures/pretrain").iterdir()
    assert {"batch.safetensors", "batch.json"} == {file.name for file in kept.iterdir()}
