"""How the actors of an application are called, so that any process of the cluster finds them."""

NAMESPACE = "serve"  # Ray Serve's own: replicas and what they start live there

_PREFIX = "dspark"


def scheduler_name(app_name: str, group: int = 0) -> str:
    """One per application, or per group of its replicas."""
    return f"{_PREFIX}:{app_name}:scheduler" + (f":{group}" if group else "")


def engine_prefix(app_name: str) -> str:
    """What the names of an application's engine actors begin with."""
    return f"{_PREFIX}:{app_name}:engine:"


def engine_name(app_name: str, replica_id: str) -> str:
    """One per replica; replica ids are never used twice, so neither are names."""
    return engine_prefix(app_name) + replica_id


def serve_replica_prefix(app_name: str) -> str:
    """What Serve's own replica actors of an application are called (Ray 2.60)."""
    return f"SERVE_REPLICA::{app_name}#"
