"""Log lines that people and machines can read. A line's facts travel as `extra` fields, never only inside its text.

As text they follow the message as key=value; as JSON every line is one object.
"""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_RAYS_MARKS = (":job_id:", ":actor_name:", ":task_name:")
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def configure(log_format: LogFormat, level: LogLevel) -> None:
    """Replace the root logger's handlers."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(
            logging.WARNING
        )  # it tells of its start and stop at every level


def facts(record: logging.LogRecord) -> dict[str, object]:
    """The `extra` fields of a line. Libraries put private ones of theirs on it (Ray a timestamp): left out."""
    return {
        name: value for name, value in vars(record).items() if name not in _OWN and not name.startswith("_")
    }


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        said = super().formatMessage(record)
        named = " ".join(f"{name}={value}" for name, value in facts(record).items())
        return f"{said} {named}" if named else said


class JsonFormatter(logging.Formatter):
    """time (RFC 3339, UTC), level, logger, message, then the facts; a traceback as `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def last_words(ray_directory: Path, num_lines: int = 5) -> str:
    """What a worker of the Ray in this directory wrote to its standard error last, in one line; empty for nothing.

    Ray's own directory is gone once its cluster has ended: what is to be told of it must be told before.
    """
    written = [path for path in ray_directory.glob("session_latest/logs/worker-*.err") if path.stat().st_size]
    if not written:
        return ""
    text = max(written, key=lambda path: path.stat().st_mtime).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_RAYS_MARKS)]
    return " | ".join(lines[-num_lines:])
