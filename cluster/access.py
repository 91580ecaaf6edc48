"""What a client brings along to pass a gateway's door, and the file that tokens are kept in at both ends.

A token file holds one token per line; blank lines and lines that start with # are skipped. A client sends the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

Metadata = tuple[tuple[str, str], ...]


class TokenFileError(Exception):
    """The token file cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Without a CA file the connection is plain. `cert_file` and `key_file` are the client's own, for mTLS."""

    token: str = ""
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __repr__(self) -> str:
        return f"Access(ca_file={self.ca_file}, token={'set' if self.token else 'not set'})"

    @property
    def metadata(self) -> Metadata:
        """Goes with every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


PLAIN = Access()


def read_tokens(path: Path) -> tuple[str, ...]:
    """At least one token. Raises TokenFileError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise TokenFileError(f"cannot read the token file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokenFileError(f"cannot read the token file {path}: it is not UTF-8 text") from error
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise TokenFileError(f"the token file {path} holds no token")
    return tokens
