"""LangChain's standard tests of chat models, made for its integrations, run against a server of ours.

    pip install langchain-tests langchain-openai
    dspark-ray serve configs/smollm2-135m-cpu.yaml
    pytest tests/clients --url http://localhost:8000

They check what a client library relies on: streams, batches, usage, stop strings, tools that must be called,
structured output in three ways, histories with tool calls and results. What is up to the model, and too much
for one of 135M parameters, is marked `xfail`.
"""

from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="needs langchain-tests and langchain-openai")

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatModel(ChatModelIntegrationTests):
    """All that a text model can do."""

    @pytest.fixture(autouse=True)
    def _server(self, url: str) -> None:
        self._url = url

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "smollm2-135m-instruct",
            "base_url": f"{self._url}/v1",
            "api_key": "unused",
            "temperature": 0,
            "frequency_penalty": 0.3,  # without, it fills a string with the same words until the limit
            "max_tokens": 200,
            "stream_usage": True,
            "extra_body": {"parallel_tool_calls": False},  # it repeats its call where it may
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @pytest.mark.xfail(reason="the model does not keep to a form that it is only told of")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="the model does not choose to call a tool")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)
