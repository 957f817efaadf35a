"""Properties of every dialect, checked on a conversation with a small or a real tokenizer."""

from random import Random

from random_chats import TOOLS, FamilyCase, RandomChat, by_template, calls_before, controls_of, meant, tamed, turns

from etude.errors import InputError

# Those with tags that are text: a text that holds them cannot be told from them, and is refused.
UNWRITABLE = ("chatml-text", "qwen3-coder", "qwen3.5")


def check_tame(case: FamilyCase, seed: int) -> None:
    """Render, write and bridge give the template's tokens, and a written turn parses to the same message."""
    family, dialect, tokenizer, random = case.family, case.dialect, case.tokenizer, Random(seed)
    said = RandomChat(seed, family, nasty=False).messages()
    tools = random.choice(((), TOOLS)) if family != "deepseek-v3" else ()  # whose template shows none
    answer = random.random() < 0.7
    truth = by_template(case, said, tools, answer)
    assert dialect.render(said, tools, add_generation_prompt=answer) == tokenizer.encode(truth, special=True)
    at, after = random.choice(turns(said))
    prompt, written = dialect.render(said[:at]), dialect.write(said[at], first_call=calls_before(said[:at]))
    assert meant(dialect.parse(written, TOOLS).message()) == meant(said[at])
    if family != "kimi-k2-thinking" or said[at].calls:  # which takes the thought out of a last answer at once
        whole = dialect.render(said[: at + 1], add_generation_prompt=False)
        assert whole[: len(prompt) + len(written)] == prompt + written
    if case.of.stable:
        assert prompt + written + dialect.bridge(written, said[at + 1 : after]) == dialect.render(said[:after])


def check_nasty(case: FamilyCase, seed: int) -> None:
    """No text becomes a control token or is lost, and a written turn parses to the same text and calls."""
    family, dialect, tokenizer, random = case.family, case.dialect, case.tokenizer, Random(seed)
    said = RandomChat(seed, family, nasty=True).messages()
    rendered = dialect.render(said)
    assert tokenizer.decode(rendered) == by_template(case, said, (), True)
    controls = controls_of(tokenizer)
    frame = [token for token in dialect.render(tamed(said)) if token in controls]
    assert [token for token in rendered if token in controls] == frame
    at, after = random.choice(turns(said))
    try:
        written = dialect.write(said[at])
    except InputError:
        assert family in UNWRITABLE
        return
    answer = dialect.parse(written, TOOLS)
    assert meant(answer.message()) == meant(said[at])
    assert answer.closed
    assert answer.thinking_tokens + answer.call_tokens + answer.text_tokens == len(written)
    new = said[at + 1 : after]
    bridge = dialect.bridge(written, new)
    assert dialect.bridge(written[: random.randrange(len(written))], new) == [written[-1], *bridge]
    assert by_template(case, said[:after], (), True).endswith(tokenizer.decode(bridge))
    if case.of.stable and not case.of.trims:
        assert dialect.render(said[:at]) + written + bridge == dialect.render(said[:after])
