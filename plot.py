"""Tables and figures from folders of runs: each task, and the interquartile mean over tasks and seeds.

    python plot.py results/laptop --out results/figures
    python plot.py results/laptop/trudi results/laptop/reppo                                  # the tables alone
    python plot.py results/ablation-sampler --table brief                                     # one small table

A run is a folder with metrics.csv (and args.json, eval.json, where they are), at any depth, or a CSV with `global_step`
and a column of returns. Its algorithm is the folder above it: <algorithm>/<env>_<seed>. Written: <env>.png for each
task, tasks.png with all of them, aggregate_<suite>.png; the tables go to the terminal, as Markdown.

What is counted, and how:
- The final value of a run is eval.json's mean under the run's own sampler: the last policy, not the best one. Without
  eval.json it is the last evaluation. A run that crashed or is not at its end counts with it too, and is listed; one
  without any evaluation counts with 0 where nothing is lower (DMC, success), else it is listed only.
- Runs of an algorithm on a task do the same work per step, so where one took longer it was another machine or other
  load: the times of all are counted at the pace of the fastest. Compare algorithms only by runs of one kind of machine.
- Evaluations lie at different steps (and times) in different runs: they are interpolated linearly onto one grid. A run
  that ended before the others keeps its last value; from where the first run of a group ended the line is dashed.
- The aggregate is the IQM (mean of the middle half of all runs x tasks) with a 95 % stratified bootstrap interval: runs
  are resampled within each task. It takes the tasks that all algorithms have, a suite at a time, DMC returns / 1000.
  "At the end" is after equal steps; "at equal time" is when the first run of any algorithm on the task came to its end.
- Up to five seeds every run is drawn: the bootstrap's nominal 95 % covers only 80 to 90 % then.
"""

import argparse
import csv
import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

NAMES = {"trudi": "TruDi", "reppo": "REPPO", "ppo": "PPO", "dime": "DIME (on-policy)", "spo": "SPO"}
NAMES |= {"dppo": "DPPO", "fpo": "FPO", "cleanrl_ppo": "CleanRL's PPO"}
COLOURS = dict(zip(NAMES.values(), "blue orange green red purple brown pink gray".split(), strict=True))
COLOURS = {name: f"tab:{colour}" for name, colour in COLOURS.items()}
SCALES = {"DMC": 1000.0, "humanoid": 1.0, "ManiSkill": 1.0}  # suites whose tasks share a scale, and that scale
SCALES |= {"DMC by Playground": 1000.0, "humanoid by Playground": 1.0}  # other simulations than EnvPool's: never mixed
FLOOR = {"DMC": 0.0, "DMC by Playground": 0.0, "ManiSkill": 0.0}  # what a run counts with that came to no evaluation
METRICS = {"ManiSkill": "success_once"}  # what is plotted where it is not the return
DMC = r"(Acrobot|BallInCup|Cartpole|Cheetah|Finger|Fish|Hopper|Humanoid|Pendulum|Reacher|Walker|Swimmer|PointMass)[A-Z]"
RETURNS = "charts/episode_return", "charts/episodic_return", "episode_return", "return"  # of training episodes
OTHER = {"seed", "run_dir", "git", "resume", "python", "torch", "numpy", "gymnasium", "envpool", "mujoco", "mani-skill"}
OTHER |= {"playground", "mujoco-mjx", "jax"}
OTHER |= {"torch_threads", "track", "capture_video", "evaluate", "backend", "compile"}  # may differ within a group
FEW = 5  # seeds up to which each run is drawn


@dataclasses.dataclass
class Run:
    path: Path
    env: str
    algorithm: str
    seed: str
    suite: str
    settings: dict  # of args.json
    points: np.ndarray  # (3, P): steps, seconds, values of its evaluations
    budget: tuple  # steps and seconds at the end of the log
    final: float  # without any evaluation FLOOR, or nan
    others: dict  # final values under the other samplers
    ended: bool | None  # it came to its end; None: a bare CSV does not tell


def iqm(x):
    """Interquartile mean over the last axis: the mean without the lowest and the highest quarter, rounded down."""
    x = np.sort(x, -1)
    cut = x.shape[-1] // 4
    return x[..., cut : x.shape[-1] - cut].mean(-1)


def bootstrap(tasks, samples=2000, level=0.95, seed=0):
    """tasks: an array (runs, ...) each -> lower and upper end of the interval of the IQM over all of them. Stratified:
    each task's runs are drawn anew, with replacement, from that task's runs."""
    rng = np.random.default_rng(seed)
    draws = [rng.integers(len(x), size=(samples, len(x))) for x in tasks]
    shape, columns = tasks[0].shape[1:], [x.reshape(len(x), -1).T for x in tasks]
    ends = [50 * (1 - level), 50 * (1 + level)]
    points = (np.concatenate([c[i][d] for c, d in zip(columns, draws, strict=True)], 1) for i in range(len(columns[0])))
    return np.array([np.percentile(iqm(x), ends) for x in points]).T.reshape(2, *shape)


def display_name(label, settings):
    """The folder's name, or where that says nothing what args.json tells; trudi_kl0.2 is a variant of TruDi"""
    label = re.sub("_(continuous|maniskill)$", "", label)
    base, _, variant = label.partition("_")
    if label in NAMES or base not in NAMES:
        if label not in NAMES and settings:  # copied from elsewhere
            label = "trudi" if "diffusion_steps" in settings else "ppo" if "clip_coef" in settings else "reppo"
        if label == "trudi" and settings.get("trust_region") == "none":
            label = "dime"
        return NAMES.get(settings.get("objective") if label == "ppo" else label, NAMES.get(label, label))
    return f"{NAMES[base]} {re.sub(r'(?<=[a-z])(?=[0-9])', ' ', variant)}"


def counted(n, word):
    return f"{n} {word}{'s' * (n != 1)}"


def number(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return np.nan


def read_run(path, metric=None):
    """A folder or a CSV -> Run, or None if it is something else"""
    folder = path if path.is_dir() else path.parent
    table = path / "metrics.csv" if path.is_dir() else path
    own = path.is_dir() or path.name == "metrics.csv"  # else the folder's other files belong to other runs
    if own and (folder / "args.json").exists():
        settings = json.loads((folder / "args.json").read_text())
    else:
        settings = {}
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    name, _, seed = (folder.name if own else path.stem).rpartition("_")
    env = settings.get("env_id") or name
    suite = settings.get("suite") or ("DMC" if re.match(DMC, env) else "other")
    suite += " by Playground" * (settings.get("backend") == "playground")
    metric = metric or METRICS.get(suite, "return")
    keys = [k for k in (f"eval/{metric}", metric, *RETURNS) if rows and k in rows[0]]
    if rows and ("global_step" not in rows[0] or not keys):
        return None
    columns = ["global_step", "time/elapsed", *keys[:1]]
    points = np.array([[number(r.get(k)) for k in columns] for r in rows]).T
    budget = (points[0, -1], points[1, -1]) if len(rows) else (np.nan, np.nan)
    points = points[:, np.isfinite(points[-1]) & np.isfinite(points[0])] if len(rows) else np.empty((3, 0))
    final, others = points[2, -1] if points.size else FLOOR.get(suite, np.nan) if own else np.nan, {}
    if ended := own and (folder / "eval.json").exists():
        table = json.loads((folder / "eval.json").read_text())
        table = {s: number(t.get("mean" if metric == "return" else metric)) for s, t in table.items()}
        final = table.pop(settings.get("eval_sampler", next(iter(table))))
        others = {s: v for s, v in table.items() if np.isfinite(v)}
    algorithm = display_name(folder.parent.name if own else folder.name, settings)
    if keys and keys[0] in RETURNS:
        algorithm += ", training episodes"
    seed = str(settings.get("seed", seed))
    if settings and not ended:  # a copy may lack eval.json, but its log reaches the last whole iteration
        ended = budget[0] > settings["total_timesteps"] - settings["num_envs"] * settings["num_steps"]
    ended = bool(ended) if own else None
    return Run(path, env, algorithm, seed, suite, settings, points, budget, final, others, ended)


def load(paths, metric=None):
    """-> {(env, algorithm): runs}, in the order in which they are shown"""
    found = {}
    for root in map(Path, paths):
        if not root.exists():
            stop(f"{root} does not exist")
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        folders = {f.parent for f in files if f.name in ("metrics.csv", "args.json", "output.txt")}
        for path in sorted(folders) + [f for f in files if f.suffix == ".csv" and f.name != "metrics.csv"]:
            run = read_run(path, metric)
            if run:
                found[path.resolve()] = run
    groups = {}
    for run in found.values():
        groups.setdefault((run.env, run.algorithm), []).append(run)
    if not groups:
        stop(f"no runs in {', '.join(map(str, paths))}: looking for metrics.csv")
    for runs in groups.values():
        same_clock(runs)
    known = list(COLOURS)

    def order(key):  # fixed names first; numbers in names by their value
        name = key[1]
        base = next((i for i, k in enumerate(known) if name == k or name.startswith(k + " ")), len(known))
        return key[0], base, [float(x) if x[0].isdigit() else 0 for x in re.findall(r"[\d.]*\d|\D+", name)], name

    return {k: groups[k] for k in sorted(groups, key=order)}


def differing(runs):
    """-> settings that should be equal within a group and are not"""
    first = runs[0].settings
    return sorted({k for r in runs for k in set(r.settings) & set(first) - OTHER if r.settings[k] != first[k]})


def same_clock(runs):
    """Scales the seconds of equal work to the pace of the fastest run; where settings differ the work may, too."""
    paces = {id(r): r.budget[1] / r.budget[0] for r in runs if np.isfinite(r.budget).all()}
    fastest = min([paces[id(r)] for r in runs if r.ended and id(r) in paces], default=None)
    for run in [] if fastest is None or differing(runs) else runs:
        if id(run) in paces:
            run.points[1] *= fastest / paces[id(run)]
            run.budget = run.budget[0], run.budget[0] * fastest


def stop(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def colours(names):
    """Fixed for the algorithms, a colour map for what has no name of its own, such as the variants of an ablation"""
    fixed = {n: COLOURS[n.split(", ")[0]] for n in names if n.split(", ")[0] in COLOURS}
    others = [n for n in names if n not in fixed]
    return fixed | {n: colormaps["viridis"](i / max(len(others) - 1, 1) * 0.9) for i, n in enumerate(others)}


def common_grid(runs, axis, size=100):
    """axis 0: steps, 1: seconds -> grid from the last first evaluation to the last one of all, and where the first
    run ended; None if some have no curve"""
    if not runs or any(not r.points.size or not np.isfinite(r.points[axis]).all() for r in runs):
        return None, None
    ends = [r.points[axis, -1] for r in runs]
    return np.linspace(max(r.points[axis, 0] for r in runs), max(ends), size), min(ends)


def on_grid(run, grid, axis):
    return np.interp(grid, run.points[axis], run.points[2])  # beyond its end: the last value


def line(axes, grid, end, values, colour, label):
    """Solid as far as all runs reach, dashed beyond."""
    split = np.searchsorted(grid, end * (1 + 1e-9), "right")
    axes.plot(grid[:split], values[:split], color=colour, lw=1.8, label=label)
    axes.plot(grid[max(split - 1, 0) :], values[max(split - 1, 0) :], "--", color=colour, lw=1.8)


def draw_task(axes, groups, env, axis, unit, palette):
    for name, runs in ((n, r) for (e, n), r in groups.items() if e == env):
        runs = [r for r in runs if r.points.size]
        grid, end = common_grid(runs, axis)
        if grid is None:
            continue
        values = np.stack([on_grid(r, grid, axis) for r in runs])
        line(axes, grid / unit, end / unit, iqm(values.T), palette[name], f"{name}, {counted(len(runs), 'seed')}")
        for run in runs if len(runs) <= FEW else []:
            axes.plot(run.points[axis] / unit, run.points[2], ".-", ms=3, lw=0.6, alpha=0.5, color=palette[name])
        if len(runs) > FEW:
            axes.fill_between(grid / unit, *bootstrap([values]), color=palette[name], alpha=0.2, lw=0)
        for run in runs:
            if run.ended is False:
                axes.plot(run.points[axis, -1] / unit, run.points[2, -1], "x", color=palette[name], ms=7)
    axes.set_title(env, fontsize=10)
    axes.grid(alpha=0.3)


def units(groups):
    """-> (axis, divisor, label) for steps and time"""
    slowest = max((r.points[1, -1] for runs in groups.values() for r in runs if r.points.size), default=np.nan)
    time = (3600, "hours") if slowest > 3 * 3600 else (60, "minutes")
    return (0, 1, "env steps"), (1, time[0], f"{time[1]} of training and evaluation")


def draw(groups, folder):
    """-> the names of the files it wrote"""
    folder.mkdir(parents=True, exist_ok=True)
    envs, palette = sorted({env for env, _ in groups}), colours(list(dict.fromkeys(n for _, n in groups)))
    suites = {env: groups[env, name][0].suite for env, name in groups}
    label = {env: "evaluation " + METRICS.get(suites[env], "return").replace("_", " ") for env in envs}
    written, with_curves = (
        [],
        [e for e in envs if any(r.points.size for (x, _), g in groups.items() if x == e for r in g)],
    )

    def save(figure, name):
        figure.savefig(folder / name, dpi=110)
        written.append(name)

    for env in with_curves:
        figure = Figure(figsize=(11, 4), layout="constrained")
        for axes, (axis, unit, text) in zip(figure.subplots(1, 2, sharey=True), units(groups), strict=True):
            draw_task(axes, groups, env, axis, unit, palette)
            axes.set_xlabel(text)
        figure.axes[0].set_ylabel(label[env])
        figure.axes[0].legend(frameon=False, fontsize=8)
        save(figure, f"{re.sub('[^A-Za-z0-9.-]', '_', env)}.png")
    if len(with_curves) > 1:
        wide = min(len(with_curves), 5 if len(with_curves) > 6 else 3)
        tall = -(-len(with_curves) // wide)
        figure = Figure(figsize=(3.6 * wide, 2.8 * tall + 0.5), layout="constrained")
        grid = figure.subplots(tall, wide, squeeze=False).ravel()
        for axes in grid[len(with_curves) :]:
            axes.axis("off")
        for axes, env in zip(grid, with_curves, strict=False):
            draw_task(axes, groups, env, 0, 1, palette)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        handles = {n.split(", ")[0]: h for a in grid for h, n in zip(*a.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=5, frameon=False)
        figure.supxlabel("env steps")
        figure.supylabel(" or ".join(sorted({label[env] for env in with_curves})))
        save(figure, "tasks.png")
    for suite, (tasks, names) in aggregates(groups).items():
        figure = Figure(figsize=(14, 4), layout="constrained")
        *curves, points = figure.subplots(1, 3)
        for axes, (axis, unit, text) in zip(curves, units(groups), strict=True):
            for name in names:
                runs = [[r for r in groups[env, name] if r.points.size] for env in tasks]
                grid, end = common_grid(sum(runs, []), axis) if all(runs) else (None, None)
                if grid is None:
                    continue
                values = [np.stack([on_grid(r, grid, axis) for r in rs]) / SCALES[suite] for rs in runs]
                text_seeds = f"{name}, {counted(len(tasks), 'task')}, {counted(sum(map(len, runs)), 'run')}"
                line(axes, grid / unit, end / unit, iqm(np.concatenate(values).T), palette[name], text_seeds)
                axes.fill_between(grid / unit, *bootstrap(values), color=palette[name], alpha=0.2, lw=0)
            axes.set(xlabel=text, ylabel=f"IQM, {scale_text(suite)}")
            axes.grid(alpha=0.3)
        for i, name in enumerate(names):
            finals = final_values(groups, tasks, name, suite)
            if finals:
                low, high = bootstrap(finals)
                points.plot([low, high], [i, i], color=palette[name], lw=6, alpha=0.4)
                points.plot(iqm(np.concatenate(finals)), i, "|", ms=16, mew=3, color=palette[name])
                if max(map(len, finals)) <= FEW:
                    points.plot(np.concatenate(finals), [i - 0.25] * sum(map(len, finals)), ".", color=palette[name])
        points.set(
            yticks=range(len(names)),
            yticklabels=[n.replace(", ", "\n") for n in names],
            xlabel=f"final, {scale_text(suite)}",
            title="IQM, runs",
        )
        points.invert_yaxis()
        points.grid(alpha=0.3)
        if curves[0].lines:
            curves[0].legend(frameon=False, fontsize=8)
        figure.suptitle(f"{suite}: {', '.join(tasks) if len(tasks) <= 6 else f'{len(tasks)} tasks'}", fontsize=10)
        save(figure, f"aggregate_{suite.replace(' ', '_')}.png")
    return written


def scale_text(suite):
    return METRICS.get(suite, "return").replace("_", " ") + (f" / {SCALES[suite]:.0f}" if SCALES[suite] != 1 else "")


def aggregates(groups):
    """-> {suite: (the tasks that all its algorithms have, its algorithms)}"""
    result = {}
    for suite in sorted({runs[0].suite for runs in groups.values()} & set(SCALES)):
        keys = [k for k, runs in groups.items() if runs[0].suite == suite]
        names = sorted({n for _, n in keys}, key=[n for _, n in groups].index)
        tasks = [e for e in sorted({e for e, _ in keys}) if all((e, n) in groups for n in names)]
        if tasks:
            result[suite] = tasks, names
    return result


def final_values(groups, tasks, name, suite):
    """-> the normalised final values of each task; [] if a task has none"""
    values = [np.array([r.final for r in groups[env, name]]) / SCALES[suite] for env in tasks]
    values = [x[np.isfinite(x)] for x in values]
    return values if all(map(len, values)) else []


def values_at_equal_time(groups, tasks, name, suite):
    """-> as final_values, each task at the moment when the first of all algorithms' runs on it came to its end"""
    values = []
    for env in tasks:
        ends = [r.points[1, -1] for (e, _), g in groups.items() if e == env for r in g if r.points.size and r.ended]
        runs = [r for r in groups[env, name] if r.points.size]
        if not ends or not runs or not np.isfinite(ends + [x for r in runs for x in r.points[1]]).all():
            return []
        values.append(np.concatenate([on_grid(r, [min(ends)], 1) for r in runs]) / SCALES[suite])
    return values


def show(x):
    return f"{x:.0f}" if abs(x) >= 20 else f"{x:.2f}"


def row(env, name, runs):
    finals, done = [r.final for r in runs if np.isfinite(r.final)], [r.ended for r in runs]
    each = ", ".join(show(r.final) + "*" * (r.ended is False) if np.isfinite(r.final) else "none*" for r in runs)
    if len(runs) > FEW:
        each = f"{show(min(finals))} to {show(max(finals))}" if finals else "-"
    samplers = dict.fromkeys(s for r in runs for s in r.others)
    other = ", ".join(f"{s} {show(np.mean([r.others[s] for r in runs if s in r.others]))}" for s in samplers) or "-"
    steps = {int(r.budget[0]) for r in runs if np.isfinite(r.budget[0])}
    minutes = [r.budget[1] / 60 for r in runs if np.isfinite(r.budget[1])]
    cells = [env, name, f"{min(steps):,}" + (f" to {max(steps):,}" if len(steps) > 1 else "") if steps else "-"]
    cells += [
        f"{sum(map(bool, done))} of {len(runs)}" if None not in done else f"? of {len(runs)}",
        each,
        f"**{show(np.mean(finals))}**" if finals else "-",
    ]
    return f"| {' | '.join([*cells, other, f'{np.mean(minutes):.0f}' if minutes else '-'])} |"


def with_interval(tasks):
    low, high = bootstrap(tasks)
    lone = sum(len(x) == 1 for x in tasks)  # they cannot vary, so an interval would be too narrow
    interval = f"- ({counted(lone, 'task')} with one seed)" if lone else f"{low:.3f} to {high:.3f}"
    return f"**{iqm(np.concatenate(tasks)):.3f}** | {interval}"


def report(groups, aggregate=True):
    """-> Markdown"""
    header = "env | algorithm | steps | seeds that ended | each seed | mean | other samplers | minutes, fastest run"
    lines = [f"| {header} |", "|" + "---|" * 8] + [row(*key, runs) for key, runs in groups.items()]
    for suite, (tasks, names) in aggregates(groups).items() if aggregate else ():
        lines += ["", f"{suite}, {scale_text(suite)}, over the tasks that all have: {', '.join(tasks)}.", ""]
        interval, counts = "95 % interval", "runs | seeds per task"
        titles = f"algorithm | IQM at the end | {interval} | mean | IQM at equal time | {interval} | {counts}"
        lines += [f"| {titles} |", "|" + "---|" * 8]
        for name in names:
            values = final_values(groups, tasks, name, suite)
            if not values:
                lines.append(f"| {name} | - | - | - | - | - | - | a task has no value |")
                continue
            x, counts = np.concatenate(values), sorted(map(len, values))
            seeds = f"{counts[0]}" + (f" to {counts[-1]}" if counts[-1] > counts[0] else "")
            early = values_at_equal_time(groups, tasks, name, suite)
            early = with_interval(early) if early else "- | -"
            lines.append(f"| {name} | {with_interval(values)} | {x.mean():.3f} | {early} | {len(x)} | {seeds} |")
    lone = {runs[0].suite for runs in groups.values()} - set(aggregates(groups)) if aggregate else ()
    notes = [
        f"No aggregate for {s}: " + ("no task is common to all" if s in SCALES else "no common scale") for s in lone
    ]
    for (env, name), runs in groups.items():
        for run in runs:
            if run.ended is False:
                at = f"at step {run.budget[0]:,.0f}" if np.isfinite(run.budget[0]) else "before its first row"
                value = (
                    f"counts with {show(run.final)}" if np.isfinite(run.final) else "has no value and counts nowhere"
                )
                notes.append(f"* Not at its end: {name} on {env}, seed {run.seed}, {at}; {value}")
        if changed := differing(runs):
            notes.append(f"Warning: the runs of {name} on {env} differ in {', '.join(changed)}")
        if len({r.seed for r in runs}) < len(runs):
            notes.append(f"Warning: {name} on {env} has several runs of the same seed")
    return "\n".join(lines + ([""] + notes if notes else []))


def brief(groups):
    """-> Markdown: a row an algorithm, a column a task with the mean over its runs, then the aggregate of each suite"""
    envs, names = list(dict.fromkeys(e for e, _ in groups)), list(dict.fromkeys(n for _, n in groups))
    suites = {s: tasks for s, (tasks, _) in aggregates(groups).items() if len(tasks) > 1}
    titles = ["algorithm", *envs, *(f"{s}: IQM of {len(tasks)} tasks | 95 % interval" for s, tasks in suites.items())]
    lines = [f"| {' | '.join([*titles, 'runs'])} |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    for name in names:
        runs = {env: groups.get((env, name), []) for env in envs}
        finals = {env: [r.final for r in rs if np.isfinite(r.final)] for env, rs in runs.items()}
        stars = {env: "*" * any(r.ended is False for r in rs) for env, rs in runs.items()}
        cells = [(show(np.mean(x)) if x else "-") + stars[env] for env, x in finals.items()]
        for suite, tasks in suites.items():
            values = final_values(groups, tasks, name, suite) if all(finals[env] for env in tasks) else []
            cells.append(with_interval(values) if values else "- | -")
        lines.append(f"| {' | '.join([name, *cells, str(sum(map(len, finals.values())))])} |")
    if late := [r for rs in groups.values() for r in rs if r.ended is False]:
        lines += ["", f"* Not at their end: {counted(len(late), 'run')}, counted with the last value or 0."]
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="folders of runs, or CSVs")
    parser.add_argument("--out", type=Path, help="folder of the figures (default: tables only)")
    tables = "full: a row an algorithm and task, then aggregates; runs: without aggregates; brief: algorithms by tasks"
    parser.add_argument("--table", choices=("full", "runs", "brief"), default="full", help=tables)
    parser.add_argument(
        "--metric", help="such as return or success_at_end (default: success_once for ManiSkill, else return)"
    )
    args = parser.parse_args(argv)
    if args.metric:
        METRICS.update(dict.fromkeys(["other", "HumanoidBench", *SCALES], args.metric))
        SCALES.update({} if args.metric == "return" else dict.fromkeys(SCALES, 1.0))
    groups = load(args.paths)
    print(brief(groups) if args.table == "brief" else report(groups, args.table == "full"))
    if args.out:
        print(f"\nwritten to {args.out}: {', '.join(draw(groups, args.out))}")


if __name__ == "__main__":
    main()
