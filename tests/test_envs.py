"""The environment contract, on EnvPool, Gymnasium and MuJoCo Playground."""

import importlib.util
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from run_helpers import every_script

import trudi_continuous as trudi

envpool = pytest.importorskip("envpool")
CLOCK = "probe_envs:Clock-v0"
FAULTY = "probe_envs:Faulty-v0"
needs_playground = pytest.mark.skipif(
    importlib.util.find_spec("mujoco_playground") is None, reason="needs MuJoCo Playground"
)


class Played(NamedTuple):
    """What steps returned, each (T, E, ...), and envs.broken after each of them."""

    obs: torch.Tensor
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    final_obs: torch.Tensor
    broken: torch.Tensor


def limited(*cases):
    """A test over backend, id, kwargs, steps per episode"""
    return pytest.mark.parametrize("backend, env_id, kwargs, limit", cases)


every_backend = limited(
    pytest.param("envpool", "HalfCheetah-v5", {"max_episode_steps": 7}, 7, id="HalfCheetah"),
    pytest.param("envpool", "CartpoleBalance-v1", {"max_episode_steps": 7}, 7, id="Cartpole"),
    pytest.param(
        "envpool",
        "CheetahRun-v1",
        {"max_episode_steps": 7},
        7,
        id="CheetahRun",
        marks=pytest.mark.slow,
    ),
    pytest.param("gymnasium", "Pendulum-v1", {"max_episode_steps": 7}, 7, id="Pendulum"),
    pytest.param("gymnasium", "probe_envs:Limited-v0", {}, 8, id="Limited"),
    pytest.param("gymnasium", CLOCK, {"length": 7}, 7, id="Clock"),
    pytest.param(
        "playground",
        "CartpoleBalance",
        {"episode_length": 7},
        7,
        id="Playground",
        marks=[pytest.mark.slow, needs_playground],
    ),
)


def make(backend, env_id, num_envs=3, seed=5, **kwargs):
    args = trudi.Args(env_id=env_id, backend=backend, device="cpu")
    return trudi.make_envs(args, num_envs, seed, **kwargs)


def noise(envs, num_steps, seed=0):
    """Random actions in [-1, 1], (T, E, A)"""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_steps, envs.num_envs, envs.action_dim, generator=generator) * 2 - 1


def play(envs, actions):
    history = []
    for action in actions:
        step = envs.step(action)
        history.append([*step, envs.broken])
    return Played(*[torch.stack(values) for values in zip(*history, strict=True)])


def lengths(episodes):
    return [episode["length"] for episode in episodes]


@every_backend
def test_contract_with_a_time_limit(backend, env_id, kwargs, limit):
    envs = make(backend, env_id, **kwargs)
    first = envs.reset()
    played = play(envs, noise(envs, 3 * limit + 2))
    obs = played.obs
    final_obs = played.final_obs
    num_steps = len(obs)
    assert first.shape == (3, envs.obs_dim) and obs.shape == (num_steps, 3, envs.obs_dim)
    assert final_obs.shape == obs.shape
    assert (envs.num_envs, envs.device.type) == (3, "cpu")
    assert 0 < envs.actor_dim <= envs.obs_dim and 0 <= envs.critic_start <= envs.actor_dim
    for values in (first, obs, played.reward, final_obs):
        assert values.dtype == torch.float32 and values.isfinite().all()
    for values in (played.reward, played.terminated, played.truncated, played.broken):
        assert values.shape == (num_steps, 3)
    for values in (played.terminated, played.truncated, played.broken):
        assert values.dtype == torch.bool
    assert not played.broken.any() and envs.nonfinite == 0

    at_limit = (torch.arange(num_steps) + 1) % limit == 0
    assert (played.truncated == at_limit[:, None]).all() and not played.terminated.any()
    changed = (final_obs[at_limit] != obs[at_limit]).any(-1)
    assert changed.all(), "final_obs must not be the reset observation"
    assert (final_obs[~at_limit] == obs[~at_limit]).all()
    assert (final_obs[at_limit][0] != final_obs[at_limit][1]).any(-1).all()
    episodes = envs.pop_finished()
    assert lengths(episodes) == [limit] * 9 and envs.pop_finished() == []
    assert [episode["env"] for episode in episodes] == 3 * [0, 1, 2]
    for episode in episodes:
        kinds = {name: type(value) for name, value in episode.items()}
        numbers = {"return": float, "success": float, "mode": float}
        assert kinds == {"env": int, "length": int, "broken": bool} | numbers
        assert not episode["broken"]


@every_backend
def test_reset_starts_again(backend, env_id, kwargs, limit):
    """In the middle of episodes: these are no results, and the next ones have full length."""
    envs = make(backend, env_id, **kwargs)
    before = envs.reset()
    play(envs, noise(envs, limit + 3))
    after = envs.reset()
    assert (before != after).any(-1).all() and envs.pop_finished() == []
    played = play(envs, noise(envs, limit))
    assert played.truncated.sum(0).tolist() == [1, 1, 1] and played.truncated[-1].all()
    assert lengths(envs.pop_finished()) == [limit] * 3


@pytest.mark.parametrize(
    "backend, env_id, kwargs",
    [
        ("envpool", "HalfCheetah-v5", {"max_episode_steps": 8}),
        ("gymnasium", "probe_envs:Limited-v0", {}),
        pytest.param(
            "playground",
            "CartpoleBalance",
            {"episode_length": 8},
            marks=[pytest.mark.slow, needs_playground],
        ),
    ],
)
def test_first_episodes_can_be_staggered(backend, env_id, kwargs):
    envs = make(backend, env_id, 4, stagger=True, **kwargs)
    envs.reset()  # as in training
    played = play(envs, noise(envs, 24))
    truncated = played.truncated
    ends = [(column.nonzero()[:, 0] + 1).tolist() for column in truncated.T]
    assert ends == [[1, 9, 17], [3, 11, 19], [5, 13, 21], [7, 15, 23]]
    assert not played.terminated.any() and not played.broken.any()
    assert (played.final_obs[truncated] != played.obs[truncated]).any(-1).all()
    assert lengths(envs.pop_finished()) == [8] * 8, "a staggered episode is no result"


@pytest.mark.parametrize(
    "backend, env_id, kwargs",
    [
        ("envpool", "CartpoleBalance-v1", {"max_episode_steps": 20}),
        ("gymnasium", "probe_envs:Limited-v0", {}),
    ],
)
def test_training_episodes_can_be_cut(backend, env_id, kwargs):
    """By truncation, with the true final observation, and not at evaluation."""
    args = trudi.Args(env_id=env_id, backend=backend, device="cpu", train_episode_steps=6)
    envs = trudi.make_envs(args, 3, 5, stagger=True, **kwargs)
    envs.reset()
    played = play(envs, noise(envs, 18))
    truncated = played.truncated
    ends = [(column.nonzero()[:, 0] + 1).tolist() for column in truncated.T]
    assert ends == [[1, 7, 13], [3, 9, 15], [5, 11, 17]]
    assert not played.terminated.any() and not played.broken.any()
    assert (played.final_obs[truncated] != played.obs[truncated]).any(-1).all()
    assert lengths(envs.pop_finished()) == [6] * 6, "a staggered episode is no result"
    eval_envs = trudi.make_envs(args, 3, 5, **kwargs)
    eval_envs.reset()
    play(eval_envs, noise(eval_envs, 20))
    assert min(lengths(eval_envs.pop_finished())) > 6, "evaluation has whole episodes"


def test_cut_training_episodes_are_for_dmc_on_a_cpu():
    steps = {}
    for env_id in ("CheetahRun-v1", "HalfCheetah-v5", "Pendulum-v1"):
        args, _ = trudi.parse_args(["--env-id", env_id, "--device", "cpu"])
        steps[env_id] = args.train_episode_steps
    assert steps == {"CheetahRun-v1": 250, "HalfCheetah-v5": 0, "Pendulum-v1": 0}
    assert trudi.Args.train_episode_steps == 0


def test_what_has_no_time_limit_is_not_staggered():
    envs = make("gymnasium", CLOCK, stagger=True)
    played = play(envs, noise(envs, 32))
    at_limit = (torch.arange(32) + 1) % 16 == 0
    assert (played.truncated == at_limit[:, None]).all()
    assert len(envs.pop_finished()) == 6


def test_same_step_observations_are_the_right_ones():
    envs = make("gymnasium", CLOCK, length=4)
    played = play(envs, noise(envs, 9))
    assert played.obs[:, 0, 0].tolist() == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert played.final_obs[:, 0, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    draws = played.obs[[3, 7], :, 1]
    assert len(draws.unique()) == 6, "each env and episode has a random start of its own"


@pytest.mark.parametrize(
    "backend, env_id", [("envpool", "Hopper-v5"), ("gymnasium", "probe_envs:Late-v0")]
)
def test_termination_is_not_truncation(backend, env_id):
    envs = make(backend, env_id)
    played = play(envs, noise(envs, 80))
    terminated = played.terminated
    assert terminated.any(0).all() and not played.truncated.any()
    assert (played.final_obs[terminated] != played.obs[terminated]).any(-1).all()
    assert (played.final_obs[~terminated] == played.obs[~terminated]).all()
    assert len(envs.pop_finished()) == terminated.sum()


@pytest.mark.parametrize(
    "backend, env_id, kwargs",
    [
        ("gymnasium", CLOCK, {"length": -1}),
        ("envpool", "CartpoleBalance-v1", {}),
        ("envpool", "Pendulum-v1", {}),
    ],
)
def test_an_endless_environment_is_truncated(backend, env_id, kwargs, monkeypatch):
    monkeypatch.setattr(trudi, "MAX_EPISODE_STEPS", 5)
    envs = make(backend, env_id, **kwargs)
    played = play(envs, noise(envs, 12))
    at_limit = (torch.arange(12) + 1) % 5 == 0
    assert (played.truncated == at_limit[:, None]).all() and not played.terminated.any()
    assert (played.final_obs[at_limit] != played.obs[at_limit]).any(-1).all()
    assert not played.broken.any()
    assert lengths(envs.pop_finished()) == [5] * 6


def test_actions_are_rescaled_to_the_bounds():
    envs = make("gymnasium", CLOCK, 5)  # [-1, 3] and [2, 12]; it shows the action that arrived
    action = [[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.5, -0.5], [9.0, -9.0]]
    obs, *_ = envs.step(torch.tensor(action))
    expected = [[-1.0, 2.0], [1.0, 7.0], [3.0, 12.0], [2.0, 4.5], [3.0, 2.0]]
    assert torch.allclose(obs[:, 2:], torch.tensor(expected))
    envs = make("gymnasium", "Pendulum-v1")  # [-2, 2]
    envs.step(torch.tensor([[-1.0], [0.25], [1.0]]))
    assert [float(env.unwrapped.last_u) for env in envs.env.envs] == [-2.0, 0.5, 2.0]


def test_unbounded_actions_are_refused(capsys):
    """Half-bounded ones, too: there is no scale that [-1, 1] could stand for."""
    wide = np.full(1, np.inf, np.float32)
    for high in (wide, np.ones(1, np.float32)):
        with pytest.raises(SystemExit) as end:
            make("gymnasium", CLOCK, 2, low=-wide, high=high, size=3)
        assert end.value.code == 2 and "bounds" in capsys.readouterr().err


def flat(obs):
    """EnvPool's observations, an array or a dict of them -> (E, O)"""
    if isinstance(obs, dict):
        obs = np.concatenate([part.reshape(len(part), -1) for part in obs.values()], axis=1)
    return obs.astype(np.float32)


@pytest.mark.parametrize(
    "env_id, limit",
    [
        ("HalfCheetah-v5", 7),
        ("Hopper-v5", 20),
        ("CartpoleBalance-v1", 7),
        pytest.param("CheetahRun-v1", 7, marks=pytest.mark.slow),
    ],
)
def test_envpool_dummy_steps_never_appear(env_id, limit):
    """Against a raw pool with the same seed and actions, whose dummy steps are skipped by hand."""
    E = 3
    T = 60
    envs = make("envpool", env_id, E, max_episode_steps=limit)
    actions = noise(envs, T)
    start = envs.obs.copy()
    played = Played(*[values.numpy() for values in play(envs, actions)])
    if env_id in (
        "HalfCheetah-v5",
        "Hopper-v5",
    ):  # MuJoCo's dummy steps have reward 0, DMC's the last reward
        assert (played.reward != 0).all()

    raw = envpool.make_gymnasium(env_id, num_envs=E, seed=5, num_threads=1, max_episode_steps=limit)
    obs, _ = raw.reset()
    assert (flat(obs) == start).all()
    clock = np.zeros(E, int)  # steps so far, without the dummies
    ended = np.zeros(E, bool)
    num_dummies = 0
    while (clock < T).all():
        obs, reward, terminated, truncated, info = raw.step(actions[clock, range(E)].numpy())
        obs = flat(obs)
        for i in range(E):
            t = clock[i]
            if ended[i]:  # the dummy step: its observation is the reset one
                num_dummies += 1
                assert info["elapsed_step"][i] == 0 and (played.obs[t - 1, i] == obs[i]).all()
                continue
            assert (played.final_obs[t, i] == obs[i]).all()
            assert played.reward[t, i] == np.float32(reward[i])
            assert played.terminated[t, i] == terminated[i]
            assert played.truncated[t, i] == truncated[i]
        clock += ~ended
        ended = ~ended & (terminated | truncated)
    found = lengths(envs.pop_finished())
    assert num_dummies > 6 and max(found) == limit
    assert set(found) == {limit} or env_id == "Hopper-v5"


@pytest.mark.parametrize("key", ["success", "is_success"])
def test_episode_statistics(key):
    envs = make("gymnasium", CLOCK, length=4, key=key)
    first_draws = envs.obs[:, 1].copy()
    played = play(envs, noise(envs, 10))
    second_draws = played.obs[3, :, 1].numpy()
    episodes = envs.pop_finished()
    found = [(episode["env"], episode["length"], episode["success"]) for episode in episodes]
    expected = []
    for draws in (first_draws, second_draws):
        expected += [(i, 4, float(draws[i] > 0)) for i in range(3)]
    assert found == expected
    returns = torch.cat([played.reward[:4].sum(0), played.reward[4:8].sum(0)])
    found = [episode["return"] for episode in episodes]
    assert found == pytest.approx(returns.tolist(), abs=1e-5)
    assert envs.episode_length.tolist() == [2, 2, 2]
    under_way = played.reward[8:].sum(0).tolist()
    assert envs.episode_return.tolist() == pytest.approx(under_way, abs=1e-5)


def test_success_is_unknown_where_the_env_is_silent():
    envs = make("gymnasium", "probe_envs:One-v0", 2)
    play(envs, noise(envs, 1))
    successes = [episode["success"] for episode in envs.pop_finished()]
    assert len(successes) == 2 and np.isnan(successes).all()


@every_backend
def test_seeds(backend, env_id, kwargs, limit):
    def stream(seed):
        """Observations of two episodes and the start of a third"""
        envs = make(backend, env_id, seed=seed, **kwargs)
        first = envs.reset()
        return torch.cat([first[None], play(envs, noise(envs, 2 * limit)).obs])

    one = stream(1)
    other = stream(2000)
    assert (one == stream(1)).all()
    starts = [0, limit, 2 * limit]
    assert (one[starts] != other[starts]).any(-1).all()
    starts = one[starts].flatten(0, 1)
    assert len(starts.unique(dim=0)) == len(starts), "envs or episodes share their random start"


@pytest.mark.parametrize(
    "action, fault", [(0.55, np.inf), (-0.55, np.inf), (-0.55, np.nan), (-0.55, 1e300)]
)
def test_nonfinite_steps_are_dropped(action, fault):
    """0.55 breaks the observation, -0.55 the reward; 1e300 is finite in float64 only."""
    envs = make("gymnasium", FAULTY, length=6, reward_fault=fault)
    clean = make("gymnasium", FAULTY, length=6, reward_fault=fault)
    actions = torch.zeros(14, 3, 1)
    expected = play(clean, actions)
    actions[3, 1] = action
    played = play(envs, actions)
    for values in (played.obs, played.reward, played.final_obs):
        assert values.isfinite().all()
    bad = torch.zeros(14, 3, dtype=torch.bool)
    bad[3, 1] = True
    assert (played.broken == bad).all() and envs.nonfinite == 1 and clean.nonfinite == 0
    assert played.truncated[3].tolist() == [False, True, False] and not played.terminated.any()
    assert played.reward[3, 1] == 0
    assert (played.final_obs[3, 1] == played.obs[2, 1]).all(), "the last finite observation"
    clock = played.obs[3:, 1, 0].tolist()
    assert clock == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], "its env starts again"
    for ours, theirs in zip(played, expected, strict=True):
        assert (ours[:, [0, 2]] == theirs[:, [0, 2]]).all(), "the other envs must not notice"
    episodes = envs.pop_finished()
    broken = [episode for episode in episodes if episode["broken"]]
    whole = [episode for episode in episodes if not episode["broken"]]
    assert len(broken) == 1 and broken[0]["env"] == 1
    assert broken[0]["length"] == 4 and broken[0]["return"] == 3
    assert sorted(episode["env"] for episode in whole) == [0, 0, 1, 2, 2]
    assert set(lengths(whole)) == {6}


def test_a_broken_last_step_is_broken():
    """It is neither a termination nor an ordinary end."""
    envs = make("gymnasium", FAULTY, length=1, terminates=True)
    action = torch.tensor([[0.0], [0.55], [-0.55]])
    obs, reward, terminated, truncated, final_obs = envs.step(action)
    assert envs.broken.tolist() == [False, True, True]
    assert terminated.tolist() == [True, False, False]
    assert truncated.tolist() == [False, True, True]
    assert reward.tolist() == [1, 0, 0]
    assert [episode["broken"] for episode in envs.pop_finished()] == [False, True, True]
    assert obs.isfinite().all() and final_obs.isfinite().all()


def test_nonfinite_step_of_envpool():
    envs = make("envpool", "HalfCheetah-v5", max_episode_steps=7)
    clean = make("envpool", "HalfCheetah-v5", max_episode_steps=7)
    actions = noise(envs, 24)
    step = envs.env.step
    calls = itertools.count()

    def poisoned(action):
        obs, *rest = step(action)
        if next(calls) == 2:
            obs = obs.copy()
            obs[0, 3] = np.nan
        return obs, *rest

    envs.env.step = poisoned
    played = play(envs, actions)
    expected = play(clean, actions)
    assert all(values.isfinite().all() for values in played) and envs.nonfinite == 1
    assert played.broken.nonzero().tolist() == [[2, 0]]
    ends = played.truncated[:, 0].nonzero()[:, 0].tolist()
    assert ends == [2, 9, 16, 23], "a new episode of full length starts"
    for ours, theirs in zip(played, expected, strict=True):
        assert (ours[:, 1:] == theirs[:, 1:]).all()
    episodes = envs.pop_finished()
    assert [episode["length"] for episode in episodes if episode["broken"]] == [3]
    assert {episode["length"] for episode in episodes if not episode["broken"]} == {7}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_reset_becomes_finite(value):
    envs = make("gymnasium", FAULTY, 2, length=3, reset_fault=1.0, reset_value=value)
    played = play(envs, torch.zeros(30, 2, 1))
    first = played.obs[played.truncated]
    assert (first == 0).all(), "nothing that a normalizer could not bear"
    assert played.obs.isfinite().all() and played.final_obs.isfinite().all()
    assert envs.nonfinite == 0 and not played.broken.any()
    assert lengths(envs.pop_finished()) == [3] * 20
    assert (envs.reset() == 0).all()


@pytest.mark.slow
def test_privileged_observations():
    envs = make("envpool", "G1JoystickFlatTerrain-v1", 2)
    assert (envs.obs_dim, envs.actor_dim, envs.critic_start, envs.action_dim) == (319, 103, 103, 29)
    obs, *_ = envs.step(torch.zeros(2, 29))
    obs = obs.clone()  # in memory like its changed copies: equal to the bit
    assert obs.shape == (2, 319)
    agent = trudi.Agent(envs, trudi.Args(num_envs=2, hidden_size=8))
    torch.nn.init.normal_(agent.policy.control.out[1].weight)
    draws = torch.randn(9, 2, 29)

    def action(obs):
        return trudi.sample_chain(agent.policy, agent.policy.embed(obs), draws).action

    def value(obs):
        return agent.critic.value(agent.critic.features(obs, torch.zeros(2, 29)))

    others_changed = obs.clone()
    others_changed[:, 103:] += 1
    first_changed = obs.clone()
    first_changed[:, :103] += 1
    assert (action(others_changed) == action(obs)).all(), "the actor sees the first 103 columns"
    assert (action(first_changed) != action(obs)).any()
    assert (value(first_changed) == value(obs)).all(), "the critic sees the others"
    assert (value(others_changed) != value(obs)).any()


def test_backend_and_suite():
    expected = {
        "CheetahRun-v1": ("envpool", "DMC"),
        "BallInCupCatch-v1": ("envpool", "DMC"),
        "HalfCheetah-v5": ("envpool", "other"),
        "Pendulum-v1": ("gymnasium", "other"),
        "h1hand-walk-v0": ("gymnasium", "HumanoidBench"),
        "Isaac-Velocity-Flat-G1-v0": ("isaaclab", "IsaacLab"),
        "Mjlab-Velocity-Flat-Unitree-G1": ("mjlab", "mjlab"),
        "LeapCubeReorient-v1": ("envpool", "IsaacLab stand-in"),
        "H1JoystickGaitTracking-v1": ("envpool", "IsaacLab stand-in"),
        "HandManipulateBlockRotateXYZDense-v1": ("envpool", "IsaacLab stand-in"),
        CLOCK: ("gymnasium", "other"),
    }
    for robot in ("G1", "T1"):
        for ground in ("Flat", "Rough"):
            expected[f"{robot}Joystick{ground}Terrain-v1"] = ("envpool", "other")
    found = {env_id: trudi.choose_backend(env_id, "auto", "cpu") for env_id in expected}
    assert found == expected


@needs_playground
@pytest.mark.slow
def test_suites_of_playground():
    assert trudi.choose_backend("CheetahRun", "playground", "cpu") == ("playground", "DMC")
    robot = "G1JoystickFlatTerrain"
    assert trudi.choose_backend(robot, "playground", "cpu") == ("playground", "other")
    assert trudi.choose_backend("CheetahRun", "auto", "cuda") == ("playground", "DMC")
    assert trudi.choose_backend("CheetahRun-v1", "auto", "cuda") == ("envpool", "DMC")
    assert trudi.choose_backend("CheetahRun", "auto", "cpu") == ("gymnasium", "other")


def test_backend_asked_for_is_used(capsys):
    assert trudi.choose_backend("Pendulum-v1", "envpool", "cpu") == ("envpool", "other")
    assert trudi.choose_backend("CheetahRun-v1", "gymnasium", "cpu") == ("gymnasium", "other")
    with pytest.raises(SystemExit) as stopped:
        make("gymnasium", "CheetahRun-v1")
    assert stopped.value.code == 2 and "CheetahRun-v1" in capsys.readouterr().err


def test_defaults_follow_the_suite():
    args, _ = trudi.parse_args(["--env-id", "CheetahRun-v1", "--device", "cpu"])
    assert (args.backend, args.vmin, args.normalize_reward) == ("envpool", -20.0, False)
    args, _ = trudi.parse_args(["--env-id", "G1JoystickFlatTerrain-v1", "--device", "cpu"])
    assert (args.backend, args.vmin, args.normalize_reward) == ("envpool", -150.0, True)
    assert args.warmup_iterations > 0
    for env_id in trudi.ISAACLAB_STAND_INS:
        args, _ = trudi.parse_args(["--env-id", env_id, "--device", "cpu"])
        assert (args.gamma, args.vmin, args.normalize_reward) == (0.97, -150.0, True)
    args, _ = trudi.parse_args(["--env-id", "Isaac-Repose-Cube-Shadow-Direct-v0"])
    assert (args.backend, args.gamma, args.vmin, args.vmax) == ("isaaclab", 0.97, -500, 500)


@every_script
def test_short_episodes_have_a_short_look_ahead(script):
    expected = {
        "CheetahRun-v1": 0.99,
        "HalfCheetah-v5": 0.99,  # 1,000 steps
        "Pendulum-v1": 1 - 3 / 200,
        "two_doors:TwoDoors-v0": 1 - 3 / 32,
        "no_such_module:Task-v0": 0.99,  # make_envs says what is wrong
    }
    for env_id, gamma in expected.items():
        args, _ = script.parse_args(["--env-id", env_id, "--device", "cpu"])
        assert math.isclose(args.gamma, gamma), env_id
    args, _ = script.parse_args(["--env-id", "Pendulum-v1", "--gamma", "0.5"])
    assert args.gamma == 0.5


@pytest.mark.parametrize("env_id", trudi.ISAACLAB_STAND_INS)
def test_stand_ins_for_isaac_lab_run(env_id):
    envs = make("envpool", env_id, num_envs=2)
    played = play(envs, noise(envs, 3))
    assert played.obs.isfinite().all() and played.reward.isfinite().all()


def test_a_task_that_envpool_has_is_not_suggested_under_its_own_name(capsys):
    with pytest.raises(SystemExit):
        make("gymnasium", "HandManipulateBlockRotateXYZDense-v1")
    err = capsys.readouterr().err
    assert "--backend envpool" in err and "closest" not in err
