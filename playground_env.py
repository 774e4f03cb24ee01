"""MuJoCo Playground's tasks on MJX, under the contract of the *_continuous.py scripts (see VecEnv there).

    python trudi_continuous.py --backend playground --env-id CheetahRun     # JAX and torch on the same GPU, or on a CPU
    python playground_env.py CheetahRun                                     # what this adapter costs

The simulator is one compiled function of all envs: step, keep the true final observation, start anew, with a fresh
random state, whatever ended. Tensors pass between torch and JAX by dlpack: no copy, no transfer, and Python reads no
value of them. Every step returns new buffers, so what the rollout keeps is never overwritten. A fresh start can cost as
much as hundreds of steps (CheetahRun's falls for two seconds), so it is computed for as many envs at a time as end
together in a training: staggered episodes of 1000 steps end in 31 groups with a CPU's rollouts, in 7 with CUDA's.

These are other simulations than EnvPool's and dm_control's tasks of the same names: other observations, other contacts.
"""

import functools
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes three quarters of the GPU's memory
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "trudi-mjx"))  # of compiled simulators

import jax
import jax.numpy as jnp
import numpy as np
import torch
from mujoco_playground import registry
from mujoco_playground._src import mjx_env

jax.config.update("jax_cpu_enable_async_dispatch", False)  # a policy needs each observation at once: no use on a CPU
DMC = set(registry.dm_control_suite.ALL_ENVS)
TASKS = {env_id: "DMC" if env_id in DMC else "other" for env_id in registry.ALL_ENVS}  # id -> suite of the scripts
TASKS |= {f"{robot}Joystick{ground}Terrain": "humanoid" for robot in ("G1", "T1") for ground in ("Flat", "Rough")}


def stop(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def load(env_id, on_cpu, overrides):
    """-> env, its config. All but the DMC robots come from MuJoCo Menagerie, which Playground fetches when missing."""
    if folder := os.environ.get("MENAGERIE_PATH"):
        mjx_env.MENAGERIE_PATH = type(mjx_env.MENAGERIE_PATH)(folder)
    missing = env_id not in DMC and not mjx_env.MENAGERIE_PATH.exists()
    if missing:
        print(f"{env_id} needs MuJoCo Menagerie, which git now fetches from GitHub into")
        print(f"{mjx_env.MENAGERIE_PATH}; to use a copy of your own, set MENAGERIE_PATH to its folder", flush=True)
    config = registry.get_default_config(env_id)
    if on_cpu and "impl" in config:
        config.impl = "jax"  # the default is Warp, made for GPUs
    try:
        return registry.load(env_id, config=config, config_overrides=dict(overrides) or None), config
    except Exception as e:
        if not missing or mjx_env.MENAGERIE_PATH.exists():
            raise
        same = f"without a network try --backend envpool --env-id {env_id}-v1, which brings its assets along"
        stop(f"MuJoCo Menagerie is missing and could not be fetched ({type(e).__name__}); {same}")


def flatten(obs):  # of one env, array or dict -> (O,), privileged observations last
    if not hasattr(obs, "keys"):
        return obs.astype(jnp.float32)
    names = sorted(obs.keys(), key=lambda name: (name == "privileged_state", name))
    return jnp.concatenate([obs[name].reshape(-1) for name in names]).astype(jnp.float32)


@jax.jit
def first_keys(seed, past):  # past (E,): resets that a resumed run has behind it
    keys = jax.random.split(jax.random.PRNGKey(seed), len(past))
    return jax.vmap(lambda key, n: jax.lax.fori_loop(0, n, lambda _, k: jax.random.split(k)[0], key))(keys, past)


@functools.cache
def build(env_id, num_envs, place, overrides):
    """Compile the simulator for so many envs, once per process. -> env, episode length, begin, advance"""
    env, config = load(env_id, place.platform == "cpu", overrides)
    length, repeat = config.episode_length // config.action_repeat, config.action_repeat
    group = -(-num_envs // (31 if place.platform == "cpu" else 7))  # envs that start anew at a time
    tree = []  # the structure of the simulator's state, which is carried as a plain tuple: calls are cheaper so

    def begin(carry):  # new episodes: carry has keys and counts of some envs, and gets all the rest
        later, now = jnp.moveaxis(jax.vmap(jax.random.split)(carry["key"]), 1, 0)
        state, zeros = jax.vmap(env.reset)(now), jnp.zeros_like(carry["resets"])
        obs = jnp.nan_to_num(jax.vmap(flatten)(state.obs), posinf=0, neginf=0)  # a broken start: restarted after a step
        leaves, tree[:] = tuple(jax.tree.leaves(state)), [jax.tree.structure(state)]
        fresh = dict(state=leaves, obs=obs, key=later, clock=zeros, limit=zeros + length, returns=zeros * 0.0)
        fresh |= dict(resets=carry["resets"] + 1, nonfinite=carry["nonfinite"], success=zeros * jnp.nan)
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), fresh)  # no weak types, as in all steps

    def restart(todo):  # some envs of those that ended
        carry, ended = todo
        rows = jnp.nonzero(ended, size=group, fill_value=num_envs)[0]  # num_envs: no env, is dropped
        fresh = begin({k: carry[k].at[rows].get(mode="clip") for k in ("key", "resets", "nonfinite")})

        def put(old, new):
            if old.shape[:1] != (num_envs,) or new.shape[:1] != rows.shape:
                return old  # Warp has arrays without an env axis (contacts of all envs): the next step fills them
            return old.at[rows].set(new.astype(old.dtype), mode="drop")

        return jax.tree.map(put, carry, fresh), ended.at[rows].set(False, mode="drop")

    def advance(carry, action):  # -> carry, all results in one table (E, 8 + 2 O): each array that crosses costs time
        state, success = jax.tree.unflatten(tree[0], carry["state"]), carry["success"]
        reward, terminated = jnp.zeros(num_envs), jnp.zeros(num_envs, bool)
        for _ in range(repeat):
            state = jax.vmap(env.step)(state, jnp.clip(action, -1, 1))
            reward = reward + jnp.where(terminated, 0, state.reward)
            terminated |= state.done > 0
            now = state.metrics.get("success", state.metrics.get("reward/success", jnp.full(num_envs, jnp.nan)))
            success = jnp.fmax(success, jnp.where(jnp.isnan(now), now, now > 0))  # at any step of the episode
        obs = jax.vmap(flatten)(state.obs)
        bad = ~(jnp.isfinite(obs).all(1) & jnp.isfinite(reward))
        obs, reward = jnp.where(bad[:, None], carry["obs"], obs), jnp.where(bad, 0, reward)
        clock, returns = carry["clock"] + 1, carry["returns"] + reward
        terminated &= ~bad
        whole = (terminated | (clock >= length)) & ~bad  # it ended by itself
        ended = whole | bad | (clock >= carry["limit"])
        stats = jnp.where(whole, jnp.arange(num_envs), -1), returns, clock, success
        columns = jnp.stack([reward, terminated, ended & ~terminated, ~bad, *stats], 1).astype(jnp.float32)
        pairs = zip(jax.tree.leaves(state), carry["state"], strict=True)
        leaves = tuple(jax.lax.convert_element_type(new, old.dtype) for new, old in pairs)
        carry = carry | dict(state=leaves, obs=obs, clock=clock, returns=returns)
        carry |= dict(success=success, nonfinite=carry["nonfinite"] + bad)
        carry, _ = jax.lax.while_loop(lambda todo: todo[1].any(), restart, (carry, ended))
        return carry, jnp.concatenate([columns, carry["obs"], obs], 1)

    started = time.perf_counter()
    print(f"compiling the simulator of {num_envs} envs, about a minute the first time ...", flush=True)
    begin_all, zeros = jax.jit(begin), np.zeros(num_envs, np.int32)
    advance = jax.jit(advance, donate_argnums=0)  # the old carry's memory holds the new one: on a CPU a tenth faster
    counts = jax.device_put(dict(resets=zeros, nonfinite=zeros), place)
    carry = begin_all(counts | dict(key=first_keys(0, counts["resets"])))
    jax.block_until_ready(advance(carry, jax.device_put(np.zeros((num_envs, env.action_size), np.float32), place)))
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    return env, length, begin_all, advance


class VecEnv:
    def __init__(self, backend, env_id, num_envs, seed, device, threads=1, resets=None, stagger=0, **kwargs):
        self.backend, self.num_envs, self.device = backend, num_envs, torch.device(device)
        try:
            place = jax.devices("gpu" if self.device.type == "cuda" else "cpu")[self.device.index or 0]
        except RuntimeError as e:
            stop(f"torch uses CUDA but JAX sees no GPU ({e}): pip install 'jax[cuda12]', or choose --backend envpool")
        env, length, self.begin, self.advance = build(env_id, num_envs, place, tuple(sorted(kwargs.items())))
        sizes = dict(env.observation_size) if hasattr(env.observation_size, "keys") else {"state": env.observation_size}
        self.actor_dim = sum(math.prod(np.atleast_1d(n)) for name, n in sizes.items() if name != "privileged_state")
        self.critic_start = self.actor_dim if "privileged_state" in sizes else 0
        self.action_dim, self.index = env.action_size, torch.arange(num_envs, device=self.device)
        zeros = np.zeros(num_envs, np.int32)
        past = zeros if resets is None or len(resets) != num_envs else np.asarray(resets, np.int32) - 1
        start = jax.device_put(dict(resets=past, nonfinite=zeros), place)
        self.carry = self.begin(start | dict(key=first_keys(seed, start["resets"])))
        if stagger:  # first episodes end apart, or all envs would stay in step
            phase = stagger * (1 + np.arange(num_envs) * (length // stagger) // num_envs)
            self.carry["limit"] = jax.device_put(phase.astype(np.int32), place)
        self.obs = self.peek("obs")
        self.before, self.pending, self.ends = 0, [], []  # before: non-finite steps of the run that this one resumes

    def peek(self, name):  # a copy: the next step writes over what is carried
        return torch.from_dlpack(self.carry[name]).clone()

    resets = property(lambda self: self.peek("resets").cpu())
    episode_length = property(lambda self: self.peek("clock"))
    episode_return = property(lambda self: self.peek("returns"))

    @property
    def nonfinite(self):
        return self.before + int(self.peek("nonfinite").sum())

    @nonfinite.setter
    def nonfinite(self, count):
        self.before = count

    @property
    def finished(self):  # looks for ends when asked, so that `step` need not wait for the device
        if self.pending:
            rows, self.pending = torch.cat(self.pending), []
            self.ends += [rows[rows[:, 0] >= 0]]
        return self.ends

    def stats(self):  # of the episodes under way -> (E, 4): env, return, length, success
        return torch.stack([self.index, self.episode_return, self.episode_length, self.peek("success")], 1)

    def reset(self):
        self.carry = self.begin({k: self.carry[k] for k in ("key", "resets", "nonfinite")})
        self.pending, self.ends, self.obs = [], [], self.peek("obs")
        return self.obs

    def step(self, action):
        self.carry, table = self.advance(self.carry, jax.dlpack.from_dlpack(action.detach().contiguous()))
        columns, self.obs, final_obs = torch.from_dlpack(table).split([8, *[self.obs.shape[1]] * 2], 1)
        terminated, truncated, self.valid = columns[:, 1:4].bool().unbind(1)
        self.pending.append(columns[:, 4:].clone())  # or the whole table would stay
        return self.obs, columns[:, 0], terminated, truncated, final_obs


def bench(env_id, num_envs=128, steps=15, rounds=60, device="cpu"):
    """The bare compiled step of an env, in turns with this adapter, without and with the restarts of a training."""
    torch.set_num_threads(1)  # as in a training
    envs = [VecEnv("playground", env_id, num_envs, 1, device, stagger=n) for n in (0, 32)]
    actions = (torch.rand(steps, num_envs, envs[0].action_dim, device=device) * 2 - 1).unbind()
    env = load(env_id, device == "cpu", ())[0]
    step, state = jax.jit(jax.vmap(env.step)), jax.jit(jax.vmap(env.reset))(envs[0].carry["key"])
    for action in actions[:3]:  # compiled before the clock runs; the second call may compile again, for its own types
        state = jax.block_until_ready(step(state, jax.dlpack.from_dlpack(action)))
    seconds = {name: [] for name in ("bare compiled step", "adapter between ends", "adapter with restarts")}
    for _ in range(rounds):
        for name, vec_env in zip(seconds, (None, *envs), strict=True):
            began = time.perf_counter()
            for action in actions:
                if vec_env:
                    vec_env.step(action)
                else:
                    state = step(state, jax.dlpack.from_dlpack(action))
            jax.block_until_ready(vec_env.carry if vec_env else state)
            seconds[name].append(time.perf_counter() - began)
    print(f"{env_id}, {num_envs} envs, {steps * rounds} steps each; other work disturbs single rounds")
    bare = np.array(seconds["bare compiled step"])
    for name, x in seconds.items():
        speed, more, median = num_envs * steps * rounds / sum(x), sum(x) / sum(bare) - 1, np.median(x / bare) - 1
        print(f"  {name:<24}{speed:>9,.0f} steps/s   {more:>+6.1%} in all, {median:>+6.1%} in the median round")


if __name__ == "__main__":
    bench(*sys.argv[1:2])
