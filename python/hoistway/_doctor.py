"""Checks of what loads can use on this machine."""

from __future__ import annotations

import html
import json
import os
from typing import Any

from hoistway import _native
from hoistway._arguments import path_text
from hoistway._options import StoreOptions, store_texts


class Checks(list[dict[str, Any]]):
    """The checks: dictionaries with ``name``, ``status``, ``finding`` and ``fix``.

    ``status`` is ``"ok"``, ``"absent"`` (needed for one purpose only), ``"slower"`` or ``"broken"`` (loads fail).
    They are shown as a table when printed, and in a notebook.
    """

    @property
    def verdict(self) -> str:
        """What all checks together mean for loads, in one line."""
        names = {
            status: ", ".join(check["name"] for check in self if check["status"] == status)
            for status in ("broken", "slower")
        }
        if names["broken"]:
            return f"loads fail here: {names['broken']}"
        if names["slower"]:
            return f"loads work here, slower than they could: {names['slower']}"
        return "loads work here, and nothing that was examined slows them"

    def __str__(self) -> str:
        lines = []
        for check in self:
            lines.append(f"{check['status']:6}  {check['name']}: {check['finding']}")
            if check["fix"]:
                advice = "if wanted" if check["status"] == "absent" else "to fix"
                lines.append(f"        {advice}: {check['fix']}")
        return "\n".join([*lines, f"verdict {self.verdict}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td>{html.escape(check[column])}</td>" for column in ("status", "name", "finding", "fix")
            )
            + "</tr>"
            for check in self
        )
        head = "<tr><th>status</th><th>name</th><th>finding</th><th>fix</th></tr>"
        return f"<table>{head}{rows}</table><p>{html.escape(self.verdict)}</p>"


def doctor(*paths: str | os.PathLike[str], store: StoreOptions | None = None) -> Checks:
    """Checks what this machine, the file systems of ``paths`` and the stores of URLs among them offer.

    The result says what is missing, and how to fix it. ``store`` has the options of stores, as for ``load_file``.
    """
    listed = [path_text(path) for path in paths or (".",)]
    return Checks(json.loads(_native.doctor(listed, store_texts(store))))
