"""Builds one worker from its configuration: models, pools, ledger, attention, transceiver, engine.

The only place that knows how the pieces fit; everything it makes is handed to one engine and lives as long as it.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from drafter.checkpoint import TargetFacts, load_drafter, read_config
from drafter.confident import ConfidentPolicy
from drafter.dflash import BlockDrafter
from drafter.errors import DrafterError, DraftVocabularyError
from drafter.fingerprint import drafter_fingerprint
from drafter.policy import BlockLengthPolicy, DraftingPolicy
from drafter.ranks import ALONE, UnevenShares
from drafter.vocabulary import read_vocabulary
from kvmanager.budget import KvDemand, PagePlan, plan_from_memory, plan_from_pages
from kvmanager.errors import BudgetInfeasible, LayoutRefused
from kvmanager.families import ServingMode, require_form
from kvmanager.ids import WorkerEpoch
from kvmanager.layout import KvGeometry
from kvmanager.ledger import KvLedger
from kvmanager.ledgers import DividedLedger, Ledger
from kvmanager.manager import BatchLimits
from transceiver.annex import DEFAULT_STAGING_BYTES
from transceiver.apart import ApartPort
from transceiver.endpoint import Identity
from transceiver.group import GroupPort
from transceiver.port import TransferPort
from transceiver.pump import nixl_port
from transceiver.remote import RemotePort, Stream
from transceiver.wire import Fingerprint, HeadRange, Place, Pools, Region
from workers.aggregated import AggregatedEngine
from workers.backend import TORCH_ON_CPU, Backend, Computing, Loaded, make_backend
from workers.backend import Pools as ComputedPools
from workers.config import DraftPolicy, EveryRequestFits, FixedPages, MemoryFraction, WorkerConfig
from workers.context import ContextEngine
from workers.decode import DecodeLoop
from workers.device import compute_device
from workers.engine import Engine
from workers.errors import ModelMismatch
from workers.generation import GenerationEngine
from workers.group.lead import Lead, LeadingRunner, LeadingStep
from workers.group.ranks import GroupRanks
from workers.group.streams import streams_to_others
from workers.group.work import OwnWork, SharedWork, StepWork
from workers.limits import EngineLimits
from workers.memory import memory_of, no_room
from workers.models.decoder import Decoder
from workers.models.errors import CheckpointError
from workers.models.load import load_config, load_decoder
from workers.pairs import ModelPair, PairError, resolve_pair
from workers.request import WorkerFacts
from workers.runner import PromptRunner
from workers.sampler import Sampler
from workers.step import DecodeStep, EagerStep
from workers.storage import KvPool, KvStorage
from workers.tables import DividedTables, LedgerTables, StepTables
from workers.working import WorkingSet

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

MakePort = Callable[[Identity, Pools], TransferPort]
"""(who this rank is, its pools) → one rank's end of its worker's transfers."""


@dataclass(frozen=True)
class Models:
    """The loaded pair, and what computes it. `drafter` is None when the pair has none or drafting is off."""

    pair: ModelPair
    decoder: Decoder
    drafter: BlockDrafter | None
    drafter_fingerprint: str | None
    backend: Backend = TORCH_ON_CPU
    ranks: GroupRanks | None = None
    """This rank's end of its group; None on a worker of one rank."""

    @property
    def attention_dp(self) -> bool:
        """Whether every rank has requests of its own: the models were loaded with all heads on each."""
        return self.ranks is not None and self.ranks.size > self.decoder.ranks.size


@dataclass(frozen=True)
class Assembly:
    """One worker's parts as its host needs them. `port` is None on an aggregated worker, `lead` on one of one rank."""

    engine: Engine
    facts: WorkerFacts
    port: TransferPort | None
    lead: Lead | None = None

    def prepare(self) -> None:
        """Make the device ready for steps, where that takes time that a first request should not wait for."""
        if self.facts.role != "context":
            self.engine.decode.prepare()

    def beat(self) -> None:
        """Called between steps, however idle. Raises GroupBroken when a rank of the group is gone."""
        if self.lead is not None:
            self.lead.beat()

    def failed(self) -> None:
        """The engine failed: nothing of this worker goes on, on any rank."""
        if self.lead is not None:
            self.lead.abandon()

    def close(self) -> None:
        if self.lead is not None:
            self.lead.stop()
        if self.port is not None:
            self.port.close()


def assemble(
    config: WorkerConfig, make_port: MakePort | None = None, ranks: GroupRanks | None = None
) -> Assembly:
    """Load and build. Raises ModelMismatch for checkpoints that do not fit and for a budget that cannot start.

    `make_port` replaces the NIXL transceiver, for tests over loopback. `ranks`: of the group that this rank leads.
    """
    return build(config, load_models(config, ranks), make_port)


def load_models(config: WorkerConfig, ranks: GroupRanks | None = None) -> Models:
    """Load target and drafter in the configured dtype. Raises ModelMismatch with the file and field at fault.

    Of a group, all ranks load together: a drafter that needs tensors of the target collects them from all.
    """
    spec = config.pair
    name = spec.name if not spec.target else f"{spec.target}:{spec.drafter}".rstrip(":")
    try:
        pair = resolve_pair(name)
        drafts = config.drafting and pair.drafter_path is not None
        backend = _backend(config, pair, drafts)
        vocabulary = _draft_vocabulary(config, pair, ranks) if drafts else None
        decoder = load_decoder(
            pair.target_path,
            DTYPES[config.dtype],
            backend.device,
            backend.ops,
            ranks or ALONE,
            attention_dp=config.attention_dp,
            expert_parallel=config.expert_parallel,
        )
        if config.expert_parallel and decoder.config.mixture is None:
            raise ModelMismatch(f"{name} has no experts to be divided among ranks", field="expert_parallel")
        if not drafts or pair.drafter_path is None:
            return Models(pair, decoder, None, None, backend, ranks)
        facts = TargetFacts(
            hidden_size=decoder.config.hidden_size,
            vocab_size=decoder.config.vocab_size,
            num_layers=decoder.config.num_layers,
            embed_weight=decoder.embed_weight,
            lm_head_weight=decoder.lm_head_weight,
            lm_head=decoder.lm_head,
            fingerprint=decoder.fingerprint,
            ranks=decoder.ranks,
        )
        drafter = load_drafter(pair.drafter_path, facts, backend.ops, vocabulary)
    except UnevenShares as error:
        raise ModelMismatch(f"{spec.name}: {error}", field="tensor_parallel_size") from error
    except DraftVocabularyError as error:
        raise ModelMismatch(f"draft_vocab: {error}", field="draft_vocab") from error
    except (PairError, CheckpointError, DrafterError) as error:
        raise ModelMismatch(str(error), field="pair") from error
    return Models(pair, decoder, drafter, drafter_fingerprint(pair.drafter_path), backend, ranks)


def _draft_vocabulary(
    config: WorkerConfig, pair: ModelPair, ranks: GroupRanks | None
) -> frozenset[int] | None:
    """Read before any weight is. A context worker drafts nothing: what its drafter could say would only take memory."""
    if config.role == "context":
        return None
    target = load_config(pair.target_path)
    vocabulary = read_vocabulary(config.draft_vocab, target.vocab_size, target.eos_token_ids)
    if vocabulary is not None and ranks is not None:
        digest = zlib.crc32(repr(sorted(vocabulary)).encode())
        least, greatest = ranks.least([digest, -digest])
        if least != -greatest:
            raise DraftVocabularyError(
                f"the ranks of this worker find different tokens in {config.draft_vocab}"
            )
    return vocabulary


def _backend(config: WorkerConfig, pair: ModelPair, drafts: bool) -> Backend:
    """Chosen by device, dtype and both models' heads, before a weight is read."""
    head_dims, windowed = [load_config(pair.target_path).head_dim], False
    if drafts and pair.drafter_path is not None:
        drafter = read_config(pair.drafter_path)
        head_dims.append(drafter.head_dim)
        windowed = drafter.window is not None or bool(drafter.masks)
    return make_backend(compute_device(config.device), DTYPES[config.dtype], head_dims, windowed)


@dataclass(frozen=True)
class Ground:
    """What every rank of a worker has, whether it schedules or follows: its share of the pages, and the memory for it.

    All ranks of a group have equally many pages.
    """

    demand: KvDemand
    plan: PagePlan
    memory: _Memory
    working: WorkingSet

    def compute(
        self, config: WorkerConfig, models: Models, tables: StepTables, sampler: Sampler
    ) -> Computing:
        """Tie the models to the pools. Raises ModelMismatch for pools that cannot be read in their layout."""
        try:
            return models.backend.bind(
                Loaded(models.decoder, models.drafter, tables, sampler),
                ComputedPools(self.memory.target, self.memory.draft_pool, config.pool_layout),
                self.working,
                # Ranks with tokens of their own would have to agree on the shapes of captured steps.
                decodes=config.role != "context" and not models.attention_dp,
            )
        except LayoutRefused as error:
            raise ModelMismatch(str(error), field="pool_layout") from error


def lay_ground(config: WorkerConfig, models: Models) -> Ground:
    """Raises ModelMismatch for a budget that cannot start."""
    decoder, drafter = models.decoder, models.drafter
    target_geometry = _geometry(
        config, decoder.config.num_layers, decoder.heads.num_kv_heads, decoder.config.head_dim
    )
    draft_geometry = (
        _geometry(config, drafter.num_layers, drafter.num_kv_heads, drafter.head_dim, drafter.config.window)
        if drafter is not None
        else None
    )
    max_seq_len = _max_seq_len(config, decoder)
    # A context worker never decodes: nothing lies beyond its prompts.
    lookahead = drafter.lookahead if drafter is not None and config.role != "context" else 1
    limits = BatchLimits(max_batch=config.max_batch, max_seq_len=max_seq_len, lookahead=lookahead)
    try:
        if drafter is not None:
            mode: ServingMode = "aggregated" if config.role == "aggregated" else "split"
            require_form(
                drafter.config.family, "attention_dp" if models.attention_dp else mode, config.draft_kv
            )
        demand = KvDemand(
            target=target_geometry,
            draft=draft_geometry,
            limits=limits,
            staging_bytes=0 if config.role == "aggregated" else DEFAULT_STAGING_BYTES,
            draft_kv=config.draft_kv,
        )
    except LayoutRefused as error:
        raise ModelMismatch(str(error), field="draft_kv") from error
    working = _working_set(config, models, demand)
    plan = _page_plan(config, demand, models.backend, working)
    if models.ranks is not None:
        num_target_pages, num_draft_pages = models.ranks.least([plan.num_target_pages, plan.num_draft_pages])
        plan = plan_from_pages(demand, num_target_pages=num_target_pages, num_draft_pages=num_draft_pages)
    return Ground(demand, plan, _memory(config, models, demand, plan, working), working)


def build(config: WorkerConfig, models: Models, make_port: MakePort | None = None) -> Assembly:
    """Everything but loading: the same models may serve several assemblies in one process."""
    decoder, drafter = models.decoder, models.drafter
    ground = lay_ground(config, models)
    demand, plan, memory = ground.demand, ground.plan, ground.memory
    max_seq_len, lookahead = demand.limits.max_seq_len, demand.limits.lookahead
    books = _books(config, models, demand, plan)
    ledger = books.ledger
    sampler = Sampler()
    computing = ground.compute(config, models, books.tables, sampler)
    runner: PromptRunner = computing.runner
    step: DecodeStep = computing.step
    lead: Lead | None = None
    epoch = WorkerEpoch(uuid.uuid4().hex)
    own: TransferPort | None = None
    streams: list[Stream] = []
    others: list[RemotePort] = []
    if config.role != "aggregated":
        own = (make_port or nixl_rank_port)(
            rank_identity(config, models, demand, epoch, epoch), memory.regions
        )
        streams = streams_to_others(models.ranks, epoch) if models.ranks is not None else []
    if models.ranks is not None:
        work = make_work(models, computing, sampler)
        lead = Lead(models.ranks, time.monotonic, ledger.rank_of)
        waits = {"start_s": models.ranks.start_s, "timeout_s": models.ranks.timeout_s}
        others = [RemotePort(stream, lead.num_steps, **waits) for stream in streams]
        runner = LeadingRunner(work, computing.runner, lead)
        step = LeadingStep(work, computing.runner, lead)
    max_draft_tokens = drafter.max_draft_tokens if drafter is not None else 0
    decode = DecodeLoop(
        step=step,
        sampler=sampler,
        ledger=ledger,
        policy=_policy(drafter, config.draft_tokens, step),
        max_draft_tokens=max_draft_tokens,
        clock=time.perf_counter,
    )
    engine_limits = EngineLimits(
        vocab_size=decoder.config.vocab_size,
        max_seq_len=max_seq_len,
        max_waiting=config.max_waiting,
        chunk_tokens=_whole_pages(config.chunk_tokens, config.page_size),
        page_size=config.page_size,
        max_draft_tokens=max_draft_tokens,
        eos_token_ids=frozenset(decoder.config.eos_token_ids),
        model_pair=_model_pair(config, models) if config.prefix_cache else "",
        admission=config.admission,
        growth_tokens=_whole_pages(lookahead, config.page_size),
        packed_tokens=0 if models.attention_dp else config.packed_tokens,
    )
    port: GroupPort | ApartPort | None = None
    engine: Engine
    if own is None:
        engine = AggregatedEngine(runner=runner, decode=decode, ledger=ledger, limits=engine_limits)
    else:
        epochs: tuple[WorkerEpoch, ...] = (epoch,)
        if models.attention_dp:
            port = ApartPort([GroupPort([own], own), *(GroupPort([other], None) for other in others)])
            epochs = port.epochs
        else:
            port = GroupPort([own, *others], own)
        if config.role == "context":
            engine = ContextEngine(
                runner=runner, decode=decode, ledger=ledger, limits=engine_limits, port=port
            )
        else:
            engine = GenerationEngine(
                runner=runner,
                decode=decode,
                ledger=ledger,
                limits=engine_limits,
                port=port,
                epochs=epochs,
                new_id=lambda: uuid.uuid4().hex,
            )
    facts = WorkerFacts(
        role=config.role,
        epoch=epoch,
        model=models.pair.name,
        vocab_size=decoder.config.vocab_size,
        max_seq_len=max_seq_len,
        max_batch=ledger.usage().slots_free,
        max_draft_tokens=max_draft_tokens,
        eos_token_ids=tuple(decoder.config.eos_token_ids),
        dtype=config.dtype,
        page_size=config.page_size,
        kv_bytes_per_token_target=demand.target.bytes_per_token,
        kv_bytes_per_token_draft=demand.draft.bytes_per_token if demand.draft is not None else 0,
        transport="none" if port is None else "nixl",
        hello=b"" if port is None else port.hello(),
    )
    return Assembly(engine, facts, port, lead)


def make_work(models: Models, computing: Computing, sampler: Sampler) -> StepWork:
    """What this rank of a group does of each step."""
    assert models.ranks is not None
    if not models.attention_dp:
        return SharedWork(computing.runner, computing.step)
    step = EagerStep(runner=computing.runner, sampler=sampler, clock=time.perf_counter)
    return OwnWork(models.ranks, computing.runner, step)


@dataclass(frozen=True)
class _Books:
    """Who holds which pages, on the rank that schedules."""

    ledger: Ledger
    tables: StepTables


def _books(config: WorkerConfig, models: Models, demand: KvDemand, plan: PagePlan) -> _Books:
    def ledger() -> KvLedger:
        return KvLedger(
            target=demand.target,
            draft=demand.draft,
            num_target_pages=plan.num_target_pages,
            num_draft_pages=plan.num_draft_pages,
            max_batch=config.max_batch,
            max_seq_len=demand.limits.max_seq_len,
            lookahead=demand.limits.lookahead,
            draft_kv=config.draft_kv,
            prefix_cache=config.prefix_cache,
        )

    if models.ranks is None or not models.attention_dp:
        whole = ledger()
        return _Books(whole, LedgerTables(whole))
    divided = DividedLedger([ledger() for _ in range(models.ranks.size)])
    return _Books(divided, DividedTables(divided))


@dataclass(frozen=True)
class _Memory:
    """A worker's pools. `draft` is None without a drafter, and in unified form, where its KV is in `target`."""

    target: KvStorage
    draft: KvStorage | None

    @property
    def draft_pool(self) -> KvPool | None:
        return self.draft if self.draft is not None else self.target.appended

    @property
    def regions(self) -> Pools:
        return Pools(_region(self.target), _region(self.draft) if self.draft is not None else None)


def _policy(
    drafter: BlockDrafter | None, draft_tokens: DraftPolicy | int, step: DecodeStep
) -> DraftingPolicy:
    """Who decides how much is drafted and verified."""
    if drafter is not None and draft_tokens == "adaptive" and step.can_trim and drafter.has_confidences:
        return ConfidentPolicy(drafter.max_draft_tokens)
    return BlockLengthPolicy(
        drafter.max_draft_tokens if drafter is not None else 0, draft_tokens, step.num_rows
    )


def _memory(
    config: WorkerConfig, models: Models, demand: KvDemand, plan: PagePlan, working: WorkingSet
) -> _Memory:
    """Raises ModelMismatch where there is no room."""
    device, working_bytes = models.backend.device, models.backend.working_bytes(working)
    free_bytes = memory_of(device).free
    if plan.total_bytes + working_bytes > free_bytes:
        raise no_room(plan, working_bytes, free_bytes, config.kv)

    def storage(geometry: KvGeometry, num_pages: int, appended: KvGeometry | None = None) -> KvStorage:
        try:
            return KvStorage(geometry, num_pages, models.decoder.dtype, device, appended=appended)
        except RuntimeError as error:  # another process was faster, or this one may not have so much
            raise no_room(plan, working_bytes, memory_of(device).free, config.kv) from error

    if demand.unified:
        return _Memory(storage(demand.target, plan.num_target_pages, demand.draft), None)
    draft = storage(demand.draft, plan.num_draft_pages) if demand.draft is not None else None
    return _Memory(storage(demand.target, plan.num_target_pages), draft)


def _working_set(config: WorkerConfig, models: Models, demand: KvDemand) -> WorkingSet:
    target, drafter = models.decoder.config, models.drafter
    both = (target, target if drafter is None else drafter.config)
    return WorkingSet(
        target=demand.target,
        draft=demand.draft,
        num_heads=models.decoder.heads.num_heads,
        num_ranks_met=models.ranks.size if models.attention_dp and models.ranks is not None else 1,
        draft_heads=drafter.heads.num_heads if drafter is not None else 0,
        hidden_size=max(model.hidden_size for model in both),
        intermediate_size=max(model.intermediate_size for model in both),
        expert_elements=target.expert_elements,
        vocab_size=target.vocab_size,
        num_taps=len(drafter.tap_layer_ids) if drafter is not None else 0,
        max_batch=config.max_batch,
        width=1 + (drafter.max_draft_tokens if drafter is not None else 0),
        block_size=drafter.block_size if drafter is not None else 0,
        chunk_tokens=config.chunk_tokens,
    )


def _geometry(
    config: WorkerConfig, num_layers: int, num_kv_heads: int, head_dim: int, window: int | None = None
) -> KvGeometry:
    return KvGeometry(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=config.page_size,
        element_bytes=DTYPES[config.dtype].itemsize,
        window=window,
    )


def _max_seq_len(config: WorkerConfig, decoder: Decoder) -> int:
    """The runtime limit; asking for more than the model knows is an error, since its text would decay silently."""
    known = decoder.config.max_position_embeddings
    if config.max_seq_len > known:
        raise ModelMismatch(
            f"max_seq_len is {config.max_seq_len}, the model knows {known} positions",
            field="max_seq_len",
            limit=known,
        )
    return config.max_seq_len


def _page_plan(config: WorkerConfig, demand: KvDemand, backend: Backend, working: WorkingSet) -> PagePlan:
    per_request = [demand.pages_per_request(geometry) for geometry in demand.pools]
    try:
        match config.kv:
            case MemoryFraction(fraction=fraction):
                memory = memory_of(backend.device)
                return plan_from_memory(demand, memory.budget(fraction, backend.working_bytes(working)))
            case FixedPages(num_target_pages=pages):
                counts = [pages] * len(per_request)
                if demand.window_pages:
                    counts[1] = min(pages, demand.window_pages + 1)
            case EveryRequestFits():
                counts = [config.max_batch * pages + 1 for pages in per_request]
        return plan_from_pages(
            demand, num_target_pages=counts[0], num_draft_pages=counts[1] if len(counts) > 1 else 0
        )
    except BudgetInfeasible as error:
        raise ModelMismatch(str(error), field="kv") from error


def _whole_pages(chunk_tokens: int, page_size: int) -> int:
    """Chunks end at page edges, so that each page is final, and shipped, once."""
    return max(chunk_tokens // page_size, 1) * page_size


def _region(storage: KvStorage) -> Region:
    device = None if storage.device.type == "cpu" else storage.device.index or 0
    return Region(storage.address, storage.size_bytes, storage.page_bytes, storage.num_pages, device)


def rank_identity(
    config: WorkerConfig,
    models: Models,
    demand: KvDemand,
    worker: WorkerEpoch,
    epoch: WorkerEpoch | None = None,
) -> Identity:
    """Who this rank is to its peers: the first rank of a worker has the worker's own epoch, another one of its own."""
    ranks = models.decoder.ranks
    alone = models.ranks is None or models.ranks.size == 1
    return Identity(
        epoch or WorkerEpoch(uuid.uuid4().hex),
        config.role,
        _fingerprint(config, models, demand),
        Place(ranks.rank, ranks.size, None if alone else worker),
    )


def _fingerprint(config: WorkerConfig, models: Models, demand: KvDemand) -> Fingerprint:
    decoder, drafter = models.decoder, models.drafter
    several = decoder.ranks.size > 1
    target_heads = HeadRange(decoder.heads.first_kv_head, decoder.config.num_kv_heads)
    draft_heads = None
    if drafter is not None:
        draft_heads = HeadRange(drafter.heads.first_kv_head, drafter.config.num_kv_heads)
    return Fingerprint(
        target_model=decoder.fingerprint,
        target_dtype=config.dtype,
        target=demand.target,
        draft_model=models.drafter_fingerprint,
        draft_dtype=config.dtype if demand.draft is not None else None,
        draft=demand.draft,
        draft_mode=demand.draft_kv if demand.draft is not None else "none",
        num_draft_tokens=drafter.max_draft_tokens if drafter is not None else 0,
        verify=config.verify,
        target_heads=target_heads if several else None,
        draft_heads=draft_heads if several else None,
    )


def _model_pair(config: WorkerConfig, models: Models) -> str:
    """What makes KV of the same tokens the same."""
    return f"{models.decoder.fingerprint} {models.drafter_fingerprint} {config.dtype}"


def nixl_rank_port(identity: Identity, pools: Pools) -> TransferPort:
    return nixl_port(identity, pools)
