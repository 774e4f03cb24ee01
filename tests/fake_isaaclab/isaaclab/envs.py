"""Environments with a clock, in Isaac Lab's two ways to write an environment.

An environment observes its clock, a number drawn at its start, and the action. An action above 0.9
in the first column ends the episode. With cfg.faults one below -0.9 breaks the simulation of its
environment, in the second column the reward. An episode has 6 steps in both ways, which count them
differently.
The first environment succeeds in its third step.
"""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch


class SimulationContext:
    instance = None

    def __init__(self):
        if SimulationContext.instance is not None:
            raise RuntimeError("Simulation context already exists. Cannot create a new one.")
        SimulationContext.instance = self

    def forward(self):
        pass


def box(size):
    return gym.spaces.Box(-np.inf, np.inf, (size,))


class Clock(gym.Env):
    """What both ways have in common."""

    groups = {"policy": 4}
    metadata = {"render_modes": [None, "rgb_array"]}

    def __init__(self, cfg, render_mode):
        self.cfg = cfg
        self.render_mode = render_mode
        self.seed(cfg.seed)
        self.sim = SimulationContext()
        self.scene = SimpleNamespace(write_data_to_sim=lambda: None)
        self.num_envs = cfg.scene.num_envs
        self.device = cfg.sim.device
        spaces = {name: box(size) for name, size in self.groups.items()}
        self.single_observation_space = gym.spaces.Dict(spaces)
        self.single_action_space = box(2)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.common_step_counter = 0
        self.extras = {}
        self.clock = torch.zeros(self.num_envs)
        self.draw = torch.zeros(self.num_envs)
        self.action = torch.zeros(self.num_envs, 2)
        self.restarts = []  # env_ids of each restart

    def seed(self, seed):
        torch.manual_seed(seed)

    def all_ids(self):
        return torch.arange(self.num_envs)

    def simulate(self, action):
        assert action.abs().max() <= 1, "the adapter clips"
        self.action = action.clone()
        self.clock += 1
        self.clock[self.is_fault(0)] = torch.nan
        self.episode_length_buf += 1
        self.common_step_counter += 1

    def is_fault(self, index):
        return (self.action[:, index] < -0.9) & self.cfg.faults

    def reward(self):
        return torch.where(self.is_fault(1), torch.inf, 1 + self.action[:, 1])

    def state(self):
        return torch.cat([self.clock[:, None], self.draw[:, None], self.action], dim=1)

    def restart(self, env_ids):
        self.restarts.append(env_ids.tolist())
        self.clock[env_ids] = 0
        self.draw[env_ids] = torch.rand(len(env_ids))
        self.action[env_ids] = 0
        self.episode_length_buf[env_ids] = 0

    def render(self):
        assert self.render_mode == "rgb_array"
        return np.full((16, 16, 3), 40 * self.clock[0].item(), dtype=np.uint8)

    def close(self):
        if SimulationContext.instance is not None:
            SimulationContext.instance = None
            print("environment closed")


class DirectRLEnv(Clock):
    """One class does everything. terminated and truncated are the same tensors in every step."""

    max_episode_length = 7  # its tasks end an episode one step before

    def __init__(self, cfg, render_mode=None):
        super().__init__(cfg, render_mode)
        self.reset_terminated = torch.zeros(self.num_envs, dtype=torch.bool)
        self.reset_time_outs = torch.zeros(self.num_envs, dtype=torch.bool)
        self.successes = torch.zeros(self.num_envs)

    def _get_observations(self):
        return {"policy": self.state()}

    def _observation_noise_model(self, obs):
        return obs + 1000

    def _reset_idx(self, env_ids):
        self.restart(env_ids)
        self.successes[env_ids] = 0

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.seed(seed)
        self._reset_idx(self.all_ids())
        return self._get_observations(), self.extras

    def observe(self):
        obs = self._get_observations()
        if self.cfg.observation_noise_model:
            obs["policy"] = self._observation_noise_model(obs["policy"])
        return obs

    def step(self, action):
        self.simulate(action)
        self.successes[0] += self.clock[0] == 3
        self.reset_terminated[:] = action[:, 0] > 0.9
        self.reset_time_outs[:] = self.episode_length_buf >= self.max_episode_length - 1
        reward = self.reward()
        env_ids = (self.reset_terminated | self.reset_time_outs).nonzero()[:, 0]
        if len(env_ids) > 0:
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = self.observe()
            self._reset_idx(env_ids)
        obs = self.observe()
        return obs, reward, self.reset_terminated, self.reset_time_outs, self.extras


class ObservationManager:
    def __init__(self, env):
        self.env = env

    def compute_group(self, name, update_history=False):
        state = self.env.state()
        if name == "policy":
            return state
        return torch.cat([state + 100, state[:, :2]], dim=1)

    def compute(self, update_history=False):
        return {name: self.compute_group(name, update_history) for name in self.env.groups}


class TerminationManager:
    """terminated, time_outs and the terms are the same tensors in every step."""

    active_terms = ["time_out", "success"]

    def __init__(self, env):
        self.env = env
        self.terminated = torch.zeros(env.num_envs, dtype=torch.bool)
        self.time_outs = torch.zeros(env.num_envs, dtype=torch.bool)
        self.success = torch.zeros(env.num_envs, dtype=torch.bool)

    def compute(self):
        self.terminated[:] = self.env.action[:, 0] > 0.9
        self.time_outs[:] = self.env.episode_length_buf >= self.env.max_episode_length
        self.success[:] = self.env.clock == 3
        self.success[1:] = False
        return self.terminated | self.time_outs

    def get_term(self, name):
        assert name == "success"
        return self.success


class CurriculumManager:
    def __init__(self):
        self.calls = []

    def compute(self, env_ids=None):
        self.calls.append(env_ids.tolist())


class ManagerBasedRLEnv(Clock):
    """Managers do everything. The reward is the same tensor in every step."""

    max_episode_length = 6
    groups = {"policy": 4, "critic": 6}

    def __init__(self, cfg, render_mode=None):
        super().__init__(cfg, render_mode)
        self.observation_manager = ObservationManager(self)
        self.termination_manager = TerminationManager(self)
        self.curriculum_manager = CurriculumManager()
        self.command_manager = SimpleNamespace(active_terms=[])
        self.reward_buf = torch.zeros(self.num_envs)

    def _reset_idx(self, env_ids):
        self.curriculum_manager.compute(env_ids=env_ids)
        self.restart(env_ids)

    def reset(self, seed=None, env_ids=None, options=None):
        if seed is not None:
            self.seed(seed)
        self._reset_idx(self.all_ids() if env_ids is None else env_ids)
        return self.observation_manager.compute(update_history=True), self.extras

    def step(self, action):
        self.simulate(action)
        env_ids = self.termination_manager.compute().nonzero()[:, 0]
        self.reward_buf[:] = self.reward()
        if len(env_ids) > 0:
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = self.observation_manager.compute()
            self._reset_idx(env_ids)
        obs = self.observation_manager.compute(update_history=True)
        manager = self.termination_manager
        return obs, self.reward_buf, manager.terminated, manager.time_outs, self.extras
