"""What every request body is: strictly typed, without unknown keys, and refused in OpenAI's words."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark_ray.core.errors import RequestError


class Body(BaseModel):
    """Base of every schema: no coercion of types, no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


BodyT = TypeVar("BodyT", bound=Body)


def validate(schema: type[BodyT], fields: dict[str, Any]) -> BodyT:
    """`fields` checked against `schema`; raises `RequestError` with the first fault and its parameter."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        raise _request_error(fault) from error


def _request_error(fault: Any) -> RequestError:
    path = [part for part in map(str, fault["loc"]) if not part.startswith("function-before")]
    param = ".".join(path)[:128] or None
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "missing":
        return RequestError(
            f"missing required parameter: '{param}'", param=param, code="missing_required_parameter"
        )
    code = "invalid_type" if fault["type"].endswith("_type") else "invalid_value"
    return RequestError(f"invalid '{param}': {message}" if param else message, param=param, code=code)
