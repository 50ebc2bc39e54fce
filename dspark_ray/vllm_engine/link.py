"""Between an engine actor and its vLLM processes: plans one way, reports the other, over two zmq sockets.

Both sides send and read without waiting, and only the newest of each is of use: a peer that is dead or slow
costs nothing, and neither is missed by the other. The actor binds; the addresses reach vLLM's processes as an
environment variable.
"""

import json
import logging
import os
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import zmq

from dspark_ray.core.types import FloatArray, StepPlan

logger = logging.getLogger(__name__)

LINK_VARIABLE = "DSPARK_VLLM_LINK"
_COPIED_VARIABLES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
_MAX_REPORTS = 4  # in flight; the newest is what counts


@dataclass(frozen=True, slots=True)
class CoreReport:
    """What vLLM's first rank tells of a step."""

    survival: FloatArray  # [R, γ] as its budget was chosen by: at least two steps old
    base_rows: int  # rows of the step without draft tokens
    table: dict[str, Any]  # a `StepTable`
    table_digest: str


@dataclass(frozen=True, slots=True)
class LinkAddresses:
    """Where the actor's two sockets are."""

    plans: str
    reports: str

    def environment(self) -> dict[str, str]:
        """For vLLM's processes; those that Ray starts get the variables that the second one names."""
        copied = [*filter(None, os.environ.get(_COPIED_VARIABLES, "").split(",")), LINK_VARIABLE]
        return {
            LINK_VARIABLE: json.dumps([self.plans, self.reports]),
            _COPIED_VARIABLES: ",".join(dict.fromkeys(copied)),
        }

    @classmethod
    def from_environment(cls) -> "LinkAddresses | None":
        """None in a process that no engine of this program has started."""
        value = os.environ.get(LINK_VARIABLE)
        return None if value is None else cls(*json.loads(value))


class PlanLink:
    """The actor's side; one thread's."""

    def __init__(self, address: str, context: zmq.Context | None = None) -> None:
        """address: `tcp://ip`, for ports that the system chooses, or `inproc://name`"""
        context = context or zmq.Context.instance()
        self._plans, self._reports = context.socket(zmq.PUB), context.socket(zmq.PULL)
        for socket in (self._plans, self._reports):
            socket.setsockopt(zmq.LINGER, 0)
        self._reports.setsockopt(zmq.RCVHWM, _MAX_REPORTS)
        self.addresses = LinkAddresses(
            _bind(self._plans, address, "plans"), _bind(self._reports, address, "reports")
        )

    def send(self, plan: StepPlan) -> None:
        """To all of vLLM's cores that listen."""
        fields = (
            plan.generation,
            plan.sequence,
            plan.draft_tokens_per_s,
            plan.ttl_ms,
            plan.group_step_ms,
        )
        self._plans.send(msgpack.packb(fields))

    def newest_report(self) -> CoreReport | None:
        """Of those that have arrived since the last call; None if none has."""
        newest = None
        while (packet := _received(self._reports)) is not None:
            try:
                count, block, scores, base_rows, table, digest = msgpack.unpackb(packet)
                survival = np.frombuffer(scores, dtype=np.float32).reshape(count, block)
                newest = CoreReport(survival, int(base_rows), dict(table), str(digest))
            except Exception as error:  # whatever a stray packet makes a parser do
                logger.warning("dropped a report: %r", error)
        return newest

    def close(self) -> None:
        self._plans.close()
        self._reports.close()


class PlanReceiver:
    """The side of vLLM's scheduler."""

    def __init__(self, address: str, context: zmq.Context | None = None) -> None:
        self._socket = (context or zmq.Context.instance()).socket(zmq.SUB)
        self._socket.setsockopt(zmq.CONFLATE, 1)  # keeps the newest only
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    def newest(self) -> StepPlan | None:
        """The plan that has arrived since the last call, if any; it names no replica."""
        packet = _received(self._socket)
        if packet is None:
            return None
        try:
            generation, sequence, rate, ttl_ms, group_step_ms = msgpack.unpackb(packet)
            return StepPlan("", int(generation), int(sequence), "", rate, float(ttl_ms), group_step_ms)
        except Exception as error:  # whatever a stray packet makes a parser do
            logger.warning("dropped a plan: %r", error)
            return None


class ReportSender:
    """The side of vLLM's first rank."""

    def __init__(self, address: str, context: zmq.Context | None = None) -> None:
        self._socket = (context or zmq.Context.instance()).socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_REPORTS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, report: CoreReport) -> None:
        """Dropped where nobody takes it."""
        scores = np.ascontiguousarray(report.survival, dtype=np.float32)
        packet = msgpack.packb(
            [*scores.shape, scores.tobytes(), report.base_rows, report.table, report.table_digest]
        )
        try:
            self._socket.send(packet, zmq.NOBLOCK)
        except zmq.Again:
            return


def _bind(socket: zmq.Socket, address: str, name: str) -> str:
    if address.startswith("tcp://"):
        return f"{address}:{socket.bind_to_random_port(address)}"
    socket.bind(f"{address}-{name}")
    return f"{address}-{name}"


def _received(socket: zmq.Socket) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
