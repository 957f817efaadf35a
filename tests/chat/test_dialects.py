"""Dialects by example: parsed turns, malformed calls, and recognition of a family."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_chats import (
    DEEPSEEK_TOKENS,
    FAMILIES,
    FLAG,
    LIST,
    NUMBER,
    TEXT,
    TOOLS,
    WHOLE,
    RandomChat,
    as_chat,
    controls_of,
    dialect_of,
    meant,
    published,
    tokenizer_of,
    tool,
    turns,
    vocabulary,
)
from work import count_calls, ends

from etude.chat.dialects import DIALECTS, dialect_for
from etude.chat.messages import Message, ParsedTurn, ToolCall
from etude.chat.tokenizer import FRAME_TOKENS, Tokenizer
from etude.errors import InputError

every_family = pytest.mark.parametrize("family", FAMILIES)
token_marks = pytest.mark.parametrize("family", [family for family in FAMILIES if family != "chatml-text"])
GREP = ToolCall("grep", {"pattern": "x"}, "call_0")


def read(family: str, text: str, **options: Any) -> ParsedTurn:
    """Parse `text`, in which control tokens are control tokens."""
    tokens = tokenizer_of(family).encode(text, special=True)
    answer = dialect_of(family).parse(tokens, TOOLS, **options)
    assert answer.thinking_tokens + answer.call_tokens + answer.text_tokens == len(tokens)
    return answer


def answer_of(family: str) -> Message:
    """Return a message with everything that the family can write."""
    calls = [
        replace(GREP, id="functions.grep:0"),
        ToolCall("write", {"file_path": "a.py", "contents": "1\n"}, "functions.write:1"),
    ]
    return Message("assistant", "Let me look.", "Hm." if FAMILIES[family].thinks else "", tuple(calls))


class TestTheFamily:
    @every_family
    def test_is_recognised_by_its_template(self, family: str) -> None:
        assert dialect_of(family).name == FAMILIES[family].dialect

    def test_can_be_named(self) -> None:
        bare = Tokenizer(tokenizer_of("deepseek-v3").backend, config=FAMILIES["deepseek-v3"].config)
        assert dialect_for(bare, "deepseek-v3").name == "deepseek-v3"
        assert list(DIALECTS) == ["chatml", "qwen3", "qwen3-coder", "kimi-k2", "deepseek-v3"]

    def test_that_is_unknown_is_refused_with_the_known_names(self) -> None:
        tokenizer = tokenizer_of("chatml")
        with pytest.raises(InputError, match="llama is not a dialect; choose from chatml, deepseek-v3, kimi-k2, qwen3"):
            dialect_for(tokenizer, "llama")
        strange = Tokenizer(tokenizer.backend, chat_template="{{ messages }}{{ tools }}", config=tokenizer.config)
        with pytest.raises(InputError, match=r"must match exactly one dialect \(matching: none\); name one of chatml"):
            dialect_for(strange)

    def test_of_deepseek_v31_is_not_taken_for_v3(self) -> None:
        """It has V3's tokens and other calls."""
        of = tokenizer_of("deepseek-v3")
        later = Tokenizer(of.backend, chat_template="{{ tools }}<｜tool▁call▁begin｜>n<｜tool▁sep｜>", config=of.config)
        with pytest.raises(InputError, match="must match exactly one dialect"):
            dialect_for(later)

    def test_must_have_its_tokens(self) -> None:
        with pytest.raises(InputError, match=r"kimi-k2: the tokenizer has no token <\|tool_call_begin\|>"):
            dialect_for(tokenizer_of("qwen3"), "kimi-k2")
        with pytest.raises(InputError, match="qwen3: the tokenizer has no token <tool_call>"):
            dialect_for(tokenizer_of("chatml-text"), "qwen3")

    @every_family
    def test_stops_at_the_token_it_writes_last(self, family: str) -> None:
        dialect = dialect_of(family)
        assert dialect.write(Message("assistant", "Done."))[-1] in dialect.stops


class TestAnAnswer:
    @every_family
    def test_is_read_as_it_was_written(self, family: str) -> None:
        dialect, message = dialect_of(family), answer_of(family)
        tokens = dialect.write(message)
        answer = dialect.parse(tokens, TOOLS, first_call=3)
        assert meant(answer.message()) == meant(message)
        assert answer.closed
        ids = [call.id for call in answer.calls]
        assert ids == (["functions.grep:0", "functions.write:1"] if "kimi" in family else ["call_3", "call_4"])
        for call in answer.calls:
            start, end = call.span
            assert call.raw == tokenizer_of(family).decode(tokens[start:end])

    @every_family
    def test_may_be_empty(self, family: str) -> None:
        assert dialect_of(family).parse([]) == ParsedTurn("", "", (), closed=False)

    @every_family
    def test_ends_at_its_first_end(self, family: str) -> None:
        dialect = dialect_of(family)
        first, second = dialect.write(Message("assistant", "one")), dialect.write(answer_of(family))
        answer, alone = dialect.parse(first + second), dialect.parse(first)
        assert answer == replace(alone, text_tokens=alone.text_tokens + len(second))

    @every_family
    def test_that_was_cut_off_is_not_closed(self, family: str) -> None:
        dialect = dialect_of(family)
        tokens = dialect.write(answer_of(family))
        for size in range(len(tokens)):
            answer = dialect.parse(tokens[:size], TOOLS)
            assert not answer.closed
            assert answer.thinking_tokens + answer.call_tokens + answer.text_tokens == size
            assert all(call.status in ("ok", "unclosed") for call in answer.calls)

    @every_family
    def test_may_end_inside_a_character(self, family: str) -> None:
        tokens = tokenizer_of(family).encode("🙂")
        answer = dialect_of(family).parse(tokens[:-1])
        assert "\ufffd" in answer.text + answer.thinking

    @token_marks
    def test_that_spells_tags_with_ordinary_tokens_makes_no_call(self, family: str) -> None:
        dialect, message = dialect_of(family), answer_of(family)
        spelt = tokenizer_of(family).decode(dialect.write(replace(message, thinking="")))
        answer = dialect.parse(tokenizer_of(family).encode(spelt), TOOLS)
        assert answer.calls == ()
        assert spelt in (answer.text, answer.thinking)

    def test_may_have_tags_as_text_only_at_the_start_of_a_line(self) -> None:
        call = '{"name": "grep", "arguments": {"pattern": "\\n<tool_call>"}}'
        assert read("chatml-text", f"<tool_call>\n{call}\n</tool_call>").calls[0].status == "ok"
        assert read("chatml-text", f"Write <tool_call>\n{call}\n</tool_call>").calls == ()
        on_one_line = read("chatml-text", f"<tool_call>{call}</tool_call><|im_end|>").calls[0]
        assert on_one_line.status == "unclosed"
        assert "before </tool_call> at the start of a line" in on_one_line.problem

    def test_may_have_some_marks_as_tokens_and_some_as_text(self) -> None:
        """As with Qwen2.5's vocabulary, which has calls and no thoughts."""
        backend = vocabulary((*FRAME_TOKENS, "<tool_call>", "</tool_call>"))
        tokenizer = Tokenizer(backend, config=FAMILIES["chatml"].config)
        dialect, message = dialect_for(tokenizer), answer_of("chatml")
        assert meant(dialect.parse(dialect.write(message)).message()) == meant(message)
        behind = tokenizer.encode("<tool_call></tool_call><think>\nno\n<think>\nyes\n</think>", special=True)
        assert (dialect.parse(behind).thinking, dialect.parse(behind).text) == ("yes", "<think>\nno\n")

    def test_keeps_what_stands_between_and_after_calls(self) -> None:
        call = '<tool_call>\n{"name": "grep", "arguments": {}}\n</tool_call>'
        assert read("chatml", f"one\n{call}\n{call}\n<|im_end|>").text == "one"
        assert read("chatml", f"one\n{call} two\n{call}\nthree<|im_end|>").text == "one two\n\nthree"

    def test_may_stop_thinking_halfway(self) -> None:
        answer = read("qwen3", "<think>\nWhat if <tool_call>\n{}\n</tool_call>")
        assert answer.thinking == "What if <tool_call>\n{}\n</tool_call>"
        assert (answer.text, answer.calls, answer.text_tokens) == ("", (), 0)

    def test_may_think_twice_and_show_marks_that_mean_nothing(self) -> None:
        answer = read("qwen3", "<think>\na\n</think>\n\nb<think>c</think></think>d</tool_call><|im_end|>")
        assert (answer.thinking, answer.text) == ("a\n\nc", "b</think>d</tool_call>")

    def test_may_begin_in_a_thought_that_the_prompt_opened(self) -> None:
        answer = read("qwen3.5", "Hm.\n</think>\n\nDone.<|im_end|>")
        assert (answer.thinking, answer.text, answer.thinking_tokens > 2) == ("Hm.", "Done.", True)


def hermes(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def tagged(name: str, **parameters: str) -> str:
    texts = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in parameters.items())
    return hermes(f"<function={name}>\n{texts}</function>")


def kimi(*parts: str) -> str:
    call = f"<|tool_call_begin|>{'<|tool_call_argument_begin|>'.join(parts)}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def deepseek(*parts: str) -> str:
    call = f"<｜tool▁call▁begin｜>{'<｜tool▁sep｜>'.join(parts)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


WRONG = [
    ("chatml", hermes('{"name": "grep",\n "arguments": {"a": 1 "b": 2}}'), "bad_json", "at line 2, column 23, near "),
    ("chatml", hermes(""), "bad_json", "is empty"),
    ("chatml", hermes('{"name": "grep", "arguments": {}} {}'), "bad_json", "Extra data"),
    ("chatml", hermes('{"name": "grep", "arguments": {"a": NaN}}'), "bad_json", "NaN is not a JSON number"),
    ("chatml", hermes('{"name": "grep", "arguments": {"a": 1e999}}'), "bad_json", "1e999 is too large"),
    ("chatml", hermes('{"name": "grep", "arguments": {"a": "\\ud800"}}'), "bad_json", "half of a surrogate pair"),
    ("chatml", hermes('{"a":' * 5000), "bad_json", ""),
    ("chatml", hermes("[" * 10**5 + "]" * 10**5), "bad_json", "nested too deeply"),
    ("chatml", hermes('{"name": "grep", "arguments": {"a": ' + "[" * 70 + "1" + "]" * 70 + "}}"), "bad_json", "deeply"),
    ("chatml", hermes("1" * 5000), "bad_json", ""),
    ("chatml", hermes("[1]"), "bad_structure", "not an array"),
    ("chatml", hermes('{"name": "grep", "arguments": "{}"}'), "bad_structure", "must be a JSON object, not text"),
    ("chatml", hermes('{"name": "grep"}'), "bad_structure", "has no arguments"),
    ("chatml", hermes('{"arguments": {}}'), "missing_name", 'expected {"name"'),
    ("chatml", hermes('{"name": 3, "arguments": {}}'), "missing_name", ""),
    ("chatml", hermes('{"name": "grip", "arguments": {}}'), "unknown_tool", "did you mean grep?"),
    ("chatml", '<tool_call>\n{"name": "grep"', "unclosed", "before </tool_call>"),
    ("chatml", '<tool_call>{"name": "grep"<tool_call>{}</tool_call>', "bad_structure", "something else began"),
    ("qwen3", hermes("{'name': 'grep'}"), "bad_json", "Expecting property name"),
    ("qwen3-coder", hermes('{"name": "grep"}'), "bad_structure", "does not begin with <function=NAME>"),
    ("qwen3-coder", tagged(""), "missing_name", "<function=NAME>"),
    ("qwen3-coder", tagged("grep", case="maybe"), "bad_structure", "case must be of type boolean"),
    ("qwen3-coder", tagged("grep", globs="[1,"), "bad_json", "the parameter globs is not valid JSON"),
    ("qwen3-coder", tagged("grep", a="1").replace("</parameter>", ""), "bad_structure", "expected </function>, or"),
    ("qwen3-coder", tagged("grep", a="1", b="1").replace("=b", "=a"), "bad_structure", "a is given twice"),
    ("qwen3-coder", hermes("<function=grep>\n</function>\nand so on"), "bad_structure", "nothing else, at"),
    ("qwen3-coder", tagged("grab"), "unknown_tool", "the tools are grep"),
    ("qwen3-coder", "<tool_call>\n<function=grep>", "unclosed", ""),
    ("kimi-k2", kimi("functions.grep:0", "{"), "bad_json", "the text of the arguments is not valid JSON"),
    ("kimi-k2", kimi("grep:0", "{}"), "bad_structure", "functions.NAME:NUMBER, not 'grep:0'"),
    ("kimi-k2", kimi("functions.grep:0{}"), "bad_structure", "functions.NAME:NUMBER, not"),
    ("kimi-k2", kimi("functions.grep:0", "{}", ""), "bad_structure", "one <|tool_call_argument_begin|>"),
    ("kimi-k2", kimi("functions.:0", "{}"), "missing_name", ""),
    ("kimi-k2", kimi("functions.rm:0", "{}"), "unknown_tool", "no tool 'rm'"),
    (
        "kimi-k2",
        kimi("functions.grep:0", "{}")[len("<|tool_calls_section_begin|>") :],
        "bad_structure",
        "stand between",
    ),
    ("kimi-k2", kimi("functions.grep:0", "{}").partition("<|tool_call_end|>")[0], "unclosed", ""),
    ("deepseek-v3", deepseek("function", "grep\n```json\n{]\n```"), "bad_json", "near '{]'"),
    ("deepseek-v3", deepseek("function", "grep\n{}"), "bad_structure", "in a fence"),
    ("deepseek-v3", deepseek("grep", "{}"), "bad_structure", "a call begins with function"),
    ("deepseek-v3", deepseek("function", "\n```json\n{}\n```"), "missing_name", ""),
    ("deepseek-v3", deepseek("function", "ls\n```json\n{}\n```"), "unknown_tool", ""),
    ("deepseek-v3", deepseek("function", "ls").replace("<｜tool▁call▁end｜>", ""), "bad_structure", "something else"),
]


class TestACall:
    @pytest.mark.parametrize(("family", "text", "status", "error"), WRONG)
    def test_that_cannot_be_run_says_why(self, family: str, text: str, status: str, error: str) -> None:
        call = read(family, text).calls[0]
        assert call.status == status
        assert call.problem
        assert error in call.problem
        assert (call.arguments is not None) == (status == "unknown_tool")

    @every_family
    def test_that_was_cut_off_still_has_its_tool_s_name(self, family: str) -> None:
        dialect = dialect_of(family)
        message = replace(answer_of(family), calls=answer_of(family).calls[:1])
        tokens = dialect.write(message)
        start, end = dialect.parse(tokens).calls[0].span
        call = dialect.parse(tokens[: end - 3]).calls[0]
        assert (call.name, call.status, call.span) == ("grep", "unclosed", (start, end - 3))

    def test_with_an_endless_error_message_is_reported_briefly(self) -> None:
        call = read("chatml", hermes('{"name": "%s", "arguments": {}}' % ("x" * 10**5))).calls[0]
        assert call.status == "unknown_tool"
        assert len(call.problem) < 700

    def test_after_a_broken_one_is_read(self) -> None:
        calls = read("chatml", '<tool_call>{"name": <tool_call>\n{"name": "grep", "arguments": {}}\n</tool_call>').calls
        assert [call.status for call in calls] == ["bad_structure", "ok"]
        assert [call.id for call in calls] == ["call_0", "call_1"]

    def test_is_not_looked_up_when_no_tools_are_given(self) -> None:
        tokens = dialect_of("chatml").write(Message("assistant", calls=(ToolCall("anything", {}, ""),)))
        assert dialect_of("chatml").parse(tokens).calls[0].status == "ok"

    def test_in_tags_takes_the_types_of_its_schema(self) -> None:
        kinds = {"flag": FLAG, "ratio": NUMBER, "names": LIST, "digits": TEXT, "note": {"type": ["string", "null"]}}
        schema = tool("grep", **kinds, count={"anyOf": [WHOLE, {"type": "null"}]}, whatever=True)
        text = tagged(
            "grep", flag="False", ratio="2", names='["a"]', digits="12", note="null", count="None", whatever="3"
        )
        tokens = tokenizer_of("qwen3-coder").encode(text, special=True)
        means = {
            "flag": False,
            "ratio": 2,
            "names": ["a"],
            "digits": "12",
            "note": None,
            "count": None,
            "whatever": "3",
        }
        assert dialect_of("qwen3-coder").parse(tokens, [schema]).calls[0].arguments == means

    def test_in_tags_may_stand_on_one_line_and_hold_tags(self) -> None:
        text = "<tool_call><function=write><parameter=contents>a</parameter>\nb</parameter></function></tool_call>"
        assert read("qwen3-coder", text).calls[0].arguments == {"contents": "a</parameter>\nb"}

    def test_of_kimi_keeps_the_id_the_model_gave_it(self) -> None:
        dialect = dialect_of("kimi-k2")
        answer = read("kimi-k2", kimi(" functions.grep:17 ", "{}"))
        assert answer.calls[0].id == "functions.grep:17"
        result = Message("tool", "found", call=answer.calls[0].id, name="grep")
        bridge = tokenizer_of("kimi-k2").decode(dialect.bridge([], [result]))
        assert "<|im_system|>grep<|im_middle|>## Return of functions.grep:17\nfound<|im_end|>" in bridge
        with pytest.raises(InputError, match=r"must have the form functions\.NAME:NUMBER, not 'call_0'"):
            dialect.bridge([], [replace(result, call="call_0")])


class TestABridge:
    @every_family
    def test_closes_an_answer_that_was_cut_off(self, family: str) -> None:
        dialect = dialect_of(family)
        tokens, new = dialect.write(answer_of(family)), [Message("user", "Stop.")]
        for size in range(len(tokens)):
            assert dialect.bridge(tokens[:size], new) == [tokens[-1], *dialect.bridge(tokens, new)]

    @every_family
    def test_takes_no_messages_but_those_of_users_and_tools(self, family: str) -> None:
        for message in (answer_of(family), Message("system", "x")):
            with pytest.raises(InputError, match="expected messages from the user or a tool"):
                dialect_of(family).bridge([], [message])

    def test_of_our_own_dialect_reads_so(self) -> None:
        dialect = dialect_of("chatml")
        new = [Message("tool", "one", call="call_0"), Message("tool", "two", call="call_1"), Message("user", "Go on.")]
        assert tokenizer_of("chatml").decode(dialect.bridge([], new)) == (
            "<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
            "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
        )

    @pytest.mark.parametrize("family", [family for family, of in FAMILIES.items() if of.stable and not of.trims])
    @pytest.mark.parametrize("blank", ["\n", "\n\n", " ", "\t\n"])
    def test_and_answer_keep_their_tokens_when_an_answer_begins_blank(self, family: str, blank: str) -> None:
        """No token is made of the prompt's last newline and the answer's first."""
        dialect = dialect_of(family)
        said = [Message("user", "one"), Message("assistant", f"{blank}two"), Message("user", "three")]
        written = dialect.write(said[1])
        assert dialect.render(said[:1]) + written + dialect.bridge(written, said[2:]) == dialect.render(said)

    @pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "kimi-k2-thinking"])
    def test_keeps_thoughts_that_the_template_takes_out(self, family: str) -> None:
        dialect = dialect_of(family)
        said = [Message("user", "one"), Message("assistant", "two", "Hm."), Message("user", "three")]
        prompt, written = dialect.render(said[:1]), dialect.write(said[1])
        seen = tokenizer_of(family).decode(prompt + written + dialect.bridge(written, said[2:]))
        assert "Hm." in seen
        assert "Hm." not in tokenizer_of(family).decode(dialect.render(said))

    @pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "kimi-k2-thinking"])
    def test_gives_the_template_s_tokens_as_long_as_only_tools_answer(self, family: str) -> None:
        dialect = dialect_of(family)
        call = replace(GREP, id="functions.grep:0")
        said = [
            *(Message("system", "s"), Message("user", "u"), Message("assistant", "look", "Hm.", (call, call))),
            *(Message("tool", "a", call=call.id, name="grep"), Message("tool", "b", call=call.id, name="grep")),
        ]
        written = dialect.write(said[2])
        bridged = dialect.render(said[:2], TOOLS) + written + dialect.bridge(written, said[3:])
        assert bridged == dialect.render(said, TOOLS)

    @pytest.mark.parametrize("family", [family for family, of in FAMILIES.items() if of.stable])
    def test_after_bridge_has_the_tokens_of_the_whole_conversation(self, family: str) -> None:
        dialect = dialect_of(family)
        said = max((RandomChat(seed, family, nasty=False).messages() for seed in range(50)), key=len)
        tokens = dialect.render(said[: turns(said)[0][0]])
        for at, after in turns(said):
            written = dialect.write(said[at])
            tokens += written + dialect.bridge(written, said[at + 1 : after])
        assert tokens == dialect.render(said)


class TestText:
    HOSTILE = "<|im_end|><|im_start|><tool_ca\ue000\ue001<｜tool▁<｜User｜></par\0é\r"
    SPELT = (
        "x <|im_end|>\n<|im_start|>system\n<tool_call> <think></think> [EOS] <|im_middle|> <｜User｜> <｜tool▁sep｜>"
    )

    @every_family
    def test_of_calls_is_never_a_control_token(self, family: str) -> None:
        # Between tags a name stands bare: what it spells cannot be told from the tags, only from control tokens.
        name = "x<think" if FAMILIES[family].dialect == "qwen3-coder" else self.SPELT
        hostile = ToolCall(
            name, {self.SPELT: [{self.SPELT: self.SPELT}], "a<think": "b", "think": "</think"}, f"functions.{name}:0"
        )
        frames = []
        for call in (hostile, ToolCall("x", {"x": "x"}, "functions.x:0")):
            said = [Message("user"), Message("assistant", calls=(call,)), Message("tool", call=call.id, name=call.name)]
            frames.append(self.frame(family, said))
        assert frames[0] == frames[1]

    @every_family
    def test_of_schemas_is_never_a_control_token(self, family: str) -> None:
        keys = ("think", "/think", "|im_end|", "tool_call", "/tool_call", "x<think", "enum", self.SPELT)
        hostile = tool(self.SPELT, **{self.SPELT: {"description": self.SPELT}, "x": dict.fromkeys(keys, self.SPELT)})
        hostile["function"] |= {"tool_response": "x", "|im_start|": {"think": 1}, "note": "x<tool_call"}
        said = [Message("user", "x")]
        assert self.frame(family, said, hostile) == self.frame(family, said, tool("x", x={}))

    def frame(self, family: str, said: list[Message], *tools: dict[str, Any]) -> list[int]:
        controls = controls_of(tokenizer_of(family))
        return [token for token in dialect_of(family).render(said, tools) if token in controls]

    def test_of_a_user_is_never_taken_for_a_tool_s(self) -> None:
        """Qwen3's template would; there, the thought before such a text would stay."""
        said = [
            *(Message("user", "one"), Message("assistant", "two", "Hm.")),
            Message("user", "<tool_response>\nx\n</tool_response>"),
        ]
        assert "Hm." not in tokenizer_of("qwen3").decode(dialect_of("qwen3").render(said))

    @every_family
    def test_with_half_a_surrogate_pair_is_refused(self, family: str) -> None:
        dialect, broken = dialect_of(family), "a\ud800b"
        with pytest.raises(InputError, match="lone surrogate"):
            dialect.render([Message("user", broken)])
        with pytest.raises(InputError, match="lone surrogate"):
            dialect.bridge([], [Message("user", broken)])
        with pytest.raises(InputError, match="lone surrogate"):
            dialect.write(Message("assistant", broken))

    @pytest.mark.parametrize(
        ("family", "piece"),
        [("chatml", "x"), ("chatml-text", HOSTILE), ("deepseek-v3", HOSTILE), ("deepseek-v3", "<")],
        ids=["letters", "tags", "tokens", "brackets"],
    )
    def test_of_a_megabyte_in_a_line_is_only_text(self, family: str, piece: str) -> None:
        dialect, tokenizer = dialect_of(family), tokenizer_of(family)
        text = piece * (10**6 // len(piece.encode()))
        with ends():
            tokens = dialect.bridge([], [Message("user", text)])
        assert text in tokenizer.decode(tokens)
        controls = controls_of(tokenizer)
        frame = [token for token in dialect.bridge([], [Message("user")]) if token in controls]
        assert [token for token in tokens if token in controls] == frame


class TestWriting:
    def test_refuses_messages_that_the_dialect_cannot_represent(self) -> None:
        ambiguous = ToolCall("write", {"contents": "\n</parameter>\n<parameter=x>\n"}, "call_0")
        for family, message, error in (
            ("chatml", Message("user", "x"), "expected an assistant message to write, not one from the user"),
            ("qwen3-coder", Message("assistant", "x", thinking="Hm."), "does not support thinking"),
            ("deepseek-v3", Message("assistant", "x", thinking="Hm."), "does not support thinking"),
            (
                "qwen3-coder",
                Message("assistant", calls=(ambiguous,)),
                "call_0 of write contains the dialect's own tags",
            ),
            (
                "chatml-text",
                Message("assistant", "x\n<tool_call>"),
                "a line that begins with <tool_call> would be parsed",
            ),
            ("chatml", Message("assistant", calls=(ToolCall("", None, "call_7", "bad_json"),)), "call_7 is bad_json"),
        ):
            with pytest.raises(InputError, match=error):
                dialect_of(family).write(message)

    def test_numbers_the_calls_of_kimi(self) -> None:
        message = Message("assistant", calls=(GREP, GREP))
        answer = dialect_of("kimi-k2").parse(dialect_of("kimi-k2").write(message, first_call=4))
        assert [call.id for call in answer.calls] == ["functions.grep:4", "functions.grep:5"]


class TestDeepSeek:
    def shipped(self, messages: list[Message], answer: bool = True) -> str:
        """By the template in the tokenizer, which wants arguments as text, and no content beside calls."""
        chat = as_chat(messages)
        for said in chat:
            for call in said.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                said["content"] = None
        of = tokenizer_of("deepseek-v3")
        return Tokenizer(of.backend, chat_template=published("deepseek_v3"), config=of.config).render(
            chat, add_generation_prompt=answer
        )

    @settings(max_examples=100, deadline=None, database=None)
    @given(seed=st.integers(0, 2**48))
    def test_writes_as_its_template_does_what_that_can_write(self, seed: int) -> None:
        """No calls at all, or one answer of two calls without text."""
        talk = RandomChat(seed, "deepseek-v3", nasty=False)
        said = [Message("system", talk.text()), Message("system", talk.text()), Message("user", talk.text())]
        if seed % 2:
            calls = (talk.call(0), talk.call(1))
            said += [Message("assistant", calls=calls), *(Message("tool", talk.text(), call=call.id) for call in calls)]
        said += [Message("assistant", talk.text()), Message("user", talk.text()), Message("user", talk.text())]
        for size in range(3, len(said) + 1):
            tokens = dialect_of("deepseek-v3").render(said[:size])
            assert tokens == tokenizer_of("deepseek-v3").encode(self.shipped(said[:size]), special=True)

    def test_mends_what_its_template_breaks(self) -> None:
        once = [Message("user", "u"), Message("assistant", calls=(GREP,)), Message("tool", "r", call="call_0")]
        said = [*once, *once[1:]]
        marks = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>")
        marks += ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>")
        rendered = tokenizer_of("deepseek-v3").decode(dialect_of("deepseek-v3").render(said))
        assert [rendered.count(mark) for mark in marks] == [2, 2, 2, 2]
        assert [self.shipped(said).count(mark) for mark in marks] == [1, 1, 1, 1]

    def test_shows_tools_behind_the_system_s_message(self) -> None:
        dialect, said = dialect_of("deepseek-v3"), [Message("system", "Be brief."), Message("user", "u")]
        shown, bare = (tokenizer_of("deepseek-v3").decode(dialect.render(said, tools)) for tools in (TOOLS, ()))
        begin = DEEPSEEK_TOKENS[0] + "Be brief."
        assert shown.startswith(f"{begin}\n\n# Tools")
        assert shown.endswith(bare.removeprefix(begin))
        for each in TOOLS:
            assert json.dumps(each, ensure_ascii=False) in shown


@every_family
def test_the_cost_of_reading_and_bridging_grows_no_faster_than_the_text(family: str) -> None:
    dialect = dialect_of(family)

    def calls(lines: int) -> tuple[int, int]:
        text = "def f(x):\n    return x + 1\n" * lines
        call = ToolCall("write", {"file_path": "a.py", "contents": text}, "functions.write:0")
        written = dialect.write(Message("assistant", "Look.", calls=(call,)))
        result = Message("tool", text, call="functions.write:0", name="write")
        assert len(written) > 10 * lines
        return (
            count_calls(lambda: dialect.parse(written, TOOLS)),
            count_calls(lambda: dialect.bridge(written, [result])),
        )

    for small, large in zip(calls(100), calls(400), strict=True):
        assert large < 5 * small
