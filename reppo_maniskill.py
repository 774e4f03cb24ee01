"""REPPO on ManiSkill: relative-entropy pathwise policy optimisation, the Gaussian counterpart of TruDi, in one file.

A tanh-Gaussian policy is improved through the gradient of a critic that was fitted on-policy: no importance weights, no
replay, no target network. Each iteration collects a rollout, computes soft TD(lambda) targets once, fits a categorical
critic, and improves the policy: a state whose KL to the rollout policy is within its bound follows the critic and the
entropy bonus, any other is pulled back. Both multipliers, of entropy and KL, are learned. Voelcker et al., 2025.
Equation numbers are those of the TruDi paper: `diff reppo_maniskill.py trudi_maniskill.py` shows what changes.

    python reppo_maniskill.py --env-id StackCube-v1           # paper scale on CUDA; else small, by maniskill_cpu.py
    python reppo_maniskill.py --env-module my_envs --env-id MyEnv-v1   # or --resume, --evaluate FILE.pt, --bench 10

Departures: those of reppo_continuous.py (see docs/reppo.md). Success ends an episode, its value goes on, as in
ManiSkill's PPO. The return of training episodes FALLS while a policy learns to succeed sooner: see eval/success_once.
Shapes: T rollout steps, E envs, B minibatch, O observation, A action, H hidden width.
"""

import dataclasses
import difflib
import importlib.metadata
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn


@dataclasses.dataclass
class Args:
    env_id: str = "PushCube-v1"  # a ManiSkill id
    env_module: str | None = None  # a module of your own to import first, which registers env_id
    backend: Literal["auto", "physx_cuda", "physx_cpu_batched"] = "auto"  # batched CPU simulation where CUDA is missing
    total_timesteps: int | None = None  # env steps of the whole run (default: 1M on a CPU, 50M on CUDA)
    seed: int = 1  # of the networks, the noise and the envs
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes CUDA where it is present
    run_dir: str | None = None  # folder of this run (default: runs/<env>__<script>__<seed>__<time>)
    resume: str | None = None  # folder of an interrupted run to go on with, under its own settings
    evaluate: str | None = None  # checkpoint to evaluate with all samplers instead of training
    capture_video: bool = False  # write video.gif of one evaluation episode at the end
    track: bool = False  # log to Weights & Biases too (WANDB_* variables apply); else nothing touches the network
    bench: int = 0  # measure this many iterations after a warm-up, print steps/s and time shares, write nothing
    num_envs: int | None = None  # parallel environments (E)
    num_steps: int | None = None  # steps that each env takes per iteration (T)
    num_minibatches: int | None = None  # minibatches per epoch; must divide num_envs * num_steps
    update_epochs: int | None = None  # passes over each rollout
    hidden_size: int | None = None  # width of policy and critic (H)
    policy_delay: int | None = None  # critic steps per step of the policy and the duals, which cost most of the time
    gamma: float | None = None  # discount factor
    vmin: float | None = None  # lower end of the critic's range
    vmax: float | None = None  # upper end of the critic's range
    alpha_init: float | None = None  # initial entropy temperature; its bonus is a part of the values, which must fit
    normalise_reward: bool | None = None  # scale rewards so that discounted returns have RMS --return-scale
    return_scale: float = 30.0  # see --normalise-reward, for rewards of your own
    td_lambda: float = 0.95  # trace parameter of the TD(lambda) targets
    trust_region: Literal["split", "penalty", "none"] = "split"  # Eq. (19) | lambda * KL added | no KL at all
    kl_bound: float = 0.1  # largest KL of the rollout policy to the new one (epsilon)
    lambda_init: float | None = None  # initial multiplier of the KL
    entropy_target: float = -0.5  # alpha drives the policy's entropy to this per action dimension
    num_bins: int = 151  # bins of the critic's value distribution
    hl_sigma: float = 0.75  # HL-Gauss smoothing, in bin widths
    aux_coef: float = 1.0  # weight of the critic's auxiliary loss: predicting the next step's features
    learning_rate: float | None = None  # Adam's step size for the critic; the few steps of a CPU run must be larger
    actor_learning_rate: float | None = None  # Adam's step size for policy, alpha and lambda
    anneal: float | None = None  # share of it that is gone by the end of the run, linearly
    max_grad_norm: float = 0.5  # gradients of policy and critic are clipped to this norm each
    eval_points: int = 20  # evaluations during training, evenly spaced; each one also saves a checkpoint
    eval_episodes: int = 64  # episodes per evaluation, in envs of their own
    eval_sampler: Literal["mean", "sample", "best-of-k"] = "mean"  # tanh(mean), the policy itself, best of K by Q
    eval_best_of: int = 10  # K of the best-of-k sampler
    torch_threads: int = 1  # CPU threads of torch; 1 lets runs share a machine
    compile: bool = False  # torch.compile the hot functions


SUITES = {  # gamma is set by the task: 1 - 10/(steps of an episode)
    "ManiSkill": dict(gamma=0.8, vmin=-15.0, vmax=15.0, normalise_reward=False),
}
SIZED = "total_timesteps num_envs num_steps num_minibatches update_epochs hidden_size policy_delay".split()
SIZED += "learning_rate actor_learning_rate anneal lambda_init alpha_init".split()
SIZES = {"cuda": (5 * 10**7, 1024, 128, 64, 4, 512, 1, 3e-4, 3e-4, 0, 0.01, 1.0)}
SIZES["cpu"] = (10**6, 64, 64, 16, 8, 128, 1, 2e-3, 1.2e-3, 1, 1, 0.01)
SAMPLERS, METRICS = ("mean", "sample", "best-of-k"), ("return", "length", "success_once", "success_at_end")
SCRIPT, RENDERER = Path(__file__).stem, "physx_cpu"  # it simulates the video's one env, which needs Vulkan
HOT = "sample_action", "gaussian_kl", "td_lambda_targets", "critic_loss"  # what --compile compiles
PROGRESS = "KL {policy/kl:.3f}/{kl_bound:g}  alpha {policy/alpha:.2g}  lambda {policy/lambda:.2g}"


# --- shared: ManiSkill environments ---
def choose_backend(args, device):  # -> backend, suite; refuses what cannot be trained
    try:
        sys.path.insert(0, os.getcwd())  # for the user's own --env-module
        importlib.import_module("warnings").filterwarnings("ignore", "Failed to find system libvulkan")
        for module in filter(None, ("mani_skill.envs", args.env_module)):
            importlib.import_module(module)
    except ImportError as e:
        hint = "" if (e.name or "") == args.env_module else ": pip install -r requirements-maniskill.txt"
        stop(f"cannot import {module} ({e}){hint}")
    importlib.import_module("logging").getLogger("mani_skill").setLevel("ERROR")  # its hints to authors of tasks
    known = importlib.import_module("mani_skill.utils.registration").REGISTERED_ENVS
    if args.env_id not in known:
        close = ", ".join(difflib.get_close_matches(args.env_id, known, 4)) or "none"
        stop(f"ManiSkill has no {args.env_id}; the closest known ids: {close}; your own needs --env-module")
    backend = {"auto": "physx_cuda" if device.type == "cuda" else "physx_cpu_batched"}.get(args.backend, args.backend)
    if backend == "physx_cpu_batched" and not importlib.util.find_spec("maniskill_cpu"):
        stop("without CUDA the simulation needs maniskill_cpu.py beside this script")
    steps = gym.spec(args.env_id).max_episode_steps or 100
    SUITES["ManiSkill"]["gamma"] = 1 - 10 / max(steps, 20)
    if "normalized_dense" not in known[args.env_id].cls.SUPPORTED_REWARD_MODES:
        print(f"{args.env_id} has no dense reward: training on its sparse one, which is 1 at success and 0 before")
    return backend, "ManiSkill"


class VecEnv:
    """obs, reward, terminated, truncated, final_obs = step(action in [-1, 1]), tensors on `device` from end to end.
    Where an episode ended, final_obs is its last observation and obs the next one's first; elsewhere they are equal.
    In training (stagger > 0) success ends an episode, but as a time-out does: the value beyond it counts, or success
    would be punished. In evaluation episodes run to their time limit. A non-finite step restarts its env, counts in
    `nonfinite` and clears `valid`, so that nobody trains on it."""

    def __init__(self, backend, env_id, num_envs, seed, device, threads=1, resets=None, stagger=0, **kwargs):
        task = importlib.import_module("mani_skill.utils.registration").REGISTERED_ENVS[env_id].cls
        dense = "normalized_dense" in task.SUPPORTED_REWARD_MODES
        kwargs |= dict(num_envs=num_envs, obs_mode="state", control_mode="pd_joint_delta_pos")
        kwargs |= dict(reward_mode="normalized_dense" if dense else "sparse")
        if backend == "physx_cpu_batched":
            self.env = importlib.import_module("maniskill_cpu").make_env(env_id, **kwargs)
        else:
            self.env = gym.make(env_id, sim_backend=backend, **kwargs)
        if isinstance(self.env.action_space, gym.spaces.Dict):  # two robots
            self.env = importlib.import_module("mani_skill.utils.wrappers").FlattenActionSpaceWrapper(self.env)
        self.num_envs, self.device, self.training = num_envs, device, stagger > 0
        self.seed = np.random.SeedSequence(seed).generate_state(num_envs).tolist()  # of the first reset
        space = self.env.get_wrapper_attr("single_action_space")
        low, high = (torch.tensor(x, device=device) for x in (space.low, space.high))
        self.centre, self.halfwidth, self.action_dim = (high + low) / 2, (high - low) / 2, len(low)
        self.nonfinite, self.finished, self.index = 0, [], torch.arange(num_envs, device=device)
        self.episode_return, self.episode_length, self.success_once = torch.zeros(3, num_envs, device=device)
        self.resets = torch.zeros(num_envs, dtype=torch.int64, device=device)  # a resumed run repeats them
        self.obs = self.reset()  # (E, O)
        while resets is not None and len(resets) == num_envs and (behind := self.resets.cpu().numpy() < resets).any():
            self.obs = self.reset(torch.tensor(behind, device=device).nonzero()[:, 0])
        self.actor_dim, self.critic_start = self.obs.shape[1], 0

    def reset(self, index=None):  # all envs, or those of `index` -> obs of all
        index = self.index if index is None else index
        self.resets[index] += 1
        for x in (self.episode_return, self.episode_length, self.success_once):
            x[index] = 0
        obs, _ = self.env.reset(seed=self.seed, options=dict(env_idx=index.to(self.env.unwrapped.device)))
        self.obs, self.seed = self.tensor(obs).nan_to_num(), None  # later resets go on with each env's own stream
        return self.obs

    def tensor(self, x):
        return torch.as_tensor(x, device=self.device).float()

    def stats(self, success=math.nan, lost=False):  # of the episodes under way -> (E, 5): env or -1, then METRICS
        env = torch.where(torch.as_tensor(lost, device=self.device), -1, self.index)
        success = self.tensor(success).expand(self.num_envs)
        once = self.success_once + 0 * success
        return torch.stack([env, self.episode_return, self.episode_length, once, success], 1)

    def step(self, action):
        action = (self.centre + self.halfwidth * action.clamp(-1, 1)).to(self.env.unwrapped.device)
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs, reward, success = self.tensor(obs), self.tensor(reward), self.tensor(info.get("success", math.nan))
        bad = ~(obs.isfinite().all(1) & reward.isfinite())
        self.nonfinite = self.nonfinite + bad.sum()
        obs, reward = torch.where(bad[:, None], self.obs, obs), torch.where(bad, 0, reward)
        self.episode_return += reward
        self.episode_length += 1
        self.success_once.clamp_(min=success.nan_to_num())
        ended = self.tensor(truncated).bool() | bad
        if self.training:
            ended |= self.tensor(terminated).bool()
        self.valid, self.obs = ~bad, obs
        if len(index := ended.nonzero()[:, 0]):  # the only time that the host waits for the device
            self.finished.append(self.stats(success, bad)[index])
            self.reset(index)
        return self.obs, reward, torch.zeros_like(ended), ended, obs


# --- end shared ---
# --- shared: normalisers and targets ---
class Normaliser(nn.Module):  # a part of the policy, so that no checkpoint can lose it
    def __init__(self, dim):
        super().__init__()
        for name, value in (("mean", torch.zeros(dim)), ("var", torch.ones(dim)), ("count", torch.tensor(1e-4))):
            self.register_buffer(name, value)

    def update(self, obs):  # (E, O): Chan's parallel variance
        var, mean = torch.var_mean(obs, 0, correction=0)
        total = self.count + len(obs)
        self.var.lerp_(var + (mean - self.mean) ** 2 * self.count / total, len(obs) / total)
        self.mean.lerp_(mean, len(obs) / total)
        self.count.copy_(total)

    def forward(self, obs):
        return ((obs - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10)


def scale_rewards(agent, reward, ended, gamma, return_scale):  # (T, E); RMS of discounted returns -> return_scale
    for r, end in zip(reward, ended, strict=True):
        agent.discounted_return.mul_(gamma).add_(r)
        agent.return_moment += torch.stack([agent.discounted_return.square().sum(), torch.ones_like(r).sum()])
        agent.discounted_return *= ~end
    return reward * return_scale / (agent.return_moment[0] / agent.return_moment[1]).sqrt().clamp(min=1e-8)


def td_lambda_targets(reward, value, terminated, cut, gamma, td_lambda):
    """Eq. (17), (18), (T, E) each: value is Q at the true next observation, cut the end of an episode."""
    targets = [value[-1]]
    fixed = reward + gamma * torch.where(cut, ~terminated * value, (1 - td_lambda) * value)
    for x, carry in zip(fixed.flip(0), (gamma * td_lambda * ~cut).flip(0), strict=True):
        targets.append(torch.addcmul(x, carry, targets[-1]))
    return torch.stack(targets[:0:-1])


# --- end shared ---
# --- shared: critic ---
class Critic(nn.Module):  # REPPO's: Q(s, a) as a distribution over bins, and a predictor of the next step's features
    def __init__(self, critic_start, obs_dim, action_dim, H, num_bins, vmin, vmax, hl_sigma):
        super().__init__()
        width = (vmax - vmin) / (num_bins - 1)
        self.critic_start, self.sigma = critic_start, hl_sigma * width
        self.register_buffer("centres", torch.linspace(vmin, vmax, num_bins), False)
        self.register_buffer("edges", torch.linspace(vmin - width / 2, vmax + width / 2, num_bins + 1), False)
        io = ((obs_dim - critic_start + action_dim, H), (H, num_bins), (H, H))
        nets = [nn.Sequential(nn.SiLU(), nn.Linear(i, H), nn.LayerNorm(H), nn.SiLU(), nn.Linear(H, o)) for i, o in io]
        self.encoder, self.head, self.predictor = nets[0][1:], nets[1], nets[2]  # raw inputs need no activation
        self.head[-1].weight.data *= 0.01  # start at Q = 0, not at the middle of the range
        self.head[-1].bias.data = 40 * hl_gauss(torch.zeros(1), self.edges, self.sigma)[0]

    def features(self, obs, action):
        return self.encoder(torch.cat([obs[:, self.critic_start :], action], -1))

    def value(self, features):
        return self.head(features).softmax(-1) @ self.centres


def hl_gauss(target, edges, sigma):  # (B,) -> mass of Normal(target, sigma) in each bin (B, bins), renormalised
    target = target.clamp((edges[0] + edges[1]) / 2, (edges[-1] + edges[-2]) / 2)
    cdf = torch.erf((edges - target[:, None]) / (sigma * math.sqrt(2)))
    return (cdf[:, 1:] - cdf[:, :-1]) / (cdf[:, -1:] - cdf[:, :1])


def critic_loss(critic, obs, action, target, next_features, weight, aux_coef):
    """Cross-entropy to the HL-Gauss target, and the auxiliary prediction; weight (B,) sums to one."""
    features = critic.features(obs, action)
    log_probs = critic.head(features).log_softmax(-1)
    fit = -((hl_gauss(target, critic.edges, critic.sigma) * log_probs).sum(-1) * weight).sum()
    aux = ((critic.predictor(features) - next_features).square().mean(-1) * weight).sum()
    return fit + aux_coef * aux, fit, aux


# --- end shared ---
# --- shared: REPPO ---
class GaussianPolicy(nn.Module):  # mean and standard deviation of the action before the tanh
    def __init__(self, obs_dim, actor_dim, action_dim, hidden):
        super().__init__()
        self.actor_dim, self.action_dim = actor_dim, action_dim
        self.normaliser = Normaliser(obs_dim)
        self.first = nn.Linear(actor_dim, hidden)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden)) for _ in range(2))
        self.out = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 2 * action_dim))
        nn.init.zeros_(self.out[1].weight)
        nn.init.zeros_(self.out[1].bias)

    def noise(self, batch, rng):
        return torch.randn(batch, self.action_dim, generator=rng, device=rng.device)

    def forward(self, obs):  # (B, O) -> (B, 2 A): mean and logarithm of the standard deviation
        z = F.gelu(self.first(obs[:, : self.actor_dim]))
        for block in self.blocks:
            z = z + F.gelu(block(z))
        return self.out(z)


class Agent(nn.Module):  # all that training changes, in one state_dict
    def __init__(self, envs, args):
        super().__init__()
        obs_dim, A, H = envs.obs.shape[1], envs.action_dim, args.hidden_size
        self.policy = GaussianPolicy(obs_dim, envs.actor_dim, A, H)
        self.critic = Critic(envs.critic_start, obs_dim, A, H, args.num_bins, args.vmin, args.vmax, args.hl_sigma)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha_init)))
        self.log_lambda = nn.Parameter(torch.tensor(math.log(args.lambda_init)))
        self.register_buffer("discounted_return", torch.zeros(args.num_envs))
        self.register_buffer("return_moment", torch.zeros(2))  # sum of its squares, count

    def optimisers(self, args):  # of policy and duals, of the critic
        parameters = [*self.policy.parameters(), self.log_alpha, self.log_lambda], [*self.critic.parameters()]
        return [torch.optim.Adam(p, args.learning_rate, fused=True) for p in parameters]


def sample_action(policy, obs, noise):
    """noise (B, A) -> action (B, A), entropy (B,), mean and log standard deviation (B, 2 A). The entropy is that of the
    Gaussian, in closed form, plus the tanh's volume change at the sample: its mean is the policy's entropy."""
    gaussian = policy(obs)
    mean, log_std = gaussian.chunk(2, -1)
    x = mean + log_std.exp() * noise
    log_jacobian = 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh^2 x)
    return x.tanh(), (log_std + 0.5 * math.log(2 * math.pi * math.e) + log_jacobian).sum(-1), gaussian


def gaussian_kl(policy, obs, old):  # KL(old || new) before the tanh, which does not change it; old (B, 2 A) -> (B,)
    (mean, log_std), (old_mean, old_log_std) = policy(obs).chunk(2, -1), old.chunk(2, -1)
    log_ratio = 2 * (old_log_std - log_std)  # of the variances
    return 0.5 * (log_ratio.expm1() - log_ratio + ((mean - old_mean) / log_std.exp()).square()).sum(-1)


def actor_loss(agent, obs, old, noise, weight, args):
    """Split objective, Eq. (19): states inside the trust region improve, the others return to the old policy.
    -> loss, KL, entropy, weight of the improving states"""
    kl = gaussian_kl(agent.policy, obs, old)
    inside, every = kl <= args.kl_bound, torch.ones_like(kl, dtype=torch.bool)
    improve, pull = dict(split=(inside, ~inside), penalty=(every, every), none=(every, ~every))[args.trust_region]
    action, entropy, _ = sample_action(agent.policy, obs, noise)
    q = agent.critic.value(agent.critic.features(obs, action))
    h = -q - agent.log_alpha.detach().exp() * entropy  # Eq. (20)
    loss = (h * weight * improve).sum() + agent.log_lambda.detach().exp() * (kl * weight * pull).sum()
    return loss, kl.detach(), entropy.detach(), weight * improve


def dual_loss(agent, entropy, kl, weight, args):
    """Eq. (21): alpha grows while the entropy is below its target; Eq. (22): lambda while the KL is above its bound."""
    gap = ((entropy - args.entropy_target * agent.policy.action_dim) * weight).sum()
    excess = ((kl - args.kl_bound) * weight).sum() * (args.trust_region != "none")
    return agent.log_alpha.exp() * gap - agent.log_lambda.exp() * excess


@torch.no_grad()
def rollout(agent, envs, obs, args, rng, lap):  # -> dict of (T, E, ...) with the old policy for the trust region, obs
    policy, rows = agent.policy, []
    for _ in range(args.num_steps):
        policy.normaliser.update(obs)
        x = policy.normaliser(obs)  # stored normalised: the old and the new policy see the same input
        action, _, gaussian = sample_action(policy, x, policy.noise(len(x), rng))
        lap("act")
        obs, reward, *ends, final_obs = envs.step(action)
        rows.append((x, action, gaussian, reward, *ends, envs.valid, policy.normaliser(final_obs)))
        lap("env")
    names = "obs action gaussian reward terminated truncated valid next_obs".split()
    return dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True)), obs


@torch.no_grad()
def compute_targets(agent, data, args, rng):
    """Soft TD(lambda) targets, Eq. (13), once per rollout, with its own policy and critic. -> dict of (T * E, ...)"""
    policy, critic, (T, E), chunks = agent.policy, agent.critic, data["reward"].shape, []
    for x in data["next_obs"].flatten(0, 1).split(8192):
        action, entropy, _ = sample_action(policy, x, policy.noise(len(x), rng))
        features = critic.features(x, action)
        chunks.append((features, critic.value(features), entropy))
    features, value, entropy = map(torch.cat, zip(*chunks, strict=True))
    reward, terminated, cut = data["reward"], data["terminated"], data["terminated"] | data["truncated"]
    if args.normalise_reward:
        reward = scale_rewards(agent, reward, cut, args.gamma, args.return_scale)
    soft_reward = reward + args.gamma * ~terminated * agent.log_alpha.exp() * entropy.view(T, E)
    cut[:-1] |= ~data["valid"][1:]  # no trace runs into a dropped step
    flat = {k: data[k].flatten(0, 1) for k in ("obs", "action", "gaussian", "valid")}
    target = td_lambda_targets(soft_reward, value.view(T, E), terminated, cut, args.gamma, args.td_lambda)
    flat["target"], flat["next_features"] = target.flatten(), features
    return flat


def update(agent, optimisers, data, args, rng, lap, progress):
    """Epochs of minibatches: a critic step, then a step of policy and duals. -> means of the metrics, on the device"""
    (actor_optimiser, critic_optimiser), policy, critic, history = optimisers, agent.policy, agent.critic, []
    actor_optimiser.param_groups[0]["lr"] = args.actor_learning_rate * (1 - args.anneal * progress)
    size = len(data["target"])
    for epoch in range(args.update_epochs):
        order = torch.randperm(size, generator=rng, device=rng.device)
        for i, index in enumerate(order.split(size // args.num_minibatches), epoch * args.num_minibatches + 1):
            obs, action, gaussian, valid, target, next_features = (x[index] for x in data.values())
            weight = valid / valid.sum().clamp(min=1)  # (B,), zero for dropped steps
            loss, fit, aux = critic_loss(critic, obs, action, target, next_features, weight, args.aux_coef)
            critic_optimiser.zero_grad()
            loss.backward()
            critic_norm = nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
            critic_optimiser.step()
            lap("critic")
            if i % min(args.policy_delay, args.update_epochs * args.num_minibatches):
                continue
            noise = policy.noise(len(index), rng)
            actor, kl, entropy, inside = actor_loss(agent, obs, gaussian, noise, weight, args)
            loss = actor + dual_loss(agent, entropy, kl, weight, args)
            actor_optimiser.zero_grad()
            loss.backward(inputs=actor_optimiser.param_groups[0]["params"])  # the critic's parameters get no gradient
            actor_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            actor_optimiser.step()
            policy_means = (kl * weight).sum(), inside.sum(), (entropy * weight).sum()
            history.append(torch.stack([fit, aux, critic_norm, actor, actor_norm, *policy_means]).detach())
            lap("actor")
    names = "losses/critic losses/auxiliary losses/critic_grad_norm losses/actor losses/actor_grad_norm policy/kl"
    names += " policy/inside policy/entropy losses/target losses/clipped_targets"
    clipped = (data["target"] != data["target"].clamp(args.vmin, args.vmax)).float().mean()
    metrics = dict(zip(names.split(), [*torch.stack(history).mean(0), data["target"].mean(), clipped], strict=True))
    return metrics | {"policy/alpha": agent.log_alpha.exp(), "policy/lambda": agent.log_lambda.exp()}


def act(agent, obs, sampler, args, rng):  # at evaluation; obs are normalised
    policy, critic, K = agent.policy, agent.critic, args.eval_best_of if sampler == "best-of-k" else 1
    noise, obs = policy.noise(len(obs) * K, rng), obs.repeat_interleave(K, 0)
    if sampler == "mean":
        return policy(obs).chunk(2, -1)[0].tanh()
    action = sample_action(policy, obs, noise)[0]
    best = critic.value(critic.features(obs, action)).view(-1, K).argmax(1, keepdim=True)  # (E, 1)
    return action.view(len(best), K, -1).take_along_dim(best[:, :, None], 1)[:, 0]


# --- end shared ---
# --- shared: evaluation and run ---
def stop(sentence, code=2):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(code)


@torch.no_grad()
def evaluate(agent, envs, sampler, args, watch=lambda: None):  # first episode of each env -> METRICS (3, E)
    rng, obs, first = torch.Generator(envs.device).manual_seed(args.seed), envs.reset(), {}
    while len(first) < envs.num_envs and envs.episode_length.max() < 10_000:  # or an env without end would run for ever
        watch()
        obs, *_ = envs.step(act(agent, agent.policy.normaliser(obs), sampler, args, rng))
        while envs.finished:
            first = {i: episode for i, *episode in envs.finished.pop(0).tolist() if i >= 0} | first
    return np.array([first.get(env, episode) for env, *episode in envs.stats().tolist()]).T


def report(agent, make_envs, args, run_dir, device):  # all samplers on the same seeds, and the video
    table, name = {}, f"eval_{Path(args.evaluate).stem}.json" if args.evaluate else "eval.json"
    print(f"\n{args.eval_episodes} episodes each{'return':>14}{'std':>9}{'min':>9}{'max':>9}")
    for sampler in SAMPLERS:
        x, *others = evaluate(agent, make_envs(), sampler, args)
        means = {k: None if np.isnan(v).any() else v.mean() for k, v in zip(METRICS[1:], others, strict=True)}
        table[sampler] = dict(mean=x.mean(), std=x.std(), returns=x.tolist()) | means
        success = "".join(f"   {k} {v:.2f}" for k, v in means.items() if v is not None and "success" in k)
        print(f"{sampler:<16}{x.mean():>14.1f}{x.std():>9.1f}{x.min():>9.1f}{x.max():>9.1f}{success}")
    (run_dir / "eval.tmp").write_text(json.dumps(table, indent=1))
    os.replace(run_dir / "eval.tmp", run_dir / name)  # its presence says that the run is finished
    try:
        if args.capture_video:
            envs, frames = VecEnv(RENDERER, args.env_id, 1, args.seed, device, render_mode="rgb_array"), []
            evaluate(agent, envs, args.eval_sampler, args, lambda: frames.append(np.uint8(envs.env.render()[0])))
            first, *others = map(importlib.import_module("PIL.Image").fromarray, frames[:: len(frames) // 250 + 1])
            first.save(run_dir / "video.gif", save_all=True, append_images=others, duration=50, loop=0)
    except Exception as e:  # a video must not cost the user a finished run
        print(f"no video: {RENDERER}, which draws them, cannot render {args.env_id} here: {e}")
    print(f"saved in {run_dir}: {', '.join(sorted(p.name for p in run_dir.iterdir()))}")


def parse(argv):  # -> args, checkpoint or None; --resume and --evaluate start from the checkpoint's settings
    args = tyro.cli(Args, args=argv, description=__doc__)
    if not (given := args.resume or args.evaluate):
        return args, None
    path = Path(given, "checkpoint.pt" if Path(given).is_dir() else "")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        script, before = saved["script"], saved["args"]
    except Exception as e:
        stop(f"{path} is missing, damaged or not a checkpoint of ours ({type(e).__name__})")
    if script != SCRIPT or set(before) != set(vars(args)):
        stop(f"{path} was written by {script}.py or by another version of this script")
    fresh = dict(resume=None, evaluate=None, track=False, capture_video=False, device="auto", compile=False)
    args = tyro.cli(Args, args=argv, default=Args(**before | fresh))
    for k, v in vars(args).items():
        if v != before[k] and k not in {*fresh, "total_timesteps", "torch_threads"} and not k.startswith("eval_"):
            stop(f"the checkpoint was made with {k} {before[k]} and cannot go on with {v}")
    return args, saved | dict(folder=path.parent)


class RunLog:  # metrics.csv with a row an iteration, a progress line, curve.png and, on demand, wandb
    def __init__(self, run_dir, args, step, total, suite, device):
        self.path, self.args, self.total, self.last = run_dir / "metrics.csv", args, total, {}
        git = subprocess.getoutput(f"git -C '{Path(__file__).parent}' rev-parse HEAD 2>/dev/null")
        about = dict(suite=suite, device=str(device), git=git or None, python=sys.version.split()[0])
        names = "torch numpy gymnasium envpool mujoco mani-skill playground mujoco-mjx jax".split()
        about |= {k: d.version for d in importlib.metadata.distributions() if (k := d.name.replace("_", "-")) in names}
        try:
            wandb = importlib.import_module("wandb") if args.track else None
            run_dir.mkdir(parents=True, exist_ok=True)
            if not args.resume and (run_dir / "checkpoint.pt").exists():
                raise FileExistsError(17, "it already holds one, which --resume goes on with")
            (run_dir / "args.json").write_text(json.dumps(vars(args) | about, indent=1))
        except (OSError, ImportError) as e:
            stop(f"cannot start a run in {run_dir}: {getattr(e, 'strerror', e)}")
        print(f"run folder: {run_dir}")
        rows = self.path.read_text().splitlines(True) if step and self.path.exists() else []
        kept = [r for r in rows[1:] if r.endswith("\n") and int(r.split(",")[0]) <= step]  # later ones will come again
        self.path.write_text("".join(rows[:1] + kept))
        self.wandb = wandb and wandb.init(name=run_dir.name, config=vars(args), dir=str(run_dir), resume="auto")

    def add(self, row):
        known = {k: v for k, v in row.items() if v is not None and v == v}
        with self.path.open("a") as f:
            f.write(("" if f.tell() else ",".join(row) + "\n") + ",".join(str(known.get(k, "")) for k in row) + "\n")
        if self.wandb:
            self.wandb.log(known, step=row["global_step"])
        self.last, step, speed = self.last | known, row["global_step"], row["charts/sps"]
        width = os.get_terminal_size().columns - 1 if sys.stdout.isatty() else 0
        if width or "eval/return" in known:
            last = [f"{self.last[k]:.1f}" if k in self.last else "-" for k in ("charts/episode_return", "eval/return")]
            text = f"[{'#' * (20 * step // self.total):.<20}] {step:,}/{self.total:,}  return {last[0]}"
            text += f"  eval {last[1]}  " + PROGRESS.format_map(vars(self.args) | row)
            text += f"  {speed:,.0f} steps/s  {(self.total - step) / speed / 60:.1f} min left"
            print(f"\r{text[:width]}\033[K" if width else text, end="" if width else "\n", flush=True)
        if "eval/return" in known:  # a new point for curve.png
            figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
            axis, (names, *rows) = figure.subplots(), [r.split(",") for r in self.path.read_text().splitlines()]
            for i, style in ((names.index("charts/episode_return"), "-"), (names.index("eval/return"), "o-")):
                points = np.array([(r[0], r[i]) for r in rows if r[i]], float).reshape(-1, 2)
                axis.plot(*points.T, style, ms=4, label=names[i])
            axis.set(title=f"{self.args.env_id}, {SCRIPT}, seed {self.args.seed}", xlabel="env steps", ylabel="return")
            axis.legend(frameon=False)
            figure.savefig(self.path.with_name("curve.png"), dpi=110)


def resolve(args, suite, device):  # fill in what was left open, say what and why, refuse what cannot work
    sizes = dict(zip(SIZED, SIZES.get((device.type, suite), SIZES[device.type]), strict=True))
    print(f"{args.env_id} by {args.backend}, {args.torch_threads} CPU thread(s); settings not given by flag:")
    for reason, table in ((suite, SUITES[suite]), (f"device {device}", sizes)):
        chosen = {k: v for k, v in table.items() if getattr(args, k) is None}
        args = dataclasses.replace(args, **chosen)
        print(f"  by {reason}: " + (", ".join(f"{k} {v}" for k, v in chosen.items()) or "none"))
    free = "seed bench anneal vmin vmax gamma td_lambda gae_lambda aux_coef entropy_coef entropy_target".split()
    low = [k for k, v in vars(args).items() if type(v) in (int, float) and v <= 0 and k not in free]
    wrong = getattr(args, "vmin", 0) >= getattr(args, "vmax", 1) or getattr(args, "num_bins", 2) < 2
    if low or wrong or getattr(args, "anneal", 0) > 1:
        stop(f"{low[0]} must be positive" if low else "vmin must be below vmax, num_bins above 1, anneal at most 1")
    if (batch := args.num_envs * args.num_steps) % args.num_minibatches or args.total_timesteps < batch:
        stop(f"num_envs * num_steps = {batch} must be a multiple of num_minibatches and at most total_timesteps")
    return args


def main(argv=None):
    args, saved = parse(argv)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        stop(f"--device {args.device}: torch sees no CUDA device here")
    torch.set_num_threads(args.torch_threads)
    args.backend, suite = choose_backend(args, device)
    args = resolve(args, suite, device)
    name = "-playground" * (args.backend == "playground") + f"__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = saved["folder"] if saved else Path(args.run_dir or f"runs/{re.sub('[/:]', '_', args.env_id)}{name}")

    def make_envs(resets=None, num_envs=args.eval_episodes, seed=args.seed * 10_007 + 5_000, stagger=0):
        return VecEnv(args.backend, args.env_id, num_envs, seed % 2**30, device, args.torch_threads, resets, stagger)

    torch.manual_seed(args.seed)
    rng = torch.Generator(device).manual_seed(args.seed)
    resets = [np.array(r) for r in saved["resets"]] if args.resume else [None, None]
    envs = make_envs(resets[0], 1 if args.evaluate else args.num_envs, args.seed * 10_007, args.num_steps)
    agent = Agent(envs, args).to(device)
    optimisers = agent.optimisers(args)
    obs, step, best, elapsed, signals = torch.as_tensor(envs.obs, device=device), 0, -math.inf, 0.0, []
    if saved:
        if {k: v.shape for k, v in saved["agent"].items()} != {k: v.shape for k, v in agent.state_dict().items()}:
            stop(f"the checkpoint does not fit {args.env_id}: its observations or actions have other shapes now")
        agent.load_state_dict(saved["agent"])
        for optimiser, state in zip(optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        step, best, elapsed, envs.nonfinite = (saved[k] for k in ("step", "best", "elapsed", "nonfinite"))
        if saved["rng"].shape == rng.get_state().shape:  # another kind of device goes on with a stream of its own
            rng.set_state(saved["rng"])
    if args.compile:  # the one place where functions are compiled
        globals().update({hot: torch.compile(globals()[hot]) for hot in HOT})
    batch, seconds, clock = args.num_envs * args.num_steps, {}, [0.0]  # seconds of each phase
    iterations = 0 if args.evaluate else args.bench + 3 if args.bench else args.total_timesteps // batch
    grid = {round(i) for i in np.linspace(0, iterations, args.eval_points + 1)[1:]}

    def lap(phase):
        if args.bench and device.type == "cuda":
            torch.cuda.synchronize()
        clock.append(time.perf_counter())
        seconds[phase] = seconds.get(phase, 0.0) + clock[-1] - clock.pop(0)

    def save(filename):  # written beside and moved into place: a kill at any moment leaves the old file or the new one
        state = dict(script=SCRIPT, args=vars(args), agent=agent.state_dict(), rng=rng.get_state(), step=step)
        state |= dict(optimisers=[o.state_dict() for o in optimisers], best=best, elapsed=elapsed)
        state |= dict(nonfinite=int(envs.nonfinite), resets=[envs.resets.tolist(), eval_envs.resets.tolist()])
        torch.save(state, run_dir / f"{filename}.tmp")
        os.replace(run_dir / f"{filename}.tmp", run_dir / filename)

    if not (args.bench or args.evaluate):
        log, eval_envs = RunLog(run_dir, args, step, iterations * batch, suite, device), make_envs(resets[1])
        save("checkpoint.pt")
        for number in (signal.SIGTERM, signal.SIGINT):  # end after this iteration; a second signal ends at once
            signal.signal(number, lambda n, _: signals.append(n) or signal.signal(n, signal.SIG_DFL))
    for iteration in range(step // batch + 1, iterations + 1):
        if not args.bench or iteration == 4:  # a bench adds up, after three iterations of warm-up
            seconds.clear()
        clock[0] = time.perf_counter()
        data, obs = rollout(agent, envs, obs, args, rng, lap)
        data = compute_targets(agent, data, args, rng)
        lap("targets")
        metrics = update(agent, optimisers, data, args, rng, lap, step / batch / iterations)
        if args.bench:
            continue
        metrics["finite"] = torch.stack([p.isfinite().all() for p in agent.parameters()]).all()
        metrics = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))  # the only transfer
        lap([*seconds][-1])  # a GPU's remaining work belongs to the last phase
        step, episodes = step + batch, [e for block in envs.finished for i, *e in block.tolist() if i >= 0]
        envs.finished.clear()
        if not metrics.pop("finite"):
            stop(f"non-finite parameters after step {step}; the last good checkpoint is {run_dir / 'checkpoint.pt'}", 1)
        row = {"global_step": step, "time/elapsed": 0.0, "charts/sps": batch / sum(seconds.values())}
        row |= {f"charts/episode_{k}": np.mean([e[i] for e in episodes] or np.nan) for i, k in enumerate(METRICS)}
        row |= {"charts/nonfinite": int(envs.nonfinite)} | {f"eval/{k}": None for k in METRICS} | metrics
        if iteration in grid:
            means = evaluate(agent, eval_envs, args.eval_sampler, args).mean(1).tolist()
            row |= {f"eval/{k}": v for k, v in zip(METRICS, means, strict=True)}
        lap("eval")
        row |= {f"time/{k}": v for k, v in seconds.items()}
        row["time/elapsed"] = elapsed = elapsed + sum(seconds.values())
        log.add(row)
        if iteration in grid and (share := metrics.get("losses/clipped_targets", 0)) > 0.05:
            print(f"\nwarning: {share:.0%} of the targets are clipped to [{args.vmin:g}, {args.vmax:g}]: widen it")
        if iteration in grid and row["eval/return"] > best:
            best = row["eval/return"]
            save("best.pt")
        if iteration in grid or signals:
            save("checkpoint.pt")
        if signals:
            print(f"\nstopped by {signal.Signals(signals[0]).name}; go on with --resume {run_dir}")
            raise SystemExit(128 + signals[0])

    if not args.bench:
        return report(agent, make_envs, args, run_dir, device)
    print(f"{args.bench * batch / sum(seconds.values()):.0f} steps/s")
    for phase, x in seconds.items():
        print(f"  {phase:<10}{x / args.bench * 1000:>9.1f} ms{x / sum(seconds.values()):>8.1%}")


if __name__ == "__main__":
    main()
# --- end shared ---
