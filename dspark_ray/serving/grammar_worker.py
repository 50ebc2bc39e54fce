"""Compiles grammars for the ingress, in a process that may hang, burst or crash over a hostile one.

    python -m dspark_ray.serving.grammar_worker MODEL_DIR

One JSON line in (`{"tag": …}`), one out: `{"digest", "compiled"}` or `{"error"}`. The first line out is
`{"ready": true}`. serving/grammar_compiler.py starts it, and kills it when it takes too long.
"""

import json
import resource
import sys
from pathlib import Path

from dspark_ray.core.errors import RequestError

MEMORY_LIMIT_BYTES = 1 << 30  # beyond what the process has when it is ready
_PAGE_BYTES = resource.getpagesize()


def main(model_dir: Path) -> None:
    """Until stdin ends."""
    from dspark_ray.models.grammar import GrammarVocabulary

    vocabulary = GrammarVocabulary.load(model_dir)
    _limit_memory()
    _answer({"ready": True})
    for line in sys.stdin:
        try:
            grammar = vocabulary.compile(json.loads(line)["tag"])
            _answer({"digest": grammar.digest, "compiled": grammar.compiled})
        except RequestError as error:
            _answer({"error": error.message})
        except MemoryError:
            _answer({"error": "the grammar needs too much memory"})


def _limit_memory() -> None:
    used_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * _PAGE_BYTES
    limit_bytes = used_bytes + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def _answer(fields: dict[str, object]) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
