"""tools/plot.py: statistics, runs made up here, and the committed runs."""

import ast
import csv
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools import plot

ROOT = Path(__file__).parents[1]


# === statistics ===
def brute_iqm(values):
    values = sorted(values)
    cut = int(0.25 * len(values))
    middle = values[cut : len(values) - cut]
    return sum(middle) / len(middle)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 12, 50])
def test_iqm(n):
    values = np.random.default_rng(n).normal(size=(6, n)) ** 3
    np.testing.assert_allclose(plot.iqm(values), [brute_iqm(row) for row in values], rtol=1e-12)
    np.testing.assert_allclose(plot.iqm(values[0]), brute_iqm(values[0]), rtol=1e-12)


@pytest.mark.parametrize("n", [1, 3, 4, 18, 37])
def test_iqm_is_scipys_trimmed_mean(n):
    trim_mean = pytest.importorskip("scipy.stats").trim_mean
    values = np.random.default_rng(n).normal(size=(6, n))
    np.testing.assert_allclose(plot.iqm(values), trim_mean(values, 0.25, axis=1), rtol=1e-12)


def test_iqm_ignores_a_quarter_of_outliers():
    assert plot.iqm(np.array([-1e9, 1, 2, 3, 4, 5, 6, 1e9])) == 3.5


def test_bootstrap_against_all_resamples():
    """Two tasks with three runs each: all 27 x 27 resamples can be written down."""
    tasks = [np.array([0.1, 0.5, 0.6]), np.array([0.2, 0.9, 1.0])]
    draws = [list(itertools.product(task, repeat=3)) for task in tasks]
    values = [brute_iqm([*a, *b]) for a in draws[0] for b in draws[1]]
    low, high = plot.bootstrap(tasks, samples=40_000)
    assert abs(low - np.percentile(values, 2.5)) < 0.01
    assert abs(high - np.percentile(values, 97.5)) < 0.01


def test_bootstrap_is_stratified():
    """Tasks without spread have an interval without width. Pooled draws would not."""
    tasks = [np.full(4, 0.1), np.full(4, 0.9)]
    np.testing.assert_allclose(plot.bootstrap(tasks), [0.5, 0.5])


def test_bootstrap_of_known_distribution():
    """The interval of 50 seeds of a Normal: the standard error of its IQM is 1.09 / sqrt(n)."""
    rng = np.random.default_rng(3)
    widths = []
    for _ in range(40):
        low, high = plot.bootstrap([rng.normal(size=50)], 500)
        widths.append(high - low)
    assert abs(np.mean(widths) / (2 * 1.96 * 1.09 / np.sqrt(50)) - 1) < 0.1


def test_bootstrap_covers_with_many_seeds():
    rng = np.random.default_rng(4)
    inside = []
    for _ in range(200):
        low, high = plot.bootstrap([rng.normal(size=30)], 400)
        inside.append(low <= 0 <= high)
    assert 0.88 <= np.mean(inside) <= 0.99


def test_bootstrap_takes_curves_point_by_point():
    rng = np.random.default_rng(5)
    tasks = [rng.normal(size=(4, 3)), rng.normal(size=(6, 3))]
    low, high = plot.bootstrap(tasks, 500)
    for i in range(3):
        want = plot.bootstrap([task[:, i] for task in tasks], 500)
        np.testing.assert_allclose((low[i], high[i]), want)


# === the same numbers as rliable ===
REFERENCE = json.loads(
    (ROOT / "tests/rliable_reference.json").read_text()
)  # how: the .py beside it
every_reference = pytest.mark.parametrize("reference", REFERENCE["sets"], ids=lambda x: x["source"])


def tasks_of_scores(rows):
    """(runs, tasks) -> an array of runs for each task"""
    return list(np.array(rows).T)


@every_reference
def test_iqm_is_that_of_rliable(reference):
    for name, (point, low, high) in reference["iqm"].items():
        tasks = tasks_of_scores(reference["scores"][name])
        np.testing.assert_allclose(plot.iqm(np.concatenate(tasks)), point, rtol=1e-9)
        np.testing.assert_allclose(plot.bootstrap(tasks, samples=5000), (low, high), atol=0.01)


@every_reference
def test_probability_of_improvement_is_that_of_rliable(reference):
    for pair, (point, low, high) in reference["probability_of_improvement"].items():
        both = [tasks_of_scores(reference["scores"][name]) for name in pair.split(",")]
        np.testing.assert_allclose(plot.probability_of_improvement(*both), point, rtol=1e-9)
        interval = plot.improvement_interval(*both, samples=5000)
        np.testing.assert_allclose(interval, (low, high), atol=0.025)  # it has few values


def test_probability_of_improvement():
    low = [np.array([1.0, 2.0]), np.array([0.0])]
    high = [np.array([2.0, 3.0, 4.0]), np.array([0.0, 0.0])]
    # first task: 2 is above none, ties once of six pairs; second: only ties
    assert plot.probability_of_improvement(low, high) == (0.5 / 6 + 0.5) / 2
    assert plot.probability_of_improvement(high, low) == 1 - (0.5 / 6 + 0.5) / 2
    np.testing.assert_allclose(
        plot.improvement_interval(high, high, samples=50).mean(), 0.5, atol=0.2
    )


@pytest.mark.parametrize("seeds", [3, 5])
def test_bootstrap_is_scipys(seeds):
    """SciPy's bootstrap of several samples draws each for itself: it is stratified, too."""
    scipy_bootstrap = pytest.importorskip("scipy.stats").bootstrap
    rng = np.random.default_rng(seeds)
    tasks = [rng.uniform(size=seeds) for _ in range(4)]

    def pooled_iqm(*samples, axis):
        return plot.iqm(np.concatenate(samples, axis=axis))

    found = scipy_bootstrap(
        tasks, pooled_iqm, n_resamples=5000, method="percentile", vectorized=True, rng=rng
    )
    want = (found.confidence_interval.low, found.confidence_interval.high)
    np.testing.assert_allclose(plot.bootstrap(tasks, samples=5000), want, atol=0.015)


# === runs made up here ===
def fake_run(folder, values, step=100, seconds=1.0, ended=True, final=None, **settings):
    """A run with an evaluation every `step` steps, and rows without one between them."""
    name, _, seed = folder.name.rpartition("_")
    folder.mkdir(parents=True)
    total = step * len(values) if ended else 10 * step * len(values)
    args = {
        "env_id": name,
        "seed": int(seed),
        "suite": "DMC",
        "total_timesteps": total,
        "num_envs": 5,
        "num_steps": 10,
        "diffusion_steps": 4,
        "trust_region": "split",
        "eval_sampler": "ode",
    }
    (folder / "args.json").write_text(json.dumps(args | settings))
    with (folder / "metrics.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["global_step", "time/elapsed", "charts/episode_return", "eval/return"])
        for i, value in enumerate(values):
            writer.writerow([step * i + step // 2, seconds * (i + 0.5), -1, ""])
            writer.writerow([step * (i + 1), seconds * (i + 1), -1, value])
    if ended:
        final = values[-1] if final is None else final
        table = {"ode": {"mean": final}, "sde": {"mean": final - 1}}
        (folder / "eval.json").write_text(json.dumps(table))


def table(text):
    """Rows of Markdown tables by their first two cells."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            rows[tuple(cells[:2])] = cells
    return rows


def test_report_of_finished_runs(tmp_path):
    for seed, final in ((1, 500), (2, 600), (3, 700)):
        values = [100, 200, 300]
        fake_run(tmp_path / f"trudi/CheetahRun-v1_{seed}", values, final=final, seconds=60)
        fake_run(tmp_path / f"trudi/WalkerWalk-v1_{seed}", values, final=final - 400)
    text = plot.report(plot.load([tmp_path]))
    row = table(text)["CheetahRun-v1", "TruDi"]
    assert row[2:] == ["300", "3 of 3", "500, 600, 700", "**600**", "sde 599", "3"]
    finals = [0.5, 0.6, 0.7, 0.1, 0.2, 0.3]
    assert f"| TruDi | **{brute_iqm(finals):.3f}** |" in text and "| 6 | 3 |" in text
    assert "over the tasks that all have: CheetahRun-v1, WalkerWalk-v1." in text


def test_brief_report(tmp_path, capsys):
    for seed, final in ((1, 500), (2, 700)):
        fake_run(tmp_path / f"trudi/CheetahRun-v1_{seed}", [1], final=final)
        fake_run(tmp_path / f"trudi/WalkerWalk-v1_{seed}", [1], final=final + 100)
        fake_run(tmp_path / f"reppo/CheetahRun-v1_{seed}", [1], final=final)
    groups = plot.load([tmp_path])
    # only one task is common: no aggregate
    text = plot.brief(groups)
    assert "| task | TruDi | REPPO |" in text and "IQM" not in text
    assert table(text)["CheetahRun-v1", "600"] == ["CheetahRun-v1", "600", "600"]
    assert table(text)["WalkerWalk-v1", "700"] == ["WalkerWalk-v1", "700", "-"]
    assert table(text)["runs", "4"] == ["runs", "4", "2"]
    for seed in (1, 2):
        fake_run(tmp_path / f"reppo/WalkerWalk-v1_{seed}", [300], ended=seed == 1)
    (tmp_path / "reppo/WalkerWalk-v1_3").mkdir()
    (tmp_path / "reppo/WalkerWalk-v1_3/output.txt").write_text("error")
    text = plot.brief(plot.load([tmp_path]))
    rows = table(text)
    low, high = plot.bootstrap([np.array([0.5, 0.7]), np.array([0.6, 0.8])])
    mean = f"**{brute_iqm([0.5, 0.7, 0.6, 0.8]):.3f}**"
    assert rows["DMC: IQM of 2 tasks", mean][1] == mean
    assert f"| 95 % interval | {low:.3f} to {high:.3f} |" in text
    assert rows["WalkerWalk-v1", "700"][1:] == ["700", "200*"]  # (300 + 300 + 0) / 3
    assert rows["runs", "4"] == ["runs", "4", "5"]
    assert "* Not at their end: 2 runs" in text
    plot.main([str(tmp_path), "--table", "brief"])
    plot.main([str(tmp_path), "--table", "runs"])
    brief, runs = capsys.readouterr().out.split("| env |")
    assert brief == text + "\n" and "IQM" not in runs
    assert runs.count("\n| ") == 4 and "* Not at its end" in runs


def test_the_final_value_is_that_of_the_runs_own_sampler(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100], final=500, eval_sampler="sde")
    row = table(plot.report(plot.load([tmp_path])))["CheetahRun-v1", "TruDi"]
    assert row[4] == "499" and row[6] == "ode 500"


def test_crashed_runs_count_and_are_named(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200, 800])
    fake_run(tmp_path / "trudi/CheetahRun-v1_2", [100, 200], ended=False)
    (tmp_path / "trudi/CheetahRun-v1_3").mkdir()
    (tmp_path / "trudi/CheetahRun-v1_3/output.txt").write_text("error")
    text = plot.report(plot.load([tmp_path]))
    row = table(text)["CheetahRun-v1", "TruDi"]
    assert row[3:6] == ["1 of 3", "800, 200*, 0.00*", "**333**"] and row[2] == "200 to 300"
    where = "TruDi on CheetahRun-v1, seed 2, at step 200"
    assert f"* Not at its end: {where}; counts with 200" in text
    # no return of DMC is lower
    assert "seed 3, before its first row; counts with 0.00" in text
    assert f"| TruDi | **{brute_iqm([0.8, 0.2, 0]):.3f}** |" in text
    fake_run(tmp_path / "trudi/Pendulum-v1_1", [-200], suite="other")
    fake_run(tmp_path / "trudi/Pendulum-v1_2", [], suite="other", ended=False)
    text = plot.report(plot.load([tmp_path]))
    # here 0 would be a triumph
    assert table(text)["Pendulum-v1", "TruDi"][4:6] == ["-200, none*", "**-200**"]
    assert "seed 2, before its first row; has no value and counts nowhere" in text


def test_torn_and_empty_logs(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200], ended=False)
    with (tmp_path / "trudi/CheetahRun-v1_1/metrics.csv").open("a") as file:
        file.write("250,2.4")  # killed while it wrote
    fake_run(tmp_path / "trudi/CheetahRun-v1_2", [], ended=False)
    fake_run(tmp_path / "trudi/CheetahRun-v1_3", [5], ended=False)
    (tmp_path / "trudi/CheetahRun-v1_3/metrics.csv").write_text("")
    (runs,) = plot.load([tmp_path]).values()
    assert [run.final for run in runs] == [200, 0, 0]
    assert not any(run.ended for run in runs)
    plot.report(plot.load([tmp_path]))
    plot.draw(plot.load([tmp_path]), tmp_path / "figures")


def test_ragged_evaluations(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200, 300, 400], step=100)
    fake_run(tmp_path / "trudi/CheetahRun-v1_2", [150, 250], step=150, ended=False)
    (runs,) = plot.load([tmp_path]).values()
    grid, end = plot.common_span(runs, "steps", 26)
    assert grid[0] == 150 and grid[-1] == 400 and end == 300
    values = np.stack([plot.on_grid(run, grid, "steps") for run in runs])
    np.testing.assert_allclose(values[0], grid)  # linear between evaluations
    rising = 150 + (grid - 150) * 100 / 150
    np.testing.assert_allclose(values[1], np.where(grid < 300, rising, 250))  # the last is kept


def test_line_is_dashed_where_a_run_is_missing(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200, 300, 400])
    fake_run(tmp_path / "trudi/CheetahRun-v1_2", [100, 200], ended=False)
    axes = plot.Figure().subplots()
    palette = plot.choose_colors(["TruDi"])
    plot.plot_task(axes, plot.load([tmp_path]), "CheetahRun-v1", plot.step_axis(), palette)
    solid = axes.lines[0]
    dashed = axes.lines[1]
    assert dashed.get_linestyle() == "--"
    assert max(solid.get_xdata()) <= 200 + 1e-6 and max(dashed.get_xdata()) == 400
    assert solid.get_label() == "TruDi, 2 seeds"
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert any(line.get_xdata()[0] == 200 for line in crosses)  # where it stopped
    np.testing.assert_allclose(dashed.get_ydata()[-1], (400 + 200) / 2)


def test_each_seed_is_drawn_up_to_five(tmp_path):
    for seed in range(6):
        fake_run(tmp_path / f"trudi/CheetahRun-v1_{seed}", [1, 2])
        if seed < 5:
            fake_run(tmp_path / f"reppo/CheetahRun-v1_{seed}", [1, 2])
    axes = plot.Figure().subplots()
    palette = plot.choose_colors(["TruDi", "REPPO"])
    plot.plot_task(axes, plot.load([tmp_path]), "CheetahRun-v1", plot.step_axis(), palette)
    thin = [line.get_color() for line in axes.lines if line.get_linewidth() < 1]
    assert thin == [plot.COLORS["REPPO"]] * 5
    assert len(axes.collections) == 1  # TruDi has a band instead


def test_wall_clock(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200], seconds=60)
    fake_run(tmp_path / "reppo/CheetahRun-v1_1", [100, 200], seconds=30)
    groups = plot.load([tmp_path])
    axes = plot.Figure().subplots()
    axis = plot.time_axis(groups)
    palette = plot.choose_colors(["TruDi", "REPPO"])
    plot.plot_task(axes, groups, "CheetahRun-v1", axis, palette)
    ends = {}
    for line in axes.lines:
        if not line.get_label().startswith("_"):
            ends[line.get_label().split(",")[0]] = max(line.get_xdata())
    assert axis.label.startswith("minutes") and ends == {"TruDi": 2.0, "REPPO": 1.0}


def test_long_runs_are_shown_in_hours(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200], seconds=6000)
    axis = plot.time_axis(plot.load([tmp_path]))
    assert axis.label.startswith("hours") and axis.unit == 3600


def test_aggregate_at_equal_time(tmp_path):
    """Each task when its fastest run ended; a run that crashed earlier does not set the clock."""
    rising = [100, 200, 300, 400]
    for seed in (1, 2):
        trudi = [100, 200, 300, 400 * seed]
        fake_run(tmp_path / f"trudi/CheetahRun-v1_{seed}", trudi, seconds=60, final=900)
        fake_run(tmp_path / f"reppo/CheetahRun-v1_{seed}", rising, seconds=45)
        fake_run(tmp_path / f"trudi/WalkerWalk-v1_{seed}", [0, 500], seconds=60)
        fake_run(tmp_path / f"reppo/WalkerWalk-v1_{seed}", [600, 700], seconds=120)
    fake_run(tmp_path / "reppo/CheetahRun-v1_3", [50], seconds=45, ended=False)
    rows = table(plot.report(plot.load([tmp_path])))
    early = {key[0]: row[4:6] for key, row in rows.items() if key[0] in ("TruDi", "REPPO")}
    # after 180 and 120 seconds
    assert early["TruDi"][0] == f"**{brute_iqm([0.3, 0.3, 0.5, 0.5]):.3f}**"
    assert early["REPPO"][0] == f"**{brute_iqm([0.4, 0.4, 0.05, 0.6, 0.6]):.3f}**"
    # both runs of each task are the same, and tasks are not resampled
    assert early["TruDi"][1] == "0.400 to 0.400"
    shutil.rmtree(tmp_path / "reppo/CheetahRun-v1_3")
    log = tmp_path / "reppo/CheetahRun-v1_1/metrics.csv"
    log.write_text(log.read_text().replace("time/elapsed", "other"))
    rows = table(plot.report(plot.load([tmp_path / "reppo", tmp_path / "trudi"])))
    early = [row[4:6] for key, row in rows.items() if key[0] in ("TruDi", "REPPO")]
    assert early == [["-", "-"], ["-", "-"]]  # without times there is no such column


def test_equal_work_is_timed_by_the_fastest_run(tmp_path):
    """A seed that ran on a slower machine says nothing about its algorithm's speed."""
    for seed, seconds in ((1, 60), (2, 20), (3, 90)):
        fake_run(tmp_path / f"trudi/CheetahRun-v1_{seed}", [100, 200, 300], seconds=seconds)
    crashed = {"ended": False, "total_timesteps": 300}
    fake_run(tmp_path / "trudi/CheetahRun-v1_4", [10], seconds=5, **crashed)
    fake_run(tmp_path / "trudi/CheetahRun-v1_5", [], **crashed)  # it has no pace at all
    (runs,) = plot.load([tmp_path]).values()
    for run in runs[:3]:
        np.testing.assert_allclose(run.curve.seconds, [20, 40, 60])
        assert (run.total_steps, run.total_seconds) == (300, 60)
    # a crashed run does not set the pace
    first = [array[0] for array in runs[3].curve]
    np.testing.assert_allclose(first, [100, 20, 10])
    rows = table(plot.report({("CheetahRun-v1", "TruDi"): runs[:3]}))
    assert rows["CheetahRun-v1", "TruDi"][-1] == "1"
    fake_run(tmp_path / "reppo/CheetahRun-v1_1", [1, 2], seconds=60, num_envs=5)
    fake_run(tmp_path / "reppo/CheetahRun-v1_2", [1, 2], seconds=20, num_envs=7)
    runs = plot.load([tmp_path])["CheetahRun-v1", "REPPO"]
    assert [run.total_seconds for run in runs] == [120, 40]  # other work: both keep theirs


def test_aggregate_takes_common_tasks_of_a_suite(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [400])
    fake_run(tmp_path / "trudi/WalkerWalk-v1_1", [1000])
    fake_run(tmp_path / "trudi/Pendulum-v1_1", [-100], suite="other")
    fake_run(tmp_path / "trudi/G1JoystickFlatTerrain-v1_1", [30], suite="humanoid")
    fake_run(tmp_path / "reppo/CheetahRun-v1_1", [300])
    text = plot.report(plot.load([tmp_path]))
    assert "over the tasks that all have: CheetahRun-v1." in text
    assert "| TruDi | **0.400** | - (1 task with one seed)" in text
    assert "| REPPO | **0.300** |" in text
    assert "| TruDi | **30.000** |" in text
    assert "No aggregate for other: no common scale" in text


def test_simulators_are_not_mixed(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [400], backend="envpool")
    fake_run(tmp_path / "trudi/CheetahRun_1", [700], env_id="CheetahRun", backend="playground")
    text = plot.report(plot.load([tmp_path]))
    assert "DMC by Playground, return / 1000, over the tasks that all have: CheetahRun." in text
    assert "DMC, return / 1000, over the tasks that all have: CheetahRun-v1." in text


@pytest.mark.parametrize(
    "env, settings, suite",
    [
        ("CheetahRun-v1", {"suite": "DMC"}, "DMC"),
        ("CheetahRun-v1", {}, "DMC"),
        ("HumanoidStandup-v5", {"suite": "other"}, "other"),
        ("PushCube-v1", {"suite": "ManiSkill"}, "ManiSkill"),
        ("Pendulum-v1", {}, "other"),
        ("G1JoystickFlatTerrain", {}, "humanoid"),
        ("G1JoystickFlatTerrain", {"suite": "other"}, "humanoid"),
        ("T1JoystickRoughTerrain-v1", {"suite": "humanoid"}, "humanoid"),
        (
            "T1JoystickRoughTerrain",
            {"suite": "other", "backend": "playground"},
            "humanoid by Playground",
        ),
        ("humanoid_bench:h1hand-walk-v0", {"suite": "other"}, "HumanoidBench"),
        ("humanoid_bench:h1hand-walk-v0", {}, "HumanoidBench"),
    ],
)
def test_suites(env, settings, suite):
    assert plot.suite_of(env, settings) == suite


def test_no_interval_where_a_task_has_one_seed(tmp_path):
    for name in ("CheetahRun-v1_1", "CheetahRun-v1_2", "WalkerWalk-v1_1"):
        fake_run(tmp_path / "trudi" / name, [100 * int(name[-1])])
    assert "- (1 task with one seed)" in plot.report(plot.load([tmp_path]))


def test_a_metric_that_a_run_does_not_have(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100])
    (run,) = plot.load([tmp_path], "success")["CheetahRun-v1", "TruDi, training episodes"]
    assert np.isnan(run.final) and not run.other_finals


def fake_maniskill_run(folder):
    fake_run(folder, [10.0], suite="ManiSkill")
    columns = "global_step,time/elapsed,eval/return,eval/success_once,eval/success_at_end"
    (folder / "metrics.csv").write_text(f"{columns}\n100,1.0,10,0.75,0.25\n")
    result = {"mean": 10, "success_once": 0.5, "success_at_end": 0.125}
    (folder / "eval.json").write_text(json.dumps({"ode": result}))


def test_success_is_the_metric_of_maniskill(tmp_path):
    fake_maniskill_run(tmp_path / "trudi/PushCube-v1_1")
    assert table(plot.report(plot.load([tmp_path])))["PushCube-v1", "TruDi"][4] == "0.50"


def test_another_metric(tmp_path, capsys):
    """It has no scale but 1, and it is forgotten afterwards."""
    fake_maniskill_run(tmp_path / "trudi/PushCube-v1_1")
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [400])
    log = tmp_path / "trudi/CheetahRun-v1_1/metrics.csv"
    log.write_text(log.read_text().replace("eval/return", "eval/success_at_end"))
    plot.main([str(tmp_path), "--metric", "success_at_end"])
    out = capsys.readouterr().out
    assert "ManiSkill, success at end, over the tasks" in out and "**0.12**" in out
    assert "DMC, success at end, over the tasks" in out
    plot.main([str(tmp_path), "--metric", "return"])
    out = capsys.readouterr().out
    assert "ManiSkill, return, over the tasks" in out and "DMC, return / 1000" in out
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "ManiSkill, success once, over the tasks" in out and "DMC, return / 1000" in out


def test_names_and_colors(tmp_path):
    names = {
        "trudi": "TruDi",
        "trudi_continuous": "TruDi",
        "reppo_maniskill": "REPPO",
        "dime": "DIME (on-policy)",
        "trudi_kl0.2": "TruDi kl 0.2",
        "trudi_best20": "TruDi best 20",
        "mine": "mine",
    }
    for label, name in names.items():
        assert plot.display_name(label, {}) == name
    without = {"trust_region": "none", "diffusion_steps": 4}
    assert plot.display_name("trudi", without) == "DIME (on-policy)"
    spo = {"objective": "spo", "clip_coef": 0.2}
    assert plot.display_name("ppo_continuous", spo) == "SPO"
    ppo = {"objective": "ppo", "clip_coef": 0.2}
    assert plot.display_name("ppo_continuous", ppo) == "PPO"
    assert plot.display_name("copied", ppo) == "PPO"
    assert plot.display_name("copied", {"trust_region": "none", "td_lambda": 0.9}) == "REPPO"
    both = plot.choose_colors(["TruDi", "REPPO"])
    assert both["TruDi"] == plot.choose_colors(["TruDi"])["TruDi"]
    assert len(set(plot.COLORS.values())) == len(plot.COLORS)
    assert list(plot.COLORS) == list(plot.NAMES.values())
    for bound in (50, 0.01, 10):
        fake_run(tmp_path / f"trudi_kl{bound}/CheetahRun-v1_1", [1])
    shown = [name for _, name in plot.load([tmp_path])]
    assert shown == ["TruDi kl 0.01", "TruDi kl 10", "TruDi kl 50"]


def test_mixed_settings_are_named(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [1])
    fake_run(tmp_path / "trudi/CheetahRun-v1_2", [1], num_envs=7)
    fake_run(tmp_path / "again/trudi/CheetahRun-v1_2", [1])
    text = plot.report(plot.load([tmp_path]))
    assert "the runs of TruDi on CheetahRun-v1 differ in num_envs" in text
    assert "several runs of the same seed" in text


def test_old_and_new_runs_together(tmp_path):
    """Older runs spell a setting differently, name other suites and time other phases."""
    old = {"normalise_reward": False, "suite": "humanoid", "resume": None}
    new = {"normalize_reward": False, "suite": "other", "resume": ""}
    fake_run(tmp_path / "trudi/G1JoystickFlatTerrain_1", [10], **old)
    fake_run(tmp_path / "trudi/G1JoystickFlatTerrain_2", [20], **new)
    log = tmp_path / "trudi/G1JoystickFlatTerrain_2/metrics.csv"
    log.write_text(
        "global_step,time/elapsed,time/rollout,time/targets,time/update,time/eval,eval/return\n"
        "100,1.0,0.5,0.1,0.3,0.1,20\n"
    )
    text = plot.report(plot.load([tmp_path]))
    row = table(text)["G1JoystickFlatTerrain", "TruDi"]
    assert row[3:6] == ["2 of 2", "10.00, 20", "**15.00**"]
    assert "humanoid, return, over the tasks that all have" in text and "Warning" not in text
    fake_run(tmp_path / "trudi/G1JoystickFlatTerrain_3", [30], **new | {"normalize_reward": True})
    assert "differ in normalize_reward" in plot.report(plot.load([tmp_path]))


def test_copies_from_elsewhere(tmp_path):
    fake_run(tmp_path / "a/CheetahRun-v1_1", [100, 300])
    # only metrics.csv and args.json: the log shows that it ended
    (tmp_path / "a/CheetahRun-v1_1/eval.json").unlink()
    (tmp_path / "theirs").mkdir()
    single = tmp_path / "theirs/CheetahRun-v1_4.csv"
    single.write_text("global_step,charts/episodic_return\n10,1\n20,2\n")
    (tmp_path / "theirs/notes.csv").write_text("a,b\n1,2\n")
    groups = plot.load([tmp_path / "a", single, tmp_path / "theirs", tmp_path / "a"])
    assert {key: len(runs) for key, runs in groups.items()} == {
        ("CheetahRun-v1", "TruDi"): 1,
        ("CheetahRun-v1", "theirs, training episodes"): 1,
    }
    (ours,), (theirs,) = groups.values()
    assert ours.ended and ours.final == 300
    assert theirs.ended is None and theirs.seed == "4" and theirs.suite == "DMC"
    assert "? of 1" in plot.report(groups)
    plot.draw(groups, tmp_path / "figures")


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_nothing_to_plot(what, tmp_path, capsys):
    path = tmp_path / "missing" if what == "missing" else tmp_path
    with pytest.raises(SystemExit) as error:
        plot.main([str(path)])
    assert error.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "script, packages", [("plot.py", {"numpy", "matplotlib"}), ("benchmark.py", set())]
)
def test_tools_need_few_packages(script, packages):
    needed = set()
    for node in ast.walk(ast.parse((ROOT / "tools" / script).read_text())):
        if isinstance(node, ast.Import):
            needed |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            needed.add(node.module.split(".")[0])
    assert needed - sys.stdlib_module_names == packages


# === the committed runs ===
def test_it_runs_as_a_script():
    command = [sys.executable, "tools/plot.py", "results/cleanrl_ppo", "--table", "runs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| CheetahRun-v1 | CleanRL's PPO, training episodes |" in done.stdout


@pytest.mark.slow
def test_committed_runs_give_the_tables_of_the_docs(tmp_path, capsys):
    plot.main([str(ROOT / "results/laptop"), "--out", str(tmp_path)])
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    rows = [line for line in lines if "-v" in line.split("|")[1]]
    text = (ROOT / "docs/results.md").read_text()
    assert len(rows) >= 24 and not [row for row in rows if row not in text]
    envs = {row.split("|")[1].strip() for row in rows}
    assert len(envs) >= 6
    for name in [f"{env}.png" for env in envs] + ["curves.png", "aggregate_DMC.png"]:
        figure = tmp_path / name
        assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 10_000


def test_the_laptop_grid_is_shown_in_the_readme():
    groups = plot.load([ROOT / "results/laptop"])
    assert plot.brief(groups) in (ROOT / "README.md").read_text()
