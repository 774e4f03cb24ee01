"""Isaac Lab's tasks (Isaac-*), and mjlab's (Mjlab-*), which have the same API, as a `VecEnv`.

    python trudi_continuous.py --env-id Isaac-Velocity-Flat-G1-v0        # needs an NVIDIA GPU
    python trudi_continuous.py --env-id Mjlab-Velocity-Flat-Unitree-G1   # on a CPU, too

Isaac Lab has one simulator per process, so training and evaluation take turns with it. Whoever
finds the other's episodes in it starts all environments anew. The training does that in the step
after an evaluation, and marks all rows of this step as broken, so that nobody learns from them.

Both return the first observation of the next episode where an episode ended. The true last one is
taken by Isaac Lab itself where its version can (`compute_final_obs`). Else it is computed in
`_reset_idx`, which the environment calls between the end of an episode and the next start.

Shapes: E environments, O observation, A action. S >= E environments are in the simulator.
"""

import atexit
import contextlib
import io
import math
import os
import sys
from typing import NamedTuple

import torch

SIMULATORS = {}  # (backend, env_id) -> the one of this process


def open_isaaclab(env_id, num_envs, seed, device, render_mode, overrides):
    """-> Isaac Lab's environment, what closes the application"""
    arguments = sys.argv
    sys.argv = arguments[:1]  # Isaac Sim reads the command line, too, and ours is not for it
    try:
        try:
            from isaaclab.app import AppLauncher
        except ImportError as error:
            raise ImportError(f"Isaac Lab is missing ({error}): see docs/isaaclab.md") from error
        has_cameras = render_mode is not None
        launcher = AppLauncher(headless=True, device=device, enable_cameras=has_cameras)
        # these can be imported only after the application has started
        import gymnasium as gym
        import isaaclab_tasks  # noqa: F401 - registers the ids
        from isaaclab_tasks.utils import parse_env_cfg

        cfg = parse_env_cfg(env_id, device=device, num_envs=num_envs)
        cfg.seed = seed
        if hasattr(cfg, "compute_final_obs"):
            cfg.compute_final_obs = True
        for name, value in overrides.items():
            setattr(cfg, name, value)
        env = gym.make(env_id, cfg=cfg, render_mode=render_mode).unwrapped
    finally:
        sys.argv = arguments
    return env, launcher.app.close


def open_mjlab(env_id, num_envs, seed, device, render_mode, overrides):
    """-> mjlab's environment, nothing else to close"""
    try:
        import mjlab.tasks  # noqa: F401 - registers the ids
        import warp
        from mjlab.envs import ManagerBasedRlEnv
        from mjlab.tasks.registry import list_tasks, load_env_cfg
    except ImportError as error:
        needed = "pip install -r requirements-mjlab.txt, in a virtual environment of its own"
        raise ImportError(f"mjlab is missing ({error}): {needed}") from error
    if env_id not in list_tasks():
        raise ValueError(f"mjlab has no task of this name, but {', '.join(list_tasks())}")
    warp.config.log_level = warp.LOG_WARNING  # it would name each of a hundred kernels
    cfg = load_env_cfg(env_id)
    cfg.scene.num_envs = num_envs
    cfg.seed = seed
    for name, value in overrides.items():
        setattr(cfg, name, value)
    print(
        f"making {num_envs} envs; the first time their code is compiled, a minute or two",
        flush=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # a hundred lines about the task
        env = ManagerBasedRlEnv(cfg, device=device, render_mode=render_mode)
    return env, None


def find_simulator(args, num_envs, seed, render_mode, overrides):
    """The simulator of a task; the first caller opens it, large enough for the training as well."""
    key = (args.backend, args.env_id)
    if key not in SIMULATORS:
        if args.backend == "isaaclab" and SIMULATORS:
            raise ValueError("Isaac Lab has one simulator per process: leave --eval-env-id empty")
        size = num_envs
        if not args.evaluate:
            num_processes = int(os.environ.get("WORLD_SIZE", 1))  # by torchrun
            size = max(num_envs, args.num_envs // num_processes)
        SIMULATORS[key] = Simulator(args, size, seed, render_mode, overrides)
    simulator = SIMULATORS[key]
    if num_envs > simulator.env.num_envs:
        raise ValueError(f"the simulator is open with {simulator.env.num_envs} environments only")
    return simulator


class Step(NamedTuple):
    """What one step of all environments of the simulator shows, in tensors of its own."""

    obs: torch.Tensor  # (S, O) where an episode ended, the first observation of the next one
    reward: torch.Tensor  # (S,)
    terminated: torch.Tensor  # (S,)
    truncated: torch.Tensor  # (S,)
    final_obs: torch.Tensor  # (S, O) where an episode ended, its last observation
    success: torch.Tensor  # (S,) 1 or 0 of the episode so far, nan if the task does not tell


class Simulator:
    """An environment of Isaac Lab or mjlab, which several VecEnv take turns to use."""

    def __init__(self, args, num_envs, seed, render_mode, overrides):
        self.is_mjlab = args.backend == "mjlab"
        open_environment = open_mjlab if self.is_mjlab else open_isaaclab
        device = "cuda:0" if args.device == "cuda" else args.device
        # it seeds torch, which must not decide how the networks start
        with torch.random.fork_rng(devices=[]):
            self.env, self.close_application = open_environment(
                args.env_id, num_envs, seed, device, render_mode, overrides
            )
        atexit.register(self.close)
        self.user = None  # the VecEnv whose episodes are in the environment
        self.is_stepping = False  # else a reset is not the end of an episode
        self.training_steps = 0  # that curricula count
        self.captured = None  # observation and success before a reset
        spaces = self.env.single_observation_space.spaces
        self.actor_group = "actor" if self.is_mjlab else "policy"
        self.groups = [name for name in (self.actor_group, "critic") if name in spaces]
        for name in self.groups:
            if hasattr(spaces[name], "spaces"):
                raise TypeError(f"its {name} observation has parts: set concatenate_terms")
        # wrap what the environment calls by itself
        self.original_reset = self.env._reset_idx
        self.env._reset_idx = self.before_reset
        self.original_curriculum = None
        if hasattr(self.env, "curriculum_manager"):
            self.original_curriculum = self.env.curriculum_manager.compute
            self.env.curriculum_manager.compute = self.update_curriculum

    def flatten(self, obs):
        """Groups of observations -> (S, O) in memory of its own, the critic's columns last."""
        return torch.cat([obs[name].flatten(1).float() for name in self.groups], dim=1)

    def observe(self):
        """What the environments look like now, between the end of a step and the restarts."""
        if self.is_mjlab:  # positions are a step ahead of all that is derived from them
            self.env.sim.forward()
            self.env.sim.sense()
        if hasattr(self.env, "observation_manager"):
            # not compute(), which mjlab answers from its cache
            compute_group = self.env.observation_manager.compute_group
            return self.flatten({name: compute_group(name) for name in self.groups})
        obs = dict(self.env._get_observations())
        if self.env.cfg.observation_noise_model:
            obs["policy"] = self.env._observation_noise_model(obs["policy"])
        return self.flatten(obs)

    def read_success(self):
        """-> (S,) 1 or 0 of the present episodes, nan if the task does not tell"""
        env = self.env
        if hasattr(env, "successes"):  # goals that Isaac Lab's hands have reached
            return (env.successes > 0).float()
        if hasattr(env, "termination_manager"):
            if "success" in env.termination_manager.active_terms:
                return env.termination_manager.get_term("success").float()
            for name in env.command_manager.active_terms:  # mjlab's lifting of a cube
                metrics = env.command_manager.get_term(name).metrics
                if "episode_success" in metrics:
                    return (metrics["episode_success"] > 0).float()
        return torch.full((env.num_envs,), math.nan, device=env.device)

    def before_reset(self, env_ids):
        """In the place of _reset_idx: keep what it is about to overwrite."""
        if self.is_stepping:
            final_obs = None
            if not getattr(self.env.cfg, "compute_final_obs", False):
                final_obs = self.observe()
            self.captured = (final_obs, self.read_success().clone())
        self.original_reset(env_ids)

    def update_curriculum(self, env_ids):
        """Only whole episodes of the training make a task easier or harder.

        A robot that an evaluation interrupts has not walked far, and would be taken for a bad one.
        """
        if self.user is None:
            self.original_curriculum(env_ids=env_ids)
        elif self.is_stepping and self.user.is_training:
            whole = torch.zeros(self.env.num_envs, dtype=torch.bool, device=self.env.device)
            whole[: self.user.num_envs] = self.user.is_whole
            env_ids = env_ids[whole[env_ids.long()]]
            if len(env_ids) > 0:
                self.original_curriculum(env_ids=env_ids)

    def reset(self, user, seed):
        """A new episode of this user in all environments. -> (S, O)"""
        with contextlib.redirect_stdout(io.StringIO()):  # mjlab tells the seed
            obs, _ = self.env.reset(seed=seed)
        self.user = user
        if user.is_training:
            self.env.common_step_counter = self.training_steps
        return self.flatten(obs)

    def restart(self, env_ids):
        """A new episode in some environments that did not end by themselves. -> (S, O)"""
        if hasattr(self.env, "observation_manager"):
            obs, _ = self.env.reset(env_ids=env_ids)
            return self.flatten(obs)
        self.env._reset_idx(env_ids)
        self.env.scene.write_data_to_sim()
        self.env.sim.forward()
        return self.observe()

    def step(self, action):
        """action: (E, A) of the first environments; the others get zeros. -> Step"""
        padding = self.env.num_envs - len(action)
        action = torch.nn.functional.pad(action, (0, 0, 0, padding))
        self.captured = None
        self.is_stepping = True
        obs, reward, terminated, truncated, extras = self.env.step(action)
        self.is_stepping = False
        if self.user.is_training:
            self.training_steps = self.env.common_step_counter
        obs = self.flatten(obs)
        # they are buffers that the next step overwrites
        reward = reward.float().clone()
        terminated = terminated.clone()
        truncated = truncated.clone()
        if self.env.cfg.is_finite_horizon:  # the time limit is part of the task
            terminated = terminated | truncated
        final_obs = obs
        success = self.read_success().clone()
        if self.captured is not None:
            ended = terminated | truncated
            last_obs, last_success = self.captured
            if last_obs is None:
                last_obs = self.flatten(extras["final_obs"])
            final_obs = torch.where(ended[:, None], last_obs, obs)
            success = torch.where(ended, last_success, success)
        return Step(obs, reward, terminated, truncated & ~terminated, final_obs, success)

    def close(self):
        """At the end of the process, also after an error."""
        sys.stdout.flush()  # Isaac Sim may end the process here
        sys.stderr.flush()
        self.env.close()
        if self.close_application:
            self.close_application()


class VecEnv:
    """obs, reward, terminated, truncated, final_obs = step(action in [-1, 1]), all tensors.

    Where an episode ended, final_obs is its last observation and obs the first of the next one;
    elsewhere they are equal. The policy sees the columns of obs up to actor_dim, the critic those
    from critic_start on. A non-finite step becomes a truncation at the last finite observation,
    and broken tells where. All rows are broken in the step after another VecEnv has used the
    simulator. With stagger, which is for training, first episodes end at different lengths.
    Overrides change the task's config. They and render_mode are those of the VecEnv that opens the
    simulator, the first one.
    """

    def __init__(self, args, num_envs, seed, stagger=False, render_mode=None, **overrides):
        if args.num_steps < 2:
            reason = "the step after an evaluation is not trained on"
            raise ValueError(f"num_steps must be at least 2: {reason}")
        self.num_envs = num_envs
        self.device = torch.device(args.device)
        self.seed = seed % 2**30  # of the first reset
        self.is_training = stagger
        self.simulator = find_simulator(args, num_envs, self.seed, render_mode, overrides)
        env = self.simulator.env
        self.env = env  # for tools/record.py
        groups = self.simulator.groups
        obs_spaces = env.single_observation_space.spaces
        shapes = {name: [int(size) for size in obs_spaces[name].shape] for name in groups}
        if len(env.single_action_space.shape) != 1:
            raise TypeError("its actions are not a vector of continuous ones")
        self.action_dim = int(env.single_action_space.shape[0])
        self.obs_dim = sum(math.prod(shape) for shape in shapes.values())
        self.actor_dim = math.prod(shapes[self.simulator.actor_group])
        self.critic_start = 0
        if "critic" in shapes:
            self.critic_start = self.actor_dim
            shapes["privileged_state"] = shapes.pop("critic")
        self.spaces = {  # for load_policy
            "obs_dim": self.obs_dim,
            "actor_dim": self.actor_dim,
            "critic_start": self.critic_start,
            "action_dim": self.action_dim,
            "obs_shapes": shapes,
            "action_shape": [self.action_dim],
            "action_low": [-1.0] * self.action_dim,
            "action_high": [1.0] * self.action_dim,
        }
        self.finished = []  # episodes that ended since pop_finished, as far as collect has looked
        self.pending = []  # ends of the steps that collect has not looked at, each (E, 5)
        self.num_nonfinite = torch.zeros((), dtype=torch.long, device=self.device)
        self.broken = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.obs = None  # (E, O) once an episode has started

    def start(self):
        """Start a new episode in all environments; with stagger the clocks are ahead at first."""
        obs = self.simulator.reset(self, self.seed)[: self.num_envs]
        self.seed = None  # later resets go on with the simulator's own random stream
        self.obs = obs.nan_to_num(0, 0, 0)
        self.episode_return = torch.zeros(self.num_envs, device=self.device)
        self.episode_length = torch.zeros(self.num_envs, device=self.device)
        self.success = torch.full((self.num_envs,), math.nan, device=self.device)
        self.is_whole = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if self.is_training:
            env = self.simulator.env
            time_limit = int(env.max_episode_length)
            rows = torch.arange(self.num_envs, device=self.device)
            age = time_limit - 1 - rows * time_limit // self.num_envs
            env.episode_length_buf[: self.num_envs] = age.to(env.episode_length_buf.dtype)
            self.is_whole = age == 0  # a staggered episode is no result

    def reset(self):
        """Start a new episode in all environments. -> (E, O)"""
        self.start()
        self.pending = []
        self.finished = []
        return self.obs

    def start_after_others(self):
        """A step in which all episodes are cut, because the simulator holds none of them."""
        final_obs = self.obs
        self.start()
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.broken = everywhere
        reward = torch.zeros(self.num_envs, device=self.device)
        return self.obs, reward, ~everywhere, everywhere.clone(), final_obs

    def step(self, action):
        if self.obs is None:
            self.start()
        if self.simulator.user is not self:
            return self.start_after_others()
        step = self.simulator.step(action.detach().clamp(-1, 1))
        obs, reward, terminated, truncated, final_obs, success = (
            values[: self.num_envs] for values in step
        )
        broken = ~(final_obs.isfinite().all(dim=1) & reward.isfinite())
        must_restart = broken & ~terminated & ~truncated
        if must_restart.any():
            env_ids = must_restart.nonzero()[:, 0]
            fresh_obs = self.simulator.restart(env_ids)[: self.num_envs]
            obs = torch.where(must_restart[:, None], fresh_obs, obs)
        final_obs = torch.where(broken[:, None], self.obs, final_obs)
        reward = reward.masked_fill(broken, 0)
        terminated = terminated & ~broken
        truncated = truncated | broken
        ended = terminated | truncated

        self.num_nonfinite += broken.sum()
        self.episode_return += reward
        self.episode_length += 1
        self.success = torch.fmax(self.success, success)  # at any step of the episode
        columns = [ended & self.is_whole, self.episode_return, self.episode_length]
        self.pending.append(torch.stack([*columns, self.success, broken], dim=1))
        self.episode_return = self.episode_return.masked_fill(ended, 0)
        self.episode_length = self.episode_length.masked_fill(ended, 0)
        self.success = self.success.masked_fill(ended, math.nan)
        self.is_whole = self.is_whole | ended
        self.broken = broken
        # a broken start shows zeros; its first step is broken, too, and starts it again
        self.obs = obs.nan_to_num(0, 0, 0)
        return self.obs, reward, terminated, truncated, final_obs

    def collect(self):
        """Look for ends in the steps since the last look: here the host waits for the device."""
        if not self.pending:
            return
        table = torch.stack(self.pending).cpu()  # (T, E, 5)
        self.pending = []
        for t, i in table[:, :, 0].nonzero().tolist():
            _, episode_return, episode_length, success, broken = table[t, i].tolist()
            episode = {
                "env": i,
                "return": episode_return,
                "length": int(episode_length),
                "success": success,
                "mode": math.nan,  # its tasks have no names for ways to succeed
                "broken": broken > 0,
            }
            self.finished.append(episode)

    @property
    def nonfinite(self):
        """How many steps were not finite so far; each one ended an episode."""
        return int(self.num_nonfinite)

    def pop_finished(self):
        """The episodes that ended since the last call."""
        self.collect()
        finished = self.finished
        self.finished = []
        return finished
