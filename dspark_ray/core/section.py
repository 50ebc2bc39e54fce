"""The base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, and no key passes unread."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
