"""The real application around a fake engine; the builder the tests' Serve applications are made with."""

from ray.serve import Application

from deployments.app import assemble
from deployments.ingress import model_text
from dspark_ray.core.config import AppConfig
from dspark_ray.runtime.engine_actor import LoadedEngine
from tests.fakes import FakeEngine


def fake_engine(config: AppConfig, engine_id: str) -> LoadedEngine:
    """An `EngineFactory`."""
    return LoadedEngine(FakeEngine(config, engine_id), canary_prompt=(5, 6, 7))


def build_fake_app(args: AppConfig) -> Application:
    """Everything but the engine is what `build_app` makes; `model.source` must hold a tokenizer."""
    return assemble(args, fake_engine, model_text)
