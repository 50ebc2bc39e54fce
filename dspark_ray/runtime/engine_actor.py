"""The engine's process: a named Ray actor in its replica's placement group (tensor-parallel rank 0).

`load()` and then `run()` occupy the actor's own thread; the control methods answer beside them, from a
second thread, with the loop's newest snapshot.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import ray
import zmq

from dspark_ray.core.clock import SystemClock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import DsparkError, EngineDeadError, RequestError
from dspark_ray.core.types import AdapterRef, EngineStats, StepPlan, SwapOrder, SwapState
from dspark_ray.runtime.engine_loop import EngineLoop, StepEngine
from dspark_ray.runtime.logs import configure_logging
from dspark_ray.runtime.messages import ApplyPlan, encode
from dspark_ray.runtime.metric_sink import RayMetricSink
from dspark_ray.runtime.monitor import Monitor
from dspark_ray.runtime.plan_client import PlanClient
from dspark_ray.runtime.preparation import PrepareRequest
from dspark_ray.runtime.rank_actor import node_id
from dspark_ray.runtime.rank_link import RankLink, RankPlace
from dspark_ray.runtime.scheduler_actor import find_or_start_scheduler
from dspark_ray.runtime.threads import use_threads
from dspark_ray.runtime.transport import Outboxes, bind_inbox
from dspark_ray.scheduling.groups import group_of

if TYPE_CHECKING:
    from dspark_ray.runtime.ranks import LeaderEnd

logger = logging.getLogger(__name__)

CONTROL = "control"
LOADING = "loading"  # takes seconds: health must not wait for it
CONCURRENCY_GROUPS = {CONTROL: 2, LOADING: 1}
CALL_TIMEOUT_S = 30.0
_PLANS_ADDRESS = "inproc://plans"


class AdapterHolder(Protocol):
    """The LoRA adapters of an engine; called from any thread."""

    def load(self, ref: AdapterRef) -> None:
        """Reads it if it is not held. Raises `RequestError`."""
        ...

    def forget(self, digest: str) -> None: ...


class DrafterSwap(Protocol):
    """An engine's drafter and its candidate. `build` is for any thread, the rest for the loop's; all but
    `refresh` raise `RequestError`."""

    state: SwapState

    def build(self, order: SwapOrder) -> Any: ...

    def start(self, candidate: Any) -> None: ...

    def promote(self, reason: str) -> None: ...

    def roll_back(self, reason: str) -> None: ...

    def refresh(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What an engine factory gives back."""

    engine: StepEngine
    canary_prompt: tuple[int, ...]  # a short prompt that any healthy engine can continue
    close: Callable[[], None] = lambda: None  # ends what the engine has started outside this process
    prepare: PrepareRequest | None = None  # slow work of a request, for a thread beside the step loop
    adapters: "AdapterHolder | None" = None  # where it serves any
    hot_swap: "DrafterSwap | None" = None  # where its drafter can be swapped


EngineFactory = Callable[..., LoadedEngine]
"""(config, engine id) → an engine, built on the thread that will run it. May take minutes. Where other ranks
follow, also `leader=`, rank 0's end of the way to them: a `LeaderEnd`."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the server needs to talk to a loaded engine."""

    inbox_address: str
    generation: int  # grows with every incarnation
    description: dict[str, Any]
    canary_prompt: tuple[int, ...]
    load_s: float


class EngineActor:
    """One engine, its step loop, its monitor and its plan client."""

    def __init__(self, config: AppConfig, app_name: str, replica_id: str, factory: EngineFactory) -> None:
        configure_logging()
        self._config = config
        self._app_name = app_name
        self._replica_id = replica_id
        self._factory = factory
        self._generation = time.time_ns() // 1_000_000
        self._clock = SystemClock()
        self._loop: EngineLoop | None = None
        self._leader: LeaderEnd | None = None
        self._close_engine: Callable[[], None] = lambda: None
        self._adapters: AdapterHolder | None = None
        self._hot_swap: DrafterSwap | None = None
        self._plans: PlanClient | None = None
        self._send_plan: Callable[[StepPlan], None] | None = None
        self._ready = False

    def open_ranks(self, places: Sequence[RankPlace]) -> RankLink:
        """Where the ranks that will follow, and are at `places`, find this one. Comes before `load()`."""
        use_threads(self._config)
        from dspark_ray.engine.device import choose_device
        from dspark_ray.runtime.ranks import LeaderEnd, ring_bytes

        self._leader = LeaderEnd.open(
            ray.util.get_node_ip_address(),
            node_id(),
            places,
            ring_bytes(self._config),
            device=choose_device(self._config.model.device),
        )
        return self._leader.link

    def load(self) -> EngineInfo:
        """Builds the engine and binds its inbox. Raises what the factory raises."""
        started_ms = self._clock.now_ms()
        group = group_of(self._replica_id, self._config.scheduler.num_groups)
        find_or_start_scheduler(self._app_name, self._config.scheduler, group)  # its process starts meanwhile
        factory, leader = self._factory, self._leader
        if leader is not None:
            leader.join()
        loaded = (factory if leader is None else partial(factory, leader=leader))(
            self._config, self._replica_id
        )
        self._close_engine = loaded.close
        self._adapters, self._hot_swap = loaded.adapters, loaded.hot_swap
        context = zmq.Context()
        inbox = bind_inbox(context, ray.util.get_node_ip_address())
        inbox.socket.bind(_PLANS_ADDRESS)
        self._send_plan = _plan_sender(context)
        self._plans = PlanClient(
            self._app_name,
            self._config.scheduler,
            self._replica_id,
            self._generation,
            self._send_plan,
            self._clock,
            inbox.address,
        )
        outboxes = Outboxes(context, self._clock)
        self._loop = EngineLoop(
            loaded.engine,
            self._generation,
            inbox,
            outboxes,
            self._clock,
            self._plans,
            loaded.prepare,
            self._config.observability.goodput,
        )
        load_s = (self._clock.now_ms() - started_ms) / 1e3
        description = loaded.engine.describe()
        if leader is not None:
            description["ranks"] = leader.link.describe()
        return EngineInfo(inbox.address, self._generation, description, loaded.canary_prompt, load_s)

    def run(self) -> None:
        """The step loop, until it is told to stop; raises what a step raised."""
        assert self._loop is not None, "load() comes first"
        assert self._plans is not None
        sink = RayMetricSink(self._app_name, self._replica_id)
        monitor = Monitor(self._current_stats, sink, self._config.serving.log_interval_s, self._clock)
        self._plans.start()
        monitor.start()
        try:
            self._loop.run()
        finally:
            monitor.close()
            self._plans.close()
            self._close_engine()

    @ray.method(concurrency_group=CONTROL)
    def stats(self) -> EngineStats | None:
        """The newest snapshot; None while the engine is being loaded."""
        return None if self._loop is None else self._current_stats()

    @ray.method(concurrency_group=CONTROL)
    def mark_ready(self) -> None:
        """The canary generation has passed."""
        self._ready = True

    @ray.method(concurrency_group=CONTROL)
    def apply_plan(self, plan: StepPlan) -> None:
        """A plan that the scheduler pushes between reports."""
        if self._send_plan is not None:
            self._send_plan(plan)

    @ray.method(concurrency_group=LOADING)
    def load_drafter(self, order: SwapOrder) -> DsparkError | None:
        """Reads a drafter beside the loop, and begins its trial; the error if it cannot serve here."""
        return self._swap(lambda swap: partial(swap.start, swap.build(order)))

    @ray.method(concurrency_group=LOADING)
    def end_trial(self, promote: bool, order: SwapOrder | None = None) -> DsparkError | None:
        """By hand; with an order, only its own trial."""
        if order is not None and (self._hot_swap is None or self._hot_swap.state.order != order):
            return None
        return self._swap(lambda swap: partial(swap.promote if promote else swap.roll_back, "by hand"))

    @ray.method(concurrency_group=LOADING)
    def swap_state(self) -> SwapState | DsparkError:
        """How a trial goes, or how the last one went."""
        error = self._swap(lambda swap: swap.refresh)
        return error or (SwapState("none") if self._hot_swap is None else self._hot_swap.state)

    def _swap(self, prepare: Callable[[DrafterSwap], Callable[[], None]]) -> DsparkError | None:
        """Does between two steps what `prepare`, on this thread, makes of the engine's swap."""
        if self._hot_swap is None or self._loop is None:
            return RequestError("this engine cannot swap its drafter now", status=409, code="no_drafter")
        try:
            self._loop.call(prepare(self._hot_swap)).result(CALL_TIMEOUT_S)
        except DsparkError as error:
            return error
        except TimeoutError:
            return EngineDeadError("the engine's loop does not turn")
        return None

    @ray.method(concurrency_group=LOADING)
    def load_adapter(self, adapter: AdapterRef) -> DsparkError | None:
        """Reads it, beside the loop, unless the engine is still loading; the error if it cannot be served."""
        try:
            if self._adapters is not None:
                self._adapters.load(adapter)
        except DsparkError as error:
            return error
        return None

    @ray.method(concurrency_group=CONTROL)
    def unload_adapter(self, adapter: AdapterRef) -> None:
        if self._adapters is not None:
            self._adapters.forget(adapter.digest)

    @ray.method(concurrency_group=CONTROL)
    def turn_age_ms(self) -> float:
        """How long ago the loop last turned: large when a step hangs."""
        return 0.0 if self._loop is None else self._clock.now_ms() - self._loop.turn_at_ms

    @ray.method(concurrency_group=CONTROL)
    def journal(self) -> tuple[Any, ...]:
        """What other ranks were told last, oldest first; empty where there are none."""
        return () if self._leader is None else self._leader.journal()

    @ray.method(concurrency_group=CONTROL)
    def pid(self) -> int:
        """For those who test what its death costs."""
        return os.getpid()

    def _current_stats(self) -> EngineStats:
        assert self._loop is not None
        return replace(self._loop.snapshot, ready=self._ready)


def _plan_sender(context: zmq.Context) -> Callable[[StepPlan], None]:
    """Puts plans into the loop's inbox, from any thread."""
    socket = context.socket(zmq.PUSH)
    socket.connect(_PLANS_ADDRESS)
    lock = threading.Lock()  # a zmq socket belongs to one thread at a time

    def send(plan: StepPlan) -> None:
        with lock:
            socket.send(encode(ApplyPlan(plan)))

    return send
