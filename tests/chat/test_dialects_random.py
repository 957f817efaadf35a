"""Random conversations in every dialect, tame and hostile, compared with the template."""

from random import Random

import pytest
from dialect_checks import check_nasty, check_tame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_chats import FAMILIES, TOOLS, controls_of, dialect_of, small, tokenizer_of

from etude.chat.messages import Message

SEEDS = st.integers(0, 2**48)
FEW = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
MANY = settings(FEW, max_examples=2500)
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
@FEW
@given(seed=SEEDS)
def test_a_tame_conversation_has_the_tokens_of_the_template(family: str, seed: int) -> None:
    check_tame(small(family), seed)


@every_family
@FEW
@given(seed=SEEDS)
def test_a_hostile_conversation_has_the_text_and_the_control_tokens_of_the_template(family: str, seed: int) -> None:
    check_nasty(small(family), seed)


@pytest.mark.slow
@every_family
@MANY
@given(seed=SEEDS)
def test_thousands_of_conversations(family: str, seed: int) -> None:
    check_tame(small(family), seed)
    check_nasty(small(family), seed)


@every_family
@FEW
@given(seed=SEEDS)
def test_any_tokens_can_be_parsed_and_continued(family: str, seed: int) -> None:
    random, dialect, tokenizer = Random(seed), dialect_of(family), tokenizer_of(family)
    controls = sorted(controls_of(tokenizer))
    ordinary = range(len(tokenizer) + 50)  # a model may have more rows than the tokenizer has tokens
    tokens = [random.choice(controls if random.random() < 0.4 else ordinary) for _ in range(random.randint(0, 60))]
    answer = dialect.parse(tokens, random.choice(((), TOOLS)), first_call=5)
    assert answer.thinking_tokens + answer.call_tokens + answer.text_tokens == len(tokens)
    assert min(answer.thinking_tokens, answer.call_tokens, answer.text_tokens) >= 0
    assert answer.closed == any(token in dialect.stops for token in tokens)
    ends = 0
    for number, call in enumerate(answer.calls):
        start, end = call.span
        assert ends <= start < end <= len(tokens)
        ends = end
        assert call.raw == tokenizer.decode([token for token in tokens[start:end] if token < len(tokenizer)])
        assert (call.status == "ok") == (call.problem == "")
        assert call.id == f"call_{5 + number}" or family.startswith("kimi")
    dialect.bridge(tokens, [Message("user", "go on")])


@every_family
@FEW
@given(text=st.text())
def test_any_text_is_written_and_read_back(family: str, text: str) -> None:
    dialect, tokenizer = dialect_of(family), tokenizer_of(family)
    written = dialect.write(Message("assistant", text))
    assert dialect.parse(written).text == text
    controls = controls_of(tokenizer)
    empty = dialect.bridge(written, [Message("user", "")])
    bridge = dialect.bridge(written, [Message("user", text)])
    assert [token for token in bridge if token in controls] == [token for token in empty if token in controls]
