"""What the tests of whole runs share: tiny runs, in this process or in one of their own."""

import contextlib
import csv
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import dppo_continuous as dppo
import fpo_continuous as fpo
import ppo_continuous as ppo
import reppo_continuous as reppo
import trudi_continuous as trudi
from tools import extras

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SCRIPTS = [trudi, reppo, ppo, dppo, fpo]
SAMPLERS = {
    trudi: ["ode", "sde", "best-of-k"],
    reppo: ["mean", "sample", "best-of-k"],
    ppo: ["mean", "sample"],
    dppo: ["sde", "mean"],
    fpo: ["ode"],
}
BATCH = 64  # steps of a tiny run's iteration
TINY = ["--num-envs", "4", "--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "1"]
TINY += ["--hidden-size", "16", "--eval-points", "2", "--eval-episodes", "2"]
TINY += ["--total-timesteps", str(BATCH)]
# What a tiny run needs besides, script by script.
MORE = {
    trudi: ["--diffusion-steps", "2", "--policy-delay", "1"],
    reppo: ["--policy-delay", "1"],
    ppo: [],
    dppo: ["--diffusion-steps", "2"],
    fpo: ["--flow-steps", "2", "--flow-samples", "2", "--actor-hidden-size", "16"],
}
CLOCK = ["--env-id", "probe_envs:Clock-v0"]  # 16 steps an episode: it ends where iterations end
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.SCRIPT)
# For tests that train: one script is enough for the quick tests. What they test stands in blocks
# that all scripts share; tests of what does not take every one of them, slowly.
SLOW_SCRIPTS = [
    pytest.param(trudi, id="trudi_continuous"),
    pytest.param(reppo, id="reppo_continuous", marks=pytest.mark.slow),
    pytest.param(ppo, id="ppo_continuous", marks=pytest.mark.slow),
]
NEWER_SCRIPTS = [
    pytest.param(dppo, id="dppo_continuous", marks=pytest.mark.slow),
    pytest.param(fpo, id="fpo_continuous", marks=pytest.mark.slow),
]
EXTENDED = [pytest.mark.slow, pytest.mark.extended]  # extended tests are not in the default run
one_script_and_more = pytest.mark.parametrize(
    "script",
    [
        pytest.param(trudi, id="trudi_continuous", marks=pytest.mark.slow),
        pytest.param(reppo, id="reppo_continuous", marks=EXTENDED),
        pytest.param(ppo, id="ppo_continuous", marks=EXTENDED),
        pytest.param(dppo, id="dppo_continuous", marks=EXTENDED),
        pytest.param(fpo, id="fpo_continuous", marks=EXTENDED),
    ],
)
every_script_slowly = pytest.mark.parametrize("script", SLOW_SCRIPTS)
really_every_script_slowly = pytest.mark.parametrize("script", SLOW_SCRIPTS + NEWER_SCRIPTS)


class Output(NamedTuple):
    out: str
    err: str


def command_line(flags, script):
    """The flags as words. A new tiny run gets those that only this script has."""
    more = MORE[script] if "--hidden-size" in flags else []
    return [*more, *map(str, flags)]


def run(*flags, code=0, script=trudi, curve=False):
    """main(flags) in this process, which must end with this code. -> out, err

    curve.png is drawn on demand: it takes longer than all else in a tiny run.
    """
    out = io.StringIO()
    err = io.StringIO()
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handlers[number] = signal.getsignal(number)
    got = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), drawing(curve):
            script.main(command_line(flags, script))
    except SystemExit as end:
        got = end.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert got == code, (got, err.getvalue())
    return Output(out.getvalue(), err.getvalue())


@contextlib.contextmanager
def drawing(curve):
    with pytest.MonkeyPatch.context() as patch:
        if not curve:
            patch.setattr(extras, "draw_curve", lambda *_: None)
        yield


def start(*flags, script=trudi, **environment):
    """The same in a process of its own, from the tests' folder. -> the process"""
    return subprocess.Popen(
        [sys.executable, script.__file__, *command_line(flags, script)],
        cwd=TESTS,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(folder, *flags, iterations=2, env=CLOCK, script=trudi, curve=False):
    """A tiny run in this process. -> out, err"""
    total = ["--total-timesteps", iterations * BATCH]
    return run(*TINY, *env, "--run-dir", folder, *total, *flags, script=script, curve=curve)


def rows(folder):
    """metrics.csv as a list of dicts of strings"""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps(folder):
    """global_step of all rows; none before the first row is written"""
    if not (folder / "metrics.csv").exists():
        return []
    return [int(row["global_step"]) for row in rows(folder)]


def timeless(folder):
    """The rows without what two equal runs differ in: the times."""
    kept = []
    for row in rows(folder):
        names = [name for name in row if not name.startswith("time/") and name != "charts/sps"]
        kept.append({name: row[name] for name in names})
    return kept


def leaves(tree, path=""):
    """All numbers and tensors of a nested checkpoint, by path."""
    if isinstance(tree, dict):
        branches = tree.items()
    elif isinstance(tree, list | tuple):
        branches = enumerate(tree)
    else:
        return {path: tree}
    found = {}
    for name, branch in branches:
        found |= leaves(branch, f"{path}/{name}")
    return found


def load(path):
    """A checkpoint, or the last one of a run's folder."""
    if path.is_dir():
        path = path / "checkpoint.pt"
    return torch.load(path, weights_only=True)


def files(folder):
    """name -> content of all files in a folder"""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wait_for(condition, process, seconds=300):
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None and time.time() < end, process.communicate()
        time.sleep(0.02)


def descendants(pid):
    """All processes that this one started, and those that they started"""
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = path.read_text().rsplit(")", 1)[1].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = []
    unseen = [pid]
    while unseen:
        new = children.get(unseen.pop(), [])
        found += new
        unseen += new
    return found


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_all_end(pids, seconds=20):
    end = time.time() + seconds
    while any(is_running(pid) for pid in pids):
        assert time.time() < end, [pid for pid in pids if is_running(pid)]
        time.sleep(0.05)


@contextlib.contextmanager
def short_cartpole():
    """Episodes of the control suite have 1000 steps; CartpoleBalance-v1 gets 16 here."""
    envpool = pytest.importorskip("envpool")
    make = envpool.make_gymnasium

    def make_short(env_id, **kwargs):
        if env_id == "CartpoleBalance-v1":
            kwargs["max_episode_steps"] = 16
        return make(env_id, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envpool, "make_gymnasium", make_short)
        yield


def assert_same_run(one, other):
    """All but times and the folders' names, to the bit."""
    assert timeless(one) == timeless(other)
    for name in ("checkpoint.pt", "best.pt"):
        assert_same_state(load(one / name), load(other / name))
    assert (one / "eval.json").read_text() == (other / "eval.json").read_text()


def assert_same_state(one, other):
    """Two checkpoints are equal to the bit, but for the run's folder and its times."""
    ours = state(one)
    theirs = state(other)
    assert ours.keys() == theirs.keys()
    assert sum(isinstance(value, torch.Tensor) for value in ours.values()) > 50
    for path, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[path]), path
        else:
            assert value == theirs[path], path


def state(checkpoint):
    found = leaves(checkpoint)
    for path in list(found):
        if path.startswith("/args/") or path == "/progress/elapsed":
            del found[path]
    return found
