"""An answer or a document states a value: one that denies it, bounds it or leaves it open is not paid."""

import json

import pytest

from etude.tasks.checks import lines_check
from etude.tasks.checks.inside.file_judges import FINAL, judge_answer, judge_lines, judge_texts
from etude_nano import nano_task
from etude_nano.demonstrator import workspace_files
from etude_nano.readonly_tasks import CORRECT_PATTERN, FAULTY_PATTERN
from etude_nano.source import families_of

EXPECTED: dict[str, dict[str, object]] = {
    "value": {"number": 250, "given": [3, 4, 12]},
    "line": {"number": 9, "given": [3], "faulty": True},
    "review": {"one_of": ["grow_wages", "cut"], "is": "grow_wages", "faulty": True},
    "where": {"one_of": ["page.py", "check.py"], "is": "page.py"},
    "all-well": {"says": CORRECT_PATTERN, "not": FAULTY_PATTERN},
    "accepted": {"accepted": ["8"]},
}
HONEST = {  # one answer in each line
    "value": """
        250
        It gives 250.
        **250**
        `f([3, 4])` returns 250
        f([3,4]) -> 250
        It's 250!
        I think it is 250.
        3 * 4 = 12 comes first, so 250
        I did not change anything. The result is 250.
        It prints 250 because 3 is not even.
        - 250""",
    "line": """
        Line 9.
        It is line 9.
        Line 9 is not right.
        Line 9: it should not subtract.
        The line that does not work is 9""",
    "review": """
        grow_wages
        `grow_wages()` is wrong.
        grow_wages does not do what its docstring says.
        grow_wages is not right.
        The one that is not right is grow_wages.
        The bug is in grow_wages. It is not correct.
        grow_wages returns the wrong list or fails
        grow_wages is wrong. That is not what the docstring says.""",
    "where": """
        In page.py.
        page.py defines it.
        It's in ./page.py
        page.py:4
        It is defined in page.py and imported elsewhere.""",
    "all-well": """
        f is correct. Nothing to change.
        No bug: f is right as it is.
        check.py passes; nothing to fix.
        I checked whether it is right: it is correct.
        `f('not') == 3` holds. No change needed.
        f does not need a change; it is correct.""",
    "accepted": """
        8
        The answer is 8.""",
}
OTHERS = {
    "value": """
        Not 250.
        It isn't 250
        It doesn't give 250
        hardly 250
        nowhere near 250
        anything but 250
        It gives 250. This is not so.
        250 is wrong
        250 or more
        at least 250
        250, or so
        250+
        about 250
        >= 250
        ~250
        between 3 and 250
        either 3 or 250
        maybe 250
        Is it 250?
        250.75
        250.0
        .250
        -250
        250,5
        3,250
        250e3
        250%
        250/3
        3-250
        250-ish""",
    "line": """
        Not line 9.
        Line 9 is right.
        around line 9
        after line 9
        9.5""",
    "review": """
        Not grow_wages.
        Anything but grow_wages
        grow_wages is right.
        grow_wages is not wrong
        grow_wages has no bug
        the bug isn't in grow_wages
        grow_wages or another
        grow_wages might be wrong
        grow_wages?
        grow_wages. That is not so.""",
    "where": """
        Anywhere but in page.py.
        Not in the file page.py
        Everywhere except page.py
        page.py does not define it
        outside page.py
        page.py. No, wait.""",
    "all-well": """
        I have not looked whether there is no bug.
        It is never right
        hardly correct
        nothing works
        It is correct. That is not so.""",
    "accepted": """
        Not 8.
        8.25
        8 or more""",
}


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("family", EXPECTED)
def test_an_answer_states_its_value(family: str) -> None:
    def score(text: str) -> float:
        return judge_answer(EXPECTED[family], {FINAL: text.encode()})[0]

    assert [text for text in lines(HONEST[family]) if not score(text)] == []
    assert [text for text in lines(OTHERS[family]) if score(text)] == []


def test_a_line_that_denies_the_next_one_is_part_of_the_answer() -> None:
    for text, score in (("I looked it up.\n8", 1.0), ("The default:\n\n8", 1.0), ("It is not\n8", 0.0)):
        assert judge_answer(EXPECTED["accepted"], {FINAL: text.encode()})[0] == score, text


def test_all_demonstrated_answers_are_right() -> None:
    for split in ("train", "new", "unseen"):
        families = families_of(split)  # type: ignore[arg-type]
        for family in families.keys() & {"review", "line", "value", "where", "all-well"}:
            for seed in range(12):
                files = nano_task(seed, split, families[family].difficulties[-1], family)  # type: ignore[arg-type]
                expected = json.loads(files["tests/expected.json"])[0]
                answer = files["solution/final.txt"]
                assert judge_answer(expected, {FINAL: answer.encode()})[0] == 1.0, (family, seed, answer)


def test_long_answers_are_judged_in_bounded_time() -> None:
    for part in ("-", "1", "a", " is ", "not the ", "`", "**a", "1,", "(", "no. ", "250 ", "right ", "between "):
        for expected in EXPECTED.values():
            score, _ = judge_answer(expected, {FINAL: (part * 60000).encode()})  # quadratic time would take hours
            assert score == 0.0, part


def test_a_document_that_takes_back_what_it_says_is_not_corrected() -> None:
    before = "# net\n\nboard.py has take_receipt. Example:\n\n    take_receipt('bee') == 4\n"
    after = before.replace("take_receipt", "take_receipt_too")
    expected = lines_check("README.md", before, after, prose=True).expected
    for text, score in (
        (after, 1.0),
        (after + "\nIt is short.\n", 1.0),
        (after + "\nThis is no longer so.\n", 0.0),
        (after + "\nThe example gives 5.\n", 0.0),
    ):
        assert judge_lines(expected, {"README.md": text.encode()})[0] == score, text


def test_a_docstring_has_the_whole_number_and_does_not_deny_it() -> None:
    files = nano_task(0, "train", 1, "docstring")
    _, texts, kept = json.loads(files["tests/expected.json"])
    right = files["solution/repo/billing.py"]
    assert "less 7." in right
    assert "less 12." in workspace_files(files)["billing.py"]
    for text, score in ((right, 1.0), (right.replace("less 7.", "less 7.25."), 0.0)):
        assert judge_texts(texts, {"billing.py": text.encode()})[0] == score, text
    for text, score in ((right, 1.0), (right.replace(" less 7.", ", but not less 7, rather more."), 0.0)):
        assert judge_lines(kept, {"billing.py": text.encode()})[0] == score, text
