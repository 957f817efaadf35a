"""Count lines of code, without blank lines, comments and docstrings, per package and revision.

python benchmarks/code_lines.py                    # the working tree
python benchmarks/code_lines.py 4f7d2cf HEAD       # revisions of git, side by side
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("etude", "etude_nano", "studies")
NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revisions", nargs="*", help="revisions of git; none: the working tree")
    names = parser.parse_args().revisions or [""]
    counts = [count(name) for name in names]
    table = Table(title="lines of code")
    table.add_column("package")
    for name in names:
        table.add_column(name or "working tree", justify="right")
    for package in sorted(set().union(*counts)):
        table.add_row(package, *(f"{each[package]:,}" for each in counts))
    table.add_row("all", *(f"{each.total():,}" for each in counts))
    Console(width=100).print(table)


def count(revision: str) -> Counter[str]:
    """Count the lines of each package at a revision, or in the working tree."""
    listing = ["ls-tree", "-r", "--name-only", revision] if revision else ["ls-files", "-co", "--exclude-standard"]
    lines: Counter[str] = Counter()
    for path in map(Path, git(*listing, "--", *FOLDERS).splitlines()):
        if path.suffix == ".py" and (revision or (ROOT / path).exists()):
            text = git("show", f"{revision}:{path}") if revision else (ROOT / path).read_text()
            lines["/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]] += code_lines(text)
    return lines


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def code_lines(text: str) -> int:
    """Return the number of lines with a token that is neither a comment nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if ast.get_docstring(node):
                docstring = node.body[0]
                docstrings.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = (range(token.start[0], token.end[0] + 1) for token in tokens if token.type not in NO_CODE)
    return len({line for lines in code for line in lines} - docstrings)


if __name__ == "__main__":
    main()
