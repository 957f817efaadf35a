"""Translates ripgrep's regular expressions to Python's `re`."""

from __future__ import annotations

import re

from etude.globs import posix_classes
from etude.harness.toolserver.inside.paths import Refusal

MAX_PATTERN = 10_000  # characters

# Contents of brackets. Python has no Unicode properties; these are the ones code searches use.
_PROPERTIES = {
    **dict.fromkeys(("L", "Letter", "Alphabetic"), "^\\W\\d_"),
    **dict.fromkeys(("Lu", "Uppercase"), "A-ZÀ-ÖØ-ÞΑ-ΡΣ-ΫА-Я"),
    **dict.fromkeys(("Ll", "Lowercase"), "a-zß-öø-ÿα-ωа-я"),
    **dict.fromkeys(("N", "Nd", "Number"), "\\d"),
    **dict.fromkeys(("P", "Punctuation"), "!-#%-*,-/:;?@\\[-\\]_{}¡§«¶·»¿‐-‧‰-⁞"),
    "Greek": "Ͱ-Ͽἀ-῿",
    "Cyrillic": "Ѐ-ԯ",
    "Han": "⺀-⿕々〇㐀-䶿一-鿿",
    "Hiragana": "ぁ-ゟ",
    "Katakana": "゠-ヿ",
}


def compile_pattern(pattern: str, *, ignore_case: bool, multiline: bool) -> re.Pattern[str]:
    """Compile a pattern; refuse an invalid one with its error and position."""
    if len(pattern) > MAX_PATTERN:
        raise Refusal("bad_arguments", f"the pattern has {len(pattern):,} characters; expected at most {MAX_PATTERN:,}")
    flags = re.MULTILINE | (re.IGNORECASE if ignore_case else 0) | (re.DOTALL if multiline else 0)
    try:
        return re.compile(translate(pattern), flags)
    except re.error as error:
        where = f" at character {error.pos + 1}" if error.pos is not None else ""
        text = f"the pattern is not a valid regular expression: {error.msg}{where}"
        raise Refusal("bad_arguments", f"{text}. A backslash before a character takes it as it is") from None
    except (OverflowError, RecursionError):
        raise Refusal("bad_arguments", "the pattern is too large or too deeply nested") from None


def translate(pattern: str) -> str:
    """Convert a ripgrep pattern to an equivalent Python pattern."""
    out: list[str] = []
    at, in_class = 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            text, at = _escape(pattern, at, in_class)
            out.append(text)
            continue
        if in_class:
            if pattern.startswith("[:", at) and (end := pattern.find(":]", at)) > 0:
                out.append(posix_classes(pattern[at : end + 2]))
                at = end + 2
                continue
            in_class = char != "]"
            out.append("\\[" if char == "[" else char)
        elif char == "[":
            in_class = True
            begin = re.compile(r"\[\^?\]?").match(pattern, at)
            assert begin is not None
            out.append(begin.group().replace("]", "\\]"))
            at = begin.end()
            continue
        else:
            out.append(char)
        at += 1
    return "".join(out)


def _escape(pattern: str, at: int, in_class: bool) -> tuple[str, int]:
    """Translate an escape; return the result and its end."""
    if found := re.compile(r"\\[xuU]\{([0-9A-Fa-f]{1,6})\}").match(pattern, at):
        code = int(found.group(1), 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise Refusal("bad_arguments", f"the pattern has {found.group()}, which is no character")
        return re.escape(chr(code)), found.end()
    if found := re.compile(r"\\([pP])(?:\{(\^?)(\w+)\}|(\w))").match(pattern, at):
        letter, caret, long, short = found.groups()
        inside = _PROPERTIES.get(long or short)
        negated = (letter == "P") != bool(caret)
        if inside is None or (in_class and (negated or inside.startswith("^"))):
            known = ", ".join(sorted(_PROPERTIES))
            raise Refusal("bad_arguments", f"the pattern has {found.group()}; known Unicode classes are {known}")
        if in_class:
            return inside, found.end()
        turned = inside[1:] if negated and inside.startswith("^") else f"^{inside}" if negated else inside
        return f"[{turned}]", found.end()
    following = pattern[at + 1 : at + 2]
    if not in_class and following in ("z", "<", ">"):
        return {"z": "\\Z", "<": "\\b(?=\\w)", ">": "\\b(?<=\\w)"}[following], at + 2
    return pattern[at : at + 2], at + 2
