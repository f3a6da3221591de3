"""Options of loads, as keyword arguments take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, cast

RouteName = Literal[
    "auto",
    "io_uring",
    "overlapped",
    "threads",
    "cached",
    "pinned-cache",
    "mapped",
    "usrbio",
    "directstorage",
    "staged",
    "unified",
    "gds",
    "gds-compat",
    "node-cache",
    "http",
]


class LoadOptions(TypedDict, total=False):
    """What loads can be told besides what to load: the options of ``hoistway load``, with the same defaults.

    Sizes are numbers of bytes or text such as ``"64MiB"``.
    """

    route: RouteName | None
    """Which way the bytes take."""
    direct: Literal["auto", "always", "never"] | None
    """Whether reads go past the page cache."""
    usrbio: Literal["auto", "native", "vendor"] | None
    """Who speaks to the daemon of a 3FS: the vendor's library if there is one that works, else hoistway itself, or only
    one of them."""
    dtype: Any
    """The type that a device converts floats to as they arrive: ``"float32"``, ``"float16"`` or ``"bfloat16"``, as
    text or as torch's."""
    layout: Literal["file", "packed", "tensor"] | None
    """How tensors share memory."""
    chunk: int | str | None
    """Longest single read."""
    coalesce_gap: int | str | None
    """Unwanted bytes between two wanted ranges that are read along rather than skipped."""
    in_flight: int | str | None
    """Bytes in flight to one device."""
    rings: int | None
    """Rings of routes ``io_uring`` and ``usrbio``, ports of route ``overlapped``."""
    threads: int | None
    """Threads of route ``threads`` and of copies from the page cache."""
    huge_pages: Literal["transparent", "reserved", "never"] | None
    """Kind of pages."""
    numa: int | Literal["unbound", "near_storage"] | None
    """NUMA node of memory and threads."""
    memory_budget: int | str | None
    """Most host memory that the load may take."""
    populate: bool
    """With route ``mapped``: read everything in at once."""


class ReaderOptions(TypedDict, total=False):
    """What can be told to what reads on request: `Reader`, streams of layers, stores of experts and rows of tables.

    Sizes are numbers of bytes or text such as ``"64MiB"``.
    """

    route: (
        Literal[
            "auto",
            "io_uring",
            "overlapped",
            "threads",
            "cached",
            "usrbio",
            "directstorage",
            "staged",
            "gds",
            "gds-compat",
        ]
        | None
    )
    """Which way the bytes take."""
    direct: Literal["auto", "always", "never"] | None
    """Whether reads go past the page cache."""
    usrbio: Literal["auto", "native", "vendor"] | None
    """Who speaks to the daemon of a 3FS, as in `LoadOptions`."""
    chunk: int | str | None
    """Longest single read."""
    in_flight: int | None
    """Reads at once."""
    memory_budget: int | str | None
    """Most bytes of staging memory."""


class StoreOptions(TypedDict, total=False):
    """Where the object store of a URL is, and who asks. What is left out comes from the environment."""

    endpoint: str
    """URL of the server. Default: ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL`` and that of the profile for ``s3://``,
    ``HF_ENDPOINT`` for ``hf://``, else the store's own."""
    region: str
    """Region of the bucket. Default: ``AWS_REGION``, ``AWS_DEFAULT_REGION``, that of the profile, else
    ``us-east-1``."""
    path_style: bool
    """Whether the bucket is a part of the path rather than of the host's name. Default: with an endpoint."""
    profile: str
    """Profile of the shared AWS files. Default: ``AWS_PROFILE``, ``AWS_DEFAULT_PROFILE``, else
    ``default``."""
    access_key_id: str
    """Key that signs. Default: ``AWS_ACCESS_KEY_ID`` and so on, the profile, or the machine's role."""
    secret_access_key: str
    """Its secret."""
    session_token: str
    """Token of temporary credentials."""
    credentials_file: str
    """File with credentials for ``gs://``. Default: ``GOOGLE_APPLICATION_CREDENTIALS``, that of ``gcloud``, or the
    machine's service account."""
    account: str
    """Account of ``az://``. Default: ``AZURE_STORAGE_ACCOUNT_NAME``, ``AZURE_STORAGE_ACCOUNT``."""
    account_key: str
    """Its key. Default: ``AZURE_STORAGE_ACCOUNT_KEY``, ``AZURE_STORAGE_KEY``."""
    sas_token: str
    """Shared access signature for ``az://``. Default: ``AZURE_STORAGE_SAS_TOKEN``."""
    token: str
    """Token for ``hf://``. Default: ``HF_TOKEN``, else that of ``hf auth login``."""
    anonymous: bool
    """Whether requests carry no credentials."""
    unpinned: bool
    """Whether objects without a strong ETag are taken; their length and date are compared instead."""
    allow_http: bool
    """Whether tokens are sent to ``http://`` servers other than this machine."""


def store_texts(store: StoreOptions | None) -> dict[str, str] | None:
    """The options as texts.

    >>> store_texts({"region": "eu-west-1", "anonymous": True})
    {'region': 'eu-west-1', 'anonymous': 'True'}
    """
    if store is None:
        return None
    return {name: str(value) for name, value in cast("Mapping[str, Any]", store).items()}
