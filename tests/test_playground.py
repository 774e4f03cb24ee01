"""MuJoCo Playground's backend: on a stand-in simulator that compiles at once, and on the real one.

The contract tests that all backends share are in test_envs.py.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

playground = pytest.importorskip("simulators.playground")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402
from mujoco_playground._src import mjx_env  # noqa: E402

import ppo_continuous  # noqa: E402
import reppo_continuous  # noqa: E402
import simulators  # noqa: E402
import trudi_continuous  # noqa: E402

pytestmark = pytest.mark.slow  # JAX compiles for most of them
ROOT = Path(__file__).parents[1]
SCRIPTS = (trudi_continuous, reppo_continuous, ppo_continuous)
TINY = "--num-envs 4 --num-steps 8 --num-minibatches 4 --update-epochs 1 --hidden-size 16"
TINY += " --total-timesteps 96 --eval-points 1 --eval-episodes 4"


class Clock:
    """Observes its clock, a number drawn at the start, and the action that arrived.

    An action above 0.9 in the first column ends the episode, one below -0.9 breaks the
    observation, in the second column the reward.
    """

    action_size = 2
    observation_size = 4

    def reset(self, key):
        draw = jax.random.uniform(key)
        obs = jnp.array([0.0, draw, 0.0, 0.0])
        return mjx_env.State(
            data=obs[0],
            obs=obs,
            reward=jnp.zeros(()),
            done=jnp.zeros(()),
            metrics={"success": jnp.zeros(())},
            info={"draw": draw},
        )

    def step(self, state, action):
        clock = state.data + 1
        draw = state.info["draw"]
        obs = jnp.array([jnp.where(action[0] < -0.9, jnp.nan, clock), draw, *action])
        reward = jnp.where(action[1] < -0.9, jnp.inf, 1.0 + action[1])
        done = (action[0] > 0.9).astype(float)
        # for a moment, in some episodes
        success = jnp.where((clock == 3) & (draw > 0.5), 1.0, 0.0)
        metrics = {"success": success}
        return state.replace(data=clock, obs=obs, reward=reward, done=done, metrics=metrics)


class Humanoid(Clock):
    """As G1 and T1: the actor sees `state`, the critic `privileged_state`."""

    observation_size = {"privileged_state": (6,), "state": (4,)}

    def dress(self, state):
        privileged = jnp.concatenate([state.obs + 100, state.obs[:2]])
        return state.replace(obs={"privileged_state": privileged, "state": state.obs})

    def reset(self, key):
        return self.dress(super().reset(key))

    def step(self, state, action):
        return self.dress(super().step(state, action))


@pytest.fixture
def stand_in(monkeypatch):
    def load(env_id, on_cpu, overrides):
        config = {"episode_length": 6, "action_repeat": 1} | overrides
        env_class = {"Clock": Clock, "Humanoid": Humanoid}[env_id]
        return env_class(), ConfigDict(config)

    monkeypatch.setattr(playground, "load", load)
    playground.build.cache_clear()
    yield
    playground.build.cache_clear()


def make(env_id="Clock", num_envs=3, seed=5, **overrides):
    args = trudi_continuous.Args(env_id=env_id, backend="playground", device="cpu")
    return trudi_continuous.make_envs(args, num_envs, seed, **overrides)


def play(envs, actions):
    """-> obs, reward, terminated, truncated, final_obs, broken of all steps"""
    steps = [(*envs.step(action), envs.broken) for action in actions]
    return [torch.stack(column) for column in zip(*steps, strict=True)]


def column(episodes, name):
    return [episode[name] for episode in episodes]


def whole(episodes):
    return [episode for episode in episodes if not episode["broken"]]


def test_time_limit_final_observation_and_restart(stand_in):
    envs = make()
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
    assert (envs.num_envs, envs.obs_dim, envs.action_dim) == (3, 4, 2)
    assert (envs.actor_dim, envs.critic_start) == (4, 0)


@pytest.mark.parametrize("num_envs", [1, 7, 8, 9, 37])
def test_all_that_end_together_start_again(stand_in, num_envs):
    """Restarts come in groups: none may be left out, whatever the number of environments."""
    envs = make(num_envs=num_envs)
    assert envs.simulator.group_size == min(num_envs, 8)
    obs, _, _, truncated, final_obs, _ = play(envs, torch.zeros(8, num_envs, 2))
    assert truncated[5].all()
    assert truncated.sum() == num_envs
    assert (final_obs[5, :, 0] == 6).all()
    assert obs[5:, :, 0].tolist() == [[clock] * num_envs for clock in (0, 1, 2)]
    assert len(obs[[0, 5], :, 1].unique()) == 2 * num_envs
    assert column(envs.pop_finished(), "env") == list(range(num_envs))


def test_seeds(stand_in):
    starts = [make(seed=seed).reset()[:, 1] for seed in (5, 5, 6)]
    assert (starts[0] == starts[1]).all()
    assert len(torch.stack(starts[1:]).unique()) == 6
    assert make(seed=10_007 * 10**9).reset().isfinite().all(), "larger than a 32-bit number"


def test_termination_restarts_its_own_row_only(stand_in):
    envs = make()
    actions = torch.zeros(8, 3, 2)
    actions[2, 1, 0] = 0.95
    obs, _, terminated, truncated, final_obs, _ = play(envs, actions)
    assert terminated.nonzero().tolist() == [[2, 1]]
    assert truncated.nonzero().tolist() == [[5, 0], [5, 2]]
    assert obs[:, 1, 0].tolist() == [1, 2, 0, 1, 2, 3, 4, 5]
    assert final_obs[2, 1, 0] == 3
    assert obs[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 0, 1, 2]
    episodes = envs.pop_finished()
    assert column(episodes, "env") == [1, 0, 2]
    assert column(episodes, "return") == [3, 6, 6]
    assert column(episodes, "length") == [3, 6, 6]
    assert column(episodes, "broken") == [False, False, False]


def test_statistics_of_episodes(stand_in):
    envs = make()
    start = envs.reset()
    actions = torch.rand(9, 3, 2)
    actions[..., 0] = 0
    _, reward, *_ = play(envs, actions)
    episodes = envs.pop_finished()
    assert column(episodes, "env") == [0, 1, 2]
    assert column(episodes, "length") == [6] * 3
    returns = reward[:6].sum(0).tolist()
    assert column(episodes, "return") == pytest.approx(returns, rel=1e-6)
    successes = (start[:, 1] > 0.5).float().tolist()
    assert column(episodes, "success") == successes, "success at any step counts"
    assert 0 < sum(successes) < 3
    assert column(episodes, "broken") == [False] * 3
    assert envs.carry.episode_length.tolist() == [3] * 3, "the next ones are under way"
    returns = reward[6:].sum(0).tolist()
    assert envs.carry.episode_return.tolist() == pytest.approx(returns, rel=1e-6)
    for episode in episodes:
        kinds = {name: type(value) for name, value in episode.items()}
        expected = {"env": int, "return": float, "length": int, "success": float, "broken": bool}
        expected["mode"] = float
        assert kinds == expected
    assert envs.pop_finished() == []


def test_reset_forgets_the_episodes_under_way(stand_in):
    envs = make()
    play(envs, torch.zeros(8, 3, 2))
    first = envs.reset()
    assert envs.pop_finished() == []
    assert envs.carry.episode_length.tolist() == [0] * 3
    assert envs.carry.episode_return.tolist() == [0] * 3
    obs, *_ = play(envs, torch.zeros(6, 3, 2))
    assert (obs[0, :, 1] == first[:, 1]).all()
    assert column(envs.pop_finished(), "length") == [6] * 3


def test_a_task_that_does_not_tell_success(stand_in, monkeypatch):
    def forget(function):
        return lambda self, *args: function(self, *args).replace(metrics={})

    monkeypatch.setattr(Clock, "reset", forget(Clock.reset))
    monkeypatch.setattr(Clock, "step", forget(Clock.step))
    envs = make()
    play(envs, torch.zeros(12, 3, 2))
    episodes = envs.pop_finished()
    assert len(episodes) == 6
    assert all(math.isnan(success) for success in column(episodes, "success"))


@pytest.mark.parametrize("column_index", [0, 1], ids=["observation", "reward"])
def test_nonfinite_steps_are_dropped(stand_in, column_index):
    envs = make()
    clean = make()
    actions = torch.zeros(14, 3, 2)
    expected = play(clean, actions)
    actions[3, 1, column_index] = -0.95
    got = play(envs, actions)
    obs, reward, terminated, truncated, final_obs, broken = got
    assert all(x.isfinite().all() for x in (obs, reward, final_obs))
    assert broken.nonzero().tolist() == [[3, 1]]
    assert (envs.nonfinite, clean.nonfinite) == (1, 0)
    assert truncated[3].tolist() == [False, True, False]
    assert not terminated.any()
    assert reward[3, 1] == 0
    assert final_obs[3, 1].equal(obs[2, 1]), "the last finite observation"
    clocks = [1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert obs[:, 1, 0].tolist() == clocks, "its env starts again"
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours[:, [0, 2]] == theirs[:, [0, 2]]).all(), "the other envs must not notice"
    episodes = envs.pop_finished()
    assert sorted(column(whole(episodes), "env")) == [0, 0, 1, 2, 2]
    assert set(column(whole(episodes), "length")) == {6}
    lost = [episode for episode in episodes if episode["broken"]]
    assert column(lost, "env") == [1]
    assert column(lost, "length") == [4]
    assert column(lost, "return") == [3]
    envs.reset()
    assert envs.nonfinite == 1, "a reset does not forget them"
    assert envs.broken.dtype == torch.bool


def test_nan_in_the_simulator_state(stand_in):
    """Not from an action: the state itself is poisoned, as when MJX diverges."""
    envs = make()
    play(envs, torch.zeros(2, 3, 2))
    clock, *others = envs.carry.state
    envs.carry = envs.carry._replace(state=(clock.at[2].set(jnp.nan), *others))
    obs, reward, terminated, truncated, final_obs, broken = play(envs, torch.zeros(3, 3, 2))
    assert broken.tolist() == [[False, False, True], [False] * 3, [False] * 3]
    assert envs.nonfinite == 1
    assert obs[:, 2, 0].tolist() == [0, 1, 2]
    assert obs[:, 0, 0].tolist() == [3, 4, 5]
    assert final_obs.isfinite().all()


def test_broken_starts_are_restarted(stand_in, monkeypatch):
    good_reset = Clock.reset

    def reset(self, key):
        state = good_reset(self, key)
        draw = state.info["draw"]
        error = jnp.where(draw < 0.2, jnp.nan, jnp.where(draw < 0.4, jnp.inf, 0.0))
        return state.replace(data=state.data + error, obs=state.obs + error)

    monkeypatch.setattr(Clock, "reset", reset)
    envs = make(num_envs=32)
    largest = envs.reset().abs().max()
    assert largest <= 1, "neither NaN nor the largest float may reach the normalizer"
    obs, reward, _, _, final_obs, broken = play(envs, torch.zeros(30, 32, 2))
    assert all(x.isfinite().all() for x in (obs, reward, final_obs))
    assert envs.nonfinite == broken.sum() > 10
    assert set(column(whole(envs.pop_finished()), "length")) == {6}


def test_actions_are_clipped_not_rescaled(stand_in):
    envs = make(num_envs=2)
    arrived = envs.step(torch.tensor([[0.5, -0.25], [0.0, 9.0]]))[0][:, 2:]
    expected = [[0.5, -0.25], [0.0, 1.0]]
    assert arrived.tolist() == expected, "Playground's actions are in [-1, 1] already"


def test_staggered_first_episodes(stand_in):
    envs = make(num_envs=4, stagger=True, episode_length=8)
    expected = [[1, 9, 17], [3, 11, 19], [5, 13, 21], [7, 15, 23]]
    for _ in range(2):  # a script resets before its first rollout
        _, _, terminated, truncated, _, _ = play(envs, torch.zeros(24, 4, 2))
        ends = [(row.nonzero()[:, 0] + 1).tolist() for row in truncated.T]
        assert ends == expected
        assert not terminated.any()
        lengths = column(envs.pop_finished(), "length")
        assert lengths == [8] * 8, "a staggered episode is no result"
        envs.reset()


def test_more_ends_than_a_group(stand_in, monkeypatch):
    """One row starts again at a time here, and all end at once."""
    monkeypatch.setattr(playground, "CPU_GROUP", 1)
    envs = make(num_envs=6)
    assert envs.simulator.group_size == 1
    actions = torch.zeros(3, 6, 2)
    actions[1, :, 0] = 0.95
    obs, _, terminated, _, _, _ = play(envs, actions)
    assert terminated[1].all()
    assert obs[1:, :, 0].tolist() == [[0] * 6, [1] * 6]
    assert len(obs[1, :, 1].unique()) == 6


def test_action_repeat_adds_rewards(stand_in):
    envs = make(action_repeat=2)
    obs, reward, _, truncated, _, _ = play(envs, torch.zeros(4, 3, 2))
    assert obs[:, 0, 0].tolist() == [2, 4, 0, 2]
    assert (reward == 2).all()
    assert truncated[:, 0].tolist() == [False, False, True, False]


def test_an_end_between_repeats_is_an_end(stand_in, monkeypatch):
    plain_step = Clock.step

    def step(self, state, action):
        state = plain_step(self, state, action)
        # after the first half of the second step
        return state.replace(done=(state.data == 3).astype(float))

    monkeypatch.setattr(Clock, "step", step)
    envs = make(action_repeat=2, episode_length=20)
    obs, reward, terminated, truncated, final_obs, _ = play(envs, torch.zeros(3, 3, 2))
    assert terminated[:, 0].tolist() == [False, True, False]
    assert not truncated.any()
    assert reward[:, 0].tolist() == [2, 1, 2], "nothing is earned after the end"


def test_stored_tensors_are_not_overwritten(stand_in):
    """dlpack shares memory: what a rollout keeps is neither JAX's next buffer nor the action's."""
    envs = make()
    kept = []
    copies = []
    action = torch.zeros(3, 2)
    for i in range(20):
        action.fill_(i / 40)  # in place, as a careless caller would
        step = (*envs.step(action), envs.broken)
        copies.append([tensor.clone() for tensor in step])
        kept.append(step)
        carried = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(envs.carry)}
        assert carried.isdisjoint(tensor.data_ptr() for tensor in step), "the next step's memory"
    for step, copy in zip(kept, copies, strict=True):
        for tensor, before in zip(step, copy, strict=True):
            assert (tensor == before).all()
    pointers = [tensor.data_ptr() for step in kept for tensor in step]
    assert len(set(pointers)) == len(pointers), "two tensors share a buffer"


def test_what_was_asked_for_outlives_the_carry(stand_in):
    """A step writes the new carry over the old one: nothing handed out before may show that."""
    envs = make()
    first = envs.reset()
    stepped = envs.step(torch.zeros(3, 2))[0]
    first_copy = first.clone()
    stepped_copy = stepped.clone()
    carry = envs.carry
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(carry)}
    play(envs, torch.full((1, 3, 2), 0.5))
    reused = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(envs.carry)}
    assert carry.obs.is_deleted(), "the carry is donated"
    assert pointers & reused, "and its memory used again"
    play(envs, torch.full((8, 3, 2), 0.5))
    assert first.equal(first_copy)
    assert stepped.equal(stepped_copy)


def test_no_copies_on_the_way(stand_in):
    envs = make()
    steps = []
    advance = envs.advance

    def spy(carry, action):
        carry, step = advance(carry, action)
        steps.append(step)
        return carry, step

    envs.advance = spy
    obs, reward, terminated, truncated, final_obs = envs.step(torch.zeros(3, 2))
    step = steps[0]
    assert obs.data_ptr() == step.obs.unsafe_buffer_pointer()
    assert reward.data_ptr() == step.reward.unsafe_buffer_pointer()
    assert terminated.data_ptr() == step.terminated.unsafe_buffer_pointer()
    assert truncated.data_ptr() == step.truncated.unsafe_buffer_pointer()
    assert final_obs.data_ptr() == step.final_obs.unsafe_buffer_pointer()
    assert envs.broken.data_ptr() == step.ends.broken.unsafe_buffer_pointer()
    action = torch.zeros(3, 2)
    assert jax.dlpack.from_dlpack(action).unsafe_buffer_pointer() == action.data_ptr()


def test_rollout_does_not_wait_for_the_device(stand_in, monkeypatch):
    """`step` may not look at a value: reading one on the host is what waits."""
    envs = make()
    looked = []

    def spy_on(owner, name):
        real = getattr(owner, name)

        def spy(*args, **kwargs):
            looked.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, spy)

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"):
        spy_on(torch.Tensor, name)
    for name in ("block_until_ready", "copy_to_host_async", "__array__", "__bool__", "__float__"):
        spy_on(type(envs.carry.obs), name)
    for _ in range(8):
        envs.step(torch.zeros(3, 2))
    assert looked == []
    assert len(envs.pop_finished()) == 3
    assert looked, "the spies are in place"


def test_privileged_observations(stand_in):
    envs = make("Humanoid")
    assert (envs.obs_dim, envs.actor_dim, envs.critic_start) == (10, 4, 4)
    assert envs.reset().shape == (3, 10)
    obs = envs.step(torch.full((3, 2), 0.25))[0]
    assert (obs[:, 4:8] == obs[:, :4] + 100).all()
    assert obs[:, 0].tolist() == [1, 1, 1]
    args = trudi_continuous.Args(num_envs=3, hidden_size=8, diffusion_steps=2)
    agent = trudi_continuous.Agent(envs, args)
    assert agent.policy.obs_layer.in_features == 4
    assert agent.critic.encoder[0].in_features == 6 + 2


def test_choice_of_the_backend(monkeypatch, capsys):
    choose = trudi_continuous.choose_backend
    assert choose("CheetahRun", "playground", "cpu") == ("playground", "DMC")
    assert choose("CheetahRun", "auto", "cuda") == ("playground", "DMC")
    assert choose("T1JoystickRoughTerrain", "auto", "cuda") == ("playground", "other")
    assert choose("PandaPickCube", "playground", "cpu") == ("playground", "other")
    assert choose("CheetahRun-v1", "auto", "cuda")[0] == "envpool"
    # as if it could not be imported
    monkeypatch.setitem(sys.modules, "simulators.playground", None)
    monkeypatch.delattr(simulators, "playground")
    assert choose("CheetahRun-v1", "auto", "cuda")[0] == "envpool"
    with pytest.raises(SystemExit):
        choose("CheetahRun", "playground", "cpu")
    assert "requirements-playground.txt" in capsys.readouterr().err


@pytest.mark.parametrize("env_id", ["CheetahRan", "CheetahRun-v1", "Pendulum-v1"])
def test_unknown_ids(env_id, capsys):
    with pytest.raises(SystemExit) as stopped:
        make(env_id)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert f"playground cannot make {env_id}" in error
    assert "MuJoCo Playground has no task of this name" in error
    assert error.count("\n") == 1
    assert "CheetahRun" in error or env_id == "Pendulum-v1"


def test_all_dmc_tasks_of_the_paper_are_known():
    names = """AcrobotSwingup AcrobotSwingupSparse BallInCup CartpoleBalance CartpoleBalanceSparse
    CartpoleSwingup CartpoleSwingupSparse CheetahRun FingerSpin FingerTurnEasy FingerTurnHard
    FishSwim HopperHop HopperStand PendulumSwingup ReacherEasy ReacherHard WalkerRun WalkerStand
    WalkerWalk"""
    assert {playground.TASKS[name] for name in names.split()} == {"DMC"}
    joysticks = [name for name in playground.TASKS if re.match("[GT]1Joystick", name)]
    assert len(joysticks) == 4
    assert {playground.TASKS[name] for name in joysticks} == {"other"}
    assert set(playground.TASKS) == set(playground.registry.ALL_ENVS)


def test_missing_menagerie(monkeypatch, tmp_path, capsys):
    def offline(*args, **kwargs):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "absent")
    monkeypatch.setattr(playground.registry, "load", offline)
    with pytest.raises(SystemExit) as stopped:
        playground.load("G1JoystickFlatTerrain", True, {})
    printed = capsys.readouterr()
    assert "MENAGERIE_PATH" in printed.out
    assert str(tmp_path / "absent") in printed.out
    assert stopped.value.code == 2
    assert "--backend envpool --env-id G1JoystickFlatTerrain-v1" in printed.err
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("MENAGERIE_PATH", str(tmp_path / "mine"))
    # a copy of one's own: its errors are shown as they are
    with pytest.raises(subprocess.CalledProcessError):
        playground.load("G1JoystickFlatTerrain", True, {})
    assert str(mjx_env.MENAGERIE_PATH) == str(tmp_path / "mine")
    assert "fetches" not in capsys.readouterr().out


def test_jax_without_a_gpu_is_one_sentence(capsys):
    args = trudi_continuous.Args(env_id="CartpoleBalance", backend="playground", device="cuda")
    with pytest.raises(SystemExit) as stopped:
        playground.VecEnv(args, 2, 1)
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "jax[cuda13]==0.10.2" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_memory_and_cache_settings():
    """In a process of its own, since they must be set before JAX starts; a user's values win."""
    code = "from simulators import playground; import jax, os; "
    code += "print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], "
    code += "jax.config.jax_compilation_cache_dir)"
    inherited = {k: v for k, v in os.environ.items() if "JAX" not in k and "XLA" not in k}
    own_setting = {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}
    for given, expected in (({}, "trudi-mjx"), (own_setting, "elsewhere")):
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=inherited | given,
            capture_output=True,
            text=True,
            check=True,
        )
        last_line = run.stdout.strip().splitlines()[-1]
        assert re.fullmatch(rf"false \S*{expected}", last_line)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_cartpole_trains(script, tmp_path, capsys, monkeypatch):
    """On the real simulator: a few iterations, the files of a run, going on with it."""
    whole_config = playground.registry.dm_control_suite.get_default_config

    def short_episodes(env_id):
        config = whole_config(env_id)
        config.episode_length = 40
        return config

    monkeypatch.setattr(playground.registry, "get_default_config", short_episodes)
    monkeypatch.chdir(tmp_path)
    script.main(["--env-id", "CartpoleBalance", "--backend", "playground", *TINY.split()])
    printed = capsys.readouterr().out
    assert "CartpoleBalance by playground" in printed
    run_dir = next(Path("runs").iterdir())
    assert run_dir.name.startswith(f"CartpoleBalance-playground__{script.__name__}__1__")
    about = json.loads((run_dir / "args.json").read_text())
    assert about["backend"] == "playground"
    assert about["suite"] == "DMC"
    header, *rows = (run_dir / "metrics.csv").read_text().splitlines()
    assert header.split(",")[0] == "global_step"
    assert [row.split(",")[0] for row in rows] == ["32", "64", "96"]
    values = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    assert float(values["charts/nonfinite"]) == 0
    assert 0 < float(values["eval/return"]) <= 40
    assert float(values["eval/length"]) == 40
    script.main(["--resume", str(run_dir), "--total-timesteps", "128"])
    assert (run_dir / "metrics.csv").read_text().splitlines()[-1].startswith("128,")
    assert (run_dir / "eval.json").exists()
    assert (run_dir / "curve.png").exists()


def test_compiling_is_announced_once(stand_in, capsys):
    for _ in range(2):
        envs = make(num_envs=4)
        play(envs, torch.zeros(9, 4, 2))
        envs.reset()
        play(envs, torch.zeros(2, 4, 2))
    assert envs.advance._cache_size() == 1, "types or shapes changed: it compiled again"
    assert envs.begin._cache_size() == 1, "types or shapes changed: it compiled again"
    printed = capsys.readouterr().out
    assert printed.count("compiling the simulator of 4 envs") == 1
    assert len(re.findall(r"compiled in \d+ s", printed)) == 1


@pytest.mark.slow
@pytest.mark.extended  # minutes of compiling
@pytest.mark.parametrize("env_id, tolerance", [("CartpoleBalance", 1e-6), ("CheetahRun", 1e-4)])
def test_warp_agrees_with_jax(env_id, tolerance):
    """CUDA takes Warp, whose state has arrays without an env axis. It runs on a CPU, too."""
    pytest.importorskip("warp")
    rows = {}
    for impl in ("jax", "warp"):
        args = SimpleNamespace(env_id=env_id, device="cpu")
        envs = playground.VecEnv(args, 3, seed=7, impl=impl, episode_length=10)
        assert envs.simulator.env._config.impl == impl
        generator = torch.Generator().manual_seed(3)
        rows[impl] = [envs.reset().clone()]
        num_ended = 0
        for _ in range(16):
            action = 2 * torch.rand(3, envs.action_dim, generator=generator) - 1
            obs, reward, terminated, truncated, final_obs = envs.step(action)
            rows[impl].append(torch.cat([obs, final_obs, reward[:, None]], dim=1).clone())
            num_ended += int((terminated | truncated).sum())
        assert num_ended == 3, "episodes restart on the way"
        if impl == "warp":
            assert any(leaf.shape[:1] != (3,) for leaf in envs.carry.state)
    for by_jax, by_warp in zip(rows["jax"], rows["warp"], strict=True):
        torch.testing.assert_close(by_warp, by_jax, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_bench_runs(stand_in, capsys):
    playground.bench("Clock", num_envs=4, steps=2)
    printed = capsys.readouterr().out
    assert "one by one, as by terminations" in printed
    assert printed.count("steps/s") == 3
