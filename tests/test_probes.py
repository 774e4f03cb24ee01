"""The real training loop, for seconds, on environments whose values and best actions are known."""

import pytest
import torch
from test_runs import load, run

import trudi_continuous as trudi

SETTINGS = """--num-envs 16 --num-steps 4 --num-minibatches 2 --update-epochs 2 --hidden-size 32 --learning-rate 3e-3
    --actor-learning-rate 3e-3 --policy-delay 1 --anneal 0 --lambda-init 0.01
    --gamma 0.5 --vmin -2 --vmax 4 --num-bins 51 --normalise-reward False --eval-points 1 --eval-episodes 2""".split()


def learn(name, folder, iterations, *flags, num_envs=16):
    """Train by main, and load what it saved. -> agent, args"""
    env = ["--env-id", f"probe_envs:{name}-v0", "--run-dir", folder, "--num-envs", num_envs]
    run(*SETTINGS, *env, "--total-timesteps", iterations * num_envs * 4, *flags)
    saved = load(folder)
    args = trudi.Args(**saved["args"])
    agent = trudi.Agent(trudi.VecEnv("gymnasium", args.env_id, 1, 0, "cpu"), args)
    agent.load_state_dict(saved["agent"])
    return agent, args


@torch.no_grad()
def values(agent, observation):
    """Q at several actions; in the value probes they do not matter."""
    obs = agent.policy.normaliser(torch.full((3, 1), float(observation)))
    return agent.critic.value(agent.critic.features(obs, torch.tensor([[-0.9], [0.0], [0.9]]))).tolist()


def actions(agent, args, sampler):
    """2000 first actions at evaluation."""
    envs, taken = trudi.VecEnv("gymnasium", args.env_id, 2000, 3, "cpu"), []
    step = envs.step
    envs.step = lambda action: taken.append(action) or step(action)
    trudi.evaluate(agent, envs, sampler, args)
    assert len(taken) == 1  # these episodes have one step
    return taken[0][:, 0]


@pytest.mark.parametrize(
    "name, iterations, expected",
    [
        ("One", 40, {0: 1.0}),  # reward 1, then the end
        ("Late", 50, {0: 0.5, 1: 1.0}),  # reward 1 one step later: discounted once
        ("Endless", 50, {0: 2.0}),  # reward 1 for ever, truncated every 4 steps: 1 / (1 - gamma)
        ("Climb", 90, {0: 1.0, 1: 2.0}),  # truncated each step: the last observation counts, not the reset one
        ("Sign", 40, {-1: -1.0, 1: 1.0}),  # the reward is seen
    ],
)
def test_values(name, iterations, expected, tmp_path):
    """With a temperature near zero the soft value is the plain one."""
    agent, _ = learn(name, tmp_path / "run", iterations, "--alpha-init", 1e-6, "--diffusion-steps", 1)
    for observation, value in expected.items():
        assert values(agent, observation) == pytest.approx([value] * 3, abs=0.07)


def test_finds_the_best_action(tmp_path):
    flags = ["--alpha-init", 0.05, "--diffusion-steps", 4]
    agent, args = learn("Target", tmp_path / "run", 100, *flags, num_envs=64)
    for sampler, width in (("ode", 0.2), ("sde", 0.4), ("best-of-k", 0.1)):
        action = actions(agent, args, sampler)
        assert abs(action.mean() - 0.5) < 0.12 and action.std() < width, sampler


def test_keeps_both_of_two_good_actions(tmp_path):
    """Peaks at -0.6 and 0.6: samples stay near both, as no single Gaussian can (28 % are near before training)."""
    agent, args = learn("Peaks", tmp_path / "run", 100, "--alpha-init", 0.25, "--diffusion-steps", 8, num_envs=64)
    for sampler, share in (("sde", 0.2), ("ode", 0.1)):
        action = actions(agent, args, sampler)
        near = (action.abs() - 0.6).abs() < 0.25
        assert (near & (action > 0)).float().mean() > share and (near & (action < 0)).float().mean() > share, sampler
        assert near.float().mean() > 0.65 and (action.abs() < 0.2).float().mean() < 0.1, sampler
