"""benchmark.sh and tools/benchmark.py, with stub scripts and with one real training."""

import inspect
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

import gymnasium
import pytest

import trudi_continuous
import two_doors
from tools import benchmark, plot

ROOT = Path(__file__).parents[1]
NUM_RUNS = {
    "smoke": 2 * 7,
    "laptop": (20 * 3 + 6 * 2) * 7,
    "two-doors": 5 * 7,
    "ablation-entropy": 3 * 5,
    "paper-dmc": 20 * 10 * 7,
    "paper-humanoid": 4 * 10 * 4,
    "paper-maniskill": 13 * 10 * 4,
    "paper-humanoidbench": 30 * 10 * 7,
    "paper-isaaclab": 6 * 10 * 7,
    "ablation-kl": 6 * 3 * 7,
    "ablation-steps": 6 * 3 * 5,
    "ablation-sampler": 6 * 3 * 6,
    "ablation-time": 6 * 3,
}


class Grid:
    """A copy of the runner beside stub scripts."""

    def __init__(self, root):
        self.root = root
        self.env = os.environ | {"PYTHON": sys.executable}
        shutil.copy(ROOT / "benchmark.sh", root)
        (root / "tools").mkdir()
        shutil.copy(ROOT / "tools/benchmark.py", root / "tools")
        for algorithm in ("trudi", "reppo", "ppo"):
            for kind in ("continuous", "maniskill"):
                shutil.copy(ROOT / "tests/stub_script.py", root / f"{algorithm}_{kind}.py")
        (root / "wishes").mkdir()

    def start(self, *flags, before=(), **kwargs):
        """smoke with four algorithms only, unless the flags choose others"""
        if "smoke" in flags and "--only" not in flags:
            flags += ("--only", "trudi reppo ppo dime")
        return subprocess.Popen(
            [*before, "bash", "benchmark.sh", *flags],
            cwd=self.root,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **kwargs,
        )

    def run(self, *flags, code=0):
        process = self.start(*flags)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, (out, err)
        return out, err

    def wish(self, run, what):
        (self.root / "wishes" / run.replace("/", "_")).write_text(what)

    def calls(self):
        path = self.root / "calls.txt"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def starts(self):
        return [call[2:] for call in self.calls() if call[1] == "start"]

    def wait_for_checkpoints(self, count):
        deadline = time.time() + 30
        while time.time() < deadline:
            if len(list(self.root.glob("results/*/*/*/checkpoint.pt"))) >= count:
                return
            time.sleep(0.05)


@pytest.fixture
def grid(tmp_path):
    return Grid(tmp_path)


@pytest.fixture(scope="module")
def dry_runs():
    """name -> the lines of --dry-run"""
    lines = {}
    for name in NUM_RUNS:
        done = subprocess.run(
            ["bash", ROOT / "benchmark.sh", name, "--dry-run", "--out", "no/such/folder"],
            env=os.environ | {"PYTHON": sys.executable},
            capture_output=True,
            text=True,
        )
        lines[name] = done.stdout.splitlines()
    return lines


# === the grids ===
def test_all_grids_are_tested():
    assert list(benchmark.GRIDS) == list(NUM_RUNS)


@pytest.mark.parametrize("name", NUM_RUNS)
def test_grids_have_all_runs_once(name, dry_runs):
    lines = dry_runs[name]
    assert len(lines) == NUM_RUNS[name]
    folders = [re.search(r"--run-dir (\S+)$", line)[1] for line in lines]
    assert len(set(folders)) == len(lines)
    for line, folder in zip(lines, folders, strict=True):
        _, label, env, seed = line.split(": ")[0].split()
        assert folder == f"no/such/folder/{label}/{re.sub('[^A-Za-z0-9.-]', '_', env)}_{seed}"


@pytest.mark.parametrize("name", NUM_RUNS)
def test_grids_use_flags_that_exist(name, dry_runs):
    commands = set()
    for line in dry_runs[name]:
        command = line.split(": ", 1)[1]
        commands.add(re.sub(r"--(env-id|seed|run-dir) \S+", "", command))
    for command in commands:
        _, script, *words = command.split()
        text = (ROOT / Path(script).name).read_text()
        for flag in (word for word in words if word.startswith("--")):
            setting = flag[2:].replace("-", "_")
            kind = ""
            if setting.startswith("no_"):
                setting = setting.removeprefix("no_")
                kind = "bool"
            assert re.search(rf"^    {setting}: {kind}", text, re.M), (flag, script)


def test_cpu_grids_use_envs_that_exist(dry_runs):
    known = set(pytest.importorskip("envpool").list_all_envs())
    assert gymnasium.spec("TwoDoors-v0").entry_point is two_doors.TwoDoors
    known.add("two_doors:TwoDoors-v0")
    for name in [name for name in NUM_RUNS if not name.startswith("paper-")]:
        assert {line.split()[2] for line in dry_runs[name]} <= known


@pytest.mark.slow
def test_playground_grids_use_envs_that_exist(dry_runs):
    tasks = pytest.importorskip("simulators.playground").TASKS
    for name, suite, count in (("paper-dmc", "DMC", 20), ("paper-humanoid", "humanoid", 4)):
        envs = {line.split()[2] for line in dry_runs[name]}
        assert len(envs) == count
        for env in envs:
            settings = {"suite": tasks[env], "backend": "playground"}
            assert plot.suite_of(env, settings) == f"{suite} by Playground"
        assert all("--backend playground" in line for line in dry_runs[name])


@pytest.mark.slow
def test_maniskill_grid_uses_envs_that_exist(dry_runs):
    pytest.importorskip("mani_skill")
    code = (
        "import trudi_maniskill\n"
        "trudi_maniskill.import_tasks(None)\n"
        "from mani_skill.utils.registration import REGISTERED_ENVS\n"
        "print(*REGISTERED_ENVS)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    envs = {line.split()[2] for line in dry_runs["paper-maniskill"]}
    assert envs <= set(done.stdout.split())


def test_ablations_vary_what_they_say(dry_runs):
    def values(name, flag):
        found = {float(re.search(rf"{flag} (\S+)", x)[1]) for x in dry_runs[name] if flag in x}
        return sorted(found)

    assert values("ablation-kl", "--kl-bound") == [0.01, 0.1, 0.2, 0.4, 1, 10, 50]
    assert values("ablation-steps", "--diffusion-steps") == [1, 2, 4, 8, 16]
    assert values("ablation-sampler", "--eval-score-scale") == [0.5, 1.0, 1.5]
    assert values("ablation-sampler", "--eval-best-of") == [10, 20]
    assert any("--eval-sampler sde" in line for line in dry_runs["ablation-sampler"])
    dime = [line for line in dry_runs["laptop"] if line.split()[1] == "dime"]
    assert dime
    for line in dime:
        assert "trudi_continuous.py" in line and "--trust-region none" in line


def test_the_laptop_grid_has_what_is_needed_first(dry_runs):
    """Six tasks with four algorithms, then 20 tasks; seeds 4 and 5 of the six tasks are last."""
    cells = [tuple(line.split(": ")[0].split()[1:]) for line in dry_runs["laptop"]]
    six = set(benchmark.SIX_TASKS)
    assert len({env for _, env, _ in cells}) == 20 and six < {env for _, env, _ in cells}
    first = cells[: 6 * 4 * 3]
    assert {label for label, *_ in first} == {"trudi", "reppo", "ppo", "dime"}
    assert {env for _, env, _ in first} == six
    then = cells[len(first) :][: 14 * 3 * 3]
    assert {label for label, *_ in then} == {"trudi", "reppo", "ppo"}
    dime = cells[len(first) + len(then) :][: 14 * 3]
    assert {label for label, *_ in dime} == {"dime"}
    last = cells[-6 * 7 * 2 :]
    assert {seed for *_, seed in last} == {"4", "5"} and {env for _, env, _ in last} == six
    assert {seed for *_, seed in cells[: -len(last)]} == {"1", "2", "3"}


def test_chosen_envs_and_seeds_keep_to_their_stages():
    def cells(*flags):
        planned = benchmark.plan(benchmark.parse_args(["laptop", "--only", "trudi", *flags]))
        return [(env, seed) for _, env, seed in planned]

    assert cells("--envs", "WalkerRun-v1") == [("WalkerRun-v1", seed) for seed in (1, 2, 3)]
    assert cells("--envs", "WalkerWalk-v1") == [("WalkerWalk-v1", seed) for seed in range(1, 6)]
    assert cells("--seeds", "4") == [(env, 4) for env in benchmark.SIX_TASKS]
    assert len(cells("--seeds", "2")) == 20
    assert cells("--envs", "Mine-v0", "--seeds", "7") == [("Mine-v0", 7)]


def test_matched_time(grid):
    """REPPO makes as many steps as fit into TruDi's time, each at its fastest finished run."""
    times = {"trudi": {1: 900.0, 2: 600.0}, "reppo": {1: 300.0, 2: 100.0}}
    for label, seconds in times.items():
        for seed, elapsed in seconds.items():
            folder = grid.root / f"results/laptop/{label}/CheetahRun-v1_{seed}"
            folder.mkdir(parents=True)
            log = f"global_step,time/elapsed\n500,7.0\n1000,{elapsed}\n"
            (folder / "metrics.csv").write_text(log)
            if (label, seed) != ("reppo", 2):  # this one is not finished
                (folder / "eval.json").write_text("{}")
    flags = ["ablation-time", "--envs", "CheetahRun-v1", "--seeds", "1", "--dry-run"]
    out, _ = grid.run(*flags)
    assert out.startswith("start reppo_matched CheetahRun-v1 1: ") and out.count("\n") == 1
    assert "reppo_continuous.py" in out and "--total-timesteps 2000000 " in out
    out, err = grid.run(*flags[:2], "WalkerWalk-v1", *flags[3:], code=2)
    assert "needs finished runs of trudi and reppo on WalkerWalk-v1 in results/laptop" in err


def test_suites_have_the_settings_of_the_paper(dry_runs):
    humanoid = "--gamma 0.97 --vmin -10 --vmax 10 --no-normalize-reward --num-minibatches 16 "
    for line in dry_runs["paper-humanoid"]:
        label = line.split()[1]
        flags = re.search(r"--seed \d+ (.*?)--backend ", line)[1]
        if label == "ppo":
            assert flags == "--gamma 0.97 "
        elif label == "dime":
            assert flags == "--trust-region none " + humanoid
        else:
            assert flags == humanoid


def test_scripts_know_the_settings_of_two_suites(dry_runs):
    """Of HumanoidBench and Isaac Lab: the grids give none, so they cannot contradict them."""
    suites = {"paper-humanoidbench": "HumanoidBench", "paper-isaaclab": "IsaacLab"}
    for name, suite in suites.items():
        for line in dry_runs[name]:
            _, suite_of_id = trudi_continuous.choose_backend(line.split()[2], "auto", "cuda")
            assert suite_of_id == suite
            flags = re.search(r"--seed \d+ (.*?)--device ", line)[1]
            assert flags in ("", "--trust-region none ", "--objective spo ")


def test_flags_of_settings():
    settings = {"kl_bound": 0.2, "vmin": -10, "track": True, "normalize_reward": False}
    assert benchmark.to_flags(settings) == [
        "--kl-bound",
        "0.2",
        "--vmin",
        "-10",
        "--track",
        "--no-normalize-reward",
    ]


# === the runner ===
def test_a_grid_runs_is_finished_and_leaves_a_manifest(grid):
    out, _ = grid.run("smoke", "--envs", "CheetahRun-v1")
    assert "4 of 4 runs of smoke are finished" in out
    scripts = [call[0] for call in grid.starts()]
    assert scripts == [f"{name}_continuous.py" for name in ("trudi", "reppo", "ppo", "trudi")]
    for label in ("trudi", "reppo", "ppo", "dime"):
        assert (grid.root / "results/smoke" / label / "CheetahRun-v1_1/eval.json").exists()
    lines = (grid.root / "results/smoke/manifest.jsonl").read_text().splitlines()
    manifest = [json.loads(line) for line in lines]
    assert len(manifest) == 1
    assert manifest[0]["grid"] == "smoke" and manifest[0]["runs"] == 4
    needed = {"git", "changed_files", "python", "versions", "machine", "started"}
    assert needed <= set(manifest[0])
    assert manifest[0]["machine"]["cpu"]
    assert manifest[0]["machine"]["cores"] == os.cpu_count()
    before = len(grid.calls())
    out, _ = grid.run("smoke", "--envs", "CheetahRun-v1")  # once more: nothing is left to do
    assert "4 of 4" in out and len(grid.calls()) == before


def test_a_half_finished_grid_goes_on(grid):
    results = grid.root / "results/smoke"
    existing = {"trudi": ["eval.json", "checkpoint.pt"], "reppo": ["checkpoint.pt"], "ppo": []}
    for name, files in existing.items():
        (results / name / "Pendulum-v1_1").mkdir(parents=True)
        for file in files:
            (results / name / "Pendulum-v1_1" / file).write_text("weights")
    out, _ = grid.run("smoke", "--envs", "Pendulum-v1", "--dry-run")
    states = [line.split()[0] for line in out.splitlines()]
    assert states == ["finished", "resume", "start", "start"]
    grid.run("smoke", "--envs", "Pendulum-v1")
    resumed, *started = grid.starts()
    assert resumed[0] == "reppo_continuous.py" and "--run-dir" not in resumed
    assert resumed[resumed.index("--resume") + 1] == "results/smoke/reppo/Pendulum-v1_1"
    assert [call[0] for call in started] == ["ppo_continuous.py", "trudi_continuous.py"]
    assert all("--run-dir" in call and "--resume" not in call for call in started)


def test_failures_are_listed_and_the_others_run(grid):
    grid.wish("reppo/Pendulum-v1_1", "fail")
    grid.wish("ppo/Pendulum-v1_1", "vanish")
    out, err = grid.run("smoke", "--envs", "Pendulum-v1", code=1)
    assert "2 of 4 runs of smoke are finished" in out
    assert "error: 2 of 4 runs failed:" in err
    sentence = "error: the simulator is on fire (it ended with code 1)"
    assert f"  reppo Pendulum-v1 seed 1: {sentence}" in err
    killed = r"^  ppo Pendulum-v1 seed 1: .*\(it ended with code 137\)$"  # without a word
    assert re.search(killed, err, re.M)
    assert "trudi" not in err and "dime" not in err
    (grid.root / "wishes/reppo_Pendulum-v1_1").unlink()
    (grid.root / "wishes/ppo_Pendulum-v1_1").unlink()
    grid.run("smoke", "--envs", "Pendulum-v1")  # the same command repairs it


def test_a_failure_is_told_by_the_last_output_of_its_process(tmp_path):
    log = tmp_path / "output.txt"
    log.write_bytes(b"error of an earlier attempt\n10 %\r20 %")
    assert benchmark.last_line(log, 0) == "20 %"
    assert benchmark.last_line(log, log.stat().st_size) == "no output"


def most_at_once(calls):
    count = 0
    most = 0
    for _, kind, *_ in sorted(calls):
        count += 1 if kind == "start" else -1
        most = max(most, count)
    return most


@pytest.mark.parametrize("workers", [1, 3])
def test_workers(workers, grid):
    if workers == 3:
        for env in ("CheetahRun-v1", "FingerSpin-v1"):
            grid.wish(f"trudi/{env}_1", "meet")  # does not end before a third run starts
    flags = ["--envs", "CheetahRun-v1,FingerSpin-v1", "--only", "trudi"]
    grid.run("laptop", *flags, "--workers", str(workers))
    assert len(grid.starts()) == 10
    assert most_at_once(grid.calls()) == workers


def test_seeds_envs_and_more_flags(grid):
    flags = ["--seeds", "7,8", "--envs", "A-v1 B-v1", "--only", "dime", "--dry-run"]
    out, _ = grid.run("laptop", *flags, "--", "--track")
    lines = out.splitlines()
    pairs = itertools.product((7, 8), ("A-v1", "B-v1"))
    assert [x.split(":")[0] for x in lines] == [f"start dime {env} {seed}" for seed, env in pairs]
    assert all("--track" in line for line in lines)
    assert not (grid.root / "results").exists() and not grid.calls()


# === signals and locks ===
def test_a_signal_lets_each_run_save_and_the_grid_go_on(grid):
    for name in ("trudi", "reppo", "ppo", "dime"):
        grid.wish(f"{name}/Pendulum-v1_1", "long")
    flags = ["smoke", "--envs", "Pendulum-v1"]
    process = grid.start(*flags, "--workers", "2", start_new_session=True)
    grid.wait_for_checkpoints(2)
    # as a terminal does: the whole group, yet each run gets one signal only
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "runs were stopped or failed" in err
    assert len(grid.starts()) == 2 and len(list(grid.root.glob("results/*/*/*/saved"))) == 2
    assert err.count("stopped by SIGTERM") == 2 and err.count("not started") == 2
    out, _ = grid.run(*flags, "--dry-run")
    states = [line.split()[0] for line in out.splitlines()]
    assert states == ["resume", "resume", "start", "start"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_do_the_same(number, grid):
    grid.wish("trudi/Pendulum-v1_1", "long")
    process = grid.start("smoke", "--envs", "Pendulum-v1")
    grid.wait_for_checkpoints(1)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and len(grid.starts()) == 1
    assert (grid.root / "results/smoke/trudi/Pendulum-v1_1/saved").exists()
    assert err.count("stopped by SIGTERM") == 1 and err.count("not started") == 3


@pytest.mark.slow
def test_nohup_survives_a_closed_terminal(grid):
    grid.wish("trudi/Pendulum-v1_1", "pause")
    flags = ["smoke", "--envs", "Pendulum-v1", "--only", "trudi"]
    process = grid.start(*flags, before=["nohup"])
    grid.wait_for_checkpoints(1)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "1 of 1 runs of smoke are finished" in out


class CountingProcess:
    returncode = None

    def __init__(self):
        self.terminated = 0

    def terminate(self):
        self.terminated += 1

    def poll(self):
        return self.returncode


def test_each_signal_is_passed_on_once():
    runner = benchmark.Runner([], workers=1)
    process = CountingProcess()
    runner.jobs.append(benchmark.Job(None, process, None, 0, 0.0))
    for count in (1, 2):  # the second one ends a run at once
        runner.on_signal(signal.SIGTERM, None)
        runner.look_after_jobs()
        runner.look_after_jobs()
        assert process.terminated == count


def test_two_grids_do_not_share_a_run(grid):
    grid.wish("trudi/Pendulum-v1_1", "long")
    flags = ["smoke", "--envs", "Pendulum-v1", "--only", "trudi"]
    first = grid.start(*flags)
    grid.wait_for_checkpoints(1)
    out, _ = grid.run(*flags, code=1)
    assert "in use by another process" in out and len(grid.starts()) == 1
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)


@pytest.mark.slow
def test_a_run_that_outlives_its_runner_keeps_its_folder(grid):
    grid.wish("trudi/Pendulum-v1_1", "long")
    flags = ["smoke", "--envs", "Pendulum-v1", "--only", "trudi"]
    first = grid.start(*flags)
    grid.wait_for_checkpoints(1)
    first.kill()
    first.communicate(timeout=30)
    out, _ = grid.run(*flags, code=1)
    assert "in use by another process" in out and len(grid.starts()) == 1
    pid = int((grid.root / "results/smoke/trudi/Pendulum-v1_1/pid").read_text())
    os.kill(pid, signal.SIGTERM)


# === the ablation of samplers ===
@pytest.mark.slow
def test_sampler_ablation_evaluates_finished_runs(grid):
    settings = {
        "env_id": "CheetahRun-v1",
        "seed": 1,
        "suite": "DMC",
        "eval_sampler": "ode",
        "eval_score_scale": 1.0,
        "eval_best_of": 10,
        "total_timesteps": 64,
        "num_envs": 8,
        "num_steps": 8,
    }
    finished = {1: ["checkpoint.pt", "eval.json", "args.json"], 2: ["checkpoint.pt", "args.json"]}
    for seed, files in finished.items():
        folder = grid.root / f"results/laptop/trudi/CheetahRun-v1_{seed}"
        folder.mkdir(parents=True)
        for file in files:
            text = "weights" if file == "checkpoint.pt" else json.dumps(settings)
            (folder / file).write_text(text)
    labels = "trudi_sde,trudi_ode0.5,trudi_best20"
    flags = ["ablation-sampler", "--envs", "CheetahRun-v1", "--only", labels]
    out, err = grid.run(*flags, "--seeds", "1,2", code=1)
    assert "3 of 6 runs" in out
    assert err.count("is not a finished run with a checkpoint") == 3
    out = grid.root / "results/ablation-sampler"
    made = json.loads((out / "trudi_ode0.5/CheetahRun-v1_1/args.json").read_text())
    assert made["eval_sampler"] == "ode" and made["eval_score_scale"] == 0.5
    made = json.loads((out / "trudi_best20/CheetahRun-v1_1/args.json").read_text())
    assert made["eval_sampler"] == "best-of-k" and made["eval_best_of"] == 20
    source = grid.root / "results/laptop/trudi/CheetahRun-v1_1"
    assert (source / "checkpoint.pt").read_text() == "weights"
    assert sorted(path.name for path in source.iterdir()) == sorted(finished[1])
    runs = plot.load([out / "trudi_sde"])["CheetahRun-v1", "TruDi sde"]
    # the sampler that was asked for; the run without a source is not lost
    assert {run.seed: run.final for run in runs} == {"1": 2.0, "2": 0.0}
    assert not list(out.rglob("*.pt")) and not list(out.rglob("eval_*.json"))

    # policy.pt comes before checkpoint.pt
    (source / "policy.pt").write_text("weights")
    (source / "checkpoint.pt").write_text("not these")
    grid.run(*flags, "--seeds", "1", "--out", "again")
    assert len(list((grid.root / "again").rglob("eval.json"))) == 3
    assert all("results/laptop/trudi/CheetahRun-v1_1/policy.pt" in x for x in grid.starts()[-3:])


# === array jobs ===
def test_slurm_prints_an_array_job(grid):
    out, err = grid.run(
        "paper-dmc", "--slurm", "--workers", "16", "--seeds", "1 2", "--", "--track"
    )
    assert "#SBATCH --array=0-279%16" in out and "--gres=gpu:1" in out
    assert out.startswith("#!") and not err
    assert "gpu" not in grid.run("laptop", "--slurm")[0]
    assert "split it by --seeds" in grid.run("paper-humanoidbench", "--slurm")[1]
    assert f"'{grid.root}/benchmark.sh'" in out  # it can be submitted from any folder
    assert f"'{grid.root}/results/paper-dmc'" in out
    assert not grid.calls()


@pytest.mark.slow
def test_slurm_tasks_make_up_the_grid(grid):
    flags = ["smoke", "--envs", "CheetahRun-v1 Pendulum-v1"]
    out, _ = grid.run(*flags, "--slurm")
    count = int(re.search(r"--array=0-(\d+)", out)[1]) + 1
    assert count == 8
    (grid.root / "job.sh").write_text(out)
    for task in (0, count - 1):
        env = grid.env | {"SLURM_ARRAY_TASK_ID": str(task)}
        command = ["bash", "job.sh"]
        subprocess.run(command, cwd=grid.root, env=env, check=True, capture_output=True)
    ran = [(call[0], call[call.index("--env-id") + 1]) for call in grid.starts()]
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


# === downloads ===
def test_what_is_downloaded_before_the_runs():
    def needed(*argv):
        return set(benchmark.downloads(benchmark.make_runs(benchmark.parse_args(list(argv)))))

    assert needed("paper-maniskill") == {"PhysX for GPUs"}
    assert needed("paper-humanoid") == {"MuJoCo Menagerie"}
    assert needed("paper-humanoid", "--envs", "CheetahRun") == set()
    assert needed("paper-dmc") == needed("laptop") == needed("smoke") == set()


def test_downloads_come_first_and_may_fail(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(benchmark, "FETCH_PHYSX", "raise OSError('no network')")
    monkeypatch.setattr(benchmark, "FETCH_MENAGERIE", f"open({str(tmp_path / 'made')!r}, 'w')")
    monkeypatch.delenv("MENAGERIE_PATH", raising=False)
    assert benchmark.main(["paper-maniskill", "--prepare", "--out", str(tmp_path / "out")]) == 0
    assert "could not be prepared: OSError: no network" in capsys.readouterr().out
    assert benchmark.main(["paper-humanoid", "--prepare", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "made").exists()
    assert not (tmp_path / "out").exists(), "--prepare runs nothing"


# === the command line ===
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
        (["laptop", "--task", "504"], "--task must be a number below 504"),
        (["ablation-time"], "needs finished runs of trudi and reppo on CartpoleSwingup-v1"),
    ],
)
def test_bad_input_is_one_sentence(flags, words, grid):
    out, err = grid.run(*flags, code=2)
    assert not out and err.count("\n") == 1
    assert words in err and err.startswith("error: ")
    assert not (grid.root / "results").exists()


def test_a_missing_interpreter_is_one_sentence(grid):
    grid.env["PYTHON"] = "no-such-python"
    out, err = grid.run("laptop", code=2)
    assert not out and err.count("\n") == 1
    assert err.startswith("error: no-such-python is missing: set PYTHON")


def test_help(grid):
    out, _ = grid.run("--help")
    assert out == grid.run("laptop", "--help")[0]
    assert all(name in out for name in NUM_RUNS)
    options = set(re.findall(r'"(--[a-z][a-z-]+)"', inspect.getsource(benchmark.make_parser)))
    assert len(options) == 11
    assert options <= set(re.findall(r"--[a-z][a-z-]+", out))


# === with a real script ===
@pytest.mark.slow
def test_a_real_training(tmp_path):
    """The scripts understand the commands to train, resume and evaluate; plot.py reads the runs."""
    torch = pytest.importorskip("torch")

    def run(name, *flags):
        done = subprocess.run(
            ["bash", ROOT / "benchmark.sh", name, "--envs", "Pendulum-v1", "--seeds", "1", *flags],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHON": sys.executable},
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    tiny = "--num-envs 2 --num-steps 8 --num-minibatches 1 --update-epochs 1 --hidden-size 8"
    tiny += " --total-timesteps 64 --diffusion-steps 1"
    train = ["--only", "trudi", "--out", "out", "--", *tiny.split()]
    assert run("smoke", *train).startswith("start trudi")
    groups = plot.load([tmp_path / "out"])
    assert list(groups) == [("Pendulum-v1", "TruDi")]
    (trained,) = groups["Pendulum-v1", "TruDi"]
    assert trained.ended and trained.total_steps == 64
    manifest = json.loads((tmp_path / "out/manifest.jsonl").read_text())
    command = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    assert manifest["git"] == (head or None)
    assert manifest["versions"]["torch"] == torch.__version__
    (trained.path / "eval.json").unlink()
    assert run("smoke", *train).startswith("resume trudi")
    run("ablation-sampler", "--only", "trudi_sde", "--from", "out", "--out", "samplers")
    groups = plot.load([tmp_path / "samplers"])
    assert list(groups) == [("Pendulum-v1", "TruDi sde")]
    (evaluated,) = groups["Pendulum-v1", "TruDi sde"]
    assert evaluated.final == trained.other_finals["sde"] != trained.final
