"""What is simulated, as a user writes it: checked key by key, like the configuration of the program."""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from dspark_ray.core.config import AutoscalingConfig, EngineConfig, SchedulerConfig
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.section import Section
from dspark_ray.core.types import ServiceTier, VerificationMode


class ReplicaSpec(Section):
    """Replicas of one kind."""

    count: int = Field(1, ge=1)
    step_table: str = Field(description="step table JSON; relative to the scenario's folder")
    engine: EngineConfig = EngineConfig()
    start_up_s: float = Field(30.0, ge=0, description="from the order to readiness")
    price_per_hour: float = Field(0.0, ge=0)


class LengthSpec(Section):
    """A number of tokens: log-normal, or one of a list."""

    mean: float | None = Field(None, gt=0)
    spread: float = Field(0.5, ge=0, le=3, description="standard deviation of the logarithm")
    most: int = Field(8192, ge=1, description="longer ones are cut; of answers, max_tokens")
    values: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="drawn from, all with the same chance; instead of mean and spread"
    )

    @model_validator(mode="after")
    def _check(self) -> "LengthSpec":
        if (self.mean is None) == (not self.values):
            raise ValueError("give either mean or values")
        return self


class AcceptanceSpec(Section):
    """What becomes of drafts: a record of real runs, or a model."""

    record: list[str] = Field([], description="files of observability.record_path, mode fixed")
    conditional: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        [], description="model: chance of token k given those before it, one a draft token"
    )
    spread: float = Field(1.0, ge=0, le=5, description="between blocks, in logits")
    persistence: float = Field(0.6, ge=0, lt=1, description="of a request's blocks")
    confidence_scale: float = Field(1.0, gt=0, description="above 1: overconfident")
    confidence_bias: float = Field(0.0, description="in logits; above 0: optimistic")

    @model_validator(mode="after")
    def _check(self) -> "AcceptanceSpec":
        if bool(self.record) == bool(self.conditional):
            raise ValueError("acceptance: give either record or conditional")
        return self


class TaskSpec(Section):
    """One kind of request."""

    name: str
    share: float = Field(1.0, gt=0)
    prompt_tokens: LengthSpec
    output_tokens: LengthSpec
    acceptance: AcceptanceSpec
    cached_prompt_share: float = Field(0.0, ge=0, lt=1, description="of a prompt, found in the prefix cache")
    tier: ServiceTier = Field(ServiceTier.DEFAULT, description="what its tokens count (scheduler: weighted)")
    target_tokens_per_s: float | None = Field(
        None,
        gt=0,
        description="speed that each request is owed (scheduler: weighted); its tier's if not given",
    )


class ArrivalSpec(Section):
    """When requests come."""

    kind: Literal["poisson", "bursty", "diurnal", "replay", "closed"] = "poisson"
    rate_per_s: float | None = Field(None, gt=0, description="poisson; calm rate of bursty; mean of diurnal")
    burst_factor: float = Field(5.0, ge=1)
    calm_s: float = Field(60.0, gt=0)
    burst_s: float = Field(10.0, gt=0)
    swing: float = Field(0.6, ge=0, le=1, description="diurnal: of the mean, up and down")
    period_s: float = Field(86400.0, gt=0, description="diurnal")
    log: str | None = Field(None, description="replay: a record, or JSON lines")
    speed: float = Field(1.0, gt=0, description="replay: 2 is twice the load")
    clients: int | None = Field(None, ge=1, description="closed: requests in flight, in the whole fleet")

    @model_validator(mode="after")
    def _check(self) -> "ArrivalSpec":
        needed = {"replay": "log", "closed": "clients"}.get(self.kind, "rate_per_s")
        if getattr(self, needed) is None:
            raise ValueError(f"arrivals.{needed} is required for kind {self.kind!r}")
        return self


class SpeculationSpec(Section):
    """How much is verified: `speculation` of the program, without the drafter."""

    mode: VerificationMode = VerificationMode.ADAPTIVE
    num_draft_tokens: int = Field(7, ge=1, le=32)
    fixed_tokens: int | None = Field(None, ge=0)
    threshold: float = Field(0.4, ge=0, le=1)
    current_scores: bool = Field(
        True, description="requests are greedy or have a seed: the search may see their blocks' own scores"
    )

    @model_validator(mode="after")
    def _check(self) -> "SpeculationSpec":
        if self.fixed_tokens is not None and self.fixed_tokens > self.num_draft_tokens:
            raise ValueError("speculation.fixed_tokens must not exceed num_draft_tokens")
        return self


class FaultSpec(Section):
    """A replica dies, and is replaced after its kind's start-up time."""

    at_s: float = Field(ge=0)
    replica: int = Field(0, ge=0, description="number, counted through all kinds")


class SloSpec(Section):
    """A request counts as good if it meets both."""

    ttft_ms: float = Field(1000.0, gt=0)
    tpot_ms: float = Field(100.0, gt=0)


class Scenario(Section):
    """Everything `simulate` takes."""

    duration_s: float = Field(600.0, gt=0)
    warm_up_s: float = Field(0.0, ge=0, description="not measured")
    seed: int = Field(0, ge=0)
    replicas: list[ReplicaSpec] = Field(min_length=1)
    speculation: SpeculationSpec = SpeculationSpec()
    scheduler: SchedulerConfig = SchedulerConfig()
    autoscaling: AutoscalingConfig | None = Field(
        None, description="`serving.autoscaling`: begins with min_replicas; `replicas` are all there may be"
    )
    router: str = Field("power_of_two", description="a name of simulator/routing.py")
    arrivals: ArrivalSpec
    tasks: list[TaskSpec] = Field(min_length=1)
    faults: tuple[FaultSpec, ...] = ()
    slo: SloSpec = SloSpec()
    steps_together: bool = Field(
        False, description="as under expert parallelism: a step lasts as long as the slowest replica's"
    )
    law: Literal["auto", "exact", "load"] = Field(
        "auto",
        description="exact: policies at every step; load: looked up by load; auto: exact to 4 replicas, and "
        "where steps end together",
    )
    max_stride: int = Field(32, ge=1, le=64, description="decoding steps taken at once (law load)")
    window_ms: float = Field(250.0, gt=0, description="the router sees loads this old")

    @model_validator(mode="after")
    def _check(self) -> "Scenario":
        gamma = self.speculation.num_draft_tokens
        for task in self.tasks:
            if task.acceptance.conditional and len(task.acceptance.conditional) < gamma:
                raise ValueError(
                    f"task {task.name!r}: acceptance.conditional has {len(task.acceptance.conditional)} "
                    f"values, speculation.num_draft_tokens is {gamma}"
                )
        if self.scheduler.policy == "lockstep" and not self.steps_together:
            raise ValueError("scheduler.policy lockstep is for replicas with steps_together: true")
        if self.steps_together and (self.law == "load" or len(self.replicas) > 1 or self.faults):
            raise ValueError("steps_together: law exact or auto, replicas of one kind, no faults")
        if self.warm_up_s >= self.duration_s:
            raise ValueError("warm_up_s must be less than duration_s")
        count = sum(spec.count for spec in self.replicas)
        if self.autoscaling is not None and self.autoscaling.max_replicas > count:
            raise ValueError(
                f"autoscaling.max_replicas is {self.autoscaling.max_replicas}, and there are {count} replicas"
            )
        for fault in self.faults:
            if fault.replica >= count:
                raise ValueError(f"faults: there is no replica {fault.replica}; there are {count}")
        return self

    def under(self, fleet_policy: str) -> "Scenario":
        """The same under another fleet policy, without the cap where that policy has none; `ConfigError`."""
        scheduler = self.scheduler.model_dump() | {"policy": fleet_policy}
        if fleet_policy in ("local", "lockstep"):
            scheduler["cap_draft_tokens_per_s"] = None
        return parse_scenario(self.model_dump() | {"scheduler": scheduler}, Path())

    @property
    def exact(self) -> bool:
        count = sum(spec.count for spec in self.replicas)
        return self.law == "exact" or (self.law == "auto" and (count <= 4 or self.steps_together))


def load_scenario(path: Path) -> Scenario:
    """A YAML file, its relative paths made absolute; `ConfigError` with one line per wrong key."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    return parse_scenario(data, path.parent.resolve())


def parse_scenario(data: object, folder: Path) -> Scenario:
    """`data` checked; files are looked for in `folder`."""
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'scenario'}: {e['msg']}" for e in error.errors()]
        raise ConfigError("the scenario is not valid:\n" + "\n".join(lines)) from error
    return _with_paths(scenario, folder)


def _with_paths(scenario: Scenario, folder: Path) -> Scenario:
    def found(key: str, name: str) -> str:
        path = folder / Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"{key}: {path} does not exist")
        return str(path)

    replicas = [
        spec.model_copy(update={"step_table": found("replicas.step_table", spec.step_table)})
        for spec in scenario.replicas
    ]
    tasks = []
    for task in scenario.tasks:
        record = [found("acceptance.record", name) for name in task.acceptance.record]
        acceptance = task.acceptance.model_copy(update={"record": record})
        tasks.append(task.model_copy(update={"acceptance": acceptance}))
    arrivals = scenario.arrivals
    if arrivals.log is not None:
        arrivals = arrivals.model_copy(update={"log": found("arrivals.log", arrivals.log)})
    return scenario.model_copy(update={"replicas": replicas, "tasks": tasks, "arrivals": arrivals})
