"""How a configuration names the device that workers compute on. Apart from `workers.device`, which needs torch."""

from __future__ import annotations

from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda"]
