"""How many kernels a GPU would launch, so that they do not creep back in.

Counted on a CPU: operations that are neither views nor allocations. On CUDA clip_grad_norm_ takes
torch's foreach functions by itself; here they are asked for.
"""

import collections
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reppo_continuous as reppo
import trudi_continuous as trudi

FREE = ("aten::detach", "aten::alias", "aten::lift_fresh", "aten::empty", "aten::new_empty")
FREE += ("aten::_unsafe_view", "aten::view", "aten::_reshape_alias", "profiler::", "prim::")
OBS_DIM = 7
ACTION_DIM = 2
BATCH = 4


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if not func.is_view and not name.startswith(FREE):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def total(self):
        return self.counts.total()


class Spaces:
    obs_dim = OBS_DIM
    actor_dim = 5
    critic_start = 2
    action_dim = ACTION_DIM
    num_envs = BATCH
    spaces = {}

    def __init__(self):
        self.broken = torch.zeros(BATCH, dtype=torch.bool)
        self.obs = torch.randn(BATCH, OBS_DIM)
        self.reward = torch.rand(BATCH)

    def step(self, action):
        return self.obs, self.reward, self.broken, self.broken, self.obs


def launches(script, monkeypatch, **changes):
    """-> kernels of an acting step, a critic step and an actor step, with the settings of CUDA"""
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, foreach=True)
    monkeypatch.setattr(script.nn.utils, "clip_grad_norm_", clip)
    if script is trudi:
        monkeypatch.setattr(trudi, "sparse_actor_loss", trudi.actor_loss)
    sizes = dict(num_envs=BATCH, hidden_size=16, num_minibatches=1, update_epochs=1)
    args = script.Args(**sizes | changes)
    envs = Spaces()
    agent = script.Agent(envs, args)
    generator = torch.Generator().manual_seed(0)
    duals = dict(params=[agent.log_alpha, agent.log_lambda], lr=args.alpha_learning_rate)
    groups = [dict(params=list(agent.policy.parameters())), duals]
    actor_optimizer = torch.optim.Adam(groups, args.actor_learning_rate, fused=True)
    critic_optimizer = torch.optim.Adam(agent.critic.parameters(), args.learning_rate, fused=True)

    def of(function, *inputs):
        with Launches() as count:
            result = function(*inputs)
        return count.total(), result

    def rollout(num_steps):
        args.num_steps = num_steps
        return of(script.rollout, agent, envs, envs.obs, args, generator)

    def update(num_updates, policy_delay):
        args.update_epochs = num_updates
        args.policy_delay = policy_delay
        optimizers = (actor_optimizer, critic_optimizer)
        return of(script.update, agent, *optimizers, flat, args, generator)[0]

    _, (data, _) = rollout(2)
    flat = script.compute_targets(agent, data, args, generator)
    update(1, 1)  # Adam makes its moments in the first step
    acting = rollout(3)[0] - rollout(2)[0]
    critic = update(3, 2) - update(2, 2)
    both = update(2, 1) - update(1, 1)
    return acting, critic, both - critic


@pytest.mark.parametrize("script, most", [(trudi, (165, 110, 580)), (reppo, (50, 110, 220))])
def test_launches(script, most, monkeypatch):
    found = launches(script, monkeypatch)
    assert all(count <= limit for count, limit in zip(found, most, strict=True)), found
    assert min(found) > 20, "they were counted"


def test_launches_grow_with_the_chain(monkeypatch):
    few = launches(trudi, monkeypatch, diffusion_steps=4)
    many = launches(trudi, monkeypatch, diffusion_steps=8)
    assert many[0] > few[0] and many[2] > few[2]
    assert abs(many[1] - few[1]) <= 1
