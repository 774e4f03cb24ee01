"""The functions that --compile compiles give what they give without it, gradients included."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import trudi_continuous as trudi


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_compiled_equals_eager():
    B, A, H, T = 8, 2, 16, 4
    sizes = dict(hidden_size=H, diffusion_steps=2, num_envs=B, num_bins=11)
    args = trudi.Args(**sizes, vmin=-10.0, vmax=10.0, alpha_init=0.1, lambda_init=0.1)
    envs = SimpleNamespace(obs=np.zeros((B, 5)), action_dim=A, actor_dim=3, critic_start=1, num_envs=B)
    agent = trudi.Agent(envs, args)
    with torch.no_grad():
        for p in agent.parameters():
            p += 0.2 * torch.randn_like(p)
    policy, critic, obs, noise = agent.policy, agent.critic, torch.randn(B, 5), torch.randn(3, B, A)
    chain = torch.randn(2, B, 1, 2, A)
    targets = torch.randn(B), torch.randn(B, H), torch.full((B,), 1 / B)
    terminated, cut = torch.rand(2, T, B) < 0.3
    cases = [
        (trudi.sample_chain, policy, (policy, obs, noise)),
        (trudi.trajectory_kl, policy, (policy, obs, *chain)),
        (trudi.critic_loss, critic, (critic, obs, noise[0], *targets, 0.5)),
        (trudi.td_lambda_targets, None, (*torch.randn(2, T, B), terminated, cut | terminated, 0.9, 0.95)),
    ]
    for function, module, inputs in cases:
        parameters, results = [*module.parameters()] if module else [], []  # targets need no gradient
        for run in (function, torch.compile(function)):
            outputs = run(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            loss = sum((x * torch.linspace(-1, 2, x.numel()).view(x.shape)).sum() for x in outputs)
            used = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
            results.append(([x.detach() for x in outputs], used))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5, msg=lambda m, f=function: f"{f}: {m}")
        assert not module or any(g is not None and (g != 0).any() for g in results[0][1])
