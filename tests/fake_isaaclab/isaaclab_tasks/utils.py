from types import SimpleNamespace


def parse_env_cfg(task_name, device="cuda:0", num_envs=None, use_fabric=None):
    cfg = SimpleNamespace(
        sim=SimpleNamespace(device=device),
        scene=SimpleNamespace(num_envs=num_envs),
        seed=None,
        is_finite_horizon=False,
        faults=False,  # of the stand-in only
    )
    if "Direct" in task_name:
        cfg.observation_noise_model = None
    if "Final" in task_name:
        cfg.compute_final_obs = False
    return cfg
