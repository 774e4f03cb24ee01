"""Isaac Lab's and mjlab's backend: on a stand-in for Isaac Lab, and on mjlab where it is installed.

Isaac Lab itself needs an NVIDIA GPU. tests/fake_isaaclab has its names and the order of its steps.
"""

import atexit
import contextlib
import importlib.util
import io
import json
import math
import os
import subprocess
import sys

import gymnasium as gym
import pytest
import torch
from run_helpers import ROOT, SCRIPTS, TESTS, load, rows, run, steps, train

import trudi_continuous as trudi
from simulators import isaaclab_env
from tools import record

FAKE = TESTS / "fake_isaaclab"
DIRECT = "Isaac-Clock-Direct-v0"
MANAGER = "Isaac-Clock-v0"  # has observations for the critic, and a curriculum
G1 = "Mjlab-Velocity-Flat-Unitree-G1"
every_kind = pytest.mark.parametrize(
    "env_id", [DIRECT, MANAGER, "Isaac-Clock-Direct-Final-v0", "Isaac-Clock-Final-v0"]
)
needs_mjlab = pytest.mark.skipif(
    importlib.util.find_spec("mjlab") is None,
    reason="needs mjlab: pip install -r requirements-mjlab.txt, in an environment of its own",
)


def close_simulators():
    """As at the end of a process"""
    for simulator in isaaclab_env.SIMULATORS.values():
        atexit.unregister(simulator.close)
        simulator.close()
    isaaclab_env.SIMULATORS.clear()


def forget_isaaclab():
    """The next import is the first one again."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("isaaclab", "isaaclab_tasks"):
            del sys.modules[name]
    for env_id in list(gym.registry):
        if env_id.startswith("Isaac-"):
            del gym.registry[env_id]


@pytest.fixture(autouse=True)
def own_simulators():
    yield
    close_simulators()


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKE))
    forget_isaaclab()
    yield
    close_simulators()
    forget_isaaclab()


def make(env_id, num_envs=3, seed=5, of=None, evaluate="", backend="isaaclab", **kwargs):
    """of: number of environments that the run trains with"""
    args = trudi.Args(env_id=env_id, backend=backend, device="cpu", evaluate=evaluate)
    args.num_envs = of or num_envs
    return trudi.make_envs(args, num_envs, seed, **kwargs)


def play(envs, actions):
    """-> obs, reward, terminated, truncated, final_obs, broken of all steps"""
    history = [(*envs.step(action), envs.broken) for action in actions]
    return [torch.stack(values) for values in zip(*history, strict=True)]


def column(episodes, name):
    return [episode[name] for episode in episodes]


@every_kind
def test_time_limit_final_observation_and_restart(fake, env_id):
    envs = make(env_id)
    obs, reward, terminated, truncated, final_obs, broken = play(envs, torch.zeros(14, 3, 2))
    assert obs[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert final_obs[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2]
    assert truncated[:, 0].nonzero()[:, 0].tolist() == [5, 11]
    assert not terminated.any()
    assert not broken.any()
    assert len(obs[[0, 5, 11], :, 1].unique()) == 9, "each env and episode draws its own start"
    assert (final_obs[5, :, 1] == obs[0, :, 1]).all(), "it belongs to the old episode"
    assert {x.dtype for x in (terminated, truncated, broken)} == {torch.bool}
    assert obs.dtype == reward.dtype == final_obs.dtype == torch.float32


@every_kind
def test_termination_is_not_truncation(fake, env_id):
    envs = make(env_id)
    actions = torch.zeros(8, 3, 2)
    actions[2, 1, 0] = 0.95
    actions[5, 2, 0] = 0.95  # at the time limit, too
    obs, _, terminated, truncated, final_obs, _ = play(envs, actions)
    assert terminated.nonzero().tolist() == [[2, 1], [5, 2]]
    assert truncated.nonzero().tolist() == [[5, 0]]
    assert obs[:, 1, 0].tolist() == [1, 2, 0, 1, 2, 3, 4, 5], "its own row starts again"
    assert final_obs[2, 1, 0] == 3
    episodes = envs.pop_finished()
    assert column(episodes, "env") == [1, 0, 2]
    assert column(episodes, "return") == [3, 6, 6]
    assert column(episodes, "length") == [3, 6, 6]
    assert column(episodes, "broken") == [False] * 3
    assert envs.pop_finished() == []


def test_a_finite_horizon_ends_with_a_termination(fake):
    envs = make(DIRECT, is_finite_horizon=True)
    _, _, terminated, truncated, _, _ = play(envs, torch.zeros(6, 3, 2))
    assert terminated[5].all()
    assert not truncated.any()


@every_kind
def test_stored_tensors_are_not_overwritten(fake, env_id):
    """Isaac Lab returns the same buffers in every step."""
    envs = make(env_id)
    kept = []
    copies = []
    for _ in range(13):
        step = (*envs.step(torch.rand(3, 2)), envs.broken)
        kept.append(step)
        copies.append([tensor.clone() for tensor in step])
    for step, copy in zip(kept, copies, strict=True):
        for tensor, before in zip(step, copy, strict=True):
            assert (tensor == before).all()


@pytest.mark.parametrize("index", [0, 1], ids=["observation", "reward"])
@pytest.mark.parametrize("env_id", [DIRECT, MANAGER])
def test_nonfinite_steps(fake, env_id, index):
    envs = make(env_id, faults=True)
    actions = torch.zeros(14, 3, 2)
    actions[3, 1, index] = -0.95
    obs, reward, terminated, truncated, final_obs, broken = play(envs, actions)
    assert all(values.isfinite().all() for values in (obs, reward, final_obs))
    assert broken.nonzero().tolist() == [[3, 1]]
    assert envs.nonfinite == 1
    assert truncated[3].tolist() == [False, True, False]
    assert not terminated.any()
    assert reward[3, 1] == 0
    assert final_obs[3, 1].equal(obs[2, 1]), "the last finite observation"
    clocks = [1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert obs[:, 1, 0].tolist() == clocks, "its env starts again"
    assert obs[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2], "the others go on"
    lost = [episode for episode in envs.pop_finished() if episode["broken"]]
    assert column(lost, "env") == [1]
    assert column(lost, "length") == [4]
    assert column(lost, "return") == [3]


def test_an_episode_that_breaks_in_its_last_step(fake):
    envs = make(DIRECT, faults=True)
    actions = torch.zeros(7, 3, 2)
    actions[5, 1, 0] = -0.95
    obs, _, terminated, truncated, final_obs, broken = play(envs, actions)
    assert broken.nonzero().tolist() == [[5, 1]]
    assert truncated[5].all()
    assert final_obs[5, :, 0].tolist() == [6, 5, 6]
    assert envs.simulator.env.restarts[1:] == [[0, 1, 2]], "the simulator restarted it already"


def test_actions_are_clipped(fake):
    envs = make(DIRECT, num_envs=2)
    obs, *_ = envs.step(torch.tensor([[0.5, -0.25], [0.0, 9.0]]))
    assert obs[:, 2:].tolist() == [[0.5, -0.25], [0.0, 1.0]]


def test_observation_noise_is_in_final_observations_too(fake):
    envs = make(DIRECT, observation_noise_model=True)
    _, _, _, _, final_obs, _ = play(envs, torch.zeros(6, 3, 2))
    assert final_obs[:, 0, 0].tolist() == [1001, 1002, 1003, 1004, 1005, 1006]


def test_spaces(fake):
    envs = make(MANAGER)
    assert (envs.num_envs, envs.obs_dim, envs.action_dim) == (3, 10, 2)
    assert (envs.actor_dim, envs.critic_start) == (4, 4)
    assert envs.spaces["obs_shapes"] == {"policy": [4], "privileged_state": [6]}
    obs = envs.reset()
    assert (obs[:, 4:8] == obs[:, :4] + 100).all(), "the critic's columns are the last"


def test_spaces_without_privileged_observations(fake):
    envs = make(DIRECT)
    assert (envs.obs_dim, envs.actor_dim, envs.critic_start) == (4, 4, 0)
    assert envs.spaces["obs_shapes"] == {"policy": [4]}
    assert envs.spaces["action_low"] == [-1, -1]


@pytest.mark.parametrize("env_id", [DIRECT, MANAGER])
def test_success_at_any_step(fake, env_id):
    envs = make(env_id)
    play(envs, torch.zeros(6, 3, 2))
    assert column(envs.pop_finished(), "success") == [1, 0, 0]
    actions = torch.zeros(2, 3, 2)
    actions[1, :, 0] = 0.95
    play(envs, actions)
    assert column(envs.pop_finished(), "success") == [0, 0, 0], "the next episode begins without"


def test_a_task_that_does_not_tell_success(fake, monkeypatch):
    envs = make(DIRECT)
    monkeypatch.delattr(envs.simulator.env, "successes")
    monkeypatch.setattr(type(envs.simulator.env), "_reset_idx", lambda *_: None)
    assert envs.simulator.read_success().isnan().all()


def test_staggered_first_episodes(fake):
    envs = make(MANAGER, num_envs=3, stagger=True)
    expected = [[1, 7, 13], [3, 9, 15], [5, 11]]
    for _ in range(2):  # a script resets before its first rollout
        _, _, terminated, truncated, _, _ = play(envs, torch.zeros(15, 3, 2))
        ends = [(row.nonzero()[:, 0] + 1).tolist() for row in truncated.T]
        assert ends == expected
        assert not terminated.any()
        lengths = column(envs.pop_finished(), "length")
        assert lengths == [6] * 5, "a staggered episode is no result"
        envs.reset()


@every_kind
def test_an_evaluation_shares_the_simulator(fake, env_id):
    eval_envs = make(env_id, num_envs=2, of=4)
    envs = make(env_id, num_envs=4)
    assert envs.simulator is eval_envs.simulator
    assert envs.simulator.env.num_envs == 4
    envs.reset()
    before, *_ = play(envs, torch.zeros(4, 4, 2))
    assert envs.pop_finished() == []

    first = eval_envs.reset()
    assert first.shape == (2, envs.obs_dim)
    obs, *others = play(eval_envs, torch.zeros(6, 2, 2))
    assert obs[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 0]
    assert {len(values[0]) for values in others} == {2}
    assert column(eval_envs.pop_finished(), "env") == [0, 1]

    obs, reward, terminated, truncated, final_obs = envs.step(torch.full((4, 2), 0.5))
    assert envs.broken.all(), "nobody trains on the step after an evaluation"
    assert truncated.all()
    assert not terminated.any()
    assert not reward.any()
    assert final_obs.equal(before[-1])
    assert not obs[:, 0].any(), "all environments start again"
    assert envs.nonfinite == 0
    assert envs.pop_finished() == [], "what an evaluation cuts is no result"
    obs, _, _, truncated, _, broken = play(envs, torch.zeros(6, 4, 2))
    assert not broken.any()
    assert obs[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 0]
    assert column(envs.pop_finished(), "return") == [6] * 4


def test_more_evaluation_episodes_than_environments(fake):
    eval_envs = make(DIRECT, num_envs=5, of=2)
    envs = make(DIRECT, num_envs=2)
    assert envs.simulator.env.num_envs == 5
    assert envs.reset().shape == (2, 4)
    play(envs, torch.zeros(6, 2, 2))
    assert column(envs.pop_finished(), "env") == [0, 1]
    assert eval_envs.reset().shape == (5, 4)
    play(eval_envs, torch.zeros(6, 5, 2))
    assert column(eval_envs.pop_finished(), "env") == [0, 1, 2, 3, 4]


def test_each_process_of_torchrun_has_its_share(fake, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert make(DIRECT, num_envs=2, of=8).simulator.env.num_envs == 4


def test_evaluating_alone_opens_no_more_than_it_needs(fake):
    assert make(DIRECT, num_envs=2, of=8, evaluate="best.pt").simulator.env.num_envs == 2


def test_curriculum_sees_whole_episodes_of_the_training_only(fake):
    eval_envs = make(MANAGER, num_envs=2, of=3)
    envs = make(MANAGER, num_envs=3, stagger=True)
    env = envs.simulator.env
    calls = []
    envs.simulator.original_curriculum = lambda env_ids: calls.append(env_ids.tolist())
    envs.reset()
    assert calls == [[0, 1, 2]], "the very first reset sets it up"
    play(envs, torch.zeros(9, 3, 2))
    assert calls[1:] == [[0], [1]], "not the staggered episodes"
    assert env.common_step_counter == 9
    eval_envs.reset()
    play(eval_envs, torch.zeros(7, 2, 2))
    envs.step(torch.zeros(3, 2))
    assert calls[1:] == [[0], [1]], "neither an evaluation nor what it interrupts"
    assert env.common_step_counter == 9, "nor does it count an evaluation's steps"
    play(envs, torch.zeros(7, 3, 2))
    assert calls[3:] == [[0]]
    assert env.common_step_counter == 16


def test_opening_does_not_change_how_networks_start(fake):
    before = torch.random.get_rng_state()
    make(DIRECT)
    assert torch.random.get_rng_state().equal(before)


def test_seeds(fake):
    starts = []
    for seed in (5, 5, 6):
        envs = make(DIRECT, seed=seed)
        starts.append(envs.reset()[:, 1])
        torch.rand(3)
    assert starts[0].equal(starts[1]), "the final evaluation gives all samplers the same starts"
    assert not starts[0].equal(starts[2])
    assert not envs.reset()[:, 1].equal(starts[2]), "only the first reset is seeded"


def test_application_starts_without_our_command_line(fake, monkeypatch):
    arguments = ["trudi_continuous.py", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", arguments)
    make(DIRECT)
    from isaaclab.app import AppLauncher

    settings, seen = AppLauncher.started
    assert settings == {"headless": True, "device": "cpu", "enable_cameras": False}
    assert seen == arguments[:1]
    assert sys.argv == arguments


def refusal(capsys, *args, **kwargs):
    with pytest.raises(SystemExit) as end:
        make(*args, **kwargs)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_second_task_is_refused(fake, capsys):
    make(DIRECT)
    assert "one simulator per process: leave --eval-env-id empty" in refusal(capsys, MANAGER)


def test_rollouts_of_one_step_are_refused(fake, capsys):
    """After an evaluation they would hold nothing that can be trained on."""
    args = trudi.Args(env_id="Isaac-Clock-Direct-v0", backend="isaaclab", device="cpu", num_steps=1)
    with pytest.raises(SystemExit):
        trudi.make_envs(args, 3, seed=5)
    assert "num_steps must be at least 2" in capsys.readouterr().err


def test_an_unknown_task_is_refused(fake, capsys):
    assert "isaaclab cannot make Isaac-Nothing-v0" in refusal(capsys, "Isaac-Nothing-v0")


@pytest.mark.parametrize(
    "backend, package, hint",
    [
        ("isaaclab", "isaaclab", "Isaac Lab is missing"),
        ("mjlab", "mjlab", "pip install -r requirements-mjlab.txt"),
    ],
)
def test_a_missing_package(monkeypatch, capsys, backend, package, hint):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, f"{package}.app", None)
    monkeypatch.setitem(sys.modules, f"{package}.tasks", None)
    assert hint in refusal(capsys, "Some-Task", backend=backend)


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('late')", "raise SystemExit(3)"])
def test_simulator_is_closed_at_the_end(ending):
    code = f"""
import trudi_continuous as trudi
args = trudi.Args(env_id="{DIRECT}", backend="isaaclab", device="cpu", num_envs=2)
trudi.make_envs(args, 2, 1).reset()
{ending}
"""
    done = python(code, PYTHONPATH=str(FAKE))
    assert done.stdout.splitlines()[-2:] == ["environment closed", "application closed"]
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3}.get(ending, 1), done.stderr


def test_nothing_is_imported_for_other_tasks():
    code = """
import sys
import trudi_continuous as trudi
args, _ = trudi.parse_args(["--env-id", "Pendulum-v1", "--num-envs", "2"])
trudi.make_envs(args, 2, 1).reset()
names = {name.split(".")[0] for name in sys.modules}
print(names & {"isaaclab", "isaaclab_tasks", "mjlab", "mujoco_warp", "warp"})
print("simulators.isaaclab_env" in sys.modules)
"""
    done = python(code, PYTHONPATH=str(FAKE))
    assert done.stdout.splitlines()[-2:] == ["set()", "False"], done.stderr


def as_in_processes_of_their_own(*calls):
    for call in calls:
        call()
        close_simulators()
        forget_isaaclab()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=script.SCRIPT, marks=[] if script is trudi else pytest.mark.slow)
        for script in SCRIPTS
    ],
)
def test_train_resume_evaluate(fake, tmp_path, monkeypatch, script):
    """The step after an evaluation is broken, and no other one."""
    folder = tmp_path / "run"
    broken = []
    collect = script.rollout

    def watched_rollout(*args):
        data, obs = collect(*args)
        broken.append(data["broken"])
        return data, obs

    monkeypatch.setattr(script, "rollout", watched_rollout)
    task = ["--env-id", MANAGER]
    more = ["--total-timesteps", 6 * 64, "--eval-points", 6]
    evaluated = ["--evaluate", folder / "checkpoint.pt", "--eval-episodes", "7"]
    evaluated += ["--run-dir", tmp_path / "again"]
    as_in_processes_of_their_own(
        lambda: train(folder, "--eval-points", 4, iterations=4, env=task, script=script),
        lambda: run("--resume", folder, *more, script=script),
        lambda: run(*evaluated, script=script),
    )
    assert steps(folder) == [64 * iteration for iteration in range(1, 7)]
    assert all(row["charts/nonfinite"] == "0" for row in rows(folder))
    assert any(row["charts/episode_return"] for row in rows(folder))
    assert load(folder)["args"]["backend"] == "isaaclab"
    assert not torch.stack(broken)[:, 1:].any()
    first_steps = [(bool(rollout[0].any()), bool(rollout[0].all())) for rollout in broken]
    after_an_evaluation = [False, True, True, True, False, True]  # the fifth was resumed
    assert first_steps == [(cut, cut) for cut in after_an_evaluation]
    table = json.loads((folder / "eval.json").read_text())
    assert {len(result["returns"]) for result in table.values()} == {2}
    table = json.loads((tmp_path / "again" / "eval_checkpoint.json").read_text())
    assert {len(result["returns"]) for result in table.values()} == {7}
    assert {result["success"] for result in table.values()} <= {1 / 7, 0.0}


def test_load_policy(fake, tmp_path):
    train(tmp_path / "run", env=["--env-id", MANAGER])
    policy = trudi.load_policy(tmp_path / "run" / "policy.pt")
    envs = isaaclab_env.SIMULATORS["isaaclab", MANAGER].env
    obs, _ = envs.reset()
    action = policy(obs)  # a dict of groups, as Isaac Lab gives it
    assert action.shape == (4, 2)
    assert action.abs().max() <= 1


def test_film(fake, tmp_path, capsys):
    folder = tmp_path / "run"
    train(folder, env=["--env-id", DIRECT])
    close_simulators()
    forget_isaaclab()
    record.main([str(folder), "--checkpoint", "policy.pt"])
    assert isaaclab_env.SIMULATORS["isaaclab", DIRECT].env.num_envs == 1
    assert sys.modules["isaaclab.app"].AppLauncher.started[0]["enable_cameras"]
    assert (folder / "video.gif").exists()
    assert "steps" in capsys.readouterr().out


def plain_g1(num_envs):
    """Its config without noise in the observations, and with episodes of 0.3 s: 15 steps"""
    import mjlab.tasks  # noqa: F401
    from mjlab.tasks.registry import load_env_cfg

    cfg = load_env_cfg(G1)
    cfg.scene.num_envs = num_envs
    cfg.episode_length_s = 0.3
    for group in cfg.observations.values():
        group.enable_corruption = False
    return cfg


def command_columns(env):
    """Columns of the turning speed in the commands, which follow from the heading"""
    manager = env.observation_manager
    columns = []
    start = 0
    for group in ("actor", "critic"):
        sizes = manager.group_obs_term_dim[group]
        for name, shape in zip(manager.active_terms[group], sizes, strict=True):
            if name == "command":
                columns.append(start + 2)
            start += math.prod(shape)
    return columns


@needs_mjlab
@pytest.mark.slow
def test_final_observation_of_mjlab_against_auto_reset_false():
    """mjlab can leave out its restarts: then it returns the true last observation itself."""
    from mjlab.envs import ManagerBasedRlEnv

    num_envs = 6
    seed = 3
    early = 4  # of them end an episode before the others
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(10, num_envs, 29, generator=generator) * 2 - 1
    cfg = plain_g1(num_envs)
    envs = make(
        G1,
        num_envs,
        seed,
        backend="mjlab",
        observations=cfg.observations,
        episode_length_s=cfg.episode_length_s,
    )
    envs.reset()
    envs.simulator.env.episode_length_buf[:early] = 5
    obs, reward, terminated, truncated, final_obs, _ = play(envs, actions)

    cfg.seed = seed
    cfg.auto_reset = False
    with contextlib.redirect_stdout(io.StringIO()):
        reference = ManagerBasedRlEnv(cfg, device="cpu")
        reference.reset(seed=seed)
    reference.episode_length_buf[:early] = 5
    for t, action in enumerate(actions):
        true_obs, true_reward, *true_ends, _ = reference.step(action)
        true_obs = torch.cat([true_obs["actor"], true_obs["critic"]], dim=1)
        assert reward[t].equal(true_reward)
        assert terminated[t].equal(true_ends[0])
        assert truncated[t].equal(true_ends[1])
        if t < 9:
            assert final_obs[t].equal(true_obs)
    assert truncated[9].tolist() == [True] * early + [False] * (num_envs - early)

    # after a restart anywhere, mjlab reads the contact forces of the other environments anew
    difference = (final_obs[9] - true_obs)[:early].abs().amax(dim=0)
    difference[command_columns(reference)] = 0
    assert difference.max() == 0, difference.nonzero()
    new_start = (obs[9, :early] - final_obs[9, :early]).abs().amax(dim=1)
    assert (new_start > 0.1).all()


@needs_mjlab
@pytest.mark.slow
def test_contract_of_mjlab():
    settings = dict(backend="mjlab", episode_length_s=0.2)
    eval_envs = make(G1, num_envs=2, of=6, **settings)
    envs = make(G1, num_envs=6, stagger=True, **settings)
    assert envs.simulator.env.num_envs == 6
    assert (envs.obs_dim, envs.actor_dim, envs.critic_start, envs.action_dim) == (210, 99, 99, 29)
    envs.reset()
    obs, reward, terminated, truncated, final_obs, broken = play(envs, torch.zeros(22, 6, 29))
    assert all(values.isfinite().all() for values in (obs, reward, final_obs))
    assert not broken.any()
    assert not terminated.any()
    ends = [(row.nonzero()[:, 0] + 1).tolist() for row in truncated.T]
    assert ends == [[1, 11, 21], [2, 12, 22], [4, 14], [6, 16], [7, 17], [9, 19]]
    equal = (obs == final_obs).all(dim=2)
    assert equal.equal(~truncated)
    assert column(envs.pop_finished(), "length") == [10] * 8
    eval_envs.reset()
    play(eval_envs, torch.zeros(10, 2, 29))
    assert column(eval_envs.pop_finished(), "env") == [0, 1]
    envs.step(torch.zeros(6, 29))
    assert envs.broken.all()
    envs.step(torch.zeros(6, 29))
    assert not envs.broken.any()


@needs_mjlab
@pytest.mark.slow
def test_nonfinite_step_of_mjlab():
    envs = make(G1, num_envs=3, backend="mjlab")
    envs.reset()
    play(envs, torch.zeros(2, 3, 29))
    envs.simulator.env.sim.data.qvel[1] = torch.nan
    obs, reward, _, truncated, final_obs, broken = play(envs, torch.zeros(3, 3, 29))
    assert broken.nonzero().tolist() == [[0, 1]]
    assert truncated.nonzero().tolist() == [[0, 1]]
    assert all(values.isfinite().all() for values in (obs, reward, final_obs))
    assert envs.nonfinite == 1


@needs_mjlab
@pytest.mark.slow
def test_train_resume_evaluate_on_mjlab(tmp_path, monkeypatch):
    import mjlab.tasks  # noqa: F401
    from mjlab.tasks import registry

    load_env_cfg = registry.load_env_cfg

    def short_episodes(env_id):
        cfg = load_env_cfg(env_id)
        cfg.episode_length_s = 0.2
        return cfg

    monkeypatch.setattr(registry, "load_env_cfg", short_episodes)
    folder = tmp_path / "run"
    train(folder, iterations=2, env=["--env-id", G1])
    close_simulators()
    run("--resume", folder, "--total-timesteps", 3 * 64)
    close_simulators()
    run("--evaluate", folder, "--eval-episodes", "3")
    assert steps(folder) == [64, 128, 192]
    table = json.loads((folder / "eval_checkpoint.json").read_text())
    assert {len(result["returns"]) for result in table.values()} == {3}
    assert {result["length"] for result in table.values()} == {10}


@needs_mjlab
def test_an_unknown_task_of_mjlab(capsys):
    error = refusal(capsys, "Mjlab-Nothing", backend="mjlab")
    assert "mjlab has no task of this name, but Mjlab-Cartpole-Balance" in error
