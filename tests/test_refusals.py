"""What cannot work is refused with one sentence and exit code 2, and nothing is begun."""

import shutil
import sys

import numpy as np
import pytest
import torch
from run_helpers import (
    CLOCK,
    SCRIPTS,
    TINY,
    every_script,
    every_script_slowly,
    files,
    load,
    one_script_and_more,
    ppo,
    reppo,
    run,
    start,
    steps,
    timeless,
    train,
    trudi,
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(trudi, id="trudi_continuous"),
        pytest.param(reppo, id="reppo_continuous", marks=pytest.mark.slow),
        pytest.param(ppo, id="ppo_continuous", marks=pytest.mark.slow),
    ],
)
def trained(request, tmp_path_factory):
    """A script and the folder of a finished run; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, script=request.param)
    return request.param, folder


def load_checkpoint_args(script, path):
    return script.load_checkpoint(script.Args(evaluate=str(path)))["args"]


def refused(*flags, names, script=trudi, code=2):
    err = run(*flags, code=code, script=script).err
    assert err.count("\n") == 1 and err.startswith("error: ")
    for name in names:
        assert name in err, err


def env(env_id, *flags):
    return ["--env-id", env_id, *flags]


BAD_ENVIRONMENTS = {
    "unknown id": (env("CheetahRum-v1"), ["CheetahRum-v1", "CheetahRun-v1"]),
    "old version": (env("Pendulum-v0"), ["Pendulum-v0", "Pendulum-v1"]),
    "wrong backend": (
        env("WalkerRun-v1", "--backend", "gymnasium"),
        ["gymnasium", "WalkerRun-v1", "Walker2d"],
    ),
    "discrete": (env("CartPole-v1"), ["CartPole-v1", "Discrete", "continuous"]),
    "own discrete": (env("probe_envs:Discrete-v0"), ["Discrete-v0", "continuous"]),
    "no module": (env("no_such_module:Thing-v0"), ["no_such_module"]),
    "no such id in the module": (env("probe_envs:Clok-v0"), ["Clok-v0", "Clock`"]),
    "simulator not installed": (env("probe_envs:Uninstalled-v0"), ["simulator9000"]),
    "no bounds": (
        env("probe_envs:Unbounded-v0"),
        ["bounds", "gymnasium.wrappers", "RescaleAction"],
    ),
    "tuples": (env("probe_envs:Tuple-v0"), ["Tuple observations"]),
    "old API": (env("probe_envs:OldApi-v0"), ["step", "terminated, truncated"]),
    "wrong shape": (env("probe_envs:WrongShape-v0"), ["(5,)", "(4,)"]),
    "known, but not continuous": (env("Pong-v5"), ["Pong-v5"]),
}
BAD_SETTINGS = {
    "no divisor": (["--num-minibatches", 3], ["num_minibatches", "64"]),
    "too few steps": (["--total-timesteps", 63], ["total_timesteps", "64"]),
    "zero envs": (["--num-envs", 0], ["num_envs"]),
    "negative rate": (["--learning-rate", -1e-3], ["learning_rate"]),
    "no evaluation": (["--eval-points", 0], ["eval_points"]),
    "not a number": (["--learning-rate", "nan"], ["learning_rate", "nan"]),
    "infinite": (["--max-grad-norm", "inf"], ["max_grad_norm", "inf"]),
    "infinite scale": (["--return-scale", "inf"], ["return_scale"]),
    "negative discount": (["--gamma", -0.1], ["gamma", "at least 0"]),
    "discount above one": (["--gamma", 1.01], ["gamma", "at most 1"]),
    "discount nan": (["--gamma", "nan"], ["gamma"]),
    "negative seed": (["--seed", -1], ["seed"]),
    "seed of 65 bits": (["--seed", 2**64], ["seed"]),
    "no thread": (["--torch-threads", 0], ["torch_threads"]),
    "too many threads": (["--torch-threads", 100_000], ["torch_threads", "at most"]),
    "network of terabytes": (["--hidden-size", 10**6], ["hidden_size", "GB"]),
    "rollout of terabytes": (["--num-envs", 10**10], ["num_envs"]),
    "no minibatch": (["--num-minibatches", 0], ["num_minibatches"]),
    "no epoch": (["--update-epochs", -3], ["update_epochs"]),
    "no step": (["--num-steps", 0], ["num_steps"]),
    "no width": (["--hidden-size", 0], ["hidden_size"]),
    "too many episodes": (["--eval-episodes", 10**9], ["eval_episodes"]),
}
BAD_RANGES = {
    "empty range": (["--vmin", 3, "--vmax", 3], ["vmin", "vmax"]),
    "one bin": (["--num-bins", 1], ["num_bins"]),
    "rare policy steps": (["--policy-delay", 3], ["policy_delay", "num_minibatches"]),
    "negative rate at the end": (["--anneal", 1.5], ["anneal"]),
    "range without an end": (["--vmax", "inf"], ["vmax"]),
    "range of nan": (["--vmin", "nan"], ["vmin"]),
    "negative trace": (["--td-lambda", -0.5], ["td_lambda"]),
    "negative weight": (["--aux-coef", -1], ["aux_coef"]),
    "no temperature": (["--alpha-init", 0], ["alpha_init"]),
    "no multiplier": (["--lambda-init", -1], ["lambda_init"]),
    "no bound": (["--kl-bound", 0], ["kl_bound"]),
    "no smoothing": (["--hl-sigma", 0], ["hl_sigma"]),
    "entropy of nan": (["--entropy-target", "nan"], ["entropy_target"]),
    "an alpha that stands still": (["--alpha-learning-rate", 0], ["alpha_learning_rate"]),
}


@pytest.mark.parametrize("flags, names", BAD_ENVIRONMENTS.values(), ids=BAD_ENVIRONMENTS)
def test_bad_environments(flags, names, tmp_path):
    folder = tmp_path / "run"
    refused(*TINY, "--run-dir", folder, *flags, names=names)
    assert not folder.exists()


@pytest.mark.parametrize("flags, names", BAD_SETTINGS.values(), ids=BAD_SETTINGS)
@every_script
def test_bad_settings(script, flags, names, tmp_path):
    folder = tmp_path / "run"
    refused(*TINY, *CLOCK, "--run-dir", folder, *flags, names=names, script=script)
    assert not folder.exists()


@pytest.mark.parametrize("flags, names", BAD_RANGES.values(), ids=BAD_RANGES)
@pytest.mark.parametrize("script", SCRIPTS[:2], ids=lambda script: script.SCRIPT)
def test_bad_settings_of_critic_and_policy(script, flags, names, tmp_path):
    folder = tmp_path / "run"
    refused(*TINY, *CLOCK, "--run-dir", folder, *flags, names=names, script=script)
    assert not folder.exists()


def test_denoising_steps_that_would_grow(tmp_path):
    names = ["last_step", "diffusion_steps", "0.25"]
    flags = ["--diffusion-steps", 4, "--last-step", 0.3]
    refused(*TINY, *CLOCK, "--run-dir", tmp_path / "run", *flags, names=names)


@pytest.mark.parametrize("script", SCRIPTS[:2], ids=lambda script: script.SCRIPT)
def test_the_entropy_target_has_no_sign(script):
    for value in (-1.5, 0.0, 1.5):
        args, _ = script.parse_args(["--entropy-target", str(value), *CLOCK])
        assert args.entropy_target == value


@pytest.mark.parametrize("script", SCRIPTS[:2], ids=lambda script: script.SCRIPT)
def test_bounds_and_targets_stay_unless_told_to_change(script):
    args = script.Args(entropy_target=-1.2, kl_bound=0.4)
    script.check_args(args)
    assert args.entropy_target_start == -1.2
    assert args.kl_bound_end == 0.4
    args = script.Args(entropy_target_start=0.5, kl_bound_end=0.05)
    script.check_args(args)
    assert args.entropy_target_start == 0.5
    assert args.kl_bound_end == 0.05


@every_script
def test_missing_checkpoints(script):
    refused("--resume", "no/such/run", names=["no/such/run"], script=script)
    refused("--evaluate", "no/such/best.pt", names=["no/such/best.pt"], script=script)


@one_script_and_more
def test_bad_input_in_a_process_of_its_own(script):
    process = start("--env-id", "CheetahRum-v1", script=script)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2 and out == ""
    assert err.count("\n") == 1 and "CheetahRun-v1" in err


def test_unknown_flags_are_refused(tmp_path):
    flags = [*TINY, *CLOCK, "--run-dir", tmp_path / "run", "--capture-video"]
    assert "--capture-video" in run(*flags, code=2).err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
@every_script
def test_cuda_where_there_is_none(script, tmp_path):
    flags = [*TINY, *CLOCK, "--run-dir", tmp_path / "run", "--device", "cuda"]
    refused(*flags, names=["--device cuda", "CUDA device"], script=script)
    assert not (tmp_path / "run").exists()


# --- packages that are missing ---


@pytest.mark.parametrize(
    "flags", [["--env-id", "CheetahRun-v1"], ["--env-id", "Ant-v5", "--backend", "envpool"]]
)
def test_envpool_not_installed(flags, monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    refused(*flags, names=["EnvPool", "pip install envpool"])


def test_gymnasium_needs_no_envpool(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "envpool", None)
    train(tmp_path / "run")
    assert steps(tmp_path / "run") == [64, 128]


def test_playground_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "simulators.playground", None)
    monkeypatch.delattr("simulators.playground", raising=False)
    flags = ["--env-id", "CartpoleBalance", "--backend", "playground"]
    names = ["playground", "requirements-playground.txt"]
    refused(*TINY, *flags, "--run-dir", tmp_path / "run", names=names)
    assert not (tmp_path / "run").exists()


@every_script_slowly
def test_wandb_not_installed(script, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = tmp_path / "run"
    flags = [*TINY, *CLOCK, "--run-dir", folder, "--track"]
    refused(*flags, names=["--track", "pip install wandb"], script=script)
    train(folder, script=script)  # what was refused does not stand in the way
    assert steps(folder) == [64, 128]


# --- folders and checkpoints ---


def test_folders_that_cannot_be_used(trained, tmp_path):
    script, trained_folder = trained
    note = tmp_path / "note.txt"
    note.write_text("mine")
    for folder in (note / "run", note):
        flags = [*TINY, *CLOCK, "--run-dir", folder]
        refused(*flags, names=[str(note)], script=script)
        flags = ["--evaluate", trained_folder, "--run-dir", folder]
        refused(*flags, names=[str(note)], script=script)
    assert list(tmp_path.iterdir()) == [note] and note.read_text() == "mine"


def test_a_folder_that_holds_a_run(trained):
    script, folder = trained
    before = files(folder)
    flags = [*TINY, *CLOCK, "--run-dir", folder]
    refused(*flags, names=[str(folder), "--resume"], script=script)
    assert files(folder) == before


def test_flags_that_exclude_each_other(trained, tmp_path):
    script, folder = trained
    before = files(folder)
    for flags in (["--evaluate", folder / "best.pt"], ["--run-dir", tmp_path / "other"]):
        refused("--resume", folder, *flags, names=["--resume", flags[0]], script=script)
    assert files(folder) == before and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["--resume", "--evaluate"])
def test_settings_that_do_not_fit_the_checkpoint(mode, trained):
    script, folder = trained
    before = files(folder)
    other = ["--env-id", "Pendulum-v1"]
    refused(mode, folder, *other, names=["env_id", "Pendulum-v1", "Clock-v0"], script=script)
    wider = ["--hidden-size", 32]
    refused(mode, folder, *wider, names=["hidden_size", "16", "32"], script=script)
    assert files(folder) == before


@pytest.mark.parametrize("mode", ["--resume", "--evaluate"])
def test_checkpoints_that_do_not_fit(mode, trained, tmp_path):
    script, trained_folder = trained
    folder = shutil.copytree(trained_folder, tmp_path / "run")
    path = folder / "checkpoint.pt"
    whole = path.read_bytes()
    before = timeless(folder)
    names = sorted(path.name for path in folder.iterdir())
    noise = np.random.default_rng(0).bytes(5000)
    for damage in (whole[: len(whole) // 2], whole[:-20], noise, b""):
        path.write_bytes(damage)
        refused(mode, folder, names=[str(path), "damaged"], script=script)

    path.write_bytes(whole)
    for other in SCRIPTS:
        if other is not script:
            refused(mode, folder, names=[str(path), script.SCRIPT], script=other)

    changed = load(trained_folder)
    changed["agent"]["policy.normalizer.mean"] = torch.zeros(99)
    torch.save(changed, path)
    refused(mode, folder, names=["Clock-v0", "shapes"], script=script)
    changed = load(trained_folder)
    changed["args"]["a_new_setting"] = 1
    torch.save(changed, path)
    refused(mode, folder, names=[str(path), "another version"], script=script)

    del changed["args"]["a_new_setting"]
    del changed["args"]["compile"]  # as if it had been written before there was such a setting
    torch.save(changed, path)
    assert load_checkpoint_args(script, path)["compile"] is False
    torch.save([1, 2], path)
    refused(mode, folder, names=[str(path)], script=script)
    path.unlink()
    refused(mode, folder, names=[str(path)], script=script)
    names.remove("checkpoint.pt")
    assert sorted(path.name for path in folder.iterdir()) == names
    assert timeless(folder) == before
