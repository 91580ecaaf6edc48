"""A mock worker that speaks vLLM's gRPC (package vllm.grpc.engine), for smg.

python -m tests.bench.router.mock_vllm WORKLOAD.json MODEL_DIRECTORY PORT [PREFILL_PORT]
"""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from pathlib import Path

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.bench.router.clock import StepClock
from tests.bench.router.grpc_frames import ServerConnection, Stream
from tests.bench.router.loop import run
from tests.bench.router.workload import MODEL, Workload

UNIMPLEMENTED = 12
_SERVICE = "/vllm.grpc.engine.VllmEngine/"
_HANDED_OFF = (
    '{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"mock","remote_block_ids":[1,2,3],'
    '"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}'
)


class Engine:
    """One worker, or both workers of a pair: what they are asked for tells them apart."""

    def __init__(self, workload: Workload, directory: str) -> None:
        self._workload = workload
        self._directory = directory
        self._clock = StepClock(workload.shape.step_s)
        self._answer = cache(self._make_answer)

    def handle(self, path: bytes, data: bytes, stream: Stream) -> None:
        method = path.decode().removeprefix(_SERVICE)
        if method == "Generate":
            self._generate(pb.GenerateRequest.FromString(data), stream)
            return
        answer = self._told(method)
        if answer is None:
            stream.refuse(UNIMPLEMENTED)
        else:
            stream.send(answer, last=True)

    def _told(self, method: str) -> bytes | None:
        match method:
            case "HealthCheck":
                return pb.HealthCheckResponse(healthy=True, message="ok").SerializeToString()
            case "GetModelInfo":
                return pb.GetModelInfoResponse(
                    model_path=self._directory,
                    tokenizer_path=self._directory,
                    is_generation=True,
                    max_context_length=4096,
                    vocab_size=49152,
                    served_model_name=MODEL,
                    model_type="llama",
                    architectures=["LlamaForCausalLM"],
                    eos_token_ids=[2],
                    pad_token_id=2,
                    bos_token_id=1,
                    max_req_input_len=4096,
                ).SerializeToString()
            case "GetServerInfo":
                return pb.GetServerInfoResponse(
                    server_type="vllm-grpc",
                    kv_connector="NixlConnector",
                    kv_role="kv_both",
                    kv_engine_id="mock",
                    block_size=16,
                    model_dtype="float32",
                    max_num_seqs=1024,
                ).SerializeToString()
            case "GetLoads":
                return pb.GetLoadsResponse().SerializeToString()
            case "Abort":
                return pb.AbortResponse().SerializeToString()
            case _:
                return None

    def _generate(self, request: pb.GenerateRequest, stream: Stream) -> None:
        prefill = request.HasField("kv_transfer_params_json") and (
            '"do_remote_decode":true' in request.kv_transfer_params_json.replace(" ", "")
        )
        messages = self._answer(request.sampling_params.max_tokens, request.stream, prefill)
        if not request.stream:
            stream.send(messages[0], last=True)
            return
        number = 0

        def advance() -> bool:
            nonlocal number
            number += 1
            if number < len(messages) - 1:
                stream.send(messages[number - 1])
                return True
            stream.send(messages[-2])
            stream.send(messages[-1], last=True)
            return False

        self._clock.start(advance)

    def _make_answer(self, max_tokens: int, streamed: bool, prefill: bool) -> tuple[bytes, ...]:
        token_ids = self._workload.token_ids[:max_tokens]
        num_prompt = len(self._workload.prompt_token_ids)
        complete = pb.GenerateComplete(
            output_ids=token_ids,
            finish_reason="length",
            prompt_tokens=num_prompt,
            completion_tokens=len(token_ids),
        )
        if prefill:
            complete.kv_transfer_params_json = _HANDED_OFF
        chunks = []
        if streamed:
            for start, end in self._workload.steps(max_tokens):
                chunk = pb.GenerateStreamChunk(
                    token_ids=token_ids[start:end], prompt_tokens=num_prompt, completion_tokens=end
                )
                chunks.append(pb.GenerateResponse(chunk=chunk).SerializeToString())
        return (*chunks, pb.GenerateResponse(complete=complete).SerializeToString())


async def _serve(workload: Workload, directory: str, ports: list[int]) -> None:
    engine = Engine(workload, directory)
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: ServerConnection(engine.handle), "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


if __name__ == "__main__":
    run(_serve(Workload.load(Path(sys.argv[1])), sys.argv[2], [int(port) for port in sys.argv[3:]]))
