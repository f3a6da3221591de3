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

/// `hoistway_kv_request.flags`: tell of the end by `hoistway_kv_event_fd` and `hoistway_kv_drain`, too.
pub const HOISTWAY_KV_NOTIFY: u64 = 1;

/// What must be equal for one process's blocks to be another's. Strings that are NULL are empty.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_description {
    /// `sizeof(hoistway_kv_description)`.
    pub size: u64,
    /// The model, by a name that changes when its weights do.
    pub model: *const c_char,
    /// Element type of the cache, such as "bfloat16".
    pub dtype: *const c_char,
    /// How a block's bytes are arranged.
    pub layout: *const c_char,
    /// How the engine makes keys of tokens.
    pub key_algorithm: *const c_char,
    /// A tenant's secret: hashed, never written down.
    pub salt: *const c_char,
    /// Whatever else tells blocks apart: a name, its value, the next name, and so on.
    pub other: *const *const c_char,
    /// Half as many strings as `other` has.
    pub other_count: u64,
    /// Layers that a block has parts of.
    pub layers: u32,
    /// Heads of keys and values, of this rank.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Which of the ranks that share each layer this is.
    pub tensor_rank: u32,
    /// How many these are; 0 where blocks are those of all ranks.
    pub tensor_ranks: u32,
    /// Which of the ranks that share the layers this is.
    pub pipeline_rank: u32,
    /// How many these are; 0 where blocks are those of all ranks.
    pub pipeline_ranks: u32,
    /// Which of the ranks that share the context this is.
    pub context_rank: u32,
    /// How many these are; 0 where blocks are those of all ranks.
    pub context_ranks: u32,
    /// Milliseconds that a block is kept after it was stored, at most; 0 for no limit. No part of the identity.
    pub ttl_ms: u64,
    /// Most bytes of storage that the blocks of the namespace take, of all processes together; 0 for no limit. No part of
    /// the identity.
    pub quota_bytes: u64,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_kv_description {
    const NAME: &str = "hoistway_kv_description";
    const FIRST_SIZE: usize = 120;
}

/// A namespace of a KV store, which it keeps open.
pub struct hoistway_kv_namespace {
    pub(super) namespace: Namespace,
}

/// How to load or store.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_kv_request {
    /// `sizeof(hoistway_kv_request)`.
    pub size: u64,
    /// Milliseconds that it may take; 0 for what the store says.
    pub timeout_ms: u64,
    /// An event of the device, such as a `CUevent` or `hipEvent_t`, or 0. Work on the device must have reached it before the
    /// memory is read or written. It must live, and not be recorded anew, until the ticket is released. If items have memory
    /// of several vendors, or of none while drivers of several are loaded, the request fails.
    pub wait_event: u64,
    /// `HOISTWAY_KV_NOTIFY` or 0.
    pub flags: u64,
    /// Stores: how many shards each block has; 0 for 1.
    pub shards: u32,
    /// 0.
    pub reserved: u32,
    /// Stores: length of the longest shard, if this request does not have it; else 0.
    pub shard_bytes: u64,
    /// Stores: milliseconds that the blocks are kept, at most; 0 for what the namespace says.
    pub ttl_ms: u64,
}

// SAFETY: numbers, of which the first is the size.
unsafe impl Versioned for hoistway_kv_request {
    const NAME: &str = "hoistway_kv_request";
    const FIRST_SIZE: usize = 56;
}

/// Opens a namespace. Opening it again sets its limits anew.
///
/// # Safety
/// `store` must be live, `description` as its size says, `blocks` writable.
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

/// Frees a namespace. Its requests go on. NULL is fine.
///
/// # Safety
/// `blocks` must come from [`hoistway_kv_namespace_open`], and not be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_kv_namespace_free(blocks: *mut hoistway_kv_namespace) {
    // SAFETY: as the caller says.
    unsafe { handle::free(blocks) }
}

/// Tells for each key whether its block is there, by `found`.
///
/// # Safety
/// `blocks` must be live, `keys` be `count` keys, `found` have room for as many answers.
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

/// Tells how many of these blocks, from the first on, are there without a gap.
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

/// Tells which is the last of these blocks that is there; `HOISTWAY_NOT_FOUND` if none is.
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
            index.write(last.ok_or_else(|| Failure::not_found("none of these blocks is there"))? as u64);
            Ok(())
        })
    }
}

/// Removes blocks, as far as this process stored them. Tells how many were removed by `removed`.
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

/// Starts to load shards of blocks. Each item succeeds or fails for itself; this call fails, and starts nothing, if an item
/// makes no sense. `priority` is `HOISTWAY_DEMAND`, `HOISTWAY_PREFETCH` or `HOISTWAY_BACKGROUND`; `request` may be NULL.
///
/// **The memory is the store's until the ticket is released.** Every end but a time-out or a cancellation releases it; after
/// these, the system may go on writing to it for a while: see [`hoistway_kv_ticket_wait_released`].
///
/// # Safety
/// `blocks` must be live; `items` be `count` structures as their size says, with keys and pieces that live until this
/// returns, and memory that lives, and that nothing else uses, until the ticket is released; `request` must be NULL or as
/// its size says, `ticket` writable.
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

/// Starts to store shards of blocks. A block is found once all its shards were stored, by this request or several. Items of
/// blocks that are there already end as `HOISTWAY_KV_EXISTS`, which is no failure. Else as [`hoistway_kv_load`]: the store
/// reads the memory until the ticket is released, and nothing may write to it until then.
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
            return Err(Failure::argument("there is no place for the answer: the pointer is NULL"));
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
        return Err(Failure::argument("the member 'reserved' of the request is not 0"));
    }
    if request.flags & !HOISTWAY_KV_NOTIFY != 0 {
        return Err(Failure::argument(format!("there are no flags {:#x} of a request", request.flags)));
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
    let rank = |rank: u32, size: u32| (size > 0).then_some(Rank { rank, size });
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
        _ => return Err(Failure::argument("the member 'other' of the description is NULL")),
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
