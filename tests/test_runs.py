"""Whole runs: train, resume, evaluate, be killed, be misused. In this process where possible: a start costs seconds."""

import contextlib
import csv
import dataclasses
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ppo_continuous as ppo
import reppo_continuous as reppo
import trudi_continuous as trudi

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SCRIPTS = [trudi, reppo, ppo]
TINY = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --hidden-size 16"
TINY = f"{TINY} --eval-points 2 --eval-episodes 2 --total-timesteps 64".split()
MORE = {trudi: "--diffusion-steps 2 --policy-delay 1".split(), reppo: ["--policy-delay", "1"], ppo: []}
PHASES = {trudi: {"critic", "actor"}, reppo: {"critic", "actor"}, ppo: {"update"}}
CLOCK = ["--env-id", "probe_envs:Clock-v0"]  # 16-step episodes with random starts: they end where iterations end
SAMPLERS = {trudi: ["ode", "sde", "best-of-k"], reppo: ["mean", "sample", "best-of-k"], ppo: ["mean", "sample"]}
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.SCRIPT)


def run(*flags, code=0, script=trudi):
    """main(flags) in this process -> out, err"""
    if "--hidden-size" in flags:  # a new run: gets the sizes that only this script has
        flags = [*MORE[script], *flags]
    out, err = io.StringIO(), io.StringIO()
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            script.main([*map(str, flags)])
        got = 0
    except SystemExit as e:
        got = e.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert got == code, (got, err.getvalue())
    return SimpleNamespace(out=out.getvalue(), err=err.getvalue())


def start(*flags, script=trudi, **environment):
    """The same in a process of its own, from the tests' folder."""
    more = MORE[script] if "--hidden-size" in flags else []
    command = [sys.executable, script.__file__, *more, *map(str, flags)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=TESTS, env=os.environ | environment, **pipes)


def train(folder, *flags, iterations=2, env=CLOCK, script=trudi):
    return run(*TINY, *env, "--run-dir", folder, "--total-timesteps", iterations * 64, *flags, script=script)


def rows(folder):
    return list(csv.DictReader((folder / "metrics.csv").open()))


def steps(folder):
    return [int(r["global_step"]) for r in rows(folder)] if (folder / "metrics.csv").exists() else []


def timeless(folder):
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "charts/sps"} for r in rows(folder)]


def leaves(x, path=""):
    """All numbers and tensors of a nested checkpoint by path."""
    if isinstance(x, dict | list | tuple):
        pairs = x.items() if isinstance(x, dict) else enumerate(x)
        return {k: v for name, y in pairs for k, v in leaves(y, f"{path}/{name}").items()}
    return {path: x}


def assert_same_run(one, other):
    """All but times and the folders' names, to the bit."""
    assert timeless(one) == timeless(other)
    for name in ("checkpoint.pt", "best.pt"):
        a, b = (leaves({k: v for k, v in load(x / name).items() if k not in ("args", "elapsed")}) for x in (one, other))
        assert a.keys() == b.keys() and sum(isinstance(x, torch.Tensor) for x in a.values()) > 50
        for k in a:
            same = torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k]
            assert same, f"{name}: {k} differs"
    assert json.loads((one / "eval.json").read_text()) == json.loads((other / "eval.json").read_text())


def load(path):
    return torch.load(path / "checkpoint.pt" if path.is_dir() else path, weights_only=True)


def wait_for(condition, process, seconds=300):
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None and time.time() < end, process.communicate()
        time.sleep(0.02)


@pytest.fixture(scope="module", autouse=True)
def short_cartpole():
    """DMC episodes have 1000 steps; CartpoleBalance gets 16 here, as many as an iteration."""
    envpool = pytest.importorskip("envpool")
    make = envpool.make_gymnasium

    def make_short(env_id, **kwargs):
        return make(env_id, **(dict(max_episode_steps=16) if env_id == "CartpoleBalance-v1" else {}) | kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envpool, "make_gymnasium", make_short)
        yield


@pytest.fixture(
    scope="module",
    params=[(s, env_id) for s in SCRIPTS for env_id in ("CartpoleBalance-v1", "Pendulum-v1")],
    ids=lambda x: f"{x[0].SCRIPT}-{x[1]}",
)
def trained(request, tmp_path_factory):
    """A script and a folder with a short run, on EnvPool and on Gymnasium; tests that change it take a copy."""
    script, env_id = request.param
    folder = tmp_path_factory.mktemp(env_id) / "run"
    train(folder, "--eval-points", 1, env=["--env-id", env_id], script=script)
    return script, folder


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clock") / "run"
    train(folder, iterations=4)
    return folder


# --- what a run leaves behind ---


def test_run_folder(trained):
    script, trained = trained
    about = json.loads((trained / "args.json").read_text())
    fields = {f.name for f in dataclasses.fields(script.Args)}
    assert fields <= about.keys() and about["num_envs"] == 4 and about["device"] == "cpu"
    assert about["backend"] in ("envpool", "gymnasium")
    assert {k for k in fields if about[k] is None} <= {"resume", "evaluate", "run_dir"}, "settings must be resolved"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert about["git"] == (commit or None) and about["torch"] == torch.__version__ and about["numpy"] == np.__version__
    table = rows(trained)
    assert steps(trained) == [64, 128] and [bool(r["eval/return"]) for r in table] == [False, True]
    names = table[0].keys()
    assert {"time/elapsed", "charts/sps", "charts/episode_return", "charts/nonfinite", "eval/return"} <= names
    assert {n.split("/")[0] for n in names} == {"global_step", "time", "charts", "eval", "losses", "policy"}
    phases = {"act", "env", "targets", "eval", "elapsed"} | PHASES[script]
    assert {f"time/{k}" for k in phases} == {k for k in names if k.startswith("time/")}
    assert 0 < float(table[0]["time/elapsed"]) < float(table[1]["time/elapsed"])
    assert all(math.isfinite(float(v)) for r in table for v in r.values() if v)
    assert all(v for r in table for k, v in r.items() if k.startswith(("losses/", "policy/", "time/")))
    assert (trained / "curve.png").read_bytes()[:4] == b"\x89PNG"
    evaluation = json.loads((trained / "eval.json").read_text())
    assert list(evaluation) == SAMPLERS[script] and all(len(x["returns"]) == 2 for x in evaluation.values())
    for name in ("checkpoint.pt", "best.pt"):
        assert all(x.isfinite().all() for x in load(trained / name)["agent"].values())


def test_resume_with_more_steps_then_evaluate(trained, tmp_path):
    script, trained = trained
    folder = shutil.copytree(trained, tmp_path / "run")
    run("--resume", folder, "--total-timesteps", 4 * 64, script=script)
    assert steps(folder) == [64, 128, 192, 256] and timeless(folder)[:2] == timeless(trained)
    assert load(folder)["step"] == 256 and load(folder)["elapsed"] > load(trained)["elapsed"]
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    shown = run("--evaluate", folder / "best.pt", script=script).out
    assert all(re.search(rf"^{s}\s+-?\d", shown, re.M) for s in SAMPLERS[script])
    assert list(json.loads((folder / "eval_best.json").read_text())) == SAMPLERS[script]
    assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "eval_best.json"}


def test_best_checkpoint(clock):
    returns = {int(r["global_step"]): float(r["eval/return"]) for r in rows(clock) if r["eval/return"]}
    best = load(clock / "best.pt")
    assert list(returns) == [128, 256] and best["best"] == max(returns.values()) == returns[best["step"]]


def test_evaluating_twice_gives_the_same_numbers(clock, tmp_path):
    folder, results = shutil.copytree(clock, tmp_path / "run"), []
    for target, name in ((folder, "run"), (folder, "run"), (folder / "checkpoint.pt", "checkpoint")):
        run("--evaluate", target)
        results.append(json.loads((folder / f"eval_{name}.json").read_text()))
    assert results[0] == results[1] == results[2] == json.loads((clock / "eval.json").read_text())
    assert (folder / "checkpoint.pt").read_bytes() == (clock / "checkpoint.pt").read_bytes()


@every_script
def test_evaluation_leaves_the_agent_alone(script, tmp_path):
    train(tmp_path / "run", script=script)
    saved = load(tmp_path / "run")
    args = script.Args(**saved["args"])
    envs = script.VecEnv(args.backend, args.env_id, 3, 1, "cpu")
    agent = script.Agent(envs, args)
    agent.load_state_dict(saved["agent"])
    for sampler in SAMPLERS[script]:
        returns, lengths, success = script.evaluate(agent, envs, sampler, args)
        assert lengths.tolist() == [16] * 3 and set(success) <= {0, 1} and len(set(returns)) == 3
    assert all(torch.equal(v, agent.state_dict()[k]) for k, v in saved["agent"].items())
    assert envs.finished == []


# --- resume is exact ---


@pytest.mark.parametrize(
    "env_id, length", [("probe_envs:Clock-v0", 16), ("CartpoleBalance-v1", 16), ("Reacher-v5", 50)]
)
@every_script
def test_resume_is_exact(script, env_id, length, tmp_path):
    """Two iterations, an end, two more: to the bit what four in one go are. Random starts on both backends."""
    one, two = tmp_path / "one", tmp_path / "two"
    flags, batch = [*TINY, "--env-id", env_id, "--num-steps", length], 4 * length
    flags += ["--schedule", "adaptive"] if script is ppo else ["--anneal", 0]  # not by the total, which differs
    run(*flags, "--run-dir", one, "--total-timesteps", 4 * batch, script=script)
    run(*flags, "--run-dir", two, "--total-timesteps", 2 * batch, "--eval-points", 1, script=script)
    assert steps(two) == [batch, 2 * batch]
    run("--resume", two, "--total-timesteps", 4 * batch, "--eval-points", 2, script=script)
    assert_same_run(one, two)


def test_seeds_reproduce(clock, tmp_path):
    same, other = tmp_path / "same", tmp_path / "other"
    train(same, iterations=4)
    assert_same_run(clock, same)
    train(other, "--seed", 2, iterations=4)
    for a, b in zip(timeless(clock), timeless(other), strict=True):
        assert all(a[k] != b[k] for k in ("charts/episode_return", "losses/critic", "policy/kl"))


def test_seeds_reproduce_on_envpool(tmp_path):
    env = ["--env-id", "InvertedPendulum-v5"]  # terminates within a few steps
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        train(tmp_path / name, "--seed", seed, env=env)
    assert_same_run(tmp_path / "one", tmp_path / "same")
    assert timeless(tmp_path / "one") != timeless(tmp_path / "other")


@pytest.mark.parametrize(
    "script, number", [(trudi, signal.SIGTERM), (trudi, signal.SIGINT), (reppo, signal.SIGTERM), (ppo, signal.SIGTERM)]
)
def test_signals_save_and_resume_is_exact(script, number, tmp_path):
    folder, whole, total = tmp_path / "run", tmp_path / "whole", 60 * 64
    process = start(*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", total, script=script)
    wait_for(lambda: len(steps(folder)) >= 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert re.search(rf"^.*{number.name}.*--resume {folder}$", out, re.M)
    assert load(folder)["step"] == steps(folder)[-1] < total
    run("--resume", folder, script=script)
    run(*TINY, *CLOCK, "--run-dir", whole, "--total-timesteps", total, script=script)
    assert_same_run(folder, whole)


def test_kill_leaves_a_loadable_checkpoint(tmp_path):
    """SIGKILL at random moments of a run that saves at each iteration; then the run goes on and ends well."""
    folder, patience = tmp_path / "run", np.random.default_rng(int(time.time()))
    flags = [*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 2000 * 64, "--eval-points", 2000]
    reached = 0

    def goes_on():  # reads while the run writes: a checkpoint must be whole at any moment
        return (folder / "checkpoint.pt").exists() and load(folder)["step"] > reached

    for _ in range(3):
        process = start(*flags)
        wait_for(goes_on, process)
        time.sleep(patience.uniform(0, 0.4))
        process.kill()
        process.communicate()
        saved = load(folder)
        assert saved["step"] > reached and all(x.isfinite().all() for x in saved["agent"].values())
        reached, flags = saved["step"], ["--resume", folder]
    run("--resume", folder, "--total-timesteps", reached + 2 * 64, "--eval-points", 1)
    assert steps(folder) == list(range(64, reached + 2 * 64 + 1, 64))


def test_a_run_that_ended_before_its_first_checkpoint_can_start_again(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    monkeypatch.undo()
    train(tmp_path / "run")
    assert steps(tmp_path / "run") == [64, 128]


def test_a_torn_last_row_is_repaired(clock, tmp_path):
    folder = shutil.copytree(clock, tmp_path / "run")
    with (folder / "metrics.csv").open("a") as f:
        f.write("320,1.5,0.0,")  # as a kill in the middle of a write leaves it
    run("--resume", folder, "--total-timesteps", 6 * 64)
    assert steps(folder) == [64, 128, 192, 256, 320, 384] and None not in rows(folder)[4]


# --- misuse: one sentence, exit code 2, nothing begun ---


def refused(*flags, names, code=2, script=trudi):
    err = run(*flags, code=code, script=script).err
    assert err.count("\n") == 1 and err.startswith("error: ") and "Traceback" not in err
    for name in [names] if isinstance(names, str) else names:
        assert name in err, err


@pytest.mark.parametrize(
    "flags, names",
    {
        "unknown id": (["--env-id", "CheetahRum-v1"], ["CheetahRum-v1", "CheetahRun-v1"]),
        "old version": (["--env-id", "Pendulum-v0"], ["Pendulum-v0", "Pendulum-v1"]),
        "wrong backend": (["--env-id", "WalkerRun-v1", "--backend", "gymnasium"], ["WalkerRun-v1", "Walker2d"]),
        "discrete": (["--env-id", "CartPole-v1"], ["CartPole-v1", "Discrete", "continuous"]),
        "own discrete": (["--env-id", "probe_envs:Discrete-v0"], ["Discrete-v0", "continuous"]),
        "no module": (["--env-id", "no_such_module:Thing-v0"], "no_such_module"),
        "no such id in the module": (["--env-id", "probe_envs:Clok-v0"], ["Clok-v0", "Clock`"]),
        "simulator not installed": (["--env-id", "probe_envs:Uninstalled-v0"], "simulator9000"),
        "no divisor": ([*CLOCK, "--num-minibatches", 3], ["num_minibatches", "64"]),
        "too few steps": ([*CLOCK, "--total-timesteps", 63], ["total_timesteps", "64"]),
        "zero envs": ([*CLOCK, "--num-envs", 0], "num_envs"),
        "empty range": ([*CLOCK, "--vmin", 3, "--vmax", 3], ["vmin", "vmax"]),
        "missing run": (["--resume", "no/such/run"], "no/such/run"),
        "missing checkpoint": (["--evaluate", "no/such/best.pt"], "no/such/best.pt"),
    }.values(),
)
def test_bad_input(flags, names, tmp_path):
    folder = tmp_path / "run"
    refused(*([] if "no/such" in names else [*TINY, "--run-dir", folder]), *flags, names=names)
    assert not folder.exists()


def test_bad_input_in_a_process_of_its_own():
    process = start("--env-id", "CheetahRum-v1")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2 and err.count("\n") == 1 and "CheetahRun-v1" in err and not out


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_where_there_is_none(tmp_path):
    refused(*TINY, *CLOCK, "--run-dir", tmp_path / "run", "--device", "cuda", names=["cuda", "CUDA"])


@pytest.mark.parametrize("flags", [["--env-id", "CheetahRun-v1"], ["--env-id", "Ant-v5", "--backend", "envpool"]])
def test_envpool_not_installed(flags, monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    refused(*flags, names=["EnvPool", "pip install envpool"])


def test_wandb_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(*TINY, *CLOCK, "--run-dir", tmp_path / "run", "--track", names="wandb")


def test_gymnasium_needs_no_envpool(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "envpool", None)
    train(tmp_path / "run")
    assert steps(tmp_path / "run") == [64, 128]


def test_folders_that_cannot_be_used(clock, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("mine")
    for folder in (note / "run", note):
        refused(*TINY, *CLOCK, "--run-dir", folder, names=str(note))
    assert list(tmp_path.iterdir()) == [note] and note.read_text() == "mine"
    before = {p.name: p.read_bytes() for p in clock.iterdir()}
    refused(*TINY, *CLOCK, "--run-dir", clock, names=[str(clock), "--resume"])
    assert before == {p.name: p.read_bytes() for p in clock.iterdir()}


@pytest.mark.parametrize("mode", ["--resume", "--evaluate"])
def test_checkpoints_that_do_not_fit(mode, clock, tmp_path):
    folder = shutil.copytree(clock, tmp_path / "run")
    path = folder / "checkpoint.pt"
    whole, before = path.read_bytes(), timeless(folder)
    refused(mode, folder, "--env-id", "Pendulum-v1", names=["env_id", "Pendulum-v1", "Clock-v0"])
    refused(mode, folder, "--hidden-size", 32, names=["hidden_size", "16", "32"])
    for damage in (whole[: len(whole) // 2], whole[:-20], np.random.default_rng(0).bytes(5000), b""):
        path.write_bytes(damage)
        refused(mode, folder, names=[str(path), "damaged"])
    path.write_bytes(whole)
    for script in (reppo, ppo):
        refused(mode, folder, names=[str(path), "trudi_continuous"], script=script)
    changed = load(clock)
    changed["agent"]["policy.first.weight"] = torch.zeros(16, 99)
    torch.save(changed, path)
    refused(mode, folder, names=["Clock-v0", "shapes"])
    torch.save([1, 2], path)
    refused(mode, folder, names=str(path))
    path.unlink()
    refused(mode, folder, names=str(path))
    assert timeless(folder) == before


# --- numbers that are not finite ---


@every_script
def test_training_survives_a_simulator_that_breaks(script, tmp_path):
    train(tmp_path / "run", env=["--env-id", "probe_envs:Faulty-v0"], iterations=6, script=script)
    table = rows(tmp_path / "run")
    broken = [int(r["charts/nonfinite"]) for r in table]
    assert 0 < broken[0] < broken[-1] and broken == sorted(broken)
    assert all(math.isfinite(float(v)) for r in table for v in r.values() if v)
    assert all(r[k] for r in table for k in r if k.startswith(("losses/", "policy/")))


def test_nonfinite_parameters_stop_the_run(monkeypatch, tmp_path):
    agents, real, calls = [], trudi.VecEnv.step, []

    class Agent(trudi.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            agents.append(self)

    def step(self, action):
        calls.extend([1] * (self.num_envs == 4))
        if len(calls) == 3 * 16 - 2:  # in the third iteration
            next(agents[0].critic.parameters()).data[0, 0] = math.nan
        return real(self, action)

    monkeypatch.setattr(trudi, "Agent", Agent)
    monkeypatch.setattr(trudi.VecEnv, "step", step)
    folder = tmp_path / "run"
    flags = [*TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 6 * 64, "--eval-points", 6]
    refused(*flags, names=["non-finite", str(folder / "checkpoint.pt")], code=1)
    monkeypatch.undo()
    saved = load(folder)
    assert saved["step"] == 128 and steps(folder) == [64, 128]
    assert all(x.isfinite().all() for x in leaves(saved).values() if isinstance(x, torch.Tensor))
    run("--resume", folder)
    assert steps(folder) == [64, 128, 192, 256, 320, 384]


@every_script
def test_progress_before_a_first_episode_ended(script, tmp_path):
    out = train(tmp_path / "run", iterations=1, env=["--env-id", "Pendulum-v1"], script=script).out  # of 200 steps each
    line = next(x for x in out.splitlines() if " steps/s " in x)
    assert re.search(r" return -  eval -\d+\.\d  ", line) and "nan" not in line


# --- bench, tracking, video, docs ---


@every_script
def test_bench(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run(*TINY, *CLOCK, "--bench", 1, script=script).out
    assert re.search(r"^\d+ steps/s$", out, re.M)
    shares = {m[1]: float(m[2]) for m in re.finditer(r"^ +(\w+) +[\d.]+ ms +([\d.]+)%$", out, re.M)}
    assert set(shares) == {"act", "env", "targets"} | PHASES[script] and abs(sum(shares.values()) - 100) < 0.6
    assert list(tmp_path.iterdir()) == [], "a bench must write nothing"


def test_without_track_wandb_is_not_imported(tmp_path):
    flags = [*TINY, *CLOCK, "--run-dir", str(tmp_path / "run"), "--total-timesteps", "64"]
    code = f"import sys, trudi_continuous as t; t.main({flags}); print('wandb' in sys.modules)"
    paths = os.pathsep.join(map(str, (ROOT, TESTS)))
    environment = os.environ | dict(PYTHONPATH=paths)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_track_offline(tmp_path):
    folder = tmp_path / "run"
    home = {k: str(tmp_path) for k in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")}
    process = start(
        *TINY, *CLOCK, "--run-dir", folder, "--total-timesteps", 64 * 10**6, "--track", WANDB_MODE="offline", **home
    )
    wait_for(lambda: len(steps(folder)) > 1, process)
    process.terminate()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err, err
    flags = ["--resume", folder, "--total-timesteps", steps(folder)[-1] + 64, "--track"]
    process = start(*flags, WANDB_MODE="offline", **home)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, err
    logs = list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(logs) == 2 and len({log.name for log in logs}) == 1  # named by the run's id: a resumed run stays one run


def test_video(clock, tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = shutil.copytree(clock, tmp_path / "run")
    run("--evaluate", folder / "best.pt", "--capture-video")
    with image.open(folder / "video.gif") as video:
        assert video.format == "GIF" and video.n_frames > 1
    train(tmp_path / "other", "--capture-video")
    assert (tmp_path / "other" / "video.gif").exists()


@pytest.mark.skipif(bool(os.environ.get("DISPLAY")), reason="has a display")
def test_video_that_cannot_be_made_costs_nothing(tmp_path):
    out = train(tmp_path / "run", "--capture-video", env=["--env-id", "Reacher-v5"]).out
    assert (tmp_path / "run" / "video.gif").exists() or re.search(r"^no video: .*Reacher-v5", out, re.M)
    assert (tmp_path / "run" / "eval.json").exists()


def test_docs_explain_every_metric(trained):
    script, folder = trained
    page = (ROOT / "docs" / f"{script.SCRIPT.removesuffix('_continuous')}.md").read_text()
    readme = (ROOT / "README.md").read_text()
    assert [name for name in rows(folder)[0] if f"`{name}`" not in readme] == []
    own = {n for n in re.findall(r"`((?:losses|policy)/\w+)`", page)}
    assert own == {n for n in rows(folder)[0] if n.startswith(("losses/", "policy/"))}


@every_script
def test_help_explains_every_flag(script, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = re.sub("[│╭╮╰╯─]", " ", run("--help", script=script).out)
    blocks = re.split(r"\n +(?=-)", text)[1:]
    help_of = {re.search(r"--([\w-]+)", b)[1]: " ".join(re.split(r"\s{2,}", b)[1:]) for b in blocks}
    for field in dataclasses.fields(script.Args):
        words = re.sub(r"\(default: [^)]*\)", "", help_of[field.name.replace("_", "-")]).split()
        assert len(words) >= 2, f"--{field.name} has no help text"
