"""What a client wants its text to look like, as one xgrammar structural tag: a JSON text to be compiled.

Three ways lead here: `response_format`, vLLM's `structured_outputs` and `guided_*`, and tools that must be
called (serving/tools.py). Where a model thinks first, the constraint holds for what follows its thoughts.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dspark_ray.core.errors import RequestError
from dspark_ray.serving.body import Body
from dspark_ray.serving.reasoning import END_THINK, THINK, Reasoning

MAX_TAG_CHARS = 256 << 10
MAX_CHOICES = 4096

Format = dict[str, Any]
"""A format of xgrammar's structural tags."""


class JsonSchemaSpec(Body):
    """`response_format.json_schema`."""

    name: str = Field(min_length=1, max_length=128)
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema belongs to type 'json_schema', and only to it")
        return self


Choice = Annotated[str, Field(min_length=1, max_length=4096)]


class StructuredOutputs(Body):
    """`structured_outputs`: one of its fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Choice] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = Field(None, description="EBNF; the text is a `root`")
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object must be given")
        return self


class ConstraintFields(Body):
    """The parameters of both routes that constrain the text."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[Choice] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_one_constraint(self) -> "ConstraintFields":
        if len(self._wanted()) > 1:
            raise ValueError("send one of " + ", ".join(name for name, _ in self._wanted()))
        return self

    def constraint(self) -> Format | None:
        """Raises `RequestError` for a schema that is no schema."""
        for _, wanted in self._wanted():
            if isinstance(wanted, ResponseFormat):
                schema = wanted.json_schema
                return json_format(schema.schema_) if schema is not None else json_format({"type": "object"})
            return _outputs_format(wanted)
        return None

    def _wanted(self) -> list[tuple[str, ResponseFormat | StructuredOutputs]]:
        """What was asked for, by its parameter's name."""
        found: list[tuple[str, ResponseFormat | StructuredOutputs]] = []
        if self.response_format is not None and self.response_format.type != "text":
            found.append(("response_format", self.response_format))
        if self.structured_outputs is not None:
            found.append(("structured_outputs", self.structured_outputs))
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                found.append((f"guided_{name}", StructuredOutputs.model_validate({name: value})))
        return found


def json_format(schema: dict[str, Any]) -> Format:
    """A JSON text that follows a schema; an object without properties is any object."""
    if schema.get("type") == "object" and not schema.keys() & {"properties", "additionalProperties", "$ref"}:
        schema = {**schema, "additionalProperties": True}
    return {"type": "json_schema", "json_schema": schema}


def structural_tag(constraint: Format, reasoning: Reasoning) -> str:
    """The text to compile; raises `RequestError` if it is too long."""
    elements = [constraint]
    if reasoning in (Reasoning.POSSIBLE, Reasoning.OPEN):
        opened = reasoning is Reasoning.OPEN
        thoughts: Format = {
            "type": "tag",
            "begin": "" if opened else THINK,
            "content": {"type": "any_text", "excludes": [END_THINK]},
            "end": END_THINK,
        }
        space: Format = {"type": "regex", "pattern": r"\n{0,2}"}
        thinking: Format = {"type": "sequence", "elements": [thoughts, space]}
        elements = [thinking if opened else {"type": "optional", "content": thinking}, constraint]
    try:
        tag = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})
    except RecursionError as error:
        raise RequestError("the schema is nested too deeply", code="invalid_grammar") from error
    if len(tag) > MAX_TAG_CHARS:
        raise RequestError(
            f"the description of the output has {len(tag)} characters; at most {MAX_TAG_CHARS} are allowed",
            code="invalid_grammar",
        )
    return tag


def _outputs_format(wanted: StructuredOutputs) -> Format:
    if wanted.regex is not None:
        return {"type": "regex", "pattern": wanted.regex}
    if wanted.choice is not None:
        return {
            "type": "or",
            "elements": [{"type": "const_string", "value": choice} for choice in wanted.choice],
        }
    if wanted.grammar is not None:
        return {"type": "grammar", "grammar": wanted.grammar}
    return json_format(_schema(wanted.json_) if wanted.json_ is not None else {"type": "object"})


def _schema(value: dict[str, Any] | str) -> dict[str, Any]:
    """A schema as an object or as its JSON text."""
    if isinstance(value, dict):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError("the JSON schema is not valid JSON", code="invalid_grammar") from error
    if not isinstance(schema, dict):
        raise RequestError("the JSON schema must be a JSON object", code="invalid_grammar")
    return schema
