"""An authority of one's own, and certificates of it; made with the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from cluster.security import TlsFiles


@dataclass(frozen=True)
class Certificates:
    """`stranger_*` are signed by another authority."""

    ca: Path
    server: TlsFiles
    client_cert: Path
    client_key: Path
    stranger_cert: Path
    stranger_key: Path


def make_certificates(at: Path) -> Certificates:
    """For 127.0.0.1, for a client, and for somebody whom nobody knows."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=at)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for authority in ("ca", "other"):
        named = ("-subj", f"/CN={authority}", "-keyout", f"{authority}.key", "-out", f"{authority}.pem")
        openssl("req", "-x509", *key, "-days", "2", *named)
    (at / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        openssl("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", "names", "-out", f"{name}.pem")
    return Certificates(
        ca=at / "ca.pem",
        server=TlsFiles(at / "server.pem", at / "server.key"),
        client_cert=at / "client.pem",
        client_key=at / "client.key",
        stranger_cert=at / "stranger.pem",
        stranger_key=at / "stranger.key",
    )
