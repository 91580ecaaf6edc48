from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_CONTEXT: _ClassVar[WorkerRole]
    WORKER_ROLE_GENERATION: _ClassVar[WorkerRole]
    WORKER_ROLE_AGGREGATED: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_JOINING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_SUSPECT: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_CONTEXT: WorkerRole
WORKER_ROLE_GENERATION: WorkerRole
WORKER_ROLE_AGGREGATED: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_JOINING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_SUSPECT: WorkerState
WORKER_STATE_DRAINING: WorkerState

class GetClusterStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterStateResponse(_message.Message):
    __slots__ = ("model", "mode", "version", "uptime_s", "live_requests", "max_live_requests", "finished_requests", "failed_requests", "workers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    mode: str
    version: str
    uptime_s: float
    live_requests: int
    max_live_requests: int
    finished_requests: int
    failed_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, model: _Optional[str] = ..., mode: _Optional[str] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., live_requests: _Optional[int] = ..., max_live_requests: _Optional[int] = ..., finished_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "address", "role", "state", "epoch", "model", "dtype", "transport", "max_batch", "page_size", "running", "waiting", "slots_in_use", "draft_slots_in_use", "target_pages_in_use", "target_pages", "draft_pages_in_use", "draft_pages", "leases", "transfers", "steps", "decode_steps", "decode_tokens", "acceptance_length", "prompt_tokens_computed", "kv_bytes_target", "kv_bytes_draft", "transfers_done", "transfers_failed", "requests_finished", "last_progress_age_s", "age_s", "live_requests", "accepted_by_position", "drafted_by_position", "acceptance_length_recent", "cached_pages", "cached_prompt_tokens", "transfers_cancelled", "transfers_expired", "peers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    TARGET_PAGES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    TARGET_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PAGES_IN_USE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PAGES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_TARGET_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_DRAFT_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_DONE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FAILED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    LAST_PROGRESS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_RECENT_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    role: WorkerRole
    state: WorkerState
    epoch: str
    model: str
    dtype: str
    transport: str
    max_batch: int
    page_size: int
    running: int
    waiting: int
    slots_in_use: int
    draft_slots_in_use: int
    target_pages_in_use: int
    target_pages: int
    draft_pages_in_use: int
    draft_pages: int
    leases: int
    transfers: int
    steps: int
    decode_steps: int
    decode_tokens: int
    acceptance_length: float
    prompt_tokens_computed: int
    kv_bytes_target: int
    kv_bytes_draft: int
    transfers_done: int
    transfers_failed: int
    requests_finished: int
    last_progress_age_s: float
    age_s: float
    live_requests: int
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    drafted_by_position: _containers.RepeatedScalarFieldContainer[int]
    acceptance_length_recent: float
    cached_pages: int
    cached_prompt_tokens: int
    transfers_cancelled: int
    transfers_expired: int
    peers: Peers
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., epoch: _Optional[str] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., transport: _Optional[str] = ..., max_batch: _Optional[int] = ..., page_size: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., slots_in_use: _Optional[int] = ..., draft_slots_in_use: _Optional[int] = ..., target_pages_in_use: _Optional[int] = ..., target_pages: _Optional[int] = ..., draft_pages_in_use: _Optional[int] = ..., draft_pages: _Optional[int] = ..., leases: _Optional[int] = ..., transfers: _Optional[int] = ..., steps: _Optional[int] = ..., decode_steps: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., acceptance_length: _Optional[float] = ..., prompt_tokens_computed: _Optional[int] = ..., kv_bytes_target: _Optional[int] = ..., kv_bytes_draft: _Optional[int] = ..., transfers_done: _Optional[int] = ..., transfers_failed: _Optional[int] = ..., requests_finished: _Optional[int] = ..., last_progress_age_s: _Optional[float] = ..., age_s: _Optional[float] = ..., live_requests: _Optional[int] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., drafted_by_position: _Optional[_Iterable[int]] = ..., acceptance_length_recent: _Optional[float] = ..., cached_pages: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., transfers_cancelled: _Optional[int] = ..., transfers_expired: _Optional[int] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class GetTimelineRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetTimelineResponse(_message.Message):
    __slots__ = ("request_id", "route", "outcome", "error", "arrived_unix_s", "total_s", "first_token_s", "internal_ids", "transfer_ids", "spans", "steps")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_IDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    route: str
    outcome: str
    error: str
    arrived_unix_s: float
    total_s: float
    first_token_s: float
    internal_ids: _containers.RepeatedScalarFieldContainer[str]
    transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    spans: _containers.RepeatedCompositeFieldContainer[TimelineSpan]
    steps: _containers.RepeatedCompositeFieldContainer[TimelineStep]
    def __init__(self, request_id: _Optional[str] = ..., route: _Optional[str] = ..., outcome: _Optional[str] = ..., error: _Optional[str] = ..., arrived_unix_s: _Optional[float] = ..., total_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., internal_ids: _Optional[_Iterable[str]] = ..., transfer_ids: _Optional[_Iterable[str]] = ..., spans: _Optional[_Iterable[_Union[TimelineSpan, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[TimelineStep, _Mapping]]] = ...) -> None: ...

class TimelineSpan(_message.Message):
    __slots__ = ("where", "name", "run", "began_s", "ended_s", "counts", "detail")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WHERE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    where: str
    name: str
    run: int
    began_s: float
    ended_s: float
    counts: _containers.ScalarMap[str, int]
    detail: str
    def __init__(self, where: _Optional[str] = ..., name: _Optional[str] = ..., run: _Optional[int] = ..., began_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., counts: _Optional[_Mapping[str, int]] = ..., detail: _Optional[str] = ...) -> None: ...

class TimelineStep(_message.Message):
    __slots__ = ("where", "run", "at_s", "tokens")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    where: str
    run: int
    at_s: float
    tokens: int
    def __init__(self, where: _Optional[str] = ..., run: _Optional[int] = ..., at_s: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...
