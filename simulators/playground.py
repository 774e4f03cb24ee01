"""MuJoCo Playground's tasks on MJX, as the `VecEnv` that the *_continuous.py scripts train on.

    python trudi_continuous.py --backend playground --env-id CheetahRun   # on a GPU, or on a CPU
    python -m simulators.playground CheetahRun                            # what this adapter costs

One compiled function steps all environments, keeps the true final observations, and starts
whatever ended anew, from a fresh random state. Tensors pass between torch and JAX by dlpack: no
copy, no transfer. Python reads no value of them before `pop_finished` is called, so a rollout
never waits for the device. Every step returns new buffers, so what a rollout keeps is never
overwritten.

These are other simulations than EnvPool's and dm_control's tasks of the same names: they have
other observations and other contacts.

Shapes: E environments, O observation, A action.
"""

import functools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

# JAX reads both when it starts. Without the first it takes three quarters of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "trudi-mjx"))

import jax
import jax.numpy as jnp
import numpy as np
import torch
from mujoco_playground import registry
from mujoco_playground._src import mjx_env

# On a CPU the policy needs each observation at once, so there is nothing to do meanwhile.
jax.config.update("jax_cpu_enable_async_dispatch", False)

CONTROL_SUITE = set(registry.dm_control_suite.ALL_ENVS)
CPU_GROUP = 8  # environments that a CPU starts anew at a time, see Simulator.restart
TASKS = {  # id -> the suite that a script's default settings belong to
    env_id: "DMC" if env_id in CONTROL_SUITE else "other" for env_id in registry.ALL_ENVS
}


def stop(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def load(env_id, on_cpu, overrides):
    """Make Playground's environment. -> environment, its config

    All robots but those of the control suite come from MuJoCo Menagerie, which Playground fetches
    when it is missing.
    """
    if env_id not in TASKS:
        raise ValueError("MuJoCo Playground has no task of this name")
    own_menagerie = os.environ.get("MENAGERIE_PATH")
    if own_menagerie:
        mjx_env.MENAGERIE_PATH = type(mjx_env.MENAGERIE_PATH)(own_menagerie)
    folder = mjx_env.MENAGERIE_PATH
    must_fetch = env_id not in CONTROL_SUITE and not folder.exists()
    if must_fetch:
        print(f"{env_id} needs MuJoCo Menagerie, which git now fetches from GitHub into")
        print(f"{folder}; to use a copy of your own, set MENAGERIE_PATH to its folder", flush=True)
    config = registry.get_default_config(env_id)
    if on_cpu and "impl" in config:
        config.impl = "jax"  # the default is Warp, made for GPUs
    try:
        env = registry.load(env_id, config=config, config_overrides=overrides or None)
    except Exception as error:
        if not must_fetch or folder.exists():
            raise
        stop(
            f"MuJoCo Menagerie is missing and could not be fetched ({type(error).__name__}); "
            f"without a network try --backend envpool --env-id {env_id}-v1, which brings its "
            "assets along"
        )
    return env, config


def flatten(obs):
    """The observation of one environment, an array or a dict -> (O,), privileged ones last."""
    if not hasattr(obs, "keys"):
        return obs.astype(jnp.float32)
    names = sorted(name for name in obs if name != "privileged_state")
    if "privileged_state" in obs:
        names.append("privileged_state")
    return jnp.concatenate([obs[name].reshape(-1) for name in names]).astype(jnp.float32)


def without_weak_type(array):
    """A weakly typed array at the start would compile the step a second time."""
    return jax.lax.convert_element_type(array, array.dtype)


class Carry(NamedTuple):
    """What one step hands to the next. The step writes its new carry over the old one's memory."""

    state: tuple  # arrays of the simulator's state; as a plain tuple, calls are cheaper
    obs: jax.Array  # (E, O) last observation, always finite
    key: jax.Array  # (E, 2) random key of the next episode
    episode_return: jax.Array  # (E,)
    episode_length: jax.Array  # (E,)
    success: jax.Array  # (E,) 1 after any success in this episode, nan if the task does not tell


class Ends(NamedTuple):
    """Which episodes a step ended, and the statistics of all episodes before any restart."""

    ended: jax.Array  # (E,)
    broken: jax.Array  # (E,) ended because the step was not finite
    episode_return: jax.Array  # (E,)
    episode_length: jax.Array  # (E,)
    success: jax.Array  # (E,)


class Step(NamedTuple):
    """What one step shows, in arrays of its own."""

    obs: jax.Array  # (E, O) where an episode ended, the first observation of the next one
    reward: jax.Array  # (E,)
    terminated: jax.Array  # (E,)
    truncated: jax.Array  # (E,)
    final_obs: jax.Array  # (E, O) where an episode ended, its last observation
    ends: Ends


class Simulator:
    """A task for a fixed number of environments: `begin` and `advance` are compiled functions."""

    def __init__(self, env_id, num_envs, jax_device, overrides):
        on_cpu = jax_device.platform == "cpu"
        self.env, config = load(env_id, on_cpu, overrides)
        self.num_envs = num_envs
        self.action_repeat = config.action_repeat
        self.time_limit = config.episode_length // config.action_repeat
        self.group_size = min(CPU_GROUP, num_envs) if on_cpu else num_envs  # see restart
        self.state_structure = None  # known once `begin` is compiled
        self.begin = jax.jit(self.start_episodes)
        # the new carry takes the old one's memory: on a CPU that is a tenth faster
        self.advance = jax.jit(self.step_all, donate_argnums=0)

    def start_episodes(self, key):
        """Start an episode for each key. -> Carry"""
        num_episodes = len(key)
        both_keys = jax.vmap(jax.random.split)(key)  # (E, 2 keys, 2)
        next_key = both_keys[:, 0]
        state = jax.vmap(self.env.reset)(both_keys[:, 1])
        self.state_structure = jax.tree.structure(state)
        # a broken start shows zeros; its first step is broken, too, and starts it again
        obs = jnp.nan_to_num(jax.vmap(flatten)(state.obs), posinf=0, neginf=0)
        carry = Carry(
            state=tuple(jax.tree.leaves(state)),
            obs=obs,
            key=next_key,
            episode_return=jnp.zeros(num_episodes),
            episode_length=jnp.zeros(num_episodes, jnp.int32),
            success=jnp.full(num_episodes, jnp.nan),
        )
        return jax.tree.map(without_weak_type, carry)

    def simulate(self, state, action, success):
        """Take one step, as many times as the task repeats actions.

        -> state, reward, terminated, success
        """
        action = jnp.clip(action, -1, 1)
        reward = jnp.zeros(self.num_envs)
        terminated = jnp.zeros(self.num_envs, bool)
        unknown = jnp.full(self.num_envs, jnp.nan)
        for _ in range(self.action_repeat):
            state = jax.vmap(self.env.step)(state, action)
            reward = reward + jnp.where(terminated, 0, state.reward)
            terminated = terminated | (state.done > 0)
            metric = state.metrics.get("success", state.metrics.get("reward/success", unknown))
            succeeded = jnp.where(jnp.isnan(metric), jnp.nan, metric > 0)
            success = jnp.fmax(success, succeeded)  # at any step of the episode
        return state, reward, terminated, success

    def step_all(self, carry, action):
        """Step all environments and start anew what ended. -> Carry, Step"""
        state = jax.tree.unflatten(self.state_structure, carry.state)
        state, reward, terminated, success = self.simulate(state, action, carry.success)
        obs = jax.vmap(flatten)(state.obs)
        broken = ~(jnp.isfinite(obs).all(axis=1) & jnp.isfinite(reward))
        final_obs = jnp.where(broken[:, None], carry.obs, obs)
        reward = jnp.where(broken, 0, reward)
        terminated = terminated & ~broken
        episode_return = carry.episode_return + reward
        episode_length = carry.episode_length + 1
        ended = terminated | broken | (episode_length >= self.time_limit)

        leaves = []
        for new, old in zip(jax.tree.leaves(state), carry.state, strict=True):
            leaves.append(jax.lax.convert_element_type(new, old.dtype))
        new_carry = Carry(
            state=tuple(leaves),
            obs=final_obs,
            key=carry.key,
            episode_return=episode_return,
            episode_length=episode_length,
            success=success,
        )
        new_carry = self.restart(new_carry, ended)
        ends = Ends(
            ended=ended,
            broken=broken,
            episode_return=episode_return,
            episode_length=episode_length,
            success=success,
        )
        step = Step(
            obs=new_carry.obs,
            reward=reward,
            terminated=terminated,
            truncated=ended & ~terminated,
            final_obs=final_obs,
            ends=ends,
        )
        return new_carry, step

    def restart(self, carry, ended):
        """Start new episodes in the rows that ended, a group at a time until none is left.

        A start can cost as much as hundreds of steps (CheetahRun's falls for two seconds). On a
        CPU it costs more the larger the group is, so groups are small: one serves the few rows
        that terminate together, many serve all rows at a time limit. A GPU starts all as fast as
        one.
        """

        def is_left(todo):
            _, left = todo
            return left.any()

        def restart_group(todo):
            carry, left = todo
            # num_envs fills up the group: it is no row, so nothing is written there
            rows = jnp.nonzero(left, size=self.group_size, fill_value=self.num_envs)[0]
            fresh = self.start_episodes(carry.key.at[rows].get(mode="clip"))
            put = functools.partial(self.put_rows, rows)
            return jax.tree.map(put, carry, fresh), left.at[rows].set(False, mode="drop")

        carry, _ = jax.lax.while_loop(is_left, restart_group, (carry, ended))
        return carry

    def put_rows(self, rows, old, fresh):
        has_rows = old.shape[:1] == (self.num_envs,) and fresh.shape[:1] == rows.shape
        if not has_rows:  # Warp has arrays for all environments together: the next step fills them
            return old
        return old.at[rows].set(fresh.astype(old.dtype), mode="drop")


def first_keys(seed, num_envs, jax_device):
    return jax.device_put(jax.random.split(jax.random.PRNGKey(seed), num_envs), jax_device)


@functools.cache
def build(env_id, num_envs, jax_device, overrides):
    """Compile the simulator, once per process. overrides: items of a dict. -> Simulator"""
    simulator = Simulator(env_id, num_envs, jax_device, dict(overrides))
    sentence = f"compiling the simulator of {num_envs} envs, about a minute the first time ..."
    print(sentence, flush=True)
    started = time.perf_counter()
    carry = simulator.begin(first_keys(0, num_envs, jax_device))
    action = np.zeros((num_envs, simulator.env.action_size), np.float32)
    jax.block_until_ready(simulator.advance(carry, jax.device_put(action, jax_device)))
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    return simulator


def find_jax_device(device):
    """JAX's name for torch's device"""
    platform = "gpu" if device.type == "cuda" else "cpu"
    try:
        return jax.devices(platform)[device.index or 0]
    except RuntimeError as error:
        return stop(
            f"torch uses CUDA but JAX sees no GPU ({error}): pip install 'jax[cuda13]==0.10.2', "
            "or choose --backend envpool"
        )


class VecEnv:
    """obs, reward, terminated, truncated, final_obs = step(action in [-1, 1]), all tensors.

    Where an episode ended, final_obs is its last observation and obs the first of the next one;
    elsewhere they are equal. The policy sees the columns of obs up to actor_dim, the critic those
    from critic_start on. A non-finite step becomes a truncation at the last finite observation,
    and broken tells where. With stagger, first episodes end at different lengths, so that the
    environments are in different phases of an episode. Overrides change the task's config.
    """

    def __init__(self, args, num_envs, seed, stagger=False, **overrides):
        self.num_envs = num_envs
        self.device = torch.device(args.device)
        jax_device = find_jax_device(self.device)
        overrides = tuple(sorted(overrides.items()))
        simulator = build(args.env_id, num_envs, jax_device, overrides)
        self.simulator = simulator
        self.begin = simulator.begin
        self.advance = simulator.advance
        self.action_dim = simulator.env.action_size
        sizes = simulator.env.observation_size
        if not hasattr(sizes, "keys"):
            sizes = {"state": sizes}
        sizes = {name: int(np.prod(size)) for name, size in sizes.items()}
        self.obs_dim = sum(sizes.values())
        self.actor_dim = self.obs_dim - sizes.get("privileged_state", 0)
        self.critic_start = self.actor_dim if "privileged_state" in sizes else 0
        shapes = {name: [size] for name, size in sizes.items() if name != "privileged_state"}
        if "privileged_state" in sizes:
            shapes["privileged_state"] = [sizes["privileged_state"]]
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
        self.num_nonfinite = 0  # that collect has seen
        self.finished = []  # episodes that ended since pop_finished, as far as collect has looked
        self.pending = []  # ends of the steps that collect has not looked at
        self.broken = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.first_ages = np.zeros(num_envs, np.int32)  # steps that first episodes are short of
        if stagger:
            first_lengths = 1 + np.arange(num_envs) * simulator.time_limit // num_envs
            self.first_ages = (simulator.time_limit - first_lengths).astype(np.int32)
        self.start(first_keys(seed % 2**30, num_envs, jax_device))

    def start(self, key):
        ages = jax.device_put(self.first_ages, key.device)
        self.carry = self.begin(key)._replace(episode_length=ages)
        self.is_whole = self.first_ages == 0  # a staggered episode is no result

    def reset(self):
        """Start a new episode in all environments. -> (E, O)"""
        self.collect()
        self.finished = []
        self.start(self.carry.key)
        return torch.from_dlpack(self.carry.obs).clone()  # the next step writes over the carry

    def step(self, action):
        action = jax.dlpack.from_dlpack(action.detach().contiguous())
        self.carry, step = self.advance(self.carry, action)
        self.pending.append(step.ends)
        self.broken = torch.from_dlpack(step.ends.broken)
        return (
            torch.from_dlpack(step.obs),
            torch.from_dlpack(step.reward),
            torch.from_dlpack(step.terminated),
            torch.from_dlpack(step.truncated),
            torch.from_dlpack(step.final_obs),
        )

    def collect(self):
        """Look for ends in the steps since the last look: here the host waits for the device."""
        ends_of_steps = jax.device_get(self.pending)
        self.pending = []
        for ends in ends_of_steps:
            for i in np.flatnonzero(ends.ended & self.is_whole):
                episode = {
                    "env": int(i),
                    "return": float(ends.episode_return[i]),
                    "length": int(ends.episode_length[i]),
                    "success": float(ends.success[i]),
                    "mode": float("nan"),  # its tasks have no names for ways to succeed
                    "broken": bool(ends.broken[i]),
                }
                self.finished.append(episode)
            self.is_whole = self.is_whole | ends.ended
            self.num_nonfinite += int(ends.broken.sum())

    @property
    def nonfinite(self):
        """How many steps were not finite so far; each one ended an episode."""
        self.collect()
        return self.num_nonfinite

    def pop_finished(self):
        """The episodes that ended since the last call."""
        self.collect()
        finished = self.finished
        self.finished = []
        return finished


class BareEnvs:
    """Playground's own compiled step, without ends and without torch: what the bench compares to"""

    def __init__(self, env, key):
        self.advance = jax.jit(jax.vmap(env.step))
        self.carry = jax.jit(jax.vmap(env.reset))(key)

    def step(self, action):
        self.carry = self.advance(self.carry, jax.dlpack.from_dlpack(action))


def bench(env_id, num_envs=128, steps=20, device="cpu"):
    """An episode's steps in turns: the bare compiled step, and this adapter with several ends."""
    torch.set_num_threads(1)  # as in a training
    args = SimpleNamespace(env_id=env_id, device=device)
    no_ends = VecEnv(args, num_envs, seed=1)
    one_by_one = VecEnv(args, num_envs, seed=1)
    time_limit = no_ends.simulator.time_limit
    ages = np.arange(num_envs, dtype=np.int32) * time_limit // num_envs
    ages = jax.device_put(ages, one_by_one.carry.key.device)
    one_by_one.carry = one_by_one.carry._replace(episode_length=ages)
    contestants = {
        "bare compiled step": BareEnvs(no_ends.simulator.env, no_ends.carry.key),
        "adapter, no ends": no_ends,
        "one by one, as by terminations": one_by_one,
    }
    actions = (torch.rand(steps, num_envs, no_ends.action_dim, device=device) * 2 - 1).unbind()
    for _ in range(2):  # the second call of the bare step may compile again, for its own types
        contestants["bare compiled step"].step(actions[0])
    seconds = {name: [] for name in contestants}
    rounds = (time_limit - 1) // steps
    for _ in range(rounds):
        for name, envs in contestants.items():
            started = time.perf_counter()
            for action in actions:
                envs.step(action)
            jax.block_until_ready(envs.carry)
            seconds[name].append(time.perf_counter() - started)

    print(f"{env_id}, {num_envs} envs, {steps * rounds} steps; other work disturbs single rounds")
    bare = np.array(seconds["bare compiled step"])
    for name, durations in seconds.items():
        durations = np.array(durations)
        speed = num_envs * steps * rounds / durations.sum()
        more_in_all = durations.sum() / bare.sum() - 1
        more_in_median = np.median(durations / bare) - 1
        print(
            f"  {name:<32}{speed:>9,.0f} steps/s   "
            f"{more_in_all:>+6.1%} in all, {more_in_median:>+6.1%} in the median round"
        )


if __name__ == "__main__":
    bench(sys.argv[1] if len(sys.argv) > 1 else "CheetahRun")
