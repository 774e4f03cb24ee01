"""docs/results.md and docs/results.html: all of it comes from results/, by one command.

`python tools/write_tables.py` writes both pages. The page is opened in Chromium where there is one.
"""

import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from test_plot import brute_iqm, fake_run

from tools import benchmark, browser, plot, results_page

ROOT = results_page.ROOT
PAGE = ROOT / "docs/results.html"
MAX_BYTES = 5_000_000


def data_of(text):
    return json.loads(re.search('<script id="data"[^>]*>(.*?)</script>', text, re.S)[1])


@pytest.fixture(scope="module")
def committed():
    return PAGE.read_text()


# === from results/ by one command ===
def test_the_page_is_what_the_command_writes(committed):
    new = results_page.page()
    assert results_page.without_library(committed) == new, "run `python tools/write_tables.py`"


def test_the_library_is_that_of_the_package(committed):
    offline = pytest.importorskip("plotly.offline")
    assert results_page.library_of(committed) == offline.get_plotlyjs()


def test_the_page_is_small_and_needs_no_network(committed):
    assert PAGE.stat().st_size <= MAX_BYTES
    text = results_page.without_library(committed)
    assert not re.search(r"(src|href)=\"(?!data:,)", text)
    assert "http" not in text and "fetch(" not in text


@pytest.mark.parametrize("topic", results_page.FIGURES)
def test_figures_are_drawn_from_the_runs(topic):
    pytest.importorskip("PIL")
    groups = results_page.load_topic(results_page.TOPICS[topic], ROOT)
    for path in results_page.figure_paths(topic, groups):
        current = results_page.figure_is_current(ROOT / path, groups)
        assert current, "run `python tools/write_tables.py`"


def test_results_md_has_no_number_of_its_own():
    """Outside of what the command writes there is no result, only 95 % and names."""
    text = (ROOT / "docs/results.md").read_text()
    text = re.sub("<!-- (python|results).*?<!-- end( results)? -->", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|95 %", "", text)
    assert not re.findall(r"\d+", text)


def test_every_topic_is_on_both_pages(committed):
    text = (ROOT / "docs/results.md").read_text()
    for name, topic in results_page.TOPICS.items():
        assert f"<!-- results: {name} -->" in text and f'<section id="{name}">' in committed
        assert f"## {topic.title}\n" in text
        assert topic.grid in benchmark.GRIDS
    assert text.index("## Where this differs") < text.index("<!-- results: rivals -->")


# === no number without a run folder ===
class Rows(HTMLParser):
    """The runs of all rows and findings of a page, and the numbers that belong to no run."""

    def __init__(self):
        super().__init__()
        self.open = []  # (tag, runs or None)
        self.found = []  # (runs, text)
        self.untraced = []

    def handle_starttag(self, tag, attributes):
        if tag in ("meta", "link", "input"):
            return
        runs = dict(attributes).get("data-runs")
        self.open.append((tag, runs))
        if runs is not None:
            self.found.append([runs, ""])

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, text):
        tags = [tag for tag, _ in self.open]
        if {"script", "style", "head"} & set(tags):
            return
        if any(runs is not None for _, runs in self.open):
            self.found[-1][1] += text + " "
        elif re.search(r"\d", text) and not {"th", "caption"} & set(tags):
            self.untraced.append(text)


def read_rows(text):
    rows = Rows()
    rows.feed(text)
    return rows


def test_every_number_of_the_page_has_run_folders(committed):
    data = data_of(committed)
    rows = read_rows(committed)
    assert len(rows.found) > 10
    for numbers, text in rows.found:
        has_number = re.search(r"\d\.\d", text)
        assert numbers or not has_number, text
        assert all(int(number) < len(data["runs"]) for number in numbers.split())
    allowed = ("The paper: ", "Machine: ", " of ", "Warning: ", "* Not at its end")
    for text in rows.untraced:  # what the paper says, and how many runs there are
        assert any(words in text for words in allowed), text


def test_every_curve_has_runs_and_every_run_a_folder(committed):
    data = data_of(committed)
    for run in data["runs"]:
        folder = ROOT / run["folder"]
        (read,) = plot.find_runs(folder, "")
        assert run["final"] == results_page.rounded([read.final])[0]
        assert run["values"] == results_page.rounded(read.curve.values)
        assert run["steps"] == read.curve.steps.tolist() and run["seed"] == read.seed
    for grid in data["grids"].values():
        for panel in grid["panels"] + grid["totals"]:
            assert all(line["runs"] for line in panel["lines"])


def test_a_row_is_computed_from_the_runs_that_it_names(committed):
    """The IQM of the aggregate and the probability of improvement, from the data of the page."""
    data = data_of(committed)
    checked = 0
    for numbers, text in read_rows(committed).found:
        runs = [data["runs"][int(number)] for number in numbers.split()]
        match = re.match(r"(TruDi|REPPO|PPO) (0\.\d{3}) ", text)
        if match and all(run["folder"].startswith("results/laptop/") for run in runs):
            labels = {run["folder"].split("/")[2] for run in runs}
            if labels == {match[1].lower()}:
                want = brute_iqm([run["final"] / 1000 for run in runs])
                assert abs(float(match[2]) - want) < 1e-3
                checked += 1
    assert checked >= 3


# === runs made up here ===
@pytest.fixture
def project(tmp_path):
    """Two tasks; REPPO is above TruDi on both, PPO has one task only."""
    laptop = tmp_path / "results/laptop"
    for seed in (1, 2, 3):
        for env in ("CheetahRun-v1", "WalkerWalk-v1"):
            fake_run(laptop / f"trudi/{env}_{seed}", [10, 100 + seed])
            fake_run(laptop / f"reppo/{env}_{seed}", [10, 900 + seed])
        fake_run(laptop / f"ppo/CheetahRun-v1_{seed}", [10, 20 + seed])
    return tmp_path


def test_findings_follow_the_runs(project):
    text = results_page.markdown("rivals", project)
    below = "TruDi ends below REPPO (probability of improvement 0.00, 0.00 to 0.00, 2 tasks)."
    assert text.startswith(f"- **Differs from the paper:** {below}\n")  # it is said first
    assert "- **As in the paper:** TruDi ends above PPO" in text
    assert "**Differs from the paper:**" in results_page.markdown("differences", project)
    assert below in results_page.markdown("differences", project)
    assert "has 15 of its " in text
    assert "| WalkerWalk-v1 | 102 (3) | 902 (3) | - |" in text
    for seed in (1, 2, 3):
        shutil.rmtree(project / f"results/laptop/trudi/CheetahRun-v1_{seed}")
        shutil.rmtree(project / f"results/laptop/trudi/WalkerWalk-v1_{seed}")
        for env in ("CheetahRun-v1", "WalkerWalk-v1"):
            fake_run(project / f"results/laptop/trudi/{env}_{seed}", [10, 950 + seed])
    text = results_page.markdown("rivals", project)
    assert "Differs" not in text and text.count("**As in the paper:**") == 2
    assert "as in the paper" in results_page.markdown("differences", project)


def test_missing_cells(project):
    """One seed has no interval, an algorithm without a common task no comparison."""
    fake_run(project / "results/laptop/fpo/WalkerWalk-v1_1", [10, 400])
    text = results_page.markdown("rivals", project)
    assert "- **Not confirmed:** TruDi and FPO have too few seeds" in text
    assert "| FPO | **0.000** | - (a task with one seed) | 1 | 4 |" in text
    assert "| CheetahRun-v1 | 102 (3) | 902 (3) | 22 (3) | - |" in text
    assert "over 2 tasks that these algorithms have" in text  # TruDi and REPPO
    shutil.rmtree(project / "results/laptop/trudi")
    text = results_page.markdown("rivals", project)
    assert "- **No runs yet:** TruDi against REPPO." in text


def test_topics_without_runs(project):
    for name in ("time", "steps", "kl", "sampler"):
        grid = results_page.TOPICS[name].grid
        text = results_page.markdown(name, project)
        assert text.startswith(f"- **No runs yet:** `./benchmark.sh {grid}` makes them.")
    assert list(data_of(results_page.page(project))["grids"]) == ["laptop"]


def test_two_that_should_be_level(project):
    folder = project / "results/ablation-steps"
    for seed in (1, 2, 3):
        for env in benchmark.SIX_TASKS:
            fake_run(folder / f"trudi_steps16/{env}_{seed}", [500 + seed])
            fake_run(folder / f"trudi_steps8/{env}_{seed}", [500 + seed])
            fake_run(folder / f"trudi_steps1/{env}_{seed}", [5 + seed], seconds=0.5)
    text = results_page.markdown("steps", project)
    assert "- **As in the paper:** TruDi steps 16 and TruDi steps 8 do not differ reliably" in text
    assert "- **As in the paper:** TruDi steps 8 ends above TruDi steps 1" in text
    assert "- **No runs yet:** TruDi steps 8 against TruDi steps 4." in text
    assert re.search(r"\| TruDi steps 1 \| 7.00 \|.*\| 200 \| 18 \|", text)  # 200 steps/s
    for env in benchmark.SIX_TASKS[1:]:
        for seed in (1, 2, 3):
            shutil.rmtree(folder / f"trudi_steps16/{env}_{seed}")
    text = results_page.markdown("steps", project)
    assert "- **Not confirmed:** TruDi steps 16 and TruDi steps 8" in text  # too few runs


def test_matched_time_is_compared_on_its_tasks(project):
    folder = project / "results/ablation-time/reppo_matched"
    for seed in (1, 2, 3):
        fake_run(folder / f"WalkerWalk-v1_{seed}", [10, 100, 50 + seed])
    text = results_page.markdown("time", project)
    assert "- **As in the paper:** TruDi ends above REPPO matched" in text
    assert "- **Differs from the paper:** REPPO matched ends below REPPO" in text
    assert "CheetahRun" not in text and "| REPPO matched | 52 |" in text
    assert "`results/ablation-time` has 3 of its 18 runs." in text


def test_a_second_aggregate_where_some_have_more_tasks(project):
    aggregates = plot.aggregates(plot.load([project / "results/laptop"]))
    assert [(item.names, len(item.tasks)) for item in aggregates] == [
        (["TruDi", "REPPO", "PPO"], 1),
        (["TruDi", "REPPO"], 2),
    ]
    brief = plot.brief(plot.load([project / "results/laptop"]))
    assert "DMC: IQM of 2 tasks" in brief
    names = plot.figures_of(plot.load([project / "results/laptop"]))
    assert {"aggregate_DMC.png", "aggregate_DMC_more_tasks.png", "curves.png"} <= set(names)


def test_slow_runs_are_counted(project):
    topic = results_page.TOPICS["rivals"]
    assert "runs took more" not in results_page.machine_line(topic, project)
    shutil.rmtree(project / "results/laptop/trudi/WalkerWalk-v1_3")
    fake_run(project / "results/laptop/trudi/WalkerWalk-v1_3", [10, 103], seconds=3.0)
    assert "1 of 15 runs took more than" in results_page.machine_line(topic, project)


def test_a_stale_figure_is_drawn_again(project):
    pytest.importorskip("PIL")
    groups = plot.load([project / "results/laptop"])
    path = project / "figure.png"
    assert not results_page.figure_is_current(path, groups)
    plot.save_figure(plot.figures_of(groups)["CheetahRun-v1.png"](), path, groups)
    assert results_page.figure_is_current(path, groups)
    groups["CheetahRun-v1", "PPO"][0].final += 1
    assert not results_page.figure_is_current(path, groups)


def test_unknown_times_and_values_are_null(project):
    log = project / "results/laptop/ppo/CheetahRun-v1_1/metrics.csv"
    log.write_text(log.read_text().replace("time/elapsed", "other"))
    data = data_of(results_page.page(project))
    minutes = {run["folder"]: run["minutes"] for run in data["runs"]}
    assert minutes["results/laptop/ppo/CheetahRun-v1_1"] == [None, None]
    panel = data["grids"]["laptop"]["panels"][0]
    assert [line["minutes"] is None for line in panel["lines"]] == [False, False, True]


# === in a browser ===
@pytest.fixture(scope="module")
def page():
    if browser.missing():
        pytest.skip(browser.missing())
    with browser.opened(PAGE) as driver:
        yield driver


def click(page, selector):
    page.find_element("css selector", selector).click()


def curves(page):
    """title of each panel -> its curves, as (name, number of points, largest x)"""
    return page.execute_script(
        "const found = {};"
        "for (const plot of document.querySelectorAll('.js-plotly-plot')) {"
        "  found[plot.layout.title.text] = plot.data.map("
        "    (trace) => [trace.name, trace.x.length, Math.max(...trace.x)]);"
        "} return found;"
    )


@pytest.mark.slow
def test_it_loads_without_errors(page, committed):
    assert page.get_log("browser") == []
    grid = data_of(committed)["grids"]["laptop"]
    titles = [total["title"] for total in grid["totals"]]
    titles += [panel["task"] for panel in grid["panels"]]
    assert sorted(curves(page)) == sorted(titles)
    drawn = page.find_elements("css selector", ".js-plotly-plot .scatterlayer path.js-line")
    assert len(drawn) >= sum(len(panel["lines"]) for panel in grid["panels"])


@pytest.mark.slow
def test_clicks_change_the_curves(page, committed):
    grid = data_of(committed)["grids"]["laptop"]
    panel = grid["panels"][0]
    before = curves(page)[panel["task"]]
    assert [name for name, *_ in before] == [line["algorithm"] for line in panel["lines"]]
    click(page, "input[value=seeds]")
    seeds = curves(page)[panel["task"]]
    assert len(seeds) == sum(len(line["runs"]) for line in panel["lines"]) > len(before)
    click(page, "input[value=minutes]")
    assert max(x for *_, x in curves(page)[panel["task"]]) < 1000 < max(x for *_, x in seeds)
    click(page, "#algorithms input[value=TruDi]")
    assert "TruDi" not in [name for name, *_ in curves(page)[panel["task"]]]
    click(page, "#no-tasks")
    assert len(curves(page)) == len(grid["totals"])
    click(page, f"#tasks input[value='{panel['task']}']")
    assert len(curves(page)) == len(grid["totals"]) + 1
    assert page.get_log("browser") == []


@pytest.mark.slow
def test_hover_names_the_seeds_and_a_click_the_folders(page, committed):
    name, task, texts = page.execute_script(
        "document.querySelector('input[value=iqm]').click();"
        "const plot = [...document.querySelectorAll('.js-plotly-plot')].at(-1);"
        "return [plot.data[0].name, plot.layout.title.text, plot.data[0].text[5]];"
    )
    data = data_of(committed)
    panels = data["grids"]["laptop"]["panels"]
    (panel,) = [panel for panel in panels if panel["task"] == task]
    (line,) = [line for line in panel["lines"] if line["algorithm"] == name]
    seeds = [f"seed {data['runs'][number]['seed']}: " for number in line["runs"]]
    assert len(seeds) > 1 and all(seed in texts for seed in seeds)
    click(page, "#rivals tbody tr")
    shown = page.find_element("css selector", "#folders").text
    assert "results/laptop/trudi/CheetahRun-v1_1: " in shown


@pytest.mark.slow
def test_another_grid_can_be_chosen(page, committed):
    grids = list(data_of(committed)["grids"])
    if len(grids) < 2:
        pytest.skip("one grid only")
    click(page, f"#grid option[value='{grids[1]}']")
    first = data_of(committed)["grids"][grids[1]]["panels"][0]
    assert first["task"] in curves(page)
    assert page.get_log("browser") == []


def test_there_is_a_screenshot():
    picture = ROOT / "docs/figures/results_page.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    assert "figures/results_page.png" in (ROOT / "docs/results.md").read_text()


# === numbers ===
def test_rounded():
    assert results_page.rounded(np.array([1234.56, 0.000123456, np.nan])) == [1235, 0.0001235, None]
