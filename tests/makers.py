"""Small settings, agents and chains for the tests of the maths of trudi_continuous.py."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributions import Normal

import trudi_continuous as trudi

OBS_DIM = 7
ACTION_DIM = 2
HIDDEN = 16
BATCH = 30  # states of changed_policy


def make_args(**changes):
    values = dict(num_envs=6, num_steps=5, num_minibatches=1, update_epochs=1)
    values |= dict(hidden_size=HIDDEN, diffusion_steps=4)
    values |= dict(gamma=0.9, vmin=-10.0, vmax=10.0, num_bins=151)
    values |= dict(alpha_init=0.3, lambda_init=0.7)
    return trudi.Args(**(values | changes))


def make_agent(args, action_dim=ACTION_DIM, actor_dim=5, critic_start=2, scale=0.3):
    """An agent away from its start: every parameter is moved, and Q is far from constant."""
    envs = SimpleNamespace(
        num_envs=args.num_envs,
        obs_dim=OBS_DIM,
        actor_dim=actor_dim,
        critic_start=critic_start,
        action_dim=action_dim,
        spaces={},
    )
    agent = trudi.Agent(envs, args)
    last_layer = agent.critic.head[-1][-1]
    torch.nn.init.zeros_(last_layer.bias)
    perturb(agent.policy, scale)
    perturb(agent.critic, scale)
    return agent


@torch.no_grad()
def perturb(module, scale):
    for parameter in module.parameters():
        parameter += scale * torch.randn_like(parameter)


def chain_noise(policy, batch_size):
    return torch.randn(policy.num_steps + 1, batch_size, policy.action_dim)


def denoising_step(policy, x, u, e):
    """Distribution of the next point of a chain, Eq. (7): from x, with control u and step size e"""
    return Normal(x + e * (u - x / policy.eta**2), (2 * e).sqrt())


def plain_control(policy, obs, x, k):
    """The control of step k by one first layer of the concatenated input."""
    angles = k * 10_000 ** (-torch.arange(16) / 16)
    time_features = policy.time_mlp(torch.cat([angles.sin(), angles.cos()])).expand(len(x), 32)
    inputs = torch.cat([obs[:, : policy.actor_dim], x, time_features], dim=1)
    layers = (policy.obs_layer, policy.control.x_layer, policy.time_layer)
    weight = torch.cat([layer.weight for layer in layers], dim=1)
    z = F.gelu(F.linear(inputs, weight, policy.obs_layer.bias))
    for norm, linear in policy.control.blocks:
        z = z + F.gelu(linear(norm(z)))
    shift, slope = policy.control.out(z).chunk(2, dim=1)
    return policy.schedule[0] / policy.schedule[k] * (shift + slope * x)


def ode_action(policy, obs, start, score_scale):
    """The action that the ODE of the evaluation reaches from x = start."""

    def fixed_noise(batch_size, generator):
        return start[None] / policy.eta

    fixed_policy = copy.copy(policy)
    fixed_policy.noise = fixed_noise
    agent = SimpleNamespace(policy=fixed_policy)
    args = SimpleNamespace(eval_score_scale=score_scale, eval_start="step")
    return trudi.act(agent, obs, "ode", args, None)


class ChangedPolicy(NamedTuple):
    """An agent whose policy has changed since the rollout."""

    args: trudi.Args
    agent: trudi.Agent
    batch: dict  # obs; latents and controls of the policy before the change
    kl: torch.Tensor  # (B,), of each state

    def noise(self):
        return chain_noise(self.agent.policy, BATCH)


def changed_policy(inside="some", **changes):
    """The KL bound is such that some, all or none of the states are inside the trust region."""
    args = make_args(**changes)
    agent = make_agent(args)
    policy = agent.policy
    obs = torch.randn(BATCH, OBS_DIM)
    with torch.no_grad():
        chains = []
        for _ in range(args.kl_samples):
            chains.append(trudi.sample_chain(policy, policy.embed(obs), chain_noise(policy, BATCH)))
        latents = torch.stack([chain.latents for chain in chains], dim=1)
        controls = torch.stack([chain.controls for chain in chains], dim=1)
        assert trudi.trajectory_kl(policy, policy.embed(obs), latents, controls).max() < 1e-20
        perturb(policy, 0.05)
        kl = trudi.trajectory_kl(policy, policy.embed(obs), latents, controls)
    bounds = {"some": kl.quantile(0.5), "all": 2 * kl.max(), "none": kl.min() / 2}
    args = dataclasses.replace(args, kl_bound=bounds[inside].item())
    return ChangedPolicy(args, agent, dict(obs=obs, latents=latents, controls=controls), kl)


def discounted_returns(reward, ended, gamma):
    """(T, E) -> at each step the discounted sum of its episode's rewards so far"""
    returns = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        start = 0
        for s in range(t):
            if ended[s, i]:
                start = s + 1
        for s in range(start, t + 1):
            returns[t, i] += gamma ** (t - s) * float(reward[s, i])
    return returns
