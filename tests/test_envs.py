"""The environment contract, on EnvPool, Gymnasium and MuJoCo Playground."""

import itertools

import gymnasium as gym
import numpy as np
import probe_envs  # noqa: F401
import pytest
import torch

import trudi_continuous as trudi
from trudi_continuous import VecEnv, choose_backend

envpool = pytest.importorskip("envpool")
CLOCK, FAULTY = "probe_envs:Clock-v0", "probe_envs:Faulty-v0"
LIMITED = [  # backend, id, kwargs, steps per episode
    ("envpool", "HalfCheetah-v5", dict(max_episode_steps=7), 7),
    ("envpool", "CheetahRun-v1", dict(max_episode_steps=7), 7),
    ("gymnasium", "Pendulum-v1", dict(max_episode_steps=7), 7),
    ("gymnasium", CLOCK, dict(length=7), 7),
    ("playground", "CartpoleBalance", dict(episode_length=7), 7),
]
limited = pytest.mark.parametrize("backend, env_id, kwargs, limit", LIMITED, ids=[x[1].split(":")[-1] for x in LIMITED])


def make(backend, env_id, num_envs=3, seed=5, **kwargs):
    return VecEnv(backend, env_id, num_envs, seed, "cpu", **kwargs)


def choose(env_id, backend):
    return choose_backend(trudi.Args(env_id=env_id, backend=backend), torch.device("cpu"))


def finished(envs):
    """env, return, length, success of each ended episode"""
    return [episode for block in envs.finished for episode in block.tolist()]


def noise(envs, steps, seed=0):
    return torch.rand(steps, envs.num_envs, envs.action_dim, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def play(envs, actions):
    """-> obs, reward, terminated, truncated, final_obs, each (T, E, ...), and the flags `valid`"""
    steps = [(*envs.step(a), envs.valid) for a in actions]
    return [torch.stack(x) for x in zip(*steps, strict=True)]


@limited
def test_contract_with_a_time_limit(backend, env_id, kwargs, limit):
    envs = make(backend, env_id, **kwargs)
    first = envs.reset()
    obs, reward, terminated, truncated, final_obs, valid = play(envs, noise(envs, 3 * limit + 2))
    assert first.shape == obs.shape[1:] and final_obs.shape == obs.shape and reward.shape == obs.shape[:2]
    assert {x.dtype for x in (first, obs, reward, final_obs)} == {torch.float32}
    assert {x.dtype for x in (terminated, truncated, valid)} == {torch.bool} and valid.all()
    assert all(x.isfinite().all() for x in (first, obs, reward, final_obs))
    at_limit = (torch.arange(len(obs)) + 1) % limit == 0
    assert (truncated == at_limit[:, None]).all() and not terminated.any()
    assert (final_obs[at_limit] != obs[at_limit]).any(-1).all(), "final_obs must not be the reset observation"
    assert (final_obs[~at_limit] == obs[~at_limit]).all()
    assert (final_obs[at_limit][0] != final_obs[at_limit][1]).any(-1).all()
    assert [e[2] for e in finished(envs)] == [limit] * 9


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "probe_envs:Limited-v0"])
def test_first_episodes_can_be_staggered(env_id):
    short = ["envpool", dict(max_episode_steps=8)] if env_id == "HalfCheetah-v5" else ["gymnasium", {}]
    envs = make(short[0], env_id, 4, stagger=2, **short[1])
    obs, _, terminated, truncated, final_obs, valid = play(envs, noise(envs, 24))
    ends = [(x.nonzero()[:, 0] + 1).tolist() for x in truncated.T]
    assert ends == [[2, 10, 18], [4, 12, 20], [6, 14, 22], [8, 16, 24]] and not terminated.any() and valid.all()
    assert (final_obs[truncated] != obs[truncated]).any(-1).all()
    assert [e[2] for e in finished(envs)] == [8] * 9, "a cut episode is no result"


def test_same_step_observations_are_the_right_ones():
    envs = make("gymnasium", CLOCK, length=4)
    obs, _, _, _, final_obs, _ = play(envs, noise(envs, 9))
    assert obs[:, 0, 0].tolist() == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert final_obs[:, 0, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert len(obs[[3, 7], :, 1].unique()) == 6, "each env and episode has a random start of its own"


@pytest.mark.parametrize("backend, env_id", [("envpool", "Hopper-v5"), ("gymnasium", "probe_envs:Late-v0")])
def test_termination_is_not_truncation(backend, env_id):
    envs = make(backend, env_id)
    obs, _, terminated, truncated, final_obs, _ = play(envs, noise(envs, 80))
    assert terminated.any(0).all() and not truncated.any()
    assert (final_obs[terminated] != obs[terminated]).any(-1).all()
    assert (final_obs[~terminated] == obs[~terminated]).all()
    assert len(finished(envs)) == terminated.sum()


def test_actions_are_rescaled_to_the_bounds():
    envs = make("gymnasium", CLOCK, 5)  # bounds [-1, 3] and [2, 12]; it shows the action that arrived
    action = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.5, -0.5], [9.0, -9.0]])
    arrived = envs.step(action)[0][:, 2:]
    assert torch.allclose(arrived, torch.tensor([[-1.0, 2.0], [1.0, 7.0], [3.0, 12.0], [2.0, 4.5], [3.0, 2.0]]))
    envs = make("gymnasium", "Pendulum-v1")  # bounds +-2
    envs.step(torch.tensor([[-1.0], [0.25], [1.0]]))
    assert [float(e.unwrapped.last_u) for e in envs.env.envs] == [-2.0, 0.5, 2.0]


def test_unbounded_actions_pass_unchanged():
    wide = np.full(1, np.inf, np.float32)
    envs = make("gymnasium", CLOCK, 2, low=-wide, high=wide, size=3)
    assert envs.step(torch.tensor([[0.3], [-1.0]]))[0][:, 2].tolist() == pytest.approx([0.3, -1.0])


@pytest.mark.parametrize("env_id, limit", [("HalfCheetah-v5", 7), ("Hopper-v5", 20), ("CheetahRun-v1", 7)])
def test_envpool_dummy_steps_never_appear(env_id, limit):
    """Against a raw pool with the same seed and actions, whose dummy steps are skipped by hand."""
    E, T = 3, 60
    envs = make("envpool", env_id, E, max_episode_steps=limit)
    actions = noise(envs, T)
    start = envs.obs.copy()
    obs, reward, terminated, truncated, final_obs, _ = (x.numpy() for x in play(envs, actions))
    assert (reward != 0).all() or env_id == "CheetahRun-v1"  # MuJoCo's dummy steps have reward 0, DMC's the last one

    def flat(x):
        return np.concatenate([v.reshape(E, -1) for v in x.values()], 1) if isinstance(x, dict) else x

    raw = envpool.make_gymnasium(env_id, num_envs=E, seed=5, num_threads=1, max_episode_steps=limit)
    assert (flat(raw.reset()[0]).astype(np.float32) == start).all()
    clock, ended, dummies = np.zeros(E, int), np.zeros(E, bool), 0
    while (clock < T).all():
        raw_obs, raw_reward, raw_terminated, raw_truncated, info = raw.step(actions[clock, range(E)].numpy())
        raw_obs = flat(raw_obs).astype(np.float32)
        for i in range(E):
            if ended[i]:  # the dummy step: its observation is the reset one
                dummies += 1
                assert info["elapsed_step"][i] == 0 and (obs[clock[i] - 1, i] == raw_obs[i]).all()
                continue
            assert (final_obs[clock[i], i] == raw_obs[i]).all() and reward[clock[i], i] == np.float32(raw_reward[i])
            assert terminated[clock[i], i] == raw_terminated[i] and truncated[clock[i], i] == raw_truncated[i]
        clock += ~ended
        ended = ~ended & (raw_terminated | raw_truncated)
    lengths = [e[2] for e in finished(envs)]
    assert dummies > 6 and max(lengths) == limit and (set(lengths) == {limit} or env_id == "Hopper-v5")


@pytest.mark.parametrize("key", ["success", "is_success"])
def test_episode_statistics(key):
    envs = make("gymnasium", CLOCK, length=4, key=key)
    actions = noise(envs, 10)
    draws = [envs.obs[:, 1].copy()]
    obs, reward, *_ = play(envs, actions)
    draws.append(obs[3, :, 1].numpy())
    assert [[e[0], e[2], e[3]] for e in finished(envs)] == [[i, 4, d[i] > 0] for d in draws for i in range(3)]
    returns = [e[1] for e in finished(envs)]
    assert returns == pytest.approx(torch.cat([reward[:4].sum(0), reward[4:8].sum(0)]).tolist(), abs=1e-5)
    assert envs.episode_length.tolist() == [2, 2, 2]
    assert envs.episode_return.tolist() == pytest.approx(reward[8:].sum(0).tolist(), abs=1e-5)


def test_success_is_unknown_where_the_env_is_silent():
    envs = make("gymnasium", "probe_envs:One-v0", 2)
    play(envs, noise(envs, 1))
    assert len(finished(envs)) == 2 and np.isnan([e[3] for e in finished(envs)]).all()


@limited
def test_seeds(backend, env_id, kwargs, limit):
    def stream(seed):
        envs = make(backend, env_id, seed=seed, **kwargs)
        return torch.cat([torch.as_tensor(envs.obs)[None], play(envs, noise(envs, 2 * limit))[0]])

    one, again, other = stream(1), stream(1), stream(2000)
    assert (one == again).all() and (one[[0, limit, 2 * limit]] != other[[0, limit, 2 * limit]]).any(-1).all()
    starts = one[[0, limit, 2 * limit]].flatten(0, 1)
    assert len(starts.unique(dim=0)) == len(starts), "envs or episodes share their random start"


@limited
def test_replayed_resets_give_the_same_episodes(backend, env_id, kwargs, limit):
    envs = make(backend, env_id, **kwargs)
    play(envs, noise(envs, 3 * limit))  # all episodes end here
    again = make(backend, env_id, resets=envs.resets, **kwargs)
    assert (again.resets == envs.resets).all() and (again.obs == envs.obs).all()
    for x, y in zip(play(envs, noise(envs, 3 * limit, 1)), play(again, noise(envs, 3 * limit, 1)), strict=True):
        assert (x == y).all()


@pytest.mark.parametrize("backend, env_id", [("envpool", "Hopper-v5"), ("gymnasium", FAULTY)])
def test_replayed_resets_of_envs_out_of_step(backend, env_id):
    envs = make(backend, env_id)
    actions = noise(envs, 60)
    play(envs, actions)
    assert len(set(envs.resets.tolist())) > 1
    again = make(backend, env_id, resets=envs.resets)
    assert (again.resets == envs.resets).all()
    for x in (envs, again):  # from the next common reset on they must agree
        x.reset()
    assert (again.obs == envs.obs).all()


@pytest.mark.parametrize("action, fault", [(0.55, np.inf), (-0.55, np.inf), (-0.55, np.nan), (-0.55, 1e300)])
def test_nonfinite_steps_are_dropped(action, fault):
    """0.55 breaks the observation, -0.55 the reward; 1e300 is finite in float64 only."""
    envs, clean = (make("gymnasium", FAULTY, length=6, reward_fault=fault) for _ in range(2))
    actions = torch.zeros(14, 3, 1)
    expected = play(clean, actions)
    actions[3, 1] = action
    got = play(envs, actions)
    obs, reward, terminated, truncated, final_obs, valid = got
    assert all(x.isfinite().all() for x in (obs, reward, final_obs))
    bad = torch.zeros(14, 3, dtype=torch.bool)
    bad[3, 1] = True
    assert (valid == ~bad).all() and envs.nonfinite == 1 and clean.nonfinite == 0
    assert truncated[3].tolist() == [False, True, False] and not terminated.any()
    assert obs[3:, 1, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], "its env starts again"
    for x, y in zip(got, expected, strict=True):
        assert (x[:, [0, 2]] == y[:, [0, 2]]).all(), "the other envs must not notice"
    assert sorted(e[0] for e in finished(envs)) == [0, 0, 1, 2, 2] and {e[2] for e in finished(envs)} == {6}


def test_nonfinite_step_of_envpool():
    envs = make("envpool", "HalfCheetah-v5", max_episode_steps=7)
    clean = make("envpool", "HalfCheetah-v5", max_episode_steps=7)
    actions, step, calls = noise(envs, 24), envs.env.step, itertools.count()

    def poisoned(action):
        obs, *rest = step(action)
        if next(calls) == 2:
            obs = obs.copy()
            obs[0, 3] = np.nan
        return obs, *rest

    envs.env.step = poisoned
    got, expected = play(envs, actions), play(clean, actions)
    assert all(x.isfinite().all() for x in got) and envs.nonfinite == 1
    assert [t for t, v in enumerate(got[-1][:, 0]) if not v] == [2]
    assert got[3][:, 0].nonzero()[:, 0].tolist() == [2, 9, 16, 23], "a new episode of full length starts"
    for x, y in zip(got, expected, strict=True):
        assert (x[:, 1:] == y[:, 1:]).all()
    assert {e[2] for e in finished(envs)} == {7}


def test_nonfinite_reset_is_tried_again(capsys):
    envs = make("gymnasium", FAULTY, 2, length=3, reset_fault=0.4)
    obs, *_ = play(envs, torch.zeros(30, 2, 1))
    assert obs.isfinite().all() and envs.nonfinite > 0 and [e[2] for e in finished(envs)] == [3] * 20
    with pytest.raises(SystemExit) as stopped:
        make("gymnasium", FAULTY, reset_fault=1.0)
    assert stopped.value.code == 1 and "non-finite" in capsys.readouterr().err


def test_privileged_observations():
    envs = make("envpool", "G1JoystickFlatTerrain-v1", 2)
    assert (envs.actor_dim, envs.critic_start, envs.obs.shape, envs.action_dim) == (103, 103, (2, 319), 29)
    assert envs.step(torch.zeros(2, 29))[0].shape == (2, 319)
    agent = trudi.Agent(
        envs,
        trudi.Args(vmin=-1.0, vmax=1.0, alpha_init=0.1, lambda_init=0.1, num_envs=2, hidden_size=8, diffusion_steps=8),
    )
    torch.nn.init.normal_(agent.policy.out[1].weight)
    obs, draws = torch.tensor(envs.obs), torch.randn(9, 2, 29)

    def act(obs):
        return trudi.sample_chain(agent.policy, obs, draws)[0]

    for columns, seen in ((slice(103, None), False), (slice(0, 103), True)):
        changed = obs.clone()
        changed[:, columns] += 1
        assert (act(changed) != act(obs)).any() == seen, "the actor sees the first 103 columns only"
        value = [agent.critic.value(agent.critic.features(x, torch.zeros(2, 29))) for x in (obs, changed)]
        assert (value[0] != value[1]).any() != seen, "the critic sees the others"


def test_backend_and_suite():
    expected = {
        "CheetahRun-v1": ("envpool", "DMC"),
        "BallInCupCatch-v1": ("envpool", "DMC"),
        "HalfCheetah-v5": ("envpool", "other"),
        "Pendulum-v1": ("gymnasium", "other"),
        CLOCK: ("gymnasium", "other"),
    }
    for robot, ground in itertools.product(("G1", "T1"), ("Flat", "Rough")):
        expected[f"{robot}Joystick{ground}Terrain-v1"] = ("envpool", "humanoid")
    assert {env_id: choose(env_id, "auto") for env_id in expected} == expected


def test_backend_asked_for_is_used():
    assert choose("Pendulum-v1", "envpool")[0] == "envpool"
    with pytest.raises(SystemExit) as stopped:
        choose("CheetahRun-v1", "gymnasium")
    assert stopped.value.code == 2


@pytest.mark.parametrize("name", ["h1hand-walk-v0", "h1-reach-v0", "g1-stand-v0", "h1strong-highbar_hard-v0"])
def test_humanoidbench_names(name):
    gym.register(name, probe_envs.Probe)
    try:
        assert choose(name, "auto") == ("gymnasium", "HumanoidBench")
        assert choose(f"probe_envs:{name}", "auto") == ("gymnasium", "HumanoidBench")
    finally:
        del gym.registry[name]
