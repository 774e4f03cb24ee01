"""MuJoCo Playground's backend: on a stand-in simulator that compiles at once, and on the real one.

The contract tests that all backends share are in test_envs.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

playground_env = pytest.importorskip("playground_env")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402
from mujoco_playground._src import mjx_env  # noqa: E402

import ppo_continuous  # noqa: E402
import reppo_continuous  # noqa: E402
import trudi_continuous  # noqa: E402

ROOT = Path(__file__).parents[1]
SCRIPTS = trudi_continuous, reppo_continuous, ppo_continuous
TINY = "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --hidden-size 16 --total-timesteps 96".split()
TINY += "--eval-points 1 --eval-episodes 4".split()


class Clock:
    """Observes its clock, a number drawn at the start, and the action that arrived; an action above 0.9 in the first
    column ends the episode, one below -0.9 breaks the observation, in the second column the reward."""

    action_size, observation_size = 2, 4

    def reset(self, key):
        draw = jax.random.uniform(key)
        obs = jnp.array([0.0, draw, 0.0, 0.0])
        return mjx_env.State(obs[0], obs, jnp.zeros(()), jnp.zeros(()), {"success": jnp.zeros(())}, {"draw": draw})

    def step(self, state, action):
        clock = state.data + 1
        obs = jnp.array([jnp.where(action[0] < -0.9, jnp.nan, clock), state.info["draw"], *action])
        reward = jnp.where(action[1] < -0.9, jnp.inf, 1.0 + action[1])
        done = (action[0] > 0.9).astype(float)
        success = jnp.where((clock == 3) & (state.info["draw"] > 0.5), 1.0, 0.0)  # for a moment, in some episodes
        return state.replace(data=clock, obs=obs, reward=reward, done=done, metrics={"success": success})


class Humanoid(Clock):  # as G1 and T1: the actor sees `state`, the critic `privileged_state`
    action_size, observation_size = 2, {"privileged_state": (6,), "state": (4,)}

    def dress(self, state, obs):
        return state.replace(obs={"privileged_state": jnp.concatenate([obs + 100, obs[:2]]), "state": obs})

    def reset(self, key):
        state = super().reset(key)
        return self.dress(state, state.obs)

    def step(self, state, action):
        state = super().step(state, action)
        return self.dress(state, state.obs)


@pytest.fixture
def stand_in(monkeypatch):
    def load(env_id, on_cpu, overrides):
        config = dict(episode_length=6, action_repeat=1) | dict(overrides)
        return {"Clock": Clock, "Humanoid": Humanoid}[env_id](), ConfigDict(config)

    monkeypatch.setattr(playground_env, "load", load)
    playground_env.build.cache_clear()
    yield
    playground_env.build.cache_clear()


def make(env_id="Clock", num_envs=3, seed=5, **kwargs):
    return trudi_continuous.VecEnv("playground", env_id, num_envs, seed, "cpu", **kwargs)


def play(envs, actions):
    steps = [(*envs.step(a), envs.valid) for a in actions]
    return [torch.stack(x) for x in zip(*steps, strict=True)]


def finished(envs):
    return [episode for block in envs.finished for episode in block.tolist()]


def test_time_limit_final_observation_and_restart(stand_in):
    envs = make()
    obs, reward, terminated, truncated, final_obs, valid = play(envs, torch.zeros(14, 3, 2))
    assert obs[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert final_obs[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2]
    assert truncated[:, 0].nonzero()[:, 0].tolist() == [5, 11] and not terminated.any() and valid.all()
    assert len(obs[[0, 5, 11], :, 1].unique()) == 9, "each env and episode draws its own start"
    assert (final_obs[5, :, 1] == obs[0, :, 1]).all(), "the final observation belongs to the old episode"
    assert {x.dtype for x in (terminated, truncated, valid)} == {torch.bool} and obs.dtype == torch.float32
    assert envs.resets.tolist() == [3, 3, 3]


def test_termination_restarts_its_own_row_only(stand_in):
    envs = make()
    actions = torch.zeros(8, 3, 2)
    actions[2, 1, 0] = 0.95
    obs, _, terminated, truncated, final_obs, _ = play(envs, actions)
    assert terminated.nonzero().tolist() == [[2, 1]] and truncated.nonzero().tolist() == [[5, 0], [5, 2]]
    assert obs[:, 1, 0].tolist() == [1, 2, 0, 1, 2, 3, 4, 5] and final_obs[2, 1, 0] == 3
    assert obs[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 0, 1, 2]
    assert [e[:3] for e in finished(envs)] == [[1, 3, 3], [0, 6, 6], [2, 6, 6]]


def test_statistics_of_episodes(stand_in):
    envs = make()
    start = envs.obs.clone()
    actions = torch.rand(9, 3, 2)
    actions[..., 0] = 0
    _, reward, *_ = play(envs, actions)
    rows = finished(envs)
    assert [r[0] for r in rows] == [0, 1, 2] and [r[2] for r in rows] == [6] * 3
    assert [r[1] for r in rows] == pytest.approx(reward[:6].sum(0).tolist(), rel=1e-6)
    assert [r[3] for r in rows] == (start[:, 1] > 0.5).float().tolist(), "success at any step counts"
    assert 0 < sum(r[3] for r in rows) < 3
    assert envs.episode_length.tolist() == [3] * 3
    assert envs.episode_return.tolist() == pytest.approx(reward[6:].sum(0).tolist(), rel=1e-6)
    assert envs.stats()[:, :3].tolist() == [[i, envs.episode_return[i], 3] for i in range(3)]
    envs.finished.clear()
    assert finished(envs) == []


@pytest.mark.parametrize("column", [0, 1], ids=["observation", "reward"])
def test_nonfinite_steps_are_dropped(stand_in, column):
    envs, clean = make(), make()
    actions = torch.zeros(14, 3, 2)
    expected = play(clean, actions)
    actions[3, 1, column] = -0.95
    got = play(envs, actions)
    obs, reward, terminated, truncated, final_obs, valid = got
    assert all(x.isfinite().all() for x in (obs, reward, final_obs))
    assert (~valid).nonzero().tolist() == [[3, 1]] and (envs.nonfinite, clean.nonfinite) == (1, 0)
    assert truncated[3].tolist() == [False, True, False] and not terminated.any() and reward[3, 1] == 0
    assert obs[:, 1, 0].tolist() == [1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], "its env starts again"
    for x, y in zip(got, expected, strict=True):
        assert (x[:, [0, 2]] == y[:, [0, 2]]).all(), "the other envs must not notice"
    assert sorted(e[0] for e in finished(envs)) == [0, 0, 1, 2, 2] and {e[2] for e in finished(envs)} == {6}
    envs.nonfinite = 7  # a resumed run goes on counting
    assert envs.nonfinite == 8


def test_nan_in_the_simulator_state(stand_in):
    """Not from an action: the state itself is poisoned, as when MJX diverges."""
    envs = make()
    play(envs, torch.zeros(2, 3, 2))
    clock, *others = envs.carry["state"]
    envs.carry = envs.carry | dict(state=(clock.at[2].set(jnp.nan), *others))
    obs, reward, terminated, truncated, final_obs, valid = play(envs, torch.zeros(3, 3, 2))
    assert valid.tolist() == [[True, True, False], [True] * 3, [True] * 3] and envs.nonfinite == 1
    assert obs[:, 2, 0].tolist() == [0, 1, 2] and obs[:, 0, 0].tolist() == [3, 4, 5] and final_obs.isfinite().all()


def test_broken_starts_are_restarted(stand_in, monkeypatch):
    def reset(self, key, good=Clock.reset):
        state = good(self, key)
        broken = jnp.where(state.info["draw"] < 0.2, jnp.nan, jnp.where(state.info["draw"] < 0.4, jnp.inf, 0.0))
        return state.replace(data=state.data + broken, obs=state.obs + broken)

    monkeypatch.setattr(Clock, "reset", reset)
    envs = make(num_envs=32)
    assert envs.obs.abs().max() <= 1, "neither NaN nor the largest float may reach the normaliser"
    obs, reward, _, _, final_obs, valid = play(envs, torch.zeros(30, 32, 2))
    assert all(x.isfinite().all() for x in (obs, reward, final_obs)) and envs.nonfinite == (~valid).sum() > 10
    assert {e[2] for e in finished(envs)} == {6}


def test_actions_are_clipped_not_rescaled(stand_in):
    envs = make(num_envs=2)
    arrived = envs.step(torch.tensor([[0.5, -0.25], [0.0, 9.0]]))[0][:, 2:]
    assert arrived.tolist() == [[0.5, -0.25], [0.0, 1.0]], "Playground's actions are in [-1, 1] already"


def test_staggered_first_episodes(stand_in):
    envs = make(num_envs=4, stagger=2, episode_length=8)
    *_, truncated, _, _ = play(envs, torch.zeros(24, 4, 2))
    ends = [(x.nonzero()[:, 0] + 1).tolist() for x in truncated.T]
    assert ends == [[2, 10, 18], [4, 12, 20], [6, 14, 22], [8, 16, 24]]
    assert [e[2] for e in finished(envs)] == [8] * 9, "a cut episode is no result"


def test_action_repeat_adds_rewards(stand_in):
    envs = make(action_repeat=2)
    obs, reward, _, truncated, _, _ = play(envs, torch.zeros(4, 3, 2))
    assert obs[:, 0, 0].tolist() == [2, 4, 0, 2] and (reward == 2).all() and truncated[:, 0].tolist() == [0, 0, 1, 0]


def test_an_end_between_repeats_is_an_end(stand_in, monkeypatch):
    def step(self, state, action, plain=Clock.step):
        state = plain(self, state, action)
        return state.replace(done=(state.data == 3).astype(float))  # after the first half of the second step

    monkeypatch.setattr(Clock, "step", step)
    envs = make(action_repeat=2, episode_length=20)
    obs, reward, terminated, truncated, final_obs, _ = play(envs, torch.zeros(3, 3, 2))
    assert terminated[:, 0].tolist() == [False, True, False] and not truncated.any()
    assert reward[:, 0].tolist() == [2, 1, 2], "nothing is earned after the end"


def test_stored_tensors_are_not_overwritten(stand_in):
    """dlpack shares memory: what a rollout keeps must be neither JAX's next buffer nor the next action's."""
    envs = make()
    kept, copies, action = [], [], torch.zeros(3, 2)
    for i in range(20):
        action.fill_(i / 40)  # in place, as a careless caller would
        step = (*envs.step(action), envs.valid, envs.obs)
        copies.append([x.clone() for x in step])
        kept.append(step)
    assert all((x == y).all() for a, b in zip(kept, copies, strict=True) for x, y in zip(a, b, strict=True))
    pointers = [step[4].data_ptr() for step in kept]
    assert len(set(pointers)) == len(pointers), "two steps share a buffer"


def test_what_was_asked_for_outlives_the_carry(stand_in):
    """A step writes the new carry over the old one: no tensor handed out before may show that."""
    envs = make()
    first, stepped = envs.reset(), envs.step(torch.zeros(3, 2))[0]
    handed = [first, stepped, envs.episode_length, envs.episode_return, envs.stats(), envs.resets]
    copies = [x.clone() for x in handed]
    carry = envs.carry
    play(envs, torch.full((9, 3, 2), 0.5))
    assert carry["obs"].is_deleted(), "the carry is donated"
    for x, y in zip(handed, copies, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert not envs.episode_return.equal(handed[3]), "time has passed"


def test_no_copies_on_the_way(stand_in):
    envs, tables = make(), []
    advance = envs.advance

    def spy(carry, action):
        tables.append(advance(carry, action))
        return tables[-1]

    envs.advance = spy
    obs, _, _, _, final_obs = envs.step(torch.zeros(3, 2))
    start = tables[0][1].unsafe_buffer_pointer()
    assert obs.data_ptr() == start + 8 * 4 and final_obs.data_ptr() == start + 12 * 4
    action = torch.zeros(3, 2)
    assert jax.dlpack.from_dlpack(action).unsafe_buffer_pointer() == action.data_ptr()


def test_rollout_does_not_wait_for_the_device(stand_in, monkeypatch):
    """`step` may not look at a value: reading one on the host is what waits."""
    envs, looked = make(), []

    def spy_on(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: looked.append(name) or real(*args, **kwargs))

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"):
        spy_on(torch.Tensor, name)
    for name in ("block_until_ready", "__array__", "__bool__", "__float__"):
        spy_on(type(envs.carry["obs"]), name)
    for _ in range(8):
        envs.step(torch.zeros(3, 2))
    assert looked == []
    assert len(finished(envs)) == 3 and looked, "the spies are in place"


def test_privileged_observations(stand_in):
    envs = make("Humanoid")
    assert (envs.actor_dim, envs.critic_start, tuple(envs.obs.shape)) == (4, 4, (3, 10))
    obs = envs.step(torch.full((3, 2), 0.25))[0]
    assert (obs[:, 4:8] == obs[:, :4] + 100).all() and obs[:, 0].tolist() == [1, 1, 1]
    args = trudi_continuous.Args(vmin=-1.0, vmax=1.0, alpha_init=0.1, lambda_init=0.1, num_envs=3, hidden_size=8)
    args.diffusion_steps = 2
    agent = trudi_continuous.Agent(envs, args)
    assert agent.policy.first.in_features == 4 + 2 + 32 and agent.critic.encoder[0].in_features == 6 + 2


def test_resume_goes_on_with_the_keys_that_come_next(stand_in):
    envs = make()
    actions = torch.zeros(10, 3, 2)
    actions[[2, 4], [1, 1], 0] = 0.95  # env 1 is ahead
    play(envs, actions)
    assert envs.resets.tolist() == [2, 3, 2]
    again = make(resets=np.array(envs.resets.tolist()))
    assert again.resets.tolist() == [2, 3, 2]
    assert (again.reset() == envs.reset()).all()


def test_unknown_ids_and_missing_packages(monkeypatch, capsys):
    def choose(env_id, backend, device="cpu"):
        args = trudi_continuous.Args(env_id=env_id, backend=backend)
        return trudi_continuous.choose_backend(args, torch.device(device))

    assert choose("CheetahRun", "playground") == ("playground", "DMC")
    assert choose("CheetahRun", "auto", "cuda") == ("playground", "DMC")
    assert choose("T1JoystickRoughTerrain", "auto", "cuda") == ("playground", "humanoid")
    assert choose("PandaPickCube", "playground") == ("playground", "other")
    assert choose("CheetahRun-v1", "auto", "cuda")[0] == "envpool"
    for env_id in ("CheetahRan", "CheetahRun-v1", "Pendulum-v1"):
        with pytest.raises(SystemExit) as stopped:
            choose(env_id, "playground")
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and f"playground has no {env_id}" in error and error.count("\n") == 1
        assert "CheetahRun" in error or env_id == "Pendulum-v1"
    monkeypatch.setitem(sys.modules, "playground_env", None)  # as if it could not be imported
    assert choose("CheetahRun-v1", "auto", "cuda")[0] == "envpool"
    with pytest.raises(SystemExit):
        choose("CheetahRun", "playground")
    assert "requirements-playground.txt" in capsys.readouterr().err


def test_all_dmc_tasks_of_the_paper_are_known():
    names = """AcrobotSwingup AcrobotSwingupSparse BallInCup CartpoleBalance CartpoleBalanceSparse CartpoleSwingup
    CartpoleSwingupSparse CheetahRun FingerSpin FingerTurnEasy FingerTurnHard FishSwim HopperHop HopperStand
    PendulumSwingup ReacherEasy ReacherHard WalkerRun WalkerStand WalkerWalk"""
    assert {playground_env.TASKS[name] for name in names.split()} == {"DMC"}
    assert [n for n, suite in playground_env.TASKS.items() if suite == "humanoid"] == [
        n for n in playground_env.registry.ALL_ENVS if re.match("[GT]1Joystick(Flat|Rough)Terrain$", n)
    ]


def test_missing_menagerie(monkeypatch, tmp_path, capsys):
    def offline(*args, **kwargs):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "absent")
    monkeypatch.setattr(playground_env.registry, "load", offline)
    with pytest.raises(SystemExit) as stopped:
        playground_env.load("G1JoystickFlatTerrain", True, ())
    printed = capsys.readouterr()
    assert "MENAGERIE_PATH" in printed.out and str(tmp_path / "absent") in printed.out
    assert stopped.value.code == 2 and "--backend envpool --env-id G1JoystickFlatTerrain-v1" in printed.err
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("MENAGERIE_PATH", str(tmp_path / "mine"))
    with pytest.raises(subprocess.CalledProcessError):  # a copy of one's own: its errors are shown as they are
        playground_env.load("G1JoystickFlatTerrain", True, ())
    assert str(mjx_env.MENAGERIE_PATH) == str(tmp_path / "mine") and "fetches" not in capsys.readouterr().out


def test_jax_without_a_gpu_is_one_sentence(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        playground_env.VecEnv("playground", "CartpoleBalance", 2, 1, torch.device("cuda"))
    assert stopped.value.code == 2 and "jax[cuda12]" in capsys.readouterr().err


def test_memory_and_cache_settings():
    """In a process of its own, since they must be set before JAX starts; a user's own values win."""
    code = "import playground_env, jax, os; print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], "
    code += "jax.config.jax_compilation_cache_dir)"
    for given, expected in (({}, "trudi-mjx"), ({"JAX_COMPILATION_CACHE_DIR": "elsewhere"}, "elsewhere")):
        env = {k: v for k, v in os.environ.items() if "JAX" not in k and "XLA" not in k} | given
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        assert re.fullmatch(rf"false \S*{expected}", run.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS, ids=[s.SCRIPT for s in SCRIPTS])
def test_cartpole_trains(script, tmp_path, capsys, monkeypatch):
    """On the real simulator: a few iterations, the files of a run, going on with it."""

    def short(env_id, whole=playground_env.registry.dm_control_suite.get_default_config):
        config = whole(env_id)
        config.episode_length = 40
        return config

    monkeypatch.setattr(playground_env.registry, "get_default_config", short)
    monkeypatch.chdir(tmp_path)
    command = ["--env-id", "CartpoleBalance", "--backend", "playground", *TINY]
    script.main(command)
    printed = capsys.readouterr().out
    assert "CartpoleBalance by playground" in printed
    run_dir = next(Path("runs").iterdir())
    assert run_dir.name.startswith(f"CartpoleBalance-playground__{script.SCRIPT}__1__")
    assert json.loads((run_dir / "args.json").read_text())["backend"] == "playground"
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    assert [r.split(",")[0] for r in rows] == ["global_step", "32", "64", "96"]
    names, last = rows[0].split(","), rows[-1].split(",")
    values = dict(zip(names, last, strict=True))
    assert float(values["charts/nonfinite"]) == 0 and 0 < float(values["eval/return"]) <= 40
    assert float(values["eval/length"]) == 40
    script.main(["--resume", str(run_dir), "--total-timesteps", "128"])
    assert (run_dir / "metrics.csv").read_text().splitlines()[-1].startswith("128,")
    assert (run_dir / "eval.json").exists() and (run_dir / "curve.png").exists()


def test_compiling_is_announced_once(stand_in, capsys):
    for _ in range(2):
        envs = make(num_envs=4, stagger=2)
        play(envs, torch.zeros(9, 4, 2))
        envs.reset()
        play(envs, torch.zeros(2, 4, 2))
    assert envs.advance._cache_size() == envs.begin._cache_size() == 1, "types or shapes changed: it compiled again"
    printed = capsys.readouterr().out
    assert (
        printed.count("compiling the simulator of 4 envs") == 1 and len(re.findall(r"compiled in \d+ s", printed)) == 1
    )


def test_warps_state_fits_by_its_shapes(monkeypatch):
    """On CUDA the simulator is Warp, whose state has arrays without an env axis; here it is traced, not run."""
    playground_env.build.cache_clear()
    shapes = {}

    def load(env_id, on_cpu, overrides):
        config = playground_env.registry.get_default_config(env_id)
        assert config.impl == "warp"
        return playground_env.registry.load(env_id, config=config), config

    def traced(function, **_):
        return lambda *args: shapes.setdefault(function.__name__, jax.eval_shape(function, *args))

    monkeypatch.setattr(playground_env, "load", load)
    monkeypatch.setattr(jax, "jit", traced)
    monkeypatch.setattr(jax, "block_until_ready", lambda x: x)
    playground_env.build("CartpoleBalance", 32, jax.devices("cpu")[0], ())
    playground_env.build.cache_clear()
    before, (after, table) = shapes["begin"], shapes["advance"]
    assert any(x.shape[:1] != (32,) for x in before["state"]) and table.shape == (32, 8 + 2 * 5)
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)
