"""splash: what it declares, which blocks and which memory it takes, and how it is called; the kernels are in kernels/."""

from .config import SplashConfig
from .operation import Splash

__all__ = ["Splash", "SplashConfig"]
