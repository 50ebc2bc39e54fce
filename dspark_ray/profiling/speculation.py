"""What a server's speculation did between two looks at its /metrics page."""

from collections.abc import Mapping
from typing import Any

Page = Mapping[tuple[str, str], float]  # (metric, position or "") → value


def speculation_figures(before: Page, after: Page) -> dict[str, Any]:
    """τ, budget and acceptance of this program's servers; of vLLM's what it counts; else nothing.

    vLLM's accepted length leaves steps without a draft out, so it has another name than τ.
    """
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}

    def growth(name: str) -> float:
        return grown.get((name, ""), 0.0)

    if steps := growth("dspark_request_steps_total"):
        verified = "dspark_verified_per_position_total"
        places = sorted((place for name, place in grown if name == verified), key=int)
        return {
            "tau": growth("dspark_decode_tokens_total") / steps,
            "budget_tokens": growth("dspark_verified_tokens_total") / growth("dspark_target_steps_total"),
            "acceptance": [
                grown["dspark_accepted_per_position_total", place] / grown[verified, place]
                for place in places
                if grown[verified, place]
            ],
        }
    if drafts := growth("vllm:spec_decode_num_drafts_total"):
        accepted = growth("vllm:spec_decode_num_accepted_tokens_total")
        return {"accepted_length_of_drafts": 1.0 + accepted / drafts}
    return {}
