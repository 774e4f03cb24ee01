"""REPPO: relative-entropy pathwise policy optimisation, the Gaussian counterpart of TruDi, in one file.

A tanh-Gaussian policy is improved through the gradient of a critic that was fitted on-policy: no importance weights, no
replay, no target network. Each iteration collects a rollout, computes soft TD(lambda) targets once, fits a categorical
critic, and improves the policy: a state whose KL to the rollout policy is within its bound follows the critic and the
entropy bonus, any other is pulled back. Both multipliers, of entropy and KL, are learned. Voelcker et al., 2025.
Equation numbers are those of the TruDi paper, whose loop this is: `diff reppo_continuous.py trudi_continuous.py` shows
what changes when the Gaussian becomes a diffusion policy.

    python reppo_continuous.py                                # CheetahRun-v1; small on a CPU, paper scale on CUDA
    python reppo_continuous.py --env-id my_package:MyEnv-v0   # or --resume runs/FOLDER, --evaluate FILE.pt, --bench 10

Departures from its authors' code: plain Adam, no decay of the duals; the entropy's Gaussian part in closed form;
the policy's network is TruDi's; rewards outside SUITES are normalised, first episodes staggered; on a CPU, for DMC ids,
lambda starts at 1, a policy step follows every third critic step, gradients are hardly clipped, and step sizes are
larger (see SIZES).
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
    env_id: str = "CheetahRun-v1"  # an id of EnvPool, Playground or Gymnasium, or `module:Id` for your own env
    backend: Literal["auto", "envpool", "gymnasium", "playground"] = "auto"  # auto: the first that has it, see README
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
    return_scale: float = 30.0  # see --normalise-reward, which is on for ids outside SUITES
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
    max_grad_norm: float | None = None  # gradients of policy and critic are clipped to this norm each; 100: hardly ever
    eval_points: int = 20  # evaluations during training, evenly spaced; each one also saves a checkpoint
    eval_episodes: int = 16  # episodes per evaluation, in envs of their own
    eval_sampler: Literal["mean", "sample", "best-of-k"] = "mean"  # tanh(mean), the policy itself, best of K by Q
    eval_best_of: int = 10  # K of the best-of-k sampler
    torch_threads: int = 1  # CPU threads of torch and EnvPool; 1 lets runs share a machine, with CUDA take all cores
    compile: bool = False  # torch.compile the hot functions


SUITES = {"DMC": dict(gamma=0.99, vmin=0.0, vmax=150.0, normalise_reward=False)}  # the paper's
SUITES["humanoid"] = dict(gamma=0.97, vmin=-10.0, vmax=10.0, normalise_reward=False, num_minibatches=16)
SUITES["HumanoidBench"] = dict(gamma=0.99, vmin=-250.0, vmax=250.0, normalise_reward=False, alpha_init=1.0)
SUITES["other"] = dict(gamma=0.99, vmin=-150.0, vmax=150.0, normalise_reward=True)
SIZED = "total_timesteps num_envs num_steps num_minibatches update_epochs hidden_size policy_delay".split()
SIZED += "learning_rate actor_learning_rate anneal lambda_init alpha_init max_grad_norm".split()
SIZES = {"cuda": (5 * 10**7, 1024, 128, 64, 8, 512, 1, 3e-4, 3e-4, 0, 0.01, 0.01, 0.5)}
SIZES["cpu"] = (10**6, 128, 32, 16, 5, 128, 3, 2e-3, 1.2e-3, 1, 1, 0.01, 100)
SIZES["cpu", "other"] = (10**6, 64, 64, 16, 4, 128, 1, 3e-4, 3e-4, 0, 1, 0.01, 0.5)  # that made Pendulum forget
SIZES["cuda", "HumanoidBench"] = (5 * 10**7, 128, 128, 8, 8, 256, 1, 3e-4, 3e-4, 0, 0.01, 1.0, 0.5)
SIZES["cpu", "humanoid"] = (10**6, 32, 128, 16, 4, 128, 2, 2e-3, 1.2e-3, 1, 0.1, 0.01, 0.5)  # G1 takes 80 MB per env
SAMPLERS, METRICS = ("mean", "sample", "best-of-k"), ("return", "length", "success")  # METRICS: of an episode
SCRIPT, RENDERER = Path(__file__).stem, "gymnasium"  # it draws the videos: EnvPool's aborts without OpenGL
HOT = "sample_action", "gaussian_kl", "td_lambda_targets", "critic_loss"  # what --compile compiles
PROGRESS = "KL {policy/kl:.3f}/{kl_bound:g}  alpha {policy/alpha:.2g}  lambda {policy/lambda:.2g}"


# --- shared: environments ---
def choose_backend(args, device):  # -> backend, suite; refuses what cannot be trained
    env_id, backend, known, tasks, hint = args.env_id, args.backend, [], {}, ""
    try:
        if backend == "playground" or (backend, device.type) == ("auto", "cuda"):
            tasks = importlib.import_module("playground_env").TASKS  # MuJoCo Playground's ids, and their suites
    except ImportError as e:
        hint = f" ({e}: pip install -r requirements-playground.txt, playground_env.py beside this script)"
    if env_id in tasks:
        return "playground", tasks[env_id]
    try:
        known = (envpool := importlib.import_module("envpool")).list_all_envs()
    except ImportError:
        hint += " (EnvPool is missing: pip install envpool==1.2.5)"
    spec = envpool.make_spec(env_id) if env_id in known and backend != "playground" else None
    family = type(spec).__name__  # such as DmcCheetahEnvSpec
    backend = {"auto": "envpool" if re.match("Dmc|Gym(?!n)|Playground", family) else "gymnasium"}.get(backend, backend)
    try:
        sys.path.insert(0, os.getcwd())  # for the user's own module:Id
        space = gym.make(env_id).action_space if backend == "gymnasium" else spec.gymnasium_action_space
    except Exception as e:  # unknown to the backend, or a missing package
        reason = str(e).rstrip(".") if backend == "gymnasium" else f"{backend} has no {env_id}"
        close = ", ".join(difflib.get_close_matches(env_id, {*known, *tasks, *gym.registry}, 4)) or "none"
        stop(f"cannot make {env_id}: {reason}{hint}; the closest known ids: {close}")
    if not isinstance(space, gym.spaces.Box):
        stop(f"{env_id} has {type(space).__name__} actions; this script needs continuous ones (Box)")
    patterns = {"humanoid": "[GT]1Joystick(Flat|Rough)Terrain", "HumanoidBench": r"\b[hg]1[a-z]*-\w+-v\d"}
    matches = [suite for suite, pattern in patterns.items() if re.search(pattern, env_id)]
    return backend, (matches or ["DMC" if family.startswith("Dmc") and backend == "envpool" else "other"])[0]


class VecEnv:
    """One contract for all backends: obs, reward, terminated, truncated, final_obs = step(action in [-1, 1])
    Where an episode ended, final_obs is its last observation and obs the next one's first; elsewhere they are equal.
    A non-finite step restarts its env, counts in `nonfinite` and clears `valid`, so that nobody trains on it."""

    def __new__(cls, backend, *args, **kwargs):  # MuJoCo Playground has a class of its own, for it lives on the GPU
        other = backend == "playground" and importlib.import_module("playground_env").VecEnv
        return other(backend, *args, **kwargs) if other else super().__new__(cls)

    def __init__(self, backend, env_id, num_envs, seed, device, threads=1, resets=None, stagger=0, **kwargs):
        self.backend, self.num_envs, self.device, self.seed = backend, num_envs, device, seed
        if backend == "envpool":
            make = importlib.import_module("envpool").make_gymnasium
            self.env = make(env_id, num_envs=num_envs, seed=seed, num_threads=threads, **kwargs)
        else:
            self.env = gym.make_vec(env_id, num_envs, "sync", dict(autoreset_mode="Disabled"), **kwargs)
        self.space = space = self.env.single_action_space
        low, high = (np.nan_to_num(x.reshape(-1), posinf=1, neginf=-1) for x in (space.low, space.high))
        self.centre, self.halfwidth, self.action_dim = (high + low) / 2, (high - low) / 2, len(low)
        self.nonfinite, self.finished, self.index = 0, [], np.arange(num_envs)  # finished: `stats` at their ends
        self.resets, self.episode_return, self.episode_length = np.zeros((3, num_envs), int)  # a resume repeats resets
        self.obs = self.reset_where(np.ones(num_envs, bool))  # (E, O)
        while resets is not None and len(resets) == num_envs and (behind := self.resets < resets).any():
            self.obs[behind] = self.reset_where(behind)
        length = (self.env.config if backend == "envpool" else vars(self.env.spec))["max_episode_steps"] or 0
        phase = stagger * (length > 0) * (1 + self.index * (length // max(stagger, 1)) // num_envs)
        self.limit = np.where(phase > 0, phase, np.inf)  # first episodes end apart, or all envs would stay in step

    def flatten(self, obs):  # -> (E, O): the actor sees the columns up to actor_dim, the critic from critic_start on
        parts = {k: v.reshape(len(v), -1) for k, v in (obs if isinstance(obs, dict) else {"state": obs}).items()}
        privileged = [parts.pop("privileged_state")] if "privileged_state" in parts else []
        self.actor_dim = sum(p.shape[1] for p in parts.values())
        self.critic_start = self.actor_dim if privileged else 0
        return np.concatenate([*parts.values(), *privileged], 1, dtype=np.float32)

    def reset_where(self, mask):
        for _ in range(10):
            if self.backend == "envpool":  # at once: its own autoreset would put a dummy step into the data
                obs = self.flatten(self.env.reset(np.flatnonzero(mask).astype(np.int32))[0])
            else:
                obs = self.flatten(self.env.reset(seed=self.seed, options=dict(reset_mask=mask))[0])[mask]
                self.seed = None  # later resets go on with each env's own random stream
            self.resets[mask] += 1
            self.episode_return[mask] = self.episode_length[mask] = 0
            if np.isfinite(obs).all():
                return obs
            self.nonfinite += 1
        stop("the environment keeps resetting to non-finite observations", code=1)

    def reset(self):
        self.obs = self.reset_where(np.ones(self.num_envs, bool))
        return torch.as_tensor(self.obs, device=self.device)

    def stats(self, success=math.nan):  # of the episodes under way -> (E, 4): env, then METRICS
        return np.stack([self.index, self.episode_return, self.episode_length, self.index * 0 + success], 1)

    def step(self, action):
        action = (self.centre + self.halfwidth * action.cpu().numpy().clip(-1, 1)).astype(self.space.dtype)
        obs, reward, terminated, truncated, info = self.env.step(action.reshape(self.num_envs, *self.space.shape))
        obs, reward = self.flatten(obs), reward.astype(np.float32)
        bad = ~(np.isfinite(obs).all(1) & np.isfinite(reward))
        self.nonfinite += int(bad.sum())
        obs[bad], reward[bad] = self.obs[bad], 0
        self.episode_return, self.episode_length = self.episode_return + reward, self.episode_length + 1
        terminated, whole = terminated & ~bad, (terminated | truncated) & ~bad  # whole: it ended by itself
        truncated = truncated | bad | (self.episode_length >= self.limit)
        self.obs, ended, self.valid = obs.copy(), terminated | truncated, torch.as_tensor(~bad, device=self.device)
        if ended.any():
            self.finished.append(self.stats(info.get("success", info.get("is_success", math.nan)))[whole])
            self.obs[ended], self.limit[ended] = self.reset_where(ended), np.inf
        # on a CPU the tensors share the arrays' memory, which is new in every step
        return tuple(torch.as_tensor(x, device=self.device) for x in (self.obs, reward, terminated, truncated, obs))


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
