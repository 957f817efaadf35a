"""Corpora end to end: the same bytes again and after a kill, the right documents in the right splits, exact masks."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from etude.chat.tokenizer import CHAT_TEMPLATE, Tokenizer, train_tokenizer
from etude.data.cli import app
from etude.data.corpus import CorpusOptions, build_corpus, choose_split
from etude.data.document_format import reading_order, split_for_fim
from etude.data.documents import Document
from etude.data.shards import Shards
from etude.errors import BusyError, InputError

ROOT = Path(__file__).parent.parent.parent


def function(rng: random.Random, name: str) -> str:
    words = [
        rng.choice("bcdfgklmnprst") + rng.choice(["ala", "ede", "iri", "oso"]) + str(rng.randrange(99))
        for _ in "x" * 12
    ]
    body = "\n".join(f"    {left} = {right}({words[0]})" for left, right in zip(words, reversed(words), strict=True))
    return f"def {name}({', '.join(words[:3])}):\n{body}\n    return {words[0]}\n"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Twelve packages of five modules, with licences, a duplicate and things that are not code."""
    rng = random.Random(0)
    root = tmp_path / "code"
    for package in range(12):
        folder = root / f"pkg{package:02d}"
        folder.mkdir(parents=True)
        (folder / "LICENSE").write_text("Permission is hereby granted, free of charge, to any person obtaining a copy")
        (folder / "README.md").write_text(f"# Package {package}\n\n{function(rng, 'readme')}")
        (folder / "__init__.py").write_text(f"VERSION = {package}\n{function(rng, 'start')}")
        for module in range(5):
            (folder / f"mod{module}.py").write_text("\n\n".join(function(rng, f"f{i}") for i in range(4)))
        (folder / "image.png").write_bytes(b"\x89PNG")
    (root / "pkg05" / "copy.py").write_text((root / "pkg01" / "mod1.py").read_text().replace("    ", "\t"))
    return root


def content(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def names(corpus: Path, split: str = "train") -> list[str]:
    shards = Shards.open(corpus, split)
    return [shards.name(at) for at in range(len(shards))]


def removed(report: Any) -> dict[str, dict[str, Any]]:
    return {one["document"]: one for one in report.details["removed_documents"]}


def decoded(corpus: Path, tokenizer: Tokenizer, split: str = "train") -> dict[str, str]:
    shards = Shards.open(corpus, split)
    return {shards.name(at): tokenizer.decode(shards.read(at).tolist()) for at in range(len(shards))}


class TestBuild:
    def test_documents_are_the_files_and_the_report_adds_up(
        self, code: Path, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        report = build_corpus([str(code)], tokenizer, tmp_path / "c")
        files = {f"{path.parent.name}/{path.name}": path.read_text() for path in code.rglob("*.[pm][yd]")}
        del files["pkg05/copy.py"]
        assert decoded(tmp_path / "c", tokenizer) == {name: f"{text}<|endoftext|>" for name, text in files.items()}
        assert names(tmp_path / "c") == sorted(files)
        assert removed(report)["pkg05/copy.py"]["of"] == "pkg01/mod1.py"
        assert removed(report)["pkg05/copy.py"]["reason"] == "exact_duplicate"
        assert {reason: size.documents for reason, size in report.removed.items()} == {
            "exact_duplicate": 1,
            "suffix": 12,
        }
        assert report.read.documents == len(files) + 13
        assert report.splits["train"].documents == len(files)
        shards = Shards.open(tmp_path / "c")
        assert report.splits["train"].tokens == shards.tokens == int(shards.lengths.sum())
        assert report.splits["train"].bytes == sum(len(text.encode()) for text in files.values())
        assert (shards.tokenizer_digest, shards.vocab_size) == (tokenizer.digest, len(tokenizer))
        assert report.details["licences"] == {"MIT": 12}
        assert not (tmp_path / ".c.partial").exists()

    @pytest.mark.parametrize(
        "options",
        [
            CorpusOptions(validation=0.3, held_out=("pkg03",), shard_bytes=4000),
            CorpusOptions(layout="repository", fim=0.5, near=0.5),
        ],
    )
    def test_the_same_inputs_give_the_same_bytes(
        self, code: Path, tokenizer: Tokenizer, tmp_path: Path, options: CorpusOptions
    ) -> None:
        for name in ("one", "two"):
            build_corpus([str(code)], tokenizer, tmp_path / name / "corpus", options)
        one, two = (content(tmp_path / name / "corpus") for name in ("one", "two"))
        assert one == two
        assert len(one) > 8

    def test_an_existing_directory_is_refused(self, code: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "mine").touch()
        with pytest.raises(InputError, match="already exists and is not empty"):
            build_corpus([str(code)], tokenizer, tmp_path / "c")

    def test_a_corpus_of_nothing_says_what_was_removed(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        (tmp_path / "s" / "p").mkdir(parents=True)
        (tmp_path / "s" / "p" / "a.png").touch()
        with pytest.raises(InputError, match="no document is left to train on; removed: 1 for suffix"):
            build_corpus([str(tmp_path / "s")], tokenizer, tmp_path / "c")

    @pytest.mark.parametrize(
        "wrong", [{"layout": "x"}, {"fim": 2.0}, {"near": 0.0}, {"chat": True, "fim": 0.1}, {"suffixes": ("py",)}]
    )
    def test_options_that_cannot_be_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InputError):
            CorpusOptions(**wrong)


class TestWorkers:
    """The same corpus again, with every batch in a worker process."""

    @pytest.mark.parametrize(
        "options",
        [
            CorpusOptions(validation=0.3, held_out=("pkg03",), shard_bytes=4000, fim=0.3),
            CorpusOptions(layout="repository", near=0.5, against=("AGAINST",)),
            CorpusOptions(chat=True),
        ],
    )
    def test_workers_give_the_same_bytes_as_one_process(
        self,
        code: Path,
        tokenizer: Tokenizer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        options: CorpusOptions,
    ) -> None:
        (code / "pkg02" / "uni.py").write_text("# naïve 東京 🦆 text\nx = 'é'\n" * 4)
        (tmp_path / "AGAINST").write_text((code / "pkg07" / "mod2.py").read_text())
        chats = tmp_path / "chats.jsonl"
        chats.write_text("".join(json.dumps({**row, "path": f"{at}"}) + "\n" for at, row in enumerate(CHATS * 5)))
        monkeypatch.chdir(tmp_path)
        sources = [str(chats)] if options.chat else [str(code)]
        report = build_corpus(sources, tokenizer, tmp_path / "one", options)
        assert ("contaminated" in report.removed) == bool(options.against)
        monkeypatch.setattr("etude.data.worker_pool.IN_PROCESS_BYTES", 0)
        seen: set[str] = set()

        def look(done: int, total: int, note: str = "") -> None:
            for task in Path("/proc/self/task").glob("*/children"):
                seen.update(task.read_text().split())

        build_corpus(sources, tokenizer, tmp_path / "workers", options, look)
        assert seen
        assert content(tmp_path / "workers") == content(tmp_path / "one")


class TestResume:
    """The builder runs in a process of its own, which a stand-in tokenizer or a signal stops at a known place."""

    OPTIONS = CorpusOptions(validation=0.3, shard_bytes=6000)

    def start(self, code: Path, tokenizer_dir: Path, out: Path, slow: float) -> "subprocess.Popen[bytes]":
        program = (
            "import sys, time\nfrom pathlib import Path\nfrom etude.data import corpus, document_format\n"
            "from etude.chat.tokenizer import Tokenizer\n"
            f"document_format._BATCH_CHARACTERS = 2000\nencode = Tokenizer.encode_batch\n"
            f"Tokenizer.encode_batch = lambda *a, **k: (time.sleep({slow}), encode(*a, **k))[1]\n"
            f"options = corpus.CorpusOptions(validation=0.3, shard_bytes=6000)\n"
            f"tokenizer = Tokenizer.load({str(tokenizer_dir)!r})\n"
            f"corpus.build_corpus([{str(code)!r}], tokenizer, Path({str(out)!r}), options)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True)

    @pytest.mark.parametrize("after", ["plan.json", "shards.jsonl"])
    def test_a_killed_build_resumes_to_the_same_bytes(
        self, code: Path, tokenizer: Tokenizer, tokenizer_dir: Path, tmp_path: Path, after: str
    ) -> None:
        whole = tmp_path / "whole"
        build_corpus([str(code)], tokenizer, whole, self.OPTIONS)
        out = tmp_path / "out"
        process = self.start(code, tokenizer_dir, out, slow=0.05)
        work = tmp_path / ".out.partial"
        deadline = time.monotonic() + 120
        while not (work / after).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not out.exists()
        assert (work / after).exists()
        build_corpus([str(code)], tokenizer, out, self.OPTIONS)
        assert content(out) == content(whole)

    def test_finished_shards_are_not_written_again(
        self, code: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Encoding fails half way, by a count; what was encoded into whole shards is not encoded twice."""
        seen: list[str] = []
        encode = Tokenizer.encode_batch

        def counted(self: Tokenizer, texts: list[str], *, special: bool = False) -> list[list[int]]:
            if len(seen) > 30 and fail:  # in the middle of the training split, and of a shard
                raise RuntimeError("stop")
            seen.extend(texts)
            return encode(self, texts, special=special)

        monkeypatch.setattr(Tokenizer, "encode_batch", counted)
        monkeypatch.setattr("etude.data.document_format._BATCH_CHARACTERS", 2000)
        fail = True
        with pytest.raises(RuntimeError):
            build_corpus([str(code)], tokenizer, tmp_path / "c", self.OPTIONS)
        first = list(seen)
        seen.clear()
        fail = False
        build_corpus([str(code)], tokenizer, tmp_path / "c", self.OPTIONS)
        again = set(first) & set(seen)
        assert 0 < len(again) < len(set(first)) / 2
        assert names(tmp_path / "c")

    def half_built(self, code: Path, tokenizer: Tokenizer, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("stop")

        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "encode_batch", fail)
            with pytest.raises(RuntimeError):
                build_corpus([str(code)], tokenizer, out)

    def test_other_arguments_or_inputs_are_refused_by_name(
        self, code: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "c"
        self.half_built(code, tokenizer, out, monkeypatch)
        with pytest.raises(InputError, match=r"half-built corpus(?s:.*)seed: 0 -> 5"):
            build_corpus([str(code)], tokenizer, out, CorpusOptions(seed=5))
        (code / "pkg00" / "new.py").write_text("def new_function():\n    return 'new'\n")
        with pytest.raises(InputError, match=r"content of .*code: it has changed"):
            build_corpus([str(code)], tokenizer, out)
        build_corpus([str(code)], tokenizer, out, restart=True)
        assert "pkg00/new.py" in names(out)

    def test_a_second_builder_is_refused(self, code: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
        def nested(done: int, total: int, note: str = "") -> None:
            with pytest.raises(BusyError, match=f"in use by pid {os.getpid()}"):
                build_corpus([str(code)], tokenizer, tmp_path / "c")
            calls.append(done)

        calls: list[int] = []
        build_corpus([str(code)], tokenizer, tmp_path / "c", progress=nested)
        assert calls


class TestSplits:
    def test_a_repository_is_in_one_split_by_its_name_alone(
        self, code: Path, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        options = CorpusOptions(validation=0.3, held_out=("pkg03", "pkg1*"))
        build_corpus([str(code)], tokenizer, tmp_path / "c", options)
        by_split = {
            split: {name.split("/")[0] for name in names(tmp_path / "c", split)}
            for split in ("train", "validation", "held_out")
        }
        assert by_split["held_out"] == {"pkg03", "pkg10", "pkg11"}
        assert by_split["validation"]
        assert sum(map(len, by_split.values())) == 12
        for split, repositories in by_split.items():
            assert all(choose_split(repository, options) == split for repository in repositories)

    def test_the_share_is_about_what_was_asked_for(self) -> None:
        chosen = [choose_split(f"owner/repo{i}", CorpusOptions(validation=0.1, seed=3)) for i in range(5000)]
        assert 420 < chosen.count("validation") < 580

    def test_a_copy_of_held_out_code_leaves_training_not_the_held_out(
        self, code: Path, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        """pkg01 comes first in order, pkg05 has the copy; holding out pkg05 must remove the original from train."""
        report = build_corpus([str(code)], tokenizer, tmp_path / "c", CorpusOptions(held_out=("pkg05",)))
        assert "pkg05/copy.py" in names(tmp_path / "c", "held_out")
        assert removed(report)["pkg01/mod1.py"]["of"] == "pkg05/copy.py"

    def test_a_passage_of_held_out_code_leaves_training(self, code: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
        passage = (code / "pkg05" / "mod2.py").read_text().split("\n\n\n")[0]
        (code / "pkg02" / "borrowed.py").write_text(function(random.Random(5), "own") * 3 + passage)
        report = build_corpus([str(code)], tokenizer, tmp_path / "c", CorpusOptions(held_out=("pkg05",)))
        found = removed(report)["pkg02/borrowed.py"]
        assert (found["reason"], found["source"]) == ("contaminated", "held_out: pkg05/mod2.py")
        assert 0 < found["share"] < 1

    def test_a_name_that_matches_nothing_is_an_error(self, code: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="held_out nothing-like-it matches no repository"):
            build_corpus([str(code)], tokenizer, tmp_path / "c", CorpusOptions(held_out=("nothing-like-it",)))


def test_benchmarks_are_protected_by_every_string_of_their_rows(
    code: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    solution = (code / "pkg07" / "mod3.py").read_text().split("\n\n\n")[1]
    bench = tmp_path / "bench.jsonl"
    bench.write_text(json.dumps({"task_id": "T/1", "prompt": "Write it.", "canonical_solution": solution}) + "\n")
    report = build_corpus([str(code)], tokenizer, tmp_path / "c", CorpusOptions(against=(str(bench),)))
    contaminated = {name for name, one in removed(report).items() if one["reason"] == "contaminated"}
    assert contaminated == {"pkg07/mod3.py"}
    assert removed(report)["pkg07/mod3.py"]["source"] == f"{bench}: bench/row-00000001"
    assert len(removed(report)["pkg07/mod3.py"]["ngram"].split()) == 13


class TestDocumentFormat:
    def test_a_repository_is_read_readme_first_packages_before_modules(self) -> None:
        paths = ["b/z.py", "a.py", "b/__init__.py", "README.md", "b/a.py", "b/README.md", "b/c/x.py"]
        ordered = [paths[at] for at in reading_order(paths)]
        assert ordered == ["README.md", "a.py", "b/__init__.py", "b/README.md", "b/a.py", "b/c/x.py", "b/z.py"]

    def test_markers_are_tokens_where_the_vocabulary_has_them(
        self, code: Path, tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        build_corpus([str(code)], tokenizer, tmp_path / "c", CorpusOptions(layout="repository"))
        shards = Shards.open(tmp_path / "c")
        ids = shards.read(4).tolist()
        assert shards.name(4) == "pkg04"
        repository, separator = tokenizer.token_id("<|repo_name|>"), tokenizer.token_id("<|file_sep|>")
        assert ids[0] == repository
        assert ids.count(separator) == 7
        assert ids[-1] == tokenizer.end_of_text
        files = ["README.md", "__init__.py", *(f"mod{i}.py" for i in range(5))]
        expected = "".join(f"<|file_sep|>{file}\n{(code / 'pkg04' / file).read_text()}" for file in files)
        assert tokenizer.decode(ids) == f"<|repo_name|>pkg04\n{expected}<|endoftext|>"

    def test_otherwise_a_comment_names_the_path(self, code: Path, tmp_path: Path) -> None:
        bare = without_tokens("<|file_sep|>", "<|fim_prefix|>")
        build_corpus([str(code)], bare, tmp_path / "c", CorpusOptions(layout="repository"))
        text = decoded(tmp_path / "c", bare)["pkg00"]
        assert text.startswith("<!-- README.md -->\n# Package 0\n")
        assert "\n# mod3.py\ndef f0(" in text
        with pytest.raises(InputError, match="--fim needs a vocabulary with fill-in-the-middle tokens"):
            build_corpus([str(code)], bare, tmp_path / "d", CorpusOptions(fim=0.5))

    def test_text_never_becomes_a_control_token(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        (tmp_path / "p").mkdir()
        (tmp_path / "p" / "a.py").write_text("x = '<|endoftext|><|file_sep|><|im_end|>'\n" * 3)
        build_corpus([str(tmp_path / "p" / "a.py")], tokenizer, tmp_path / "c", CorpusOptions(layout="repository"))
        ids = Shards.open(tmp_path / "c").read(0).tolist()
        assert [token for token in ids if token < 15] == [13, 14, 0]

    def test_fill_in_the_middle_inverts_to_the_text(self, code: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
        options = CorpusOptions(fim=0.5)
        (code / "pkg00" / "uni.py").write_text("# naïve 東京 🦆 text\nx = 'é'\n" * 4)
        build_corpus([str(code)], tokenizer, tmp_path / "c", options)
        shards = Shards.open(tmp_path / "c")
        marks = [tokenizer.token_id(f"<|fim_{part}|>") for part in ("prefix", "suffix", "middle")]
        rearranged = 0
        for at in range(len(shards)):
            ids = shards.read(at).tolist()
            assert ids.pop() == tokenizer.end_of_text
            original = (code / shards.name(at)).read_text()
            if ids[0] != marks[0]:
                assert tokenizer.decode(ids) == original
                continue
            rearranged += 1
            second, third = ids.index(marks[1]), ids.index(marks[2])
            prefix, suffix, middle = ids[1:second], ids[second + 1 : third], ids[third + 1 :]
            assert "".join(map(tokenizer.decode, (prefix, middle, suffix))) == original
        assert 25 < rearranged < 60

    def test_the_rate_is_about_what_was_asked_for(self) -> None:
        documents = [Document("r", f"{i}.py", "text") for i in range(3000)]
        assert 820 < sum(split_for_fim(document, 0.3, 1) is not None for document in documents) < 980
        assert all(split_for_fim(document, 1.0, 1) for document in documents)


def without_tokens(*tokens: str) -> Tokenizer:
    """A vocabulary that lacks some of the control tokens: their spelling is another one's."""
    made = train_tokenizer(["a small text\n"], 300)
    text = made.backend.to_str()
    for number, token in enumerate(tokens):
        text = text.replace(token, f"<|other_{number}|>")
    return Tokenizer(type(made.backend).from_str(text), chat_template=CHAT_TEMPLATE, config=made.config)


CALL = {"function": {"name": "run", "arguments": {"cmd": "ls"}}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "List files."},
            {"role": "assistant", "reasoning_content": "I should look.", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "a.py"},
            {"role": "tool", "content": "b.py"},
            {"role": "assistant", "content": "Two: a.py and b.py."},
            {"role": "user", "content": "Thanks, no more."},
        ],
        "tools": [{"name": "run", "parameters": {}}],
        "repository": "sessions",
        "path": "one",
    },
]


class TestChat:
    def build(self, rows: list[dict[str, Any]], tokenizer: Tokenizer, out: Path) -> Any:
        source = out.with_suffix(".jsonl")
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return build_corpus([str(source)], tokenizer, out, CorpusOptions(chat=True))

    def test_a_turn_of_weight_0_is_kept_out_of_the_loss(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        user = {"role": "user", "content": "Hi"}
        slip, good = ({"role": "assistant", "content": text} for text in ("Oops.", "Hello."))
        self.build([{"messages": [user, {**slip, "weight": 0}, user, good]}], tokenizer, tmp_path / "c")
        shards = Shards.open(tmp_path / "c")
        ids, mask = shards.read(0).tolist(), shards.mask(0).tolist()
        assert "Oops." in tokenizer.decode(ids)
        assert (
            tokenizer.decode([token for token, in_loss in zip(ids, mask, strict=True) if in_loss]) == "Hello.<|im_end|>"
        )

    def test_the_mask_is_exactly_what_the_assistant_wrote(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """Read independently: between the marker of an assistant's turn and the first <|im_end|>, inclusive."""
        self.build(CHATS, tokenizer, tmp_path / "c")
        shards = Shards.open(tmp_path / "c")
        assert shards.has_mask
        texts = {shards.name(at): at for at in range(len(shards))}
        for row, name in zip(CHATS, ("c/row-00000001", "sessions/one"), strict=True):
            at = texts[name]
            ids, mask = shards.read(at).tolist(), shards.mask(at).tolist()
            rendered = tokenizer.render(row["messages"], row.get("tools"), add_generation_prompt=False)
            assert tokenizer.decode(ids) == rendered + "<|endoftext|>"
            start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
            expected, opening, writing = [], "", False
            for token in ids:
                expected.append(writing)
                if writing:
                    writing = token != end
                elif token == start:
                    opening = " "
                elif opening:
                    opening += tokenizer.decode([token])
                    if opening.endswith("\n"):
                        writing, opening = opening.strip() == "assistant", ""
            assert mask == expected
            written = [tokenizer.decode([token]) for token, flag in zip(ids, mask, strict=True) if flag]
            assert written.count("<|im_end|>") == sum(m["role"] == "assistant" for m in row["messages"])
        assert "".join(written) == (
            '<think>\nI should look.\n</think>\n\n<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n'
            "</tool_call><|im_end|>Two: a.py and b.py.<|im_end|>"
        )

    def test_rows_that_cannot_be_masked_are_dropped_with_a_reason(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        user, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
        rows = [
            *CHATS[:1],
            {"messages": [{"role": "user", "content": "say <|im_end|>"}, answer]},
            {"messages": [user, {**answer, "tool_calls": [{"name": "x", "arguments": {"a": ["</tool_call>"]}}]}]},
            {"messages": [user]},
            {"messages": [user, {"role": "robot", "content": ""}, answer]},
            {"messages": [user, {"role": "assistant", "content": "\ud800"}]},
        ]
        found = removed(self.build(rows, tokenizer, tmp_path / "c"))
        reasons = ["control_token", "control_token", "no_assistant", "template", "not_utf8"]
        assert {name: one["reason"] for name, one in found.items()} == {
            f"c/row-{number:08d}": reason for number, reason in enumerate(reasons, 2)
        }

    def test_a_template_that_rewrites_the_past_is_not_guessed_at(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        forgetful = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{{ m.content if loop.last or m.role != 'assistant' else 'gone' }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        other = Tokenizer(tokenizer.backend, chat_template=forgetful, config=tokenizer.config)
        long = {
            "messages": [
                *CHATS[0]["messages"],
                {"role": "user", "content": "More"},
                {"role": "assistant", "content": "No."},
            ]
        }
        found = removed(self.build([CHATS[0], long], other, tmp_path / "c"))
        assert {name: one["reason"] for name, one in found.items()} == {"c/row-00000002": "not_append_only"}

    def test_a_shared_system_prompt_does_not_make_duplicates(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        system = {"role": "system", "content": " ".join(f"rule{i} applies" for i in range(200))}
        rows = [
            {
                "messages": [
                    system,
                    {"role": "user", "content": f"What is {a}?"},
                    {"role": "assistant", "content": f"{a} it is."},
                ]
            }
            for a in ("blue", "green", "blue")
        ]
        report = self.build(rows, tokenizer, tmp_path / "c")
        assert {reason: size.documents for reason, size in report.removed.items()} == {"exact_duplicate": 1}

    def test_a_source_that_is_not_chat_is_named(self, code: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="chats are read from files of rows"):
            build_corpus([str(code)], tokenizer, tmp_path / "c", CorpusOptions(chat=True))
        with pytest.raises(InputError, match="row 1 has no list of objects under messages"):
            self.build([{"text": "x"}], tokenizer, tmp_path / "d")


class TestCommand:
    """The sub-app by itself, apart from the `etude` command that carries it."""

    def command(self, *arguments: object) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})
        assert result.exit_code == 0, result.output
        return result.stdout

    def test_build_show_and_peek(self, code: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
        out = tmp_path / "c"
        options = ("--tokenizer", tokenizer_dir, "--out", out, "--held-out", "pkg03", "--json")
        built = json.loads(self.command("build", code, *options))
        assert built["splits"]["held_out"]["documents"] == 7
        shown = self.command("show", out)
        assert "exact_duplicate" in shown
        assert "MIT 12" in shown
        assert json.loads(self.command("show", out, "--json")) == built
        seen = self.command("peek", out, "--split", "held_out", "--document", 1)
        assert seen.startswith("pkg03/__init__.py: document 1 of 7")
        assert "VERSION = 3\n" in seen
