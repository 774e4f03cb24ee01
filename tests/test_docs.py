"""README.md and the pages in docs/ keep up with the scripts and with results/.

After a change of a script, or new runs, `python tools/write_tables.py` writes tables and diffs.
"""

import dataclasses
import importlib
import re

import pytest

from tools import benchmark, plot, sync_blocks, write_tables

ROOT = write_tables.ROOT
PAGES = write_tables.pages()
README = ROOT / "README.md"
SCRIPTS = sync_blocks.scripts()
TUNING = ROOT / "docs/tuning.md"  # it names runs that are no longer in results/
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)


def page_of(script):
    """trudi_maniskill.py -> docs/trudi.md"""
    algorithm = script.stem.split("_")[0]
    return ROOT / "docs" / f"{algorithm}.md"


ALGORITHM_PAGES = sorted({page_of(script) for script in SCRIPTS})
every_algorithm = pytest.mark.parametrize("page", ALGORITHM_PAGES, ids=lambda page: page.name)


def without_comments(text):
    return re.sub("<!--.*?-->", "", text, flags=re.S)


def code_blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


# === tables, diffs and quotations ===
@every_page
def test_tables_and_diffs_are_up_to_date(page):
    text = page.read_text()
    assert write_tables.renewed(text) == text, "run `python tools/write_tables.py`"


def test_generated_parts_are_there():
    assert write_tables.TABLE.search(README.read_text())
    assert write_tables.DIFF.search((ROOT / "docs/trudi.md").read_text())
    assert write_tables.RESULTS.search((ROOT / "docs/results.md").read_text())
    for page in ALGORITHM_PAGES:
        assert write_tables.TABLE.search(page.read_text())


def test_the_laptop_grid_is_shown_whole():
    """Table and notes stand there as plot.py prints them, with the number of runs."""
    text = (ROOT / "docs/results.md").read_text()
    groups = plot.load([ROOT / "results/laptop"])
    assert plot.report(groups, with_aggregates=False) in text
    finished = len(list((ROOT / "results/laptop").glob("*/*/eval.json")))
    planned = len(benchmark.plan(benchmark.parse_args(["laptop"])))
    assert f"{finished} of its {planned} runs" in text


def test_a_stale_page_is_found():
    stale = "<!-- python tools/plot.py results/spo --table runs -->\nold\n<!-- end -->"
    renewed = write_tables.renewed(stale)
    assert "SPO" in renewed and "old" not in renewed
    assert write_tables.renewed(renewed) == renewed


def test_missing_results_are_named():
    with pytest.raises(FileNotFoundError, match="results/nothing"):
        write_tables.plot_table("results/nothing --table runs")


def test_a_diff_shows_both_functions():
    lines = write_tables.function_diff("def f():\n    return 1", "def f():\n    return 2")
    assert lines == [" def f():", "-    return 1", "+    return 2"]


@every_algorithm
def test_quoted_code_is_that_of_the_script(page):
    script = ROOT / f"{page.stem}_continuous.py"
    script_lines = script.read_text().splitlines()
    for block in code_blocks(page.read_text(), "python"):
        assert not [line for line in block.splitlines() if line not in script_lines]


# === scripts, functions, metrics ===
@every_script
def test_there_is_a_page_for_every_script(script):
    page = page_of(script)
    assert page.exists()
    assert f"[`{script.name}`](../{script.name})" in page.read_text()
    assert f"`{script.name}`" in README.read_text()


@every_algorithm
def test_functions_named_in_docs_exist(page):
    links = re.findall(r"\[`(\w+)`\]\(\.\./(\w+\.py)\)", page.read_text())
    assert len(links) >= 8
    for name, script in links:
        assert name in write_tables.definitions(ROOT / script), f"{script} has no {name}"


def test_functions_named_in_the_readme_exist():
    section = README.read_text().split("## Read the code in this order")[1].split("\n## ")[0]
    items = re.findall(r"^\d+\. (.*?):", section, re.M)
    names = [name for item in items for name in re.findall(r"`(\w+)`", item)]
    assert len(names) >= 8
    defined = write_tables.definitions(ROOT / "trudi_continuous.py")
    assert not [name for name in names if name not in defined]


@every_script
def test_every_logged_key_is_explained(script):
    """Common ones in docs/metrics.md; losses/ and policy/ exactly on the algorithm's page."""
    module = importlib.import_module(script.stem)
    literals = set(re.findall(r'"((?:losses|policy|time|charts)/\w+)"', script.read_text()))
    own = {key for key in literals if key.startswith(("losses/", "policy/"))}
    common = literals - own | {"global_step"}
    for name in module.EPISODE_METRICS:
        common |= {f"charts/episode_{name}", f"eval/{name}"}
    explained = (ROOT / "docs/metrics.md").read_text()
    assert not [key for key in sorted(common) if f"`{key}`" not in explained]
    on_page = set(re.findall(r"`((?:losses|policy)/\w+)`", page_of(script).read_text()))
    assert on_page == own


# === flags ===
def flags_of(script):
    """The flags of a script, those of booleans twice: --track and --no-track"""
    module = importlib.import_module(script.stem)
    flags = {"help"}
    for field in dataclasses.fields(module.Args):
        name = field.name.replace("_", "-")
        flags.add(name)
        if field.type is bool:
            flags.add(f"no-{name}")
    return flags


def flags_of_tool(path):
    """The flags that stand as words in its source"""
    return {"help", *re.findall(r'"--([a-z][a-z0-9-]+)"', path.read_text())}


TORCHRUN = {"nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint"}
PIP = {"no-deps"}


def named_flags(text):
    """All flags but those of torchrun and pip"""
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", without_comments(text)))
    return named - TORCHRUN - PIP


@every_algorithm
def test_pages_of_algorithms_name_flags_that_exist(page):
    script = ROOT / f"{page.stem}_continuous.py"
    assert not named_flags(page.read_text()) - flags_of(script)


@every_page
def test_pages_name_flags_that_exist(page):
    known = set()
    for script in SCRIPTS:
        known |= flags_of(script)
    for tool in (ROOT / "tools").glob("*.py"):
        known |= flags_of_tool(tool)
    assert not named_flags(page.read_text()) - known


@every_page
def test_commands_use_flags_of_what_they_call(page):
    flags = {script.name: flags_of(script) for script in SCRIPTS}
    flags["tools/plot.py"] = flags_of_tool(ROOT / "tools/plot.py")
    flags["./benchmark.sh"] = flags_of_tool(ROOT / "tools/benchmark.py")
    for block in code_blocks(page.read_text(), "bash"):
        for line in block.splitlines():
            command = line.split(" # ")[0]
            for program, known in flags.items():
                if program in command.split():
                    assert not named_flags(command) - known, line


# === the text itself ===
def test_the_readme_is_short():
    text = README.read_text()
    assert len(text.encode()) <= 9_000
    assert not [line for line in text.splitlines() if len(line) > 120]


def test_set_up_commands():
    """The first commands install and train; .ci/run takes the one with pytest."""
    commands = re.findall("^python -m venv .*", README.read_text(), re.M)
    assert len(commands) == 2
    assert commands[0].endswith("requirements.txt && .venv/bin/python trudi_continuous.py")
    assert "requirements-dev.txt" in commands[1] and commands[1].endswith("tests")
    lines_of_ci = re.findall("^python.*pytest.*", README.read_text(), re.M)
    assert lines_of_ci == [commands[1]]


def anchors(page):
    """GitHub's anchors of a page's headings"""
    found = set()
    for heading in re.findall("^#+ (.*)", page.read_text(), re.M):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@every_page
def test_files_named_in_docs_exist(page):
    if page == TUNING:
        return
    folders = "results|tools|docs|simulators|tests"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text()):
        assert (ROOT / path).exists(), path


@every_page
def test_no_line_numbers_and_no_absolute_paths(page):
    text = page.read_text()
    assert not re.search(r"#L\d", text)
    assert not re.search(r"(?<![\w.~])/(work|tmp|home|root|usr)/", text)
