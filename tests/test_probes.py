"""The real training loops, for seconds, on environments whose values and best actions are known."""

import pytest
import torch
from run_helpers import SAMPLERS, dppo, fpo, load, ppo, reppo, run, trudi

pytestmark = pytest.mark.slow  # each one trains for seconds
NUM_STEPS = 4
SIZES = ["--num-steps", NUM_STEPS, "--num-minibatches", 2, "--hidden-size", 32, "--gamma", 0.5]
SIZES += ["--eval-points", 1, "--eval-episodes", 2, "--learning-rate", 3e-3]
CRITIC = ["--update-epochs", 2, "--policy-delay", 1, "--actor-learning-rate", 3e-3, "--anneal", 0]
CRITIC += ["--lambda-init", 0.01, "--vmin", -2, "--vmax", 4, "--num-bins", 51]
CRITIC += ["--no-normalize-reward"]
SETTINGS = {
    trudi: SIZES + CRITIC,
    reppo: SIZES + CRITIC,
    ppo: SIZES + ["--update-epochs", 4, "--schedule", "fixed"],
    dppo: SIZES + ["--update-epochs", 4, "--anneal", 0],
    fpo: SIZES + ["--update-epochs", 4, "--anneal", 0],
}
# With a temperature near zero the soft value is the plain one.
PLAIN_VALUE = {
    trudi: ["--alpha-init", 1e-6, "--diffusion-steps", 1],
    reppo: ["--alpha-init", 1e-6],
    ppo: ["--no-normalize-reward", "--no-clip-value"],
    dppo: ["--no-normalize-reward", "--value-coef", 1],
    fpo: ["--no-normalize-reward", "--value-coef", 1],
}
# probe -> iterations, {observation: value}
VALUES = {
    "One": (40, {0: 1.0}),  # reward 1, then the end
    "Late": (50, {0: 0.5, 1: 1.0}),  # reward 1 one step later: discounted once
    "Endless": (50, {0: 2.0}),  # reward 1 for ever, truncated every 4 steps: 1 / (1 - gamma)
    "Climb": (90, {0: 1.0, 1: 2.0}),  # truncated each step: the last observation counts
    "Sign": (40, {-1: -1.0, 1: 1.0}),  # the observation tells the reward
}


def learn(script, probe, folder, iterations, flags, num_envs=16):
    """Train by main, and load what it saved. -> agent, args"""
    flags = [*SETTINGS[script], *flags, "--env-id", f"probe_envs:{probe}-v0", "--run-dir", folder]
    flags += ["--num-envs", num_envs, "--total-timesteps", iterations * num_envs * NUM_STEPS]
    run(*flags, script=script)
    checkpoint = load(folder)
    args = script.Args(**checkpoint["args"])
    agent = script.Agent(script.VecEnv(args, 1, seed=0), args)
    agent.load_state_dict(checkpoint["agent"])
    return agent, args


@torch.no_grad()
def values_at(script, agent, observation):
    """Q at three actions, which do not matter in these probes, or V three times."""
    obs = agent.policy.normalizer(torch.full((3, 1), float(observation)))
    if script in (ppo, dppo, fpo):
        return agent.value(obs).tolist()
    action = torch.tensor([[-0.9], [0.0], [0.9]])
    return agent.critic.value(agent.critic.features(obs, action)).tolist()


def actions_of(script, agent, args, sampler):
    """2000 first actions at evaluation, (2000,)"""
    envs = script.VecEnv(args, 2000, seed=3)
    step = envs.step
    taken = []

    def recording_step(action):
        taken.append(action)
        return step(action)

    envs.step = recording_step
    script.evaluate(agent, envs, sampler, args)
    assert len(taken) == 1  # episodes of these probes have one step
    return taken[0][:, 0]


CASES = [(script, probe) for script in (trudi, reppo, ppo) for probe in VALUES]
CASES += [(dppo, "Late"), (dppo, "Climb"), (fpo, "Late"), (fpo, "Climb")]  # the rest is PPO's


@pytest.mark.parametrize("script, probe", CASES, ids=lambda case: getattr(case, "SCRIPT", case))
def test_values(script, probe, tmp_path):
    iterations, expected = VALUES[probe]
    agent, _ = learn(script, probe, tmp_path / "run", iterations, PLAIN_VALUE[script])
    for observation, value in expected.items():
        assert values_at(script, agent, observation) == pytest.approx([value] * 3, abs=0.07)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, flags, widths",
    [
        (trudi, ["--alpha-init", 0.05, "--diffusion-steps", 4], [0.2, 0.4, 0.1]),
        (reppo, ["--alpha-init", 0.05], [0.1, 0.4, 0.1]),
        (ppo, ["--entropy-coef", 0], [0.1, 0.4]),
        (ppo, ["--entropy-coef", 0, "--objective", "spo"], [0.1, 0.4]),
        (dppo, ["--learning-rate", 1e-3], [0.3, 0.2]),
        (fpo, ["--learning-rate", 1e-3], [0.3]),
    ],
    ids=["trudi", "reppo", "ppo", "spo", "dppo", "fpo"],
)
def test_finds_the_best_action(script, flags, widths, tmp_path):
    """widths: the largest standard deviation of each sampler's actions"""
    agent, args = learn(script, "Target", tmp_path / "run", 100, flags, num_envs=64)
    for sampler, width in zip(SAMPLERS[script], widths, strict=True):
        action = actions_of(script, agent, args, sampler)
        assert abs(action.mean() - 0.5) < 0.12, (sampler, action.mean())
        assert action.std() < width, (sampler, action.std())


def near_the_peaks(action):
    """Shares of the actions near -0.6 and near 0.6"""
    near_left = (action + 0.6).abs() < 0.25
    near_right = (action - 0.6).abs() < 0.25
    return near_left.float().mean(), near_right.float().mean()


@pytest.mark.slow
def test_diffusion_keeps_both_of_two_good_actions(tmp_path):
    """Samples stay near both peaks, as no single Gaussian can; before training 28 % are near.

    Of three temperatures this one is clear of both bounds: six seeds had 29 to 39 % near the
    smaller peak and at least 73 % near one. With 0.25 four seeds had 18 to 37 % near the smaller
    peak, with 0.5 four seeds had 65 to 70 % near one: each at the edge.
    """
    flags = ["--alpha-init", 0.35, "--diffusion-steps", 8]
    agent, args = learn(trudi, "Peaks", tmp_path / "run", 100, flags, num_envs=64)
    for sampler, smallest_share in (("sde", 0.2), ("ode", 0.1)):
        action = actions_of(trudi, agent, args, sampler)
        left, right = near_the_peaks(action)
        assert min(left, right) > smallest_share, sampler
        assert left + right > 0.65, sampler
        between = (action.abs() < 0.2).float().mean()
        assert between < 0.1, sampler


@pytest.mark.slow
def test_gaussian_does_not(tmp_path):
    """The same task and temperature: not both peaks are alive with 65 % of the samples near one."""
    flags = ["--alpha-init", 0.35]
    agent, args = learn(reppo, "Peaks", tmp_path / "run", 100, flags, num_envs=64)
    left, right = near_the_peaks(actions_of(reppo, agent, args, "sample"))
    assert min(left, right) < 0.2 or left + right < 0.65
