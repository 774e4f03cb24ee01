"""PPO for massively parallel simulation, in the manner of rsl_rl, and Simple Policy Optimization, in one file.

A Gaussian policy is improved on its own rollout by the likelihood ratio r of new to old policy, times the advantage:
PPO stops where r leaves [1 - eps, 1 + eps], SPO (--objective spo) adds a quadratic penalty whose best r is
1 + eps * sign(advantage). The value function gives generalised advantage estimates. The step size follows the measured
KL to the rollout policy. Schulman et al., 2017; Rudin et al., 2022 (rsl_rl); Xie et al., 2025 (SPO).

    python ppo_continuous.py                                  # CheetahRun-v1; small on a CPU, large on CUDA
    python ppo_continuous.py --env-id my_package:MyEnv-v0     # or --resume runs/FOLDER, --evaluate FILE.pt, --bench 10

Departures from rsl_rl: time-outs bootstrap from the value of the true final observation, not of the one before; rewards
are scaled so that discounted returns have a root mean square of one, which the clipping of values by eps assumes; first
episodes are staggered; on CUDA an entropy weight of 0.001 and 32 minibatches, as 4 leave few steps per rollout; on
a CPU few envs, small minibatches, three epochs and a step size that falls linearly, which learns CheetahRun-v1 faster.
SPO on CUDA keeps its step size, as its authors do. Actions are not squashed: the env clips them.
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
    hidden_size: int | None = None  # width of the three layers of policy and value function (H)
    gamma: float | None = None  # discount factor
    normalise_reward: bool | None = None  # scale rewards so that discounted returns have RMS --return-scale
    return_scale: float = 1.0  # see --normalise-reward
    gae_lambda: float = 0.95  # trace parameter of the advantages
    objective: Literal["ppo", "spo"] = "ppo"  # clipped ratio | quadratic penalty on the ratio
    clip_coef: float = 0.2  # eps: how far the ratio may move, and the value, where --clip-value is on
    clip_value: bool = True  # keep new values within eps of the old ones
    value_coef: float = 1.0  # weight of the value loss
    entropy_coef: float | None = None  # weight of the entropy bonus
    init_std: float = 1.0  # initial standard deviation of the policy, the same in all states
    learning_rate: float | None = None  # Adam's step size, or its start
    schedule: Literal["auto", "adaptive", "linear", "fixed"] | None = None  # by KL | to zero | auto: by KL, SPO fixed
    desired_kl: float | None = None  # an adaptive step size shrinks above twice this KL and grows below half of it
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    eval_points: int = 20  # evaluations during training, evenly spaced; each one also saves a checkpoint
    eval_episodes: int = 16  # episodes per evaluation, in envs of their own
    eval_sampler: Literal["mean", "sample"] = "mean"  # the mean action, the policy itself
    torch_threads: int = 1  # CPU threads of torch and EnvPool; 1 lets runs share a machine, with CUDA take all cores
    compile: bool = False  # torch.compile the hot functions


SUITES = {suite: dict(gamma=0.99, normalise_reward=True) for suite in ("DMC", "HumanoidBench", "other")}
SUITES["humanoid"] = dict(gamma=0.97, normalise_reward=True)
SIZED = "total_timesteps num_envs num_steps num_minibatches update_epochs hidden_size".split()
SIZED += ["entropy_coef", "learning_rate", "desired_kl", "schedule"]
SIZES = {"cuda": (5 * 10**7, 1024, 128, 32, 5, 256, 0.001, 1e-3, 0.01, "auto")}
SIZES["cpu"] = (10**6, 32, 64, 16, 3, 128, 0, 1e-3, 0.01, "linear")  # by KL it learned more slowly, see docs/ppo.md
SAMPLERS, METRICS = ("mean", "sample"), ("return", "length", "success")  # METRICS: of an episode
SCRIPT, RENDERER = Path(__file__).stem, "gymnasium"  # it draws the videos: EnvPool's aborts without OpenGL
HOT = "policy_loss", "td_lambda_targets"  # what --compile compiles
PROGRESS = "KL {policy/kl:.3f}/{desired_kl:g}  std {policy/std:.2g}  step size {policy/learning_rate:.1e}"


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
# --- shared: PPO ---
def mlp(inputs, hidden, outputs, gain):  # three layers; orthogonal weights, the last of a given gain
    sizes, layers = [inputs, hidden, hidden, hidden, outputs], []
    for i, o in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(i, o), nn.ELU()]
        nn.init.orthogonal_(layers[-2].weight, math.sqrt(2) if len(layers) < 8 else gain)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


class GaussianPolicy(nn.Module):  # mean by state, one standard deviation for all states
    def __init__(self, obs_dim, actor_dim, action_dim, hidden, init_std):
        super().__init__()
        self.actor_dim, self.action_dim = actor_dim, action_dim
        self.normaliser = Normaliser(obs_dim)
        self.mean = mlp(actor_dim, hidden, action_dim, 0.01)
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(init_std)))

    def noise(self, batch, rng):
        return torch.randn(batch, self.action_dim, generator=rng, device=rng.device)

    def forward(self, obs):  # (B, O) -> mean (B, A)
        return self.mean(obs[:, : self.actor_dim])


class Agent(nn.Module):  # all that training changes, in one state_dict
    def __init__(self, envs, args):
        super().__init__()
        obs_dim, self.critic_start = envs.obs.shape[1], envs.critic_start
        self.policy = GaussianPolicy(obs_dim, envs.actor_dim, envs.action_dim, args.hidden_size, args.init_std)
        self.critic = mlp(obs_dim - envs.critic_start, args.hidden_size, 1, 1.0)
        self.register_buffer("discounted_return", torch.zeros(args.num_envs))
        self.register_buffer("return_moment", torch.zeros(2))  # sum of its squares, count

    def value(self, obs):  # (..., O) -> (...)
        return self.critic(obs[..., self.critic_start :])[..., 0]

    def optimisers(self, args):  # the step size is a tensor, so that adapting it needs no transfer
        return [torch.optim.Adam(self.parameters(), torch.tensor(args.learning_rate), fused=True)]


def log_prob(action, mean, log_std):  # of a diagonal Gaussian, (B,)
    return (-0.5 * ((action - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_kl(old_mean, old_log_std, mean, log_std):  # KL(old || new), (B,)
    log_ratio = 2 * (old_log_std - log_std)  # of the variances
    return 0.5 * (log_ratio.expm1() - log_ratio + ((mean - old_mean) / log_std.exp()).square()).sum(-1)


def objective(ratio, advantage, eps, kind):  # to be maximised, per sample
    if kind == "spo":  # a parabola in the ratio with its top at 1 + eps * sign(advantage)
        return ratio * advantage - advantage.abs() * (ratio - 1).square() / (2 * eps)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)


def value_loss(value, old_value, target, eps):  # clipped: the worse of the new value and of it kept near the old one
    near = old_value + (value - old_value).clamp(-eps, eps)
    return torch.maximum((value - target).square(), (near - target).square())


def policy_loss(agent, batch, old_log_std, weight, args):  # weight (B,) sums to one -> loss, metrics
    obs, action, advantage, target, old_value, old_mean = batch
    mean, log_std, eps = agent.policy(obs), agent.policy.log_std, args.clip_coef
    ratio = (log_prob(action, mean, log_std) - log_prob(action, old_mean, old_log_std)).exp()
    gain = (objective(ratio, advantage, eps, args.objective) * weight).sum()
    fit = (value_loss(agent.value(obs), old_value, target, eps if args.clip_value else math.inf) * weight).sum()
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    kl = (gaussian_kl(old_mean, old_log_std, mean, log_std) * weight).sum()
    clipped = (((ratio - 1).abs() > eps) * weight).sum()
    loss = -gain + args.value_coef * fit - args.entropy_coef * entropy
    return loss, torch.stack([-gain, fit, kl, clipped, entropy, log_std.exp().mean()]).detach()


def adapted(learning_rate, kl, desired_kl):  # rsl_rl's rule, without a transfer
    factor = torch.where(kl > 2 * desired_kl, 1 / 1.5, torch.where(kl < desired_kl / 2, 1.5, 1.0))
    return (learning_rate * factor).clamp(1e-5, 1e-2)


@torch.no_grad()
def rollout(agent, envs, obs, args, rng, lap):  # -> dict of (T, E, ...), obs
    policy, rows = agent.policy, []
    for _ in range(args.num_steps):
        policy.normaliser.update(obs)
        x = policy.normaliser(obs)  # stored normalised: the old and the new policy see the same input
        mean = policy(x)
        action = mean + policy.log_std.exp() * policy.noise(len(x), rng)
        lap("act")
        obs, reward, *ends, final_obs = envs.step(action)
        rows.append((x, action, mean, reward, *ends, envs.valid, policy.normaliser(final_obs)))
        lap("env")
    names = "obs action mean reward terminated truncated valid next_obs".split()
    return dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True)), obs


@torch.no_grad()
def compute_targets(agent, data, args, rng):
    """TD(lambda) targets; minus the values they are generalised advantage estimates. -> dict of (T * E, ...)"""
    reward, terminated, cut = data["reward"], data["terminated"], data["terminated"] | data["truncated"]
    if args.normalise_reward:
        reward = scale_rewards(agent, reward, cut, args.gamma, args.return_scale)
    cut[:-1] |= ~data["valid"][1:]  # no trace runs into a dropped step
    value, next_value = agent.value(data["obs"]), agent.value(data["next_obs"])  # of the true final observation
    target = td_lambda_targets(reward, next_value, terminated, cut, args.gamma, args.gae_lambda)
    advantage, valid = target - value, data["valid"]
    weight = valid / valid.sum().clamp(min=1)
    advantage = advantage - (advantage * weight).sum()  # normalised once, over the whole rollout
    advantage = advantage / ((advantage.square() * weight).sum().sqrt() + 1e-8)
    found = dict(advantage=advantage, target=target, value=value, mean=data["mean"], valid=valid)
    return {k: v.flatten(0, 1) for k, v in (dict(obs=data["obs"], action=data["action"]) | found).items()}


def update(agent, optimisers, data, args, rng, lap, progress):
    """Epochs of minibatches. -> means of the metrics, on the device"""
    (optimiser,), size, history = optimisers, len(data["target"]), []
    group, old_log_std = optimiser.param_groups[0], agent.policy.log_std.detach().clone()
    schedule = args.schedule if args.schedule != "auto" else dict(ppo="adaptive", spo="fixed")[args.objective]
    if schedule == "linear":
        group["lr"] = torch.tensor(args.learning_rate * (1 - progress))
    for _ in range(args.update_epochs):
        order = torch.randperm(size, generator=rng, device=rng.device)
        for index in order.split(size // args.num_minibatches):
            *batch, valid = (x[index] for x in data.values())
            loss, metrics = policy_loss(agent, batch, old_log_std, valid / valid.sum().clamp(min=1), args)
            if schedule == "adaptive":
                group["lr"] = adapted(group["lr"], metrics[2], args.desired_kl)
            optimiser.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimiser.step()
            history.append(torch.cat([metrics, norm[None]]))
    lap("update")
    names = "losses/policy losses/value policy/kl policy/clipped policy/entropy policy/std losses/grad_norm".split()
    residual, target = data["target"] - data["value"], data["target"]
    metrics = {"losses/target": target.mean(), "losses/explained_variance": 1 - residual.var() / target.var()}
    metrics |= {"policy/learning_rate": group["lr"].to(target)}
    return dict(zip(names, torch.stack(history).mean(0), strict=True)) | metrics


def act(agent, obs, sampler, args, rng):  # at evaluation; obs are normalised
    spread = 0.0 if sampler == "mean" else agent.policy.log_std.exp()
    return agent.policy(obs) + spread * agent.policy.noise(len(obs), rng)


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
