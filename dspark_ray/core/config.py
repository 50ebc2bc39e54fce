"""The configuration a user writes, checked key by key: unknown keys are errors, every value has a range.

`load_app_config` reads the same YAML that `serve run` takes, so that every command of the CLI and the
served application are driven by one file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from dspark_ray.core.errors import ConfigError
from dspark_ray.core.section import Section
from dspark_ray.core.types import ServiceTier, TierTerms, VerificationMode
from dspark_ray.core.vllm_config import VllmConfig

DEFAULT_MODEL_ID = "smollm2-135m-instruct"
DEFAULT_SOURCE = "default"
REFUSED_AT_ONCE = 64  # requests that may be on their way to a replica whose queue is full
NATIVE_DRAFTERS = ("none", "ngram", "dspark", "dflash", "eagle3", "mtp")
MODEL_FREE_DRAFTERS = ("none", "ngram")
BUNDLED_DRAFTERS = ("dspark", "mtp")  # some targets' checkpoints hold one: DeepSeek-V4's DSpark stages


class ModelConfig(Section):
    """The target model."""

    id: str = Field(DEFAULT_MODEL_ID, description="name that clients use")
    source: str = Field(DEFAULT_SOURCE, description="'default' (SmolLM2), a local directory or a hub id")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="of the native engine; auto: a GPU if its process sees one"
    )
    quantization: Literal["none", "int8", "fp8"] = Field(
        "none", description="int8, fp8: the matrices in 8 bits, one scale an output (half the bytes to read)"
    )
    max_model_len: int = Field(2048, ge=16, description="longest prompt + output, in tokens")


Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class TimedConfig(Section):
    """The timed engine: it sleeps instead of computing, so every figure from it is simulated."""

    step_tables: tuple[str, ...] = Field(
        min_length=1, description="step table JSONs; replica i has the times of table i mod n"
    )
    acceptance: tuple[Annotated[tuple[Probability, ...], Field(min_length=1)], ...] = Field(
        ((0.8,),), min_length=1, description="conditional acceptance by position, a row per kind of request"
    )
    acceptance_trace: str | None = Field(None, description="JSON list of such rows, instead of acceptance")
    concentration: float | None = Field(
        8.0, gt=0, description="how close confidences are to acceptance, block by block; None: equal to it"
    )
    seed: int = 0


class EngineConfig(Section):
    """The engine, its step loop and its memory."""

    kind: Literal["native", "vllm", "timed"] = "native"
    timed: TimedConfig | None = Field(None, description="kind timed only")
    num_threads: int | None = Field(
        None, ge=1, description="torch threads; None: all cores, shared by replicas"
    )
    kv_block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    kv_num_blocks: int = Field(2048, ge=2, description="KV blocks per replica")
    kv_dtype: Literal["auto", "bf16", "fp8"] = Field(
        "auto", description="of the target's KV; auto: model.dtype; fp8: half the bytes, an approximation"
    )
    max_running: int = Field(64, ge=1, description="requests decoded together")
    max_step_rows: int = Field(512, ge=8, description="rows of one target step, drafts and prefill together")
    max_waiting: int = Field(512, ge=1, description="queued requests before 503")
    prefix_cache: bool = True
    cuda_graphs: bool = Field(
        True, description="on a GPU, replay captured passes of the target for batches of 512 rows at most"
    )
    attention: Literal["auto", "own", "flash_attn", "flash_attn_3", "flashinfer"] = Field(
        "auto",
        description="on a GPU, whose attention the target runs: this project's, a library's where it can, or "
        "the faster one of what is installed, tried at start (docs/gpu.md)",
    )
    ahead: Literal["auto", "on", "off"] = Field(
        "auto",
        description="launch a step before the one that runs is read (docs/gpu.md); auto: where the target is "
        "on a GPU; on: on a CPU, too, where it gains nothing",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="ranks that share the target of a replica (native; docs/cluster.md)"
    )
    rank_placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK", description="a replica's ranks: on one node, on few nodes, on many, on one each"
    )
    deterministic: bool = Field(
        False, description="refuse to start where a text could depend on the batch around it"
    )

    @model_validator(mode="after")
    def _check(self) -> "EngineConfig":
        if self.max_running > self.max_step_rows:
            raise ValueError("engine.max_running must not exceed max_step_rows (each request needs a row)")
        if (self.kind == "timed") != (self.timed is not None):
            raise ValueError("engine.timed belongs to engine.kind 'timed': give both or neither")
        if self.kind != "native" and self.kv_dtype != "auto":
            raise ValueError("engine.kv_dtype is the native engine's; see vllm.engine_args.kv_cache_dtype")
        if self.attention not in ("auto", "own"):
            if self.kind != "native":
                raise ValueError("engine.attention is the native engine's")
            if self.tensor_parallel_size > 1:
                raise ValueError("engine.attention: several ranks have their own kernels; set it to own")
        if self.kind != "native" and self.tensor_parallel_size > 1:
            raise ValueError(
                "engine.tensor_parallel_size is the native engine's; see vllm.tensor_parallel_size"
            )
        return self


class DrafterConfig(Section):
    """Who proposes tokens."""

    kind: Literal["none", "ngram", "dspark", "dflash", "eagle3", "mtp", "draft_model", "medusa"] = "dspark"
    path: str | None = Field(None, description="checkpoint directory")
    hub_id: str | None = Field(None, description="checkpoint on the hub, owner/name[@revision]")
    ngram_min: int = Field(2, ge=1, description="shortest suffix looked up (ngram)")
    ngram_max: int = Field(4, ge=1, description="longest suffix looked up (ngram)")

    @property
    def has_checkpoint(self) -> bool:
        """Of its own, beside the target's."""
        return bool(self.path or self.hub_id)

    @model_validator(mode="after")
    def _check(self) -> "DrafterConfig":
        if self.path and self.hub_id:
            raise ValueError("drafter.path and drafter.hub_id name two checkpoints: leave one out")
        if self.kind not in (*MODEL_FREE_DRAFTERS, *BUNDLED_DRAFTERS) and not self.has_checkpoint:
            raise ValueError(f"drafter.path is required for kind {self.kind!r} (or drafter.hub_id)")
        if self.ngram_min > self.ngram_max:
            raise ValueError("drafter.ngram_min must not exceed ngram_max")
        return self


class HotSwapConfig(Section):
    """Another drafter, or other temperatures, while serving; off by default."""

    load_from: str | None = Field(
        None, description="folder below which operators may load drafters at run time; None: they may not"
    )


class SpeculationConfig(Section):
    """How much of a draft is verified."""

    drafter: DrafterConfig = DrafterConfig(kind="none")
    num_draft_tokens: int = Field(7, ge=1, le=32, description="γ; at most the checkpoint's block size")
    mode: VerificationMode = VerificationMode.ADAPTIVE
    fixed_tokens: int | None = Field(None, ge=0, description="mode fixed: tokens verified; None: all γ")
    threshold: float = Field(0.4, ge=0.0, le=1.0, description="mode threshold: least survival verified")
    confidence: Literal["head", "online"] = Field(
        "head",
        description="where chances of acceptance come from: the calibrated head, or an estimator that learns "
        "while serving; drafters without a head always learn",
    )
    canary: bool = Field(True, description="try the drafter on built-in prompts at start-up, warn if useless")
    temperatures: str | None = Field(None, description="calibration JSON; None: the checkpoint's own, if any")
    step_table: str | None = Field(None, description="step table JSON; None: profiled once and cached")
    hot_swap: HotSwapConfig = HotSwapConfig()

    @model_validator(mode="after")
    def _check(self) -> "SpeculationConfig":
        if self.fixed_tokens is not None and self.fixed_tokens > self.num_draft_tokens:
            raise ValueError("speculation.fixed_tokens must not exceed num_draft_tokens")
        return self


class TierConfig(Section):
    """One service tier (policy weighted)."""

    weight: float = Field(1.0, gt=0, le=100, description="what one of its tokens counts")
    target_tokens_per_s: float | None = Field(
        None, gt=0, description="speed owed to each request that names none itself"
    )


_TIERS = {
    ServiceTier.FLEX: TierConfig(weight=0.5),
    ServiceTier.DEFAULT: TierConfig(),
    ServiceTier.PRIORITY: TierConfig(weight=2.0),
}


class SchedulerConfig(Section):
    """The central scheduler, one per application."""

    policy: Literal["local", "shared_cap", "lockstep", "weighted"] = "local"
    cap_draft_tokens_per_s: float | None = Field(
        None, gt=0, description="fleet-wide verify rate (shared_cap; weighted, optional)"
    )
    tiers: dict[ServiceTier, TierConfig] = Field(
        default_factory=lambda: dict(_TIERS), description="tiers left out count 1 (weighted)"
    )
    target_boost: float = Field(
        8.0, ge=0, le=100, description="how much more a token counts below its request's target (weighted)"
    )
    num_groups: int = Field(
        1, ge=1, le=1000, description="schedulers that share the replicas, about 1,000 each (docs/fleet.md)"
    )
    report_interval_ms: float = Field(250.0, ge=20.0)
    plan_ttl_ms: float = Field(2000.0, ge=100.0, description="a plan older than this is ignored")

    @model_validator(mode="after")
    def _check(self) -> "SchedulerConfig":
        if self.policy == "shared_cap" and self.cap_draft_tokens_per_s is None:
            raise ValueError("scheduler.cap_draft_tokens_per_s is required for policy 'shared_cap'")
        if self.cap_draft_tokens_per_s is not None and not self.has_cap:
            raise ValueError(f"scheduler.cap_draft_tokens_per_s means nothing under policy {self.policy!r}")
        if self.policy == "lockstep" and self.num_groups > 1:
            raise ValueError(
                "scheduler.num_groups must be 1 for policy 'lockstep': all replicas step together"
            )
        if self.plan_ttl_ms < 2 * self.report_interval_ms:  # else plans expire between two reports
            raise ValueError(
                f"scheduler.plan_ttl_ms ({self.plan_ttl_ms:g}) must be at least twice report_interval_ms "
                f"({self.report_interval_ms:g})"
            )
        return self

    @property
    def has_cap(self) -> bool:
        """Whether the policy splits a cap, now or when one is set."""
        return self.policy in ("shared_cap", "weighted")

    def tier_terms(self) -> tuple[TierTerms, ...]:
        """The tiers as plans carry them; empty where they do not count."""
        if self.policy != "weighted":
            return ()
        tiers = ((tier, self.tiers.get(tier, TierConfig())) for tier in ServiceTier)
        return tuple(TierTerms(tier, one.weight, one.target_tokens_per_s) for tier, one in tiers)


class AutoscalingConfig(Section):
    """How the number of replicas follows the demand."""

    min_replicas: int = Field(1, ge=0, description="0: none while nobody asks for anything")
    max_replicas: int = Field(ge=1)
    target_tokens_per_s: float = Field(20.0, gt=0, description="speed each request should have")
    target_utilization: float = Field(0.8, gt=0.0, le=1.0, description="share of that capacity to be used")
    queue_time_s: float = Field(1.0, gt=0, description="in which what waits should be worked off")
    down_after_s: float = Field(60.0, ge=0, description="how long fewer replicas must have been enough")
    stats_period_s: float = Field(1.0, ge=0.1)
    dry_run: bool = Field(False, description="only log what would be done")

    @model_validator(mode="after")
    def _check(self) -> "AutoscalingConfig":
        if self.min_replicas > self.max_replicas:
            raise ValueError("serving.autoscaling.min_replicas must not exceed max_replicas")
        return self


class ServingConfig(Section):
    """The Serve deployments."""

    num_replicas: int = Field(1, ge=1, description="model copies; with autoscaling: to begin with")
    autoscaling: AutoscalingConfig | None = Field(None, description="None: num_replicas, always")
    num_ingress_replicas: int = Field(1, ge=1)
    replica_cpus: float = Field(1.0, ge=0.0, description="Ray CPUs reserved per engine actor, or rank")
    max_ongoing_requests: int | None = Field(
        None, ge=1, description="per replica; None: all that its engine runs and queues, so that it decides"
    )
    start_within_s: dict[ServiceTier, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="longest wait in a queue by tier; then a request is refused"
    )
    router: Literal["goodput", "pow2"] = Field(
        "goodput",
        description="throughput that the request adds, or Serve's default: the shorter queue of two",
    )
    router_stats_period_s: float = Field(0.5, ge=0.05, description="age that loads may reach (goodput)")
    request_timeout_s: float = Field(600.0, gt=0)
    speculation_control: bool = Field(True, description="requests may set `speculation` (docs/api.md)")
    log_interval_s: float = Field(10.0, gt=0, description="speculation log line")
    tool_format: Literal["auto", "hermes", "llama"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template says"
    )
    reasoning: Literal["auto", "none", "think"] = Field(
        "auto", description="thoughts that are split off; auto: <think> if the chat template knows it"
    )
    control_tokens_in_messages: bool = Field(
        False,
        description="control tokens in messages are the model's own, as elsewhere, not text (docs/api.md)",
    )
    grammar_timeout_s: float = Field(5.0, gt=0, description="longest compilation of a grammar before a 400")

    @property
    def least_replicas(self) -> int:
        """How many replicas there always should be."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas


class AdapterConfig(Section):
    """One LoRA adapter that is always served."""

    name: str = Field(min_length=1, max_length=128, description="what clients give as `model`")
    path: str = Field(description="folder in PEFT's layout")


class LoraConfig(Section):
    """LoRA adapters of the target, as models of their own; none by default."""

    adapters: tuple[AdapterConfig, ...] = ()
    load_from: str | None = Field(
        None,
        description="folder below which clients may load adapters at run time; None: they may not load any",
    )
    max_loaded: int = Field(8, ge=1, description="adapters that an engine holds; the least used leaves first")
    max_rank: int = Field(64, ge=1, le=1024, description="largest rank that is accepted")

    @property
    def is_on(self) -> bool:
        return bool(self.adapters) or self.load_from is not None

    @model_validator(mode="after")
    def _check(self) -> "LoraConfig":
        names = [adapter.name for adapter in self.adapters]
        if len(set(names)) < len(names):
            raise ValueError("lora.adapters: two adapters have the same name")
        return self


class HardwareConfig(Section):
    """The machine a configuration is written for. Read by checks only."""

    device_memory_gib: float | None = Field(None, gt=0, description="of one device (GPU, or the machine)")
    devices_per_node: int | None = Field(None, ge=1)


class GoodputConfig(Section):
    """What a client counts as served in time; of the engine's own time, without HTTP."""

    ttft_ms: float = Field(2000.0, gt=0, description="to the first token, the queue included")
    tpot_ms: float = Field(100.0, gt=0, description="for each token after it, on average of the request")


class TracesConfig(Section):
    """OpenTelemetry spans of requests."""

    endpoint: str = Field(pattern=r"^https?://", description="an OTLP/HTTP collector: http://collector:4318")
    service_name: str = Field("dspark-ray", min_length=1)
    sample_ratio: float = Field(1.0, ge=0.0, le=1.0, description="of requests that bring no decision")
    steps: bool = Field(False, description="an event for each step of a request")


class RequestLogConfig(Section):
    """Prompts of clients, for training a drafter on them."""

    folder: str = Field(description="of a file for each ingress process; prompts are personal data: guard it")
    sample_ratio: float = Field(1.0, gt=0.0, le=1.0, description="of the requests")
    redact: str | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="`package.module:function`: takes a line (a dict), returns what may be written, or None",
    )
    max_file_mib: int = Field(64, ge=1)
    max_files: int = Field(8, ge=2, description="of a process; the oldest is deleted")


class ObservabilityConfig(Section):
    """What is counted and written down."""

    record_path: str | None = Field(
        None, description="folder for a line a step, one file an engine; what `simulate` reads"
    )
    goodput: GoodputConfig = GoodputConfig()
    traces: TracesConfig | None = Field(None, description="None: no spans")
    request_log: RequestLogConfig | None = Field(None, description="None: prompts are written nowhere")


class SecurityConfig(Section):
    """Who may ask. Without keys, anyone who reaches the server may do anything it offers."""

    api_keys_file: str | None = Field(
        None,
        description="hashes of API keys, a JSON line each (`dspark-ray new-key`); read again when changed",
    )
    api_keys_from_environment: bool = Field(
        False, description="the same lines, from $DSPARK_API_KEYS of the ingress processes"
    )
    open_metrics: bool = Field(False, description="/metrics without a key, for a scraper that has none")

    @model_validator(mode="after")
    def _check(self) -> "SecurityConfig":
        if self.api_keys_file is not None and self.api_keys_from_environment:
            raise ValueError("security: api_keys_file and api_keys_from_environment exclude each other")
        if self.open_metrics and self.api_keys_file is None and not self.api_keys_from_environment:
            raise ValueError("security.open_metrics means nothing without API keys: everything is open then")
        return self


class AppConfig(Section):
    """Everything `build_app` and the command line take: the `args` of one application in the Serve YAML."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    lora: LoraConfig = LoraConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    serving: ServingConfig = ServingConfig()
    vllm: VllmConfig = VllmConfig()
    hardware: HardwareConfig = HardwareConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    security: SecurityConfig = SecurityConfig()

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that a replica holds. More than its engine takes, so that the engine does the refusing: it
        knows who goes first."""
        room = self.engine.max_running + self.engine.max_waiting + REFUSED_AT_ONCE
        return self.serving.max_ongoing_requests or room

    @model_validator(mode="after")
    def _check(self) -> "AppConfig":
        drafter = self.speculation.drafter
        if self.engine.kind == "native" and drafter.kind not in NATIVE_DRAFTERS:
            raise ValueError(
                f"the native engine has no drafter {drafter.kind!r}: set engine.kind to vllm, or "
                f"drafter.kind to one of {', '.join(NATIVE_DRAFTERS)}"
            )
        needs_checkpoint = drafter.kind not in MODEL_FREE_DRAFTERS
        if self.engine.kind == "native" and needs_checkpoint and not drafter.has_checkpoint:
            raise ValueError(
                "speculation.drafter.path is required (or drafter.hub_id): only vLLM reads a drafter from "
                "the target's checkpoint"
            )
        if self.engine.kind != "native" and self.observability.record_path is not None:
            raise ValueError("observability.record_path: only the native engine records its steps")
        if self.engine.kv_dtype == "bf16" and self.model.dtype != "bfloat16":
            raise ValueError("engine.kv_dtype bf16 goes with model.dtype bfloat16: set it to auto or fp8")
        if self.engine.kind == "timed" and self.lora.is_on:
            raise ValueError("lora: the timed engine has no weights to adapt; leave it out")
        if self.engine.kind != "native" and self.engine.deterministic:
            raise ValueError("engine.deterministic: only the native engine's kernels ignore the batch")
        if self.engine.kind != "native" and self.speculation.hot_swap.load_from is not None:
            raise ValueError("speculation.hot_swap: only the native engine swaps drafters")
        if any(adapter.name == self.model.id for adapter in self.lora.adapters):
            raise ValueError(f"lora.adapters: {self.model.id!r} is the model's own name (model.id)")
        longest, block_size = self.model.max_model_len, self.engine.kv_block_size
        num_tokens = self.engine.kv_num_blocks * block_size
        # With a share of the device's memory to fill, vLLM counts the blocks itself.
        is_fixed = self.engine.kind == "native" or self.vllm.gpu_memory_utilization is None
        if is_fixed and num_tokens < longest:
            raise ValueError(
                f"the KV cache holds {num_tokens} tokens (engine.kv_num_blocks × kv_block_size) and "
                f"model.max_model_len is {longest}: set kv_num_blocks to at least "
                f"{-(-longest // block_size)}, or max_model_len to at most {num_tokens}"
            )
        return self


def parse_app_config(args: dict[str, Any]) -> AppConfig:
    """`args` checked; raises `ConfigError` with one line per wrong key."""
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'args'}: {e['msg']}" for e in error.errors()]
        raise ConfigError("the configuration is not valid:\n" + "\n".join(lines)) from error


def load_app_config(path: Path) -> AppConfig:
    """The first application's `args` in a Serve config file; raises `ConfigError` naming the file."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    try:
        args = document["applications"][0].get("args", {})
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path} has no 'applications' list; see configs/smollm2-135m-cpu.yaml") from error
    return parse_app_config(args or {})


def with_absolute_paths(config: AppConfig, bases: Sequence[Path]) -> AppConfig:
    """Files named relative to one of `bases`, the first that has them, made absolute.

    Other processes run in other directories than the shell that read the configuration. Raises `ConfigError`
    for a file that does not exist: found here it costs a second, found in the replicas it costs their
    retries. A model source that is no directory stays as it is: 'default', or a hub id.
    """

    def existing(key: str, path: str | None) -> str | None:
        if path is None:
            return None
        found = _find(path, bases)
        if found is None:
            raise ConfigError(f"{key}: {path!r} does not exist, under {' or '.join(map(str, bases))}")
        return found

    speculation = config.speculation
    drafter = speculation.drafter
    if drafter.kind not in MODEL_FREE_DRAFTERS:
        path = existing("speculation.drafter.path", drafter.path)
        drafter = drafter.model_copy(update={"path": path})
    updates = {
        "drafter": drafter,
        "temperatures": existing("speculation.temperatures", speculation.temperatures),
        "step_table": existing("speculation.step_table", speculation.step_table),
        "hot_swap": HotSwapConfig(
            load_from=existing("speculation.hot_swap.load_from", speculation.hot_swap.load_from)
        ),
    }
    source = config.model.source
    if source != DEFAULT_SOURCE:  # even where a folder has that name
        source = _find(source, bases) or source
    model = config.model.model_copy(update={"source": source})
    engine = config.engine
    if (timed := engine.timed) is not None:
        tables = tuple(str(existing("engine.timed.step_tables", table)) for table in timed.step_tables)
        trace = existing("engine.timed.acceptance_trace", timed.acceptance_trace)
        timed = timed.model_copy(update={"step_tables": tables, "acceptance_trace": trace})
        engine = engine.model_copy(update={"timed": timed})
    adapters = tuple(
        adapter.model_copy(update={"path": existing(f"lora.adapters.{adapter.name}", adapter.path)})
        for adapter in config.lora.adapters
    )
    load_from = existing("lora.load_from", config.lora.load_from)
    observability = config.observability
    if observability.record_path is not None:  # a folder to be made, where the shell is
        record_path = str((bases[0] / Path(observability.record_path).expanduser()).resolve())
        observability = observability.model_copy(update={"record_path": record_path})
    if (request_log := observability.request_log) is not None:
        folder = str((bases[0] / Path(request_log.folder).expanduser()).resolve())
        request_log = request_log.model_copy(update={"folder": folder})
        observability = observability.model_copy(update={"request_log": request_log})
    keys_file = existing("security.api_keys_file", config.security.api_keys_file)
    changed = {
        "security": config.security.model_copy(update={"api_keys_file": keys_file}),
        "model": model,
        "engine": engine,
        "speculation": speculation.model_copy(update=updates),
        "lora": config.lora.model_copy(update={"adapters": adapters, "load_from": load_from}),
        "observability": observability,
    }
    return config.model_copy(update=changed)


def for_replica(config: AppConfig, rank: int) -> AppConfig:
    """The configuration of replica `rank`: where replicas differ, only its own share is left."""
    timed = config.engine.timed
    if timed is None:
        return config
    tables = (timed.step_tables[rank % len(timed.step_tables)],)
    timed = timed.model_copy(update={"step_tables": tables})
    return config.model_copy(update={"engine": config.engine.model_copy(update={"timed": timed})})


def _find(path: str, bases: Sequence[Path]) -> str | None:
    """The absolute path below the first base that has it, or None."""
    try:
        named = Path(path).expanduser()
    except RuntimeError as error:  # the home of a user who does not exist
        raise ConfigError(f"{path!r} does not exist: {error}") from error
    found = next((base / named for base in bases if (base / named).exists()), None)
    return None if found is None else str(found.resolve())
