"""`AsyncLLM` as `VllmEngine` uses it. With the plugin the only module that touches vLLM's classes; made for
0.32 and 0.33."""

from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from dspark_ray.core.errors import DsparkError, EngineDeadError, QueueFullError, RequestError
from dspark_ray.core.types import AdapterRef, Request
from dspark_ray.vllm_engine.counters import VllmCounters
from dspark_ray.vllm_engine.reaper import Reaper
from dspark_ray.vllm_engine.sampling import sampling_arguments


class _Recorder(StatLoggerBase):
    """Passes vLLM's statistics on."""

    def __init__(self, counters: VllmCounters) -> None:
        self._counters = counters

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._counters.record(scheduler_stats, iteration_stats, engine_idx)

    def log_engine_initialized(self) -> None:
        """Said by our own start-up log."""


class AsyncLLMClient:
    """`dspark_ray.vllm_engine.engine.VllmClient`."""

    def __init__(self, llm: AsyncLLM, num_draft_tokens: int) -> None:
        self._llm = llm
        self._num_draft_tokens = num_draft_tokens
        self._adapters: dict[str, LoRARequest] = {}  # by digest
        self._reaper = Reaper()

    @classmethod
    async def connect(cls, arguments: dict[str, Any], counters: VllmCounters) -> "AsyncLLMClient":
        """Starts vLLM's processes and loads the model. Blocks the event loop for as long as that takes."""
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), stat_loggers=[lambda config, index: _Recorder(counters)]
        )
        return cls(llm, (arguments["speculative_config"] or {}).get("num_speculative_tokens", 0))

    async def add(self, request: Request) -> Any:
        prompt = tokens_input([*request.prompt_token_ids, *request.emitted_token_ids])
        adapter = None if request.adapter is None else await self.load_adapter(request.adapter)
        return await self._llm.add_request(
            request.request_id,
            prompt,
            self._sampling(request),
            lora_request=adapter,
            priority=request.priority.queue_level,
        )

    async def load_adapter(self, ref: AdapterRef) -> LoRARequest:
        """Makes sure that vLLM's ranks hold it: one that they could not read in a step would end them."""
        number = len(self._adapters) + 1
        # The digest is its name there: cached prefixes belong to the name and path.
        lora = self._adapters.setdefault(ref.digest, LoRARequest(ref.digest, number, ref.path))
        try:
            await self._llm.add_lora(lora)
        except CoreDeadError:
            raise
        except Exception as error:
            message = f"vLLM cannot serve the adapter {ref.name!r}: {error}"
            raise RequestError(message, param="model", code="invalid_adapter") from error
        return lora

    async def abort(self, collector: Any) -> None:
        await self._llm.abort(collector.request_id, internal=True)

    def _sampling(self, request: Request) -> SamplingParams:
        grammar, bad_words = request.grammar, request.sampling.bad_words
        sampling = SamplingParams(
            **sampling_arguments(request, self._num_draft_tokens),
            output_kind=RequestOutputKind.DELTA,
            # vLLM compiles it for its own view of the vocabulary; the ingress has found it harmless.
            structured_outputs=None
            if grammar is None
            else StructuredOutputsParams(structural_tag=grammar.tag),
        )
        if bad_words:  # which it takes as texts only, and tokenises
            sampling._bad_words_token_ids = [list(word) for word in bad_words]
        return sampling

    def as_error(self, error: Exception) -> DsparkError | None:
        match error:
            case VLLMClientError():
                return RequestError(str(error), param=getattr(error, "parameter", None), code="invalid_value")
            case GracefulHTTPError():
                return QueueFullError(str(error))
            case CoreDeadError():
                return EngineDeadError(str(error))
        return None

    @property
    def errored(self) -> bool:
        return self._llm.errored

    @property
    def num_kv_blocks(self) -> int:
        return self._llm.vllm_config.cache_config.num_gpu_blocks or 0

    def shutdown(self) -> None:
        self._llm.shutdown()
        self._reaper.close()
