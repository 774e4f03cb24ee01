"""flex_evpair is an array of MuJoCo 3.1 that 4.0 does not have; no version has the other one."""

array_sizes = {
    "mjmodel": {"body_pos": ("nbody", 3), "flex_evpair": ("nflexevpair", 2)},
    "mjdata": {"qpos": ("nq",), "no_such_array": ("nv",)},
}
