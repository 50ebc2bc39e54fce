"""The LoRA adapters that clients may name as `model`: the configured ones, and those loaded at run time.

An adapter loaded at run time is written down where every ingress process looks (`Directory`), and read by
each engine that runs. A replica that starts later, or has evicted it, reads it when a request brings it.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pydantic import Field

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.config import AppConfig
from dspark_ray.core.errors import CheckpointError, RequestError
from dspark_ray.core.types import AdapterRef
from dspark_ray.models.targets.lora_checkpoint import adapter_ref, read_settings
from dspark_ray.serving.body import Body
from dspark_ray.serving.folders import MAX_PATH, below

logger = logging.getLogger(__name__)

FRESH_MS = 1000.0  # so long an adapter unloaded through another ingress process may still be served here


class Directory(Protocol):
    """The adapters loaded at run time, for all ingress processes of an application."""

    async def adapters(self) -> list[AdapterRef]: ...

    async def add(self, adapter: AdapterRef) -> bool:
        """False if there is one of that name already, which stays."""
        ...

    async def remove(self, name: str) -> bool:
        """False if there was none."""
        ...


class AdapterEngines(Protocol):
    """The engines that run now."""

    async def load_adapter(self, adapter: AdapterRef) -> int:
        """How many have read it. Raises the error of one that cannot."""
        ...

    async def unload_adapter(self, adapter: AdapterRef) -> None: ...


class LoadAdapter(Body):
    """`POST /v1/load_lora_adapter`, as vLLM has it."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str = Field(min_length=1, max_length=MAX_PATH)


class UnloadAdapter(Body):
    """`POST /v1/unload_lora_adapter`, as vLLM has it."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_int_id: int | None = Field(None, description="vLLM's own number of it: not needed here")


class AdapterBook:
    """What one ingress process knows of them. Methods that wait belong to its event loop."""

    def __init__(
        self,
        config: AppConfig,
        directory: Directory | None = None,
        engines: AdapterEngines | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Reads the configured adapters' files; `CheckpointError` if they are not there. Without `directory`
        and `engines`, nothing can be loaded at run time."""
        self._model_id = config.model.id
        self._config = config.lora
        self._directory, self._engines = directory, engines
        self._clock = clock or SystemClock()
        self._configured = {a.name: adapter_ref(a.name, Path(a.path)) for a in config.lora.adapters}
        self._known = dict(self._configured)
        self._read_ms = -FRESH_MS

    @property
    def loads_at_run_time(self) -> bool:
        return self._config.load_from is not None and self._directory is not None

    @property
    def known(self) -> Mapping[str, AdapterRef]:
        """By name, as last read."""
        return self._known

    async def look_up(self, name: object) -> None:
        """Before a request for the model `name` is answered: whether it is an adapter may have changed."""
        if not self.loads_at_run_time or not isinstance(name, str):
            return
        if name == self._model_id or name in self._configured:
            return
        if name not in self._known or self._clock.now_ms() - self._read_ms >= FRESH_MS:
            await self.refresh()

    async def refresh(self) -> None:
        """Reads the directory, if there is one; what was known stays where that fails."""
        if self._directory is None or not self.loads_at_run_time:
            return
        try:
            found = await self._directory.adapters()
        except Exception as error:  # of whatever kind: those known can still be served
            logger.warning("cannot read which adapters are loaded: %r", error)
            return
        self._known = {adapter.name: adapter for adapter in found} | self._configured
        self._read_ms = self._clock.now_ms()

    async def load(self, name: str, path: str) -> tuple[AdapterRef, int]:
        """Makes an adapter known, once every engine that runs has read it; how many did. Raises
        `RequestError`, or `EngineDeadError`."""
        assert self._directory is not None
        assert self._engines is not None
        if name == self._model_id or name in self._configured:
            raise RequestError(f"{name!r} is served already", param="lora_name", code="adapter_exists")
        adapter = await asyncio.to_thread(self._read, name, path)
        num_engines = await self._engines.load_adapter(adapter)
        added = await self._directory.add(adapter)
        await self.refresh()
        if not added and self._known.get(name) != adapter:
            raise RequestError(
                f"another adapter {name!r} is loaded; unload it first",
                param="lora_name",
                code="adapter_exists",
            )
        return adapter, num_engines

    async def unload(self, name: str) -> AdapterRef:
        """Requests that run go on. Raises `RequestError`."""
        assert self._directory is not None
        assert self._engines is not None
        if name in self._configured:
            message = f"{name!r} is in the configuration (lora.adapters) and is always served"
            raise RequestError(message, param="lora_name", code="adapter_configured")
        await self.refresh()
        adapter = self._known.get(name)
        if adapter is None or not await self._directory.remove(name):
            message = f"the adapter {name[:128]!r} is not loaded"
            raise RequestError(message, param="lora_name", status=404, code="adapter_not_found")
        await self.refresh()
        await self._engines.unload_adapter(adapter)
        return adapter

    def _read(self, name: str, path: str) -> AdapterRef:
        folder = below(self._config.load_from, path, "lora_path")
        try:
            read_settings(folder, self._config.max_rank)
            return adapter_ref(name, folder)
        except CheckpointError as error:
            raise RequestError(str(error), param="lora_path", code="invalid_adapter") from error
