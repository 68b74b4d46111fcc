"""Grammar backends: `STRUCTURED_BACKENDS` in order of preference. A new one is one file here and one row, or a plugin's
entry point in group `treadle.structured_backends`; those come last."""

from treadle.ir.registry import Registry

AUTO = "auto"

STRUCTURED_BACKENDS = Registry(
    "structured-output backend",
    {
        "xgrammar": "treadle.runtime.structured.xgrammar_backend:XGrammarBackend",
        "llguidance": "treadle.runtime.structured.llguidance_backend:LLGuidanceBackend",
    },
    group="treadle.structured_backends",
)

INSTALL = "pip install 'treadle[structured]'"


def candidates(asked: str) -> list[str]:
    """Names to try in order: the one that was asked for, or all for "auto". Raises ConfigError for an unknown one."""
    if asked == AUTO:
        return STRUCTURED_BACKENDS.names()
    if asked not in STRUCTURED_BACKENDS:
        STRUCTURED_BACKENDS.get(asked)  # raises, with the choices
    return [asked]
