"""Types of command-line options that several commands take."""

from __future__ import annotations

from typing import Any

import click

from workers.config import DraftPolicy


class DraftTokens(click.ParamType[Any]):
    """`full`, `adaptive`, or a number of draft tokens per step."""

    name = "full|adaptive|N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> DraftPolicy | int:
        if value in ("full", "adaptive"):
            policy: DraftPolicy = value
            return policy
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither full, adaptive nor a number", param, ctx)
