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
    """Options of loads: those of ``hoistway load``, with the same defaults.

    Sizes are numbers of bytes or text such as ``"64MiB"``.
    """

    route: RouteName | None
    """Route of the bytes."""
    direct: Literal["auto", "always", "never"] | None
    """Whether reads bypass the page cache."""
    usrbio: Literal["auto", "native", "vendor"] | None
    """Client of the 3FS daemon: ``"vendor"`` for the vendor's library, ``"native"`` for hoistway's client, ``"auto"``
    for the vendor's library if that works, else hoistway's client."""
    dtype: Any
    """The type that a device converts floats to as they arrive: ``"float32"``, ``"float16"`` or ``"bfloat16"``, as
    text or as torch's."""
    layout: Literal["file", "packed", "tensor"] | None
    """How tensors share memory."""
    chunk: int | str | None
    """Longest single read."""
    coalesce_gap: int | str | None
    """Longest gap between two wanted ranges that is read rather than skipped."""
    in_flight: int | str | None
    """Bytes in flight to one storage device."""
    rings: int | None
    """Number of rings of the routes ``io_uring`` and ``usrbio``, and of ports of the route ``overlapped``."""
    threads: int | None
    """Number of threads of the route ``threads``, and most threads that copy from the page cache."""
    huge_pages: Literal["transparent", "reserved", "never"] | None
    """Huge pages: ``"transparent"`` if the system has some, ``"reserved"`` of ``vm.nr_hugepages``, or ``"never"``."""
    numa: int | Literal["auto", "unbound", "near_storage"] | None
    """NUMA node of memory and threads; by default ``"auto"``, that of the device."""
    memory_budget: int | str | None
    """Limit of host memory for the load."""
    populate: bool
    """With the route ``mapped``: read everything at once, rather than when it is touched."""


class ReaderOptions(TypedDict, total=False):
    """Options of reads on request: of `Reader`, streams of layers, stores of experts and rows of tables.

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
    """Route of the bytes."""
    direct: Literal["auto", "always", "never"] | None
    """Whether reads bypass the page cache."""
    usrbio: Literal["auto", "native", "vendor"] | None
    """Client of the 3FS daemon, as in `LoadOptions`."""
    chunk: int | str | None
    """Longest single read."""
    in_flight: int | None
    """Number of reads in flight."""
    memory_budget: int | str | None
    """Limit of staging memory in bytes."""


class StoreOptions(TypedDict, total=False):
    """Endpoint and credentials of the object store of a URL. Defaults come from the environment."""

    endpoint: str
    """URL of the server. Default: ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL`` and that of the profile for ``s3://``,
    ``HF_ENDPOINT`` for ``hf://``, else the public one of the store."""
    region: str
    """Region of the bucket. Default: ``AWS_REGION``, ``AWS_DEFAULT_REGION``, that of the profile, else
    ``us-east-1``."""
    path_style: bool
    """Whether the bucket is in the path of a URL rather than in its host name. Default: only with an endpoint."""
    profile: str
    """Profile of the shared AWS files. Default: ``AWS_PROFILE``, ``AWS_DEFAULT_PROFILE``, else
    ``default``."""
    access_key_id: str
    """Access key that signs requests. Default: ``AWS_ACCESS_KEY_ID`` and so on, the profile, or the machine's role."""
    secret_access_key: str
    """Secret of the access key."""
    session_token: str
    """Token of temporary credentials."""
    credentials_file: str
    """File with credentials for ``gs://``. Default: ``GOOGLE_APPLICATION_CREDENTIALS``, that of ``gcloud``, or the
    machine's service account."""
    account: str
    """Account of ``az://``. Default: ``AZURE_STORAGE_ACCOUNT_NAME``, ``AZURE_STORAGE_ACCOUNT``."""
    account_key: str
    """Key of the account. Default: ``AZURE_STORAGE_ACCOUNT_KEY``, ``AZURE_STORAGE_KEY``."""
    sas_token: str
    """Shared access signature for ``az://``. Default: ``AZURE_STORAGE_SAS_TOKEN``."""
    token: str
    """Token for ``hf://``. Default: ``HF_TOKEN``, else that of ``hf auth login``."""
    anonymous: bool
    """Whether requests carry no credentials."""
    unpinned: bool
    """Whether objects without a strong ETag are accepted. Their length and date are compared instead."""
    allow_http: bool
    """Whether tokens are sent to ``http://`` servers other than this machine."""
    requester_pays: bool
    """Whether you pay for requests to a bucket of S3 whose owner demands that."""
    checksums: Literal["auto", "off"]
    """Whether objects that are read whole are compared with the checksums of their stores, and parts that are saved are
    sent with checksums. Default: ``"auto"``."""


def store_texts(store: StoreOptions | None) -> dict[str, str] | None:
    """The options as texts.

    >>> store_texts({"region": "eu-west-1", "anonymous": True})
    {'region': 'eu-west-1', 'anonymous': 'True'}
    """
    if store is None:
        return None
    return {name: str(value) for name, value in cast("Mapping[str, Any]", store).items()}
