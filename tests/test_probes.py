"""The real training loops, for seconds, on environments whose values and best actions are known."""

import pytest
import torch
from test_runs import SAMPLERS, SCRIPTS, load, ppo, reppo, run, trudi

SIZES = "--num-envs 16 --num-steps 4 --num-minibatches 2 --hidden-size 32 --gamma 0.5 --eval-points 1 --eval-episodes 2"
CRITIC = f"{SIZES} --update-epochs 2 --learning-rate 3e-3 --actor-learning-rate 3e-3 --policy-delay 1 --anneal 0"
CRITIC = f"{CRITIC} --lambda-init 0.01 --vmin -2 --vmax 4 --num-bins 51 --normalise-reward False"
SETTINGS = {trudi: CRITIC, reppo: CRITIC, ppo: f"{SIZES} --update-epochs 4 --learning-rate 3e-3 --schedule fixed"}
PLAIN = {  # with a temperature near zero the soft value is the plain one
    trudi: ["--alpha-init", 1e-6, "--diffusion-steps", 1],
    reppo: ["--alpha-init", 1e-6],
    ppo: ["--normalise-reward", "False", "--no-clip-value"],
}


def learn(script, name, folder, iterations, *flags, num_envs=16):
    """Train by main, and load what it saved. -> agent, args"""
    env = ["--env-id", f"probe_envs:{name}-v0", "--run-dir", folder, "--num-envs", num_envs]
    flags = [*SETTINGS[script].split(), *env, "--total-timesteps", iterations * num_envs * 4, *flags]
    run(*flags, script=script)
    saved = load(folder)
    args = script.Args(**saved["args"])
    agent = script.Agent(script.VecEnv("gymnasium", args.env_id, 1, 0, "cpu"), args)
    agent.load_state_dict(saved["agent"])
    return agent, args


@torch.no_grad()
def values(script, agent, observation):
    """Q at several actions, which do not matter in the value probes, or V."""
    obs = agent.policy.normaliser(torch.full((3, 1), float(observation)))
    if script is ppo:
        return agent.value(obs).tolist()
    return agent.critic.value(agent.critic.features(obs, torch.tensor([[-0.9], [0.0], [0.9]]))).tolist()


def actions(script, agent, args, sampler):
    """2000 first actions at evaluation."""
    envs, taken = script.VecEnv("gymnasium", args.env_id, 2000, 3, "cpu"), []
    step = envs.step
    envs.step = lambda action: taken.append(action) or step(action)
    script.evaluate(agent, envs, sampler, args)
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
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.SCRIPT)
def test_values(script, name, iterations, expected, tmp_path):
    agent, _ = learn(script, name, tmp_path / "run", iterations, *PLAIN[script])
    for observation, value in expected.items():
        assert values(script, agent, observation) == pytest.approx([value] * 3, abs=0.07)


@pytest.mark.parametrize(
    "script, flags, widths",
    [
        (trudi, ["--alpha-init", 0.05, "--diffusion-steps", 4], (0.2, 0.4, 0.1)),
        (reppo, ["--alpha-init", 0.05], (0.1, 0.4, 0.1)),
        (ppo, ["--entropy-coef", 0], (0.1, 0.4)),
        (ppo, ["--entropy-coef", 0, "--objective", "spo"], (0.1, 0.4)),
    ],
)
def test_finds_the_best_action(script, flags, widths, tmp_path):
    agent, args = learn(script, "Target", tmp_path / "run", 100, *flags, num_envs=64)
    for sampler, width in zip(SAMPLERS[script], widths, strict=True):
        action = actions(script, agent, args, sampler)
        assert abs(action.mean() - 0.5) < 0.12 and action.std() < width, (sampler, action.mean(), action.std())


def near_the_peaks(action):
    near = (action.abs() - 0.6).abs() < 0.25
    return (near & (action < 0)).float().mean(), (near & (action > 0)).float().mean()


def test_diffusion_keeps_both_of_two_good_actions(tmp_path):
    """Peaks at -0.6 and 0.6: samples stay near both, as no single Gaussian can (28 % are near before training). Of
    three temperatures tried this one clears both bounds: six seeds had 29 to 39 % near the smaller peak, at least 73 %
    near one. With 0.25 four seeds had 18 to 37 %, with 0.5 four had 65 to 70 % near one: each at the edge."""
    flags = ["--alpha-init", 0.35, "--diffusion-steps", 8]
    agent, args = learn(trudi, "Peaks", tmp_path / "run", 100, *flags, num_envs=64)
    for sampler, share in (("sde", 0.2), ("ode", 0.1)):
        action = actions(trudi, agent, args, sampler)
        left, right = near_the_peaks(action)
        assert min(left, right) > share and left + right > 0.65, sampler
        assert (action.abs() < 0.2).float().mean() < 0.1, sampler


def test_gaussian_does_not(tmp_path):
    """The same task and temperature: what it samples is not 65 % near the peaks with both of them alive."""
    agent, args = learn(reppo, "Peaks", tmp_path / "run", 100, "--alpha-init", 0.35, num_envs=64)
    left, right = near_the_peaks(actions(reppo, agent, args, "sample"))
    assert min(left, right) < 0.2 or left + right < 0.65
