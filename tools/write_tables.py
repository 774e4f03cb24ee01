"""Writes what README.md and the pages in docs/ take from results/ and from the scripts, the figures
of these pages, and docs/results.html.

    python tools/write_tables.py

Between `<!-- python tools/plot.py ARGUMENTS -->` and `<!-- end -->` stands what this command
prints. Between `<!-- diff: ONE.py OTHER.py -->` and `<!-- end diff -->` stand the functions of two
scripts that play the same part, as a diff. Between `<!-- results: NAME -->` and
`<!-- end results -->` stands a section of tools/results_page.py, and between
`<!-- modes: FOLDER -->` and `<!-- end modes -->` the table of tools/plot_modes.py.
tests/test_docs.py and tests/test_results_page.py check that the pages are up to date.
"""

import ast
import contextlib
import difflib
import io
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"<!-- python tools/plot\.py (.*?) -->\n.*?<!-- end -->", re.S)
RESULTS = re.compile(r"<!-- results: (\S+) -->\n.*?<!-- end results -->", re.S)
MODES = re.compile(r"<!-- modes: (\S+) -->\n.*?<!-- end modes -->", re.S)
DIFF = re.compile(r"<!-- diff: (\S+) (\S+) -->\n.*?<!-- end diff -->", re.S)
# (script, other script): its functions and those of the other one that play the same part
COUNTERPARTS = {
    ("reppo_continuous.py", "trudi_continuous.py"): {
        "GaussianPolicy": "DiffusionPolicy",
        "sample_action": "sample_chain",
        "gaussian_kl": "trajectory_kl",
        "actor_loss": "actor_loss",
        "dual_loss": "dual_loss",
    },
    ("ppo_continuous.py", "dppo_continuous.py"): {
        "log_prob": "step_log_prob",
        "policy_loss": "policy_loss",
        "policy_step": "policy_step",
        "update": "update",
    },
    ("ppo_continuous.py", "fpo_continuous.py"): {
        "log_prob": "flow_loss",
        "policy_loss": "policy_loss",
        "policy_step": "policy_step",
    },
}


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def plot_table(arguments):
    """What tools/plot.py prints for these arguments."""
    from tools import plot

    words = []
    for word in arguments.split():
        if "/" in word:
            paths = sorted(str(path) for path in ROOT.glob(word))
            if not paths:
                raise FileNotFoundError(f"no such results: {word}")
            words += paths
        else:
            words.append(word)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        plot.main(words)
    return output.getvalue()


def definitions(path):
    """name -> source of the functions and classes of a script"""
    text = path.read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def function_diff(before, after):
    """All lines of two functions: "-" only in the first, "+" only in the second"""
    before = before.splitlines()
    after = after.splitlines()
    every_line = len(before) + len(after)
    lines = difflib.unified_diff(before, after, n=every_line, lineterm="")
    return list(lines)[3:]  # without the two file names and the position


def script_diff(one, other):
    """A section for each pair of counterparts."""
    before = definitions(ROOT / one)
    after = definitions(ROOT / other)
    sections = []
    for name, counterpart in COUNTERPARTS[one, other].items():
        title = f"`{name}`" if name == counterpart else f"`{name}` becomes `{counterpart}`"
        lines = function_diff(before[name], after[counterpart])
        sections.append("\n".join([f"{title}:", "", "```diff", *lines, "```"]))
    return "\n\n".join(sections) + "\n"


def renewed(text):
    """The text of a page with up-to-date tables, sections and diffs."""
    from tools import plot_modes, results_page

    def table(match):
        return f"<!-- python tools/plot.py {match[1]} -->\n{plot_table(match[1])}<!-- end -->"

    def diff(match):
        body = script_diff(match[1], match[2])
        return f"<!-- diff: {match[1]} {match[2]} -->\n{body}<!-- end diff -->"

    def section(match):
        body = results_page.markdown(match[1])
        return f"<!-- results: {match[1]} -->\n{body}<!-- end results -->"

    def modes(match):
        body = plot_modes.mode_table(ROOT / match[1])
        return f"<!-- modes: {match[1]} -->\n{body}<!-- end modes -->"

    text = MODES.sub(modes, text)
    return DIFF.sub(diff, RESULTS.sub(section, TABLE.sub(table, text)))


def main():
    from tools import results_page

    for page in pages():
        before = page.read_text()
        after = renewed(before)
        if after != before:
            page.write_text(after)
            print(f"updated {page.relative_to(ROOT)}")
    for figure in results_page.write_figures():
        print(f"updated {figure}")
    if results_page.write_page():
        print("updated docs/results.html")
        take_screenshot()


def take_screenshot():
    """docs/figures/results_page.png, where there is a browser."""
    from tools import browser

    if browser.missing():
        print(f"docs/figures/results_page.png is as before: {browser.missing()}")
        return
    with browser.opened(ROOT / "docs/results.html") as driver:
        driver.save_screenshot(ROOT / "docs/figures/results_page.png")
    print("updated docs/figures/results_page.png")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
