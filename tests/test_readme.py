"""README's Python samples run as they stand, in a directory that has the base model where a checkout has it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_a_sample_runs(number: int, tmp_path: Path) -> None:
    assert len(SAMPLES) == 2
    (tmp_path / "base").symlink_to(ROOT / "base")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SAMPLES[number]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("torch.Size([1, 3," if number == 0 else "4") in done.stdout


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    # A path in backticks is meant from the root of the checkout or from the package.
    paths = re.findall(r"`((?:[a-z_]+/)+[A-Za-z_]+\.(?:py|toml|js))`", text)
    missing += [path for path in paths if not any((ROOT / folder / path).exists() for folder in ("", "etude", "docs"))]
    assert not missing
