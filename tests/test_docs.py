"""The pages in docs/ keep up with the scripts: line anchors, the diff of TruDi's page, metrics, commands. Tables of
results, there and in the README, are what plot.py prints of the committed runs.

After a change of a script or new runs: `python tests/test_docs.py` writes anchors, diff and tables anew.
"""

import ast
import contextlib
import dataclasses
import difflib
import importlib
import io
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {page: page.with_name("..") / f"{page.stem}_continuous.py" for page in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {page: script.resolve() for page, script in PAGES.items() if script.exists()}
ANCHOR = re.compile(r"\[`([^`]+)`\]\(\.\./(\w+\.py)#L(\d+)\)")
TABLE = re.compile(r"<!-- python plot.py (.*?) -->\n.*?<!-- end -->", re.S)
DIFF = re.compile(r"<!-- diff: (\S+) (\S+) -->\n(.*?)<!-- end diff -->", re.S)


def own_functions(path, other):
    """name -> source of the classes and functions that `other` does not share, in the order of the file"""
    text = path.read_text()
    for name in re.findall(r"^# --- shared: (.*) ---$", other.read_text(), re.M):
        text = re.sub(rf"^# --- shared: {name} ---\n.*?^# --- end shared ---\n", "", text, flags=re.M | re.S)
    kinds = ast.FunctionDef | ast.ClassDef
    parts = {n.name: ast.get_source_segment(text, n) for n in ast.parse(text).body if isinstance(n, kinds)}
    return {k: v for k, v in parts.items() if k not in ("Args", "Agent")}


def diff(one, other):
    """unified, with the names that play the same part side by side"""
    same = {"GaussianPolicy": "DiffusionPolicy", "sample_action": "sample_chain", "gaussian_kl": "trajectory_kl"}
    one, other = ROOT / one, ROOT / other
    ours, theirs = own_functions(other, one), {same.get(k, k): v for k, v in own_functions(one, other).items()}
    lines = []
    for name in ours:
        lines += list(
            difflib.unified_diff(theirs.get(name, "").splitlines(), ours[name].splitlines(), n=1, lineterm="")
        )[2:]
    return "```diff\n" + "\n".join(x for x in lines if not x.startswith("@@")) + "\n```\n"


def line_of(script, text):
    found = [i for i, line in enumerate((ROOT / script).read_text().splitlines(), 1) if text in line]
    assert found, f"{script} has no line with {text}"
    return found[0]


def plotted(arguments):
    """what `python plot.py` prints, called where the README says"""
    words = [sorted(map(str, ROOT.glob(w))) if "/" in w else [w] for w in arguments.split()]
    assert all(words), f"no such results: {arguments}"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        importlib.import_module("plot").main(sum(words, []))
    return out.getvalue()


def renewed(text):
    text = TABLE.sub(lambda m: f"<!-- python plot.py {m[1]} -->\n{plotted(m[1])}<!-- end -->", text)
    text = ANCHOR.sub(lambda m: f"[`{m[1]}`](../{m[2]}#L{line_of(m[2], m[1].replace(chr(92) + '|', '|'))})", text)
    return DIFF.sub(lambda m: f"<!-- diff: {m[1]} {m[2]} -->\n{diff(m[1], m[2])}<!-- end diff -->", text)


def test_there_is_a_page_for_every_script():
    assert {p.name for p in PAGES.values()} == {p.name for p in ROOT.glob("*_continuous.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_anchors_and_diff(page):
    text = page.read_text()
    assert len(ANCHOR.findall(text)) >= 8
    assert renewed(text) == text, "run `python tests/test_docs.py`"


def test_tables_of_the_readme():
    text = (ROOT / "README.md").read_text()
    assert TABLE.findall(text)
    assert renewed(text) == text, "run `python tests/test_docs.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_use_flags_that_exist(page):
    script = importlib.import_module(PAGES[page].stem)
    flags = {f.name.replace("_", "-") for f in dataclasses.fields(script.Args)} | {"help"}
    text = re.sub("<!--.*?-->", "", page.read_text())
    assert not set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", text)) - flags


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for page in [*PAGES, ROOT / "README.md"]:
        page.write_text(renewed(page.read_text()))
