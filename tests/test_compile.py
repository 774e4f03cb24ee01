"""The functions that --compile compiles give what they give without it, gradients included."""

import ast
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.testing import assert_close

import dppo_continuous as dppo
import fpo_continuous as fpo
import ppo_continuous as ppo
import reppo_continuous as reppo
import trudi_continuous as trudi

B = 8  # states of a minibatch, and environments
T = 4  # steps of a rollout
A = 2  # dimensions of the action
OBS_DIM = 5
N = 2  # denoising steps
H = 16  # hidden units
SIZES = dict(hidden_size=H, num_envs=B)
CRITIC = dict(num_bins=11, vmin=-10.0, vmax=10.0, aux_coef=0.5, alpha_init=0.1, lambda_init=0.1)
SETTINGS = {
    trudi: SIZES | CRITIC | dict(diffusion_steps=N),
    reppo: SIZES | CRITIC,
    ppo: SIZES | dict(entropy_coef=0.01),
    dppo: SIZES | dict(diffusion_steps=N, clip_coef_first=0.1),
    fpo: SIZES | dict(flow_steps=N, flow_samples=3, actor_hidden_size=H),
}
SCRIPTS = [trudi, reppo, ppo, dppo, fpo]
COMPILERS = ("g++", "c++", "clang++")


class Case(NamedTuple):
    arguments: tuple  # of the function
    module: torch.nn.Module | None = None  # whose gradients count


def make_agent(script, args):
    """An agent away from its start."""
    dims = dict(obs_dim=OBS_DIM, actor_dim=3, critic_start=1, action_dim=A)
    envs = SimpleNamespace(num_envs=B, spaces={}, **dims)
    agent = script.Agent(envs, args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return agent


def make_targets_case():
    terminated = torch.rand(T, B) < 0.3
    truncated = torch.rand(T, B) < 0.3
    return Case((torch.randn(T, B), torch.randn(T, B), terminated, truncated, 0.9, 0.95))


def make_critic_case(agent, obs, args):
    batch = {
        "obs": obs,
        "action": torch.randn(B, A),
        "target": torch.randn(B),
        "next_features": torch.randn(B, H),
    }
    return Case((agent.critic, batch, args), agent.critic)


def make_cases(script, agent, args):
    """name of a function -> its case"""
    obs = torch.randn(B, OBS_DIM)
    policy = agent.policy
    cases = {"td_lambda_targets": make_targets_case()}
    if script is trudi:
        noise = torch.randn(N + 1, B, A)
        latents = torch.randn(B, 1, N, A)
        controls = torch.randn(B, 1, N, A)
        cases["critic_loss"] = make_critic_case(agent, obs, args)
        embedded = torch.randn(N, B, H)
        chain = trudi.Chain(*torch.randn(2, B, A), latents[:, 0], controls[:, 0])
        cases["sample_chain"] = Case((policy, embedded, noise), policy)
        cases["entropy_bound"] = Case((policy, chain), None)
        cases["trajectory_kl"] = Case((policy, embedded, latents, controls), policy)
    elif script is reppo:
        old_mean = torch.randn(B, A)
        old_log_std = torch.randn(B, A)
        cases["critic_loss"] = make_critic_case(agent, obs, args)
        cases["sample_action"] = Case((policy, obs, torch.randn(B, A)), policy)
        cases["gaussian_kl"] = Case((policy, obs, old_mean, old_log_std), policy)
    else:
        batch = {
            "obs": obs,
            "action": torch.randn(B, A),
            "value": torch.randn(B),
            "target": torch.randn(B),
            "advantage": torch.randn(B),
        }
        if script is ppo:
            batch["mean"] = torch.randn(B, A)
            batch["log_std"] = torch.zeros(B, A)
        elif script is dppo:
            batch["chain"] = torch.randn(B, N + 1, A)
            batch["log_prob"] = torch.randn(B, N)
            batch["step"] = torch.arange(B) % N
        else:
            batch["t"] = torch.rand(B, 3, 1)
            batch["noise"] = torch.randn(B, 3, A)
            batch["flow_loss"] = torch.rand(B)
        cases["policy_loss"] = Case((agent, batch, args), agent)
    return cases


def compiled_names(script):
    """The functions that are replaced by compiled ones: name = torch.compile(name)"""
    names = set()
    for node in ast.walk(ast.parse(Path(script.__file__).read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.compile("):
            names.add(node.targets[0].id)
    return names


def tensors_in(output):
    """All tensors of a function's output: one, or a tuple or dict of them."""
    if isinstance(output, torch.Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output
    found = []
    for part in parts:
        found += tensors_in(part)
    return found


def results_of(function, case):
    """-> all outputs, the gradients of a weighted sum of them"""
    outputs = tensors_in(function(*case.arguments))
    gradients = []
    if case.module is not None:
        total = 0.0
        for output in outputs:
            if output.requires_grad:
                weights = torch.linspace(-1, 2, output.numel()).view(output.shape)
                total = total + (weights * output).sum()
        parameters = list(case.module.parameters())
        gradients = torch.autograd.grad(
            total, parameters, allow_unused=True, materialize_grads=True
        )
    return [output.detach() for output in outputs], list(gradients)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.SCRIPT)
def test_every_compiled_function_has_a_case(script):
    args = script.Args(**SETTINGS[script])
    cases = make_cases(script, make_agent(script, args), args)
    assert set(cases) == compiled_names(script)


@pytest.mark.slow
@pytest.mark.skipif(
    not any(shutil.which(compiler) for compiler in COMPILERS),
    reason="torch.compile needs a C++ compiler",
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.SCRIPT)
def test_compiled_equals_eager(script):
    args = script.Args(**SETTINGS[script])
    cases = make_cases(script, make_agent(script, args), args)
    for name, case in cases.items():
        print(name)  # pytest shows it where an assertion fails
        function = getattr(script, name)
        eager, eager_gradients = results_of(function, case)
        compiled, compiled_gradients = results_of(torch.compile(function), case)
        assert len(eager) > 0
        assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
        assert_close(compiled_gradients, eager_gradients, rtol=1e-4, atol=1e-5)
        if case.module is not None:
            assert any((gradient != 0).any() for gradient in eager_gradients)
