"""A small repository with a real history: changes of every kind, made with git by a script."""

import os
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path

Files = Mapping[str, str | None]
PRICES = """
    \"\"\"Prices.\"\"\"


    def total(items):
        \"\"\"Return the sum of the prices.\"\"\"
        result = 0
        for item in items:
            result += item
        return result


    def average(items):
        \"\"\"Return the mean of the prices.\"\"\"
        return total(items) / len(items)
"""
TEST = """
    from shop.prices import average, total


    def test_total():
        assert total([1, 2]) == 3


    def test_average():
        assert average([2, 4]) == 3
"""
FIXED = PRICES.replace("return total(items)", "if not items:\n            return 0\n        return total(items)")
FIXED_TEST = TEST + "\n\n    def test_average_of_nothing():\n        assert average([]) == 0\n"
DISCOUNT = """
    \"\"\"Discounts.\"\"\"

    from shop.prices import total


    def discounted(items, percent=10):
        \"\"\"Return the total with a discount.\"\"\"
        if not 0 <= percent <= 100:
            raise ValueError("percent must be between 0 and 100")
        return total(items) * (100 - percent) / 100
"""
DISCOUNT_TEST = """
    import pytest

    from shop.discounts import discounted
    from shop.prices import rounded


    def test_discount():
        assert discounted([50, 50]) == 90
        assert rounded(discounted([1, 2], percent=50)) == 2


    def test_out_of_range():
        with pytest.raises(ValueError, match="percent must be between 0 and 100"):
            discounted([1], percent=101)
"""
ROUNDED = FIXED + "\n\n    def rounded(value):\n        return int(value + 0.5)\n"
PROJECT = """
    [build-system]
    requires = ["setuptools"]
    build-backend = "setuptools.build_meta"

    [project]
    name = "shop"
    version = "1.0"
    dependencies = []

    [tool.pytest.ini_options]
    testpaths = ["tests"]
"""
# Parsing at import keeps one frame of the product in the traceback of the test.
PARSER = """
    \"\"\"Parse amounts.\"\"\"


    def amount(text):
        \"\"\"Return the number in a text.\"\"\"
        return float(text)
"""
PARSER_FIXED = PARSER.replace("float(text)", 'float(text.replace(",", ".") or "0")')
PARSER_TEST = "from shop.parser import amount\n\n\ndef test_amount():\n    assert amount('1.5') == 1.5\n"
PARSER_FIXED_TEST = PARSER_TEST + "\n\ndef test_comma():\n    assert amount('1,5') == 1.5\n    assert amount('') == 0\n"


def text(code: str) -> str:
    return textwrap.dedent(code).strip() + "\n"


class GitHistory:
    """Makes commits in a working tree; every commit is an hour after the one before."""

    def __init__(self, top: Path) -> None:
        self.top, self.hour = top, 0
        top.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str, author: str = "Ada") -> str:
        date = f"2025-01-{1 + self.hour // 24:02d}T{self.hour % 24:02d}:00:00+00:00"
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
            "GIT_AUTHOR_NAME": author,
            "GIT_AUTHOR_EMAIL": "a@example.org",
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_NAME": author,
            "GIT_COMMITTER_EMAIL": "a@example.org",
            "GIT_COMMITTER_DATE": date,
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        done = subprocess.run(["git", *arguments], cwd=self.top, env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, message: str, files: Files, author: str = "Ada") -> str:
        """Write files (None: remove), commit, and return the id."""
        self.hour += 1
        for path, code in files.items():
            place = self.top / path
            if code is None:
                place.unlink()
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text(code))
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message, author=author)
        return self.git("rev-parse", "HEAD")


def shop_history(top: Path) -> dict[str, str]:
    """Make a history of ten changes; return the ids of its commits by kind."""
    history, made = GitHistory(top), {}
    made["first"] = history.commit(
        "Start",
        {
            "pyproject.toml": PROJECT,
            "README.md": "# shop\n",
            "shop/__init__.py": '"""A shop."""',
            "shop/prices.py": PRICES,
            "shop/parser.py": PARSER,
            "tests/test_prices.py": TEST,
            "tests/test_parser.py": PARSER_TEST,
        },
    )
    made["fix"] = history.commit(
        "Fix #12: average() of an empty list divides by zero (#13)\n\nSigned-off-by: Ada <a@example.org>",
        {"shop/prices.py": FIXED, "tests/test_prices.py": FIXED_TEST},
    )
    made["formatting"] = history.commit(
        "Format",
        {"shop/prices.py": "# comment\n" + text(FIXED), "tests/test_prices.py": "# tests\n" + text(FIXED_TEST)},
    )
    made["bot"] = history.commit("Bump pytest from 8 to 9", {"README.md": "# the shop\n"}, author="dependabot[bot]")
    made["feature"] = history.commit(
        "Add discounts to the shop",
        {
            "shop/discounts.py": DISCOUNT,
            "shop/prices.py": "# comment\n" + text(ROUNDED),
            "tests/test_discounts.py": DISCOUNT_TEST,
        },
    )
    made["untested"] = history.commit("Say more in average()", {"shop/__init__.py": '"""A shop."""\nNAME = "shop"\n'})
    made["release"] = history.commit("Release v1.1", {"pyproject.toml": PROJECT.replace('"1.0"', '"1.1"')})
    history.git("checkout", "-q", "-b", "side")
    made["merged"] = history.commit(
        "amount() accepts a decimal comma", {"shop/parser.py": PARSER_FIXED, "tests/test_parser.py": PARSER_FIXED_TEST}
    )
    history.git("checkout", "-q", "main")
    made["docs"] = history.commit("Describe the shop", {"README.md": "# the shop\n\nIt has prices.\n"})
    history.hour += 1
    history.git("merge", "-q", "--no-ff", "-m", "Merge branch 'side'", "side")
    made["merge"] = history.git("rev-parse", "HEAD")
    return made
