"""TruDi: trust-region diffusion policies for massively parallel on-policy RL.

A diffusion policy turns Gaussian noise into an action in N small denoising steps, so it can keep
several good actions alive where a Gaussian has to pick one. The likelihood of its actions is
intractable, but the chain of N Gaussian steps is not, and the chain is all that is needed:

    denoising chain, from the prior to an action             Eq. (5), (7)         sample_chain
    entropy of the policy  >=  a bound along the chain       Eq. (12)             entropy_bound
    change of the policy   <=  the KL of the two chains      Eq. (14)             trajectory_kl
    soft TD(lambda) targets                                  Eq. (13), (17), (18) compute_targets
    improve inside the trust region, go back outside of it   Eq. (19), (20)       actor_loss
    temperature alpha and KL multiplier lambda are learned   Eq. (21), (22)       dual_loss
    acting by the probability-flow ODE                       Eq. (23)             act

Usage:
    python trudi_continuous.py                                   # CheetahRun-v1
    python trudi_continuous.py --env-id WalkerWalk-v1 --seed 2
    python trudi_continuous.py --resume runs/FOLDER              # go on with an interrupted run
    python trudi_continuous.py --evaluate runs/FOLDER/best.pt    # evaluate a checkpoint

docs/trudi.md explains the equations and lists the departures from the paper.
Letters: x is an action on its way from noise, u the control that the network adds to its drift,
e the size of a denoising step, eta the standard deviation of the noise that x starts from.
Blocks marked "shared" are the same text in all scripts that have them.
Shapes: T rollout steps, E environments, B minibatch, O observation, A action,
N denoising steps, K chains per state for the KL, H hidden units.
"""

import csv
import importlib
import json
import math
import os
import re
import signal
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import nn
from torch.func import functional_call

try:
    from tools import extras  # comfort: progress line, curve.png, signals, wandb, versions, bench
except ImportError:
    extras = None  # a script that was copied alone does without

SCRIPT = Path(__file__).stem
SAMPLERS = ("ode", "sde", "best-of-k")
EPISODE_METRICS = ("return", "length", "success")
MAX_EPISODE_STEPS = 10_000  # an environment without an end must not run for ever


# === 1. Settings ===
@dataclass
class Args:
    """Defaults for a GPU and the DeepMind Control suite; parse_args knows those of other tasks.

    docs/trudi.md lists departures from the paper.
    """

    # run
    env_id: str = "CheetahRun-v1"  # id of EnvPool, Playground or Gymnasium, or `module:Id`
    # who simulates; auto: who has the id
    backend: Literal["auto", "envpool", "gymnasium", "playground", "isaaclab", "mjlab"] = "auto"
    total_timesteps: int = 50_000_000  # environment steps of the whole run
    seed: int = 1  # seed of the networks, the noise and the environments
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes CUDA where it is present
    run_dir: str = ""  # folder to write to; empty: a new one in runs/
    resume: str = ""  # folder of an interrupted run to go on with
    evaluate: str = ""  # checkpoint to evaluate instead of training
    track: bool = False  # log to Weights & Biases, too
    bench: int = 0  # measure so many iterations and write nothing
    torch_threads: int = 1  # CPU threads of torch and EnvPool; processes of HumanoidBench
    compile: bool = False  # torch.compile the hot functions
    cudagraphs: bool = False  # record the steps of acting and learning as CUDA graphs
    tf32: bool = True  # matrix products on CUDA with 10 bits of mantissa, in a fraction of the time

    # rollout and optimization
    num_envs: int = 1024  # parallel environments (E)
    num_steps: int = 128  # steps that each environment takes per iteration (T)
    train_episode_steps: int = 0  # training episodes are cut after so many steps; 0: they are not
    # correlation of the exploration noise of neighboring steps; 0: each step has noise of its own
    noise_correlation: float = 0.0
    num_minibatches: int = 64  # minibatches per epoch
    update_epochs: int = 8  # passes over each rollout
    policy_delay: int = 1  # critic steps per step of the policy and the duals
    # first iterations, at most a fifth of all, in which the policy does not learn yet
    warmup_iterations: int = 0
    learning_rate: float = 3e-4  # Adam's learning rate for the critic
    actor_learning_rate: float = 3e-4  # Adam's learning rate for the policy
    alpha_learning_rate: float = 3e-4  # Adam's learning rate for the temperature
    lambda_learning_rate: float = 3e-4  # Adam's learning rate for the multiplier of the KL
    anneal: float = 0.0  # actor_learning_rate falls linearly by this share: 1 is to zero
    max_grad_norm: float = 0.5  # gradients are clipped to this norm

    # critic
    hidden_size: int = 512  # width of policy and critic (H)
    gamma: float = 0.99  # discount factor; by default less for short episodes
    td_lambda: float = 0.95  # trace parameter of the TD(lambda) targets
    vmin: float = -20.0  # lower end of the critic's range; HL-Gauss is biased at its edges
    vmax: float = 150.0  # upper end of the critic's range
    num_bins: int = 171  # bins of the critic's value distribution
    hl_sigma: float = 0.75  # HL-Gauss smoothing, in bin widths
    aux_coef: float = 1.0  # weight of the prediction of the next features
    normalize_reward: bool = False  # scale rewards to returns of return_scale
    return_scale: float = 30.0  # root mean square of scaled, discounted returns

    # diffusion policy and trust region
    diffusion_steps: int = 8  # denoising steps per action (N)
    # size of the last denoising step, which the others shrink to geometrically; None: a cosine
    last_step: float | None = None
    eta: float = 1.0  # standard deviation of the prior that denoising starts from
    alpha_init: float = 0.01  # initial entropy temperature
    entropy_target: float = -1.665  # of the entropy bound, per action dimension, at the end
    entropy_target_start: float | None = None  # the same at the start; None: it stays
    trust_region: Literal["split", "none"] = "split"  # Eq. (19), or none for on-policy DIME
    kl_bound: float = 0.1  # largest KL of old to new chains (epsilon), at the start of the run
    kl_bound_end: float | None = None  # the same at its end, reached geometrically; None: it stays
    kl_samples: int = 1  # chains of the old policy per state for the KL (K)
    lambda_init: float = 0.01  # initial multiplier of the KL

    # evaluation
    eval_points: int = 20  # evaluations and checkpoints during training
    eval_episodes: int = 16  # episodes per evaluation, in environments of their own
    eval_env_id: str = ""  # another task to evaluate on, of the same shapes; empty: env_id
    eval_sampler: Literal["ode", "sde", "best-of-k"] = "ode"  # how actions are chosen, see act
    # when the ODE draws the noise that it starts from; anew at each step it makes an arm tremble
    eval_start: Literal["episode", "step"] = "step"
    eval_score_scale: float = 1.0  # score scale c of the ODE
    eval_best_of: int = 10  # samples that best-of-k chooses from


# A CPU has time for a fiftieth of the steps: small networks and large learning rates.
CPU_DEFAULTS = dict(
    total_timesteps=1_000_000,
    num_envs=128,
    num_steps=32,
    noise_correlation=0.7,
    num_minibatches=16,
    update_epochs=5,
    policy_delay=3,
    hidden_size=128,
    diffusion_steps=4,
    last_step=0.002,
    learning_rate=2e-3,
    actor_learning_rate=1.2e-3,
    alpha_learning_rate=6e-4,
    lambda_learning_rate=6e-4,
    anneal=1.0,
    max_grad_norm=100.0,
    entropy_target=-3.0,
    kl_bound=0.3,
    kl_bound_end=0.02,
    lambda_init=1.0,
)
# Outside the DeepMind Control suite the rewards have an unknown scale and sign.
OTHER_TASK = dict(
    normalize_reward=True,
    vmin=-150.0,
    vmax=150.0,
    num_bins=151,
)
# The policy waits until the critic knows what random actions are worth: else it takes the first of
# several equally good ways. Then each minibatch has a policy step, of a smaller rate.
CPU_OTHER_TASK = CPU_DEFAULTS | dict(
    num_envs=64,
    num_steps=64,
    noise_correlation=0.0,
    update_epochs=4,
    policy_delay=1,
    warmup_iterations=8,
    actor_learning_rate=1e-3,
    alpha_learning_rate=3e-4,
    lambda_learning_rate=3e-4,
    kl_bound=0.1,
    kl_bound_end=None,
)
# HumanoidBench: the paper's sizes. alpha_init stays small: with 1 the entropy of 61 actions alone
# leaves the range. Beside a GPU it is the simulation that takes time, so it gets all cores.
HUMANOIDBENCH = dict(
    num_envs=128,
    num_steps=128,
    num_minibatches=8,
    hidden_size=256,
    vmin=-250.0,
    vmax=250.0,
    num_bins=151,
    torch_threads=min(32, len(os.sched_getaffinity(0))),
)
# A core makes a few hundred steps/s of it: few environments, few and short evaluations.
CPU_HUMANOIDBENCH = CPU_OTHER_TASK | dict(
    num_envs=16,
    num_minibatches=8,
    update_epochs=8,
    learning_rate=1e-3,
    torch_threads=1,
    eval_points=10,
    eval_episodes=8,
)
# Isaac Lab: the paper's sizes; mjlab's tasks are of the same kind.
ISAACLAB = dict(
    total_timesteps=300_000_000,
    num_envs=4096,
    num_steps=64,
    num_minibatches=128,
    gamma=0.97,
    vmin=-10.0,
    vmax=10.0,
    num_bins=151,
)
# mjlab makes one or two hundred steps/s on a CPU.
CPU_ISAACLAB = CPU_OTHER_TASK | dict(num_envs=32, eval_points=10)
# Tasks by EnvPool that are much like those of Isaac Lab, with rewards of other scales.
STAND_IN = OTHER_TASK | dict(gamma=0.97)
SUITES = {  # suite -> what differs from Args; a CPU then takes CPU_DEFAULTS or CPU_SUITES
    "other": OTHER_TASK,
    "HumanoidBench": HUMANOIDBENCH,
    "IsaacLab": ISAACLAB,
    "mjlab": ISAACLAB,
    "IsaacLab stand-in": STAND_IN,
}
CPU_SUITES = {
    "other": CPU_OTHER_TASK,
    "HumanoidBench": CPU_HUMANOIDBENCH,
    "IsaacLab": CPU_ISAACLAB,
    "mjlab": CPU_ISAACLAB,
    "IsaacLab stand-in": CPU_OTHER_TASK,
}
# Tasks with larger rewards than their suite, such as 250 for a goal of Repose: FastTD3's ranges.
WIDE_RANGES = {
    "Isaac-Repose": 500.0,
    "h1hand-reach": 2_000.0,
    "h1hand-basketball": 2_000.0,
    "h1hand-maze": 1_000.0,
    "h1hand-push": 1_000.0,
    "h1hand-truck": 1_000.0,
    "h1hand-package": 10_000.0,
}
# Smallest and largest values; all other numbers must be positive.
LIMITS = dict(
    seed=(0, 2**63),
    torch_threads=(1, os.cpu_count()),
    bench=(0, math.inf),
    train_episode_steps=(0, math.inf),
    warmup_iterations=(0, math.inf),
    noise_correlation=(0, 0.999),
    anneal=(0, 1),
    gamma=(0, 1),
    td_lambda=(0, 1),
    vmin=(-math.inf, math.inf),
    vmax=(-math.inf, math.inf),
    num_bins=(2, 1_000_000),
    aux_coef=(0, math.inf),
    entropy_target=(-math.inf, math.inf),
    entropy_target_start=(-math.inf, math.inf),
    diffusion_steps=(1, 1_000),
    eval_episodes=(1, 100_000),
)
# Settings that --resume and --evaluate may change.
MAY_CHANGE = {"run_dir", "resume", "evaluate", "track", "compile", "device", "torch_threads"}
MAY_CHANGE |= {"total_timesteps", "cudagraphs", "tf32"}  # and what begins with eval_


def parse_args(argv=None):
    """Parse twice: task and device decide the defaults, which --help shows.

    -> args, checkpoint to start from or None
    """
    argv = sys.argv[1:] if argv is None else argv
    given = tyro.cli(Args, args=[word for word in argv if word not in ("-h", "--help")])
    device = choose_device(given.device)
    checkpoint = None
    if given.resume or given.evaluate:
        checkpoint = load_checkpoint(given)
        saved = Args(**checkpoint["args"])
        backend = saved.backend
        defaults = replace(saved, run_dir="", resume="", evaluate="", track=False)
        defaults.cudagraphs = saved.cudagraphs and not given.evaluate  # they are for training
        defaults.torch_threads = min(saved.torch_threads, os.cpu_count())  # of this machine
    else:
        backend, suite = choose_backend(given.env_id, given.backend, device)
        chosen = SUITES.get(suite, {})
        if device == "cpu":
            chosen = chosen | CPU_SUITES.get(suite, CPU_DEFAULTS)
        if device == "cpu" and backend == "envpool" and suite == "DMC":
            chosen = chosen | dict(train_episode_steps=250)  # of 1,000: four times as many starts
        for task, bound in WIDE_RANGES.items():
            if task in given.env_id:
                chosen = chosen | dict(vmin=-bound, vmax=bound)
        if suite == "other":
            chosen = chosen | dict(gamma=default_gamma(given.env_id, backend))
        defaults = Args(**chosen)
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
    if args.vmin >= args.vmax:
        stop("vmin must be below vmax")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches != 0:
        stop(f"num_minibatches must divide num_envs * num_steps = {batch_size}")
    if args.total_timesteps < batch_size:
        stop(f"total_timesteps must be at least num_envs * num_steps = {batch_size}")
    if args.train_episode_steps and args.backend not in ("envpool", "gymnasium"):
        stop("--train-episode-steps needs --backend envpool or gymnasium")
    if (args.bench or args.track or args.cudagraphs) and extras is None:
        stop("--bench, --track and --cudagraphs need tools/extras.py beside this script")
    if args.kl_bound_end is None:
        args.kl_bound_end = args.kl_bound
    if args.entropy_target_start is None:
        args.entropy_target_start = args.entropy_target
    if args.cudagraphs and args.device != "cuda":
        stop("--cudagraphs needs a CUDA device")
    if args.last_step and args.last_step > 1 / args.diffusion_steps:
        stop(f"last_step must be at most 1 / diffusion_steps = {1 / args.diffusion_steps:.3g}")
    if args.policy_delay > args.update_epochs * args.num_minibatches:
        stop("policy_delay must be at most update_epochs * num_minibatches")


# === 2. Environments: one contract for all simulators ===
# --- shared: environments ---
HUMANOIDBENCH_ID = re.compile(r"(humanoid_bench:)?(g1|h1(hand|simplehand|strong|touch)?)-\w+-v0")
ISAACLAB_STAND_INS = (  # EnvPool's tasks that are most like those of Isaac Lab
    "H1JoystickGaitTracking-v1",
    "LeapCubeReorient-v1",
    "HandManipulateBlockRotateXYZDense-v1",
)


def choose_backend(env_id, backend, device):
    """Who simulates the task, and the suite that its default settings belong to.

    auto knows the ids of Isaac Lab, mjlab and HumanoidBench by their form. Else it takes the first
    that has the id: Playground (on CUDA only), EnvPool, Gymnasium.
    """
    if backend == "isaaclab" or (backend == "auto" and env_id.startswith("Isaac-")):
        return "isaaclab", "IsaacLab"
    if backend == "mjlab" or (backend == "auto" and env_id.startswith("Mjlab-")):
        return "mjlab", "mjlab"
    if backend in ("auto", "gymnasium") and HUMANOIDBENCH_ID.fullmatch(env_id):
        return "gymnasium", "HumanoidBench"
    if backend == "playground" or (backend == "auto" and device == "cuda"):
        try:
            from simulators import playground
        except ImportError as error:
            if backend == "playground":
                needed = "pip install -r requirements-playground.txt, simulators/ beside the script"
                stop(f"--backend playground is not installed ({error}): {needed}")
        else:
            if backend == "playground" or env_id in playground.TASKS:
                return "playground", playground.TASKS.get(env_id, "other")
    family = envpool_family(env_id)
    if backend == "auto":
        backend = "envpool" if re.match("Dmc|Gym|Playground", family) else "gymnasium"
    suite = "other"
    if backend == "envpool" and family.startswith("Dmc"):
        suite = "DMC"
    if backend == "envpool" and env_id in ISAACLAB_STAND_INS:
        suite = "IsaacLab stand-in"
    return backend, suite


def envpool_family(env_id):
    """Such as DmcCheetahEnvSpec; empty where EnvPool is missing or does not have the id"""
    try:
        import envpool
    except ImportError:
        return ""
    if env_id not in envpool.list_all_envs():
        return ""
    return type(envpool.make_spec(env_id)).__name__


def default_gamma(env_id, backend):
    """0.99, or less where episodes are short: a value looks ahead a third of an episode.

    A longer look would see little but the value beyond the time-out, and the errors of the critic
    there would hide what an action changes.
    """
    steps = None
    try:
        if backend == "envpool":
            import envpool

            steps = envpool.make_spec(env_id).config.max_episode_steps
        elif backend == "gymnasium":
            module, _, name = env_id.rpartition(":")
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())  # for the user's own module:Id
            if module:
                importlib.import_module(module)
            steps = gym.spec(name).max_episode_steps
    except Exception:
        pass  # make_envs says what is wrong
    if not steps:
        return 0.99
    look_ahead = max(2, steps / 3)
    return min(0.99, 1 - 1 / look_ahead)


def make_envs(args, num_envs, seed, **kwargs):
    try:
        if args.backend == "playground":
            from simulators import playground

            return playground.VecEnv(args, num_envs, seed, **kwargs)
        if args.backend in ("isaaclab", "mjlab"):
            from simulators import isaaclab_env

            return isaaclab_env.VecEnv(args, num_envs, seed, **kwargs)
        return VecEnv(args, num_envs, seed, **kwargs)
    except Exception as error:  # an unknown id, or a package that is missing
        reason = " ".join(str(error).split()).rstrip(".")
        hint = extras.close_ids(args.env_id, args.backend) if extras else ""
        return stop(f"{args.backend} cannot make {args.env_id}: {reason}{hint}")


class VecEnv:
    """obs, reward, terminated, truncated, final_obs = step(action in [-1, 1]), all tensors.

    Where an episode ended, final_obs is its last observation and obs the next one's first;
    elsewhere they are equal. Bootstrapping from final_obs tells truncation from termination.
    The policy sees the columns up to actor_dim, the critic those from critic_start on.
    A non-finite step becomes a truncation at the last finite observation, and broken tells where.
    With stagger, which is for training, first episodes are cut at different lengths. Else all
    environments would be in the same phase of an episode, and each rollout would teach that phase
    only. Later ones are cut after train_episode_steps, if that is given.
    """

    def __init__(self, args, num_envs, seed, stagger=False, **kwargs):
        self.backend = args.backend
        self.num_envs = num_envs
        self.device = torch.device(args.device)
        self.seed = seed % 2**30  # of the first reset
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # for the user's own module:Id
        if self.backend == "envpool":
            import envpool

            kwargs = dict(num_envs=num_envs, num_threads=args.torch_threads) | kwargs
            self.env = envpool.make_gymnasium(args.env_id, seed=self.seed, **kwargs)
            time_limit = self.env.config["max_episode_steps"]
        elif HUMANOIDBENCH_ID.fullmatch(args.env_id):
            from simulators import humanoidbench_env

            num_workers = args.torch_threads
            self.env = humanoidbench_env.make_vec(args.env_id, num_envs, num_workers, **kwargs)
            time_limit = self.env.spec.max_episode_steps
        else:
            if extras:
                extras.check_environment(args.env_id, kwargs)
            disabled = dict(autoreset_mode="Disabled")  # step below resets by itself
            self.env = gym.make_vec(args.env_id, num_envs, "sync", disabled, **kwargs)
            time_limit = self.env.spec.max_episode_steps
        space = self.env.single_action_space
        if not isinstance(space, gym.spaces.Box):
            raise TypeError(f"it has {type(space).__name__} actions, not continuous ones (Box)")
        if not space.is_bounded():
            wrapper = "gymnasium.wrappers.TransformAction can give it a bounded action space"
            raise TypeError(f"its actions have no bounds, not even for RescaleAction: {wrapper}")
        low = space.low.reshape(-1)
        high = space.high.reshape(-1)
        self.action_center = (high + low) / 2
        self.action_halfwidth = (high - low) / 2
        self.action_space = space
        self.action_dim = len(low)
        self.nonfinite = 0  # broken steps so far
        self.finished = []  # episodes that ended since pop_finished
        self.episode_return = np.zeros(num_envs)
        self.episode_length = np.zeros(num_envs, int)
        self.longest_episode = MAX_EPISODE_STEPS
        if stagger and args.train_episode_steps:
            self.longest_episode = args.train_episode_steps
        self.cut_at = np.full(num_envs, self.longest_episode)
        if stagger and time_limit:
            time_limit = min(time_limit, self.longest_episode)
            self.cut_at = 1 + np.arange(num_envs) * time_limit // num_envs  # first episodes only
        self.obs = self.reset_where(np.ones(num_envs, bool))  # (E, O)
        self.obs_dim = self.obs.shape[1]
        self.spaces = {  # for load_policy
            "obs_dim": self.obs_dim,
            "actor_dim": self.actor_dim,
            "critic_start": self.critic_start,
            "action_dim": self.action_dim,
            "obs_shapes": self.obs_shapes,
            "action_shape": list(space.shape),
            "action_low": low.tolist(),
            "action_high": high.tolist(),
        }

    def flatten(self, obs):
        """An array or a dictionary of arrays -> (E, O), privileged observations last."""
        if not isinstance(obs, dict):
            obs = {"state": obs}
        parts = {name: part.reshape(len(part), -1) for name, part in obs.items()}
        privileged = parts.pop("privileged_state", None)
        self.obs_shapes = {name: list(obs[name].shape[1:]) for name in parts}
        self.actor_dim = sum(part.shape[1] for part in parts.values())
        self.critic_start = 0
        columns = list(parts.values())
        if privileged is not None:
            self.critic_start = self.actor_dim
            self.obs_shapes["privileged_state"] = list(obs["privileged_state"].shape[1:])
            columns.append(privileged)
        return np.concatenate(columns, axis=1, dtype=np.float32)

    def reset_where(self, mask):
        """Start a new episode in some environments. -> their observations"""
        self.episode_return[mask] = 0
        self.episode_length[mask] = 0
        if self.backend == "envpool":  # its own autoreset would put a dummy step into the data
            obs, _ = self.env.reset(np.flatnonzero(mask).astype(np.int32))
            return np.nan_to_num(self.flatten(obs), posinf=0, neginf=0)
        obs, _ = self.env.reset(seed=self.seed, options=dict(reset_mask=mask))
        self.seed = None  # later resets go on with each environment's own random stream
        return np.nan_to_num(self.flatten(obs)[mask], posinf=0, neginf=0)

    def reset(self):
        """Start a new episode in all environments. -> (E, O)"""
        self.obs = self.reset_where(np.ones(self.num_envs, bool))
        self.finished = []
        return torch.as_tensor(self.obs, device=self.device)

    def step(self, action):
        action = action.cpu().numpy().clip(-1, 1)
        action = self.action_center + self.action_halfwidth * action
        action = action.astype(self.action_space.dtype)
        action = action.reshape(self.num_envs, *self.action_space.shape)
        obs, reward, terminated, truncated, info = self.env.step(action)
        final_obs = self.flatten(obs)
        reward = reward.astype(np.float32)
        broken = ~(np.isfinite(final_obs).all(axis=1) & np.isfinite(reward))
        self.nonfinite += int(broken.sum())
        final_obs[broken] = self.obs[broken]
        reward[broken] = 0
        terminated = terminated & ~broken
        self.episode_return += reward
        self.episode_length += 1
        truncated = truncated | broken | (self.episode_length >= self.cut_at)

        ended = terminated | truncated
        self.obs = final_obs.copy()
        if ended.any():
            unknown = np.full(self.num_envs, np.nan)
            success = info.get("success", info.get("is_success", unknown))
            mode = info.get("mode", unknown)  # which of several ways was taken, see behavior
            is_whole = self.cut_at == self.longest_episode  # a staggered episode is no result
            for i in np.flatnonzero(ended & is_whole):
                episode = {
                    "env": int(i),
                    "return": float(self.episode_return[i]),
                    "length": int(self.episode_length[i]),
                    "success": float(success[i]),
                    "mode": float(mode[i]),
                    "broken": bool(broken[i]),
                }
                self.finished.append(episode)
            self.obs[ended] = self.reset_where(ended)
            self.cut_at[ended] = self.longest_episode
        # one transfer to the device: a GPU would be waited for once per array
        numbers = np.stack([reward, terminated, truncated, broken], axis=1)
        table = np.concatenate([self.obs, final_obs, numbers], axis=1, dtype=np.float32)
        table = torch.as_tensor(table, device=self.device)
        obs, final_obs, numbers = table.split([self.obs_dim, self.obs_dim, 4], dim=1)
        reward, *flags = numbers.unbind(dim=1)
        terminated, truncated, self.broken = (flag.bool() for flag in flags)
        return obs, reward, terminated, truncated, final_obs

    def pop_finished(self):
        """The episodes that ended since the last call."""
        finished = self.finished
        self.finished = []
        return finished


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
# --- shared: critic ---
def mlp(inputs, hidden, outputs):
    first = [nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.SiLU()]
    return nn.Sequential(*first, nn.Linear(hidden, outputs))


class Critic(nn.Module):
    """Q(s, a) as a distribution over bins, as in REPPO, with a predictor of the next features."""

    def __init__(self, critic_start, obs_dim, action_dim, args):
        super().__init__()
        hidden = args.hidden_size
        width = (args.vmax - args.vmin) / (args.num_bins - 1)
        centers = torch.linspace(args.vmin, args.vmax, args.num_bins)
        edges = torch.linspace(args.vmin - width / 2, args.vmax + width / 2, args.num_bins + 1)
        self.register_buffer("centers", centers, persistent=False)  # (bins,)
        self.register_buffer("edges", edges, persistent=False)  # (bins + 1,)
        self.sigma = args.hl_sigma * width
        self.critic_start = critic_start
        self.encoder = mlp(obs_dim - critic_start + action_dim, hidden, hidden)
        self.head = nn.Sequential(nn.SiLU(), mlp(hidden, hidden, args.num_bins))
        self.predictor = nn.Sequential(nn.SiLU(), mlp(hidden, hidden, hidden))

        # start at Q = 0, not at the middle of the range: times 40 the softmax has its peak there
        last_layer = self.head[-1][-1]
        last_layer.weight.data *= 0.01
        last_layer.bias.data = 40 * hl_gauss(torch.zeros(1), self.edges, self.sigma)[0]

    def features(self, obs, action):
        return self.encoder(torch.cat([obs[:, self.critic_start :], action], dim=-1))

    def value(self, features):
        return self.head(features).softmax(dim=-1) @ self.centers


def hl_gauss(target, edges, sigma):
    """(B,) -> the mass of Normal(target, sigma) in each bin, (B, bins), renormalized."""
    lowest = (edges[0] + edges[1]) / 2
    highest = (edges[-2] + edges[-1]) / 2
    target = target.clamp(lowest, highest)[:, None]
    cdf = torch.erf((edges - target) / (sigma * math.sqrt(2)))  # up to constants; (B, bins + 1)
    mass = cdf[:, 1:] - cdf[:, :-1]
    return mass / (cdf[:, -1:] - cdf[:, :1])


def critic_loss(critic, batch, args):
    """Cross-entropy to the HL-Gauss targets, and the auxiliary prediction. -> loss, metrics"""
    features = critic.features(batch["obs"], batch["action"])
    log_probs = critic.head(features).log_softmax(dim=-1)
    target_probs = hl_gauss(batch["target"], critic.edges, critic.sigma)
    fit = -(target_probs * log_probs).sum(dim=-1).mean()
    auxiliary = F.mse_loss(critic.predictor(features), batch["next_features"])
    loss = fit + args.aux_coef * auxiliary
    return loss, {"losses/critic": fit.detach(), "losses/auxiliary": auxiliary.detach()}


# --- end shared ---
# --- shared: diffusion policy ---
class Control(nn.Module):
    """The control of a denoising step up to its scale, from embedded (B, H) and x (B, A): (B, A)

    It is shift + slope * x, since a Gaussian policy of any width has controls that are linear in x.
    """

    def __init__(self, action_dim, hidden):
        super().__init__()
        self.x_layer = nn.Linear(action_dim, hidden, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden)) for _ in range(2)
        )
        self.out = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 2 * action_dim))
        nn.init.zeros_(self.out[1].weight)  # u = 0: the untrained policy is the prior
        nn.init.zeros_(self.out[1].bias)

    def forward(self, embedded, x):
        z = F.gelu(torch.addmm(embedded, x, self.x_layer.weight.T))
        for block in self.blocks:
            z = z + F.gelu(block(z))
        shift, slope = self.out(z).chunk(2, dim=-1)
        return torch.addcmul(shift, slope, x)  # shift + slope * x


class DiffusionPolicy(nn.Module):
    """Predicts the controls of the denoising steps; sample_chain turns them into actions."""

    def __init__(self, obs_dim, actor_dim, action_dim, args):
        super().__init__()
        self.actor_dim = actor_dim
        self.action_dim = action_dim
        self.num_steps = args.diffusion_steps
        self.eta = args.eta
        self.schedule = cosine_schedule(self.num_steps)  # floats
        if args.last_step is not None:
            self.schedule = geometric_schedule(self.num_steps, args.last_step)
        self.normalizer = Normalizer(obs_dim)
        frequencies = torch.exp(torch.arange(16) * -math.log(10_000) / 16)
        angles = torch.arange(self.num_steps)[:, None] * frequencies
        time_features = torch.cat([angles.sin(), angles.cos()], dim=1)
        self.register_buffer("time_features", time_features, persistent=False)  # (N, 32)
        self.register_buffer("step_sizes", torch.tensor(self.schedule), persistent=False)  # (N,)
        # a step moves x by e * u; u in units of e_0 / e lets the network move all steps equally far
        control_scales = [self.schedule[0] / e for e in self.schedule]
        self.register_buffer("control_scales", torch.tensor(control_scales), persistent=False)
        noise_scales = [self.eta] + [math.sqrt(2 * e) for e in self.schedule]
        self.register_buffer("noise_scales", torch.tensor(noise_scales), persistent=False)

        # one linear layer of [obs, x, time], written as a sum: along a chain only x changes
        hidden = args.hidden_size
        self.time_mlp = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        self.obs_layer = nn.Linear(actor_dim, hidden)
        self.time_layer = nn.Linear(32, hidden, bias=False)
        self.control = Control(action_dim, hidden)
        bound = 1 / math.sqrt(actor_dim + action_dim + 32)  # torch's own, for the whole layer
        for layer in (self.obs_layer, self.control.x_layer, self.time_layer):
            nn.init.uniform_(layer.weight, -bound, bound)
        nn.init.uniform_(self.obs_layer.bias, -bound, bound)

    def noise(self, batch_size, generator):
        shape = (self.num_steps + 1, batch_size, self.action_dim)
        return torch.randn(shape, generator=generator, device=generator.device)

    def embed(self, obs):
        """The part of the first layer that does not depend on x, for all steps: (N, B, H)"""
        time_part = self.time_layer(self.time_mlp(self.time_features))  # (N, H)
        return time_part[:, None] + self.obs_layer(obs[:, : self.actor_dim])

    def controls_of_steps(self):
        """control once per step of a chain, all with the same weights. -> list of N functions

        This is [control] * N, made faster for a GPU; skip it at first.

        In a loop autograd adds up the gradients of the steps, weight by weight and step by step. Of
        copies that are cut from one row it takes a single sum: a GPU has a fifth less to launch.
        """
        if not torch.is_grad_enabled():
            return [self.control] * self.num_steps
        weights = dict(self.control.named_parameters())
        sizes = [weight.numel() for weight in weights.values()]
        row = torch.cat([weight.flatten() for weight in weights.values()])
        copies = []
        for copy in row.expand(self.num_steps, -1).unbind():
            pieces = zip(weights.items(), copy.split(sizes), strict=True)
            copies.append({name: piece.view_as(weight) for (name, weight), piece in pieces})
        return [lambda *x, own=own: functional_call(self.control, own, x) for own in copies]


class Agent(nn.Module):
    """All that training changes, in one state_dict."""

    def __init__(self, envs, args):
        super().__init__()
        self.spaces = envs.spaces
        self.policy = DiffusionPolicy(envs.obs_dim, envs.actor_dim, envs.action_dim, args)
        self.critic = Critic(envs.critic_start, envs.obs_dim, envs.action_dim, args)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha_init)))
        self.log_lambda = nn.Parameter(torch.tensor(math.log(args.lambda_init)))
        discounted_return = torch.zeros(args.num_envs)  # see scale_rewards
        self.register_buffer("discounted_return", discounted_return, persistent=False)
        self.register_buffer("squared_return_sum", torch.zeros(()))
        self.register_buffer("return_count", torch.zeros(()))


# === 4. The denoising chain ===
class Chain(NamedTuple):
    action: torch.Tensor  # (B, A), in [-1, 1]: tanh(x_N)
    last: torch.Tensor  # (B, A): x_N
    latents: torch.Tensor  # (B, N, A): x_0 to x_{N-1}
    controls: torch.Tensor  # (B, N, A): u at each of them


def cosine_schedule(N):
    """The paper's step sizes e_k: a squared cosine that falls from 1/N at the prior.

    e_k / eta^2 is the paper's beta * delta; the offset 0.008 is that of the usual schedule.
    """
    step_sizes = []
    for k in range(N):
        remaining = (N - k) / N
        angle = math.pi / 2 * (1.008 - remaining) / 1.008
        step_sizes.append((0.999 * math.cos(angle) ** 2 + 0.001) / N)
    return step_sizes


def geometric_schedule(N, last_step):
    """Step sizes e_k from 1/N at the prior to last_step, each the same fraction of the one before.

    sqrt(2 e) of the last step is noise that nothing takes back, and with few steps a squared cosine
    leaves much of it: 0.27 with N = 4.
    """
    fraction = (N * last_step) ** (1 / max(1, N - 1))
    return [fraction**k / N for k in range(N)]


def sample_chain(policy, embedded, noise):
    """Denoise, Eq. (5), (7). -> Chain

    embedded (N, B, H): policy.embed(obs). noise (N + 1, B, A): its first row makes x_0, the others
    push the N steps.
    """
    eta2 = policy.eta**2
    noise = policy.noise_scales[:, None, None] * noise  # times eta, then times sqrt(2 e)
    embedded = embedded.unbind()  # N x (B, H), by one backward step
    control = policy.controls_of_steps()
    x = noise[0]  # the prior Normal(0, eta^2)
    latents = []
    controls = []
    for k, e in enumerate(policy.schedule):
        u = policy.control_scales[k] * control[k](embedded[k], x)
        latents.append(x)
        controls.append(u)
        # x + e * (u - x / eta2) + sqrt(2 e) * noise, by two operations
        x = torch.add(noise[k + 1], x, alpha=1 - e / eta2)
        x = torch.add(x, u, alpha=e)
    return Chain(
        action=x.tanh(),
        last=x,
        latents=torch.stack(latents).transpose(0, 1),
        controls=torch.stack(controls).transpose(0, 1),
    )


def entropy_bound(policy, chain):
    """Eq. (12), a lower bound of the entropy of the actions: (B,)

    The log ratios of noising and denoising, log(noising(x_k | y) / denoising(y | x_k)), are
    averaged over y ~ Normal(mean, 2 e): the same expectation as at the sampled y = x_{k+1}, with
    less noise in the gradient.
    """
    eta2 = policy.eta**2
    bound = policy.action_dim / 2 * math.log(2 * math.pi * math.e * eta2)  # entropy of the prior

    # sum of the log ratios e / eta2 - (e / eta2)^2 / 2 - e / 4 * mismatch^2, where mismatch is
    # u - (x + mean) / eta2, and mean is x + e * (u - x / eta2)
    bound += policy.action_dim * sum(e / eta2 - (e / eta2) ** 2 / 2 for e in policy.schedule)
    e = policy.step_sizes[:, None]  # (N, 1)
    mismatch = (1 - e / eta2) * chain.controls - (2 - e / eta2) / eta2 * chain.latents
    bound = bound - (e / 4 * mismatch**2).sum(dim=(1, 2))

    # sum of log(1 - tanh(x)^2) = 2 * (log(2) - x - softplus(-2 x)), for the actions are tanh(x)
    x = chain.last
    return bound + 2 * (math.log(2) - x - F.softplus(-2 * x)).sum(dim=-1)


def trajectory_kl(policy, embedded, latents, controls):
    """Eq. (14) along chains of the old policy, (B, K, N, A) -> (B,)

    Both policies take steps of variance 2 e from means that differ by e times the difference of
    their controls, so the KL of a step is e / 4 times the squared difference.
    """
    B, K, N, A = latents.shape
    latents = latents.permute(2, 0, 1, 3)  # (N, B, K, A)
    controls = controls.permute(2, 0, 1, 3)
    embedded = embedded[:, :, None].expand(N, B, K, -1)
    new_controls = policy.control(embedded.flatten(0, 2), latents.flatten(0, 2))  # in one batch
    new_controls = policy.control_scales[:, None, None, None] * new_controls.view(N, B, K, A)
    squared_distance = (new_controls - controls).square().sum(dim=-1)  # (N, B, K)
    return (policy.step_sizes[:, None, None] / 4 * squared_distance).sum(dim=0).mean(dim=-1)


def act(agent, obs, sampler, args, generator):
    """Actions at evaluation; obs are normalized.

    ode: the probability flow with score scale c, Eq. (23), from a random start, so that every mode
    can be reached. sde: the policy itself. best-of-k: the best by Q of K samples of the policy.
    """
    policy = agent.policy
    if sampler == "ode":
        c = args.eval_score_scale
        embedded = policy.embed(obs)
        if args.eval_start == "episode":  # each row has the same noise at every step
            generator = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        x = policy.eta * policy.noise(obs.shape[0], generator)[0]
        for k, e in enumerate(policy.schedule):
            u = policy.control_scales[k] * policy.control(embedded[k], x)
            score = u / 2 - x / policy.eta**2
            x = x + e * (x / policy.eta**2 + 2 * c * score)  # at c = 1 the SDE without noise
        return x.tanh()
    if sampler == "sde":
        noise = policy.noise(obs.shape[0], generator)
        return sample_chain(policy, policy.embed(obs), noise).action
    num = args.eval_best_of
    repeated = obs.repeat_interleave(num, dim=0)  # (E * num, O)
    noise = policy.noise(len(repeated), generator)
    action = sample_chain(policy, policy.embed(repeated), noise).action
    q = agent.critic.value(agent.critic.features(repeated, action))
    best = q.view(-1, num).argmax(dim=1)  # (E,)
    rows = torch.arange(len(obs), device=obs.device)
    return action.view(len(obs), num, -1)[rows, best]


# === 5. The losses of policy and duals ===
def inside_trust_region(kl, args):
    """(B,) -> where the policy may improve; without a trust region, as in DIME, everywhere"""
    if args.trust_region == "none":
        return torch.ones_like(kl, dtype=torch.bool)
    return kl <= args.kl_bound


def actor_loss(agent, batch, noise, args):
    """The split objective, Eq. (19): inside the trust region improve, outside of it go back.

    -> loss, metrics; the entropy bound is the mean over all states
    """
    embedded = agent.policy.embed(batch["obs"])
    kl = trajectory_kl(agent.policy, embedded, batch["latents"], batch["controls"])
    chain = sample_chain(agent.policy, embedded, noise)
    bound = entropy_bound(agent.policy, chain)
    q = agent.critic.value(agent.critic.features(batch["obs"], chain.action))
    alpha = agent.log_alpha.exp().detach()
    multiplier = agent.log_lambda.exp().detach()
    improve = -q - alpha * bound  # Eq. (20)
    pull_back = multiplier * kl
    inside = inside_trust_region(kl, args)
    loss = torch.where(inside, improve, pull_back).mean()
    return loss, {
        "policy/kl": kl.detach().mean(),
        "policy/inside": inside.float().mean(),
        "policy/entropy_bound": bound.detach().mean(),
    }


def sparse_actor_loss(agent, batch, noise, args):
    """actor_loss, value and gradient, with a gradient of the KL only where it counts: outside.

    On a CPU that saves time. A GPU would wait for the number of states outside.
    """
    policy = agent.policy
    latents = batch["latents"]
    controls = batch["controls"]
    embedded = policy.embed(batch["obs"])  # (N, B, H)
    with torch.no_grad():
        kl = trajectory_kl(policy, embedded, latents, controls)
        inside = inside_trust_region(kl, args)
        outside = ~inside
    chain = sample_chain(policy, embedded, noise)
    bound = entropy_bound(policy, chain)
    q = agent.critic.value(agent.critic.features(batch["obs"], chain.action))
    improve = -q - agent.log_alpha.exp().detach() * bound
    kl_outside = trajectory_kl(policy, embedded[:, outside], latents[outside], controls[outside])
    pull_back = agent.log_lambda.exp().detach() * kl_outside
    loss = (improve[inside].sum() + pull_back.sum()) / len(kl)
    return loss, {
        "policy/kl": kl.mean(),
        "policy/inside": inside.float().mean(),
        "policy/entropy_bound": bound.detach().mean(),
    }


def dual_loss(agent, metrics, args):
    """Eq. (21): alpha grows while the entropy bound is below its target.
    Eq. (22): lambda grows while the KL is above its bound. metrics: as actor_loss returns them"""
    entropy_target = args.entropy_target * agent.policy.action_dim
    spare_entropy = metrics["policy/entropy_bound"] - entropy_target
    loss = agent.log_alpha.exp() * spare_entropy
    if args.trust_region == "split":
        excess_kl = metrics["policy/kl"] - args.kl_bound
        loss = loss - agent.log_lambda.exp() * excess_kl
    return loss


# --- end shared ---
# === 6. One iteration: rollout, targets, update ===
def policy_step(agent, args, batch):
    """Update the normalizer and act. batch: obs (E, O), noise. -> what the rollout stores"""
    policy = agent.policy
    policy.normalizer.update(batch["obs"])
    normalized = policy.normalizer(batch["obs"])  # old and new policy must see the same input
    chain = sample_chain(policy, policy.embed(normalized), batch["noise"])
    return {
        "obs": normalized,
        "action": chain.action,
        "latents": chain.latents,  # with the controls they define the trust region
        "controls": chain.controls,
    }


@torch.no_grad()
def rollout(agent, envs, obs, args, generator):
    """Collect T steps with the current policy. -> dict of (T, E, ...), next observation"""
    policy = agent.policy
    rho = args.noise_correlation
    noise = policy.noise(len(obs), generator)  # (N + 1, E, A)
    steps = []
    for _ in range(args.num_steps):
        # still a standard normal, but neighboring steps explore in similar directions
        noise = rho * noise + math.sqrt(1 - rho**2) * policy.noise(len(obs), generator)
        batch = {"obs": obs, "noise": noise}
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
    """Soft TD(lambda) targets, Eq. (13), with the policy and critic of the rollout.

    -> dict of (T * E, ...): what update needs
    """
    policy = agent.policy
    critic = agent.critic
    T, E = data["reward"].shape
    next_values = []
    next_bounds = []
    next_features = []
    for next_obs in data["next_obs"].flatten(0, 1).split(8192):  # chunks, to bound the memory
        noise = policy.noise(len(next_obs), generator)
        chain = sample_chain(policy, policy.embed(next_obs), noise)
        features = critic.features(next_obs, chain.action)
        next_features.append(features)
        next_values.append(critic.value(features))
        next_bounds.append(entropy_bound(policy, chain))
    next_value = torch.cat(next_values).view(T, E)
    next_bound = torch.cat(next_bounds).view(T, E)

    reward = data["reward"]
    terminated = data["terminated"]
    truncated = data["truncated"].clone()
    if args.normalize_reward:
        reward = scale_rewards(agent, reward, terminated, args)
    truncated[:-1] |= data["broken"][1:]  # no trace runs into a broken step
    alpha = agent.log_alpha.exp()
    soft_reward = reward + args.gamma * ~terminated * alpha * next_bound
    target = td_lambda_targets(
        soft_reward, next_value, terminated, truncated, args.gamma, args.td_lambda
    )

    obs = data["obs"].flatten(0, 1)
    latents = [data["latents"].flatten(0, 1)]
    controls = [data["controls"].flatten(0, 1)]
    for _ in range(args.kl_samples - 1):  # more chains of the same policy for the KL
        chain = sample_chain(policy, policy.embed(obs), policy.noise(T * E, generator))
        latents.append(chain.latents)
        controls.append(chain.controls)
    flat = {
        "obs": obs,
        "action": data["action"].flatten(0, 1),
        "latents": torch.stack(latents, dim=1),  # (T * E, K, N, A)
        "controls": torch.stack(controls, dim=1),
        "target": target.flatten(),
        "next_features": torch.cat(next_features),
    }
    # a broken step is never trained on: a copy of a whole one takes its place
    broken = data["broken"].flatten()
    rows = torch.arange(T * E, device=broken.device)
    rows = torch.where(broken, (~broken).int().argmax(), rows)
    return {name: values[rows] for name, values in flat.items()}


def critic_step(agent, optimizer, args, batch):
    """-> metrics"""
    loss, metrics = critic_loss(agent.critic, batch, args)
    optimizer.zero_grad()
    loss.backward()
    average([parameter.grad for parameter in agent.critic.parameters()])
    norm = nn.utils.clip_grad_norm_(agent.critic.parameters(), args.max_grad_norm)
    optimizer.step()
    return {**metrics, "losses/critic_grad_norm": norm}


def actor_step(agent, optimizer, args, batch):
    """A step of policy and duals, with noise for new actions in the batch. -> metrics"""
    sparse = batch["obs"].device.type == "cpu" and not args.compile  # which wants fixed shapes
    policy_loss = sparse_actor_loss if sparse else actor_loss
    loss, metrics = policy_loss(agent, batch, batch["noise"], args)
    metrics["losses/actor"] = loss.detach()
    loss = loss + dual_loss(agent, metrics, args)
    optimizer.zero_grad()
    # the critic's parameters get no gradient from the policy's loss
    parameters = [*agent.policy.parameters(), agent.log_alpha, agent.log_lambda]
    loss.backward(inputs=parameters)
    average([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm = nn.utils.clip_grad_norm_(agent.policy.parameters(), args.max_grad_norm)
    optimizer.step()
    return {**metrics, "losses/actor_grad_norm": norm}


def update(agent, actor_optimizer, critic_optimizer, data, args, generator):
    """Epochs of minibatches: a critic step, then a step of policy and duals. -> mean metrics"""
    batch_size = len(data["target"])
    critic_history = []
    policy_history = []
    for _ in range(args.update_epochs):
        order = torch.randperm(batch_size, generator=generator, device=generator.device)
        for index in order.split(batch_size // args.num_minibatches):
            batch = {name: values[index] for name, values in data.items()}
            critic_history.append(critic_step(agent, critic_optimizer, args, batch))
            if len(critic_history) % args.policy_delay == 0:
                batch["noise"] = agent.policy.noise(len(index), generator)
                policy_history.append(actor_step(agent, actor_optimizer, args, batch))

    means = {}
    for history in (critic_history, policy_history):
        for name in history[0]:
            means[name] = torch.stack([metrics[name] for metrics in history]).mean()
    target = data["target"]
    outside_range = (target < args.vmin) | (target > args.vmax)
    means["losses/target"] = target.mean()
    means["losses/clipped_targets"] = outside_range.float().mean()
    means["policy/alpha"] = agent.log_alpha.exp().detach()
    means["policy/lambda"] = agent.log_lambda.exp().detach()
    average(list(means.values()))
    return means


# === 7. Evaluation, checkpoints, logging ===
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
# === 8. Main ===
def prepare_functions(args):
    """The one place where functions are compiled, or recorded as CUDA graphs."""
    if args.compile:
        global sample_chain, entropy_bound, trajectory_kl, td_lambda_targets, critic_loss
        sample_chain = torch.compile(sample_chain)
        entropy_bound = torch.compile(entropy_bound)
        trajectory_kl = torch.compile(trajectory_kl)
        td_lambda_targets = torch.compile(td_lambda_targets)
        critic_loss = torch.compile(critic_loss)
    if args.cudagraphs:
        global policy_step, critic_step, actor_step
        policy_step = extras.Graph(policy_step)
        critic_step = extras.Graph(critic_step)
        actor_step = extras.Graph(actor_step)


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
    actor_optimizer, critic_optimizer = optimizers
    earlier_nonfinite = progress["nonfinite"]
    obs = envs.reset()
    for iteration in range(progress["step"] // batch_size + 1, num_iterations + 1):
        start = time.perf_counter()
        share_done = (iteration - 1) / num_iterations
        actor_learning_rate = args.actor_learning_rate * (1 - args.anneal * share_done)
        if iteration <= min(args.warmup_iterations, num_iterations // 5):
            actor_learning_rate = 0.0  # the policy stands still; critic and duals learn
        actor_optimizer.param_groups[0]["lr"].fill_(actor_learning_rate)
        kl_bound = args.kl_bound * (args.kl_bound_end / args.kl_bound) ** share_done
        args_now.kl_bound.fill_(kl_bound)
        change = args.entropy_target - args.entropy_target_start
        entropy_target = args.entropy_target_start + change * math.sqrt(share_done)
        args_now.entropy_target.fill_(entropy_target)

        data, obs = rollout(agent, envs, obs, args_now, generator)
        rollout_end = time.perf_counter()
        data = compute_targets(agent, data, args_now, generator)
        metrics = update(agent, actor_optimizer, critic_optimizer, data, args_now, generator)
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
        row["policy/kl_bound"] = kl_bound
        row["policy/entropy_target"] = entropy_target
        text = f"KL {row['policy/kl']:.3f}/{kl_bound:.2g}"
        text += f"  alpha {row['policy/alpha']:.2g}  lambda {row['policy/lambda']:.2g}"
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

    # environments, networks, optimizers
    env_seed = 10_007 * args.seed + progress["step"] + 100_003 * rank
    eval_envs = make_eval_envs(args, args.eval_episodes, env_seed + 5_000)
    # what an iteration sees: the share of this process, and tensors for what changes in the run
    args_now = replace(args, num_envs=args.num_envs // num_processes)
    args_now.kl_bound = torch.tensor(args.kl_bound, device=args.device)
    args_now.entropy_target = torch.tensor(args.entropy_target, device=args.device)
    agent = Agent(eval_envs, args_now).to(args.device)
    if args.evaluate:
        restore(checkpoint, args, agent)
        final_report(agent, args, Path(args.run_dir or checkpoint["folder"]))
        return
    envs = make_envs(args, args_now.num_envs, env_seed, stagger=True)
    if args.eval_env_id and envs.spaces != eval_envs.spaces:
        stop(f"{args.eval_env_id} has other observations or actions than {args.env_id}")
    duals = [
        dict(params=[agent.log_alpha], lr=args.alpha_learning_rate),
        dict(params=[agent.log_lambda], lr=args.lambda_learning_rate),
    ]
    for group in duals:
        group["betas"] = (0.9, 0.99)  # a short memory: d/d log alpha shrinks with alpha
    actor_groups = [dict(params=list(agent.policy.parameters())), *duals]
    actor_learning_rate = torch.tensor(args.actor_learning_rate, device=args.device)
    kind = dict(fused=True, capturable=args.cudagraphs)
    actor_optimizer = torch.optim.Adam(actor_groups, actor_learning_rate, **kind)
    critic_optimizer = torch.optim.Adam(agent.critic.parameters(), args.learning_rate, **kind)
    optimizers = (actor_optimizer, critic_optimizer)
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
