"""What an evaluation refuses to pass: each gate names the mode, the figure and the bound that it missed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cluster.reference import Bound, Bounds
from cluster.report import ModeReport, accuracy_threshold

GateName = Literal[
    "leaks",
    "tokens",
    "split = aggregated",
    "min AL",
    "AL",
    "AL, first 8 steps",
    "AL by position",
    "AL, same prompts",
    "accuracy",
]

AGGREGATED_TOLERANCE = 0.002
"""Relative difference in AL allowed between split and aggregated when requests are batched (near ties may flip)."""


@dataclass(frozen=True)
class GateSettings:
    """`exact_tokens`: equality of tokens over modes is asked for (float32 and float64 alone promise it).

    `sequential`: one request at a time, so that decode steps must be identical. `min_al` bounds every drafting mode
    without an injected fault, and `reference` what is known of the pair does; `reference_accuracy` in percent, None
    takes target_only's.
    """

    exact_tokens: bool
    sequential: bool
    min_al: float | None = None
    reference: Bounds | None = None
    reference_accuracy: float | None = None
    num_questions: int = 0


def failures(reports: Mapping[str, ModeReport], settings: GateSettings) -> list[str]:
    """Every gate that does not hold, as sentences; empty when all do."""
    return [said for sentences in failing(reports, settings).values() for said in sentences]


def failing(reports: Mapping[str, ModeReport], settings: GateSettings) -> dict[GateName, list[str]]:
    """The sentences of each gate that does not hold."""
    found: dict[GateName, list[str]] = {
        "leaks": _leaks(reports),
        "tokens": _tokens(reports) if settings.exact_tokens else [],
        "split = aggregated": _split(reports, settings.sequential),
        "min AL": _acceptance(reports, settings.min_al),
        **_reference(reports, settings),
        "accuracy": _accuracy(reports, settings),
    }
    return {gate: sentences for gate, sentences in found.items() if sentences}


def _leaks(reports: Mapping[str, ModeReport]) -> list[str]:
    return [
        f"{mode}: {report.pages_leaked} pages and {report.slots_leaked} slots leaked"
        for mode, report in reports.items()
        if report.pages_leaked or report.slots_leaked
    ]


def _tokens(reports: Mapping[str, ModeReport]) -> list[str]:
    digests = {mode: report.tokens_sha256 for mode, report in reports.items()}
    if len(set(digests.values())) <= 1:
        return []
    shown = ", ".join(f"{mode} {digest[:12]}" for mode, digest in digests.items())
    return [f"tokens differ between modes: {shown}"]


def _split(reports: Mapping[str, ModeReport], sequential: bool) -> list[str]:
    split = reports.get("split")
    if split is None:
        return []
    found = []
    if split.prompt_tokens_computed_on_generation:
        count = split.prompt_tokens_computed_on_generation
        found.append(f"split: {count} prompt tokens were computed on generation workers, 0 expected")
    if split.acceptance_length and not split.kv_bytes_draft:
        found.append("split: no draft KV was shipped")
    aggregated = reports.get("aggregated")
    if aggregated is None:
        return found
    if sequential and split.decode_steps != aggregated.decode_steps:
        found.append(
            f"split took {split.decode_steps} decode steps, aggregated {aggregated.decode_steps}: they must be equal"
        )
    allowed = AGGREGATED_TOLERANCE * aggregated.acceptance_length
    if abs(split.acceptance_length - aggregated.acceptance_length) > (0.0 if sequential else allowed):
        found.append(
            f"AL of split is {split.acceptance_length:.4f}, aggregated {aggregated.acceptance_length:.4f}: "
            f"they must be equal" + ("" if sequential else f" within {AGGREGATED_TOLERANCE:.1%}")
        )
    return found


def _acceptance(reports: Mapping[str, ModeReport], min_al: float | None) -> list[str]:
    if min_al is None:
        return []
    return [
        f"{mode}: AL {report.acceptance_length:.3f} is under --min-al {min_al}"
        for mode, report in reports.items()
        if mode in ("aggregated", "split") and report.acceptance_length < min_al
    ]


def _reference(reports: Mapping[str, ModeReport], settings: GateSettings) -> dict[GateName, list[str]]:
    """What the reference of the pair says of every drafting mode without an injected fault."""
    bounds = settings.reference
    if bounds is None:
        return {}
    same = bounds.same_prompts if settings.exact_tokens else None
    drafting = [(mode, reports[mode]) for mode in ("aggregated", "split") if mode in reports]
    return {
        "AL": [
            said
            for mode, report in drafting
            for said in _under(f"{mode}: AL", report.acceptance_length, bounds.length)
        ],
        "AL, first 8 steps": [
            said
            for mode, report in drafting
            for said in _under(
                f"{mode}: AL of the first 8 steps", report.acceptance_length_first8, bounds.length_first8
            )
        ],
        "AL by position": [
            said
            for mode, report in drafting
            for at, bound in enumerate(bounds.positions)
            for said in _under(f"{mode}: acceptance of draft {at + 1}", _at(report, at), bound)
        ],
        "AL, same prompts": [
            said
            for mode, report in drafting
            if same is not None
            for said in _under(f"{mode}: AL on the reference's own prompts", report.acceptance_length, same)
        ],
    }


def _at(report: ModeReport, position: int) -> float:
    shares = report.acceptance_by_position
    return shares[position] if position < len(shares) else 0.0


def _under(what: str, figure: float, bound: Bound) -> Iterator[str]:
    if figure < bound.least:
        yield f"{what} is {figure:.3f}, under {bound.least:.3f} (reference {bound.expected:.3f})"


def _accuracy(reports: Mapping[str, ModeReport], settings: GateSettings) -> list[str]:
    reference = settings.reference_accuracy
    if reference is None and "target_only" in reports:
        reference = reports["target_only"].accuracy
    if reference is None or not settings.num_questions:
        return []
    threshold = accuracy_threshold(reference, settings.num_questions)
    return [
        f"{mode}: accuracy {report.accuracy:.2f} % is under {threshold:.2f} % (reference {reference:.2f} %)"
        for mode, report in reports.items()
        if report.accuracy is not None and report.accuracy < threshold
    ]
