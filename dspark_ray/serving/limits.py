"""How much each API key may ask for: token buckets a minute, and requests at once. Of one ingress process.

With several ingress processes each enforces its share of a limit, so that the application as a whole keeps
to it as far as requests spread evenly; nothing is shared between them, and nothing has to be asked.
"""

import math

from dspark_ray.core.clock import Clock, SystemClock
from dspark_ray.serving.api_keys import ApiKey
from dspark_ray.serving.errors import RateLimitError

BUSY_RETRY_S = 1.0


class Bucket:
    """Holds what a minute allows and is filled evenly: the rate holds in the long run, a burst is a minute's
    worth. May be in debt."""

    def __init__(self, per_minute: float, clock: Clock) -> None:
        self.capacity = max(per_minute, 1.0)  # a smaller share still lets single requests through
        self._per_ms = per_minute / 60e3
        self._clock = clock
        self._level = self.capacity
        self._at_ms = clock.now_ms()

    @property
    def level(self) -> float:
        """What is left now."""
        now_ms = self._clock.now_ms()
        self._level = min(self.capacity, self._level + (now_ms - self._at_ms) * self._per_ms)
        self._at_ms = now_ms
        return self._level

    def wait_s(self, amount: float) -> float:
        """Until `amount` could be taken; 0: now."""
        return max(0.0, amount - self.level) / self._per_ms / 1e3

    def take(self, amount: float) -> None:
        """Takes it whether it is there or not; a negative amount gives back."""
        self._level = min(self.capacity, self.level - amount)


class Account:
    """What one key has used."""

    def __init__(self, key: ApiKey, share: float, clock: Clock) -> None:
        self.num_running = 0
        self._share = share
        self._clock = clock
        self.update(key)

    def update(self, key: ApiKey) -> None:
        """The key as it is configured now; new limits begin with full buckets."""
        self.key = key
        self.requests = self._bucket(key.requests_per_minute)
        self.tokens = self._bucket(key.tokens_per_minute)
        most = key.concurrent_requests
        self.most_running = None if most is None else max(1, math.floor(most * self._share))

    def _bucket(self, per_minute: float | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute * self._share, self._clock)


class Ticket:
    """One HTTP request of a key, from its admission to its end. `close` it, whatever happened."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.key = account.key  # as it was when the request came
        self._tokens = account.tokens
        self._reserved = 0.0
        self._num_prompt = 0
        self._num_output = 0
        self._has_begun = False
        self._closed = False
        account.num_running += 1

    def reserve(self, prompt_tokens: int, most_output_tokens: int) -> None:
        """Takes what the request may use at most; what it did not use is given back at its end.

        Raises `RateLimitError`. A request larger than a minute's worth needs a full bucket and leaves a debt.
        """
        if self._tokens is None:
            return
        wanted = min(float(prompt_tokens + most_output_tokens), self._tokens.capacity)
        if (wait_s := self._tokens.wait_s(wanted)) > 0:
            raise RateLimitError(
                f"API key {self.key.name!r} has used its {self.key.tokens_per_minute:g} tokens per minute: "
                f"{wanted:g} were wanted, {max(0.0, self._tokens.level):.0f} are left",
                "tokens",
                wait_s,
            )
        self._tokens.take(wanted)
        self._reserved, self._num_prompt = wanted, prompt_tokens

    def note(self, num_tokens: int) -> None:
        """Something of the answer was made, with so many more tokens: none, where only the prompt is told."""
        self._has_begun = True
        self._num_output += num_tokens

    def headers(self) -> dict[str, str]:
        """OpenAI's, of the limits that there are."""
        account, found = self._account, {}
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = f"{bucket.capacity:.0f}"
                found[f"x-ratelimit-remaining-{name}"] = f"{max(0.0, bucket.level):.0f}"
                found[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.capacity):.3f}s"
        return found

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._account.num_running -= 1
        if self._tokens is not None:
            # Nothing came: it was refused, or failed. Else its prompt was computed.
            used = self._num_prompt + self._num_output if self._has_begun else 0
            self._tokens.take(used - self._reserved)


class Accounts:
    """The accounts of one process, made at a key's first request. Belongs to one event loop."""

    def __init__(self, num_processes: int = 1, clock: Clock | None = None) -> None:
        self._share = 1.0 / num_processes
        self._clock = clock or SystemClock()
        self._by_name: dict[str, Account] = {}

    def open(self, key: ApiKey, *, counts: bool = True) -> Ticket:
        """Admits a request. Raises `RateLimitError`. counts: whether it is one of those a minute"""
        account = self._by_name.get(key.name)
        if account is None:
            account = self._by_name[key.name] = Account(key, self._share, self._clock)
        elif account.key != key:
            account.update(key)
        if account.most_running is not None and account.num_running >= account.most_running:
            message = f"API key {key.name!r} has {account.num_running} requests running, as many as it may"
            raise RateLimitError(message, "concurrent_requests", BUSY_RETRY_S)
        if counts and account.requests is not None:
            if (wait_s := account.requests.wait_s(1.0)) > 0:
                message = f"API key {key.name!r} has used its {key.requests_per_minute:g} requests per minute"
                raise RateLimitError(message, "requests", wait_s)
            account.requests.take(1.0)
        return Ticket(account)

    def forget(self, names: set[str]) -> None:
        """Drops idle accounts of keys that are not among `names`."""
        self._by_name = {
            name: account for name, account in self._by_name.items() if name in names or account.num_running
        }
