"""Parameters of the OpenAI API that are known here and not carried out: only their no-op values pass.

A parameter that would be ignored silently is worse than an error, so every other value is refused with
the parameter's name.
"""

from typing import Any

from dspark_ray.core.errors import RequestError

# Parameters that never change the answer: any value is accepted.
IGNORED = frozenset(
    {"metadata", "prompt_cache_retention", "safety_identifier", "user"}
)  # fmt: skip

# Values that ask for nothing beyond what is always done; an absent or null parameter always passes.
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def supported_only(body: dict[str, Any], supported: frozenset[str]) -> dict[str, Any]:
    """`body` without nulls and no-ops; raises `RequestError` that names the first parameter refused."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in supported:
            kept[name] = value
        elif name not in NO_OP_VALUES:
            raise RequestError(
                f"unrecognized request argument supplied: {_shown(name)}",
                param=_shown(name),
                code="unknown_parameter",
            )
        elif not any(_same(value, no_op) for no_op in NO_OP_VALUES[name]):
            raise RequestError(
                f"parameter '{name}' is not supported by this server; leave it out{_hint(name)}",
                param=name,
                code="unsupported_parameter",
            )
    return kept


def _same(value: Any, no_op: Any) -> bool:
    """Equal, and not by `True == 1` or `False == 0`."""
    return isinstance(value, bool) == isinstance(no_op, bool) and bool(value == no_op)


def _hint(name: str) -> str:
    values = NO_OP_VALUES[name]
    return " or set it to " + " or ".join(repr(value) for value in values) if values else ""


def _shown(name: str, limit: int = 64) -> str:
    """A client's own key, shortened for messages."""
    return name if len(name) <= limit else name[:limit] + "…"
