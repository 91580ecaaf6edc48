"""Who may speak to the doors: bearer tokens from a file, and the files of TLS.

A token file (see `cluster.access`) is read again when it changed, so tokens come and go without a restart. A file that
cannot be read, or holds no token at this moment, changes nothing: it may be in the middle of being replaced. What a
refusal says depends on nothing that was sent.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from cluster.access import TokenFileError, read_tokens
from cluster.errors import RequestError

_log = logging.getLogger(__name__)

_SCHEME = "bearer "


class Unauthenticated(RequestError):
    """No token, or one that is not known here."""

    code = "UNAUTHENTICATED"
    reason = "INVALID_API_KEY"


class TokenFile:
    """The tokens that may pass. Raises TokenFileError when the file is not usable to begin with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = _version(path)
        self._digests = _read(path)

    def check(self, authorization: str) -> None:
        """Raise Unauthenticated unless this value of the `authorization` header carries a known token."""
        self._follow()
        scheme, token = authorization[: len(_SCHEME)].lower(), authorization[len(_SCHEME) :].strip()
        given = _digest(token)
        # Digests have one length and every one is compared: time tells neither which token is near nor how near.
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(digest, given)
        if scheme != _SCHEME or not known:
            raise Unauthenticated("a valid bearer token is needed")

    def _follow(self) -> None:
        try:
            version = _version(self._path)
            if version == self._version:
                return
            self._digests = _read(self._path)
        except TokenFileError as error:
            if self._version is not None:
                _log.warning("%s; the tokens read before stay valid", error)
            self._version = None
            return
        self._version = version
        _log.info("read %d tokens from %s", len(self._digests), self._path)


Version = tuple[int, int, int]


def _version(path: Path) -> Version | None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise TokenFileError(f"cannot read the token file {path}: {error.strerror}") from error
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(path: Path) -> tuple[bytes, ...]:
    return tuple(_digest(token) for token in read_tokens(path))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class TlsFileError(Exception):
    """A file of TLS cannot be used; the message says which and why."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a server. With `client_ca_file` a client must show a certificate signed by it (mTLS)."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def check(self) -> None:
        """Raise TlsFileError unless the files can be read, are PEM, and the key is the certificate's."""
        files = [self.cert_file, self.key_file, *([self.client_ca_file] if self.client_ca_file else [])]
        try:
            for file in files:
                file.read_bytes()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.cert_file, self.key_file)
            if self.client_ca_file is not None:
                context.load_verify_locations(self.client_ca_file)
        except ssl.SSLError as error:
            named = ", ".join(map(str, files))
            raise TlsFileError(f"the TLS files cannot be used ({named}): {error.reason or error}") from error
        except OSError as error:
            raise TlsFileError(f"cannot read the TLS file {error.filename}: {error.strerror}") from error
