"""Options that engines hand through to the store."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoistway.errors import FormatError, OptionError
from hoistway.kv import Namespace, Store
from hoistway.kv.adapters import _weights

log = logging.getLogger("hoistway.kv")

# What engines wait for has to end, and their own limits are as long.
TIMEOUT_S = 30.0
# Engines bound what is under way by the memory that they give it. A store that is refused in between is never tried
# again, so it is not the store that counts.
MAX_IN_FLIGHT = "1TiB"


def _keywords(function: Any) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


STORE = _keywords(Store.__init__)
NAMESPACE = _keywords(Store.namespace)


@dataclass(frozen=True)
class Settings:
    """The settings of the store in an engine's configuration."""

    store: dict[str, Any] = field(default_factory=dict)
    """Options of `Store`."""
    namespace: dict[str, Any] = field(default_factory=dict)
    """Options of `Store.namespace`, in addition to what the engine says."""
    checkpoint: str | None = None
    """The path of the weights."""

    @classmethod
    def parse(cls, options: Mapping[str, Any], where: str, own: Collection[str] = ()) -> Settings:
        """Checks options: those of the store, ``namespace``, ``checkpoint``, and some of the adapter's own, which are
        left out.

        Args:
            options: Names and values.
            where: How the engine calls the place that they are from.
            own: Names that are left out.
        """
        known = STORE | {"namespace", "checkpoint"} | set(own)
        _check(options, known, where)
        namespace = _object(options.get("namespace"), f"namespace in {where}")
        _check(namespace, NAMESPACE, f"namespace in {where}")
        if "other" in namespace:
            namespace["other"] = _object(namespace["other"], f"other of namespace in {where}")
        store = {name: value for name, value in options.items() if name in STORE and value is not None}
        checkpoint = options.get("checkpoint")
        if checkpoint is not None and not isinstance(checkpoint, str):
            raise OptionError(f"checkpoint in {where} is the path of the weights, not {checkpoint!r}")
        return cls(store, namespace, checkpoint)

    @property
    def is_read_only(self) -> bool:
        """Whether the user wants nothing to be stored: adapters leave stores out then, as the user's own policy."""
        return self.store.get("access") == "read"

    def weights(
        self, model: str | None = None, revision: str | None = None, logger: logging.Logger = log
    ) -> dict[str, str]:
        """Returns what namespaces have of the weights: their digest, or nothing where they are not found.

        Args:
            model: Where the engine has the weights from, if it says: a directory, a file, or a repository.
            revision: Which revision of the repository, if the engine says.
            logger: Is told what is not found, and what that means.
        """
        if self.checkpoint is not None:
            return {"weights": _weights.checkpoint_digest(self.checkpoint)}
        why = "the engine does not say where its weights are"
        files: list[Path] = []
        if model:
            files, why = _weights.find(model, revision)
        if files:
            if why:
                logger.warning("%s: name another by the option checkpoint", why)
            try:
                return {"weights": _weights.digest(files)}
            except (FormatError, OSError) as error:
                why = str(error)
        if "model" not in self.namespace:
            logger.warning(
                "KV in the store does not depend on the weights: %s. Where the weights change and the model's name "
                "does not, KV of the old ones is found: set the option checkpoint to the path of the weights, or model "
                "of the option namespace to a name that changes with them",
                why,
            )
        return {}

    def open(self, root: str) -> Store:
        """Opens the store."""
        if self.is_read_only:
            log.info("%s is opened for reading: nothing is stored in it", root)
        return Store(root, **{"timeout": TIMEOUT_S, "max_in_flight": MAX_IN_FLIGHT, **self.store})

    def open_both(self, root: str, **description: Any) -> tuple[Store, Namespace]:
        """Opens the store and its one namespace."""
        store = self.open(root)
        try:
            return store, self.open_namespace(store, **description)
        except Exception:
            store.close()
            raise

    def open_namespace(self, store: Store, **description: Any) -> Namespace:
        """Opens the namespace of what the engine says and of what the user adds.

        The user may name the model more exactly, and add what the engine does not say; what it says cannot be changed,
        as blocks of one layout would be read as those of another.
        """
        said = {name for name, value in description.items() if value} - {"model", "other"}
        for name in sorted(said & self.namespace.keys()):
            raise OptionError(
                f"namespace cannot have {name!r}: the engine says that it is {description[name]!r}"
            )
        # Of two words for one thing, that of the engine counts.
        other = {**self.namespace.get("other", {}), **description.get("other", {})}
        return store.namespace(**{**description, **self.namespace, "other": texts(other)})


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as the text that tells namespaces apart."""
    return {str(name): value if isinstance(value, str) else repr(value) for name, value in values.items()}


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise OptionError(f"{where} is an object of names and values, not {value!r}")
    return dict(value)


def _check(options: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for name in options:
        if name not in known:
            raise OptionError(f"{name!r} in {where} means nothing; there are {', '.join(sorted(known))}")
