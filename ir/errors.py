"""Every error treadle raises on purpose. A user can fix a `UserError`; anything else is our bug."""

from __future__ import annotations


class TreadleError(Exception):
    """Base of all errors raised on purpose."""


class UserError(TreadleError, ValueError):
    """Something the caller can fix. The message says what happened, where, and what to do."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, out of range, or in conflict with another."""


class PluginError(ConfigError):
    """Something from another package cannot be used: it does not load, clashes with a name, or is missing or different."""


class ModelError(UserError):
    """A model source cannot be read: missing file, unlisted tensor, unsupported format."""


class TraceError(UserError):
    """A model cannot be traced; names the construct and the line of model source that stopped it."""


class VerifyError(TreadleError):
    """A graph breaks a rule of the IR; names the node, the rule and the pass that ran last."""


class ArtifactError(UserError):
    """A stored artifact is missing, damaged or foreign; names it and what to run."""


class BundleError(UserError):
    """A bundle is incomplete, damaged, unsigned or built for something else; names the file and the remedy."""


class EngineDeadError(TreadleError):
    """The engine core has died; carries why. Requests in flight end with this."""
