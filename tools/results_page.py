"""What docs/results.md and docs/results.html show of results/.

    python tools/write_tables.py     # writes both pages, and the figures of docs/results.md

A section compares runs with a finding of the paper. It has findings, which are computed from the
runs, and tables. docs/results.md has a section between `<!-- results: NAME -->` and
`<!-- end results -->`. docs/results.html has all sections, and the learning curves of all runs.

Each row of a table and each finding knows the runs that it is made of. The HTML page names their
folders, so every number can be traced to its runs.

A finding compares two algorithms by the probability of improvement of the one over the other, on
the tasks that both have (tools/plot.py says how it is computed). The first is above the second if
the whole 95 % interval is above one half, below it if the whole interval is below, and otherwise
they do not differ reliably. Two that the paper finds level are so here if the interval has one
half in it and is narrow.
"""

import base64
import gzip
import html
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.colors import to_hex

from tools import benchmark, plot

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = Path(__file__).with_name("results_page.html")
LIBRARY = re.compile(r'(<script id="library"[^>]*>)(.*?)(</script>)', re.S)
SLOW = 1.5  # a run that takes this many times as long as the fastest of its row is counted as slow
NARROW = 0.5  # an interval that is wider than this does not show that two algorithms are level
CURVE_POINTS = 40  # of an interquartile mean


# === 1. What the paper found ===
@dataclass(frozen=True)
class Claim:
    """What the paper says about two algorithms."""

    one: str
    other: str
    expected: Literal["above", "level"] = "above"


@dataclass(frozen=True)
class Topic:
    title: str
    grid: str  # of tools/benchmark.py, and folder of the runs in results/
    paper: str  # one sentence
    claims: list = field(default_factory=list)  # []: TruDi is above each other algorithm
    folders: list = field(default_factory=list)  # of the runs, if not results/<grid>
    has_steps_per_second: bool = True


TOPICS = {
    "rivals": Topic(
        title="TruDi and its rivals",
        grid="laptop",
        paper="On 20 DMC tasks (MuJoCo Playground, 50M steps, ten seeds) TruDi ends above all "
        "rivals; REPPO is next, and DIME is strong.",
    ),
    "trust-region": Topic(
        title="Trust region: split against none",
        grid="laptop",
        folders=["results/laptop/trudi", "results/laptop/dime"],
        paper="On-policy DIME, which is TruDi without the trust region, ends below TruDi: a little "
        "on the DMC tasks, far on humanoids.",
    ),
    "time": Topic(
        title="REPPO with the time of TruDi",
        grid="ablation-time",
        folders=["results/laptop/trudi", "results/laptop/reppo", "results/ablation-time"],
        paper="With the same time of training TruDi ends far above REPPO (humanoids, about 2.5 "
        "hours on a GPU), and more steps do not improve REPPO.",
        claims=[Claim("TruDi", "REPPO matched"), Claim("REPPO matched", "REPPO", "level")],
    ),
    "steps": Topic(
        title="Number of denoising steps",
        grid="ablation-steps",
        paper="With 1 step the policy does not learn; the return grows up to 8 steps and no "
        "further, while the time goes on growing (humanoids).",
        claims=[
            Claim("TruDi steps 8", "TruDi steps 1"),
            Claim("TruDi steps 8", "TruDi steps 4"),
            Claim("TruDi steps 16", "TruDi steps 8", "level"),
        ],
    ),
    "kl": Topic(
        title="KL bound",
        grid="ablation-kl",
        paper="Bounds from 0.1 to 0.4 are best; 50 ends clearly lower, and 0.01 learns slowly and "
        "ends lower (IsaacLab).",
        claims=[
            Claim("TruDi kl 0.1", "TruDi kl 0.4", "level"),
            Claim("TruDi kl 0.1", "TruDi kl 50"),
            Claim("TruDi kl 0.1", "TruDi kl 0.01"),
        ],
    ),
    "sampler": Topic(
        title="Samplers at evaluation",
        grid="ablation-sampler",
        paper="The ODE with score scale 1.0 ends above the SDE and above the best of 10 or 20 "
        "samples (humanoids).",
        claims=[
            Claim("TruDi ode 1.0", "TruDi sde"),
            Claim("TruDi ode 1.0", "TruDi best 10"),
            Claim("TruDi ode 1.0", "TruDi best 20"),
        ],
        has_steps_per_second=False,
    ),
}
# What the page draws: the grids that have learning curves.
CURVES = {
    "laptop": "All algorithms",
    "ablation-steps": "Denoising steps",
    "ablation-kl": "KL bound",
    "ablation-time": "REPPO with the time of TruDi",
}
# Figures of the pages: topic -> their folder, and what tools/plot.py calls them. Some exist for
# some runs only: a second aggregate where some algorithms have more tasks.
AGGREGATES = ["aggregate_DMC.png", "aggregate_DMC_more_tasks.png"]
FIGURES = {
    "rivals": ("results/figures", ["CheetahRun-v1.png", *AGGREGATES, "curves.png"]),
    "time": ("results/figures/ablation-time", AGGREGATES),
    "steps": ("results/figures/ablation-steps", AGGREGATES),
    "kl": ("results/figures/ablation-kl", ["CheetahRun-v1.png", *AGGREGATES]),
}
SHOWN_IN_RESULTS_MD = {  # with their descriptions
    "aggregate_DMC.png": "Interquartile mean over tasks and seeds, over steps and over time",
    "aggregate_DMC_more_tasks.png": "The same for the algorithms that have more tasks",
    "curves.png": "Each task over environment steps and over time",
}


# === 2. Findings, rows and tables ===
@dataclass
class Finding:
    outcome: Literal["differs", "open", "agrees", "missing"]
    sentence: str
    runs: list


@dataclass
class Row:
    cells: list
    runs: list


@dataclass
class Table:
    caption: str
    titles: list
    rows: list


@dataclass
class Section:
    name: str
    title: str
    paper: str
    findings: list
    tables: list
    notes: list


OUTCOMES = {  # in the order in which they are shown
    "differs": "Differs from the paper:",
    "open": "Not confirmed:",
    "agrees": "As in the paper:",
    "missing": "No runs yet:",
}


@dataclass
class Comparison:
    """Of two algorithms on the tasks that both have."""

    tasks: list
    runs: list
    probability: float
    interval: np.ndarray | None  # None: a task with one seed cannot vary

    @property
    def verdict(self):
        if self.interval is None:
            return "unknown"
        low, high = self.interval
        if low > 0.5:
            return "above"
        if high < 0.5:
            return "below"
        return "level"

    def numbers(self):
        text = f"probability of improvement {self.probability:.2f}"
        if self.interval is None:
            text += ", no interval with one seed"
        else:
            text += ", {:.2f} to {:.2f}".format(*self.interval)
        return f"{text}, {plot.counted(len(self.tasks), 'task')}"


def runs_of(groups, names, tasks):
    runs = []
    for name in names:
        for env in tasks:
            runs += groups[env, name]
    return runs


def compare(groups, one, other):
    """None if they have no task in common with a value each."""
    tasks = []
    values = []
    other_values = []
    for env in plot.common_tasks(groups, [one, other], plot.tasks_of(groups)):
        finals = np.array(plot.finite_finals(groups[env, one]))
        other_finals = np.array(plot.finite_finals(groups[env, other]))
        if len(finals) and len(other_finals):
            tasks.append(env)
            values.append(finals)
            other_values.append(other_finals)
    if not tasks:
        return None
    interval = None
    if min(len(finals) for finals in values + other_values) > 1:
        interval = plot.improvement_interval(values, other_values)
    return Comparison(
        tasks=tasks,
        runs=runs_of(groups, [one, other], tasks),
        probability=float(plot.probability_of_improvement(values, other_values)),
        interval=interval,
    )


def finding(groups, claim):
    """What the runs say about a claim of the paper."""
    comparison = compare(groups, claim.one, claim.other)
    if comparison is None:
        return Finding("missing", f"{claim.one} against {claim.other}.", [])
    sentences = {
        "above": f"{claim.one} ends above {claim.other}",
        "below": f"{claim.one} ends below {claim.other}",
        "level": f"{claim.one} and {claim.other} do not differ reliably",
        "unknown": f"{claim.one} and {claim.other} have too few seeds",
    }
    verdict = comparison.verdict
    wide = verdict == "level" and comparison.interval[1] - comparison.interval[0] > NARROW
    if verdict == claim.expected and not wide:
        outcome = "agrees"
    elif verdict in ("level", "unknown"):
        outcome = "open"
    else:
        outcome = "differs"
    return Finding(outcome, f"{sentences[verdict]} ({comparison.numbers()}).", comparison.runs)


def improvement_table(groups, names):
    """TruDi against each of the others."""
    rows = []
    for name in names:
        comparison = compare(groups, "TruDi", name)
        if name == "TruDi" or comparison is None:
            continue
        interval = "- (a task with one seed)"
        if comparison.interval is not None:
            interval = "{:.3f} to {:.3f}".format(*comparison.interval)
        cells = [
            name,
            f"**{comparison.probability:.3f}**",
            interval,
            str(len(comparison.tasks)),
            str(len(comparison.runs)),
        ]
        rows.append(Row(cells, comparison.runs))
    titles = ["over", "probability of improvement of TruDi", "95 % interval", "tasks", "runs"]
    return Table("How likely a run of TruDi ends above a run of a rival", titles, rows)


def aggregate_table(groups, aggregate):
    """The IQM of each algorithm at the end and at equal time."""
    rows = []
    for name in aggregate.names:
        tasks = plot.final_values(groups, aggregate, name)
        if not tasks:
            continue
        early = plot.values_at_equal_time(groups, aggregate, name)
        cells = [name, *plot.iqm_cells(tasks)]
        cells += plot.iqm_cells(early) if early else ["-", "-"]
        cells += [str(sum(len(task) for task in tasks))]
        cells += [plot.show_range([len(task) for task in tasks], "{}")]
        rows.append(Row(cells, runs_of(groups, [name], aggregate.tasks)))
    titles = [
        "algorithm",
        "IQM at the end",
        "95 % interval",
        "IQM at equal time",
        "95 % interval",
        "runs",
        "seeds per task",
    ]
    num_tasks = plot.counted(len(aggregate.tasks), "task")
    caption = f"{plot.scaled_label(aggregate.measure)} over {num_tasks}"
    if not aggregate.everyone:
        caption += " that these algorithms have"
    return Table(caption, titles, rows)


def task_table(groups):
    """A row for each task: the mean of each algorithm's final values."""
    names = plot.algorithms_of(groups)
    rows = []
    for env in plot.tasks_of(groups):
        cells = [env]
        runs = []
        for name in names:
            group = groups.get((env, name), [])
            runs += group
            count = len(plot.finite_finals(group))
            cells.append(f"{plot.mean_cell(group)} ({count})" if group else "-")
        rows.append(Row(cells, runs))
    return Table("Mean of the final values (and number of seeds)", ["task", *names], rows)


def steps_per_second(runs):
    """Of the fastest run, evaluations included."""
    paces = [plot.pace(run) for run in runs if run.ended and np.isfinite(plot.pace(run))]
    return f"{1 / min(paces):,.0f}" if paces else "-"


def variant_table(groups, with_steps_per_second):
    """A row for each variant: the mean on each task, and the IQM over the tasks that all have."""
    names = plot.algorithms_of(groups)
    envs = plot.tasks_of(groups)
    aggregates = [item for item in plot.aggregates(groups) if item.everyone]
    rows = []
    for name in names:
        own_tasks = plot.common_tasks(groups, [name], envs)
        runs = runs_of(groups, [name], own_tasks)
        cells = [name]
        cells += [plot.mean_cell(groups.get((env, name), [])) for env in envs]
        tasks = plot.final_values(groups, aggregates[0], name) if aggregates else []
        cells += plot.iqm_cells(tasks) if tasks else ["-", "-"]
        if with_steps_per_second:
            cells.append(steps_per_second(runs))
        cells.append(str(len(plot.finite_finals(runs))))
        rows.append(Row(cells, runs))
    num_tasks = len(aggregates[0].tasks) if aggregates else 0
    titles = ["variant", *envs, f"IQM of {plot.counted(num_tasks, 'task')}", "95 % interval"]
    if with_steps_per_second:
        titles.append("steps/s, fastest run")
    titles.append("runs")
    return Table("Mean of the final values on each task, and their IQM / 1000", titles, rows)


# === 3. Sections ===
def load_topic(topic, root):
    """The runs of a topic: {} where there are none yet."""
    folders = [root / folder for folder in topic.folders or [f"results/{topic.grid}"]]
    folders = [folder for folder in folders if any(folder.rglob("metrics.csv"))]
    if topic.grid == "ablation-sampler":  # its runs are evaluations without a log
        folders = [root / "results/ablation-sampler"]
        folders = [folder for folder in folders if any(folder.rglob("eval.json"))]
    if not folders:
        return {}
    groups = plot.load(folders)
    if topic.grid == "ablation-time":  # only the tasks that have matched runs
        matched = {env for env, name in groups if name == "REPPO matched"}
        groups = {key: runs for key, runs in groups.items() if key[0] in matched}
    return groups


def count_line(topic, root):
    """How many runs of the grid there are."""
    folder = root / "results" / topic.grid
    finished = len(list(folder.glob("*/*/eval.json")))
    planned = len(benchmark.plan(benchmark.parse_args([topic.grid])))
    return f"`results/{topic.grid}` has {finished} of its {planned} runs."


def machine_line(topic, root):
    """The machines of the manifest, and how many runs were slower than their row."""
    manifest = root / "results" / topic.grid / "manifest.jsonl"
    machines = Counter()
    if manifest.exists():
        for line in manifest.read_text().splitlines():
            machine = json.loads(line)["machine"]
            machines[f"{machine['cpu']}, {plot.counted(machine['cores'], 'core')}"] += 1
    groups = {}
    for run in plot.find_runs(root / "results" / topic.grid, ""):
        if run.ended and np.isfinite(plot.pace(run)):
            groups.setdefault((run.env, run.algorithm), []).append(plot.pace(run))
    num_runs = sum(len(paces) for paces in groups.values())
    slow = sum(pace > SLOW * min(paces) for paces in groups.values() for pace in paces)
    line = f"Machine: {'; '.join(machines) or 'not recorded'}."
    if slow:
        line += (
            f" {slow} of {num_runs} runs took more than {SLOW} times as long as the fastest run "
            "of their row: on another machine, or on a busy one. All runs of a row are timed at "
            "the pace of its fastest."
        )
    return line


def make_section(name, root=ROOT):
    topic = TOPICS[name]
    groups = load_topic(topic, root)
    if not groups:
        sentence = f"`./benchmark.sh {topic.grid}` makes them."
        findings = [Finding("missing", sentence, [])]
        return Section(name, topic.title, topic.paper, findings, [], [])
    names = plot.algorithms_of(groups)
    claims = topic.claims
    if not claims:
        claims = [Claim("TruDi", other) for other in names if other != "TruDi"]
    findings = [finding(groups, claim) for claim in claims]
    findings.sort(key=lambda item: list(OUTCOMES).index(item.outcome))
    if name == "rivals":
        tables = [aggregate_table(groups, aggregate) for aggregate in plot.aggregates(groups)]
        tables += [improvement_table(groups, names), task_table(groups)]
    else:
        tables = [variant_table(groups, topic.has_steps_per_second)]
    if name == "trust-region":
        notes = ["The runs are those of TruDi and its rivals."]
        return Section(name, topic.title, topic.paper, findings, tables, notes)
    notes = [count_line(topic, root)]
    if topic.has_steps_per_second:
        notes.append(machine_line(topic, root))
    for (env, algorithm), runs in groups.items():
        notes += plot.group_notes(env, algorithm, runs)
    return Section(name, topic.title, topic.paper, findings, tables, notes)


def open_questions(root=ROOT):
    """All findings that differ from the paper or do not confirm it, as pairs of section, finding"""
    found = {"differs": [], "open": []}
    for name in TOPICS:
        section = make_section(name, root)
        for item in section.findings:
            if item.outcome in found:
                found[item.outcome].append((section, item))
    return found["differs"] + found["open"]


def figure_paths(topic, groups):
    """The figures of a topic that its runs have"""
    if topic not in FIGURES or not groups:
        return []
    folder, names = FIGURES[topic]
    drawn = plot.figures_of(groups)
    return [f"{folder}/{name}" for name in names if name in drawn]


# === 4. Markdown ===
def markdown_table(table):
    lines = [f"{table.caption}:", ""]
    lines += [plot.table_line(table.titles), plot.table_rule(len(table.titles))]
    lines += [plot.table_line(row.cells) for row in table.rows]
    return lines


def markdown(name, root=ROOT):
    """The text of a section, or the list of differences."""
    if name == "differences":
        lines = []
        for section, item in open_questions(root):
            lines.append(f"- **{OUTCOMES[item.outcome]}** {section.title}: {item.sentence}")
        return "\n".join(lines or ["- Every comparison below is as in the paper."]) + "\n"
    section = make_section(name, root)
    lines = [f"- **{OUTCOMES[item.outcome]}** {item.sentence}" for item in section.findings]
    lines += ["", f"The paper: {section.paper}"]
    for table in section.tables:
        lines += ["", *markdown_table(table)]
    for note in section.notes:
        lines += ["", note]
    for path in figure_paths(name, load_topic(TOPICS[name], root)):
        text = SHOWN_IN_RESULTS_MD.get(Path(path).name)
        if text:
            lines += ["", f"![{text}](../{path})"]
    return "\n".join(lines) + "\n"


# === 5. The HTML page ===
class RunList:
    """All runs of the page, each once. Everything else on the page refers to them by number."""

    def __init__(self, root):
        self.root = root
        self.runs = []
        self.numbers = {}  # folder -> number

    def number(self, run):
        folder = run.path.resolve().relative_to(self.root.resolve()).as_posix()
        if folder not in self.numbers:
            self.numbers[folder] = len(self.runs)
            self.runs.append(run)
        return self.numbers[folder]

    def numbers_of(self, runs):
        return sorted({self.number(run) for run in runs})

    def as_data(self):
        data = []
        for folder, run in zip(self.numbers, self.runs, strict=True):
            data.append(
                {
                    "folder": folder,
                    "seed": run.seed,
                    "final": rounded([run.final])[0],
                    "ended": run.ended is not False,
                    "steps": [int(step) for step in run.curve.steps],
                    "minutes": rounded(run.curve.seconds / 60),
                    "values": rounded(run.curve.values),
                }
            )
        return data


def rounded(values):
    """Four digits; null for nan"""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values]


def curve_of_group(runs, quantity):
    """IQM of the runs of an algorithm on a task; None without curves or times"""
    span = plot.common_span(runs, quantity, CURVE_POINTS)
    if span is None:
        return None
    values = np.stack([plot.on_grid(run, span.grid, quantity) for run in runs])
    return {"x": axis_values(span.grid, quantity), "y": rounded(plot.iqm(values.T))}


def curve_of_aggregate(groups, aggregate, name, quantity):
    """IQM over all tasks with its interval; None without curves or times"""
    by_task = [groups[env, name] for env in aggregate.tasks]
    span = plot.common_span([run for runs in by_task for run in runs], quantity, CURVE_POINTS)
    if span is None:
        return None
    values = []
    for runs in by_task:
        curves = np.stack([plot.on_grid(run, span.grid, quantity) for run in runs])
        values.append(curves / aggregate.measure.scale)
    low, high = plot.bootstrap(values)
    return {
        "x": axis_values(span.grid, quantity),
        "y": rounded(plot.iqm(np.concatenate(values).T)),
        "low": rounded(low),
        "high": rounded(high),
    }


def axis_values(grid, quantity):
    if quantity == "steps":
        return [round(step) for step in grid]
    return rounded(grid / 60)


def curves_of_grid(grid, title, root, run_list):
    """What the page draws of a grid; None if it has no runs."""
    folder = root / "results" / grid
    if not any(folder.rglob("metrics.csv")):
        return None
    groups = plot.load([folder])
    names = plot.algorithms_of(groups)
    palette = plot.choose_colors(names)
    panels = []
    for env in plot.tasks_of(groups):
        lines = []
        for name in names:
            runs = [run for run in groups.get((env, name), []) if run.has_curve]
            if runs:
                lines.append(
                    {
                        "algorithm": name,
                        "runs": run_list.numbers_of(runs),
                        "steps": curve_of_group(runs, "steps"),
                        "minutes": curve_of_group(runs, "seconds"),
                    }
                )
        panels.append({"task": env, "lines": lines})
    totals = []
    for aggregate in plot.aggregates(groups):
        lines = []
        for name in aggregate.names:
            lines.append(
                {
                    "algorithm": name,
                    "runs": run_list.numbers_of(runs_of(groups, [name], aggregate.tasks)),
                    "steps": curve_of_aggregate(groups, aggregate, name, "steps"),
                    "minutes": curve_of_aggregate(groups, aggregate, name, "seconds"),
                }
            )
        num_tasks = plot.counted(len(aggregate.tasks), "task")
        label = plot.scaled_label(aggregate.measure)
        totals.append({"title": f"IQM of {num_tasks}, {label}", "lines": lines})
    colors = {name: to_hex(palette[name]) for name in names}
    return {"title": title, "colors": colors, "totals": totals, "panels": panels}


def html_text(text):
    """Escaped, with the bold type and the code of Markdown"""
    text = html.escape(text)
    text = re.sub(r"\*\*(.*?)\*\*", r"<b>\1</b>", text)
    return re.sub("`(.*?)`", r"<code>\1</code>", text)


def html_runs(runs, run_list):
    """The attribute that names the runs behind a number"""
    return f'data-runs="{" ".join(map(str, run_list.numbers_of(runs)))}"'


def html_table(table, run_list):
    lines = [f"<table><caption>{html_text(table.caption)}</caption><thead><tr>"]
    lines += [f"<th>{html_text(title)}</th>" for title in table.titles]
    lines.append("</tr></thead><tbody>")
    for row in table.rows:
        cells = "".join(f"<td>{html_text(cell)}</td>" for cell in row.cells)
        lines.append(f"<tr {html_runs(row.runs, run_list)}>{cells}</tr>")
    lines.append("</tbody></table>")
    return lines


def html_section(section, run_list):
    lines = [f'<section id="{section.name}"><h2>{html_text(section.title)}</h2><ul>']
    for item in section.findings:
        attribute = html_runs(item.runs, run_list)
        label = f"<b>{OUTCOMES[item.outcome]}</b>"
        lines.append(f"<li {attribute}>{label} {html_text(item.sentence)}</li>")
    lines.append(f'</ul><p class="paper">The paper: {html_text(section.paper)}</p>')
    for table in section.tables:
        lines += html_table(table, run_list)
    lines += [f'<p class="note">{html_text(note)}</p>' for note in section.notes]
    lines.append("</section>")
    return lines


def packed_library():
    """plotly.js, which the package plotly brings, as gzip in base64: 2 MB instead of 5"""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def page(root=ROOT, library=""):
    """The text of docs/results.html. `library` is what packed_library returns."""
    run_list = RunList(root)
    curves = {}
    for grid, title in CURVES.items():
        drawn = curves_of_grid(grid, title, root, run_list)
        if drawn:
            curves[grid] = drawn
    sections = []
    for name in TOPICS:
        sections += html_section(make_section(name, root), run_list)
    data = {"grids": curves, "runs": run_list.as_data()}
    text = TEMPLATE.read_text()
    text = text.replace("%SECTIONS%", "\n".join(sections))
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    text = text.replace("%DATA%", packed)
    return text.replace("%LIBRARY%", library)


def library_of(text):
    """plotly.js of a page, unpacked"""
    return gzip.decompress(base64.b64decode(LIBRARY.search(text)[2])).decode()


def without_library(text):
    return LIBRARY.sub(r"\1\3", text)


# === 6. Writing them ===
def write_page(root=ROOT):
    """docs/results.html, if its content changed. -> whether it did"""
    path = root / "docs/results.html"
    new = page(root, packed_library())
    if path.exists():
        old = path.read_text()
        if without_library(old) == without_library(new) and library_of(old) == library_of(new):
            return False
    path.write_text(new)
    return True


def figure_is_current(path, groups):
    """Whether a figure was drawn from these runs."""
    from PIL import Image

    if not path.exists():
        return False
    with Image.open(path) as picture:
        return picture.info.get("Runs") == plot.fingerprint(groups)


def write_figures(root=ROOT):
    """Draw the figures whose runs changed. -> their paths"""
    written = []
    for topic in FIGURES:
        groups = load_topic(TOPICS[topic], root)
        for path in figure_paths(topic, groups):
            if not figure_is_current(root / path, groups):
                figure = plot.figures_of(groups)[Path(path).name]()
                plot.save_figure(figure, root / path, groups)
                written.append(path)
    return written
