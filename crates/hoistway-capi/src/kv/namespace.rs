//! Namespaces: lookups, loads, stores.
#![allow(unsafe_code)]

#[cfg(doc)]
use super::ticket::hoistway_kv_ticket_wait_released;
use super::{
    hoistway_kv,
    item::{BorrowedKey, borrow_items, borrow_keys, hoistway_kv_item, hoistway_kv_key},
    milliseconds, set,
    ticket::hoistway_kv_ticket,
};
use crate::{
    handle::{self, held},
    read::priority_of,
    status::{Failure, call, hoistway_status},
    text,
    versioned::{self, Versioned},
};
use ::hoistway_kv::{Namespace, NamespaceDescription, NamespaceOptions, Notify, Rank, Request, Ticket};
use std::{collections::BTreeMap, ffi::c_char, ptr, slice};

/// `hoistway_kv_request.flags`: report the end of the request by `hoistway_kv_event_fd` and `hoistway_kv_drain` too.
pub const HOISTWAY_KV_NOTIFY: u64 = 1;

/// What identifies a namespace. Processes share blocks if their descriptions are equal. A string that is NULL is
/// empty.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_description {
    /// `sizeof(hoistway_kv_description)`.
    pub size: u64,
    /// Name of the model. It must change when the weights change.
    pub model: *const c_char,
    /// Element type of the cache, such as "bfloat16".
    pub dtype: *const c_char,
    /// Arrangement of the bytes in a block.
    pub layout: *const c_char,
    /// How the engine derives keys from tokens.
    pub key_algorithm: *const c_char,
    /// A secret of the tenant. Only its hash is stored.
    pub salt: *const c_char,
    /// Further properties that distinguish blocks: a name, its value, the next name, and so on.
    pub other: *const *const c_char,
    /// Number of pairs of name and value in `other`: half its strings.
    pub other_count: u64,
    /// Number of layers that a block covers.
    pub layers: u32,
    /// Number of key and value heads of this rank.
    pub kv_heads: u32,
    /// Number of elements in a head.
    pub head_dim: u32,
    /// Number of tokens in a block.
    pub block_tokens: u32,
    /// This rank, counted from 0, among those that share each layer (tensor parallelism).
    pub tensor_rank: u32,
    /// Number of these ranks; 0 if a block holds the data of all of them.
    pub tensor_ranks: u32,
    /// This rank, counted from 0, among those that share the layers (pipeline parallelism).
    pub pipeline_rank: u32,
    /// Number of these ranks; 0 if a block holds the data of all of them.
    pub pipeline_ranks: u32,
    /// This rank, counted from 0, among those that share the context (context parallelism).
    pub context_rank: u32,
    /// Number of these ranks; 0 if a block holds the data of all of them.
    pub context_ranks: u32,
    /// Milliseconds after which a stored block expires; 0 for never. Not part of the identity.
    pub ttl_ms: u64,
    /// Limit in bytes of storage for the blocks of the namespace, of all processes together; 0 for no limit. Not part
    /// of the identity.
    pub quota_bytes: u64,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_kv_description {
    const NAME: &str = "hoistway_kv_description";
    const FIRST_SIZE: usize = 120;
}

/// A namespace of a KV store. It keeps the store open.
pub struct hoistway_kv_namespace {
    pub(super) namespace: Namespace,
}

/// How to load or store blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_request {
    /// `sizeof(hoistway_kv_request)`.
    pub size: u64,
    /// Milliseconds that the request may take; 0 for the `timeout_ms` of the store.
    pub timeout_ms: u64,
    /// A device event, such as a `CUevent` or `hipEvent_t`, or 0. The memory is read or written after the event. It
    /// must live, and not be recorded again, until the ticket is released. The request fails if its items have memory
    /// of several vendors, or if they have no device memory and drivers of several vendors are loaded.
    pub wait_event: u64,
    /// `HOISTWAY_KV_NOTIFY` or 0.
    pub flags: u64,
    /// To store: number of shards of each block; 0 for 1.
    pub shards: u32,
    /// Must be 0.
    pub reserved: u32,
    /// To store: length in bytes of the longest shard of a block, if this request does not contain it; else 0.
    pub shard_bytes: u64,
    /// To store: milliseconds after which the blocks expire; 0 for the `ttl_ms` of the namespace.
    pub ttl_ms: u64,
}

// SAFETY: numbers, of which the first is the size.
unsafe impl Versioned for hoistway_kv_request {
    const NAME: &str = "hoistway_kv_request";
    const FIRST_SIZE: usize = 56;
}

/// Opens a namespace. If it is open already, its `ttl_ms` and `quota_bytes` are set anew. Free `blocks` with
/// `hoistway_kv_namespace_free`.
///
/// # Safety
/// `store` must be live, `description` readable for its size, `blocks` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_namespace_open(
    store: *const hoistway_kv,
    description: *const hoistway_kv_description,
    blocks: *mut *mut hoistway_kv_namespace,
) -> hoistway_status {
    let open = || {
        // SAFETY: as the caller says.
        let (kv, (description, options)) =
            unsafe { (held(store, "store")?, description_of(held(description, "description")?)?) };
        Ok(hoistway_kv_namespace { namespace: kv.store.namespace(&description, options)? })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(blocks, open) }
}

/// Frees a namespace. Its requests go on. NULL is allowed.
///
/// # Safety
/// `blocks` must be NULL or come from [`hoistway_kv_namespace_open`], and neither be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_namespace_free(blocks: *mut hoistway_kv_namespace) {
    // SAFETY: as the caller says.
    unsafe { handle::free(blocks) }
}

/// Sets `found`, for each key, to whether the store has the block.
///
/// # Safety
/// `blocks` must be live, `keys` be `count` keys, `found` have room for `count` answers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_lookup(
    blocks: *const hoistway_kv_namespace,
    keys: *const hoistway_kv_key,
    count: u64,
    found: *mut bool,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe {
        ask(blocks, keys, count, found, |namespace, keys, answers| {
            let found = namespace.lookup(keys)?;
            ptr::copy_nonoverlapping(found.as_ptr(), answers, found.len());
            Ok(())
        })
    }
}

/// Sets `length` to the number of blocks that the store has before the first missing one, in the order of `keys`.
///
/// # Safety
/// `blocks` must be live, `keys` be `count` keys, `length` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_lookup_prefix(
    blocks: *const hoistway_kv_namespace,
    keys: *const hoistway_kv_key,
    count: u64,
    length: *mut u64,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe {
        ask(blocks, keys, count, length, |namespace, keys, length| {
            length.write(namespace.lookup_prefix(keys)? as u64);
            Ok(())
        })
    }
}

/// Sets `index` to the position of the last key whose block the store has; `HOISTWAY_NOT_FOUND` if it has none of
/// them.
///
/// # Safety
/// `blocks` must be live, `keys` be `count` keys, `index` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_lookup_reverse(
    blocks: *const hoistway_kv_namespace,
    keys: *const hoistway_kv_key,
    count: u64,
    index: *mut u64,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe {
        ask(blocks, keys, count, index, |namespace, keys, index| {
            let last = namespace.lookup_reverse(keys)?;
            index.write(last.ok_or_else(|| Failure::not_found("the store has none of these blocks"))? as u64);
            Ok(())
        })
    }
}

/// Removes blocks, and sets `removed` to their number. With the layout "segments", blocks of other processes stay; with
/// "files" they are removed too.
///
/// # Safety
/// `blocks` must be live, `keys` be `count` keys, `removed` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_delete(
    blocks: *const hoistway_kv_namespace,
    keys: *const hoistway_kv_key,
    count: u64,
    removed: *mut u64,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe {
        ask(blocks, keys, count, removed, |namespace, keys, removed| {
            removed.write(namespace.delete(keys)? as u64);
            Ok(())
        })
    }
}

/// Starts to load shards of blocks. Each item succeeds or fails on its own. The call fails, and starts nothing, if an
/// argument of an item is invalid. `priority` is `HOISTWAY_DEMAND`, `HOISTWAY_PREFETCH` or `HOISTWAY_BACKGROUND`.
/// `request` may be NULL. Free `ticket` with `hoistway_kv_ticket_free`.
///
/// **The memory is the store's until the ticket is released.** A request releases its memory when it ends. After a
/// time-out or a cancellation, the operating system may go on writing to the memory for a while: see
/// [`hoistway_kv_ticket_wait_released`].
///
/// # Safety
/// `blocks` must be live. `items` must be `count` structures, readable for their size. Their keys and pieces must live
/// until the call returns. Their memory must live until the ticket is released, and nothing else may use it until
/// then. `request` must be NULL or readable for its size, `ticket` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_load(
    blocks: *const hoistway_kv_namespace,
    items: *const hoistway_kv_item,
    count: u64,
    priority: i32,
    request: *const hoistway_kv_request,
    ticket: *mut *mut hoistway_kv_ticket,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe {
        submit(blocks, items, count, priority, request, ticket, |namespace, request| namespace.load(request))
    }
}

/// Starts to store shards of blocks. A block can be found once all its shards are stored, by one request or several.
/// An item whose block the store already has ends as `HOISTWAY_KV_EXISTS`, which is no failure. Otherwise as
/// [`hoistway_kv_load`]: the store reads the memory until the ticket is released, and nothing may write to it until
/// then.
///
/// # Safety
/// As [`hoistway_kv_load`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_store(
    blocks: *const hoistway_kv_namespace,
    items: *const hoistway_kv_item,
    count: u64,
    priority: i32,
    request: *const hoistway_kv_request,
    ticket: *mut *mut hoistway_kv_ticket,
) -> hoistway_status {
    // SAFETY: as the caller says.
    unsafe {
        submit(blocks, items, count, priority, request, ticket, |namespace, request| namespace.store(request))
    }
}

/// # Safety
/// `blocks` must be live, `keys` be `count` keys; `answer` is as `work` needs it.
unsafe fn ask<T>(
    blocks: *const hoistway_kv_namespace,
    keys: *const hoistway_kv_key,
    count: u64,
    answer: *mut T,
    work: impl FnOnce(&Namespace, &[BorrowedKey<'_>], *mut T) -> Result<(), Failure>,
) -> hoistway_status {
    call(|| {
        // SAFETY: as the caller says.
        let (blocks, keys) = unsafe { (held(blocks, "namespace")?, borrow_keys(keys, count)?) };
        if answer.is_null() {
            return Err(Failure::argument("the output pointer for the answer is NULL"));
        }
        work(&blocks.namespace, keys, answer)
    })
}

/// # Safety
/// As [`hoistway_kv_load`].
unsafe fn submit(
    blocks: *const hoistway_kv_namespace,
    items: *const hoistway_kv_item,
    count: u64,
    priority: i32,
    request: *const hoistway_kv_request,
    ticket: *mut *mut hoistway_kv_ticket,
    start: impl FnOnce(&Namespace, Request) -> ::hoistway_kv::Result<Ticket>,
) -> hoistway_status {
    let submit = || {
        // SAFETY: as the caller says.
        let (blocks, items) = unsafe { (held(blocks, "namespace")?, borrow_items(items, count)?) };
        hoistway_kv_ticket::begin(items, |items, keep| {
            let mut asked = Request::new(items, keep).priority(priority_of(priority)?);
            // SAFETY: as the caller says.
            unsafe { with_manner(&mut asked, request)? };
            Ok(start(&blocks.namespace, asked)?)
        })
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(ticket, submit) }
}

/// # Safety
/// `request` must be NULL or as its size says.
unsafe fn with_manner(asked: &mut Request, request: *const hoistway_kv_request) -> Result<(), Failure> {
    if request.is_null() {
        return Ok(());
    }
    // SAFETY: as the caller says.
    let request = unsafe { versioned::read(request)? };
    if request.reserved != 0 {
        return Err(Failure::argument("hoistway_kv_request.reserved is not 0"));
    }
    if request.flags & !HOISTWAY_KV_NOTIFY != 0 {
        return Err(Failure::argument(format!(
            "hoistway_kv_request.flags has unknown bits: {:#x}",
            request.flags
        )));
    }
    if request.flags & HOISTWAY_KV_NOTIFY != 0 {
        asked.notify = Notify::EventFd;
    }
    asked.timeout = milliseconds(request.timeout_ms);
    asked.ttl = milliseconds(request.ttl_ms);
    asked.wait_event = set(request.wait_event);
    asked.shard_len = set(request.shard_bytes);
    asked.shards = request.shards.max(1);
    Ok(())
}

/// # Safety
/// `description` must be as its size says.
unsafe fn description_of(
    description: *const hoistway_kv_description,
) -> Result<(NamespaceDescription, NamespaceOptions), Failure> {
    // SAFETY: as the caller says.
    let given = unsafe { versioned::read(description)? };
    // SAFETY: a string, as the caller says.
    let word = |text: *const c_char| unsafe {
        Ok::<_, Failure>(text::borrow(text, "the description of a namespace")?.unwrap_or_default().to_owned())
    };
    // A rank without their number is one that cannot be.
    let rank = |rank: u32, size: u32| (size > 0 || rank > 0).then_some(Rank { rank, size });
    let mut description = NamespaceDescription::default()
        .model(word(given.model)?)
        .dtype(word(given.dtype)?)
        .layout(word(given.layout)?)
        .key_algorithm(word(given.key_algorithm)?)
        .salt(word(given.salt)?)
        .layers(given.layers)
        .kv_heads(given.kv_heads)
        .head_dim(given.head_dim)
        .block_tokens(given.block_tokens);
    description.tensor_parallel = rank(given.tensor_rank, given.tensor_ranks);
    description.pipeline_parallel = rank(given.pipeline_rank, given.pipeline_ranks);
    description.context_parallel = rank(given.context_rank, given.context_ranks);
    let pairs = usize::try_from(given.other_count).ok().and_then(|count| count.checked_mul(2));
    let others = match pairs {
        Some(0) => &[],
        // SAFETY: as many strings, as the caller says.
        Some(count) if !given.other.is_null() => unsafe { slice::from_raw_parts(given.other, count) },
        _ => return Err(Failure::argument("hoistway_kv_description.other is NULL or too long")),
    };
    description.other = others
        .chunks_exact(2)
        .map(|pair| Ok((word(pair[0])?, word(pair[1])?)))
        .collect::<Result<BTreeMap<_, _>, Failure>>()?;
    let mut options = NamespaceOptions::default();
    options.ttl = milliseconds(given.ttl_ms);
    options.quota_bytes = set(given.quota_bytes);
    Ok((description, options))
}
