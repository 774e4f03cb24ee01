"""A trained policy in the user's own code: load_policy of every script."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from run_helpers import CLOCK, SAMPLERS, every_script, load, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of finished runs, by script and environment; each is made once."""
    made = {}

    def get(script, env):
        key = (script.SCRIPT, env[1])
        if key not in made:
            made[key] = tmp_path_factory.mktemp("policy") / "run"
            train(made[key], script=script, env=env)
        return made[key]

    return get


@every_script
def test_a_gymnasium_loop(script, runs):
    """The five lines of docs/usage.md; actions are in the environment's own units."""
    policy = script.load_policy(runs(script, ["--env-id", "Pendulum-v1"]) / "best.pt")
    env = gym.make("Pendulum-v1")
    obs, _ = env.reset(seed=0)
    actions = []
    for _ in range(20):
        action = policy(obs)
        assert env.action_space.contains(action)
        actions.append(action.item())
        obs, _, _, _, _ = env.step(action)
    assert len(set(actions)) == 20
    assert env.action_space.high == 2


@every_script
def test_as_in_evaluation(script, runs):
    """The same actions as evaluate takes: normalizer, sampler and scaling are inside."""
    folder = runs(script, CLOCK)
    checkpoint = load(folder)
    args = script.Args(**checkpoint["args"])
    envs = script.make_envs(args, 3, seed=5)
    agent = script.Agent(envs, args)
    agent.load_state_dict(checkpoint["agent"])
    obs = envs.reset()
    for sampler in SAMPLERS[script]:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            normalized = agent.policy.normalizer(obs)
            expected = script.act(agent, normalized, sampler, args, generator).clamp(-1, 1)
        center = torch.tensor(envs.action_center)
        halfwidth = torch.tensor(envs.action_halfwidth)
        policy = script.load_policy(folder, sampler, seed=7)
        torch.testing.assert_close(policy(obs), center + halfwidth * expected)


@every_script
def test_one_or_many_arrays_or_tensors(script, runs):
    folder = runs(script, CLOCK)
    obs_dim = load(folder)["spaces"]["obs_dim"]
    obs = np.random.default_rng(0).normal(size=(4, obs_dim))
    deterministic = SAMPLERS[script][0] == "mean"
    policy = script.load_policy(folder)
    many = policy(obs)
    assert isinstance(many, np.ndarray) and many.dtype == np.float32
    one = policy(obs[0])
    assert one.shape == many[0].shape
    tensors = policy(torch.tensor(obs))
    assert isinstance(tensors, torch.Tensor) and tensors.shape == many.shape
    if deterministic:
        np.testing.assert_allclose(one, many[0], rtol=1e-5)
        np.testing.assert_allclose(tensors.numpy(), many, rtol=1e-5)


@every_script
def test_dictionaries(script, runs):
    """Without the part that only the critic sees, too."""
    folder = runs(script, ["--env-id", "probe_envs:Dict-v0"])
    policy = script.load_policy(folder, SAMPLERS[script][0], seed=3)
    shapes = load(folder)["spaces"]["obs_shapes"]
    assert list(shapes)[-1] == "privileged_state"
    rng = np.random.default_rng(0)
    obs = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    full = policy(obs)
    policy = script.load_policy(folder, SAMPLERS[script][0], seed=3)
    without = {name: obs[name] for name in reversed(shapes) if name != "privileged_state"}
    torch.testing.assert_close(policy(without), full)


@every_script
def test_what_does_not_fit_is_refused(script, runs, tmp_path):
    folder = runs(script, ["--env-id", "probe_envs:Dict-v0"])
    policy = script.load_policy(folder)
    with pytest.raises(KeyError):
        policy({"draw": np.zeros(2)})  # a part is missing
    with pytest.raises(ValueError, match="clock has the shape"):
        policy({"draw": np.zeros(2), "clock": np.zeros((4, 2, 3))})
    with pytest.raises(ValueError, match="not a checkpoint"):
        script.load_policy(tmp_path / "nothing.pt")
