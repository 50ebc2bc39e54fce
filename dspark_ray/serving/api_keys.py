"""API keys: who may ask, and how much. A server knows their hashes only, one JSON line a key.

    {"name": "alice", "sha256": "9f86…", "tier": "priority", "requests_per_minute": 60}

A plain SHA-256 without salt: keys are 256 random bits, which nobody guesses or finds in a table. A slow hash
would only make every request, and every wrong key of an attacker, cost time here. That holds for keys
that `new_key` made, not for words that somebody thought up.
"""

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.core.config import SecurityConfig
from dspark_ray.core.env import API_KEYS_VARIABLE, api_key_lines
from dspark_ray.core.errors import ConfigError
from dspark_ray.core.section import Section
from dspark_ray.core.types import ServiceTier

logger = logging.getLogger(__name__)

PREFIX = "dsk-"  # so that scanners of repositories and logs can know a key when they see one
KEY_BYTES = 32
MAX_KEYS = 10_000
MAX_KEY_CHARS = 512
RELOAD_MS = 1000.0  # between two looks at the file


class ApiKey(Section):
    """One key: its hash, and what its owner may do. A limit of None is none."""

    name: str = Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$", description="shown in logs and errors; unique")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    admin: bool = Field(False, description="may also use the routes of operators")
    tier: ServiceTier = Field(
        ServiceTier.DEFAULT, description="of requests that name none; the highest that one may name"
    )
    least_priority: int = Field(0, ge=-8, le=0, description="lowest `priority` that a request may name")
    max_target_tokens_per_s: float = Field(0.0, ge=0, description="0: requests may name no speed")
    requests_per_minute: float | None = Field(None, gt=0)
    tokens_per_minute: float | None = Field(None, gt=0, description="prompt and output")
    concurrent_requests: int | None = Field(None, ge=1)


def new_key() -> str:
    """A key nobody has seen before."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    """What a server keeps of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse_keys(lines: Iterable[str], source: str) -> tuple[ApiKey, ...]:
    """Empty lines and those that begin with # do not count; there may be no other. Raises `ConfigError`
    naming the line, and never what is in it: it might hold a key in clear."""
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            keys.append(ApiKey.model_validate_json(line))
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, one['loc'])) or 'line'}: {one['msg']}"
                for one in error.errors(include_input=False, include_url=False)
            )
            raise ConfigError(f"{source}, line {number}: {faults}") from None
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{source} holds {len(keys)} API keys; at most {MAX_KEYS} are allowed")
    for what, found in (("name", [key.name for key in keys]), ("hash", [key.sha256 for key in keys])):
        if len(set(found)) < len(found):
            raise ConfigError(f"{source}: two API keys have the same {what}")
    return tuple(keys)


class KeyRing:
    """The keys of a server; a changed file is read again. A broken one is refused and the old keys stay; one
    that holds no key any more revokes all of them."""

    def __init__(self, read: Callable[[], tuple[ApiKey, ...]], path: Path | None, clock: Clock) -> None:
        """`path`: the file behind `read`, if it may change. Raises what `read` raises, and `ConfigError` for
        no key: a server that nobody may use is a mistake at its start."""
        self._read = read
        self._path = path
        self._clock = clock
        self._looked_ms = clock.now_ms()
        self._version = self._file_version()
        self.keys = read()
        if not self.keys:
            raise ConfigError("there is no API key; `dspark-ray new-key NAME` makes one")
        self.revision = 0  # grows with every change

    @classmethod
    def of(cls, config: SecurityConfig, clock: Clock | None = None) -> "KeyRing | None":
        """None where no keys are configured; raises `ConfigError` where they cannot be read."""
        clock = clock or SystemClock()
        if config.api_keys_file is not None:
            path = Path(config.api_keys_file)
            return cls(lambda: _read_file(path), path, clock)
        if config.api_keys_from_environment:
            return cls(lambda: parse_keys(api_key_lines(), f"${API_KEYS_VARIABLE}"), None, clock)
        return None

    def find(self, presented: str) -> ApiKey | None:
        """The key with the hash of what was presented. Takes as long for a wrong one as for a right one."""
        digest = digest_of(presented[:MAX_KEY_CHARS]).encode()
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.sha256.encode()):
                found = key
        return found

    def refresh(self) -> None:
        """Reads a changed file; looks once a second at most."""
        now_ms = self._clock.now_ms()
        if self._path is None or now_ms - self._looked_ms < RELOAD_MS:
            return
        self._looked_ms = now_ms
        version = self._file_version()
        if version == self._version:
            return
        self._version = version
        try:
            self.keys = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self.revision += 1
        if self.keys:
            logger.info("read %d API keys", len(self.keys))
        else:
            logger.warning("no API key is left in %s: every request is refused", self._path)

    def _file_version(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _read_file(path: Path) -> tuple[ApiKey, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {type(error).__name__}") from error
    return parse_keys(text.splitlines(), str(path))
