"""What a run leaves in its folder, what --evaluate adds, and that docs and --help explain it."""

import dataclasses
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from run_helpers import (
    BATCH,
    ROOT,
    SAMPLERS,
    SCRIPTS,
    TINY,
    every_script,
    every_script_slowly,
    files,
    load,
    reppo,
    rows,
    run,
    short_cartpole,
    steps,
    train,
    trudi,
)

from tools.extras import PACKAGES

CLOCK = "probe_envs:Clock-v0"  # by Gymnasium; it tells its success
CARTPOLE = "CartpoleBalance-v1"  # by EnvPool
FILES = {"args.json", "metrics.csv", "checkpoint.pt", "best.pt", "policy.pt", "curve.png"}
FILES |= {"eval.json"}
COLUMNS = {"global_step", "time/elapsed", "time/rollout", "time/update", "time/eval", "charts/sps"}
COLUMNS |= {"charts/episode_return", "charts/episode_length", "charts/episode_success"}
COLUMNS |= {"charts/nonfinite", "eval/return", "eval/length", "eval/success"}


def cases():
    """Each script on both backends."""
    found = []
    for script in SCRIPTS:
        found.append(pytest.param((script, CLOCK), id=f"{script.SCRIPT}-Clock"))
        name = f"{script.SCRIPT}-Cartpole"
        found.append(pytest.param((script, CARTPOLE), id=name, marks=pytest.mark.slow))
    return found


@pytest.fixture(scope="module", autouse=True)
def short_episodes():
    with short_cartpole():
        yield


@pytest.fixture(scope="module", params=cases())
def trained(request, tmp_path_factory):
    """A script, a task and the folder of a short run; tests that change it take a copy."""
    script, env_id = request.param
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, "--eval-points", 1, env=["--env-id", env_id], script=script, curve=True)
    return script, env_id, folder


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clock") / "run"
    train(folder, iterations=4)
    return folder


def is_own(name):
    """A metric that belongs to the algorithm"""
    return name.startswith(("losses/", "policy/"))


# --- files ---


def test_args_json(trained):
    script, env_id, folder = trained
    about = json.loads((folder / "args.json").read_text())
    settings = {field.name for field in dataclasses.fields(script.Args)}
    assert settings <= about.keys()
    assert {name: about[name] for name in settings} == load(folder)["args"]
    assert about["num_envs"] == 4 and about["env_id"] == env_id
    assert about["backend"] == ("gymnasium" if env_id == CLOCK else "envpool")
    assert about["suite"] == ("DMC" if env_id == CARTPOLE else "other")
    assert about["device"] in ("cpu", "cuda"), "settings must be resolved"
    assert None not in [about[name] for name in settings]
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert about["git"] == (done.stdout.strip() or None)
    assert about["torch"] == torch.__version__ and about["numpy"] == np.__version__
    assert about.keys() - settings <= {"suite", "git", "python", *PACKAGES}


def test_metrics_csv(trained):
    _, _, folder = trained
    table = rows(folder)
    names = list(table[0])
    assert names[0] == "global_step" and steps(folder) == [64, 128]
    assert {name for name in names if not is_own(name)} == COLUMNS
    assert any(name.startswith("losses/") for name in names)
    assert any(name.startswith("policy/") for name in names)
    assert [bool(row["eval/return"]) for row in table] == [False, True]
    assert 0 < float(table[0]["time/elapsed"]) < float(table[1]["time/elapsed"])
    for row in table:
        assert all(math.isfinite(float(value)) for value in row.values() if value)
        assert all(row[name] for name in names if is_own(name) or name.startswith("time/"))
        assert row["charts/nonfinite"] == "0"
        parts = float(row["time/rollout"]) + float(row["time/update"])
        assert float(row["charts/sps"]) == pytest.approx(64 / parts)
    assert table[1]["charts/episode_return"], (
        "first episodes may be staggered, second ones are whole"
    )


def test_checkpoints_and_pictures(trained):
    script, env_id, folder = trained
    assert {path.name for path in folder.iterdir()} == FILES
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    for name in ("checkpoint.pt", "best.pt", "policy.pt"):
        checkpoint = load(folder / name)
        assert checkpoint["script"] == script.SCRIPT
        assert checkpoint["args"]["env_id"] == env_id
        assert all(values.isfinite().all() for values in checkpoint["agent"].values())


def test_eval_json(trained):
    script, env_id, folder = trained
    table = json.loads((folder / "eval.json").read_text())
    assert list(table) == SAMPLERS[script] == list(script.SAMPLERS)
    for result in table.values():
        assert set(result) == {"mean", "std", "returns", "length", "success", "broken"}
        assert result["broken"] == 0
        assert len(result["returns"]) == 2
        assert result["mean"] == pytest.approx(np.mean(result["returns"]))
        assert result["std"] == pytest.approx(np.std(result["returns"]))
        assert result["length"] == 16
        if env_id == CLOCK:
            assert result["success"] in (0, 0.5, 1)
        else:
            assert result["success"] is None


def test_best_checkpoint(clock):
    returns = {}
    for row in rows(clock):
        if row["eval/return"]:
            returns[int(row["global_step"])] = float(row["eval/return"])
    best = load(clock / "best.pt")["progress"]
    assert list(returns) == [128, 256]
    assert best["best_return"] == max(returns.values()) == returns[best["step"]]


# --- evaluation of a checkpoint ---


def test_evaluate_a_checkpoint(trained, tmp_path):
    script, _, trained_folder = trained
    folder = shutil.copytree(trained_folder, tmp_path / "run")
    before = files(folder)
    shown = run("--evaluate", folder / "best.pt", script=script).out
    for sampler in SAMPLERS[script]:
        assert re.search(rf"^{sampler}\s+-?\d", shown, re.M)
    after = files(folder)
    assert list(json.loads(after.pop("eval_best.json"))) == SAMPLERS[script]
    assert after == before


@every_script_slowly
def test_policy_can_be_evaluated_but_not_resumed(script, tmp_path):
    folder = tmp_path / "run"
    train(folder, script=script)
    policy = folder / "policy.pt"
    assert load(policy).keys() == {"script", "args", "agent", "progress", "spaces"}
    assert policy.stat().st_size < (folder / "checkpoint.pt").stat().st_size
    run("--evaluate", policy, script=script)
    assert (folder / "eval_policy.json").read_text() == (folder / "eval.json").read_text()
    before = files(folder)
    err = run("--resume", policy, script=script, code=2).err
    assert err.count("\n") == 1 and str(policy) in err and "checkpoint.pt" in err
    assert files(folder) == before


def test_evaluate_with_run_dir_writes_elsewhere(clock, tmp_path):
    before = files(clock)
    elsewhere = tmp_path / "a" / "b"
    run("--evaluate", clock / "best.pt", "--run-dir", elsewhere)
    assert files(clock) == before
    assert [path.name for path in elsewhere.iterdir()] == ["eval_best.json"]


def test_evaluating_twice_gives_the_same_numbers(clock, tmp_path):
    folder = shutil.copytree(clock, tmp_path / "run")
    expected = (clock / "eval.json").read_text()
    for path in (folder, folder, folder / "checkpoint.pt"):
        run("--evaluate", path)
        assert (folder / "eval_checkpoint.json").read_text() == expected
        (folder / "eval_checkpoint.json").unlink()
    assert (folder / "checkpoint.pt").read_bytes() == (clock / "checkpoint.pt").read_bytes()


def test_more_episodes_can_be_evaluated(clock, tmp_path):
    run("--evaluate", clock, "--run-dir", tmp_path, "--eval-episodes", 5)
    for result in json.loads((tmp_path / "eval_checkpoint.json").read_text()).values():
        assert len(result["returns"]) == 5


@every_script_slowly
def test_evaluation_leaves_the_agent_alone(script, tmp_path):
    train(tmp_path / "run", script=script)
    checkpoint = load(tmp_path / "run")
    args = script.Args(**checkpoint["args"])
    envs = script.make_envs(args, 3, 1)
    agent = script.Agent(envs, args)
    agent.load_state_dict(checkpoint["agent"])
    for sampler in SAMPLERS[script]:
        episodes = script.evaluate(agent, envs, sampler, args)
        assert [episode["env"] for episode in episodes] == [0, 1, 2]
        assert [episode["length"] for episode in episodes] == [16, 16, 16]
        assert {episode["success"] for episode in episodes} <= {0, 1}
        assert len({episode["return"] for episode in episodes}) == 3
    for name, values in agent.state_dict().items():
        assert torch.equal(values, checkpoint["agent"][name])
    assert envs.pop_finished() == []


# --- docs and help ---


def test_docs_explain_every_metric(trained):
    script, _, folder = trained
    names = set(rows(folder)[0])
    common = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in names if not is_own(name) and f"`{name}`" not in common] == []
    algorithm = script.SCRIPT.removesuffix("_continuous")
    page = (ROOT / "docs" / f"{algorithm}.md").read_text()
    explained = set(re.findall(r"`((?:losses|policy)/\w+)`", page))
    assert explained == {name for name in names if is_own(name)}


def help_texts(script, *flags):
    """flag -> its help on one line, with the default at its end"""
    text = run(*flags, "--help", script=script).out
    found = {}
    for paragraph in re.split(r"\n  (?=--)", text)[1:]:
        flag = re.search(r"--([\w-]+)", paragraph)[1]
        paragraph = paragraph.split("\n\n")[0]  # a heading may follow
        _, *words = re.split(r"\s{2,}", paragraph.strip())
        found[flag] = " ".join(words)
    return found


@every_script
def test_help_explains_every_flag_and_shows_its_default(script):
    for flags in ([], ["--env-id", "Pendulum-v1"]):
        texts = help_texts(script, *flags)
        args, _ = script.parse_args(flags)
        for name, value in dataclasses.asdict(args).items():
            text = texts[name.replace("_", "-")]
            explanation, default = re.fullmatch(r"(.*)\(default: (.*)\)", text).groups()
            assert len(explanation.split()) >= 2, f"--{name} has no help text"
            if name == "env_id":
                value = "CheetahRun-v1"
            if default == "None":  # it stays what its partner is
                partners = {
                    "kl_bound_end": "kl_bound",
                    "entropy_target_start": "entropy_target",
                    "clip_coef_first": "clip_coef",
                }
                assert value == getattr(args, partners[name])
                value = None
            assert default == (str(value) or "''"), f"--{name} shows another default"


@every_script
def test_defaults_are_those_of_the_device(script):
    settings, _ = script.parse_args(["--device", "cpu"])
    for name, value in script.CPU_DEFAULTS.items():
        assert getattr(settings, name) == value != getattr(script.Args(), name)


# === Warm-up ===
@pytest.mark.parametrize("script", [trudi, reppo], ids=lambda script: script.SCRIPT)
@pytest.mark.parametrize("warmup, waiting", [(0, 0), (1, 1), (9, 2)])  # at most a fifth of ten
def test_policy_waits_for_the_critic(monkeypatch, tmp_path, script, warmup, waiting):
    stood_still = []
    critic_learned = []
    update = script.update

    def observed_update(agent, *others):
        policy = [parameter.clone() for parameter in agent.policy.parameters()]
        critic = [parameter.clone() for parameter in agent.critic.parameters()]
        metrics = update(agent, *others)
        policies = zip(policy, agent.policy.parameters(), strict=True)
        critics = zip(critic, agent.critic.parameters(), strict=True)
        stood_still.append(all((before == after).all() for before, after in policies))
        critic_learned.append(any((before != after).any() for before, after in critics))
        return metrics

    monkeypatch.setattr(script, "update", observed_update)
    flags = ["--total-timesteps", 10 * BATCH, "--warmup-iterations", warmup]
    run("--env-id", CLOCK, *TINY, *flags, "--run-dir", tmp_path / "run", script=script)
    assert stood_still == [True] * waiting + [False] * (10 - waiting)
    assert all(critic_learned)
