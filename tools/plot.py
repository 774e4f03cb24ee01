"""Tables and figures of finished and unfinished runs.

    python tools/plot.py results/laptop --out results/figures
    python tools/plot.py results/laptop/trudi results/laptop/reppo    # tables only
    python tools/plot.py results/ablation-sampler --table brief       # one small table

A run is a folder `<algorithm>/<env>_<seed>` with metrics.csv, and usually args.json and eval.json.
Folders are searched at any depth. A single CSV file is a run too, if it has a column `global_step`
and a column of returns.

The tables are printed as Markdown. With --out, these figures are written: <env>.png for each task,
tasks.png with all tasks, curves.png with a row for each task, over steps and over time, and
aggregate_<suite>.png for each suite. Each has a fingerprint of its runs in its metadata.

How a run is counted:
- Its final value is the mean return (ManiSkill: success rate) in eval.json, under the run's own
  sampler. This is the last policy of the run, not the best one. Without eval.json, the final value
  is the last evaluation in metrics.csv.
- A run that crashed or is still under way counts with its last evaluation and is listed below the
  table. A run without any evaluation counts as 0 where 0 is the lowest possible value (DMC, success
  rates). Elsewhere it is listed, but not counted.
- The runs of one algorithm on one task do the same work per step. If one of them took longer, its
  machine was slower or busy. All of them are therefore timed at the pace of the fastest one.
  A comparison of algorithms by time needs runs from one kind of machine.

How runs are combined:
- Curves are interpolated linearly onto a common grid of steps or seconds. A run that ended before
  the others keeps its last value. A line is dashed from where the first of its runs ended.
- The aggregate of a suite is the interquartile mean (IQM): the mean of the middle half of all runs
  on all tasks. It uses only the tasks that every algorithm has. DMC returns are divided by 1000.
- Its 95 % interval is a stratified bootstrap: runs are resampled within each task.
- Where some algorithms have more tasks, a second aggregate compares these on their common tasks.
- The probability of improvement of one algorithm over another is the chance that a run of the first
  ends above a run of the second on the same task, a tie counting half, averaged over the tasks.
- "At the end" compares equal numbers of steps. "At equal time" compares, for each task, the moment
  at which the first run of any algorithm ended.
- Up to five seeds, each run is drawn, because a bootstrap interval of so few runs is too narrow:
  its nominal 95 % covers only 80 to 90 %.
"""

import argparse
import csv
import dataclasses
import functools
import hashlib
import itertools
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

NAMES = {
    "trudi": "TruDi",
    "reppo": "REPPO",
    "ppo": "PPO",
    "dime": "DIME (on-policy)",
    "spo": "SPO",
    "dppo": "DPPO",
    "fpo": "FPO",
    "cleanrl_ppo": "CleanRL's PPO",
}
COLORS = {  # the order is that of the tables
    "TruDi": "tab:blue",
    "REPPO": "tab:orange",
    "PPO": "tab:green",
    "DIME (on-policy)": "tab:red",
    "SPO": "tab:purple",
    "DPPO": "tab:brown",
    "FPO": "tab:pink",
    "CleanRL's PPO": "tab:gray",
}
DMC_ID = re.compile(
    "(Acrobot|BallInCup|Cartpole|Cheetah|Finger|Fish|Hopper|Humanoid|Pendulum|PointMass|Reacher"
    "|Swimmer|Walker)[A-Z]"
)
HUMANOID_ID = re.compile("[GT]1Joystick(Flat|Rough)Terrain")
HUMANOIDBENCH_ID = re.compile(r"\b[hg]1[a-z]*-\w+-v\d")
TRAINING_RETURNS = [
    "charts/episode_return",
    "charts/episodic_return",
    "episode_return",
    "return",
]
# Settings that may differ between the runs of a group. The suite follows from the environment.
FREE_SETTINGS = {
    "seed",
    "run_dir",
    "resume",
    "evaluate",
    "track",
    "capture_video",
    "backend",
    "suite",
    "compile",
    "torch_threads",
    "git",
    "python",
    "torch",
    "numpy",
    "gymnasium",
    "envpool",
    "mujoco",
    "mani-skill",
    "sapien",
    "playground",
    "mujoco-mjx",
    "jax",
}
RENAMED_SETTINGS = {"normalise_reward": "normalize_reward"}
DPI = 110
DPI_OF_CURVES = 70  # curves.png is long
FEW_SEEDS = 5  # up to this number each run is drawn


@dataclass(frozen=True)
class Measure:
    """What is read from the runs of a suite, and how it enters the aggregate."""

    metric: str = "return"
    scale: float | None = None  # divides the values; None: the tasks share no scale, no aggregate
    floor: float = np.nan  # value of a run without any evaluation; nan: it does not count


# Playground simulates the tasks of EnvPool differently, so the two are never mixed.
MEASURES = {
    "DMC": Measure(scale=1000.0, floor=0.0),
    "DMC by Playground": Measure(scale=1000.0, floor=0.0),
    "humanoid": Measure(scale=1.0),
    "humanoid by Playground": Measure(scale=1.0),
    "ManiSkill": Measure(metric="success_once", scale=1.0, floor=0.0),
}


class Curve(NamedTuple):
    """The evaluations of a run: three arrays of the same length."""

    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray

    def positions(self, quantity):
        """Where the evaluations lie on an axis of steps or seconds."""
        if quantity == "steps":
            return self.steps
        return self.seconds


@dataclass
class Run:
    path: Path
    env: str
    algorithm: str  # the name that is shown
    seed: str
    suite: str
    measure: Measure
    settings: dict  # args.json
    curve: Curve
    total_steps: float  # of the last row of the log; nan without a row
    total_seconds: float
    final: float  # nan: it does not count
    other_finals: dict  # final values under the other samplers
    ended: bool | None  # None: a single CSV file does not tell

    @property
    def has_curve(self):
        return len(self.curve.values) > 0


class Axis(NamedTuple):
    """Horizontal axis of a figure."""

    quantity: Literal["steps", "seconds"]
    unit: float  # steps or seconds per unit
    label: str


class Span(NamedTuple):
    """Common grid of several runs."""

    grid: np.ndarray
    first_end: float  # where the first of the runs ended


@dataclass
class Aggregate:
    suite: str
    measure: Measure
    tasks: list  # the tasks that all of its algorithms have
    names: list  # its algorithms
    everyone: bool = True  # whether these are all algorithms of the suite


def stop(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


# === Statistics ===
def iqm(values):
    """Interquartile mean over the last axis: without the lowest and the highest quarter.

    The number of values that are cut off at each end is rounded down.
    """
    ordered = np.sort(values, axis=-1)
    count = ordered.shape[-1]
    cut = count // 4
    return ordered[..., cut : count - cut].mean(axis=-1)


def bootstrap(tasks, samples=2000, level=0.95, seed=0):
    """Interval of the IQM over all runs of all tasks.

    `tasks` has an array (runs, ...) for each task. The result is an array (2, ...): lower and upper
    end. The bootstrap is stratified: the runs of a task are drawn with replacement from that task.
    """
    rng = np.random.default_rng(seed)
    choices = [rng.integers(len(task), size=(samples, len(task))) for task in tasks]
    percentiles = [50 * (1 - level), 50 * (1 + level)]
    columns = [task.reshape(len(task), -1) for task in tasks]  # (runs, points) each
    num_points = columns[0].shape[1]
    ends = np.empty((2, num_points))
    for point in range(num_points):
        resampled = []
        for column, choice in zip(columns, choices, strict=True):
            resampled.append(column[:, point][choice])  # (samples, runs)
        ends[:, point] = np.percentile(iqm(np.concatenate(resampled, axis=1)), percentiles)
    return ends.reshape(2, *tasks[0].shape[1:])


def probability_of_improvement(tasks, other_tasks):
    """How likely a run ends above a run of the other algorithm on the same task.

    Both have an array (..., runs) for each task, in the same order. A tie counts half. The result
    is the mean over the tasks.
    """
    chances = []
    for values, others in zip(tasks, other_tasks, strict=True):
        difference = values[..., :, None] - others[..., None, :]  # (..., runs, other runs)
        chances.append(((1 + np.sign(difference)) / 2).mean(axis=(-2, -1)))
    return np.mean(chances, axis=0)


def improvement_interval(tasks, other_tasks, samples=2000, level=0.95, seed=0):
    """Interval of the probability of improvement, as an array (2,): lower and upper end.

    Stratified bootstrap: the runs of each algorithm are drawn with replacement within each task.
    """
    rng = np.random.default_rng(seed)
    resampled = []
    for side in (tasks, other_tasks):
        choices = [rng.integers(len(task), size=(samples, len(task))) for task in side]
        resampled.append([task[choice] for task, choice in zip(side, choices, strict=True)])
    percentiles = [50 * (1 - level), 50 * (1 + level)]
    return np.percentile(probability_of_improvement(*resampled), percentiles)


# === Reading runs ===
def number(text):
    """A number, or nan for an empty cell, null or anything else."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return np.nan


def read_settings(path):
    if not path.exists():
        return {}
    settings = json.loads(path.read_text())
    return {RENAMED_SETTINGS.get(name, name): value for name, value in settings.items()}


def read_log(path):
    """Rows of a CSV file, each a dict of texts."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def suite_of(env, settings):
    """The suite that args.json names, else the suite that the id belongs to."""
    suite = settings.get("suite") or ""
    if not suite and DMC_ID.match(env):
        suite = "DMC"
    if suite in ("", "other"):
        if HUMANOID_ID.search(env):
            suite = "humanoid"
        elif HUMANOIDBENCH_ID.search(env):
            suite = "HumanoidBench"
        else:
            suite = "other"
    if settings.get("backend") == "playground":
        suite += " by Playground"
    return suite


def measure_of(suite, metric=""):
    """How a suite is measured. A metric other than the return needs no scale: it is a rate."""
    measure = MEASURES.get(suite, Measure())
    if metric:
        measure = dataclasses.replace(measure, metric=metric)
        if metric != "return" and measure.scale is not None:
            measure = dataclasses.replace(measure, scale=1.0)
    return measure


def value_column(rows, metric):
    """The column that is plotted: evaluations, else training episodes; "" if there is none."""
    if not rows or "global_step" not in rows[0]:
        return ""
    for column in [f"eval/{metric}", metric, *TRAINING_RETURNS]:
        if column in rows[0]:
            return column
    return ""


def read_column(rows, name):
    return np.array([number(row.get(name)) for row in rows], dtype=float)


def read_curve(rows, column):
    """The rows that have a value in the column."""
    steps = read_column(rows, "global_step")
    seconds = read_column(rows, "time/elapsed")
    values = read_column(rows, column)
    known = np.isfinite(steps) & np.isfinite(values)
    return Curve(steps[known], seconds[known], values[known])


def last_number(rows, name):
    if not rows:
        return np.nan
    return number(rows[-1].get(name))


def read_eval(path, metric):
    """eval.json -> {sampler: value}; nan where the file does not have the metric."""
    key = "mean" if metric == "return" else metric
    results = json.loads(path.read_text())
    return {sampler: number(result.get(key)) for sampler, result in results.items()}


def reached_the_end(settings, total_steps):
    """Whether the log reaches the last whole iteration. A copied run may lack eval.json."""
    if not settings:
        return False
    iteration = settings["num_envs"] * settings["num_steps"]
    return bool(total_steps > settings["total_timesteps"] - iteration)


def guess_algorithm(settings):
    """The algorithm that has such settings, for folders with other names."""
    if "gamma_denoise" in settings:
        return "dppo"
    if "flow_steps" in settings:
        return "fpo"
    if "diffusion_steps" in settings:
        return "trudi"
    if "clip_coef" in settings:
        return "ppo"
    return "reppo"


def display_name(label, settings):
    """Name of a folder of runs. trudi_kl0.2 is a variant of TruDi: "TruDi kl 0.2"."""
    label = re.sub("_(continuous|maniskill)$", "", label)
    base, _, variant = label.partition("_")
    if base in NAMES and label not in NAMES:
        spaced = re.sub("(?<=[a-z])(?=-?[0-9])", " ", variant)
        return f"{NAMES[base]} {spaced}"
    if settings and label not in NAMES:
        label = guess_algorithm(settings)
    if label == "trudi" and settings.get("trust_region") == "none":
        label = "dime"
    if label == "ppo" and settings.get("objective") in NAMES:
        label = settings["objective"]
    return NAMES.get(label, label)


def shown_algorithm(label, settings, column):
    name = display_name(label, settings)
    if column in TRAINING_RETURNS:
        name += ", training episodes"
    return name


def read_folder(folder, metric=""):
    """The run of a folder, or None if its metrics.csv is something else."""
    settings = read_settings(folder / "args.json")
    rows = read_log(folder / "metrics.csv")
    name, _, seed = folder.name.rpartition("_")
    env = settings.get("env_id") or name
    suite = suite_of(env, settings)
    measure = measure_of(suite, metric)
    column = value_column(rows, measure.metric)
    if rows and not column:
        return None
    curve = read_curve(rows, column)
    total_steps = last_number(rows, "global_step")
    other_finals = {}
    if (folder / "eval.json").exists():
        ended = True
        finals = read_eval(folder / "eval.json", measure.metric)
        own_sampler = settings.get("eval_sampler") or next(iter(finals))
        final = finals.pop(own_sampler)
        other_finals = {sampler: value for sampler, value in finals.items() if np.isfinite(value)}
    else:
        ended = reached_the_end(settings, total_steps)
        final = curve.values[-1] if len(curve.values) else measure.floor
    return Run(
        path=folder,
        env=env,
        algorithm=shown_algorithm(folder.parent.name, settings, column),
        seed=str(settings.get("seed", seed)),
        suite=suite,
        measure=measure,
        settings=settings,
        curve=curve,
        total_steps=total_steps,
        total_seconds=last_number(rows, "time/elapsed"),
        final=final,
        other_finals=other_finals,
        ended=ended,
    )


def read_csv(path, metric=""):
    """The run of a single file `<algorithm>/<env>_<seed>.csv`, or None if it is something else."""
    rows = read_log(path)
    env, _, seed = path.stem.rpartition("_")
    suite = suite_of(env, {})
    measure = measure_of(suite, metric)
    column = value_column(rows, measure.metric)
    if rows and not column:
        return None
    curve = read_curve(rows, column)
    return Run(
        path=path,
        env=env,
        algorithm=shown_algorithm(path.parent.name, {}, column),
        seed=seed,
        suite=suite,
        measure=measure,
        settings={},
        curve=curve,
        total_steps=last_number(rows, "global_step"),
        total_seconds=last_number(rows, "time/elapsed"),
        final=curve.values[-1] if len(curve.values) else np.nan,
        other_finals={},
        ended=None,
    )


def find_runs(root, metric):
    """All runs at or below a path, folders first."""
    files = sorted(root.rglob("*")) if root.is_dir() else [root]
    folders = set()
    tables = []
    for file in files:
        if file.name in ("metrics.csv", "args.json", "output.txt"):
            folders.add(file.parent)
        elif file.suffix == ".csv":
            tables.append(file)
    runs = [read_folder(folder, metric) for folder in sorted(folders)]
    runs += [read_csv(table, metric) for table in tables]
    return [run for run in runs if run is not None]


def differing_settings(runs):
    """Settings that should be equal within a group and are not."""
    first = runs[0].settings
    differing = set()
    for run in runs:
        for name in set(run.settings) & set(first) - FREE_SETTINGS:
            if run.settings[name] != first[name]:
                differing.add(name)
    return sorted(differing)


def pace(run):
    """Seconds per step, or nan."""
    if not np.isfinite(run.total_steps) or run.total_steps == 0:
        return np.nan
    return run.total_seconds / run.total_steps


def time_by_the_fastest(runs):
    """Scale the seconds of equal work to the pace of the fastest run that ended."""
    if differing_settings(runs):
        return  # the work per step may differ too
    paces = [pace(run) for run in runs if run.ended and np.isfinite(pace(run))]
    if not paces:
        return
    fastest = min(paces)
    for run in runs:
        if np.isfinite(pace(run)):
            run.curve = run.curve._replace(seconds=run.curve.seconds * (fastest / pace(run)))
            run.total_seconds = run.total_steps * fastest


def group_order(key):
    """Sorts by task, then known algorithms first, then numbers in names by their value."""
    env, name = key
    rank = len(COLORS)
    for index, known in enumerate(COLORS):
        if name == known or name.startswith(known + " "):
            rank = index
            break
    parts = re.findall(r"[\d.]*\d|\D+", name)
    numbers = [float(part) if part[0].isdigit() else 0 for part in parts]
    return env, rank, numbers, name


def load(paths, metric=""):
    """{(env, algorithm): runs}, in the order in which they are shown."""
    found = {}
    for root in map(Path, paths):
        if not root.exists():
            stop(f"{root} does not exist")
        for run in find_runs(root, metric):
            found[run.path.resolve()] = run
    if not found:
        stop(f"no runs in {', '.join(map(str, paths))}: looking for metrics.csv")
    groups = {}
    for run in found.values():
        groups.setdefault((run.env, run.algorithm), []).append(run)
    for runs in groups.values():
        time_by_the_fastest(runs)
    return {key: groups[key] for key in sorted(groups, key=group_order)}


# === What is compared ===
def tasks_of(groups):
    return sorted({env for env, _ in groups})


def algorithms_of(groups):
    """Names in the order in which they are shown."""
    return list(dict.fromkeys(name for _, name in groups))


def suites_of(groups):
    return sorted({runs[0].suite for runs in groups.values()})


def common_tasks(groups, names, tasks):
    return [env for env in tasks if all((env, name) in groups for name in names)]


def wider_comparison(groups, names, tasks):
    """Some of the algorithms and their common tasks, where these are more than all have in common.

    Of several choices the one with the most cells of a table; None if there is none.
    """
    num_common = len(common_tasks(groups, names, tasks))
    num_tasks = {name: len(common_tasks(groups, [name], tasks)) for name in names}
    best = None
    for least in sorted(set(num_tasks.values())):
        some = [name for name in names if num_tasks[name] >= least]
        common = common_tasks(groups, some, tasks)
        if len(some) < 2 or len(common) <= num_common:
            continue
        if best is None or len(some) * len(common) > len(best[0]) * len(best[1]):
            best = some, common
    return best


def aggregates(groups):
    """For each suite that has a common scale: all algorithms on the tasks that all have, then,
    where some have more tasks, these algorithms on their common tasks."""
    result = []
    for suite in suites_of(groups):
        of_suite = {key: runs for key, runs in groups.items() if runs[0].suite == suite}
        measure = next(iter(of_suite.values()))[0].measure
        if measure.scale is None:
            continue
        names = [name for name in algorithms_of(groups) if name in algorithms_of(of_suite)]
        tasks = tasks_of(of_suite)
        common = common_tasks(groups, names, tasks)
        if common:
            result.append(Aggregate(suite, measure, common, names))
        wider = wider_comparison(groups, names, tasks)
        if wider:
            some, common = wider
            result.append(Aggregate(suite, measure, common, some, everyone=False))
    return result


def final_values(groups, aggregate, name):
    """Scaled final values of an algorithm, an array for each task; [] if a task has none."""
    values = []
    for env in aggregate.tasks:
        finals = np.array([run.final for run in groups[env, name]]) / aggregate.measure.scale
        finals = finals[np.isfinite(finals)]
        if len(finals) == 0:
            return []
        values.append(finals)
    return values


def first_end_in_seconds(groups, env):
    """When the first run of any algorithm on the task ended; nan if this is unknown."""
    ends = []
    for (task, _), runs in groups.items():
        if task == env:
            ends += [run.curve.seconds[-1] for run in runs if run.ended and run.has_curve]
    return min(ends) if ends and np.isfinite(ends).all() else np.nan


def values_at_equal_time(groups, aggregate, name):
    """As final_values, but each task at the moment when its first run ended."""
    values = []
    for env in aggregate.tasks:
        moment = first_end_in_seconds(groups, env)
        runs = [run for run in groups[env, name] if run.has_curve]
        timed = all(np.isfinite(run.curve.seconds).all() for run in runs)
        if not runs or not timed or not np.isfinite(moment):
            return []
        early = [on_grid(run, [moment], "seconds") for run in runs]
        values.append(np.concatenate(early) / aggregate.measure.scale)
    return values


def common_span(runs, quantity, size=100):
    """A grid that starts where all runs have begun and ends where the last one ends.

    None if a run has no curve, or no times.
    """
    if not runs:
        return None
    for run in runs:
        if not run.has_curve or not np.isfinite(run.curve.positions(quantity)).all():
            return None
    starts = [run.curve.positions(quantity)[0] for run in runs]
    ends = [run.curve.positions(quantity)[-1] for run in runs]
    return Span(np.linspace(max(starts), max(ends), size), min(ends))


def on_grid(run, grid, quantity):
    """Values of a run on a grid. Beyond its end the last value is kept."""
    return np.interp(grid, run.curve.positions(quantity), run.curve.values)


# === Figures ===
def choose_colors(names):
    """Fixed colors for the known algorithms, a color map for others, such as variants."""
    palette = {}
    others = []
    for name in names:
        base = name.split(", ")[0]
        if base in COLORS:
            palette[name] = COLORS[base]
        else:
            others.append(name)
    for index, name in enumerate(others):
        palette[name] = colormaps["viridis"](index / max(len(others) - 1, 1) * 0.9)
    return palette


def step_axis():
    return Axis("steps", 1, "env steps")


def time_axis(groups):
    """Minutes, or hours where the longest run takes more than three."""
    longest = np.nan
    for runs in groups.values():
        for run in runs:
            if run.has_curve:
                longest = np.fmax(longest, run.curve.seconds[-1])
    if longest > 3 * 3600:
        return Axis("seconds", 3600, "hours of training and evaluation")
    return Axis("seconds", 60, "minutes of training and evaluation")


def counted(count, word):
    """1 seed, 2 seeds."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def plot_line(axes, span, unit, values, color, label):
    """Solid as far as all runs reach, dashed beyond."""
    grid = span.grid / unit
    end = span.first_end / unit
    split = np.searchsorted(grid, end * (1 + 1e-9), "right")
    dashed = slice(max(split - 1, 0), None)
    axes.plot(grid[:split], values[:split], color=color, lw=1.8, label=label)
    axes.plot(grid[dashed], values[dashed], "--", color=color, lw=1.8)


def plot_band(axes, span, unit, tasks, color):
    low, high = bootstrap(tasks)
    axes.fill_between(span.grid / unit, low, high, color=color, alpha=0.2, lw=0)


def plot_group(axes, runs, axis, color, name):
    """The runs of an algorithm on a task: their IQM, and each run or the interval."""
    runs = [run for run in runs if run.has_curve]
    span = common_span(runs, axis.quantity)
    if span is None:
        return
    values = np.stack([on_grid(run, span.grid, axis.quantity) for run in runs])  # (runs, grid)
    label = f"{name}, {counted(len(runs), 'seed')}"
    plot_line(axes, span, axis.unit, iqm(values.T), color, label)
    if len(runs) > FEW_SEEDS:
        plot_band(axes, span, axis.unit, [values], color)
    else:
        for run in runs:
            positions = run.curve.positions(axis.quantity) / axis.unit
            axes.plot(positions, run.curve.values, ".-", ms=3, lw=0.6, alpha=0.5, color=color)
    for run in runs:
        if run.ended is False:
            last = run.curve.positions(axis.quantity)[-1] / axis.unit
            axes.plot(last, run.curve.values[-1], "x", color=color, ms=7)


def plot_task(axes, groups, env, axis, palette):
    for (task, name), runs in groups.items():
        if task == env:
            plot_group(axes, runs, axis, palette[name], name)
    axes.set_title(env, fontsize=10)
    axes.grid(alpha=0.3)


def metric_label(measure):
    return measure.metric.replace("_", " ")


def scaled_label(measure):
    """The metric and its scale, such as "return / 1000"."""
    label = metric_label(measure)
    if measure.scale != 1:
        label += f" / {measure.scale:.0f}"
    return label


def measure_of_task(groups, env):
    for (task, _), runs in groups.items():
        if task == env:
            return runs[0].measure
    raise KeyError(env)


def evaluation_label(groups, env):
    return f"evaluation {metric_label(measure_of_task(groups, env))}"


def draw_task(groups, env, palette):
    """One task over steps and over time."""
    figure = Figure(figsize=(11, 4), layout="constrained", dpi=DPI)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, axis in [(left, step_axis()), (right, time_axis(groups))]:
        plot_task(axes, groups, env, axis, palette)
        axes.set_xlabel(axis.label)
    left.set_ylabel(evaluation_label(groups, env))
    left.legend(frameon=False, fontsize=8)
    return figure


def draw_overview(groups, envs, palette):
    """All tasks over steps, a panel each."""
    columns = min(len(envs), 5 if len(envs) > 6 else 3)
    rows = -(-len(envs) // columns)  # rounded up
    figure = Figure(figsize=(3.6 * columns, 2.8 * rows + 0.5), layout="constrained", dpi=DPI)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(envs) :]:
        axes.axis("off")
    for axes, env in zip(panels, envs, strict=False):
        plot_task(axes, groups, env, step_axis(), palette)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    handles = {}  # an algorithm has one entry, whatever the numbers of its seeds
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label.split(", ")[0]] = handle
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=5, frameon=False
    )
    figure.supxlabel("env steps")
    figure.supylabel(" or ".join(sorted({evaluation_label(groups, env) for env in envs})))
    return figure


def draw_curves(groups, envs, palette):
    """A row for each task: over steps, over time."""
    size = (9, 2.1 * len(envs) + 0.5)
    figure = Figure(figsize=size, layout="constrained", dpi=DPI_OF_CURVES)
    rows = figure.subplots(len(envs), 2, squeeze=False, sharey="row")
    for env, (left, right) in zip(envs, rows, strict=True):
        plot_task(left, groups, env, step_axis(), palette)
        plot_task(right, groups, env, time_axis(groups), palette)
        left.xaxis.set_major_formatter(EngFormatter(sep=""))
        left.set_ylabel(metric_label(measure_of_task(groups, env)))
        left.legend(frameon=False, fontsize=6)
    rows[-1][0].set_xlabel(step_axis().label)
    rows[-1][1].set_xlabel(time_axis(groups).label)
    return figure


def plot_aggregate_curves(axes, groups, aggregate, axis, palette):
    """The IQM of each algorithm with its interval. An algorithm without curves is left out."""
    for name in aggregate.names:
        runs_by_task = []
        for env in aggregate.tasks:
            runs_by_task.append([run for run in groups[env, name] if run.has_curve])
        all_runs = list(itertools.chain(*runs_by_task))
        span = common_span(all_runs, axis.quantity) if all(runs_by_task) else None
        if span is None:
            continue
        values = []
        for runs in runs_by_task:
            curves = np.stack([on_grid(run, span.grid, axis.quantity) for run in runs])
            values.append(curves / aggregate.measure.scale)
        num_tasks = counted(len(aggregate.tasks), "task")
        label = f"{name}, {num_tasks}, {counted(len(all_runs), 'run')}"
        color = palette[name]
        plot_line(axes, span, axis.unit, iqm(np.concatenate(values).T), color, label)
        plot_band(axes, span, axis.unit, values, color)
    axes.set(xlabel=axis.label, ylabel=f"IQM, {scaled_label(aggregate.measure)}")
    axes.grid(alpha=0.3)


def plot_final_values(axes, groups, aggregate, palette):
    """The IQM of the final values with its interval, a row for each algorithm."""
    for row, name in enumerate(aggregate.names):
        tasks = final_values(groups, aggregate, name)
        if not tasks:
            continue
        finals = np.concatenate(tasks)
        low, high = bootstrap(tasks)
        color = palette[name]
        axes.plot([low, high], [row, row], color=color, lw=6, alpha=0.4)
        axes.plot(iqm(finals), row, "|", ms=16, mew=3, color=color)
        if max(len(task) for task in tasks) <= FEW_SEEDS:
            axes.plot(finals, [row - 0.25] * len(finals), ".", color=color)
    axes.set(
        yticks=range(len(aggregate.names)),
        yticklabels=[name.replace(", ", "\n") for name in aggregate.names],
        xlabel=f"final, {scaled_label(aggregate.measure)}",
        title="IQM, runs",
    )
    axes.invert_yaxis()
    axes.grid(alpha=0.3)


def draw_aggregate(groups, aggregate, palette):
    """A suite over steps, over time, and at the end."""
    figure = Figure(figsize=(14, 4), layout="constrained", dpi=DPI)
    by_steps, by_time, at_the_end = figure.subplots(1, 3)
    plot_aggregate_curves(by_steps, groups, aggregate, step_axis(), palette)
    plot_aggregate_curves(by_time, groups, aggregate, time_axis(groups), palette)
    plot_final_values(at_the_end, groups, aggregate, palette)
    if by_steps.lines:
        by_steps.legend(frameon=False, fontsize=8)
    tasks = ", ".join(aggregate.tasks)
    if len(aggregate.tasks) > 6:
        tasks = f"{len(aggregate.tasks)} tasks"
    figure.suptitle(f"{aggregate.suite}: {tasks}", fontsize=10)
    return figure


def has_curves(groups, env):
    for (task, _), runs in groups.items():
        if task == env and any(run.has_curve for run in runs):
            return True
    return False


def fingerprint(groups):
    """A text that changes with any run that is drawn. Figures keep it in their metadata."""
    content = []
    for (env, name), runs in groups.items():
        for run in runs:
            numbers = np.concatenate([*run.curve, [run.final]])
            content.append([env, name, run.seed, [f"{value:.6g}" for value in numbers]])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def figures_of(groups):
    """file name -> function that draws it"""
    palette = choose_colors(algorithms_of(groups))
    envs = [env for env in tasks_of(groups) if has_curves(groups, env)]
    figures = {}
    for env in envs:
        file_name = re.sub("[^A-Za-z0-9.-]", "_", env)
        figures[f"{file_name}.png"] = functools.partial(draw_task, groups, env, palette)
    if len(envs) > 1:
        figures["tasks.png"] = functools.partial(draw_overview, groups, envs, palette)
        figures["curves.png"] = functools.partial(draw_curves, groups, envs, palette)
    for aggregate in aggregates(groups):
        file_name = aggregate.suite.replace(" ", "_")
        if not aggregate.everyone:
            file_name += "_more_tasks"
        figures[f"aggregate_{file_name}.png"] = functools.partial(
            draw_aggregate, groups, aggregate, palette
        )
    return figures


def save_figure(figure, path, groups):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi="figure", metadata={"Runs": fingerprint(groups)})


def draw(groups, folder):
    """Write all figures and return their names."""
    figures = figures_of(groups)
    for name, make_figure in figures.items():
        save_figure(make_figure(), folder / name, groups)
    return list(figures)


# === Tables ===
def show(value):
    return f"{value:.0f}" if abs(value) >= 20 else f"{value:.2f}"


def show_range(numbers, form):
    """One number, or "lowest to highest" where they differ."""
    lowest = form.format(min(numbers))
    if min(numbers) == max(numbers):
        return lowest
    return f"{lowest} to {form.format(max(numbers))}"


def table_line(cells):
    return f"| {' | '.join(cells)} |"


def table_rule(num_columns):
    return "|" + "---|" * num_columns


def show_final(run):
    """The final value of a run. A star marks a run that is not at its end."""
    text = show(run.final) if np.isfinite(run.final) else "none"
    if run.ended is False or text == "none":
        text += "*"
    return text


def show_finals(runs):
    """Each value, or the range of many."""
    if len(runs) <= FEW_SEEDS:
        return ", ".join(show_final(run) for run in runs)
    finals = finite_finals(runs)
    if not finals:
        return "-"
    return f"{show(min(finals))} to {show(max(finals))}"


def show_other_samplers(runs):
    """Mean of the final values under each other sampler."""
    by_sampler = {}
    for run in runs:
        for sampler, value in run.other_finals.items():
            by_sampler.setdefault(sampler, []).append(value)
    if not by_sampler:
        return "-"
    means = [f"{sampler} {show(np.mean(values))}" for sampler, values in by_sampler.items()]
    return ", ".join(means)


def show_ended(runs):
    """How many runs ended; a question mark if a run does not tell."""
    ended = [run.ended for run in runs]
    if None in ended:
        return f"? of {len(runs)}"
    return f"{sum(ended)} of {len(runs)}"


def finite_finals(runs):
    return [run.final for run in runs if np.isfinite(run.final)]


def group_row(env, name, runs):
    steps = [int(run.total_steps) for run in runs if np.isfinite(run.total_steps)]
    finals = finite_finals(runs)
    seconds = [run.total_seconds for run in runs if np.isfinite(run.total_seconds)]
    minutes = [value / 60 for value in seconds]
    cells = [
        env,
        name,
        show_range(steps, "{:,}") if steps else "-",
        show_ended(runs),
        show_finals(runs),
        f"**{show(np.mean(finals))}**" if finals else "-",
        show_other_samplers(runs),
        f"{np.mean(minutes):.0f}" if minutes else "-",
    ]
    return table_line(cells)


def iqm_cells(tasks):
    """The IQM and its interval. A task with one seed cannot vary, so there is no interval then."""
    single = sum(len(task) == 1 for task in tasks)
    if single:
        interval = f"- ({counted(single, 'task')} with one seed)"
    else:
        low, high = bootstrap(tasks)
        interval = f"{low:.3f} to {high:.3f}"
    return [f"**{iqm(np.concatenate(tasks)):.3f}**", interval]


def aggregate_row(groups, aggregate, name):
    tasks = final_values(groups, aggregate, name)
    if not tasks:
        return table_line([name, "-", "-", "-", "-", "-", "-", "a task has no value"])
    early = values_at_equal_time(groups, aggregate, name)
    finals = np.concatenate(tasks)
    cells = [name]
    cells += iqm_cells(tasks)
    cells += [f"{finals.mean():.3f}"]
    cells += iqm_cells(early) if early else ["-", "-"]
    cells += [f"{len(finals)}", show_range([len(task) for task in tasks], "{}")]
    return table_line(cells)


def aggregate_table(groups, aggregate):
    tasks = ", ".join(aggregate.tasks)
    who = "all" if aggregate.everyone else "these"
    titles = [
        "algorithm",
        "IQM at the end",
        "95 % interval",
        "mean",
        "IQM at equal time",
        "95 % interval",
        "runs",
        "seeds per task",
    ]
    label = scaled_label(aggregate.measure)
    lines = [
        f"{aggregate.suite}, {label}, over the tasks that {who} have: {tasks}.",
        "",
        table_line(titles),
        table_rule(len(titles)),
    ]
    for name in aggregate.names:
        lines.append(aggregate_row(groups, aggregate, name))
    return lines


def missing_aggregate_notes(groups):
    """Why suites have no aggregate."""
    present = [aggregate.suite for aggregate in aggregates(groups)]
    notes = []
    for suite in suites_of(groups):
        if suite in present:
            continue
        reason = "no task is common to all" if suite in MEASURES else "no common scale"
        notes.append(f"No aggregate for {suite}: {reason}")
    return notes


def group_notes(env, name, runs):
    """Runs that are not at their end, and warnings."""
    notes = []
    for run in runs:
        if run.ended is not False:
            continue
        at = "before its first row"
        if np.isfinite(run.total_steps):
            at = f"at step {run.total_steps:,.0f}"
        counts = "has no value and counts nowhere"
        if np.isfinite(run.final):
            counts = f"counts with {show(run.final)}"
        notes.append(f"* Not at its end: {name} on {env}, seed {run.seed}, {at}; {counts}")
    differing = differing_settings(runs)
    if differing:
        notes.append(f"Warning: the runs of {name} on {env} differ in {', '.join(differing)}")
    if len({run.seed for run in runs}) < len(runs):
        notes.append(f"Warning: {name} on {env} has several runs of the same seed")
    return notes


def report(groups, with_aggregates=True):
    """Markdown: a row for each algorithm and task, the aggregates, and notes."""
    titles = [
        "env",
        "algorithm",
        "steps",
        "seeds that ended",
        "each seed",
        "mean",
        "other samplers",
        "minutes, fastest run",
    ]
    lines = [table_line(titles), table_rule(len(titles))]
    notes = []
    for (env, name), runs in groups.items():
        lines.append(group_row(env, name, runs))
    if with_aggregates:
        for aggregate in aggregates(groups):
            lines += ["", *aggregate_table(groups, aggregate)]
        notes += missing_aggregate_notes(groups)
    for (env, name), runs in groups.items():
        notes += group_notes(env, name, runs)
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


def mean_cell(runs):
    """Mean of the final values. A star marks a mean with a run that is not at its end."""
    finals = finite_finals(runs)
    text = show(np.mean(finals)) if finals else "-"
    if any(run.ended is False for run in runs):
        text += "*"
    return text


def brief(groups):
    """Markdown: a row for each task, a column for each algorithm, and the aggregates."""
    names = algorithms_of(groups)
    lines = [table_line(["task", *names]), table_rule(1 + len(names))]
    for env in tasks_of(groups):
        cells = [mean_cell(groups.get((env, name), [])) for name in names]
        lines.append(table_line([env, *cells]))
    for aggregate in aggregates(groups):
        if len(aggregate.tasks) > 1:
            lines += brief_aggregate(groups, aggregate, names)
    counts = []
    for name in names:
        runs = [run for (_, owner), group in groups.items() if owner == name for run in group]
        counts.append(str(len(finite_finals(runs))))
    lines.append(table_line(["runs", *counts]))
    unfinished = sum(run.ended is False for runs in groups.values() for run in runs)
    if unfinished:
        runs = counted(unfinished, "run")
        lines += ["", f"* Not at their end: {runs}, counted with the last value or 0."]
    return "\n".join(lines)


def brief_aggregate(groups, aggregate, names):
    """Two rows: the IQM over the tasks of a suite, and its interval."""
    means = [f"{aggregate.suite}: IQM of {len(aggregate.tasks)} tasks"]
    intervals = ["95 % interval"]
    for name in names:
        tasks = []
        if name in aggregate.names:
            tasks = final_values(groups, aggregate, name)
        mean, interval = iqm_cells(tasks) if tasks else ("-", "-")
        means.append(mean)
        intervals.append(interval)
    return [table_line(means), table_line(intervals)]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", help="folders of runs, or CSV files")
    parser.add_argument("--out", type=Path, help="folder of the figures (default: tables only)")
    parser.add_argument(
        "--table",
        choices=("full", "runs", "brief"),
        default="full",
        help="full: a row for each algorithm and task, then the aggregates; "
        "runs: without the aggregates; brief: tasks by algorithms",
    )
    parser.add_argument(
        "--metric",
        default="",
        help="such as return or success_at_end (default: success_once for ManiSkill, else return)",
    )
    args = parser.parse_args(argv)
    groups = load(args.paths, args.metric)
    if args.table == "brief":
        print(brief(groups))
    else:
        print(report(groups, with_aggregates=args.table == "full"))
    if args.out:
        print(f"\nwritten to {args.out}: {', '.join(draw(groups, args.out))}")


if __name__ == "__main__":
    main()
