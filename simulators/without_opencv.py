"""An empty module in the place of OpenCV where its libraries are missing.

ManiSkill imports OpenCV, which wants libGL.so.1, and has a use for it with camera images only.
"""

import sys
import types

try:
    import cv2  # noqa: F401
except ImportError:
    sys.modules["cv2"] = types.ModuleType("cv2")
