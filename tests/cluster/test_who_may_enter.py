"""Tokens and certificates at both doors: who carries them enters, who does not learns nothing."""

from __future__ import annotations

import logging
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.access import Access, TokenFileError
from cluster.client import AsyncClient
from cluster.config import ConfigError, load_config
from cluster.doors import Doors
from cluster.errors import RequestError
from cluster.security import TlsFiles, TokenFile, Unauthenticated
from tests.cluster.certificates import Certificates, make_certificates
from tests.cluster.conftest import FakeCluster, StartCluster
from tests.cluster.fake_worker import FakeHost

SECRET, OTHER = "s3cret-of-alice", "s3cret-of-bob"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# alice\n{SECRET}\n\n  {OTHER}  \n")
    return path


@pytest.fixture
async def guarded(start_cluster: StartCluster, token_file: Path) -> FakeCluster:
    access = Access(token=SECRET)
    host = FakeHost("aggregated")
    return await start_cluster(
        host, route="aggregated", http=True, tokens=TokenFile(token_file), access=access
    )


def passes(tokens: TokenFile, authorization: str) -> bool:
    try:
        tokens.check(authorization)
    except Unauthenticated:
        return False
    return True


def test_every_token_of_the_file_passes_and_nothing_else(token_file: Path) -> None:
    tokens = TokenFile(token_file)
    assert passes(tokens, f"Bearer {SECRET}")
    assert passes(tokens, f"bearer  {OTHER}")
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        f"Basic {SECRET}",
        SECRET,
        f"Bearer {SECRET[:-1]}",
        f"Bearer {SECRET}x",
    ):
        assert not passes(tokens, wrong), wrong
    assert not passes(tokens, "Bearer # alice")
    assert not passes(tokens, "Bearer \udcff")


def test_tokens_come_and_go_without_a_restart(token_file: Path) -> None:
    tokens = TokenFile(token_file)
    token_file.write_text("new\n")
    assert passes(tokens, "Bearer new")
    assert not passes(tokens, f"Bearer {SECRET}")


def test_a_file_that_is_being_replaced_changes_nothing(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = TokenFile(token_file)
    for spoil in (lambda: token_file.write_text(""), lambda: os.remove(token_file)):
        spoil()
        with caplog.at_level(logging.WARNING):
            assert passes(tokens, f"Bearer {SECRET}")
            assert passes(tokens, f"Bearer {SECRET}")
    assert SECRET not in caplog.text
    token_file.write_text("new\n")
    assert passes(tokens, "Bearer new")


@pytest.mark.parametrize("content", [None, "", "# nobody\n"])
def test_a_file_without_tokens_is_refused_to_begin_with(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TokenFileError, match="token"):
        TokenFile(path)


async def test_a_token_opens_the_grpc_door(guarded: FakeCluster) -> None:
    assert (await guarded.client.complete("ab", max_tokens=3))[0] == "aba"
    assert (await guarded.client.model()).model == "fake"


@pytest.mark.parametrize("token", ["", "wrong", SECRET[:-1]])
async def test_without_it_every_call_but_health_is_refused(guarded: FakeCluster, token: str) -> None:
    client = AsyncClient(guarded.address, Access(token=token))
    for ask in (
        client.complete("ab"),
        client.model(),
        client.cluster_state(),
        client.cancel("x"),
        client.drain("x"),
    ):
        with pytest.raises(RequestError) as refused:
            await ask
        assert refused.value.code == "UNAUTHENTICATED"
        assert refused.value.message == "a valid bearer token is needed"
    await client.close()
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as closed:
            async for _ in reflection.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            ):
                pass
        assert closed.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_http_door_asks_for_it_too(guarded: FakeCluster) -> None:
    url = f"{guarded.http}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=OTHER, max_retries=0) as ask:
        assert (await ask.completions.create(model="fake", prompt="ab", max_tokens=3)).choices[
            0
        ].text == "aba"
    async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as ask:
        with pytest.raises(openai.AuthenticationError) as refused:
            await ask.models.list()
        assert refused.value.code == "invalid_api_key"
        assert refused.value.response.headers["www-authenticate"] == "Bearer"
        assert "wrong" not in str(refused.value)
    async with httpx2.AsyncClient() as plain:
        for path, status in (
            ("/health", 200),
            ("/ready", 200),
            ("/v1/models", 401),
            ("/metrics", 401),
            ("/x", 401),
        ):
            assert (await plain.get(guarded.http + path)).status_code == status, path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return make_certificates(tmp_path_factory.mktemp("tls"))


async def test_tls_serves_who_trusts_the_authority(
    start_cluster: StartCluster, certificates: Certificates
) -> None:
    access = Access(ca_file=certificates.ca)
    cluster = await start_cluster(
        FakeHost("aggregated"), route="aggregated", http=True, tls=certificates.server, access=access
    )
    assert (await cluster.client.complete("ab", max_tokens=3))[0] == "aba"
    trust = ssl.create_default_context(cafile=str(certificates.ca))
    async with httpx2.AsyncClient(verify=trust) as trusting:
        assert (await trusting.get(f"{cluster.http}/v1/models")).status_code == 200
    plain = AsyncClient(cluster.address)
    with pytest.raises(RequestError) as refused:
        await plain.model(timeout_s=2.0)
    assert refused.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    await plain.close()


async def test_mutual_tls_serves_only_clients_with_a_certificate(
    start_cluster: StartCluster, certificates: Certificates
) -> None:
    tls = TlsFiles(certificates.server.cert_file, certificates.server.key_file, certificates.ca)
    own = {"cert_file": certificates.client_cert, "key_file": certificates.client_key}
    access = Access(ca_file=certificates.ca, **own)
    cluster = await start_cluster(
        FakeHost("aggregated"), route="aggregated", http=True, tls=tls, access=access
    )
    assert (await cluster.client.complete("ab", max_tokens=3))[0] == "aba"
    theirs = {"cert_file": certificates.stranger_cert, "key_file": certificates.stranger_key}
    for wrong in ({}, theirs):
        stranger = AsyncClient(cluster.address, Access(ca_file=certificates.ca, **wrong))
        with pytest.raises(RequestError) as refused:
            await stranger.model(timeout_s=2.0)
        assert refused.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        await stranger.close()
    trust = ssl.create_default_context(cafile=str(certificates.ca))
    async with httpx2.AsyncClient(verify=trust) as nobody:
        with pytest.raises(httpx2.HTTPError):
            await nobody.get(f"{cluster.http}/health")
    trust.load_cert_chain(certificates.client_cert, certificates.client_key)
    async with httpx2.AsyncClient(verify=trust) as known:
        assert (await known.get(f"{cluster.http}/health")).status_code == 200


def test_a_configuration_that_cannot_guard_is_refused(tmp_path: Path, aggregated: FakeCluster) -> None:
    for options, message in (
        ({"tls_cert_file": "a"}, "need each other"),
        ({"tls_client_ca_file": "a"}, "needs tls_cert_file"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(None, options)
    missing = str(tmp_path / "none")
    for options in ({"token_file": missing}, {"tls_cert_file": missing, "tls_key_file": missing}):
        with pytest.raises(ConfigError, match="cannot read the"):
            Doors(load_config(None, options), aggregated.gateway)


def test_an_access_never_shows_its_token() -> None:
    assert SECRET not in repr(Access(token=SECRET))
