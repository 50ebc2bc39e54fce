"""Which LoRA adapters were loaded at run time: one key each in the cluster's own key-value store.

It outlives every process of the application; the application's scheduler clears it when the application ends.
"""

import asyncio
import json
from dataclasses import asdict

from ray.experimental import internal_kv

from dspark_ray.core.types import AdapterRef


class AdapterDirectory:
    """`dspark_ray.serving.adapters.Directory` of one application; every method asks the cluster."""

    def __init__(self, app_name: str) -> None:
        self._prefix = f"dspark:{app_name}:adapter:"

    async def adapters(self) -> list[AdapterRef]:
        return await asyncio.to_thread(self._read)

    async def add(self, adapter: AdapterRef) -> bool:
        """False if there is one of that name already, which stays."""
        value = json.dumps(asdict(adapter))
        existed = await asyncio.to_thread(
            internal_kv._internal_kv_put, self._prefix + adapter.name, value, overwrite=False
        )
        return not existed

    async def remove(self, name: str) -> bool:
        """False if there was none."""
        return bool(await asyncio.to_thread(internal_kv._internal_kv_del, self._prefix + name))

    def clear(self) -> None:
        """Forgets them all; blocks."""
        internal_kv._internal_kv_del(self._prefix, del_by_prefix=True)

    def _read(self) -> list[AdapterRef]:
        keys = internal_kv._internal_kv_list(self._prefix)
        values = [internal_kv._internal_kv_get(key) for key in keys]
        return [AdapterRef(**json.loads(value)) for value in values if value is not None]
