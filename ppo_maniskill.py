"""PPO on ManiSkill, in the manner of rsl_rl, and Simple Policy Optimization.

A Gaussian policy is improved on its own rollout. The ratio r of the likelihoods of an action under
the new policy and under the rollout policy, times its advantage A, is the gain of an update. It can
be trusted while r is near one. PPO gains nothing more where r leaves [1 - eps, 1 + eps]. SPO
subtracts a parabola, so that its best r is 1 + eps * sign(A).

    likelihood of an action, KL of two policies                     log_prob, gaussian_kl
    PPO: min(r A, clip(r, 1 - eps, 1 + eps) A)                      objective
    SPO: r A - |A| (r - 1)^2 / (2 eps), with --objective spo        objective
    the value function's error, clipped by eps, too                 value_loss
    generalized advantage estimates: TD(lambda) targets - values    compute_targets
    the learning rate follows the KL to the rollout policy          adapt_learning_rate

Usage:
    python ppo_maniskill.py --env-id StackCube-v1
    python ppo_maniskill.py --env-module my_tasks --env-id MyTask-v1   # a task of your own
    python ppo_maniskill.py --resume runs/FOLDER               # go on with an interrupted run
    python ppo_maniskill.py --evaluate runs/FOLDER/best.pt     # evaluate a checkpoint

On a GPU, ManiSkill simulates 1024 robots. Without one, simulators/maniskill_cpu.py simulates 64 on
a CPU, with smaller networks and 1M steps.
In training, success ends an episode. The return of training episodes therefore falls while the
policy learns to succeed sooner: judge a run by eval/success_once and eval/return.

Schulman et al., 2017 (PPO); Rudin et al., 2022 (rsl_rl); Xie et al., 2025 (SPO).
docs/ppo.md lists the departures from rsl_rl.
Blocks marked "shared" are the same text in all scripts that have them.
Shapes: T rollout steps, E environments, B minibatch, O observation, A action, H hidden units.
"""

import contextlib
import csv
import difflib
import importlib
import json
import logging
import math
import os
import re
import signal
import sys
import time
import types
import warnings
import zipfile
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import nn

try:
    from tools import extras  # comfort: progress line, curve.png, signals, wandb, versions, bench
except ImportError:
    extras = None  # a script that was copied alone does without

SCRIPT = Path(__file__).stem
SAMPLERS = ("mean", "sample")
EPISODE_METRICS = ("return", "length", "success_once", "success_at_end")
MAX_EPISODE_STEPS = 10_000  # an environment without an end must not run for ever


# === 1. Settings ===
@dataclass
class Args:
    """The defaults are for a GPU and ManiSkill."""

    # run
    env_id: str = "PushCube-v1"  # id of a ManiSkill task
    env_module: str = ""  # module of your own that registers env_id; it is imported first
    backend: Literal["auto", "physx_cuda", "physx_cpu_batched"] = "auto"  # auto: by the device
    total_timesteps: int = 50_000_000  # environment steps of the whole run
    seed: int = 1  # seed of the networks, the noise and the environments
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes CUDA where it is present
    run_dir: str = ""  # folder to write to; empty: a new one in runs/
    resume: str = ""  # folder of an interrupted run to go on with
    evaluate: str = ""  # checkpoint to evaluate instead of training
    track: bool = False  # log to Weights & Biases, too
    bench: int = 0  # measure so many iterations and write nothing
    # processes that simulate on a CPU; None: a free core and 16 environments each; 0: in this one
    sim_workers: int | None = None
    torch_threads: int = 1  # CPU threads of torch; 1 lets runs share a machine
    compile: bool = False  # torch.compile the hot functions
    cudagraphs: bool = False  # record the steps of acting and learning as CUDA graphs
    tf32: bool = True  # matrix products on CUDA with 10 bits of mantissa, in a fraction of the time

    # rollout and optimization
    num_envs: int = 1024  # parallel environments (E)
    num_steps: int = 128  # steps that each environment takes per iteration (T)
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 5  # passes over each rollout
    learning_rate: float = 1e-3  # Adam's learning rate at the start, see schedule
    # adaptive: by the KL, see desired_kl; linear: to zero; auto: adaptive for PPO, fixed for SPO
    schedule: Literal["auto", "adaptive", "linear", "fixed"] = "auto"
    desired_kl: float = 0.01  # adaptive: the rate falls above twice this KL and grows below half
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm

    # policy
    hidden_size: int = 256  # width of the three layers of policy and value function (H)
    init_std: float = 0.5  # initial standard deviation of the policy, the same in all states
    objective: Literal["ppo", "spo"] = "ppo"  # clipped ratio, or quadratic penalty on the ratio
    clip_coef: float = 0.2  # how far the ratio may move from one (eps)
    entropy_coef: float = 0.001  # weight of the entropy bonus

    # value function
    gamma: float = 0.8  # discount factor, by default that of default_gamma
    gae_lambda: float = 0.95  # trace parameter of the advantages
    clip_value: bool = True  # keep new values within clip_coef of the old ones
    value_coef: float = 1.0  # weight of the value loss
    normalize_reward: bool = True  # scale rewards to returns of return_scale
    return_scale: float = 1.0  # root mean square of scaled, discounted returns

    # evaluation
    eval_points: int = 20  # evaluations and checkpoints during training
    eval_episodes: int = 64  # episodes per evaluation, in environments of their own
    eval_env_id: str = ""  # another task to evaluate on, of the same shapes; empty: env_id
    eval_sampler: Literal["mean", "sample"] = "mean"  # the mean action, or the policy itself


# A CPU takes a fiftieth of the steps, so it needs small rollouts and networks.
CPU_DEFAULTS = dict(
    total_timesteps=1_000_000,
    num_envs=64,
    num_steps=32,
    num_minibatches=8,
    hidden_size=128,
    entropy_coef=0.0,
)
# Smallest and largest values; all other numbers must be positive.
LIMITS = dict(
    seed=(0, 2**63),
    torch_threads=(1, os.cpu_count()),
    sim_workers=(0, 1_000),
    bench=(0, math.inf),
    gamma=(0, 1),
    gae_lambda=(0, 1),
    entropy_coef=(0, math.inf),
    eval_episodes=(1, 100_000),
)
# Settings that --resume and --evaluate may change.
MAY_CHANGE = {"run_dir", "resume", "evaluate", "track", "compile", "device", "torch_threads"}
MAY_CHANGE |= {"backend", "total_timesteps", "cudagraphs", "tf32", "sim_workers"}  # and eval_*


def parse_args(argv=None):
    """Parse twice: task and device decide the defaults, which --help shows.

    -> args, checkpoint to start from or None
    """
    argv = sys.argv[1:] if argv is None else argv
    given = tyro.cli(Args, args=[word for word in argv if word not in ("-h", "--help")])
    device = choose_device(given.device)
    checkpoint = None
    source = given
    backend = given.backend
    if given.resume or given.evaluate:
        checkpoint = load_checkpoint(given)
        source = Args(**checkpoint["args"])
        if backend == "auto" and device == source.device:
            backend = source.backend  # only another device may need another simulation
    import_tasks(source.env_module)
    backend, _ = choose_backend(source.env_id, backend, device)
    if checkpoint and backend != source.backend:
        print(f"simulated by {backend}; the checkpoint was made with {source.backend}")
    if checkpoint:
        defaults = replace(source, run_dir="", resume="", evaluate="", track=False)
        defaults.sim_workers = None  # the machine may have other free cores now
        defaults.cudagraphs = source.cudagraphs and not given.evaluate  # they are for training
    else:
        chosen = CPU_DEFAULTS if device == "cpu" else {}
        defaults = Args(**chosen, gamma=default_gamma(given.env_id))
    defaults = replace(defaults, backend=backend, device=device)
    if extras and {"-h", "--help"} & set(argv):
        extras.print_help(Args, defaults, __doc__)
    args = tyro.cli(Args, args=argv, default=defaults, description=__doc__)
    args.device = device
    if args.backend == "auto":
        args.backend = backend
    if checkpoint:
        for name, before in checkpoint["args"].items():
            now = getattr(args, name)
            may_change = name in MAY_CHANGE or name.startswith("eval_")
            if now != before and not may_change:
                stop(f"the checkpoint was made with {name} {before} and cannot go on with {now}")
    check_args(args)
    return args, checkpoint


def check_args(args):
    """Refuse what cannot work, before anything starts."""
    if extras:
        extras.check_numbers(args, LIMITS)
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches != 0:
        stop(f"num_minibatches must divide num_envs * num_steps = {batch_size}")
    if args.total_timesteps < batch_size:
        stop(f"total_timesteps must be at least num_envs * num_steps = {batch_size}")
    if (args.bench or args.track or args.cudagraphs) and extras is None:
        stop("--bench, --track and --cudagraphs need tools/extras.py beside this script")
    if args.cudagraphs and args.device != "cuda":
        stop("--cudagraphs needs a CUDA device")
    args.sim_workers = choose_sim_workers(args)


# === 2. Environments: ManiSkill on a GPU, or in a batch on a CPU ===
# --- shared: ManiSkill environments ---
def import_tasks(env_module):
    """Register ManiSkill's tasks, and those of the user's own module."""
    warnings.filterwarnings("ignore", "Failed to find system libvulkan")  # nothing is rendered
    try:
        import cv2  # noqa: F401
    except ImportError:  # OpenCV wants libGL.so.1, ManiSkill only has a use for it with images
        sys.modules["cv2"] = types.ModuleType("cv2")
    try:
        import mani_skill.envs  # noqa: F401
    except ImportError as error:
        stop(f"cannot import mani_skill ({error}): pip install -r requirements-maniskill.txt")
    logging.getLogger("mani_skill").setLevel("ERROR")  # its hints are for authors of tasks
    if env_module:
        sys.path.insert(0, os.getcwd())
        try:
            importlib.import_module(env_module)
        except ImportError as error:
            stop(f"cannot import {env_module}: {error}")


def choose_backend(env_id, backend, device):
    """Who simulates the task, and the suite that its default settings belong to."""
    from mani_skill.utils.registration import REGISTERED_ENVS

    if env_id not in REGISTERED_ENVS:
        close = ", ".join(difflib.get_close_matches(env_id, REGISTERED_ENVS, 4)) or "none"
        hint = f"the closest known ids: {close}; your own task needs --env-module"
        stop(f"ManiSkill has no {env_id}; {hint}")
    if backend == "auto":
        backend = "physx_cuda" if device == "cuda" else "physx_cpu_batched"
    return backend, "ManiSkill"


def choose_sim_workers(args):
    """How many processes simulate, besides this one. The results do not depend on it."""
    if args.backend != "physx_cpu_batched":
        if args.sim_workers:
            stop(f"--sim-workers is for the simulation on a CPU, not for {args.backend}")
        return 0
    num_processes = int(os.environ.get("WORLD_SIZE", 1))  # of torchrun
    num_envs = args.eval_episodes if args.evaluate else args.num_envs // num_processes
    num_workers = args.sim_workers
    reason = "as --sim-workers says"
    if num_workers is None:
        num_free = extras.free_cores() if extras else 1
        num_workers = min(num_free // num_processes, num_envs // 16)
        reason = f"of {os.cpu_count()} cores {num_free} are free; --sim-workers sets another number"
    if num_workers < 2:
        num_workers = 0  # a single worker would only be waited for
    if int(os.environ.get("RANK", 0)) == 0:
        where = f"in {num_workers} worker processes" if num_workers else "in this process"
        print(f"{num_envs} environments are simulated {where} ({reason})")
    return num_workers


def default_gamma(env_id):
    """1 - 10 / steps of an episode: a value is at most a tenth of its steps."""
    steps = gym.spec(env_id).max_episode_steps or 100
    return 1 - 10 / max(steps, 20)


def reward_mode(env_id):
    """Rewards of at most 1 a step; a few tasks, such as PlugCharger-v1, have a sparse one only."""
    from mani_skill.utils.registration import REGISTERED_ENVS

    modes = REGISTERED_ENVS[env_id].cls.SUPPORTED_REWARD_MODES
    return "normalized_dense" if "normalized_dense" in modes else "sparse"


def make_envs(args, num_envs, seed, **kwargs):
    try:
        return VecEnv(args, num_envs, seed, **kwargs)
    except Exception as error:  # no GPU for the simulation, or a robot without these controls
        if args.env_module:
            raise  # the author of a task needs the traceback
        reason = " ".join(str(error).split()).rstrip(".")
        return stop(f"{args.backend} cannot make {args.env_id}: {reason}")


class VecEnv:
    """obs, reward, terminated, truncated, final_obs = step(action in [-1, 1]), all tensors.

    Where an episode ended, final_obs is its last observation and obs the first of the next one;
    elsewhere they are equal. In training, success ends an episode, but as a time-out does: the
    value beyond it counts, or success would be punished. In evaluation, episodes run to their time
    limit. All stays on the device, and Python waits for it once a step, to see who ended.
    A non-finite step becomes a truncation at the last finite observation, and broken tells where.
    """

    def __init__(self, args, num_envs, seed, training=False, **kwargs):
        self.num_envs = num_envs
        self.device = torch.device(args.device)
        self.training = training
        kwargs = dict(obs_mode="state", control_mode="pd_joint_delta_pos") | kwargs
        kwargs["reward_mode"] = reward_mode(args.env_id)
        if training and kwargs["reward_mode"] == "sparse":
            print(f"{args.env_id} has no dense reward: its sparse one is 1 at success, 0 before")
        self.env = self.make(args, num_envs, kwargs)
        space = self.env.get_wrapper_attr("single_action_space")
        low = torch.tensor(space.low, device=self.device)
        high = torch.tensor(space.high, device=self.device)
        self.action_center = (high + low) / 2
        self.action_halfwidth = (high - low) / 2
        self.action_dim = len(low)
        self.seeds = np.random.default_rng(seed % 2**30)  # of the episodes that reset starts
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=self.device)  # broken steps
        self.finished = []  # episodes that ended since pop_finished, as tensors
        self.episode_return = torch.zeros(num_envs, device=self.device)
        self.episode_length = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.success_once = torch.zeros(num_envs, device=self.device)
        self.obs = self.reset()  # (E, O)
        self.obs_dim = self.obs.shape[1]
        self.actor_dim = self.obs_dim  # policy and critic see the same
        self.critic_start = 0
        self.spaces = {  # for load_policy
            "obs_dim": self.obs_dim,
            "actor_dim": self.actor_dim,
            "critic_start": self.critic_start,
            "action_dim": self.action_dim,
            "obs_shapes": {"state": [self.obs_dim]},
            "action_shape": [self.action_dim],
            "action_low": low.tolist(),
            "action_high": high.tolist(),
        }

    def make(self, args, num_envs, kwargs):
        if args.backend == "physx_cpu_batched":
            try:
                from simulators import maniskill_cpu
            except ImportError as error:
                needed = "simulators/maniskill_cpu.py beside this script"
                stop(f"without CUDA the simulation needs {needed} ({error})")
            workers = dict(num_workers=args.sim_workers or 0, env_module=args.env_module)
            return maniskill_cpu.make_env(args.env_id, num_envs, **workers, **kwargs)
        if "render_mode" not in kwargs:  # states need no renderer, which many servers do not have
            kwargs["render_backend"] = "none"
            with contextlib.suppress(ImportError):
                from simulators import maniskill_cpu

                maniskill_cpu.do_without_renderer()
        env = gym.make(args.env_id, num_envs=num_envs, sim_backend=args.backend, **kwargs)
        if isinstance(env.action_space, gym.spaces.Dict):  # two robots
            from mani_skill.utils.wrappers import FlattenActionSpaceWrapper

            env = FlattenActionSpaceWrapper(env)
        return env

    def to_tensor(self, values):
        return torch.as_tensor(values, device=self.device).float()

    def restart(self, index, seed=None):
        """Start a new episode in some environments. -> observations of all, (E, O)

        Without a seed it draws from the simulation's random streams, on a GPU from torch's own.
        """
        self.episode_return[index] = 0
        self.episode_length[index] = 0
        self.success_once[index] = 0
        options = dict(env_idx=index.to(self.env.unwrapped.device))
        obs, _ = self.env.reset(seed=seed, options=options)
        return self.to_tensor(obs).nan_to_num(posinf=0, neginf=0)

    def reset(self):
        """Start a new episode in all environments, each with a seed of its own. -> (E, O)"""
        self.finished = []
        seed = self.seeds.integers(2**31, size=self.num_envs).tolist()
        self.obs = self.restart(torch.arange(self.num_envs, device=self.device), seed)
        return self.obs

    def step(self, action):
        action = self.action_center + self.action_halfwidth * action.clamp(-1, 1)
        action = action.to(self.env.unwrapped.device)
        obs, reward, terminated, truncated, info = self.env.step(action)
        final_obs = self.to_tensor(obs)
        reward = self.to_tensor(reward)
        success = self.to_tensor(info.get("success", math.nan)).expand(self.num_envs)
        broken = ~(final_obs.isfinite().all(dim=1) & reward.isfinite())
        self.nonfinite += broken.sum()
        final_obs = torch.where(broken[:, None], self.obs, final_obs)
        reward = torch.where(broken, 0, reward)
        self.episode_return += reward
        self.episode_length += 1
        self.success_once = torch.maximum(self.success_once, success)  # nan where it is unknown

        ended = broken | (self.episode_length >= MAX_EPISODE_STEPS)
        ended |= self.to_tensor(truncated).bool()
        if self.training:
            ended |= self.to_tensor(terminated).bool()
        self.obs = final_obs
        index = ended.nonzero()[:, 0]  # the only time that Python waits for the device
        if len(index) > 0:
            # which of several ways was taken, see behavior
            mode = self.to_tensor(info.get("mode", torch.full_like(reward, math.nan)))
            self.finished.append(
                {
                    "env": index,
                    "return": self.episode_return[index],
                    "length": self.episode_length[index],
                    "success_once": self.success_once[index],
                    "success_at_end": success[index],
                    "mode": mode[index],
                    "broken": broken[index],
                }
            )
            self.obs = torch.where(ended[:, None], self.restart(index), final_obs)
        self.broken = broken
        return self.obs, reward, torch.zeros_like(ended), ended, final_obs

    def pop_finished(self):
        """The episodes that ended since the last call, as a list of dicts."""
        episodes = []
        for group in self.finished:
            columns = {name: values.tolist() for name, values in group.items()}
            for i in range(len(columns["env"])):
                episodes.append({name: column[i] for name, column in columns.items()})
        self.finished = []
        return episodes


# --- end shared ---
# --- shared: devices and processes ---
def choose_device(device):
    if device == "cuda" and not torch.cuda.is_available():
        stop("--device cuda: torch sees no CUDA device here")
    if device == "auto" and extras:
        extras.warn_about_gpu()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device


def one_gpu_each(drivers="/proc/driver/nvidia/gpus"):
    """Under torchrun each process sees one GPU, its own. CUDA must not have been asked before."""
    if "LOCAL_RANK" not in os.environ or not os.path.isdir(drivers):
        return
    gpus = [str(i) for i in range(len(os.listdir(drivers)))]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= len(gpus):
        stop(f"process {local_rank} has no GPU: --nproc-per-node can be at most {len(gpus)} here")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]


def join_processes(args):
    """Meet the other processes of torchrun. -> rank of this one, number of them"""
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes == 1:
        return 0, 1
    if args.evaluate or args.cudagraphs:
        stop("--evaluate and --cudagraphs work in one process, without torchrun")
    if args.num_envs % num_processes != 0:
        stop(f"num_envs {args.num_envs} cannot be shared by {num_processes} processes")
    batch_size = args.num_envs * args.num_steps // num_processes
    if batch_size % args.num_minibatches != 0:
        stop(f"num_minibatches must divide the {batch_size} steps of each process")
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=2))  # some wait for an evaluation
    if dist.get_rank() > 0:  # the first process speaks for all, and listens
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return dist.get_rank(), num_processes


def average(tensors):
    """Replace tensors by their means over all processes; in a single process nothing changes."""
    if not dist.is_initialized():
        return
    row = torch.cat([tensor.detach().flatten() for tensor in tensors])
    dist.all_reduce(row)
    row /= dist.get_world_size()
    for tensor, values in zip(tensors, row.split([x.numel() for x in tensors]), strict=True):
        tensor.detach().copy_(values.view_as(tensor))


def gather(tensor):
    """The tensors of all processes, stacked."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return torch.stack(tensors)


def sums(numbers, device):
    """The sums of numbers over all processes."""
    if not dist.is_initialized():
        return numbers
    row = torch.tensor(numbers, device=device)
    dist.all_reduce(row)
    return row.tolist()


# --- end shared ---
# === 3. Networks ===
# --- shared: normalizer ---
class Normalizer(nn.Module):
    """Running mean and variance of the observations, as buffers, so no checkpoint can lose them."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.register_buffer("count", torch.tensor(1e-4))

    def update(self, obs):
        """Merge the moments of a batch (E, O) into the running ones (Chan et al., 1979)."""
        batch_var, batch_mean = torch.var_mean(obs, dim=0, correction=0)
        batch_size = len(obs)
        if dist.is_initialized():  # the moments of the batches of all processes
            means, variances = gather(torch.stack([batch_mean, batch_var])).unbind(dim=1)
            variance_of_means, batch_mean = torch.var_mean(means, dim=0, correction=0)
            batch_var = variances.mean(dim=0) + variance_of_means
            batch_size *= len(means)
        self.count += batch_size
        share = batch_size / self.count
        delta = batch_mean - self.mean
        self.var.lerp_(batch_var + (1 - share) * delta**2, share)
        self.mean.lerp_(batch_mean, share)

    def forward(self, obs):
        return ((obs - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10)


# --- end shared ---
# --- shared: orthogonal layers ---
def orthogonal_layer(inputs, outputs, gain):
    """A layer with orthogonal weights, scaled by gain, and zero biases"""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


# --- end shared ---
# --- shared: PPO ---
def mlp(inputs, hidden, outputs, last_gain):
    """Three hidden layers"""
    layers = []
    for width in (inputs, hidden, hidden):
        layers += [orthogonal_layer(width, hidden, math.sqrt(2)), nn.ELU()]
    return nn.Sequential(*layers, orthogonal_layer(hidden, outputs, last_gain))


class GaussianPolicy(nn.Module):
    """The mean depends on the state, the standard deviation is the same in all states.

    Actions are not squashed: the environment clips them.
    """

    def __init__(self, obs_dim, actor_dim, action_dim, args):
        super().__init__()
        self.actor_dim = actor_dim
        self.action_dim = action_dim
        self.normalizer = Normalizer(obs_dim)
        self.mean = mlp(actor_dim, args.hidden_size, action_dim, last_gain=0.01)
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(args.init_std)))

    def noise(self, batch_size, generator):
        shape = (batch_size, self.action_dim)
        return torch.randn(shape, generator=generator, device=generator.device)

    def forward(self, obs):
        """(B, O) -> mean (B, A)"""
        return self.mean(obs[:, : self.actor_dim])


class Agent(nn.Module):
    """All that training changes, in one state_dict."""

    def __init__(self, envs, args):
        super().__init__()
        self.spaces = envs.spaces
        self.critic_start = envs.critic_start
        self.policy = GaussianPolicy(envs.obs_dim, envs.actor_dim, envs.action_dim, args)
        self.critic = mlp(envs.obs_dim - envs.critic_start, args.hidden_size, 1, last_gain=1.0)
        discounted_return = torch.zeros(args.num_envs)  # see scale_rewards
        self.register_buffer("discounted_return", discounted_return, persistent=False)
        self.register_buffer("squared_return_sum", torch.zeros(()))
        self.register_buffer("return_count", torch.zeros(()))

    def value(self, obs):
        """(..., O) -> (...)"""
        return self.critic(obs[..., self.critic_start :])[..., 0]


# === 4. The loss of policy and value function ===
def log_prob(action, mean, log_std):
    """Log-density of a diagonal Gaussian, (B,)"""
    z = (action - mean) / log_std.exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)


def gaussian_kl(old_mean, old_log_std, mean, log_std):
    """KL(old || new), (B,)"""
    log_variance_ratio = 2 * (old_log_std - log_std)
    squared_distance = ((mean - old_mean) / log_std.exp()).square()
    # expm1: small changes keep their digits, so that float32 gives no negative KL
    return 0.5 * (log_variance_ratio.expm1() - log_variance_ratio + squared_distance).sum(dim=-1)


def objective(ratio, advantage, eps, kind):
    """The gain of each action, (B,), to be maximized"""
    if kind == "spo":
        return ratio * advantage - advantage.abs() * (ratio - 1).square() / (2 * eps)
    return torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)


def value_loss(value, old_value, target, eps):
    """The worse of two squared errors: of the value, and of the value kept within eps of the old"""
    near_value = old_value + (value - old_value).clamp(-eps, eps)
    return torch.maximum((value - target).square(), (near_value - target).square())


def policy_loss(agent, batch, args):
    """The loss of policy and value function together. -> loss, metrics"""
    eps = args.clip_coef
    mean = agent.policy(batch["obs"])
    log_std = agent.policy.log_std
    old_mean = batch["mean"]
    old_log_std = batch["log_std"]
    new_log_prob = log_prob(batch["action"], mean, log_std)
    old_log_prob = log_prob(batch["action"], old_mean, old_log_std)
    ratio = (new_log_prob - old_log_prob).exp()
    gain = objective(ratio, batch["advantage"], eps, args.objective).mean()

    value = agent.value(batch["obs"])
    value_eps = eps if args.clip_value else math.inf
    fit = value_loss(value, batch["value"], batch["target"], value_eps).mean()

    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = -gain + args.value_coef * fit - args.entropy_coef * entropy
    kl = gaussian_kl(old_mean, old_log_std, mean, log_std).mean()
    return loss, {
        "losses/policy": -gain.detach(),
        "losses/value": fit.detach(),
        "policy/kl": kl.detach(),
        "policy/clipped": ((ratio - 1).abs() > eps).to(ratio).mean(),
        "policy/entropy": entropy.detach(),
        "policy/std": log_std.detach().exp().mean(),
    }


def schedule_of(args):
    """auto: PPO adapts its learning rate, as rsl_rl does; SPO keeps it, as its authors do"""
    if args.schedule != "auto":
        return args.schedule
    return "fixed" if args.objective == "spo" else "adaptive"


def anneal(optimizer, share_done, args):
    """The linear schedule: at the end of the run the learning rate is zero"""
    if schedule_of(args) == "linear":
        optimizer.param_groups[0]["lr"].fill_(args.learning_rate * (1 - share_done))


def adapt_learning_rate(optimizer, kl, desired_kl):
    """rsl_rl's rule. All are tensors, so the host need not wait for the KL."""
    factor = torch.where(kl < desired_kl / 2, 1.5, 1.0)
    factor = torch.where(kl > 2 * desired_kl, 1 / 1.5, factor)
    optimizer.param_groups[0]["lr"].mul_(factor).clamp_(1e-5, 1e-2)


# --- end shared ---
# --- shared: advantages ---
def normalize_advantage(advantage, broken):
    """(T, E) -> mean zero and variance one over the steps that are not broken, zero elsewhere"""
    whole = (~broken).to(advantage)
    num_whole = whole.sum()
    total = (advantage * whole).sum()
    average([num_whole, total])
    num_whole.clamp_(min=1)
    centered = (advantage - total / num_whole) * whole
    total_square = centered.square().sum()
    average([total_square])
    return centered / ((total_square / num_whole).sqrt() + 1e-8)


# --- end shared ---
def act(agent, obs, sampler, args, generator):
    """Actions at evaluation: the mean, or a sample of the policy; obs are normalized."""
    mean = agent.policy(obs)
    if sampler == "mean":
        return mean
    return mean + agent.policy.log_std.exp() * agent.policy.noise(len(obs), generator)


# === 5. One iteration: rollout, targets, update ===
def policy_step(agent, args, batch):
    """Update the normalizer and act. batch: obs (E, O), noise. -> what the rollout stores"""
    policy = agent.policy
    policy.normalizer.update(batch["obs"])
    normalized = policy.normalizer(batch["obs"])  # old and new policy must see the same input
    mean = policy(normalized)
    log_std = policy.log_std.expand_as(mean)
    return {
        "obs": normalized,
        "action": mean + log_std.exp() * batch["noise"],
        "mean": mean,  # with log_std it is the policy that the ratio compares with
        "log_std": log_std,
    }


@torch.no_grad()
def rollout(agent, envs, obs, args, generator):
    """Collect T steps with the current policy. -> dict of (T, E, ...), next observation"""
    policy = agent.policy
    steps = []
    for _ in range(args.num_steps):
        batch = {"obs": obs, "noise": policy.noise(len(obs), generator)}
        step = policy_step(agent, args, batch)
        obs, reward, terminated, truncated, final_obs = envs.step(step["action"])
        step["reward"] = reward
        step["terminated"] = terminated
        step["truncated"] = truncated
        step["broken"] = envs.broken
        step["next_obs"] = policy.normalizer(final_obs)
        steps.append(step)
    data = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    return data, obs


# --- shared: targets ---
def td_lambda_targets(reward, next_value, terminated, truncated, gamma, td_lambda):
    """Eq. (17), (18), all (T, E); next_value belongs to the true next observation."""
    targets = torch.empty_like(reward)
    next_target = next_value[-1]  # the rollout's end cuts the trace
    for t in reversed(range(len(reward))):
        mixed = td_lambda * next_target + (1 - td_lambda) * next_value[t]
        future = torch.where(truncated[t], next_value[t], mixed)  # a time-out cuts it, too
        targets[t] = reward[t] + gamma * ~terminated[t] * future
        next_target = targets[t]
    return targets


def scale_rewards(agent, reward, terminated, args):
    """Scale rewards (T, E) so that discounted returns have a root mean square of return_scale.

    A value looks beyond a time-out, and so does its return: it goes on with the next episode.
    """
    for t in range(len(reward)):
        agent.discounted_return.mul_(args.gamma).add_(reward[t])
        agent.squared_return_sum += agent.discounted_return.square().sum()
        agent.return_count += len(agent.discounted_return)
        agent.discounted_return *= ~terminated[t]
    average([agent.squared_return_sum, agent.return_count])
    rms = (agent.squared_return_sum / agent.return_count).sqrt().clamp(min=1e-8)
    return reward * args.return_scale / rms


# --- end shared ---
@torch.no_grad()
def compute_targets(agent, data, args, generator):
    """TD(lambda) targets; minus the values they are generalized advantage estimates.

    -> dict of (T * E, ...): what update needs
    """
    T, E = data["reward"].shape
    reward = data["reward"]
    terminated = data["terminated"]
    truncated = data["truncated"].clone()
    if args.normalize_reward:
        reward = scale_rewards(agent, reward, terminated, args)
    truncated[:-1] |= data["broken"][1:]  # no trace runs into a broken step
    value = agent.value(data["obs"])
    next_value = agent.value(data["next_obs"])
    target = td_lambda_targets(
        reward, next_value, terminated, truncated, args.gamma, args.gae_lambda
    )
    flat = {
        "obs": data["obs"].flatten(0, 1),
        "action": data["action"].flatten(0, 1),
        "mean": data["mean"].flatten(0, 1),
        "log_std": data["log_std"].flatten(0, 1),
        "value": value.flatten(),
        "target": target.flatten(),
        "advantage": normalize_advantage(target - value, data["broken"]).flatten(),
    }
    # a broken step is never trained on: a whole one stands in for it
    broken = data["broken"].flatten()
    rows = torch.arange(T * E, device=broken.device)
    rows = torch.where(broken, (~broken).int().argmax(), rows)
    return {name: values[rows] for name, values in flat.items()}


def gradient_step(agent, optimizer, args, batch):
    """-> metrics"""
    loss, metrics = policy_loss(agent, batch, args)
    if schedule_of(args) == "adaptive":
        average([metrics["policy/kl"]])
        adapt_learning_rate(optimizer, metrics["policy/kl"], args.desired_kl)
    optimizer.zero_grad()
    loss.backward()
    average([parameter.grad for parameter in agent.parameters()])
    norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return {**metrics, "losses/grad_norm": norm}


def update(agent, optimizer, data, args, generator):
    """Epochs of minibatches. -> mean metrics"""
    batch_size = len(data["target"])
    history = []
    for _ in range(args.update_epochs):
        order = torch.randperm(batch_size, generator=generator, device=generator.device)
        for index in order.split(batch_size // args.num_minibatches):
            batch = {name: values[index] for name, values in data.items()}
            history.append(gradient_step(agent, optimizer, args, batch))

    means = {}
    for name in history[0]:
        means[name] = torch.stack([metrics[name] for metrics in history]).mean()
    target = data["target"]
    residual = target - data["value"]
    means["losses/target"] = target.mean()
    means["losses/explained_variance"] = 1 - residual.var() / target.var()
    means["policy/learning_rate"] = optimizer.param_groups[0]["lr"].clone()
    average(list(means.values()))
    return means


# === 6. Evaluation, checkpoints, logging ===
# --- shared: evaluation ---
@torch.no_grad()
def evaluate(agent, envs, sampler, args, display=None):
    """The first episode of each environment; an empty list if a signal asked the run to end."""
    generator = torch.Generator(envs.device).manual_seed(args.seed)
    obs = envs.reset()
    first_episodes = {}
    for _ in range(MAX_EPISODE_STEPS):  # no episode is longer
        normalized = agent.policy.normalizer(obs)
        obs, *_ = envs.step(act(agent, normalized, sampler, args, generator))
        for episode in envs.pop_finished():
            first_episodes.setdefault(episode["env"], episode)
        if len(first_episodes) == envs.num_envs:
            break
        if display and display.stop_signal:
            return []
    return [first_episodes[i] for i in sorted(first_episodes)]


def make_agent(checkpoint):
    """The trained agent of a checkpoint, without environments."""
    spaces = checkpoint["spaces"]
    agent = Agent(SimpleNamespace(spaces=spaces, **spaces), Args(**checkpoint["args"]))
    agent.load_state_dict(checkpoint["agent"])
    return agent


def load_policy(path, sampler="", seed=0):
    """A trained policy for your own code: action = policy(obs), in the environment's own units.

    obs is one observation or a batch, as the environment gives it: an array, a tensor or a dict.
    An array gives an array, anything else a tensor. sampler: empty is the run's own.
    """
    try:
        checkpoint = load_checkpoint(Args(evaluate=str(path)))
    except SystemExit:
        raise ValueError(f"{path} is not a checkpoint of {SCRIPT}.py") from None
    args = Args(**checkpoint["args"])
    agent = make_agent(checkpoint)
    generator = torch.Generator().manual_seed(seed)
    spaces = checkpoint["spaces"]
    low = torch.tensor(spaces["action_low"])
    high = torch.tensor(spaces["action_high"])

    @torch.no_grad()
    def policy(obs):
        parts = obs if isinstance(obs, dict) else {"state": obs}
        is_array = isinstance(obs, np.ndarray)
        columns = []
        for name, shape in spaces["obs_shapes"].items():  # privileged_state, if any, is the last
            if name == "privileged_state" and name not in parts:
                break
            part = torch.as_tensor(parts[name]).float().cpu()
            if list(part.shape[part.dim() - len(shape) :]) != shape:
                raise ValueError(f"{name} has the shape {list(part.shape)}, not {shape}")
            is_single = part.dim() == len(shape)
            columns.append(part.reshape(-1, math.prod(shape)))
        flat = torch.cat(columns, dim=1)
        missing = spaces["obs_dim"] - flat.shape[1]  # columns of the critic, for best-of-k
        flat = nn.functional.pad(flat, (0, missing))
        normalized = agent.policy.normalizer(flat)
        action = act(agent, normalized, sampler or args.eval_sampler, args, generator)
        action = (low + high) / 2 + (high - low) / 2 * action.clamp(-1, 1)
        action = action.reshape(-1, *spaces["action_shape"])
        action = action[0] if is_single else action
        return action.numpy() if is_array else action

    return policy


def mean_of(episodes, name):
    """nan where there are no episodes, or where one does not tell"""
    return float(np.mean([episode[name] for episode in episodes])) if episodes else math.nan


def behavior(episodes):
    """How evenly the ways to succeed are used, if the environment names them as info["mode"].

    The entropy is 0 if all successes go the same way and 1 if all ways are equally frequent; it
    is None below 20 successes. paper_entropy is the paper's form: shares of all episodes,
    successful or not.
    """
    modes = [int(episode["mode"]) for episode in episodes if episode.get("mode", -1) >= 0]
    if not modes:
        return {}
    num_modes = max(2, max(modes) + 1)
    successes = []
    for episode in episodes:
        success = episode.get("success", episode.get("success_at_end"))
        if episode["mode"] >= 0 and success > 0:
            successes.append(int(episode["mode"]))
    counts = np.bincount(successes, minlength=num_modes)
    shares = counts[counts > 0] / max(1, len(successes))
    entropy = float(-(shares * np.log(shares)).sum() / np.log(num_modes)) + 0.0
    all_shares = np.bincount(modes, minlength=num_modes) / len(episodes)
    all_shares = all_shares[all_shares > 0]
    return {
        "successes_by_mode": counts.tolist(),
        "entropy": entropy if len(successes) >= 20 else None,
        "paper_entropy": float(-(all_shares * np.log2(all_shares)).sum()) + 0.0,
    }


def print_behavior(ways):
    counts = ", ".join(str(count) for count in ways["successes_by_mode"])
    entropy = "undefined below 20 successes"
    if ways["entropy"] is not None:
        entropy = f"{ways['entropy']:.2f}"
    print(f"  successes by mode {counts}   entropy {entropy}   paper's {ways['paper_entropy']:.2f}")


def make_eval_envs(args, num_envs, seed):
    """Environments of the task to evaluate on"""
    return make_envs(replace(args, env_id=args.eval_env_id or args.env_id), num_envs, seed)


def final_report(agent, args, run_dir, display=None):
    """Evaluate with all samplers on the same seeds, print a table and write it as JSON."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"cannot write to {run_dir}: {error.strerror}")
    table = {}
    print(f"\n{args.eval_episodes} episodes each        return      std")
    for sampler in SAMPLERS:
        envs = make_eval_envs(args, args.eval_episodes, 10_007 * args.seed + 5_000)
        episodes = evaluate(agent, envs, sampler, args, display)
        if display and display.stop_signal:
            display.stop()
        returns = [episode["return"] for episode in episodes]
        table[sampler] = {"mean": np.mean(returns), "std": np.std(returns), "returns": returns}
        line = f"{sampler:<20}{np.mean(returns):>9.1f}{np.std(returns):>9.1f}"
        for name in EPISODE_METRICS[1:]:
            mean = mean_of(episodes, name)
            table[sampler][name] = None if math.isnan(mean) else mean
            line += "" if math.isnan(mean) else f"   {name} {mean:.2f}"
        table[sampler]["broken"] = sum(episode["broken"] for episode in episodes)
        if table[sampler]["broken"] > 0:
            line += f"   {table[sampler]['broken']} ended by a non-finite step"
        print(line)
        ways = behavior(episodes)
        if ways:
            table[sampler]["behavior"] = ways
            print_behavior(ways)
    name = "eval.json"
    if args.evaluate:
        path = Path(args.evaluate)
        name = f"eval_{'checkpoint' if path.is_dir() else path.stem}.json"
    try:
        (run_dir / "eval.tmp").write_text(json.dumps(table, indent=1))
        os.replace(run_dir / "eval.tmp", run_dir / name)  # eval.json means: finished
    except OSError as error:
        stop(f"cannot write {run_dir / name}: {error.strerror}", code=1)
    print(f"saved in {run_dir}: " + ", ".join(sorted(path.name for path in run_dir.iterdir())))


# --- end shared ---
# --- shared: run folder ---
def stop(sentence, code=2):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(code)


def save_checkpoint(path, args, agent, progress, optimizers=(), generator=None):
    """Without optimizers and generator it can be evaluated, but not resumed."""
    state = dict(script=SCRIPT, args=asdict(args), agent=agent.state_dict(), progress=progress)
    state["spaces"] = agent.spaces
    if generator is not None:
        state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        state["generator"] = generator.get_state()
    temporary = path.with_suffix(".tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)  # a kill leaves the old file or the new one
    except (OSError, RuntimeError) as error:  # RuntimeError is torch's word for a full disk
        temporary.unlink(missing_ok=True)
        stop(f"cannot write {path}; is the disk full? ({str(error).splitlines()[0]})", code=1)


def load_checkpoint(given):
    """What --resume or --evaluate names, a file or a run's folder. -> dict"""
    if given.resume and (given.evaluate or given.run_dir):
        stop("--resume goes on in the run's own folder, without --evaluate or --run-dir")
    path = Path(given.resume or given.evaluate)
    if path.is_dir():
        path = path / "checkpoint.pt"
    if given.resume and path.name != "checkpoint.pt":
        copy = f"cp {path} NEW_FOLDER/checkpoint.pt and --resume NEW_FOLDER"
        stop(f"--resume {path} would overwrite the newer checkpoint.pt beside it: {copy}")
    try:
        if zipfile.ZipFile(path).testzip() is not None:
            raise ValueError("wrong checksum")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script = checkpoint["script"]
        saved_names = set(checkpoint["args"])
    except Exception as error:
        kind = type(error).__name__
        stop(f"{path} is missing, damaged or not a checkpoint of ours ({kind})")
    if script != SCRIPT or not saved_names <= set(asdict(given)):
        stop(f"{path} was written by {script}.py or by another version of this script")
    checkpoint["args"] = asdict(Args()) | checkpoint["args"]  # settings that it does not know yet
    if given.resume and "optimizers" not in checkpoint:
        stop(f"{path} holds a policy without its optimizers: --resume needs checkpoint.pt")
    checkpoint["folder"] = path.parent
    checkpoint["modified"] = path.stat().st_mtime_ns
    return checkpoint


def restore(checkpoint, args, agent, optimizers=(), generator=None):
    """Everything but the environments, whose interrupted episodes start again."""
    steps_done = checkpoint["progress"]["step"]
    if generator is not None and args.total_timesteps < steps_done:
        stop(f"total_timesteps {args.total_timesteps}: the run has made {steps_done} already")
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError:
        stop(f"the checkpoint does not fit {args.env_id}, which has other shapes now")
    if generator is not None:
        for optimizer, state in zip(optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
            for group in optimizer.param_groups:
                group["capturable"] = args.cudagraphs
            rate = optimizer.param_groups[0]["lr"]
            if torch.is_tensor(rate):
                optimizer.param_groups[0]["lr"] = rate.to(args.device)
        same_kind = checkpoint["generator"].shape == generator.get_state().shape  # of device
        if same_kind and not dist.is_initialized():
            generator.set_state(checkpoint["generator"])
        print("resumed; episodes that were interrupted start again")


def check_processes(progress, num_processes):
    """-> progress of a run that can go on with so many processes"""
    before = progress.get("processes", 1)
    if before != num_processes:
        command = "python" if before == 1 else f"torchrun --nproc-per-node {before}"
        stop(f"the run was started with {before} processes, not {num_processes}: use {command}")
    return progress


def start_run(args, checkpoint):
    """Make the run's folder, lock it and write args.json. -> the folder, the locked file"""
    name = re.sub("[/:]", "_", args.env_id)
    if args.backend == "playground":
        name += "-playground"
    name += f"__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    about = asdict(args)
    if extras:
        about |= extras.describe_machine(args)
    _, about["suite"] = choose_backend(args.env_id, args.backend, args.device)
    run_dir = checkpoint["folder"] if checkpoint else Path(args.run_dir or f"runs/{name}")
    try:
        if extras and not checkpoint and not args.run_dir:
            run_dir = extras.unused(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        args_file = (run_dir / "args.json").open("a+")
        if extras:
            extras.lock(args_file)
        saved = run_dir / "checkpoint.pt"
        if not checkpoint and saved.exists():
            stop(f"{run_dir} already holds a run; --resume {run_dir} goes on with it")
        if checkpoint and saved.stat().st_mtime_ns != checkpoint["modified"]:
            stop(f"another run has just written {saved}: start again")
        args_file.truncate(0)
        args_file.write(json.dumps(about, indent=1))
        args_file.flush()
        (run_dir / "eval.json").unlink(missing_ok=True)  # of a run that goes on with more steps
    except OSError as error:
        stop(f"cannot start a run in {run_dir}: {error.strerror}")
    print(f"{args.env_id} by {args.backend} on {args.device}; run folder: {run_dir}")
    return run_dir, args_file


def make_row(progress, episodes, eval_episodes):
    """A row of metrics.csv, to be completed."""
    row = {
        "global_step": progress["step"],
        "time/elapsed": progress["elapsed"],
        "charts/nonfinite": progress["nonfinite"],
    }
    for name in EPISODE_METRICS:
        row[f"charts/episode_{name}"] = mean_of(episodes, name)
        row[f"eval/{name}"] = mean_of(eval_episodes, name)
    return row


def log_row(run_dir, row, text, display):
    """A line of metrics.csv, and one for the person who watches."""
    try:
        with (run_dir / "metrics.csv").open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({name: value for name, value in row.items() if not math.isnan(value)})
    except OSError as error:
        stop(f"cannot write {run_dir}/metrics.csv: {error.strerror}", code=1)
    if display:
        display.show(row, text)
    elif not math.isnan(row["eval/return"]):
        print(f"{row['global_step']:,} steps  eval {row['eval/return']:.1f}  {text}", flush=True)


def to_floats(metrics, agent):
    """All metrics in one transfer; a diverged run ends here."""
    finite = torch.stack([parameter.isfinite().all() for parameter in agent.parameters()]).all()
    *values, finite = torch.stack([*metrics.values(), finite]).tolist()
    if not finite:
        stop("non-finite parameters; checkpoint.pt is the last good state", code=1)
    return dict(zip(metrics, values, strict=True))


# --- end shared ---
# === 7. Main ===
def prepare_functions(args):
    """The one place where functions are compiled, or recorded as CUDA graphs."""
    if args.compile:
        global policy_loss, td_lambda_targets
        policy_loss = torch.compile(policy_loss)
        td_lambda_targets = torch.compile(td_lambda_targets)
    if args.cudagraphs:
        global policy_step, gradient_step
        policy_step = extras.Graph(policy_step)
        gradient_step = extras.Graph(gradient_step)


def train(
    args, args_now, progress, checkpoint, rank, agent, envs, eval_envs, optimizers, generator
):
    """All processes run this loop; the first one, of rank 0, evaluates, logs and saves."""
    # run folder
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    eval_iterations = np.linspace(0, num_iterations, args.eval_points + 1)[1:].round()
    total = num_iterations * batch_size
    state = (args, agent, progress, optimizers, generator)
    display = None
    if rank == 0:
        run_dir, args_file = start_run(args, checkpoint)  # locked while args_file is open
        save_checkpoint(run_dir / "checkpoint.pt", *state)
    if rank == 0 and extras:
        display = extras.Display(run_dir, args, progress, total)

    # training loop
    (optimizer,) = optimizers
    earlier_nonfinite = progress["nonfinite"]
    obs = envs.reset()
    for iteration in range(progress["step"] // batch_size + 1, num_iterations + 1):
        start = time.perf_counter()
        anneal(optimizer, (iteration - 1) / num_iterations, args)
        data, obs = rollout(agent, envs, obs, args_now, generator)
        rollout_end = time.perf_counter()
        data = compute_targets(agent, data, args_now, generator)
        metrics = update(agent, optimizer, data, args_now, generator)
        metrics = to_floats(metrics, agent)  # waits for the device
        update_end = time.perf_counter()

        episodes = [episode for episode in envs.pop_finished() if not episode["broken"]]
        eval_episodes = []
        evaluated = iteration in eval_iterations
        if evaluated and rank == 0:
            eval_episodes = evaluate(agent, eval_envs, args.eval_sampler, args, display)
            evaluated = len(eval_episodes) > 0
        eval_end = time.perf_counter()
        stop_signal = display.stop_signal if display else 0  # Ctrl-C or SIGTERM
        nonfinite, stop_signal = sums([int(envs.nonfinite), stop_signal], args.device)
        progress["step"] = iteration * batch_size
        progress["elapsed"] += eval_end - start
        progress["nonfinite"] = earlier_nonfinite + nonfinite
        if rank > 0 and stop_signal:
            break
        if rank > 0:
            continue
        row = make_row(progress, episodes, eval_episodes)
        row["time/rollout"] = rollout_end - start
        row["time/update"] = update_end - rollout_end
        row["time/eval"] = eval_end - update_end
        row["charts/sps"] = batch_size / (update_end - start)
        row |= metrics
        text = f"KL {row['policy/kl']:.3f}/{args.desired_kl:g}  std {row['policy/std']:.2g}"
        text += f"  learning rate {row['policy/learning_rate']:.1e}"
        log_row(run_dir, row, text, display)

        if evaluated and row["eval/return"] > progress["best_return"]:
            progress["best_return"] = row["eval/return"]
            save_checkpoint(run_dir / "best.pt", *state)
        if evaluated or stop_signal:
            save_checkpoint(run_dir / "checkpoint.pt", *state)
        if display:
            display.after_checkpoint(evaluated, stop_signal)

    if rank == 0:
        save_checkpoint(run_dir / "policy.pt", args, agent, progress)
        final_report(agent, args, run_dir, display)
        args_file.close()


def main(argv=None):
    one_gpu_each()
    args, checkpoint = parse_args(argv)
    torch.set_num_threads(args.torch_threads)
    if args.device == "cuda" and args.tf32:
        torch.set_float32_matmul_precision("high")
    rank, num_processes = join_processes(args)
    progress = {"step": 0, "best_return": -math.inf, "elapsed": 0.0, "nonfinite": 0}
    progress["processes"] = num_processes
    if args.resume:
        progress = check_processes(checkpoint["progress"], num_processes)

    # seeds: the processes start with equal networks, and have noise and environments of their own
    torch.manual_seed(args.seed)
    generator = torch.Generator(args.device)
    generator.manual_seed(args.seed + 1_000_003 * rank + progress["step"])

    # environments, networks, optimizer
    env_seed = 10_007 * args.seed + progress["step"] + 100_003 * rank
    eval_envs = make_eval_envs(args, args.eval_episodes, env_seed + 5_000)
    args_now = replace(args, num_envs=args.num_envs // num_processes)  # the share of this process
    agent = Agent(eval_envs, args_now).to(args.device)
    if args.evaluate:
        restore(checkpoint, args, agent)
        final_report(agent, args, Path(args.run_dir or checkpoint["folder"]))
        return
    envs = make_envs(args, args_now.num_envs, env_seed, training=True)
    if args.eval_env_id and envs.spaces != eval_envs.spaces:
        stop(f"{args.eval_env_id} has other observations or actions than {args.env_id}")
    learning_rate = torch.tensor(args.learning_rate, device=args.device)  # which changes in the run
    kind = dict(fused=True, capturable=args.cudagraphs)
    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, **kind)
    optimizers = (optimizer,)
    if args.resume:
        restore(checkpoint, args, agent, optimizers, generator)
    prepare_functions(args)
    if args.bench:
        extras.bench(sys.modules[__name__], agent, envs, optimizers, args_now, generator)
        return
    workers = (agent, envs, eval_envs, optimizers, generator)
    train(args, args_now, progress, checkpoint, rank, *workers)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
