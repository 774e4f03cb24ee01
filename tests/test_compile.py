"""The functions that --compile compiles give what they give without it, gradients included."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ppo_continuous as ppo
import reppo_continuous as reppo
import trudi_continuous as trudi

B, A, H, T = 8, 2, 16, 4
SIZES = dict(hidden_size=H, num_envs=B)
CRITIC = SIZES | dict(num_bins=11, vmin=-10.0, vmax=10.0, alpha_init=0.1, lambda_init=0.1)
ARGS = {
    trudi: dict(CRITIC, diffusion_steps=2),
    reppo: CRITIC,
    ppo: dict(SIZES, entropy_coef=0.01, learning_rate=1e-3, desired_kl=0.01, schedule="auto"),
}


def inputs(script, agent, args):
    """function -> the module whose gradients count, arguments"""
    policy, obs, noise, weight = agent.policy, torch.randn(B, 5), torch.randn(3, B, A), torch.full((B,), 1 / B)
    terminated, cut = torch.rand(2, T, B) < 0.3
    cases = {script.td_lambda_targets: (None, (*torch.randn(2, T, B), terminated, cut | terminated, 0.9, 0.95))}
    if script is ppo:
        batch = [obs, noise[0], *torch.randn(3, B), noise[1]]
        return cases | {ppo.policy_loss: (agent, (agent, batch, torch.zeros(A), weight, args))}
    targets = torch.randn(B), torch.randn(B, H), weight
    cases[script.critic_loss] = agent.critic, (agent.critic, obs, noise[0], *targets, 0.5)
    if script is reppo:
        cases[reppo.sample_action] = policy, (policy, obs, noise[0])
        return cases | {reppo.gaussian_kl: (policy, (policy, obs, torch.randn(B, 2 * A)))}
    cases[trudi.sample_chain] = policy, (policy, obs, noise)
    return cases | {trudi.trajectory_kl: (policy, (policy, obs, *torch.randn(2, B, 1, 2, A)))}


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("script", [trudi, reppo, ppo], ids=lambda s: s.SCRIPT)
def test_compiled_equals_eager(script):
    args = script.Args(**ARGS[script])
    envs = SimpleNamespace(obs=np.zeros((B, 5)), action_dim=A, actor_dim=3, critic_start=1, num_envs=B)
    agent = script.Agent(envs, args)
    with torch.no_grad():
        for p in agent.parameters():
            p += 0.2 * torch.randn_like(p)
    cases = inputs(script, agent, args)
    assert {f.__name__ for f in cases} == set(script.HOT)
    for function, (module, arguments) in cases.items():
        parameters, results = [*module.parameters()] if module else [], []  # targets need no gradient
        for run in (function, torch.compile(function)):
            outputs = run(*arguments)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            kept = [x for x in outputs if x.requires_grad or not parameters]
            loss = sum((x * torch.linspace(-1, 2, x.numel()).view(x.shape)).sum() for x in kept)
            used = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
            results.append(([x.detach() for x in outputs], used))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5, msg=lambda m, f=function: f"{f}: {m}")
        assert not module or any(g is not None and (g != 0).any() for g in results[0][1])
