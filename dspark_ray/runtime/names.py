"""How the actors of an application are called, so that any process of the cluster finds them."""

NAMESPACE = "serve"  # Ray Serve's own: replicas and what they start live there

_PREFIX = "dspark"


def scheduler_name(app_name: str, group: int = 0) -> str:
    """One per application, or per group of its replicas."""
    return f"{_PREFIX}:{app_name}:scheduler" + (f":{group}" if group else "")


def engine_prefix(app_name: str) -> str:
    """What the names of an application's engine actors begin with, and those of their ranks."""
    return f"{_PREFIX}:{app_name}:engine:"


def engine_name(app_name: str, replica_id: str) -> str:
    """One per replica; replica ids are never used twice, so neither are names."""
    return engine_prefix(app_name) + replica_id


def rank_name(app_name: str, replica_id: str, rank: int) -> str:
    """One per rank that follows the engine of a replica."""
    return f"{engine_name(app_name, replica_id)}:rank{rank}"


def is_engine_name(app_name: str, name: str) -> bool:
    """Whether this is an engine of the application, and none of the ranks that follow it."""
    prefix = engine_prefix(app_name)
    return name.startswith(prefix) and ":" not in name.removeprefix(prefix)


def serve_replica_prefix(app_name: str) -> str:
    """What Serve's own replica actors of an application are called (Ray 2.60)."""
    return f"SERVE_REPLICA::{app_name}#"
