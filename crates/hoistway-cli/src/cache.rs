//! `hoistway cache`.

use crate::{
    arguments::{Cache, CacheChoice, CacheWarm},
    failure::Failure,
    output,
};
use bytesize::ByteSize;
use hoistway::{
    Checkpoint, Error, LoadOptions, Report, Route, StreamOptions,
    cache::{CacheEntry, Collected, NodeCache},
    counted,
};
use serde_json::json;
use std::{collections::BTreeMap, time::SystemTime};

/// Tensors in memory at a time.
const IN_FLIGHT_BYTES: u64 = 256 << 20;
/// Passes over a checkpoint: each brings what the drive was too slow for in the one before.
const MOST_PASSES: usize = 20;

pub(crate) fn run(what: &Cache) -> Result<(), Failure> {
    match what {
        Cache::Stat(choice) => stat(choice),
        Cache::Ls(choice) => list(choice),
        Cache::Verify(choice) => verify(choice),
        Cache::Gc(choice) => collect(choice),
        Cache::Warm(arguments) => warm(arguments),
    }
}

fn missing() -> Failure {
    Failure::told("no cache was named: name its directory with --cache or HOISTWAY_CACHE", 2)
}

fn opened(choice: &CacheChoice) -> Result<NodeCache, Failure> {
    NodeCache::chosen_existing(choice.cache.as_deref(), choice.cache_bytes)?.ok_or_else(missing)
}

fn stat(choice: &CacheChoice) -> Result<(), Failure> {
    let cache = opened(choice)?;
    let entries = cache.entries()?;
    let taken: u64 = entries.iter().map(|entry| entry.taken_bytes).sum();
    let most = cache.max_bytes()?;
    if choice.json {
        let directory = cache.directory();
        return output::write_json(
            &json!({"directory": directory, "objects": entries.len(), "taken_bytes": taken, "max_bytes": most}),
        );
    }
    let objects = counted(entries.len(), "object", "objects");
    output::write_text(&format!("{objects}, {} of {}", ByteSize(taken), ByteSize(most)))
}

fn list(choice: &CacheChoice) -> Result<(), Failure> {
    let entries = opened(choice)?.entries()?;
    if choice.json {
        return output::write_json(&BTreeMap::from([("objects", entries)]));
    }
    let line = |entry: &CacheEntry| {
        let idle = SystemTime::now().duration_since(entry.last_use).unwrap_or_default().as_secs();
        let (taken, len) = (ByteSize(entry.taken_bytes).to_string(), ByteSize(entry.len).to_string());
        format!("{taken:>10} of {len:>10}  used {idle:>8} s ago  {}", entry.url)
    };
    output::write_text(&entries.iter().map(line).collect::<Vec<_>>().join("\n"))
}

fn verify(choice: &CacheChoice) -> Result<(), Failure> {
    let found = opened(choice)?.verify()?;
    if choice.json {
        return output::write_json(&found);
    }
    let mut text = format!("{} match their checksums", ByteSize(found.bytes));
    if found.damaged_blocks > 0 {
        let blocks = counted(found.damaged_blocks, "damaged block was", "damaged blocks were");
        text += &format!("; {blocks} removed, of {}", found.damaged.join(", "));
    }
    output::write_text(&text)
}

fn collect(choice: &CacheChoice) -> Result<(), Failure> {
    let cache = match opened(choice) {
        // A job may run before the first load.
        Err(Failure::Hoistway(Error::NotFound { .. })) if choice.json => {
            return output::write_json(&Collected::default());
        }
        Err(Failure::Hoistway(error @ Error::NotFound { .. })) => {
            return output::write_text(&format!("{error}: nothing to evict"));
        }
        cache => cache?,
    };
    let done = cache.collect(choice.cache_bytes)?;
    if choice.json {
        return output::write_json(&done);
    }
    let objects = counted(done.entries, "object", "objects");
    let (evicted, left) = (ByteSize(done.bytes), ByteSize(done.left_bytes));
    output::write_text(&format!("{objects} evicted, {evicted}; {left} are left"))
}

/// Loads the checkpoint until all of it comes from the cache.
fn warm(arguments: &CacheWarm) -> Result<(), Failure> {
    let options = arguments.paths.options()?;
    let cache = options.cache.clone().ok_or_else(missing)?;
    let checkpoint = Checkpoint::open_with(&arguments.paths.paths, &options)?;
    let (mut before, mut report) = (u64::MAX, pass(&checkpoint, &cache)?);
    for _ in 1..MOST_PASSES {
        let rest = from_store(&report);
        if rest == 0 || rest >= before {
            break;
        }
        before = rest;
        report = pass(&checkpoint, &cache)?;
    }
    let lacking = from_store(&report);
    let bytes = ByteSize(report.tensor_bytes);
    let written = if arguments.json {
        output::write_json(&json!({
            "tensor_bytes": report.tensor_bytes, "lacking_bytes": lacking, "notes": report.notes
        }))
    } else if lacking == 0 {
        output::write_text(&format!("all {bytes} are in the cache"))
    } else if report.notes.is_empty() {
        Ok(())
    } else {
        output::write_text(&report.notes.iter().map(|note| format!("note: {note}\n")).collect::<String>())
    };
    // A reader that stops early still gets the verdict.
    if lacking > 0 {
        return Err(Failure::told(format!("the cache does not hold {} of {bytes}", ByteSize(lacking)), 1));
    }
    written
}

/// Bytes of tensors that came from the store.
fn from_store(report: &Report) -> u64 {
    let others = report.carriers.iter().filter(|carrier| carrier.route != Route::NodeCache);
    others.map(|carrier| carrier.tensor_bytes).sum()
}

/// Loads all tensors one after the other, and drops them.
fn pass(checkpoint: &Checkpoint, cache: &NodeCache) -> Result<Report, Failure> {
    let stream = StreamOptions::default().max_in_flight_bytes(IN_FLIGHT_BYTES);
    let mut loading = checkpoint.stream(&LoadOptions::default(), &stream)?;
    let bar = output::progress_bar(loading.progress().bytes_total);
    let result: hoistway::Result<()> =
        loading.by_ref().try_for_each(|tensor| tensor.map(|loaded| bar.inc(loaded.len_bytes())));
    bar.finish_and_clear();
    result?;
    cache.flush();
    Ok(loading.report())
}
