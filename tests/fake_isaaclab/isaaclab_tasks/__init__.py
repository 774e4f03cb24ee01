import gymnasium as gym
from isaaclab.app import AppLauncher

assert AppLauncher.started, "the application has to be started before tasks are imported"

from isaaclab.envs import DirectRLEnv, ManagerBasedRLEnv  # noqa: E402

TASKS = {  # those with Final have Isaac Lab's newer setting
    "Isaac-Clock-Direct-v0": DirectRLEnv,
    "Isaac-Clock-Direct-Final-v0": DirectRLEnv,
    "Isaac-Clock-v0": ManagerBasedRLEnv,
    "Isaac-Clock-Final-v0": ManagerBasedRLEnv,
}
for env_id, env_class in TASKS.items():
    gym.register(env_id, env_class, disable_env_checker=True, order_enforce=False)
