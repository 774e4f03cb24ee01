"""What TF32 does to an update: the inputs of every matrix product are rounded to 10 bits."""

import contextlib
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trudi_continuous as trudi

BATCH = 256
SPACES = dict(obs_dim=17, actor_dim=17, critic_start=0, action_dim=6)


def rounded(values, bits=10):
    """float32 with so many bits of mantissa instead of 23"""
    drop = 23 - bits
    as_integers = values.contiguous().view(torch.int32)
    return ((as_integers + (1 << (drop - 1))) >> drop << drop).view(torch.float32)


class TF32(TorchDispatchMode):
    PRODUCTS = {"aten::mm": (0, 1), "aten::mv": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args = list(args)
        for i in self.PRODUCTS.get(func.name(), ()):
            args[i] = rounded(args[i])
        return func(*args, **(kwargs or {}))


def update_of(agent, args, mode):
    """-> gradient of the policy, largest KL of the policy to itself"""
    generator = torch.Generator().manual_seed(1)
    policy = agent.policy
    obs = torch.randn(BATCH, 17, generator=generator)
    noise = torch.randn(2, policy.num_steps + 1, BATCH, 6, generator=generator)
    with mode():
        with torch.no_grad():
            chain = trudi.sample_chain(policy, policy.embed(obs), noise[0])
        batch = {"obs": obs, "latents": chain.latents[:, None], "controls": chain.controls[:, None]}
        kl = trudi.trajectory_kl(policy, policy.embed(obs), batch["latents"], batch["controls"])
        loss, _ = trudi.actor_loss(agent, batch, noise[1], args)
        gradients = torch.autograd.grad(loss, list(policy.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]), kl.max().item()


def test_tf32_is_precise_enough():
    args = trudi.Args()
    agent = trudi.Agent(SimpleNamespace(spaces=SPACES, **SPACES), args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
        agent.policy.control.out[1].weight.normal_(0, 0.05)
    exact, _ = update_of(agent, args, contextlib.nullcontext)
    with_tf32, kl = update_of(agent, args, TF32)
    error = ((with_tf32 - exact).norm() / exact.norm()).item()
    print(f"gradient {error:.1e}, KL of the unchanged policy {kl:.1e}")
    assert 1e-6 < error < 2e-3
    assert kl < 1e-5 < args.kl_bound
