"""benchmark.sh with stub scripts and one real training, plot.py on runs made up here and on the committed ones, and the
chains of docs/figures/samplers.py against their target."""

import csv
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import plot

ROOT = Path(__file__).parents[1]
GRIDS = {  # name -> number of runs
    "smoke": 2 * 4,
    "laptop": 6 * 3 * 4,
    "paper-dmc": 20 * 10 * 4,
    "paper-humanoid": 4 * 10 * 4,
    "paper-maniskill": 13 * 10 * 4,
    "paper-humanoidbench": 30 * 10 * 4,
    "ablation-kl": 3 * 3 * 7,
    "ablation-steps": 3 * 3 * 5,
    "ablation-sampler": 6 * 3 * 6,
}
STUB = """#!{python}
# stands in for the scripts: sleeps, notes what it was called with, behaves as flags.txt says for its folder's name
import json, os, pathlib, signal, sys, time
argv = sys.argv[1:]
get = lambda flag: argv[argv.index(flag) + 1] if flag in argv else None
here = pathlib.Path(__file__).parent
given = get("--run-dir") or get("--resume") or str(pathlib.Path(get("--evaluate")).parent)
folder = pathlib.Path(given)
hits = []
signal.signal(signal.SIGTERM, lambda n, _: hits.append(n) or signal.signal(n, signal.SIG_DFL))
with (here / "calls.txt").open("a") as f:
    f.write(json.dumps([time.time(), "start", os.path.basename(__file__), *argv]) + "\\n")
folder.mkdir(parents=True, exist_ok=True)
wish = here / "wishes" / (folder.parent.name + "_" + folder.name)
wish = wish.read_text() if wish.exists() else ""
if wish == "fail":
    print("some output")
    sys.exit("error: the simulator is on fire")
if wish == "vanish":
    os.kill(os.getpid(), 9)
while wish == "meet" and (here / "calls.txt").read_text().count('"start"') < 3:
    time.sleep(0.05)
result = "eval.json"
if get("--evaluate"):
    assert pathlib.Path(get("--evaluate")).read_text() == "weights"
    result = "eval_source.json"
else:
    (folder / "checkpoint.pt").write_text("weights")
for _ in range(600 if wish == "long" else 3):
    time.sleep(0.05)
    if hits:
        time.sleep(0.3)
        (folder / "saved").write_text("")
        print("stopped by SIGTERM")
        sys.exit(143)
(folder / result).write_text(json.dumps({{"ode": dict(mean=1.0), "sde": dict(mean=2.0)}}))
with (here / "calls.txt").open("a") as f:
    f.write(json.dumps([time.time(), "end", str(folder)]) + "\\n")
"""


# benchmark.sh


class Grid:
    def __init__(self, root):
        self.root, self.env = root, os.environ | dict(PYTHON=sys.executable)
        shutil.copy(ROOT / "benchmark.sh", root)
        for algorithm, kind in itertools.product(("trudi", "reppo", "ppo"), ("continuous", "maniskill")):
            (root / f"{algorithm}_{kind}.py").write_text(STUB.format(python=sys.executable))
        (root / "wishes").mkdir()

    def start(self, *flags, **kwargs):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(["bash", "benchmark.sh", *flags], cwd=self.root, env=self.env, **pipes, **kwargs)

    def run(self, *flags, code=0):
        process = self.start(*flags)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, (out, err)
        return out, err

    def wish(self, run, what):
        (self.root / "wishes" / run.replace("/", "_")).write_text(what)

    def calls(self):
        path = self.root / "calls.txt"
        return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []

    def starts(self):
        return [c[2:] for c in self.calls() if c[1] == "start"]


@pytest.fixture
def grid(tmp_path):
    return Grid(tmp_path)


@pytest.fixture(scope="module")
def dry_runs():
    """name -> the lines of --dry-run"""
    call = ["bash", str(ROOT / "benchmark.sh")]
    no_results = ["--dry-run", "--out", "no/such/folder"]
    out = {g: subprocess.run([*call, g, *no_results], capture_output=True, text=True).stdout for g in GRIDS}
    return {g: text.splitlines() for g, text in out.items()}


@pytest.mark.parametrize("name", GRIDS)
def test_grids_have_all_runs_once(name, dry_runs):
    lines = dry_runs[name]
    assert len(lines) == GRIDS[name]
    folders = [re.search(r"(?:--run-dir|--evaluate) (\S+?)(/source.pt)?$|--evaluate (\S+)/source.pt", x) for x in lines]
    folders = [m[1] or m[3] for m in folders]
    assert len(set(folders)) == len(lines)
    for line, folder in zip(lines, folders, strict=True):
        _, label, env, seed = line.split(":")[0].split() if "humanoid_bench" not in line else line.split()[:4]
        seed = seed.strip(":")
        assert folder == f"no/such/folder/{label}/{re.sub('[^A-Za-z0-9.-]', '_', env)}_{seed}"


@pytest.mark.parametrize("name", GRIDS)
def test_grids_use_flags_that_exist(name, dry_runs):
    for command in {re.sub(r"--(env-id|seed|run-dir) \S+", "", x.split(": ", 1)[1]) for x in dry_runs[name]}:
        _, script, *flags = command.split()
        script = Path(script)
        text = (ROOT / script.name).read_text()
        for flag in (f for f in flags if f.startswith("--")):
            assert re.search(rf"^    {flag[2:].replace('-', '_')}: ", text, re.M), (flag, script)


def test_grids_use_envs_that_exist(dry_runs):
    known = set(pytest.importorskip("envpool").list_all_envs())
    for name in ("smoke", "laptop", "ablation-kl", "ablation-steps", "ablation-sampler"):
        assert {line.split()[2] for line in dry_runs[name]} <= known
    tasks = pytest.importorskip("playground_env").TASKS
    for name, suite, count in (("paper-dmc", "DMC", 20), ("paper-humanoid", "humanoid", 4)):
        envs = {line.split()[2] for line in dry_runs[name]}
        assert len(envs) == count and {tasks[env] for env in envs} == {suite}
        assert all("--backend playground" in line for line in dry_runs[name])


def test_maniskill_grid_uses_envs_that_exist(dry_runs):
    pytest.importorskip("mani_skill")
    code = "import mani_skill.envs; from mani_skill.utils.registration import REGISTERED_ENVS as r; print(*r)"
    known = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    assert {line.split()[2] for line in dry_runs["paper-maniskill"]} <= set(known)


def test_ablations_vary_what_they_say(dry_runs):
    def values(name, flag):
        return sorted({float(re.search(rf"{flag} (\S+)", x)[1]) for x in dry_runs[name] if flag in x})

    assert values("ablation-kl", "--kl-bound") == [0.01, 0.1, 0.2, 0.4, 1, 10, 50]
    assert values("ablation-steps", "--diffusion-steps") == [1, 4, 8, 16, 32]
    assert values("ablation-sampler", "--eval-score-scale") == [0.5, 1.0, 1.5]
    assert values("ablation-sampler", "--eval-best-of") == [10, 20]
    assert any("--eval-sampler sde" in x for x in dry_runs["ablation-sampler"])
    dime = [x for x in dry_runs["laptop"] if x.split()[1] == "dime"]
    assert dime and all("trudi_continuous.py" in x and "--trust-region none" in x for x in dime)


def test_a_grid_runs_is_finished_and_leaves_a_manifest(grid):
    out, _ = grid.run("smoke", "--envs", "CheetahRun-v1")
    assert "4 of 4 runs of smoke are finished" in out
    assert [c[0] for c in grid.starts()] == [
        f"{a}_continuous.py" for a in ("trudi", "reppo", "ppo", "trudi")
    ]  # in this order
    for label in ("trudi", "reppo", "ppo", "dime"):
        assert (grid.root / "results/smoke" / label / "CheetahRun-v1_1/eval.json").exists()
    manifest = [json.loads(x) for x in (grid.root / "results/smoke/manifest.jsonl").read_text().splitlines()]
    assert len(manifest) == 1 and manifest[0]["grid"] == "smoke" and manifest[0]["runs"] == 4
    assert {"git", "changed_files", "python", "versions", "machine", "started"} <= set(manifest[0])
    assert manifest[0]["machine"]["cpu"] and manifest[0]["machine"]["cores"] == os.cpu_count()
    before = len(grid.calls())
    out, _ = grid.run("smoke", "--envs", "CheetahRun-v1")  # once more: nothing is left to do
    assert "4 of 4" in out and len(grid.calls()) == before


def test_a_half_finished_grid_goes_on(grid):
    results = grid.root / "results/smoke"
    for name, files in (("trudi", ["eval.json", "checkpoint.pt"]), ("reppo", ["checkpoint.pt"]), ("ppo", [])):
        (results / name / "Pendulum-v1_1").mkdir(parents=True)
        for file in files:
            (results / name / "Pendulum-v1_1" / file).write_text("weights")
    out, _ = grid.run("smoke", "--envs", "Pendulum-v1", "--dry-run")
    assert [x.split()[0] for x in out.splitlines()] == ["finished", "resume", "start", "start"]
    grid.run("smoke", "--envs", "Pendulum-v1")
    resumed, *started = grid.starts()
    assert resumed[0] == "reppo_continuous.py" and "--run-dir" not in resumed
    assert resumed[resumed.index("--resume") + 1] == "./results/smoke/reppo/Pendulum-v1_1"
    assert [s[0] for s in started] == ["ppo_continuous.py", "trudi_continuous.py"]
    assert all("--run-dir" in s and "--resume" not in s for s in started)


def test_failures_are_listed_and_the_others_run(grid):
    grid.wish("reppo/Pendulum-v1_1", "fail")
    grid.wish("ppo/Pendulum-v1_1", "vanish")
    out, err = grid.run("smoke", "--envs", "Pendulum-v1", code=1)
    assert "2 of 4 runs of smoke are finished" in out
    assert "error: 2 of 4 runs failed:" in err
    assert "  reppo Pendulum-v1 seed 1: error: the simulator is on fire (it ended with code 1)" in err
    assert re.search(r"^  ppo Pendulum-v1 seed 1: .*\(it ended with code 137\)$", err, re.M)  # killed without a word
    assert "trudi" not in err and "dime" not in err
    (grid.root / "wishes/reppo_Pendulum-v1_1").unlink()
    (grid.root / "wishes/ppo_Pendulum-v1_1").unlink()
    grid.run("smoke", "--envs", "Pendulum-v1")  # the same command repairs it


def most_at_once(calls):
    count = most = 0
    for _, kind, *_ in sorted(calls):
        count += 1 if kind == "start" else -1
        most = max(most, count)
    return most


@pytest.mark.parametrize("workers", [1, 3])
def test_workers(workers, grid):
    for env in ("CheetahRun-v1", "FingerSpin-v1") if workers == 3 else ():
        grid.wish(f"trudi/{env}_1", "meet")  # does not end before a third run starts
    grid.run("laptop", "--envs", "CheetahRun-v1,FingerSpin-v1", "--only", "trudi", "--workers", str(workers))
    assert len(grid.starts()) == 6
    assert most_at_once(grid.calls()) == workers


def test_seeds_envs_and_more_flags(grid):
    out, _ = grid.run("laptop", "--seeds", "7,8", "--envs", "A-v1 B-v1", "--only", "dime", "--dry-run", "--", "--track")
    assert [x.split(":")[0] for x in out.splitlines()] == [
        f"start dime {e} {s}" for s in "78" for e in ("A-v1", "B-v1")
    ]
    assert all("--track" in x for x in out.splitlines())
    assert not (grid.root / "results").exists() and not grid.calls()


def test_a_signal_lets_each_run_save_and_the_grid_go_on(grid):
    for name in ("trudi", "reppo", "ppo", "dime"):
        grid.wish(f"{name}/Pendulum-v1_1", "long")
    process = grid.start("smoke", "--envs", "Pendulum-v1", "--workers", "2", start_new_session=True)
    deadline = time.time() + 30
    while len(list(grid.root.glob("results/*/*/*/checkpoint.pt"))) < 2 and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)  # as a terminal does: the whole group, yet each run gets one signal only
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "runs were stopped or failed" in err
    assert len(grid.starts()) == 2 and len(list(grid.root.glob("results/*/*/*/saved"))) == 2
    assert err.count("stopped by SIGTERM") == 2 and err.count("not started") == 2
    out, _ = grid.run("smoke", "--envs", "Pendulum-v1", "--dry-run")
    assert [x.split()[0] for x in out.splitlines()] == ["resume", "resume", "start", "start"]


def test_two_grids_do_not_share_a_run(grid):
    grid.wish("trudi/Pendulum-v1_1", "long")
    flags = "smoke", "--envs", "Pendulum-v1", "--only", "trudi"
    first = grid.start(*flags)
    deadline = time.time() + 30
    while not list(grid.root.glob("results/*/*/*/checkpoint.pt")) and time.time() < deadline:
        time.sleep(0.05)
    out, _ = grid.run(*flags, code=1)
    assert "in use by another process" in out and len(grid.starts()) == 1
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)


def test_sampler_ablation_evaluates_finished_runs(grid):
    args = dict(env_id="CheetahRun-v1", seed=1, suite="DMC", eval_sampler="ode", eval_score_scale=1.0, eval_best_of=10)
    args |= dict(total_timesteps=64, num_envs=8, num_steps=8)
    for seed, files in ((1, ["checkpoint.pt", "eval.json", "args.json"]), (2, ["checkpoint.pt", "args.json"])):
        folder = grid.root / f"results/laptop/trudi/CheetahRun-v1_{seed}"
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).write_text("weights" if file == "checkpoint.pt" else json.dumps(args))
    flags = "ablation-sampler", "--envs", "CheetahRun-v1", "--only", "trudi_sde,trudi_ode0.5,trudi_best20", "--seeds"
    out, err = grid.run(*flags, "1,2", code=1)
    assert "3 of 6 runs" in out and err.count("is not a finished run with a checkpoint") == 3
    out = grid.root / "results/ablation-sampler"
    made = json.loads((out / "trudi_ode0.5/CheetahRun-v1_1/args.json").read_text())
    assert made["eval_sampler"] == "ode" and made["eval_score_scale"] == 0.5
    made = json.loads((out / "trudi_best20/CheetahRun-v1_1/args.json").read_text())
    assert made["eval_sampler"] == "best-of-k" and made["eval_best_of"] == 20
    assert (grid.root / "results/laptop/trudi/CheetahRun-v1_1/checkpoint.pt").read_text() == "weights"
    finals = {r.seed: r.final for r in plot.load([out / "trudi_sde"])["CheetahRun-v1", "TruDi sde"]}
    assert finals == {"1": 2.0, "2": 0.0}  # the sampler that was asked for; the other is not lost


def test_slurm_prints_an_array_job(grid):
    out, err = grid.run("paper-dmc", "--slurm", "--workers", "16", "--seeds", "1 2", "--", "--track")
    assert "#SBATCH --array=0-159%16" in out and "--gres=gpu:1" in out and out.startswith("#!") and not err
    assert "gpu" not in grid.run("laptop", "--slurm")[0]
    assert "split it by --seeds" in grid.run("paper-humanoidbench", "--slurm")[1]
    assert f"'{grid.root}/benchmark.sh'" in out and f"'{grid.root}/results/paper-dmc'" in out  # for any folder
    assert not grid.calls()


def test_slurm_tasks_make_up_the_grid(grid):
    flags = "smoke", "--envs", "CheetahRun-v1 Pendulum-v1"
    out, _ = grid.run(*flags, "--slurm")
    count = int(re.search(r"--array=0-(\d+)", out)[1]) + 1
    assert count == 8
    (grid.root / "job.sh").write_text(out)
    for task in (0, count - 1):
        env = grid.env | dict(SLURM_ARRAY_TASK_ID=str(task))
        subprocess.run(["bash", "job.sh"], cwd=grid.root, env=env, check=True, capture_output=True)
    ran = [(s[0], s[s.index("--env-id") + 1]) for s in grid.starts()]
    assert ran == [("trudi_continuous.py", "CheetahRun-v1"), ("trudi_continuous.py", "Pendulum-v1")]
    lines = [grid.run(*flags, "--task", str(i), "--dry-run")[0] for i in range(count)]
    assert "".join(lines) == grid.run(*flags, "--dry-run")[0]


def test_slurm_submit(grid):
    (grid.root / "bin").mkdir()
    sbatch = grid.root / "bin/sbatch"
    sbatch.write_text("#!/bin/sh\ncat > submitted.sh\n")
    sbatch.chmod(0o755)
    grid.env["PATH"] = f"{grid.root / 'bin'}:{grid.env['PATH']}"
    grid.run("smoke", "--slurm", "--submit")
    assert "#SBATCH --array=0-7\n" in (grid.root / "submitted.sh").read_text()


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "name a grid"),
        (["lapdog"], "unknown grid lapdog"),
        (["laptop", "--speed", "9"], "unknown option --speed"),
        (["laptop", "--workers"], "--workers needs a value"),
        (["laptop", "--workers", "0"], "--workers must be a positive number, not 0"),
        (["laptop", "--seeds", "1,x"], "--seeds must be numbers, not x"),
        (["laptop", "--only", "sac"], "--only sac names none"),
        (["laptop", "--submit"], "--submit goes with --slurm"),
        (["laptop", "--task", "72"], "--task must be a number below 72"),
    ],
)
def test_bad_input_is_one_sentence(flags, words, grid):
    out, err = grid.run(*flags, code=2)
    assert not out and err.count("\n") == 1 and words in err and err.startswith("error: ")
    assert not (grid.root / "results").exists()


def test_help(grid):
    out, _ = grid.run("--help")
    assert out == grid.run("laptop", "--help")[0]
    assert all(name in out for name in GRIDS)
    options = set(
        re.findall(r"--[a-z][a-z-]+", re.search(r"while .*?\ndone", (ROOT / "benchmark.sh").read_text(), re.S)[0])
    )
    assert options - {"--help"} <= set(re.findall(r"--[a-z][a-z-]+", out))


def test_a_real_training(tmp_path):
    """the scripts understand the grid's commands to train, resume and evaluate; plot.py reads what they leave"""
    tiny = "--num-envs 2 --num-steps 8 --num-minibatches 1 --update-epochs 1 --hidden-size 8 --total-timesteps 64"

    def run(name, *flags):
        command = ["bash", ROOT / "benchmark.sh", name, "--envs", "Pendulum-v1", "--seeds", "1", *flags]
        env = os.environ | dict(PYTHON=sys.executable)
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    train = "--only", "trudi", "--out", "out", "--", *tiny.split(), "--diffusion-steps", "1"
    assert run("smoke", *train).startswith("start trudi")
    ((key, (trained,)),) = plot.load([tmp_path / "out"]).items()
    assert key == ("Pendulum-v1", "TruDi") and trained.ended and trained.budget[0] == 64
    manifest = json.loads((tmp_path / "out/manifest.jsonl").read_text())
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert manifest["git"] == (head or None) and manifest["versions"]["torch"] == torch.__version__
    (trained.path / "eval.json").unlink()
    assert run("smoke", *train).startswith("resume trudi")
    run("ablation-sampler", "--only", "trudi_sde", "--from", "out", "--out", "samplers")
    ((key, (evaluated,)),) = plot.load([tmp_path / "samplers"]).items()
    assert key == ("Pendulum-v1", "TruDi sde") and evaluated.final == trained.others["sde"] != trained.final


# plot.py: statistics


def brute_iqm(x):
    x = sorted(x)
    cut = int(0.25 * len(x))
    middle = x[cut : len(x) - cut]
    return sum(middle) / len(middle)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 12, 50])
def test_iqm(n):
    x = np.random.default_rng(n).normal(size=(6, n)) ** 3
    np.testing.assert_allclose(plot.iqm(x), [brute_iqm(row) for row in x], rtol=1e-12)
    np.testing.assert_allclose(plot.iqm(x[0]), brute_iqm(x[0]), rtol=1e-12)


@pytest.mark.parametrize("n", [1, 3, 4, 18, 37])
def test_iqm_is_scipys_trimmed_mean(n):
    trim_mean = pytest.importorskip("scipy.stats").trim_mean
    x = np.random.default_rng(n).normal(size=(6, n))
    np.testing.assert_allclose(plot.iqm(x), trim_mean(x, 0.25, axis=1), rtol=1e-12)


def test_iqm_ignores_a_quarter_of_outliers():
    assert plot.iqm(np.array([-1e9, 1, 2, 3, 4, 5, 6, 1e9])) == 3.5


def test_bootstrap_against_all_resamples():
    """two tasks with three runs each: all 27 x 27 resamples can be written down"""
    tasks = [np.array([0.1, 0.5, 0.6]), np.array([0.2, 0.9, 1.0])]
    draws = [list(itertools.product(x, repeat=3)) for x in tasks]
    values = [brute_iqm([*a, *b]) for a in draws[0] for b in draws[1]]
    low, high = plot.bootstrap(tasks, samples=40_000)
    assert abs(low - np.percentile(values, 2.5)) < 0.01 and abs(high - np.percentile(values, 97.5)) < 0.01


def test_bootstrap_is_stratified():
    """tasks without spread have an interval without width, however far apart they are; pooled draws would not"""
    tasks = [np.full(4, 0.1), np.full(4, 0.9)]
    np.testing.assert_allclose(plot.bootstrap(tasks), [0.5, 0.5])


def test_bootstrap_of_known_distribution():
    """the interval of 50 seeds of a Normal: IQM's standard error is 1.09/sqrt(n) or so, and 95 % is +- 1.96 of it"""
    rng = np.random.default_rng(3)
    widths = [np.subtract(*plot.bootstrap([rng.normal(size=50)], 500)[::-1]) for _ in range(40)]
    assert abs(np.mean(widths) / (2 * 1.96 * 1.09 / np.sqrt(50)) - 1) < 0.1


def test_bootstrap_covers_with_many_seeds():
    rng = np.random.default_rng(4)
    inside = [low <= 0 <= high for low, high in (plot.bootstrap([rng.normal(size=30)], 400) for _ in range(200))]
    assert 0.88 <= np.mean(inside) <= 0.99


def test_bootstrap_takes_curves_point_by_point():
    rng = np.random.default_rng(5)
    tasks = [rng.normal(size=(4, 3)), rng.normal(size=(6, 3))]
    low, high = plot.bootstrap(tasks, 500)
    for i in range(3):
        np.testing.assert_allclose((low[i], high[i]), plot.bootstrap([t[:, i] for t in tasks], 500))


# plot.py: runs


def fake_run(folder, values, step=100, seconds=1.0, ended=True, final=None, **settings):
    """a run with an evaluation every `step` steps, and rows without one between them"""
    name, _, seed = folder.name.rpartition("_")
    folder.mkdir(parents=True)
    total = step * len(values) if ended else 10 * step * len(values)
    args = dict(env_id=name, seed=int(seed), suite="DMC", total_timesteps=total, num_envs=5, num_steps=10)
    args |= dict(diffusion_steps=4, trust_region="split", eval_sampler="ode") | settings
    (folder / "args.json").write_text(json.dumps(args))
    with (folder / "metrics.csv").open("w") as f:
        writer = csv.writer(f)
        writer.writerow(["global_step", "time/elapsed", "charts/episode_return", "eval/return"])
        for i, value in enumerate(values):
            writer.writerow([step * i + step // 2, seconds * (i + 0.5), -1, ""])
            writer.writerow([step * (i + 1), seconds * (i + 1), -1, value])
    if ended:
        final = values[-1] if final is None else final
        (folder / "eval.json").write_text(json.dumps(dict(ode=dict(mean=final), sde=dict(mean=final - 1))))


def table(text):
    rows = [[c.strip() for c in x.strip("| ").split("|")] for x in text.splitlines() if x.startswith("|")]
    return {tuple(r[:2]): r for r in rows}


def test_report_of_finished_runs(tmp_path):
    for seed, final in ((1, 500), (2, 600), (3, 700)):
        fake_run(tmp_path / f"trudi/CheetahRun-v1_{seed}", [100, 200, 300], final=final, seconds=60)
        fake_run(tmp_path / f"trudi/WalkerWalk-v1_{seed}", [100, 200, 300], final=final - 400)
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
    assert table(plot.brief(groups))["REPPO", "600"][1:] == ["600", "-", "2"]  # no task but one is common: no aggregate
    for seed in (1, 2):
        fake_run(tmp_path / f"reppo/WalkerWalk-v1_{seed}", [300], ended=seed == 1)
    (tmp_path / "reppo/WalkerWalk-v1_3").mkdir()
    (tmp_path / "reppo/WalkerWalk-v1_3/output.txt").write_text("error")
    text = plot.brief(plot.load([tmp_path]))
    rows, (low, high) = table(text), plot.bootstrap([np.array([0.5, 0.7]), np.array([0.6, 0.8])])
    want = [f"**{brute_iqm([0.5, 0.7, 0.6, 0.8]):.3f}**", f"{low:.3f} to {high:.3f}", "4"]
    assert rows["TruDi", "600"][2:] == ["700", *want]
    assert rows["REPPO", "600"][2] == "200*" and rows["REPPO", "600"][-1] == "5"  # (300 + 300 + 0) / 3
    assert "* Not at their end: 2 runs" in text
    plot.main([str(tmp_path), "--table", "brief"])
    plot.main([str(tmp_path), "--table", "runs"])
    brief, runs = capsys.readouterr().out.split("| env |")
    assert brief == text + "\n" and "IQM" not in runs and runs.count("\n| ") == 4 and "* Not at its end" in runs


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
    assert "* Not at its end: TruDi on CheetahRun-v1, seed 2, at step 200; counts with 200" in text
    assert "seed 3, before its first row; counts with 0.00" in text  # no return of DMC is lower
    assert f"| TruDi | **{brute_iqm([0.8, 0.2, 0]):.3f}** |" in text
    fake_run(tmp_path / "trudi/Pendulum-v1_1", [-200], suite="other")
    fake_run(tmp_path / "trudi/Pendulum-v1_2", [], suite="other", ended=False)
    text = plot.report(plot.load([tmp_path]))
    assert table(text)["Pendulum-v1", "TruDi"][4:6] == ["-200, none*", "**-200**"]  # here 0 would be a triumph
    assert "seed 2, before its first row; has no value and counts nowhere" in text


def test_torn_and_empty_logs(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200], ended=False)
    with (tmp_path / "trudi/CheetahRun-v1_1/metrics.csv").open("a") as f:
        f.write("250,2.4")  # killed while it wrote
    fake_run(tmp_path / "trudi/CheetahRun-v1_2", [], ended=False)
    fake_run(tmp_path / "trudi/CheetahRun-v1_3", [5], ended=False)
    (tmp_path / "trudi/CheetahRun-v1_3/metrics.csv").write_text("")
    (runs,) = plot.load([tmp_path]).values()
    assert [r.final for r in runs] == [200, 0, 0]
    assert not any(r.ended for r in runs)
    plot.report(plot.load([tmp_path]))
    plot.draw(plot.load([tmp_path]), tmp_path / "figures")


def test_ragged_evaluations(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200, 300, 400], step=100)
    fake_run(tmp_path / "trudi/CheetahRun-v1_2", [150, 250], step=150, ended=False)
    (runs,) = plot.load([tmp_path]).values()
    grid, end = plot.common_grid(runs, 0, 26)
    assert grid[0] == 150 and grid[-1] == 400 and end == 300
    values = np.stack([plot.on_grid(r, grid, 0) for r in runs])
    np.testing.assert_allclose(values[0], grid)  # linear between evaluations
    np.testing.assert_allclose(values[1], np.where(grid < 300, 150 + (grid - 150) * 100 / 150, 250))  # the last is kept


def test_line_is_dashed_where_a_run_is_missing(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200, 300, 400])
    fake_run(tmp_path / "trudi/CheetahRun-v1_2", [100, 200], ended=False)
    axes = plot.Figure().subplots()
    groups = plot.load([tmp_path])
    plot.draw_task(axes, groups, "CheetahRun-v1", 0, 1, plot.colours(["TruDi"]))
    solid, dashed = axes.lines[0], axes.lines[1]
    assert dashed.get_linestyle() == "--" and max(solid.get_xdata()) <= 200 + 1e-6 and max(dashed.get_xdata()) == 400
    assert solid.get_label() == "TruDi, 2 seeds"
    assert any(x.get_marker() == "x" and x.get_xdata()[0] == 200 for x in axes.lines)  # where it stopped
    np.testing.assert_allclose(dashed.get_ydata()[-1], (400 + 200) / 2)


def test_each_seed_is_drawn_up_to_five(tmp_path):
    for seed in range(6):
        fake_run(tmp_path / f"trudi/CheetahRun-v1_{seed}", [1, 2])
        if seed < 5:
            fake_run(tmp_path / f"reppo/CheetahRun-v1_{seed}", [1, 2])
    axes = plot.Figure().subplots()
    plot.draw_task(axes, plot.load([tmp_path]), "CheetahRun-v1", 0, 1, plot.colours(["TruDi", "REPPO"]))
    thin = [x.get_color() for x in axes.lines if x.get_linewidth() < 1]
    assert thin == [plot.COLOURS["REPPO"]] * 5 and len(axes.collections) == 1  # TruDi has a band instead


def test_wall_clock(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100, 200], seconds=60)
    fake_run(tmp_path / "reppo/CheetahRun-v1_1", [100, 200], seconds=30)
    groups = plot.load([tmp_path])
    axes = plot.Figure().subplots()
    (_, _, _), (axis, unit, text) = plot.units(groups)
    plot.draw_task(axes, groups, "CheetahRun-v1", axis, unit, plot.colours(["TruDi", "REPPO"]))
    ends = {x.get_label().split(",")[0]: max(x.get_xdata()) for x in axes.lines if not x.get_label().startswith("_")}
    assert text.startswith("minutes") and ends == {"TruDi": 2.0, "REPPO": 1.0}


def test_aggregate_at_equal_time(tmp_path):
    """Each task when its fastest run came to its end; a run that crashed earlier does not set the clock."""
    for seed in (1, 2):
        fake_run(tmp_path / f"trudi/CheetahRun-v1_{seed}", [100, 200, 300, 400 * seed], seconds=60, final=900)
        fake_run(tmp_path / f"reppo/CheetahRun-v1_{seed}", [100, 200, 300, 400], seconds=45)
        fake_run(tmp_path / f"trudi/WalkerWalk-v1_{seed}", [0, 500], seconds=60)
        fake_run(tmp_path / f"reppo/WalkerWalk-v1_{seed}", [600, 700], seconds=120)
    fake_run(tmp_path / "reppo/CheetahRun-v1_3", [50], seconds=45, ended=False)
    rows = table(plot.report(plot.load([tmp_path])))
    early = {k[0]: row[4:6] for k, row in rows.items() if k[0] in ("TruDi", "REPPO")}
    assert early["TruDi"][0] == f"**{brute_iqm([0.3, 0.3, 0.5, 0.5]):.3f}**"  # after 180 and 120 seconds
    assert early["REPPO"][0] == f"**{brute_iqm([0.4, 0.4, 0.05, 0.6, 0.6]):.3f}**"
    assert early["TruDi"][1] == "0.400 to 0.400"  # both runs of each task are the same, and tasks are not resampled
    shutil.rmtree(tmp_path / "reppo/CheetahRun-v1_3")
    text = (tmp_path / "reppo/CheetahRun-v1_1/metrics.csv").read_text().replace("time/elapsed", "other")
    (tmp_path / "reppo/CheetahRun-v1_1/metrics.csv").write_text(text)  # without times there is no such column
    rows = table(plot.report(plot.load([tmp_path / "reppo", tmp_path / "trudi"])))
    assert all(row[4:6] == ["-", "-"] for k, row in rows.items() if k[0] in ("TruDi", "REPPO"))


def test_equal_work_is_timed_by_the_fastest_run(tmp_path):
    """A seed that ran on a slower machine says nothing about its algorithm's speed."""
    for seed, seconds in ((1, 60), (2, 20), (3, 90)):
        fake_run(tmp_path / f"trudi/CheetahRun-v1_{seed}", [100, 200, 300], seconds=seconds)
    fake_run(tmp_path / "trudi/CheetahRun-v1_4", [10], seconds=5, ended=False, total_timesteps=300)
    fake_run(tmp_path / "trudi/CheetahRun-v1_5", [], ended=False, total_timesteps=300)  # it has no pace at all
    (runs,) = plot.load([tmp_path]).values()
    for run in runs[:3]:
        np.testing.assert_allclose(run.points[1], [20, 40, 60])
        assert run.budget == (300, 60)
    np.testing.assert_allclose(runs[3].points[:, 0], [100, 20, 10])  # a crashed run does not set the pace
    assert table(plot.report({("CheetahRun-v1", "TruDi"): runs[:3]}))["CheetahRun-v1", "TruDi"][-1] == "1"
    fake_run(tmp_path / "reppo/CheetahRun-v1_1", [1, 2], seconds=60, num_envs=5)
    fake_run(tmp_path / "reppo/CheetahRun-v1_2", [1, 2], seconds=20, num_envs=7)  # other work: both keep theirs
    runs = plot.load([tmp_path])["CheetahRun-v1", "REPPO"]
    assert [r.budget[1] for r in runs] == [120, 40]


def test_aggregate_takes_common_tasks_of_a_suite(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [400])
    fake_run(tmp_path / "trudi/WalkerWalk-v1_1", [1000])
    fake_run(tmp_path / "trudi/Pendulum-v1_1", [-100], suite="other")
    fake_run(tmp_path / "trudi/G1JoystickFlatTerrain-v1_1", [30], suite="humanoid")
    fake_run(tmp_path / "reppo/CheetahRun-v1_1", [300])
    text = plot.report(plot.load([tmp_path]))
    assert "over the tasks that all have: CheetahRun-v1." in text
    assert "| TruDi | **0.400** | - (1 task with one seed)" in text and "| REPPO | **0.300** |" in text
    assert "| TruDi | **30.000** |" in text and "No aggregate for other: no common scale" in text


def test_simulators_are_not_mixed(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [400], backend="envpool")
    fake_run(tmp_path / "trudi/CheetahRun_1", [700], env_id="CheetahRun", backend="playground")
    text = plot.report(plot.load([tmp_path]))
    assert "DMC by Playground, return / 1000, over the tasks that all have: CheetahRun." in text
    assert "DMC, return / 1000, over the tasks that all have: CheetahRun-v1." in text


def test_no_interval_where_a_task_has_one_seed(tmp_path):
    for name in ("CheetahRun-v1_1", "CheetahRun-v1_2", "WalkerWalk-v1_1"):
        fake_run(tmp_path / "trudi" / name, [100 * int(name[-1])])
    assert "- (1 task with one seed)" in plot.report(plot.load([tmp_path]))


def test_a_metric_that_a_run_does_not_have(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [100])
    (run,) = plot.load([tmp_path], "success")["CheetahRun-v1", "TruDi, training episodes"]
    assert np.isnan(run.final) and not run.others


def test_success_is_the_metric_of_maniskill(tmp_path):
    folder = tmp_path / "trudi/PushCube-v1_1"
    fake_run(folder, [10.0], suite="ManiSkill")
    (folder / "metrics.csv").write_text("global_step,time/elapsed,eval/return,eval/success_once\n100,1.0,10,0.75\n")
    (folder / "eval.json").write_text(json.dumps(dict(ode=dict(mean=10, success_once=0.5))))
    assert table(plot.report(plot.load([tmp_path])))["PushCube-v1", "TruDi"][4] == "0.50"


def test_names_and_colours(tmp_path):
    for label, name in {
        "trudi": "TruDi",
        "trudi_continuous": "TruDi",
        "reppo_maniskill": "REPPO",
        "dime": "DIME (on-policy)",
        "trudi_kl0.2": "TruDi kl 0.2",
        "trudi_best20": "TruDi best 20",
        "mine": "mine",
    }.items():
        assert plot.display_name(label, {}) == name
    assert plot.display_name("trudi", dict(trust_region="none", diffusion_steps=4)) == "DIME (on-policy)"
    assert plot.display_name("ppo_continuous", dict(objective="spo", clip_coef=0.2)) == "SPO"
    assert plot.display_name("ppo_continuous", dict(objective="ppo", clip_coef=0.2)) == "PPO"
    assert plot.display_name("copied", dict(objective="ppo", clip_coef=0.2)) == "PPO"
    assert plot.display_name("copied", dict(trust_region="none", td_lambda=0.9)) == "REPPO"
    assert plot.colours(["TruDi", "REPPO"])["TruDi"] == plot.colours(["TruDi"])["TruDi"]
    assert len(set(plot.COLOURS.values())) == len(plot.COLOURS)
    for x in (50, 0.01, 10):
        fake_run(tmp_path / f"trudi_kl{x}/CheetahRun-v1_1", [1])
    assert [name for _, name in plot.load([tmp_path])] == ["TruDi kl 0.01", "TruDi kl 10", "TruDi kl 50"]


def test_mixed_settings_are_named(tmp_path):
    fake_run(tmp_path / "trudi/CheetahRun-v1_1", [1])
    fake_run(tmp_path / "trudi/CheetahRun-v1_2", [1], num_envs=7)
    fake_run(tmp_path / "again/trudi/CheetahRun-v1_2", [1])
    text = plot.report(plot.load([tmp_path]))
    assert "the runs of TruDi on CheetahRun-v1 differ in num_envs" in text and "several runs of the same seed" in text


def test_copies_from_elsewhere(tmp_path):
    fake_run(tmp_path / "a/CheetahRun-v1_1", [100, 300])
    (tmp_path / "a/CheetahRun-v1_1/eval.json").unlink()  # only metrics.csv and args.json: the log shows that it ended
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/CheetahRun-v1_4.csv").write_text("global_step,charts/episodic_return\n10,1\n20,2\n")
    (tmp_path / "theirs/notes.csv").write_text("a,b\n1,2\n")
    groups = plot.load([tmp_path / "a", tmp_path / "theirs/CheetahRun-v1_4.csv", tmp_path / "theirs", tmp_path / "a"])
    assert {k: len(v) for k, v in groups.items()} == {
        ("CheetahRun-v1", "TruDi"): 1,
        ("CheetahRun-v1", "theirs, training episodes"): 1,
    }
    (ours,), (theirs,) = groups.values()
    assert ours.ended and ours.final == 300 and theirs.ended is None and theirs.seed == "4" and theirs.suite == "DMC"
    assert "? of 1" in plot.report(groups)
    plot.draw(groups, tmp_path / "figures")


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_nothing_to_plot(what, tmp_path, capsys):
    path = tmp_path / "missing" if what == "missing" else tmp_path
    with pytest.raises(SystemExit) as e:
        plot.main([str(path)])
    assert e.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_committed_runs_give_the_tables_of_the_readme(tmp_path, capsys):
    plot.main([str(ROOT / "results/laptop"), "--out", str(tmp_path)])
    out = capsys.readouterr().out
    rows = [x for x in out.splitlines() if x.startswith("|") and "-v" in x.split("|")[1]]
    text = (ROOT / "README.md").read_text()
    assert len(rows) == 24 and not [x for x in rows if x not in text]
    envs = {x.split("|")[1].strip() for x in rows}
    assert len(envs) == 6
    for name in [f"{env}.png" for env in envs] + ["tasks.png", "aggregate_DMC.png"]:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and (tmp_path / name).stat().st_size > 10_000


def test_the_laptop_grid_is_shown_in_the_readme():
    """Its table, aggregate and notes stand there as plot.py prints them, with the number of its runs."""
    text = (ROOT / "README.md").read_text()
    assert plot.report(plot.load([ROOT / "results/laptop"])) in text
    finished = len(list((ROOT / "results/laptop").glob("*/*/eval.json")))
    assert f"{finished} of its 72 runs" in text


# docs/figures/samplers.py


@pytest.fixture(scope="module")
def samplers():
    spec = importlib.util.spec_from_file_location("samplers", ROOT / "docs/figures/samplers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("sampler", ["sde", "ode"])
def test_sde_and_flow_end_in_the_target(sampler, samplers):
    policy = samplers.MixturePolicy(eta=0.5, num_steps=128)
    x = samplers.sample(policy, sampler, 0.5, 20_000)
    weight, left, right = samplers.modes(x[-1])
    assert abs(weight - 0.65) < 0.025 and abs(left / 0.15 - 1) < 0.08 and abs(right / 0.15 - 1) < 0.08
    assert abs(x[-1][x[-1] > 0].mean() - 0.6) < 0.02 and abs(x[-1][x[-1] < 0].mean() + 0.6) < 0.02
    for k in (32, 64, 96):  # and go through the marginals of the noising process
        mean, var = policy.marginals[k]
        want_mean = (policy.weights * mean).sum()
        want_var = var + (policy.weights * mean**2).sum() - want_mean**2
        assert abs(x[k].mean() - want_mean) < 0.05 and abs(x[k].var() / want_var - 1) < 0.08


def test_a_larger_scale_sharpens(samplers):
    policy = samplers.MixturePolicy(eta=0.5, num_steps=64)
    widths = [samplers.modes(samplers.sample(policy, "ode", c, 5000)[-1])[1:] for c in (0.5, 0.75, 1.0)]
    assert (np.diff([max(w) for w in widths]) < 0).all() and max(widths[2]) < 0.5 * 0.15
    weights = [samplers.modes(samplers.sample(policy, "ode", c, 5000)[-1])[0] for c in (0.5, 0.75, 1.0)]
    assert (np.diff(weights) > 0.05).all()  # greedier: the likelier mode gains


def test_paper_settings_widen_the_flow(samplers):
    """what the script says below its figure: the noising does not reach the prior at eta 2.5"""
    policy = samplers.MixturePolicy(eta=2.5, num_steps=8)
    assert 1 < policy.marginals[0][1] < 1.3 and policy.eta**2 == 6.25
    sde, flow, greedy = (
        max(samplers.modes(samplers.sample(policy, *s, 5000)[-1])[1:]) for s in samplers.SAMPLERS.values()
    )
    assert greedy < 0.15 < sde < flow


def test_score_is_the_gradient_of_the_log_density(samplers):
    policy = samplers.MixturePolicy(eta=1.0, num_steps=4)
    x = torch.linspace(-2, 2, 9)[:, None].requires_grad_()
    for k in range(5):
        (want,) = torch.autograd.grad(policy.density(x, k).log().sum(), x)
        torch.testing.assert_close(policy.score(x.detach(), k), want, rtol=1e-3, atol=1e-3)


def test_control_gives_the_mean_of_the_reversed_noising(samplers):
    """E[x_{k+1} | x_k] by numerical integration of noising kernel x marginal"""
    policy = samplers.MixturePolicy(eta=1.0, num_steps=8)
    y, x, k = torch.linspace(-6, 6, 24_001)[:, None], torch.tensor([[-1.0], [0.1], [0.8]]), torch.tensor(5)
    e, h = policy.sizes[5], 1.0
    joint = policy.density(y, 6) * torch.exp(-((x - (1 - e * h) * y[:, 0]) ** 2) / (4 * e))  # (3, y)
    want = (joint * y[:, 0]).sum(1) / joint.sum(1)
    mean = x + e * (policy.control(k, None, x) - h * x)
    torch.testing.assert_close(mean[:, 0], want, rtol=1e-3, atol=1e-3)


def test_samplers_figure(samplers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(samplers, "SETTINGS", (dict(eta=0.5, num_steps=16), dict(eta=2.5, num_steps=8)))
    samplers.draw(tmp_path / "samplers.png", batch=500)
    assert (tmp_path / "samplers.png").stat().st_size > 10_000 and capsys.readouterr().out.count("\n") == 6
    assert (ROOT / "docs/figures/samplers.png").exists()
