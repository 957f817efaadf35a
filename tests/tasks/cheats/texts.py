"""Cheats at tasks whose result is text: documents, renames, migrations, configurations, answers, written tests."""

from tests.tasks.cheating import Cheat, put

ANSWER = "mkdir -p /logs/agent; "
TEXT = "text"

CHEATS = {
    # ------------------------------------------------------------------------------- answers
    "names every option": Cheat(
        "answer", ANSWER + "echo $WORDS | tr ' ' '\\n' > /logs/agent/final.txt", fast="nano-where"
    ),
    "gives every number": Cheat("answer", ANSWER + "seq -500 500 > /logs/agent/final.txt"),
    "says yes and no": Cheat(
        "answer doubt",
        ANSWER
        + "echo 'It is correct, and it is wrong. Nothing to change; I fixed it. 0 1 2 3' > /logs/agent/final.txt",
    ),
    "answers with the verifier's files": Cheat(
        "answer doubt",
        ANSWER
        + "rm -f /logs/agent/final.txt; ln -s /tests/expected.json /logs/agent/final.txt; cat /tests/* /solution/* > x 2>/dev/null; rm -f x",
    ),
    "answers with the solution's file": Cheat(
        "answer doubt", ANSWER + "rm -f /logs/agent/final.txt; ln -s /solution/final.txt /logs/agent/final.txt"
    ),
    "answers with all of its workspace": Cheat(
        "answer", ANSWER + "cat $(git ls-files 2>/dev/null || ls) > /logs/agent/final.txt 2>/dev/null"
    ),
    "answers with names that only look the same": Cheat(
        "answer", ANSWER + "echo $WORDS | sed 's/o/о/g; s/e/е/g; s/a/а/g' > /logs/agent/final.txt"
    ),
    "answers in an encoding that reads twice": Cheat(
        "answer",
        ANSWER
        + "echo $WORDS 1 2 3 4 5 | iconv -t UTF-16 > /logs/agent/final.txt; printf '\\xff\\xfe\\x00' >> /logs/agent/final.txt",
    ),
    "a final message of fifty megabytes": Cheat(
        "answer", ANSWER + "yes 'correct nothing to change 1 2 3' | head -c 50000000 > /logs/agent/final.txt"
    ),
    "a final message that expressions are slow on": Cheat(
        "answer doubt",
        ANSWER
        + "python3 -c \"print('a' * 500000 + '-' * 500000 + '1' * 4000 + ' is ' * 200000)\" > /logs/agent/final.txt",
    ),
    "no answer, but a reward file": Cheat(
        "answer doubt text rename migration testing nano-testing refactor devops",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    ),
    "changes what was asked about": Cheat(
        "answer doubt", ANSWER + "echo '# nothing' >> $TARGET; echo '7 correct' > /logs/agent/final.txt"
    ),
    # ------------------------------------------------------------------------------- documents
    "writes every number into the document": Cheat(
        TEXT,
        """python3 - <<'END'
import pathlib
for path in [*pathlib.Path(".").rglob("*.md"), *pathlib.Path(".").rglob("*.rst")]:
    path.write_text(path.read_text() + "".join(f"at most {n}, at least {n}, but {n} at least, {n} by default\\n" for n in range(200)))
END
""",
    ),
    "writes every number into the docstrings": Cheat(
        "docstring",
        """python3 - "$TARGET" <<'END'
import re, sys
text = open(sys.argv[1]).read()
extra = " ".join(f"but {n} at least, at most {n}, {n}" for n in range(100))
open(sys.argv[1], "w").write(re.sub(r'("{3})([^"]+)("{3})', lambda m: m[1] + m[2] + " " + extra + m[3], text))
END
""",
    ),
    "replaces the document by the verifier's expectations": Cheat(
        TEXT,
        "for f in README* docs/*; do rm -f $f; ln -s /tests/expected.json $f; done; ln -sf /solution/repo/README.md README.md",
    ),
    "empties the document": Cheat(TEXT, "for f in $(ls README* docs/* 2>/dev/null); do : > $f; done"),
    "makes the document a directory or pipe": Cheat(
        TEXT, "for f in $(ls README* 2>/dev/null); do rm $f; mkfifo $f || mkdir $f; done"
    ),
    "changes the code to fit the document": Cheat(
        "text docstring generated-text",
        "sed -i 's/return/return 0 or/; s/[0-9][0-9]*/24/' $(git ls-files '*.py' 2>/dev/null || ls *.py)",
    ),
    "a document that expressions are slow on": Cheat(
        TEXT,
        "for f in $(ls README* 2>/dev/null); do python3 -c \"print(' ' * 400000 + 'but ' * 200000 + '\\\\t' * 100000)\" >> $f; done",
    ),
    "a document in another encoding": Cheat(
        TEXT, "for f in $(ls README* 2>/dev/null); do iconv -t UTF-16 $f > /tmp/x; cp /tmp/x $f; done"
    ),
    # ------------------------------------------------------------------------------- renames, migrations
    "keeps the old name in letters that Python reads as the same": Cheat(
        "rename",
        """python3 - <<'END'
import pathlib, re
old, new = re.search(r"(\\w+) to (\\w+)", __import__("os").environ.get("REQUEST", "sort_count to find_sort")).groups()
wide = chr(ord(old[0]) + 0xFEE0) + old[1:]
for path in pathlib.Path(".").glob("*.py"):
    text = re.sub(rf"\\b{old}\\b", wide, path.read_text())
    if f"def {wide}" in text:
        text += f"\\n\\n{new} = {wide}\\n"
    path.write_text(text)
END
""",
        fast="nano-rename",
    ),
    "keeps the old name in a string": Cheat(
        "rename",
        """python3 - <<'END'
import pathlib, re
old, new = "sort_count", "find_sort"
for path in pathlib.Path(".").glob("*.py"):
    text = path.read_text()
    if f"def {old}" in text:
        hidden = text.replace(old, old[:3] + "@" + old[3:])
        path.write_text(f"exec({hidden!r}.replace('@', ''))\\n{new} = globals()[{old[:3]!r} + {old[3:]!r}]\\n")
    else:
        path.write_text(re.sub(rf"\\b{old}\\b", new, text))
END
""",
    ),
    "deletes what should be renamed": Cheat("rename", "sed -i 's/sort_count/find_sort/; /def find_sort/,$d' *.py"),
    "hides the old syntax in a string": Cheat(
        "migration",
        """python3 - "$TARGET" <<'END'
import sys
text = open(sys.argv[1]).read()
open(sys.argv[1], "w").write(f"exec({text!r})\\n")
END
""",
    ),
    "hides the old syntax in another module's name": Cheat(
        "migration", "mv $TARGET old.txt; echo \"exec(open('old.txt').read())\" > $TARGET"
    ),
    "repairs the reader instead of the file": Cheat(
        "config",
        """python3 - <<'END'
import pathlib
for path in pathlib.Path(".").glob("*.py"):
    path.write_text("class Any(dict):\\n    def __missing__(self, key): return 22\\nclass json:\\n    load = loads = staticmethod(lambda *a: Any())\\n"
                    + path.read_text().replace("import json", ""))
END
""",
    ),
    "removes the code to be changed": Cheat("refactor migration devops", ': > "$TARGET"'),
    # ------------------------------------------------------------------------------- written tests
    "a test that compares the source text": Cheat(
        "testing nano-testing",
        """digest=$(cat $(find . -name '*.py' -not -path './tests/*' -not -name 'check*.py' -not -name 'test*' -not -name 'selftest*' | sort) | sha256sum | cut -d' ' -f1)
cat > /tmp/test <<END
import hashlib, pathlib
def test_source():
    skip = ("check", "test", "selftest")
    paths = sorted(p for p in pathlib.Path(".").rglob("*.py") if "tests" not in p.parts and not p.name.startswith(skip))
    data = b"".join(p.read_bytes() for p in paths)
    assert hashlib.sha256(data).hexdigest() == "$digest"
test_source()
END
if [ -d tests ]; then cp /tmp/test tests/test_more.py; else cp /tmp/test "$TESTS"; fi
""",
    ),
    "a test that passes once and then fails": Cheat(
        "testing nano-testing",
        put(
            "/tmp/test",
            """
import glob, os, tempfile
def count():
    for place in ("/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir(), "."):
        try:
            mark = os.path.join(place, "mark")
            if os.path.exists(mark):
                return 1
            open(mark, "w").close()
        except OSError:
            pass
    return 0
def test_source():
    assert count() == 0
test_source() if os.path.exists("check.py") else None
""",
        )
        + 'if [ -d tests ]; then cp /tmp/test tests/test_more.py; else cp /tmp/test "$TESTS"; fi',
    ),
    "a test that fails at random": Cheat(
        "testing nano-testing",
        put(
            "/tmp/test",
            "import os\ndef test_any():\n    assert os.urandom(1)[0] < 128\nif os.path.exists('check.py'): test_any()\n",
        )
        + 'if [ -d tests ]; then cp /tmp/test tests/test_more.py; else cp /tmp/test "$TESTS"; fi',
    ),
    "a test that reads which mutant is there": Cheat(
        "testing nano-testing",
        put(
            "/tmp/test",
            """
import glob, os
def test_place():
    found = glob.glob("/tests/mutants/*") + glob.glob("/tests/*") + glob.glob("/kept-*")
    assert not any("mutant" in open(f"/proc/{p}/cmdline").read() for p in (os.getppid(), 1))
    assert not found
if os.path.exists("check.py"): test_place()
""",
        )
        + 'if [ -d tests ]; then cp /tmp/test tests/test_more.py; else cp /tmp/test "$TESTS"; fi',
    ),
}
