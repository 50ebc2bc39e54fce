"""Errors cross process borders whole, and all have one base."""

import pickle

import pytest

from dspark_ray.core import errors
from dspark_ray.core.errors import DsparkError, RequestError


def test_a_request_error_survives_pickling() -> None:
    error = RequestError("too long", param="messages", status=413, code="context_length_exceeded")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, RequestError)
    assert (str(copy), copy.message) == ("too long", "too long")
    assert (copy.param, copy.status, copy.code) == ("messages", 413, "context_length_exceeded")


def test_a_request_error_is_a_400_by_default() -> None:
    error = RequestError("no")
    assert (error.status, error.param, error.code) == (400, None, None)


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_every_error_has_one_base_and_pickles(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, DsparkError)
    assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"
