"""The target's pass of small batches, captured (models/graphs.py)."""

from dataclasses import replace

import torch

from dspark_ray.core.config import AppConfig
from dspark_ray.core.types import VerificationMode
from dspark_ray.engine.batch import VerifyBatch
from dspark_ray.models.graphs import Capturer, FlatRows, GraphRunner, PassLimits
from dspark_ray.models.kv import KVStorage
from dspark_ray.models.targets.decoder import Decoder, DecoderOutput
from dspark_ray.models.transfer import to_device


class GraphedTarget:
    """A target's passes from captured ones where a batch fits one, else as they are."""

    def __init__(self, config: AppConfig, target: Decoder, kv: KVStorage, capturer: Capturer) -> None:
        speculates = config.speculation.mode is not VerificationMode.OFF
        max_query = 1 + (config.speculation.num_draft_tokens if speculates else 0)
        limits = PassLimits(
            most_rows=min(config.engine.max_running * max_query, config.engine.max_step_rows),
            max_query=max_query,
            max_kv=config.model.max_model_len,
            block_size=config.engine.kv_block_size,
        )

        def forward(rows: FlatRows, taps: tuple[int, ...]) -> DecoderOutput:
            assert rows.slots is not None
            return target.forward(rows.token_ids, rows.positions, kv, rows.slots, rows.paged, taps)

        self.runner = GraphRunner(forward, limits, target.device, capturer)
        self._device = target.device

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the captured passes, ascending."""
        return self.runner.sizes

    def capture_all(self, taps: tuple[int, ...]) -> None:
        """All sizes; other taps are captured when they come."""
        self.runner.capture_all(taps)

    def takes(self, batch: VerifyBatch) -> bool:
        """Whether a captured pass does it: decoding requests alone, and not too many rows."""
        return self.runner.takes(len(batch.token_ids), batch.paged.max_query) and all(
            item.decoding and item.sequence.request.adapter is None for item in batch.work
        )

    def size_for(self, num_rows: int, max_query: int) -> int | None:
        """Rows of the captured pass that holds so many, and so many of one request; None: there is none."""
        return self.runner.size_for(num_rows) if self.runner.takes(num_rows, max_query) else None

    @torch.inference_mode()
    def run_rows(self, rows: FlatRows, taps: tuple[int, ...]) -> DecoderOutput:
        """The pass of rows on the device, as many as a captured one has. Overwritten by the next call."""
        return self.runner.run(rows, taps)[1]

    @torch.inference_mode()
    def run(self, batch: VerifyBatch, taps: tuple[int, ...]) -> tuple[VerifyBatch, DecoderOutput]:
        """The pass of a batch that lies on the host → the batch on the device, and what the target said, for
        its own rows. Both are overwritten by the next call."""
        rows = len(batch.token_ids)
        placed, output = self.runner.run(
            FlatRows(batch.token_ids, batch.positions, batch.slots, batch.paged), taps
        )
        assert placed.slots is not None
        on_device = replace(
            batch,
            token_ids=placed.token_ids[:rows],
            positions=placed.positions[:rows],
            slots=placed.slots[:rows],
            logit_rows=to_device(batch.logit_rows, self._device),
        )
        return on_device, replace(output, hidden=output.hidden[:rows], taps=output.taps[:rows])
