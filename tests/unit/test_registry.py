"""A name is taken once, and an unknown one is answered with the known ones."""

import pytest

from dspark_ray.core.errors import ConfigError
from dspark_ray.core.registry import Registry


def test_register_get_and_names() -> None:
    registry: Registry[type] = Registry("thing")

    @registry.register("b")
    class B:
        pass

    registry.register("a")(int)
    assert registry.get("b") is B
    assert registry.names() == ["a", "b"]


def test_an_unknown_name_lists_the_known() -> None:
    registry: Registry[int] = Registry("drafter")
    registry.register("ngram")(1)
    registry.register("dspark")(2)
    with pytest.raises(ConfigError, match="unknown drafter 'x'; choose one of: dspark, ngram"):
        registry.get("x")


def test_a_name_is_taken_once() -> None:
    registry: Registry[int] = Registry("thing")
    registry.register("a")(1)
    with pytest.raises(AssertionError, match="registered twice"):
        registry.register("a")(2)
