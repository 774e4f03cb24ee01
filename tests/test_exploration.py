"""The noise of the rollout: standard normal at each step, correlated over steps by a flag."""

import pytest
import torch

import reppo_continuous
import reppo_maniskill
import trudi_continuous
import trudi_maniskill

NUM_ENVS = 400
NUM_STEPS = 40
scripts = (trudi_continuous, trudi_maniskill, reppo_continuous, reppo_maniskill)
every_script = pytest.mark.parametrize("script", scripts, ids=lambda script: script.__name__)


class StillEnvs:
    """Environments in which nothing happens."""

    def __init__(self):
        self.obs_dim = 3
        self.actor_dim = 3
        self.critic_start = 0
        self.action_dim = 2
        self.spaces = {}
        self.broken = torch.zeros(NUM_ENVS, dtype=torch.bool)

    def step(self, action):
        obs = torch.zeros(NUM_ENVS, self.obs_dim)
        return obs, torch.zeros(NUM_ENVS), self.broken, self.broken, obs


def noise_of_a_rollout(script, rho, monkeypatch):
    """-> (T, E, numbers of a step)"""
    args = script.Args(num_envs=NUM_ENVS, num_steps=NUM_STEPS, hidden_size=8, noise_correlation=rho)
    envs = StillEnvs()
    agent = script.Agent(envs, args)
    recorded = []
    original = script.policy_step

    def recording_step(agent, args, batch):
        recorded.append(batch["noise"])
        return original(agent, args, batch)

    monkeypatch.setattr(script, "policy_step", recording_step)
    generator = torch.Generator().manual_seed(1)
    script.rollout(agent, envs, torch.zeros(NUM_ENVS, envs.obs_dim), args, generator)
    noise = torch.stack(recorded)  # (T, E, A) or (T, N + 1, E, A)
    if noise.dim() == 4:
        noise = noise.transpose(1, 2)
    return noise.flatten(2)


@every_script
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_correlation_of_the_noise(script, rho, monkeypatch):
    """A first-order process: unit variance at every step, rho^lag between steps lag apart."""
    noise = noise_of_a_rollout(script, rho, monkeypatch)
    tolerance = 5 / noise[0].numel() ** 0.5  # five standard errors of a mean over a step
    for step in noise:
        assert abs(step.mean()) < tolerance
        assert abs(step.square().mean() - 1) < 2 * tolerance
    for lag in (1, 2, 5):
        measured = (noise[lag:] * noise[:-lag]).mean()
        assert abs(measured - rho**lag) < 0.05


@every_script
def test_numbers_of_a_step_and_environments_stay_independent(script, monkeypatch):
    noise = noise_of_a_rollout(script, 0.7, monkeypatch)
    between_numbers = (noise[:, :, 0] * noise[:, :, 1]).mean()
    between_envs = (noise[:, 0::2] * noise[:, 1::2]).mean()
    assert abs(between_numbers) < 0.1 and abs(between_envs) < 0.1
