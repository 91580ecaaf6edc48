"""What can be wrong with a drafter. Every message names the field or tensor and the values that disagree."""

from __future__ import annotations


class DrafterError(ValueError):
    """Root of this package's errors."""


class DrafterConfigError(DrafterError):
    """config.json lacks a field, holds a value out of range, or asks for an unsupported feature."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"drafter config.json: {field}: {reason}")
        self.field = field


class DrafterCheckpointError(DrafterError):
    """The drafter's files cannot be read, or a tensor is missing, unexpected or of the wrong shape."""


class DraftVocabularyError(DrafterError):
    """The tokens that a drafter is to say make no vocabulary for it."""


class DrafterMismatch(DrafterError):
    """The drafter does not belong to this target: `field` differs between the two."""

    def __init__(self, field: str, drafter: object, target: object, advice: str) -> None:
        super().__init__(
            f"drafter does not fit the target: {field}: drafter {drafter}, target {target}; {advice}"
        )
        self.field = field
