"""The application, which has to be started before anything else is imported."""

import sys


class SimulationApp:
    def close(self):
        print("application closed")


class AppLauncher:
    started = None  # settings and command line of the one that was started

    def __init__(self, launcher_args=None, **settings):
        AppLauncher.started = (settings, list(sys.argv))
        self.app = SimulationApp()
