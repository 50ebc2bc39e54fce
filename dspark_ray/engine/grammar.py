"""The grammars of running requests: loaded once each, beside the step loop where there is a thread for it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_ray.core.types import CompiledGrammar, Request

if TYPE_CHECKING:  # xgrammar takes seconds to import: only an engine that is asked for a grammar pays them
    import xgrammar

    from dspark_ray.models.grammar import GrammarAdjuster, GrammarVocabulary

CACHED_GRAMMARS = 64


class Grammars:
    """An `AdjusterFactory`; `slow_work` may be done beforehand, on another thread."""

    def __init__(self, load_vocabulary: "Callable[[], GrammarVocabulary]") -> None:
        """`load_vocabulary` is called when the first request has a grammar, and may take seconds."""
        self._load_vocabulary = load_vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._loaded: dict[str, xgrammar.CompiledGrammar] = {}  # by digest, oldest first
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, model_dir: Path) -> "Grammars":
        def load() -> "GrammarVocabulary":
            from dspark_ray.models.grammar import GrammarVocabulary

            return GrammarVocabulary.load(model_dir)

        return cls(load)

    def slow_work(self, request: Request) -> Callable[[], object] | None:
        """What makes this request quick to add; None: it is already. The work may raise `RequestError`."""
        grammar = request.grammar
        if grammar is None or grammar.digest in self._loaded:
            return None
        return lambda: self._load(grammar)

    def __call__(self, request: Request) -> "GrammarAdjuster | None":
        if request.grammar is None:
            return None
        vocabulary, loaded = self._load(request.grammar)
        from dspark_ray.models.grammar import GrammarAdjuster

        return GrammarAdjuster(vocabulary.walk(loaded, request.grammar.tag))

    def _load(self, grammar: CompiledGrammar) -> "tuple[GrammarVocabulary, xgrammar.CompiledGrammar]":
        vocabulary, loaded = self._vocabulary, self._loaded.get(grammar.digest)
        if vocabulary is not None and loaded is not None:
            return vocabulary, loaded  # without the lock: the step loop must not wait for another one's load
        with self._lock:
            vocabulary = self._vocabulary = self._vocabulary or self._load_vocabulary()
            loaded = self._loaded[grammar.digest] = vocabulary.load_grammar(grammar)
            if len(self._loaded) > CACHED_GRAMMARS:
                del self._loaded[next(iter(self._loaded))]
            return vocabulary, loaded
