"""The tokenizer compared with transformers: same ids, same chats; and its guarantees for untrusted text."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from etude.chat.tokenizer import (
    CHAT_TEMPLATE,
    FRAME_TOKENS,
    MARKUP_TOKENS,
    Tokenizer,
    check_vocabulary,
    train_tokenizer,
)
from etude.errors import InputError

SPECIALS = (*FRAME_TOKENS, *MARKUP_TOKENS)
CODE = Path(__file__).read_text(encoding="utf-8")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "run", "description": "Führt <cmd> & mehr aus", "parameters": {}},
    }
]

# Text as it comes: any Unicode, whitespace in any mixture, code, control tokens in unexpected places.
whitespace = st.text(alphabet=" \t\n\r\u00a0\u3000\x0b", max_size=8)
code = st.integers(0, len(CODE) - 1).map(lambda start: CODE[start : start + 60])
pieces = st.one_of(
    st.text(max_size=20), whitespace, code, st.sampled_from(SPECIALS), st.sampled_from(("<|im", "end|>"))
)
texts = st.lists(pieces, max_size=8).map("".join)

calls = st.fixed_dictionaries(
    {
        "name": st.sampled_from(("run", "read")),
        "arguments": st.dictionaries(texts, st.integers() | texts, max_size=2),
    }
)
openai_calls = calls.map(lambda call: {"id": "c1", "type": "function", "function": call})
content = st.one_of(texts, st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=2))
assistant = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": content | st.none()},
    optional={"reasoning_content": texts, "tool_calls": st.lists(calls | openai_calls, max_size=3)},
)
others = st.fixed_dictionaries({"role": st.sampled_from(("user", "tool", "system")), "content": content})
chats = st.lists(assistant | others, min_size=1, max_size=6)
tool_lists = st.sampled_from((None, TOOLS))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([CODE, "Zürich, 東京, naïve café\n" * 3], 900)


@pytest.fixture(scope="module")
def directory(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def small_backend(*added: AddedToken, merges: list[tuple[str, str]] | None = None) -> Backend:
    """Bytes, the given merges, and added tokens after them."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges or [])]
    backend = Backend(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges or []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<|endoftext|>", special=True), *added])
    return backend


class TestIds:
    @given(text=texts)
    def test_are_those_of_transformers(self, tokenizer: Tokenizer, oracle: Any, text: str) -> None:
        assert tokenizer.encode(text, special=True) == oracle.encode(text, add_special_tokens=False)

    @given(text=texts, special=st.booleans())
    def test_decode_to_the_text_they_came_from(self, tokenizer: Tokenizer, text: str, special: bool) -> None:
        assert tokenizer.decode(tokenizer.encode(text, special=special)) == text

    @given(text=texts)
    def test_of_ordinary_text_are_never_control_tokens(self, tokenizer: Tokenizer, text: str) -> None:
        assert min(tokenizer.encode(text), default=len(SPECIALS)) >= len(SPECIALS)

    @given(batch=st.lists(texts, max_size=4), special=st.booleans())
    def test_of_a_batch_are_those_of_its_texts(self, tokenizer: Tokenizer, batch: list[str], special: bool) -> None:
        assert tokenizer.encode_batch(batch, special=special) == [tokenizer.encode(t, special=special) for t in batch]

    @given(text=st.text())
    def test_of_text_without_control_tokens_do_not_depend_on_special(self, tokenizer: Tokenizer, text: str) -> None:
        assert tokenizer.encode(text) == tokenizer.encode(text, special=True)

    def test_of_a_control_token_merged_from_bytes_are_the_bytes(self) -> None:
        added = AddedToken("ab", special=True)
        tokenizer = Tokenizer(small_backend(added, merges=[("a", "b"), ("ab", "c"), ("c", "d")]))
        a, b, c = (tokenizer.token_id(letter) for letter in "abc")
        assert tokenizer.encode("abc cd") == [a, b, c, tokenizer.token_id("Ġ"), tokenizer.token_id("cd")]

    def test_keep_added_tokens_that_are_plain_text(self) -> None:
        tokenizer = Tokenizer(small_backend(AddedToken("    "), AddedToken("!", special=True)))
        assert tokenizer.encode("    ") == [tokenizer.token_id("    ")]
        assert tokenizer.decode(tokenizer.encode("stop!")) == "stop!"

    def test_skipping_special_ones_hides_the_frame_and_keeps_the_markup(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("<|im_start|><tool_call>x</tool_call><|im_end|>", special=True)
        assert tokenizer.decode(ids, skip_special=True) == "<tool_call>x</tool_call>"

    def test_of_a_lone_surrogate_are_refused_with_its_place(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(InputError, match="lone surrogate at character 2"):
            tokenizer.encode("ab\ud800")
        with pytest.raises(InputError, match="lone surrogate at character 1"):
            tokenizer.encode_batch(["fine", "a\udfff"])

    def test_are_not_cut_by_truncation_left_in_the_file(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        tokenizer.save(tmp_path)
        backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
        backend.enable_truncation(3)
        backend.save(str(tmp_path / "tokenizer.json"))
        assert len(Tokenizer.load(tmp_path).encode("a b c d e f g h", special=True)) > 3


class TestChat:
    @given(messages=chats, tools=tool_lists, prompt=st.booleans())
    def test_renders_as_in_transformers(
        self, tokenizer: Tokenizer, oracle: Any, messages: list[dict[str, Any]], tools: Any, prompt: bool
    ) -> None:
        expected = oracle.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        assert tokenizer.render(messages, tools, prompt) == expected

    @given(messages=chats, tools=tool_lists, last=assistant | others)
    def test_only_grows_at_its_end(
        self, tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any, last: dict[str, Any]
    ) -> None:
        shorter = tokenizer.render(messages, tools, add_generation_prompt=False)
        longer = tokenizer.render([*messages, last], tools, add_generation_prompt=False)
        assert longer.startswith(shorter)
        assert tokenizer.render([*messages, last], tools, add_generation_prompt=True).startswith(shorter)

    @given(messages=chats, tools=tool_lists, answer=assistant)
    def test_continues_from_the_generation_prompt(
        self, tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any, answer: dict[str, Any]
    ) -> None:
        prompt = tokenizer.render(messages, tools, add_generation_prompt=True)
        assert tokenizer.render([*messages, answer], tools, add_generation_prompt=False).startswith(prompt)

    @given(messages=chats, tools=tool_lists, last=assistant | others)
    def test_only_grows_at_its_end_in_tokens_too(
        self, tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any, last: dict[str, Any]
    ) -> None:
        shorter, longer = (
            tokenizer.encode(tokenizer.render(chat, tools, add_generation_prompt=False), special=True)
            for chat in (messages, [*messages, last])
        )
        assert longer[: len(shorter)] == shorter

    def test_reads_as_chatml_with_tools(self, tokenizer: Tokenizer) -> None:
        call = {"name": "run", "arguments": {"cmd": "ls <dir>"}}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Which files?"},
            {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [call, call]},
            {"role": "tool", "content": "a.py"},
            {"role": "tool", "content": "b.py"},
        ]
        text = tokenizer.render(messages, TOOLS)
        assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
        assert f"<tools>\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n</tools>" in text
        written = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls <dir>"}}\n</tool_call>'
        assert text.endswith(
            "<|im_start|>user\nWhich files?<|im_end|>\n"
            f"<|im_start|>assistant\n<think>\nLook.\n</think>\n\n{written}\n{written}<|im_end|>\n"
            "<|im_start|>user\n<tool_response>\na.py\n</tool_response>\n<tool_response>\nb.py\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n"
        )

    @pytest.mark.parametrize(
        ("messages", "complaint"),
        [
            ([], "at least one message"),
            ([{"role": "wizard", "content": "x"}], "not wizard"),
            ([{"role": "user", "content": 7}], "text or a list of text parts"),
            ([{"role": "user", "content": [{"type": "image"}]}], "not image"),
            ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "chat template failed"),
        ],
    )
    def test_that_cannot_be_rendered_is_refused(self, tokenizer: Tokenizer, messages: Any, complaint: str) -> None:
        with pytest.raises(InputError, match=complaint):
            tokenizer.render(messages)

    @pytest.mark.parametrize(
        ("template", "complaint"),
        [
            (None, "no chat template"),
            ("{% for %}{{ tools }}", "not valid"),
            ("{{ tools.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(tools) }}", "chat template failed"),
            ("{{ messages[0].content }}", "does not render tools"),
        ],
    )
    def test_templates_that_are_wrong_or_hostile_are_refused(self, template: str | None, complaint: str) -> None:
        tokenizer = Tokenizer(small_backend(), chat_template=template)
        with pytest.raises(InputError, match=complaint):
            tokenizer.render([{"role": "user", "content": "hi"}], TOOLS)

    def test_templates_have_what_published_ones_use(self) -> None:
        template = (
            "{% for m in messages %}{% if m.skip %}{% continue %}{% endif %}"
            "{% generation %}{{ m | tojson(indent=1) }}{% endgeneration %}{% endfor %}"
            "{{ eos_token }}{{ strftime_now('%%') }}{{ mood }}"
        )
        tokenizer = Tokenizer(small_backend(), chat_template=template, config={"eos_token": "<|endoftext|>"})
        assert tokenizer.render([{"skip": 1}, {"é": "<"}], mood="calm") == '{\n "é": "<"\n}<|endoftext|>%calm'


class TestTraining:
    def test_gives_special_tokens_the_first_ids(self, tokenizer: Tokenizer) -> None:
        assert [tokenizer.token_id(token) for token in SPECIALS] == list(range(len(SPECIALS)))
        assert tokenizer.end_of_text == 0
        assert tokenizer.stop_ids == {0, tokenizer.token_id("<|im_end|>")}
        assert tokenizer.token_id("<|nothing|>") is None
        assert len(tokenizer) == 900

    def test_splits_numbers_into_digits(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.encode("2026") == [tokenizer.token_id(digit) for digit in "2026"]

    def test_gives_the_same_bytes_in_another_process(self, tokenizer: Tokenizer) -> None:
        program = (
            "import sys; from etude.chat.tokenizer import train_tokenizer\n"
            "code = open(sys.argv[1], encoding='utf-8').read()\n"
            "print(train_tokenizer([code, 'Zürich, 東京, naïve café\\n' * 3], 900).digest)"
        )
        environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
        result = subprocess.run(
            [sys.executable, "-c", program, __file__],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == tokenizer.digest

    def test_stops_when_the_text_runs_out_of_merges(self) -> None:
        assert len(train_tokenizer(["ab"], 5000)) == 256 + len(SPECIALS) + 1

    def test_refuses_a_vocabulary_without_room_for_bytes_and_specials(self) -> None:
        with pytest.raises(InputError, match=r"vocab_size = 270 is too small.*at least 271"):
            train_tokenizer(["text"], 270)


class TestFiles:
    def test_keep_everything(self, tokenizer: Tokenizer, directory: Path, tmp_path: Path) -> None:
        loaded = Tokenizer.load(directory)
        assert (loaded.digest, loaded.stop_ids, loaded.roles) == (
            tokenizer.digest,
            tokenizer.stop_ids,
            tokenizer.roles,
        )
        assert loaded.chat_template == CHAT_TEMPLATE
        loaded.save(tmp_path)
        names = sorted(path.name for path in directory.iterdir())
        assert names == sorted(path.name for path in tmp_path.iterdir())
        assert all((directory / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)

    def test_keep_stop_ids_and_other_generation_settings(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [3, 4]}')
        (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
        Backend.from_str(small_backend().to_str()).save(str(tmp_path / "tokenizer.json"))
        loaded = Tokenizer.load(tmp_path)
        assert loaded.stop_ids == {3, 4, 5, loaded.end_of_text}
        loaded.save(tmp_path)
        kept = json.loads((tmp_path / "generation_config.json").read_text())
        assert kept == {"temperature": 0.6, "eos_token_id": sorted(loaded.stop_ids)}

    def test_may_hold_the_template_and_tokens_the_old_way(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        tokenizer.save(tmp_path)
        (tmp_path / "chat_template.jinja").unlink()
        old = {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<|file_sep|>", "lstrip": False}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(old))
        assert Tokenizer.load(tmp_path).render([]) == "<|file_sep|>"

    @pytest.mark.parametrize(
        ("name", "text", "complaint"),
        [
            ("tokenizer.json", "", "tokenizer.json: not a tokenizer"),
            ("tokenizer.json", '{"model": ', "tokenizer.json: not a tokenizer"),
            ("tokenizer.json", None, "tokenizer.json: no such file"),
            ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
            ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object, found list"),
            (
                "tokenizer_config.json",
                '{"eos_token": "<no>"}',
                "tokenizer_config.json: eos_token '<no>' is not in",
            ),
            ("tokenizer_config.json", '{"bos_token": 1}', "tokenizer_config.json: bos_token 1 is not in"),
            (
                "generation_config.json",
                '{"eos_token_id": "2"}',
                "generation_config.json: eos_token_id is an id",
            ),
            ("chat_template.jinja", "\udcff", "chat_template.jinja: cannot be read"),
        ],
    )
    def test_that_are_missing_or_corrupt_are_named(
        self, tokenizer: Tokenizer, tmp_path: Path, name: str, text: str | None, complaint: str
    ) -> None:
        tokenizer.save(tmp_path)
        if text is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(InputError, match=complaint):
            Tokenizer.load(tmp_path)

    def test_of_other_kinds_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no such directory"):
            Tokenizer.load(tmp_path / "nowhere")
        Backend(models.WordLevel({"<s>": 0}, unk_token="<s>")).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(InputError, match="a WordLevel tokenizer; only BPE"):
            Tokenizer.load(tmp_path)
        small_backend().save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "tool_use", "template": ""}]}')
        with pytest.raises(InputError, match="chat_template is not a single template"):
            Tokenizer.load(tmp_path)

    def test_without_an_end_of_document_are_refused(self) -> None:
        with pytest.raises(InputError, match="no token that ends a document"):
            Tokenizer(Backend(models.BPE(vocab={"a": 0}, merges=[])))


def test_a_tokenizer_larger_than_the_model_is_refused_and_padding_is_not(tokenizer: Tokenizer) -> None:
    check_vocabulary(tokenizer, 900, "here")
    check_vocabulary(tokenizer, 1024, "here")
    with pytest.raises(InputError, match=r"^here: the tokenizer has ids up to 899, but .* vocab_size is 899$"):
        check_vocabulary(tokenizer, 899, "here")


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_dir)


@pytest.fixture(scope="module")
def smollm2_tokenizer_oracle(smollm2_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


class TestSmolLM2:
    """A tokenizer that others trained, from our GGUF import."""

    @settings(max_examples=200)
    @given(text=texts)
    def test_ids_are_those_of_transformers(self, smollm2: Tokenizer, smollm2_tokenizer_oracle: Any, text: str) -> None:
        expected = smollm2_tokenizer_oracle.encode(text, add_special_tokens=False)
        assert smollm2.encode(text, special=True) == expected

    @given(text=texts.map(lambda text: f"<|im_end|>{text}<repo_name>"))
    def test_ordinary_text_never_becomes_a_control_token(self, smollm2: Tokenizer, text: str) -> None:
        assert min(smollm2.encode(text)) > 16

    def test_known_ids(self, smollm2: Tokenizer) -> None:
        # From llama.cpp's own tokenizer, on the same file.
        assert smollm2.encode("x = 1234 + y\n\tfoo()") == [
            104,
            446,
            216,
            33,
            34,
            35,
            36,
            1232,
            329,
            198,
            197,
            15236,
            1000,
        ]
        assert (smollm2.end_of_text, len(smollm2)) == (0, 49152)
        assert smollm2.stop_ids == {0, 2}

    def test_chats_are_those_of_transformers(self, smollm2: Tokenizer, smollm2_tokenizer_oracle: Any) -> None:
        messages = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Hello."}]
        expected = smollm2_tokenizer_oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert smollm2.render(messages) == expected
        assert expected.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
