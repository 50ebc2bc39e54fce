"""`dspark-ray new-key`: an API key for its owner, and the line by which a server knows it."""

from typing import Annotated

import typer
from pydantic import ValidationError

from dspark_ray.cli.common import err, out
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.types import ServiceTier


def new_key(
    name: Annotated[str, typer.Option(help="Whose key it is; unique in a file.")],
    tier: Annotated[ServiceTier, typer.Option(help="Highest service tier.")] = ServiceTier.DEFAULT,
    admin: Annotated[bool, typer.Option("--admin", help="May use the routes of operators.")] = False,
    requests_per_minute: Annotated[float | None, typer.Option(metavar="N")] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(metavar="N", help="Prompt and output together.")
    ] = None,
    concurrent_requests: Annotated[int | None, typer.Option(metavar="N")] = None,
) -> None:
    """Make an API key. The key goes to stderr, once; its line for `security.api_keys_file` to stdout:

    `dspark-ray new-key --name alice >> keys.jsonl`
    """
    from dspark_ray.serving import api_keys

    key = api_keys.new_key()
    try:
        known = api_keys.ApiKey(
            name=name,
            sha256=api_keys.digest_of(key),
            tier=tier,
            admin=admin,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrent_requests=concurrent_requests,
        )
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ConfigError(f"--{str(fault['loc'][0]).replace('_', '-')}: {fault['msg']}") from None
    err.print("The key, which nothing will show again; clients send it as 'Authorization: Bearer KEY':")
    err.print(key, markup=False, highlight=False, soft_wrap=True)
    line = known.model_dump_json(exclude_defaults=True)
    out.print(line, markup=False, highlight=False, soft_wrap=True)
